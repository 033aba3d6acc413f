"""AWQ: channels with large inputs are scaled up before rounding. Lin et al. 2023 (arXiv:2306.00978).

    s = mean|x|^alpha / sqrt(max s min s)        alpha in 0, 0.05 ... 0.95: the one with the smallest error of the output
    y = Q(W s) (x / s)

The rounding error of a weight is at most half a step of its block, whatever its size. If the weight is scaled by s > 1, its error is
divided by s. The clipping in section 3 of the paper is the search of scales of `methods.mse`, which runs afterwards.

Differences from the paper: the error is that of the outputs of the matrices themselves, computed from X'X, and not that of the whole
attention or feed-forward module. Clipping is searched with the mean squares of the inputs, and not with products of blocks and inputs.
Pairs are those that `methods.balance` finds to be exact, including values and outputs of grouped queries.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.adapt.methods.balance import BalancedPair, divided_inputs, producer_channels, reader_scales
from argosy.adapt.methods.gptq import output_error
from argosy.adapt.methods.matrices import along_inputs
from argosy.adapt.quant import Scheme
from argosy.models.parts.einsum import Contraction

if TYPE_CHECKING:
    from argosy.adapt.calibration.statistics import InputStatistics

STEPS = 20


class BalancedReader(NamedTuple):
    """A contraction that is quantized and reads balanced channels, with its weight, its scheme and the statistics of its inputs."""

    of: Contraction
    w: Array
    scheme: Scheme
    inputs: "InputStatistics"


def awq_scales(pair: BalancedPair, readers: Sequence[BalancedReader], groups: int, steps: int = STEPS) -> Float[np.ndarray, "G C"]:
    """Searches the scales of the producer's channels with the smallest error of the outputs. They are 1 if no others are better.

    Args:
        pair: the producer and its readers.
        readers: the readers that are quantized.
        groups: the number of the producer's experts, 1 without experts.
        steps: the number of exponents to try.
    """
    magnitudes = np.mean([mean_magnitudes(pair, reader, groups) for reader in readers], 0)
    best, best_scales = np.inf, np.ones_like(magnitudes)
    for step in range(steps):
        s = np.maximum(magnitudes, 1e-4) ** (step / steps)
        s = (s / np.sqrt(s.max(1, keepdims=True) * s.min(1, keepdims=True))).astype(np.float32)
        error = sum(_error(pair, reader, s) for reader in readers)
        if error < best:
            best, best_scales = error, s
    return best_scales


def mean_magnitudes(pair: BalancedPair, reader: BalancedReader, groups: int) -> Float[np.ndarray, "G C"]:
    """Returns the mean |x| of the producer's channels, for each expert if the producer has experts, else over all tokens."""
    totals = reader.inputs.absolute if groups > 1 else reader.inputs.absolute.sum(0, keepdims=True)
    tokens = reader.inputs.tokens if groups > 1 else reader.inputs.tokens.sum(keepdims=True)
    return producer_channels(reader.of, pair, totals / np.maximum(tokens, 1.0)[:, None], largest=False)


def _error(pair: BalancedPair, reader: BalancedReader, s: Float[np.ndarray, "G C"]) -> float:
    of, w, scheme, inputs = reader
    scales = reader_scales(of, pair, s)
    scaled = w * along_inputs(of, jnp.asarray(scales), w.shape)
    return output_error(of, scaled, scheme.quantize(of, scaled).dequantized(), divided_inputs(inputs, scales)) ** 2
