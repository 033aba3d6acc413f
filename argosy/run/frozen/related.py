"""Checks the models of objectives that compare relations within layers. The layers of both models must have attention whose features
divide into the same number of relation heads.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from argosy.core.errors import BadInput
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack import Scan
from argosy.models.parts.stack.watch import QUERIES, WatchedAttend
from argosy.models.parts.weight import abstract, merge, split
from argosy.train.objectives.distillation.layers import LayerArrays, relation_sides


def layer_shapes(config: Any) -> list[LayerArrays]:
    """Returns the shapes of the arrays of each layer that relations are computed from, for one token. They are empty for a layer
    without attention."""
    model = config.build(Scan())
    graph, _ = split(model)

    def layer_arrays(weights: Any, tokens: Any) -> list[LayerArrays]:
        model = merge(graph, weights)
        return model.layers.layer_aux(model.hidden(tokens, WatchedAttend(Packed(jnp.ones_like(tokens)), heads=True))[2])[0]

    return jax.eval_shape(layer_arrays, abstract(model), jax.ShapeDtypeStruct((1, 1), jnp.int32))


def check_relations(run: Any, config: Any, where: str) -> None:
    """Checks that relations of the student's layers can be compared with the teacher's.

    Raises:
        BadInput: a layer has no attention, or its features do not divide into the number of relation heads.
    """
    terms = run.objective.layer_terms
    if not terms.relations:
        return
    student, teacher = layer_shapes(run.model), layer_shapes(config)
    widths: dict[str, tuple[int, int]] = {}
    for i, j in terms.related_layers:
        for whose, layers, number in (("the student", student, i), ("the teacher", teacher, j)):
            number %= len(layers)
            if not layers[number]:
                problem = f"objective.relations: layer {number} of {whose} has no attention"
                raise BadInput(problem, where=where, hint="objective.layers names the student's layers, and the teacher's of each")
            for name in terms.relations:
                x, _ = jax.eval_shape(lambda layers, name=name: relation_sides(layers, name), layers[number])
                kind = f"{name} in layer {number} of {whose}"
                widths[kind] = math.prod(x.shape[2:]), terms.relation_heads or student[i][QUERIES].shape[2]
    if wrong := [f"the {width:,} features of {kind}" for kind, (width, heads) in widths.items() if width % heads]:
        common, heads = math.gcd(*(width for width, _ in widths.values())), max(heads for _, heads in widths.values())
        fits = max(n for n in range(1, heads + 1) if common % n == 0)
        problem = f"{heads} relation heads of equal size cannot be cut from {wrong[0]}"
        raise BadInput(problem, where=where, hint=f"objective.relation_heads={fits}; any divisor of {common:,} will do")
