"""Universal logit distillation from a teacher with another tokenizer (arXiv:2402.12030, equation 6).

    c cross-entropy(labels) + w W(teacher, student)

W compares sorted probabilities (`ops.sorted_distance`) where tokens of teacher and student end at the same byte
(`data.distillation.across`). The tokens between two such bytes are a group. In a group of several tokens, the distribution over the
last token is multiplied by the probabilities of the earlier tokens of the text. By the chain rule these products are joint
probabilities. TRL calls this `bayesian` (GOLD, `uld_token_merge_strategy`). Both sums are divided by the number of targets.

With `hybrid`, tokens that both vocabularies have (`data.tokenizers.matched`) are compared one to one, and all others sorted:

    W = m D(teacher, student over the tokens of both) + (1 - m) sorted distance of the others

D is the divergence of GKD with `beta`, over probabilities that sum to less than 1; each is at least 1e-8. m is the setting `matched`.

Difference from the paper: the paper compares the i-th token of one answer with the i-th token of the other, wherever they are in the
text. Differences from TRL's GOLD (1.16): sums over groups are divided by the targets of the batch, not by the groups of each answer.
The ends of answers are compared too, as with TRL's `uld_skip_student_eos=False`. TRL matches tokens by their names in the vocabulary,
so no token with a space matches between SentencePiece and byte-level BPE. If all tokens of one side are matched, TRL ignores the
unmatched tokens of the other side.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.settings import Also
from argosy.train.objectives.distillation.teacher import ROLE, TeacherObjective
from argosy.train.objectives.objective import Needs, TokenObjective

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from argosy.data.batch import Fields
    from argosy.data.tokenizers.matched import Matched
    from argosy.train.objectives.loss import Loss, Models

# Probabilities of tokens of both vocabularies are at least this, as in TRL.
LEAST = 1e-8
_ENDS = {0.0: "forward", 1.0: "reverse"}


class ULD(TeacherObjective):
    """Universal logit distillation (arXiv:2402.12030): a teacher with another tokenizer reads the same text, and where both tokenize it
    into the same bytes the student's probabilities, sorted, go to the teacher's."""

    needs: ClassVar[Needs] = Needs(metrics=("uld", "aligned"))

    cross_entropy: Annotated[float, Also("uld_crossentropy_weight")] = Field(1.0, ge=0)
    """Weight of the cross-entropy with the labels. It is 1 in the paper, 0 in TRL's GOLD."""
    weight: Annotated[float, Also("uld_distillation_weight")] = Field(1.5, gt=0)
    """Weight of the distance of sorted probabilities; 1.5 in the paper."""
    temperature: Annotated[float, Also("uld_student_temperature", "uld_teacher_temperature")] = Field(1.0, gt=0)
    """Both distributions are softmax(logits / temperature)."""
    hybrid: Annotated[bool, Also("uld_use_hybrid_loss")] = False
    """Whether tokens with the same bytes in both vocabularies are compared one to one, and only the others sorted. The start of a run
    reports how many there are.
    """
    matched: Annotated[float | None, Also("uld_hybrid_matched_weight", note="uld_hybrid_unmatched_weight is 1 minus it")] = Field(
        None, ge=0, le=1
    )
    """Weight of the one-to-one tokens in a hybrid distance; the sorted tokens have the rest. None: their share of the teacher's
    vocabulary, as in TRL's GOLD.
    """
    beta: float = Field(0.5, ge=0, le=1)
    """Share of the teacher in the mixture of the generalized Jensen-Shannon divergence, by which a hybrid distance compares one-to-one
    tokens; 0 is KL(teacher || student), 1 KL(student || teacher).
    """
    teacher_sequence: int | None = Field(None, gt=1)
    """Number of teacher tokens in a row. None: twice `data.sequence`, at most the teacher's context. Tokens beyond it are not learned
    from the teacher, which the metric `aligned` shows.
    """
    chunk: int = Field(1024, gt=0)
    """Number of tokens whose distributions are compared at once on each device."""

    @model_validator(mode="after")
    def _hybrid_reads_them(self) -> "ULD":
        for name in ("matched", "beta"):
            if not self.hybrid and name in self.model_fields_set and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {getattr(self, name):g} with hybrid = false: objective.hybrid=true reads it")
        return self

    def reads(self) -> "Fields":
        from argosy.data.distillation.across import FIELDS as OF_BOTH
        from argosy.train.objectives.tokens import FIELDS

        return {**FIELDS, **OF_BOTH}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        return uld(self, models, batch)


def uld(settings: ULD, models: "Models", batch: "dict[str, Array]") -> "Loss":
    """Computes the loss of a batch."""
    import jax
    import jax.numpy as jnp

    from argosy.models.parts.attention.attend import Packed
    from argosy.train.objectives.loss import Loss, WeightedMean
    from argosy.train.objectives.routers import with_routers
    from argosy.train.objectives.tokens import losses

    model, teacher = models["model"], models[ROLE]
    x, _, aux = model.hidden(batch["tokens"], Packed(batch["segments"]))
    y = jax.lax.stop_gradient(teacher.hidden(batch["teacher_tokens"], Packed(batch["teacher_segments"]))[0])
    by = TokenObjective(chunk=settings.chunk)
    nll, _ = losses(by, model, x, batch["targets"])
    mask, last = batch["mask"], batch["last"] > 0
    weight = jnp.sum(mask)
    logps = -nll if settings.temperature == 1 else -losses(by, model, x, batch["targets"], settings.temperature)[0]
    teacher_logps = -losses(by, teacher, y, batch["teacher_targets"], settings.temperature)[0]
    at = batch["teacher_last"]
    earlier = _earlier_logps(logps, batch["group"], last)
    # Groups have the same numbers in both; the student's last target of a group is the only one that is read.
    summed = _of_group(teacher_logps, batch["teacher_group"], batch["group"])
    teacher_before = jax.lax.stop_gradient(summed - jnp.take_along_axis(teacher_logps, at, 1))
    terms = _distances(settings, models, x, jnp.take_along_axis(y, at[..., None], 1), earlier, teacher_before)
    counted = jnp.where(last, mask, 0.0)
    sums = {name: jnp.sum(jnp.where(last, counted.astype(each.dtype) * each, 0.0)) for name, each in terms.items()}
    cross_entropy = jnp.sum(nll * mask.astype(nll.dtype))
    metrics = {
        "cross_entropy": WeightedMean(cross_entropy, weight),
        **{name: WeightedMean(total, jnp.sum(counted)) for name, total in sums.items()},
        "aligned": WeightedMean(jnp.sum(jnp.where(batch["group"] > 0, mask, 0.0)), weight),
    }
    labels = jnp.sum(nll * batch["labels"].astype(nll.dtype)) if "labels" in batch else cross_entropy
    total = settings.cross_entropy * labels + settings.weight * sums["uld"]
    return with_routers(Loss(WeightedMean(total, weight), metrics), model, aux, jnp.sum(mask, 1))


def _of_group(
    values: "Float[Array, 'B U']", group: "Int[Array, 'B U']", target_group: "Int[Array, 'B T']"
) -> "Float[Array, 'B T']":
    """Sums values over groups.

    Args:
        values: the value of each token.
        group: the number of each token's group, from 1; at most T.
        target_group: the group whose sum is returned at each target.
    """
    import jax
    import jax.numpy as jnp

    most = target_group.shape[1] + 1
    summed = jax.vmap(lambda row, number: jax.ops.segment_sum(row, number, most))(jnp.where(group > 0, values, 0.0), group)
    return jnp.take_along_axis(summed, target_group, 1)


def _earlier_logps(logps: "Float[Array, 'B T']", group: "Int[Array, 'B T']", last: "Array") -> "Float[Array, 'B T']":
    """Computes, at the last target of each group, the sum of the log-probabilities of the group's earlier targets."""
    import jax.numpy as jnp

    return _of_group(jnp.where(last, 0.0, logps), group, group)


def _distances(
    settings: ULD,
    models: "Models",
    x: "Float[Array, 'B T D']",
    y: "Float[Array, 'B T E']",
    before: "Float[Array, 'B T']",
    teacher_before: "Float[Array, 'B T']",
) -> "dict[str, Float[Array, 'B T']]":
    """Computes the distance at each target: `uld`, and with `hybrid` also its terms.

    Args:
        x, y: the inputs of the heads of student and teacher at each target.
        before, teacher_before: the log-probability of the earlier tokens of the group, by which the distributions are multiplied.
    """
    import jax
    import jax.numpy as jnp

    from argosy.ops.cross_entropy import by_chunks
    from argosy.ops.precision import wide
    from argosy.ops.sorted_distance import sorted_distance
    from argosy.train.objectives.tokens import rows_at_once

    def of_rows(x: "Array", y: "Array", before: "Array", teacher_before: "Array") -> "dict[str, Array]":
        p = jax.nn.softmax(wide(models["model"].unembed(x[:, None])[:, 0]) / settings.temperature, -1) * jnp.exp(before)[:, None]
        q = jax.nn.softmax(wide(jax.lax.stop_gradient(models[ROLE].unembed(y[:, None])[:, 0])) / settings.temperature, -1)
        q = q * jnp.exp(teacher_before)[:, None]
        return hybrid(settings, p, q, models[ROLE].matched) if settings.hybrid else {"uld": sorted_distance(p, q)}

    flat = [a.reshape(-1, *a.shape[2:]) for a in (x, y, before, teacher_before)]
    terms = by_chunks(of_rows, min(rows_at_once(settings.chunk, before.shape), before.size), *flat)
    return {name: each.reshape(before.shape) for name, each in terms.items()}


def hybrid(settings: ULD, p: "Float[Array, 'R V']", q: "Float[Array, 'R U']", matched: "Matched") -> "dict[str, Float[Array, 'R']]":
    """Computes the hybrid distance, which compares tokens of both vocabularies one to one and all others sorted.

    Args:
        p, q: the probabilities of student and teacher.
        matched: the tokens that both vocabularies have.
    """
    import jax.numpy as jnp
    import numpy as np

    from argosy.ops.divergence import DIVERGENCES
    from argosy.ops.sorted_distance import sorted_distance

    student_ids, teacher_ids = matched.ids
    others = (np.setdiff1d(np.arange(of.shape[1]), ids) for of, ids in ((p, student_ids), (q, teacher_ids)))
    matched_logps = (jnp.log(jnp.maximum(of[:, ids], LEAST)) for of, ids in ((p, student_ids), (q, teacher_ids)))
    share = len(matched) / q.shape[1] if settings.matched is None else settings.matched
    same = DIVERGENCES[_ENDS.get(settings.beta, "jsd")](*matched_logps, settings.beta)
    rest = sorted_distance(*(of[:, ids] for of, ids in zip((p, q), others)))
    return {"uld": share * same + (1 - share) * rest, "matched": same, "unmatched": rest}
