"""Universal logit distillation: a teacher with another tokenizer, whose tokens are not the student's (arXiv:2402.12030, equation 6).

    c cross-entropy(labels) + w W(teacher, student)

W compares sorted probabilities (`ops.sorted_distance`) where tokens of both end at the same byte (`data.distillation.across`). Of a
group of several tokens, the distribution over the last one is multiplied by the probabilities of the earlier ones, as they are in the
text: by the chain rule these are joint probabilities of the text so far and the last token. TRL calls this `bayesian` (GOLD,
`uld_token_merge_strategy`). Both sums are divided by the number of targets.

With `hybrid` tokens that both vocabularies have (`data.tokenizers.matched`) are compared as themselves, and the others sorted:

    W = m D(teacher, student over the tokens of both) + (1 - m) sorted distance of the others

D is the divergence of GKD with `beta`, over probabilities that sum to less than 1; each is at least 1e-8. m is the setting `matched`.

Differences from the paper: it compares the i-th token of one answer with the i-th of the other, wherever they are in the text. From
TRL's GOLD (1.16): sums over groups are divided by the targets of the batch, not by the groups of each answer; the ends of answers are
compared too, as `uld_skip_student_eos=False` does there. There tokens match by their names in the vocabulary, so that none with a space
matches between SentencePiece and byte-level BPE; and where one side has no others, those of the other side count for nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.data.batch import Field, Fields
from argosy.data.distillation.across import FIELDS as OF_BOTH
from argosy.data.tokenizers.matched import Matched
from argosy.models.parts.attend import Packed
from argosy.ops.cross_entropy import by_chunks
from argosy.ops.divergence import DIVERGENCES
from argosy.ops.precision import wide
from argosy.ops.sorted_distance import sorted_distance
from argosy.train.distillation import ULD
from argosy.train.objectives import Loss, Models, WeightedMean
from argosy.train.objectives.next_token import FIELDS as OF_TOKENS
from argosy.train.objectives.next_token import losses
from argosy.train.objectives.routers import with_routers
from argosy.train.settings import OfTokens

ROLE = "teacher"
# Probabilities of tokens of both vocabularies are at least this, as in TRL.
LEAST = 1e-8
ENDS = {0.0: "forward", 1.0: "reverse"}
FIELDS: Fields = {**OF_TOKENS, **OF_BOTH}
# Of answers that may be the student's own: the weight of each target's label, 0 in these.
OF_ANSWERS: Fields = {"labels": Field("B T", np.float32)}


def loss(how: ULD, models: Models, batch: dict[str, Array]) -> Loss:
    """Computes the objective."""
    model, teacher = models["model"], models[ROLE]
    x, _, aux = model.hidden(batch["tokens"], Packed(batch["segments"]))
    y = jax.lax.stop_gradient(teacher.hidden(batch["teacher_tokens"], Packed(batch["teacher_segments"]))[0])
    by = OfTokens(chunk=how.chunk)
    nll, _ = losses(by, model, x, batch["targets"])
    mask, last = batch["mask"], batch["last"] > 0
    weight = jnp.sum(mask)
    ours = -nll if how.temperature == 1 else -losses(by, model, x, batch["targets"], how.temperature)[0]
    theirs = -losses(by, teacher, y, batch["teacher_targets"], how.temperature)[0]
    at = batch["teacher_last"]
    earlier = before(ours, batch["group"], last)
    # Groups have the same numbers in both; the student's last target of a group is the only one that is read.
    known = jax.lax.stop_gradient(of_group(theirs, batch["teacher_group"], batch["group"]) - jnp.take_along_axis(theirs, at, 1))
    found = distances(how, models, x, jnp.take_along_axis(y, at[..., None], 1), earlier, known)
    counted = jnp.where(last, mask, 0.0)
    sums = {name: jnp.sum(jnp.where(last, counted.astype(each.dtype) * each, 0.0)) for name, each in found.items()}
    cross_entropy = jnp.sum(nll * mask.astype(nll.dtype))
    metrics = {
        "cross_entropy": WeightedMean(cross_entropy, weight),
        **{name: WeightedMean(total, jnp.sum(counted)) for name, total in sums.items()},
        "aligned": WeightedMean(jnp.sum(jnp.where(batch["group"] > 0, mask, 0.0)), weight),
    }
    labels = jnp.sum(nll * batch["labels"].astype(nll.dtype)) if "labels" in batch else cross_entropy
    total = how.cross_entropy * labels + how.weight * sums["uld"]
    return with_routers(Loss(WeightedMean(total, weight), metrics), model, aux, jnp.sum(mask, 1))


def of_group(
    values: Float[Array, "B U"], group: Int[Array, "B U"], wanted: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """For each wanted group of a row, the sum of the values in it. Groups are numbered from 1; there are at most T."""
    most = wanted.shape[1] + 1
    summed = jax.vmap(lambda row, number: jax.ops.segment_sum(row, number, most))(jnp.where(group > 0, values, 0.0), group)
    return jnp.take_along_axis(summed, wanted, 1)


def before(logps: Float[Array, "B T"], group: Int[Array, "B T"], last: Array) -> Float[Array, "B T"]:
    """At the last target of each group, the log-probability of its earlier ones."""
    return of_group(jnp.where(last, 0.0, logps), group, group)


def distances(
    how: ULD, models: Models, x: Float[Array, "B T D"], y: Float[Array, "B T E"], ours: Float[Array, "B T"], theirs: Float[Array, "B T"]
) -> dict[str, Float[Array, "B T"]]:
    """The distance at each target, of distributions times the probabilities of what came before in their groups: `uld`, and with
    `hybrid` what it is made of."""

    def of_rows(x: Array, y: Array, ours: Array, theirs: Array) -> dict[str, Array]:
        p = jax.nn.softmax(wide(models["model"].unembed(x[:, None])[:, 0]) / how.temperature, -1) * jnp.exp(ours)[:, None]
        q = jax.nn.softmax(wide(jax.lax.stop_gradient(models[ROLE].unembed(y[:, None])[:, 0])) / how.temperature, -1)
        q = q * jnp.exp(theirs)[:, None]
        return hybrid(how, p, q, models[ROLE].matched) if how.hybrid else {"uld": sorted_distance(p, q)}

    flat = [a.reshape(-1, *a.shape[2:]) for a in (x, y, ours, theirs)]
    found = by_chunks(of_rows, min(how.chunk, ours.size), *flat)
    return {name: each.reshape(ours.shape) for name, each in found.items()}


def hybrid(how: ULD, p: Float[Array, "R V"], q: Float[Array, "R U"], matched: Matched) -> dict[str, Float[Array, "R"]]:
    """The distance that compares tokens of both vocabularies as themselves."""
    ours, theirs = matched.ids
    others = (np.setdiff1d(np.arange(of.shape[1]), ids) for of, ids in ((p, ours), (q, theirs)))
    known = (jnp.log(jnp.maximum(of[:, ids], LEAST)) for of, ids in ((p, ours), (q, theirs)))
    share = len(matched) / q.shape[1] if how.matched is None else how.matched
    same = DIVERGENCES[ENDS.get(how.beta, "jsd")](*known, how.beta)
    rest = sorted_distance(*(of[:, ids] for of, ids in zip((p, q), others)))
    return {"uld": share * same + (1 - share) * rest, "matched": same, "unmatched": rest}
