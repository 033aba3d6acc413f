"""Searches scales by squared error.

    scale = argmin over s of  sum over a block of  m_i (w_i - Q_s(w_i))^2        m_i: mean square of the inputs of w_i, or 1

One large weight makes the grid of its block coarse for all other weights. A smaller range clips the large weight, and is often better
on the whole. If inputs are not correlated, the weighted sum is the squared error of the output, which is GPTQ's objective with a
diagonal Hessian.

Sources: the search is that of GPTQ's own code (`--mse`), of AWQ's clipping and of llm-compressor's `mse` observer. Differences: the
range may also grow, so that formats whose scales are powers of two can take the next larger one. The error is squared, and not raised
to the power 2.4. Zero points do not change.
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

# The factors by which the range of the scheme is multiplied. 1 comes first, because of equal errors the first is taken.
FACTORS = (1.0, *(round(0.98 - 0.02 * i, 2) for i in range(32)), 1.02, 1.04, 1.06, 1.08)
# The factors for scales that are powers of two.
POWERS = (1.0, 0.5, 0.25, 2.0)


def search_limits(of: Contraction, w: Weight, scheme: "Scheme", inputs: "InputStatistics | None") -> Limits:
    """Searches the range of each block with the smallest error.

    Args:
        of: the contraction of the weight.
        w: the weight of one layer.
        scheme: the number format and the blocks.
        inputs: the statistics of the inputs. None weights all errors equally.
    """
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
