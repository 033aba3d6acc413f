"""The grouped matrix product of a mixture of experts: rows sorted by expert, each group times its own weight.

`ragged_dot` is XLA's own and the default on GPUs and TPUs. On a CPU XLA multiplies every row by every expert, so the default
there is `blocked`, which only does the necessary work. `megablox` (a Pallas kernel of JAX) and `tokamax` are used by name only.
This module knows nothing of routing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Real

from argosy.core.errors import Unsupported
from argosy.core.registry import Registry
from argosy.ops.choice import asked_for
from argosy.parallel.scope import platform


class Implementation(NamedTuple):
    """A function (x, w, sizes) -> y, and a function that says why it cannot be used on x and w, or None."""

    run: Callable[[Array, Array, Array], Array]
    refuses: Callable[[Array, Array], str | None]


def grouped_matmul(
    x: Float[Array, "X D"], w: Real[Array, "E D M"], sizes: Int[Array, "E"], *, implementation: str | None = None
) -> Float[Array, "X M"]:
    """y[r] = x[r] @ w[e], where expert e owns the `sizes[e]` rows after those of expert e-1. In the type of x.

    Rows after the last group give zeros and get no gradient. Differentiable in x and, unless it has integers, in w (reverse mode
    only). Sums are float32 at least.

    Raises:
        Unsupported: the named implementation cannot run here.
        UnknownName: there is no implementation of this name.
    """
    # False in an export with symbolic lengths, which is for several platforms at once.
    known = isinstance(x.shape[0], int)
    preferred = PREFERENCE.get(platform(), "ragged_dot") if known else "ragged_dot"
    name = implementation or asked_for("experts") or preferred
    chosen: Implementation = IMPLEMENTATIONS[name]
    if reason := chosen.refuses(x, w):
        raise Unsupported(f"grouped matmul `{name}`: {reason}")
    return chosen.run(x, w, jnp.asarray(sizes, jnp.int32))


def cleared(product: Callable[[Array, Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    """A library's product, with the rows that no expert owns set to zero in the output and in the gradient of x.

    Libraries leave these rows unwritten or undefined. XLA fuses both masks with neighboring operations.
    """

    def run(x: Array, w: Array, sizes: Array) -> Array:
        owned = (jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None]
        y = product(jnp.where(owned, x, 0), w.astype(x.dtype), sizes)
        return jnp.where(owned, y, 0).astype(x.dtype)

    return run


IMPLEMENTATIONS = Registry("grouped matmul implementation")
IMPLEMENTATIONS.add("ragged_dot", Implementation(cleared(jax.lax.ragged_dot), lambda *_: None))
IMPLEMENTATIONS.add("blocked", "argosy.ops.grouped.blocked:BLOCKED")
IMPLEMENTATIONS.add("megablox", "argosy.ops.grouped.kernels:MEGABLOX")
IMPLEMENTATIONS.add("tokamax", "argosy.ops.grouped.kernels:TOKAMAX")

# The default of each platform; `ragged_dot` elsewhere. Each entry was measured to be faster there: docs/log.md.
PREFERENCE: dict[str, str] = {"cpu": "blocked"}
