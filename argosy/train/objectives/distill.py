"""Distillation: the student's next-token distribution goes to the teacher's, at every target that counts.

    (1 - c) T^2 D(teacher, student) + c cross-entropy(labels) [+ w H(teacher, student)] [+ sum of a R(teacher, student)]

D is a divergence at temperature T (`ops.divergence`), c the setting `cross_entropy`. The factor T^2 is that of Hinton et al.
(arXiv:1503.02531, section 2): gradients of soft targets shrink as 1/T^2, so that without it c would mean something else at every
temperature. DistilBERT (arXiv:1910.01108) has it too; TRL's GKDTrainer and torchtune have not. At T = 1 it makes no difference.

H, if asked for, is over the last hidden states, the input of the head, or over the outputs of pairs of layers, of which it is the mean:
1 - cosine, as DistilBERT has it, or the mean squared difference over features, as TinyBERT has it (arXiv:1909.10351, equation 8, there
summed over layers). Where widths differ, the student's go through a learned projection first (`train.projection`).

R, if asked for, is the divergence of relations within layers (`ops.relations`), of the last layers (MiniLM, arXiv:2002.10957) or of
pairs of layers, of which it is the mean. It counts at the tokens whose targets count.

Differences from TRL's GKDTrainer (1.9): sums over targets are divided by the weight of the whole batch, as TRL does where it knows the
number of items; its `batchmean` is the mean over the targets of a micro-batch. Its beta of 0 and 1 are `forward` and `reverse`; between
them the mixture is the same. Its cached top-k is for servers alone, and its tail 1 minus the sum of the others.

A teacher's vocabulary may be padded further than the student's or less far. What the student lacks is left out of the teacher's
distribution; what the teacher lacks has probability 0 there, so that the student unlearns ids that stand for no token.

The logits of both are the largest arrays of the step: each exists once, or some rows at a time (`head`).
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.data.batch import Field, Fields
from argosy.models.parts.attend import Packed
from argosy.models.parts.stack.watch import KEYS, OUTPUT, QUERIES, VALUES, WatchedAttend
from argosy.ops.cross_entropy import by_chunks
from argosy.ops.divergence import DIVERGENCES, Top, coarse, forward, log_probs, over
from argosy.ops.precision import wide
from argosy.ops.relations import Sides, relation_divergence
from argosy.parallel.scope import axis_sizes
from argosy.train.beside import PROJECTION
from argosy.train.distillation import GKD, Distill
from argosy.train.objectives import Loss, Models, WeightedMean
from argosy.train.objectives.next_token import FIELDS as OF_TOKENS
from argosy.train.objectives.next_token import ROOMY_BYTES
from argosy.train.objectives.routers import with_routers

ROLE = "teacher"
FIELDS: Fields = OF_TOKENS
# The teacher's likeliest tokens, k a target, their log-probabilities, and that of all others together.
CACHED: Fields = {
    "teacher_ids": Field("B T k", np.int32),
    "teacher_logps": Field("B T k", np.float32),
    "teacher_rest": Field("B T", np.float32),
}
# Of each target: the divergence, KL(teacher || student), the loss of the label, and whether both have the same likeliest token.
Compared = dict[str, Float[Array, "*R"]]


def loss(how: Distill | GKD, models: Models, batch: dict[str, Array]) -> Loss:
    """Computes the objective."""
    model = models["model"]
    x, ours, aux = states(how, model, batch)
    theirs = []
    if how.logits == "cached":
        known = [batch[name] for name in CACHED]
    else:
        last, theirs, _ = jax.lax.stop_gradient(states(how, models[ROLE], batch))
        known = [last]
    found = compared(how, models, x, batch, known)
    if how.hidden != "none":
        pairs = [(ours[a][OUTPUT], theirs[b][OUTPUT]) for a, b in how.layers.items()] or [(x, known[0])]
        into = getattr(model, PROJECTION, lambda a: a)
        found["hidden"] = mean_of([HIDDEN[how.hidden](wide(into(a)), wide(b)) for a, b in pairs])
    found |= related(how, ours, theirs, batch["segments"])
    mask = batch["mask"]
    weight = jnp.sum(mask)
    sums = {name: jnp.sum(jnp.where(mask > 0, mask.astype(values.dtype) * values, 0.0)) for name, values in found.items()}
    soft = how.temperature**2 * sums.pop("divergence")
    total = (1 - how.cross_entropy) * soft + how.cross_entropy * sums["cross_entropy"]
    if "hidden" in sums:
        total = total + how.hidden_weight * sums["hidden"]
    for name, weighs in how.relations.items():
        total = total + weighs * sums[f"relations/{name}"]
    metrics = {name: WeightedMean(value, weight) for name, value in sums.items()}
    return with_routers(Loss(WeightedMean(total, weight), metrics), model, aux, jnp.sum(mask, 1))


def cosine(ours: Float[Array, "B T D"], theirs: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """1 - the cosine of hidden states; 1, with a finite gradient, where one is 0."""
    squares = (jnp.sum(each * each, -1) for each in (ours, theirs))
    one, other = (jax.lax.rsqrt(jnp.where(square > 0, square, 1.0)) for square in squares)
    return 1 - jnp.sum(ours * theirs, -1) * one * other


def mse(ours: Float[Array, "B T D"], theirs: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """The mean squared difference of hidden states."""
    return jnp.mean((ours - theirs) ** 2, -1)


HIDDEN = {"cosine": cosine, "mse": mse}


# The two sides of a relation.
SIDES = {"qq": (QUERIES, QUERIES), "kk": (KEYS, KEYS), "vv": (VALUES, VALUES), "qk": (QUERIES, KEYS)}
# What a layer told, by name.
Told = dict[str, Array]


def related(how: Distill | GKD, ours: list[Told], theirs: list[Told], segments: Int[Array, "B T"]) -> Compared:
    """How far relations within layers are apart."""
    found: Compared = {}
    for name in how.relations:
        each = []
        for i, j in pairs_of(how):
            heads = how.relation_heads or ours[i][QUERIES].shape[2]  # type: ignore[union-attr]
            each.append(relation_divergence(sides(ours[i], name), sides(theirs[j], name), segments, heads))
        found[f"relations/{name}"] = mean_of(each)
    return found


def pairs_of(how: Distill | GKD) -> list[tuple[int, int]]:
    """The layers, of student and teacher, whose relations are compared."""
    return list(how.layers.items()) or [(-1, -1)]


def sides(told: Told, name: str) -> Sides:
    """The two sides of a relation in a layer. Where they meet queries, keys that several of them share are repeated."""
    x, y = (told[side] for side in SIDES[name])
    return (x, y) if x.shape[2] == y.shape[2] else (x, jnp.repeat(y, x.shape[2] // y.shape[2], 2))


def mean_of(each: list[Float[Array, "B T"]]) -> Float[Array, "B T"]:
    return jnp.mean(jnp.stack(each), 0)


def states(how: Distill | GKD, model: Any, batch: dict[str, Array]) -> tuple[Float[Array, "B T D"], list[Told], Any]:
    """The input of a model's head, what its layers tell as far as it is wanted, and the aux outputs."""
    attend, outputs, heads = Packed(batch["segments"]), how.hidden != "none" and bool(how.layers), bool(how.relations)
    if not outputs and not heads:
        x, _, aux = model.hidden(batch["tokens"], attend)
        return x, [], aux
    x, _, aux = model.hidden(batch["tokens"], WatchedAttend(attend, outputs, heads))
    return x, *model.layers.told(aux)


def compared(
    how: Distill | GKD, models: Models, x: Float[Array, "B T D"], batch: dict[str, Array], known: list[Array]
) -> Compared:
    """What is compared at each target, [B T] each.

    Args:
        x: the input of the student's head.
        known: of the teacher.
    """
    model, teaches, targets = models["model"], models.get(ROLE), batch["targets"]

    def of_rows(x: Array, targets: Array, *known: Array) -> Compared:
        """Rows [R ...] to [R]."""
        rows = [a[:, None] for a in (x, *known)] if teaches is not None else [x[:, None]]
        student = model.unembed(rows[0])[:, 0]
        if teaches is None:
            return of_top(how, student, targets, Top(*known))
        return of_logits(how, student, jax.lax.stop_gradient(teaches.unembed(rows[1]))[:, 0], targets)

    if in_chunks(how, models, targets.size):
        flat = [a.reshape(-1, *a.shape[2:]) for a in (x, targets, *known)]
        found = by_chunks(of_rows, min(how.chunk, targets.size), *flat)
        return {name: values.reshape(targets.shape) for name, values in found.items()}
    # Kept for the backward pass are the logits alone, not every array that is made of them.
    student = model.unembed(x)
    if teaches is None:
        return jax.checkpoint(partial(of_top, how))(student, targets, Top(*known))
    return jax.checkpoint(partial(of_logits, how))(student, jax.lax.stop_gradient(teaches.unembed(known[0])), targets)


def in_chunks(how: Distill | GKD, models: Models, targets: int) -> bool:
    """Whether logits exist only some rows at a time."""
    if how.head != "auto":
        return how.head == "chunks"
    wide_as = sum(model.config.vocab for model in models.values())
    return 4 * targets * wide_as > ROOMY_BYTES * math.prod(axis_sizes().values())


def of_logits(
    how: Distill | GKD, student: Float[Array, "*R V"], teacher: Float[Array, "*R U"], targets: Int[Array, "*R"]
) -> Compared:
    """Compares with a teacher's logits."""
    teacher = over(teacher, student.shape[-1])
    ours, theirs = log_probs(student, how.temperature), log_probs(teacher, how.temperature)
    return between(how, ours, theirs) | of_labels(student, targets, jnp.argmax(teacher, -1))


def of_top(how: Distill | GKD, student: Float[Array, "*R V"], targets: Int[Array, "*R"], known: Top) -> Compared:
    """Compares with a teacher's likeliest tokens, which are at the temperature."""
    ours = coarse(student, known.ids, how.temperature)
    return between(how, ours, known.outcomes) | of_labels(student, targets, known.ids[..., 0])


def between(how: Distill | GKD, ours: Array, theirs: Array) -> Compared:
    """The divergence of two distributions, from log-probabilities of the same outcomes."""
    kl = forward(ours, theirs)
    same = how.divergence == "forward"
    return {"divergence": kl if same else DIVERGENCES[how.divergence](ours, theirs, how.beta), "kl": kl}


def of_labels(student: Float[Array, "*R V"], targets: Int[Array, "*R"], likeliest: Int[Array, "*R"]) -> Compared:
    """The loss of the labels, and whether the student's likeliest token is this one."""
    logits = wide(student)
    nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return {"cross_entropy": nll, "agreement": (jnp.argmax(logits, -1) == likeliest).astype(jnp.float32)}
