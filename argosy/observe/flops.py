"""Counts the FLOPs of a traced program: 2 for each multiply-add of every contraction. The body of a scan counts once per iteration.

Elementwise work is not counted. Dense attention counts in full, although half of it is masked. The inverse of a triangular system
(`ops.delta`) is not counted, so the backward pass of every module counts twice as much as its forward pass.
"""

import math
from typing import Any

from jax.extend.core import jaxprs_in_params


def contraction_flops(jaxpr: Any) -> int:
    """Returns the FLOPs of a jaxpr, such as `jax.make_jaxpr(f)(...).jaxpr`, and of all that it calls."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
        if eqn.primitive.name == "conv_general_dilated":
            total += _conv_flops(eqn)
        if eqn.primitive.name == "ragged_dot_general":
            total += _ragged_flops(eqn)
        if eqn.params.get("name") == "unit_inverse":
            continue
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(contraction_flops(inner) for inner in jaxprs_in_params(eqn.params))
    return total


def _conv_flops(eqn: Any) -> int:
    """Counts every element of the kernel at every output position, also where it meets padding."""
    kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    channels_out = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(out) * math.prod(kernel) // channels_out


def _ragged_flops(eqn: Any) -> int:
    """Counts the product of each row with the matrix of its group, even if a backend computes more."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    rows, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    summed = math.prod(rows[i] for i in contracted)
    # True for the gradient of the weights.
    rows_are_summed = set(numbers.lhs_ragged_dimensions) <= set(contracted)
    return 2 * math.prod(out[1:] if rows_are_summed else out) * summed
