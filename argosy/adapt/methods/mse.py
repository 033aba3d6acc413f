"""Scales by squared error.

    scale = argmin over s of  sum over a block of  m_i (w_i - Q_s(w_i))^2        m_i: mean square of the inputs of w_i, or 1

A block with one large weight has a coarse grid for all others; a smaller range clips the large one and is better on the whole. If
inputs are not correlated, the weighted sum is the squared error of the output: GPTQ's objective with a diagonal Hessian.

Sources: the search is that of GPTQ's own code (`--mse`), AWQ's clipping and llm-compressor's `mse` observer. Differences: the range may
also grow, by which formats whose scales are powers of two find the next one; the error is a square, not a power of 2.4; zero points
keep their place.
"""

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from argosy.adapt.formats.blocks import pack_axis
from argosy.adapt.formats.format import Format, Limits, Weight, in_blocks
from argosy.adapt.methods.matrices import along_inputs
from argosy.models.parts.einsum import Contraction

if TYPE_CHECKING:
    from argosy.adapt.calibration.statistics import InputStatistics
    from argosy.adapt.quant import Scheme

# Factors on the range that the scheme finds. 1 comes first: of equal errors the first stays.
FACTORS = (1.0, *(round(0.98 - 0.02 * i, 2) for i in range(32)), 1.02, 1.04, 1.06, 1.08)
# Of scales that are powers of two.
POWERS = (1.0, 0.5, 0.25, 2.0)


def search_limits(of: Contraction, w: Weight, scheme: "Scheme", inputs: "InputStatistics | None") -> Limits:
    """The range of each block with the smallest error."""
    w = jnp.asarray(w, jnp.float32)
    weights = jnp.ones((1,) * w.ndim, jnp.float32)
    if inputs is not None:
        weights = along_inputs(of, inputs.mean_squares, w.shape)
    factors = POWERS if scheme.format.scales == "e8m0" else FACTORS
    block = scheme.block(of)[of.stacked :]
    return _search(scheme.format, w, weights, scheme.limits(of, w), block, len(of.group), pack_axis(of), factors)


@partial(jax.jit, static_argnums=(0, 4, 5, 6, 7))
def _search(
    format: Format,
    w: Array,
    weights: Array,
    limits: Limits,
    block: tuple[int, ...],
    lead: int,
    pack: int,
    factors: tuple[float, ...],
) -> Limits:
    def error(factor: Array) -> Array:
        scaled = Limits(limits.high * factor, None if limits.low is None else limits.low * factor)
        rounded = format.rounded(w, block, scaled, lead=lead, pack=pack).dequantized()
        tiles, axes = in_blocks(weights * jnp.square(rounded - w), block)
        return jnp.sum(tiles, axes)

    def better(best: tuple[Array, Array], factor: Array) -> tuple[tuple[Array, Array], None]:
        least, best_factor = best
        now = error(factor)
        return (jnp.minimum(now, least), jnp.where(now < least, factor, best_factor)), None

    first = error(jnp.float32(1.0))
    (_, best_factor), _ = jax.lax.scan(better, (first, jnp.ones_like(first)), jnp.asarray(np.asarray(factors[1:], np.float32)))
    return Limits(limits.high * best_factor, None if limits.low is None else limits.low * best_factor)
