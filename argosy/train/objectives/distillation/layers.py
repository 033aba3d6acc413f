"""Compares layers of student and teacher: their hidden states, and relations of tokens within a layer (`ops.relations`)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack.watch import KEYS, OUTPUT, QUERIES, VALUES, WatchedAttend
from argosy.ops.precision import wide
from argosy.ops.relations import Sides, relation_divergence
from argosy.train.objectives.distillation.teacher import LayerTerms


def _cosine(student: Float[Array, "B T D"], teacher: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """Computes 1 - the cosine of hidden states. It is 1, with a finite gradient, where one of the vectors is 0."""
    squares = (jnp.sum(each * each, -1) for each in (student, teacher))
    inverse, inverse_teacher = (jax.lax.rsqrt(jnp.where(square > 0, square, 1.0)) for square in squares)
    return 1 - jnp.sum(student * teacher, -1) * inverse * inverse_teacher


def _mse(student: Float[Array, "B T D"], teacher: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """Computes the mean squared difference of hidden states."""
    return jnp.mean((student - teacher) ** 2, -1)


HIDDEN = {"cosine": _cosine, "mse": _mse}


# The two sides of a relation.
SIDES = {"qq": (QUERIES, QUERIES), "kk": (KEYS, KEYS), "vv": (VALUES, VALUES), "qk": (QUERIES, KEYS)}
# What a layer told (`models.parts.stack.watch`), by name.
LayerArrays = dict[str, Array]


def relation_terms(
    terms: LayerTerms, student: list[LayerArrays], teacher: list[LayerArrays], segments: Int[Array, "B T"]
) -> dict[str, Float[Array, "B T"]]:
    """Computes the distance between the relations of student and teacher at each token, by kind of relation.

    Args:
        student, teacher: the outputs of each layer that relations need.
    """
    out: dict[str, Array] = {}
    for name in terms.relations:
        each = []
        for i, j in terms.related_layers:
            heads = terms.relation_heads or student[i][QUERIES].shape[2]
            each.append(relation_divergence(relation_sides(student[i], name), relation_sides(teacher[j], name), segments, heads))
        out[f"relations/{name}"] = _mean_of(each)
    return out


def hidden_term(
    terms: LayerTerms,
    project: Callable[[Array], Array],
    student: list[LayerArrays],
    teacher: list[LayerArrays],
    last: tuple[Array, Array],
) -> Float[Array, "B T"]:
    """Computes the distance between hidden states at each token.

    Args:
        project: maps hidden states of the student to the width of the teacher.
        student, teacher: the outputs of each layer.
        last: the inputs of the heads of student and teacher.
    """
    pairs = [(student[a][OUTPUT], teacher[b][OUTPUT]) for a, b in terms.layers.items()] or [last]
    return _mean_of([HIDDEN[terms.hidden](wide(project(a)), wide(b)) for a, b in pairs])


def relation_sides(arrays: LayerArrays, name: str) -> Sides:
    """Returns the two arrays of heads that a relation compares in a layer, such as queries and keys. Keys that several queries share
    are repeated, so that both arrays have the same number of heads."""
    x, y = (arrays[side] for side in SIDES[name])
    return (x, y) if x.shape[2] == y.shape[2] else (x, jnp.repeat(y, x.shape[2] // y.shape[2], 2))


def _mean_of(each: list[Float[Array, "B T"]]) -> Float[Array, "B T"]:
    return jnp.mean(jnp.stack(each), 0)


def layer_states(
    terms: LayerTerms, model: Any, batch: dict[str, Array]
) -> tuple[Float[Array, "B T D"], list[LayerArrays], Any]:
    """Runs a model. Returns the input of its head, the outputs of each layer that the comparisons need (empty if none), and the aux
    outputs."""
    attend, outputs, heads = Packed(batch["segments"]), terms.hidden != "none" and bool(terms.layers), bool(terms.relations)
    if not outputs and not heads:
        x, _, aux = model.hidden(batch["tokens"], attend)
        return x, [], aux
    x, _, aux = model.hidden(batch["tokens"], WatchedAttend(attend, outputs, heads))
    return x, *model.layers.layer_aux(aux)
