"""The grouped matrix product for CPUs: one expert after another, its rows in blocks, with its own backward pass.

XLA:CPU lowers `ragged_dot` to every row times every expert, masked: 64 times the work with 64 experts. Here, a loop runs over the
experts that have rows. Each iteration copies one weight and multiplies it with whole blocks of 256 rows, then of 32, then of 8. Only
the last block may extend into the next group, and is masked. A few rows (decoding) therefore read only the weights of the chosen
experts, once each, and at most seven rows per expert are computed needlessly. Trip counts depend on the routing; shapes do not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import dynamic_index_in_dim, dynamic_slice_in_dim, fori_loop
from jax.lax import dynamic_update_index_in_dim as updated_index
from jax.lax import dynamic_update_slice_in_dim as updated_slice
from jaxtyping import Array, Bool, Float, Int, Real

from argosy.ops.op import Implementation
from argosy.ops.precision import sums_in

# Numbers of rows of a block. A product of 8 rows with a 512 x 256 weight runs at 2/3 of the speed of 256 rows.
BLOCKS = (256, 32, 8)


@jax.custom_vjp
def _blocked(x: Float[Array, "X D"], w: Real[Array, "E D M"], sizes: Int[Array, "E"]) -> Float[Array, "X M"]:
    return _rows_times(x, w, sizes, (1, 0))


def _forward(x: Array, w: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _blocked(x, w, sizes), (x, w, sizes)


def _backward(residuals: tuple[Array, Array, Array], g: Float[Array, "X M"]) -> tuple[Any, ...]:
    x, w, sizes = residuals
    dx = _rows_times(g, w, sizes, (1, 1))
    integers = not jnp.issubdtype(w.dtype, jnp.floating)
    dw = np.zeros(w.shape, jax.dtypes.float0) if integers else _outer(x, g, sizes).astype(w.dtype)
    return dx, dw, np.zeros(sizes.shape, jax.dtypes.float0)


_blocked.defvjp(_forward, _backward)
def _refuses(x: Array, w: Array) -> str | None:
    """Refuses symbolic numbers of rows: an export with symbolic sizes is for several platforms at once."""
    return None if isinstance(x.shape[0], int) else "the number of rows is not known"


BLOCKED = Implementation(_blocked, _refuses)


def _rows_times(x: Float[Array, "X K"], w: Real[Array, "E ..."], sizes: Array, axes: tuple[int, int]) -> Array:
    """Multiplies each row with the weight of its expert, contracting axis axes[0] of the rows and axes[1] of that weight."""
    width = w.shape[2 - axes[1]]

    def expert_rows(expert: Array, start: Array, stop: Array, out: Array) -> Array:
        weight = dynamic_index_in_dim(w, expert, keepdims=False).astype(x.dtype)

        def block(out: Array, low: Array, size: int, mine: Bool[Array, "rows 1"] | None) -> Array:
            y = _dot(_slice(x, low, size), weight, axes).astype(x.dtype)
            if mine is not None:
                y = jnp.where(mine, y, _slice(out, low, size))
            return updated_slice(out, y, low, 0)

        return _in_blocks(block, x.shape[0], start, stop, out)

    return _over_experts(expert_rows, sizes, jnp.zeros((x.shape[0], width), x.dtype))


def _outer(x: Float[Array, "X D"], g: Float[Array, "X M"], sizes: Array) -> Float[Array, "E D M"]:
    """Computes the gradient of the weights, in float32 at least: x' g over the rows of each expert."""
    shape = (x.shape[1], g.shape[1])

    def expert_gradient(expert: Array, start: Array, stop: Array, out: Array) -> Array:
        def block(total: Array, low: Array, size: int, mine: Bool[Array, "rows 1"] | None) -> Array:
            of_x, of_g = _slice(x, low, size), _slice(g, low, size)
            # Masks both, because rows that no expert owns may hold NaN, and 0 * NaN is NaN.
            if mine is not None:
                of_x, of_g = jnp.where(mine, of_x, 0), jnp.where(mine, of_g, 0)
            return total + _dot(of_x, of_g, (0, 0))

        total = _in_blocks(block, x.shape[0], start, stop, jnp.zeros(shape, sums_in(x.dtype)))
        return updated_index(out, total, expert, 0)

    return _over_experts(expert_gradient, sizes, jnp.zeros((sizes.shape[0], *shape), sums_in(x.dtype)))


def _over_experts(compute: Callable[[Array, Array, Array, Array], Array], sizes: Array, out: Array) -> Array:
    """Runs out = compute(expert, start, stop, out) for each expert that has rows, which are start..stop-1."""
    stops = jnp.cumsum(sizes)
    busy = jnp.argsort(sizes == 0, stable=True)

    def step(i: Array, out: Array) -> Array:
        expert = busy[i]
        return compute(expert, stops[expert] - sizes[expert], stops[expert], out)

    return fori_loop(0, jnp.sum(sizes > 0), step, out)


def _in_blocks(block: Callable[..., Array], rows: int, start: Array, stop: Array, carry: Array) -> Array:
    """Runs carry = block(carry, low, size, mine) over the rows start..stop-1: whole blocks of each size, then one overlapping block.

    The last block is moved back if it would exceed the array. `mine` marks the rows of this group; None in whole blocks.
    """
    *whole, last = [size for size in BLOCKS if size <= rows] or [rows]
    for size in whole:
        count = (stop - start) // size
        carry = fori_loop(0, count, lambda i, c, at=start, n=size: block(c, at + i * n, n, None), carry)
        start = start + count * size

    def masked(i: Array, carry: Array) -> Array:
        at = start + i * last
        low = jnp.minimum(at, rows - last)
        row = low + jnp.arange(last)
        return block(carry, low, last, ((row >= at) & (row < stop))[:, None])

    return fori_loop(0, (stop - start + last - 1) // last, masked, carry)


def _slice(x: Array, low: Array, size: int) -> Array:
    return dynamic_slice_in_dim(x, low, size, 0)


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    return jax.lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=sums_in(a.dtype))
