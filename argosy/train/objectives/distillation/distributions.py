"""Compares a student's distributions with a teacher's, at every target that counts.

The vocabularies of teacher and student may be padded to different sizes. Ids that the student lacks are left out of the teacher's
distribution. Ids that the teacher lacks have probability 0 in it, so the student unlearns ids that stand for no token.

The logits of both models are the largest arrays of the step. Either all of them exist at once, or only those of some rows at a time
(the setting `head`).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.data.batch import Field, Fields
from argosy.ops.cross_entropy import by_chunks
from argosy.ops.divergence import DIVERGENCES, Top, coarse, forward, log_probs, resize_vocab
from argosy.ops.precision import wide
from argosy.parallel.scope import axis_sizes
from argosy.train.beside import PROJECTION
from argosy.train.objectives.distillation.layers import hidden_term, layer_states, relation_terms
from argosy.train.objectives.distillation.teacher import ROLE, DivergenceObjective
from argosy.train.objectives.loss import Loss, Models, WeightedMean
from argosy.train.objectives.routers import with_routers
from argosy.train.objectives.tokens import ROOMY_BYTES, rows_at_once

# The teacher's likeliest tokens, k a target, their log-probabilities, and that of all others together.
CACHED: Fields = {
    "teacher_ids": Field("B T k", np.int32),
    "teacher_logps": Field("B T k", np.float32),
    "teacher_rest": Field("B T", np.float32),
}
# The terms of each target by name: the divergence, KL(teacher || student), the cross-entropy of the label, and whether the likeliest
# tokens of student and teacher agree.
TargetTerms = dict[str, Float[Array, "*R"]]


def distillation_loss(settings: DivergenceObjective, models: Models, batch: dict[str, Array]) -> Loss:
    """Computes the loss of a batch. The equation is in `train.objectives.distillation.distill`."""
    model, terms, share = models["model"], settings.layer_terms, settings.label_share
    x, student, aux = layer_states(terms, model, batch)
    teacher = []
    if settings.roles[ROLE] == "cached":
        teacher_outputs = [batch[name] for name in CACHED]
    else:
        last, teacher, _ = jax.lax.stop_gradient(layer_states(terms, models[ROLE], batch))
        teacher_outputs = [last]
    of_targets = _compared(settings, models, x, batch, teacher_outputs)
    if terms.hidden != "none":
        project = getattr(model, PROJECTION, lambda a: a)
        of_targets["hidden"] = hidden_term(terms, project, student, teacher, (x, teacher_outputs[0]))
    of_targets |= relation_terms(terms, student, teacher, batch["segments"])
    mask = batch["mask"]
    weight = jnp.sum(mask)
    sums = {name: jnp.sum(jnp.where(mask > 0, mask.astype(values.dtype) * values, 0.0)) for name, values in of_targets.items()}
    soft = settings.temperature**2 * sums.pop("divergence")
    total = (1 - share) * soft + share * sums["cross_entropy"]
    if "hidden" in sums:
        total = total + terms.hidden_weight * sums["hidden"]
    for name, relation_weight in terms.relations.items():
        total = total + relation_weight * sums[f"relations/{name}"]
    metrics = {name: WeightedMean(value, weight) for name, value in sums.items()}
    return with_routers(Loss(WeightedMean(total, weight), metrics), model, aux, jnp.sum(mask, 1))


def _compared(
    settings: DivergenceObjective, models: Models, x: Float[Array, "B T D"], batch: dict[str, Array], teacher_outputs: list[Array]
) -> TargetTerms:
    """Computes the terms of each target, [B T] each.

    Args:
        x: the input of the student's head.
        teacher_outputs: the input of the teacher's head, or the arrays of its cached likeliest tokens (`CACHED`).
    """
    model, teacher_model, targets = models["model"], models.get(ROLE), batch["targets"]

    def of_rows(x: Array, targets: Array, *teacher_outputs: Array) -> TargetTerms:
        """Computes the terms of rows [R ...], each [R]."""
        rows = [a[:, None] for a in (x, *teacher_outputs)] if teacher_model is not None else [x[:, None]]
        student = model.unembed(rows[0])[:, 0]
        if teacher_model is None:
            return _of_top(settings, student, targets, Top(*teacher_outputs))
        return of_logits(settings, student, jax.lax.stop_gradient(teacher_model.unembed(rows[1]))[:, 0], targets)

    if in_chunks(settings, models, targets.size):
        flat = [a.reshape(-1, *a.shape[2:]) for a in (x, targets, *teacher_outputs)]
        compared = by_chunks(of_rows, min(rows_at_once(settings.chunk, targets.shape), targets.size), *flat)
        return {name: values.reshape(targets.shape) for name, values in compared.items()}
    # Kept for the backward pass are the logits alone, not every array that is made of them.
    student = model.unembed(x)
    if teacher_model is None:
        return jax.checkpoint(partial(_of_top, settings))(student, targets, Top(*teacher_outputs))
    teacher = jax.lax.stop_gradient(teacher_model.unembed(teacher_outputs[0]))
    return jax.checkpoint(partial(of_logits, settings))(student, teacher, targets)


def in_chunks(settings: DivergenceObjective, models: Models, targets: int) -> bool:
    """Whether only the logits of some rows exist at a time."""
    if settings.head != "auto":
        return settings.head == "chunks"
    wide_as = sum(model.config.vocab for model in models.values())
    return 4 * targets * wide_as > ROOMY_BYTES * math.prod(axis_sizes().values())


def of_logits(
    settings: DivergenceObjective, student: Float[Array, "*R V"], teacher: Float[Array, "*R U"], targets: Int[Array, "*R"]
) -> TargetTerms:
    """Computes the terms of targets from the logits of student and teacher."""
    teacher = resize_vocab(teacher, student.shape[-1])
    logps, teacher_logps = log_probs(student, settings.temperature), log_probs(teacher, settings.temperature)
    return _divergence_terms(settings, logps, teacher_logps) | _of_labels(student, targets, jnp.argmax(teacher, -1))


def _of_top(settings: DivergenceObjective, student: Float[Array, "*R V"], targets: Int[Array, "*R"], top: Top) -> TargetTerms:
    """Computes the terms of targets from the student's logits and the teacher's likeliest tokens. The teacher's log-probabilities must
    be at the temperature of the settings."""
    logps = coarse(student, top.ids, settings.temperature)
    return _divergence_terms(settings, logps, top.outcomes) | _of_labels(student, targets, top.ids[..., 0])


def _divergence_terms(settings: DivergenceObjective, student: Array, teacher: Array) -> TargetTerms:
    """Computes the divergence of two distributions, and KL(teacher || student), from log-probabilities of the same outcomes."""
    kl = forward(student, teacher)
    same = settings.divergence == "forward"
    return {"divergence": kl if same else DIVERGENCES[settings.divergence](student, teacher, settings.beta), "kl": kl}


def _of_labels(student: Float[Array, "*R V"], targets: Int[Array, "*R"], likeliest: Int[Array, "*R"]) -> TargetTerms:
    """Computes the cross-entropy of the labels, and whether the student's likeliest token is the teacher's.

    Args:
        targets: the labels.
        likeliest: the teacher's likeliest token.
    """
    logits = wide(student)
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return {"cross_entropy": nll, "agreement": (jnp.argmax(logits, -1) == likeliest).astype(jnp.float32)}
