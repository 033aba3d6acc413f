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
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(contraction_flops(inner) for inner in jaxprs_in_params(eqn.params))
    return total
