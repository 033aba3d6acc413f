"""The grouped matrix product of a mixture of experts: rows sorted by expert, each group times its own weight.

    ragged_dot   XLA's own implementation, the default on GPUs
    blocked      the default on CPUs, where XLA multiplies every row by every expert
    megablox     Pallas kernels of JAX, the default on TPUs, where XLA does so for the gradient of the weights
    tokamax      a separate package; only used if it is requested by name

This module knows nothing of routing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from argosy.ops.op import Implementation, Op


def grouped_matmul(
    x: Float[Array, "X D"], w: Real[Array, "E D M"], sizes: Int[Array, "E"], *, implementation: str | None = None
) -> Float[Array, "X M"]:
    """Computes y[r] = x[r] @ w[e], where expert e owns the `sizes[e]` rows after those of expert e - 1.

    The result has the dtype of x. Sums are float32 at least. Rows after the last group give zeros and get no gradient. Differentiable
    in x and, unless w has integers, in w (reverse mode only).

    Args:
        implementation: the name of an implementation. Default: the op's choice.

    Raises:
        Unsupported: the requested implementation cannot run here.
        UnknownName: there is no implementation of the requested name.
    """
    return GROUPED_MATMUL.choose(x, w, implementation=implementation).run(x, w, jnp.asarray(sizes, jnp.int32))


def clear_unowned_rows(product: Callable[[Array, Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """Wraps a library's product so that rows that no expert owns are zero in the output and in the gradient of x.

    Libraries leave these rows unwritten or undefined. XLA fuses both masks with neighboring operations.
    """

    def run(x: Array, w: Array, sizes: Array) -> Array:
        owned = (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]
        y = product(jnp.where(owned, x, 0), w.astype(x.dtype), sizes)
        return jnp.where(owned, y, 0).astype(x.dtype)

    return run


# Preferred implementations were measured to be faster on their platform (docs/log).
GROUPED_MATMUL = Op(
    "experts", "grouped matmul", prefer={"cpu": ("blocked",), "tpu": ("megablox",)}, default="ragged_dot",
    case="argosy.ops.grouped.case:grouped_case",
)  # fmt: skip
GROUPED_MATMUL.add("ragged_dot", Implementation(clear_unowned_rows(jax.lax.ragged_dot)))
GROUPED_MATMUL.add("blocked", "argosy.ops.grouped.blocked:BLOCKED")
GROUPED_MATMUL.add("megablox", "argosy.ops.grouped.kernels:MEGABLOX")
GROUPED_MATMUL.add("tokamax", "argosy.ops.grouped.kernels:TOKAMAX")
