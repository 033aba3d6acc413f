"""FLOPs of a traced program: 2 for each multiply-add of every contraction, scans multiplied by their length.

Elementwise work is not counted. Attention is counted as it is computed: in full where it is dense.
"""

import math
from typing import Any

from jax.extend.core import jaxprs_in_params


def contraction_flops(jaxpr: Any) -> int:
    """Of a jaxpr, such as `jax.make_jaxpr(f)(...).jaxpr`, and all that it calls."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
        if eqn.primitive.name == "ragged_dot_general":
            total += _ragged_flops(eqn)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(contraction_flops(inner) for inner in jaxprs_in_params(eqn.params))
    return total


def _ragged_flops(eqn: Any) -> int:
    """Each row meets one of the groups' matrices, whatever a backend then computes."""
    (contracted, _), (batch, _) = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    lhs, rhs, out = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    ragged = eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    summed = math.prod(lhs[i] for i in contracted)
    if set(ragged) <= set(contracted):  # rows are what is summed: the gradient of the weights
        return 2 * math.prod(out[1:]) * summed
    return 2 * math.prod(out) * summed
