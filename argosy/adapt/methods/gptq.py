"""GPTQ: rounding that makes up for its error. Frantar et al. 2022 (arXiv:2210.17323).

    H = X'X + damping mean(diag X'X) I,  U = chol(H^-1)', upper
    for each input channel i:  q_i = Q(w_i),  e = (w_i - q_i) / U_ii,  w_j -= U_ij e for the channels j after i

Each step is that of Optimal Brain Quantization (arXiv:2208.11580) for a fixed order: the channels that are not rounded yet change so
that the output changes least. X holds the inputs of calibration data, on which the layers before it are quantized already.

Differences from the paper: scales are fixed before the first step, so that any format and any shape of blocks can be rounded in any
order of channels (the paper takes the scale of a block from its weights when it comes to them); channels go by their squared inputs by
default (`act-order` in the paper's code); a channel without inputs is rounded to nearest instead of becoming zero.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.adapt.formats.format import Format, Limits, Weight, nearest_elements
from argosy.adapt.methods.matrices import as_matrices, from_matrices
from argosy.models.parts.einsum import Contraction
from argosy.ops.quantized import spread

if TYPE_CHECKING:
    from argosy.adapt.calibration.statistics import InputStatistics
    from argosy.adapt.quant import Scheme

# Channels whose errors reach the rest of the weight in one product.
TOGETHER = 64


def compensated(
    of: Contraction,
    w: Weight,
    scheme: "Scheme",
    limits: Limits,
    inputs: "InputStatistics",
    *,
    damping: float,
    by_activation: bool,
) -> Float[Array, "..."]:
    """The weight on the grid of its format, as floats.

    Args:
        limits: the range of each block.
        inputs: experts with too few tokens for a Hessian are rounded to nearest (`InputStatistics.sufficient`).
    """
    grid = scheme.within(of, w, limits)
    parts = [spread(grid.scales, w.shape), *([] if grid.minimum is None else [spread(grid.minimum, w.shape)])]
    scale, *minimum = (as_matrices(of, jnp.broadcast_to(part, w.shape)) for part in parts)
    rows, nearest = as_matrices(of, jnp.asarray(w)), as_matrices(of, grid.dequantized())
    out = []
    for g in range(len(rows)):
        if not inputs.sufficient[g]:
            out.append(nearest[g])
            continue
        gram = np.asarray(inputs.gram[g], np.float64)
        order = np.argsort(-np.diag(gram), kind="stable") if by_activation else np.arange(len(gram))
        factor = inverse_factor(gram[np.ix_(order, order)], damping)
        low = None if not minimum else minimum[0][g][order]
        solved = _solved(scheme.format, rows[g][order], scale[g][order], low, factor)
        out.append(solved[np.argsort(order)])
    return from_matrices(of, jnp.stack(out), w.shape)


def inverse_factor(gram: Float[np.ndarray, "I I"], damping: float) -> Float[np.ndarray, "I I"]:
    """The upper factor U of the inverse of a damped Gram matrix: U'U."""
    diagonal = np.diag(gram).copy()
    mean = float(diagonal.mean()) or 1.0
    damped = gram.copy()
    # A channel without inputs has nothing to do with others.
    np.fill_diagonal(damped, np.where(diagonal > 0, diagonal, mean) + damping * mean)
    inverse = np.linalg.inv(damped)
    return np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)


@partial(jax.jit, static_argnums=0)
def _solved(format: Format, w: Array, scale: Array, minimum: Array | None, factor: Array) -> Array:
    """A matrix [I O], rounded row by row."""
    size, rest = len(w), -len(w) % TOGETHER
    rows = ((0, rest), (0, 0))
    w, scale = jnp.pad(w, rows), jnp.pad(scale, rows, constant_values=1.0)
    minimum = jnp.zeros_like(w[:, :1]) if minimum is None else jnp.pad(minimum, rows)
    factor = jnp.pad(factor, ((0, rest), (0, rest))) + jnp.diag(jnp.arange(size + rest) >= size).astype(factor.dtype)
    is_asymmetric = minimum.shape[1] > 1
    places = jnp.arange(size + rest)

    def block(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        w, out = state
        start = number * TOGETHER

        def part(a: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(a, start, TOGETHER)

        own, s, m = part(w), part(scale), part(minimum)
        upper = jax.lax.dynamic_slice(factor, (start, start), (TOGETHER, TOGETHER))

        def channel(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            own, rounded, errors = state
            q = nearest_elements(format, (own[i] + m[i]) / s[i], is_asymmetric=is_asymmetric) * s[i] - m[i]
            error = (own[i] - q) / upper[i, i]
            later = jnp.where(jnp.arange(TOGETHER) > i, upper[i], 0.0)
            return own - later[:, None] * error, rounded.at[i].set(q), errors.at[i].set(error)

        own, rounded, errors = jax.lax.fori_loop(0, TOGETHER, channel, (own, jnp.zeros_like(own), jnp.zeros_like(own)))
        later = jnp.where(places[None] >= start + TOGETHER, part(factor), 0.0)
        w = w - jnp.matmul(later.T, errors, precision="highest")
        return w, jax.lax.dynamic_update_slice_in_dim(out, rounded, start, 0)

    _, out = jax.lax.fori_loop(0, (size + rest) // TOGETHER, block, (w, jnp.zeros_like(w)))
    return out[:size]


def output_error(of: Contraction, w: Any, rounded: Any, inputs: "InputStatistics") -> float:
    """The root mean square of what rounding changes in the output, over that of the output, on calibration data."""
    exact = as_matrices(of, jnp.asarray(w, jnp.float32))
    change = as_matrices(of, jnp.asarray(rounded, jnp.float32)) - exact
    return float(_relative(exact, change, jnp.asarray(inputs.gram)))


@jax.jit
def _relative(exact: Array, change: Array, gram: Array) -> Array:
    def squares(m: Array) -> Array:
        return jnp.maximum(jnp.sum(m * jnp.einsum("gij,gjo->gio", gram, m, precision="highest")), 0.0)

    whole = squares(exact)
    return jnp.where(whole > 0, jnp.sqrt(squares(change) / jnp.where(whole > 0, whole, 1.0)), 0.0)
