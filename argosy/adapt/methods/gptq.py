"""GPTQ: rounding that compensates for its error. Frantar et al. 2022 (arXiv:2210.17323).

    H = X'X + damping mean(diag X'X) I,  U = chol(H^-1)', upper
    for each input channel i:  q_i = Q(w_i),  e = (w_i - q_i) / U_ii,  w_j -= U_ij e for the channels j after i

Each step is that of Optimal Brain Quantization (arXiv:2208.11580) with a fixed order: the channels that are not rounded yet are changed
so that the output changes least. X holds the inputs on calibration data, for which the earlier layers are already quantized.

Differences from the paper: scales are fixed before the first step, so that any format and any shape of blocks can be rounded in any
order of channels. The paper computes the scale of a block when it reaches the block. By default channels are ordered by their squared
inputs (`act-order` in the paper's code). A channel without inputs is rounded to nearest instead of becoming zero.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import get_lapack_funcs

from argosy.adapt.formats.format import Format, Limits, Weight, nearest_elements
from argosy.adapt.methods.matrices import as_matrices, from_matrices
from argosy.core.errors import BadInput
from argosy.models.parts.einsum import Contraction
from argosy.ops.quantized import spread

if TYPE_CHECKING:
    from argosy.adapt.calibration.statistics import InputStatistics
    from argosy.adapt.quant import Scheme

# The number of channels whose errors are applied to the rest of the weight in one product.
TOGETHER = 64


def compensate_rounding(
    of: Contraction,
    w: Weight,
    scheme: "Scheme",
    limits: Limits,
    inputs: "InputStatistics",
    *,
    damping: float,
    by_activation: bool,
) -> Float[Array, "..."]:
    """Rounds a weight to the grid of its format by GPTQ. Returns it as floats.

    Args:
        of: the contraction of the weight.
        w: the weight of one layer.
        scheme: the number format and the blocks.
        limits: the range of each block.
        inputs: the statistics of the inputs. Experts with too few tokens for a Hessian are rounded to nearest
            (`InputStatistics.sufficient`).
        damping: the share of the mean of the diagonal of X'X that is added to the diagonal.
        by_activation: whether channels are rounded in descending order of their squared inputs.
    """
    grid = scheme.within(of, w, limits)
    parts = [grid.scales, *([] if grid.minimum is None else [grid.minimum])]
    scale, *minimum = (as_matrices(of, _spread_over(part, w.shape)) for part in parts)
    rows = as_matrices(of, jnp.asarray(w))
    out = []
    for g in range(len(rows)):
        if not inputs.sufficient[g]:
            out.append(as_matrices(of, grid.dequantized())[g])
            continue
        gram = inputs.gram[g]
        order = np.argsort(-np.diag(gram), kind="stable") if by_activation else np.arange(len(gram))
        factor = _factor(inputs, g, order, (damping, by_activation))
        low = None if not minimum else minimum[0][g][order]
        solved = _solved(scheme.format, rows[g][order], scale[g][order], low, factor)
        out.append(solved[np.argsort(order)])
    return from_matrices(of, jnp.stack(out), w.shape)


@partial(jax.jit, static_argnums=1)
def _spread_over(scales: Array, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(spread(scales, shape), shape)


def _factor(inputs: "InputStatistics", g: int, order: np.ndarray, key: tuple[float, bool]) -> Float[np.ndarray, "I I"]:
    """Returns the factor U of Gram matrix `g`. Without experts it is stored in `inputs`, because queries, keys and values read the same
    inputs. Factors of experts are not stored, because they would be as large as all Gram matrices.

    Args:
        order: the order of the channels.
        key: the damping, and whether channels are ordered by activation.
    """
    if len(inputs.gram) > 1:
        return inverse_factor(inputs.gram[g], order, key[0])
    if key not in inputs.factors:
        inputs.factors[key] = inverse_factor(inputs.gram[g], order, key[0])
    return inputs.factors[key]


def inverse_factor(gram: Float[np.ndarray, "I I"], order: np.ndarray, damping: float) -> Float[np.ndarray, "I I"]:
    """Computes the upper factor U of the inverse U'U of a damped Gram matrix whose channels are in this order.

    With R = U^-1, which is also upper triangular, H = R R'. With both axes reversed, R is the lower Cholesky factor of the reversed H.
    So one Cholesky factor and its inverse suffice. Both are computed in the memory of H, which in float64 is the largest array of a
    calibration.
    """
    size, backwards = len(gram), order[::-1]
    a = np.empty((size, size), np.float64, order="F")
    # Copied in slices, so that no whole copy exists in between.
    for start in range(0, size, 512):
        channels = backwards[start : start + 512]
        a[:, start : start + 512] = gram[channels][:, backwards].T
    diagonal = np.diag(a).copy()
    mean = float(diagonal.mean()) or 1.0
    # A channel without inputs is independent of the others.
    np.fill_diagonal(a, np.where(diagonal > 0, diagonal, mean) + damping * mean)
    potrf, trtri = get_lapack_funcs(("potrf", "trtri"), (a,))
    a, failed = potrf(a, lower=1, clean=1, overwrite_a=1)
    if failed:
        raise BadInput("the Gram matrix of the inputs is not positive", hint="more calibration data, or method.damping=0.1")
    a, _ = trtri(a, lower=1, overwrite_c=1)
    return a[::-1, ::-1].astype(np.float32)


@partial(jax.jit, static_argnums=0)
def _solved(format: Format, w: Array, scale: Array, minimum: Array | None, factor: Array) -> Array:
    """Rounds a matrix [I O] row by row, with compensation."""
    size, rest = len(w), -len(w) % TOGETHER
    minimum = jnp.zeros_like(w[:, :1]) if minimum is None else minimum
    if rest:
        rows = ((0, rest), (0, 0))
        w, scale, minimum = jnp.pad(w, rows), jnp.pad(scale, rows, constant_values=1.0), jnp.pad(minimum, rows)
        factor = jnp.pad(factor, ((0, rest), (0, rest))) + jnp.diag(jnp.arange(size + rest) >= size).astype(factor.dtype)
    is_asymmetric = minimum.shape[1] > 1
    places = jnp.arange(size + rest)

    def block(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        w, out = state
        start = number * TOGETHER

        def part(a: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(a, start, TOGETHER)

        block, s, m = part(w), part(scale), part(minimum)
        upper = jax.lax.dynamic_slice(factor, (start, start), (TOGETHER, TOGETHER))

        def channel(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            block, rounded, errors = state
            q = nearest_elements(format, (block[i] + m[i]) / s[i], is_asymmetric=is_asymmetric) * s[i] - m[i]
            error = (block[i] - q) / upper[i, i]
            later = jnp.where(jnp.arange(TOGETHER) > i, upper[i], 0.0)
            return block - later[:, None] * error, rounded.at[i].set(q), errors.at[i].set(error)

        block, rounded, errors = jax.lax.fori_loop(0, TOGETHER, channel, (block, jnp.zeros_like(block), jnp.zeros_like(block)))
        later = jnp.where(places[None] >= start + TOGETHER, part(factor), 0.0)
        w = w - jnp.matmul(later.T, errors, precision="highest")
        return w, jax.lax.dynamic_update_slice_in_dim(out, rounded, start, 0)

    _, out = jax.lax.fori_loop(0, (size + rest) // TOGETHER, block, (w, jnp.zeros_like(w)))
    return out[:size]


def output_error(of: Contraction, w: Any, rounded: Any, inputs: "InputStatistics") -> float:
    """Returns the root mean square of the change of the output by rounding, relative to that of the output, on calibration data. It is
    computed in numpy, because a compiled program for each shape of matrix takes more memory than a layer of a small model."""
    exact, other = (as_matrices(of, np.asarray(a, np.float32)) for a in (w, rounded))
    whole, change = (max(sum(map(_squared_output, m, inputs.gram)), 0.0) for m in (exact, other - exact))
    return 0.0 if whole == 0 else float(np.sqrt(change / whole))


def _squared_output(m: Float[np.ndarray, "I O"], gram: Float[np.ndarray, "I I"]) -> float:
    """Returns the sum of the squares of X m, computed from X'X; NaN if an input is NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.vdot(m, gram @ m))
