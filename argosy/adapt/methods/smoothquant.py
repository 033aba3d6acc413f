"""SmoothQuant: moves outliers of the activations into the weights. Xiao et al. 2022 (arXiv:2211.10438).

    s = max|x|^alpha / max|w|^(1 - alpha)        over tokens, and over the output channels of all readers
    y = (W s) (x / s)

The method is for rules that round activations too. With alpha = 1/2, weights and activations have the same largest magnitude in every
channel.

Differences from the paper: pairs are those that `methods.balance` finds to be exact. Besides the norms of the paper, these are values
and outputs of attention, and the matrices of feed-forward modules. Scales have the geometric mean 1.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from argosy.adapt.methods.balance import BalancedPair, producer_channels
from argosy.adapt.methods.matrices import as_matrices

if TYPE_CHECKING:
    from argosy.adapt.methods.awq import BalancedReader

LEAST = 1e-5


def smooth_scales(pair: BalancedPair, readers: "Sequence[BalancedReader]", groups: int, alpha: float) -> Float[np.ndarray, "G C"]:
    """Computes the scales of the producer's channels.

    Args:
        pair: the producer and its readers.
        readers: the readers that are quantized.
        groups: the number of the producer's experts, 1 without experts.
        alpha: how much of the activations' range is moved into the weights, from 0 to 1.
    """
    data, weights = list[np.ndarray](), list[np.ndarray]()
    for reader in readers:
        rows = np.asarray(abs(as_matrices(reader.of, reader.w)).max(2))
        for maxima, into in ((reader.inputs.largest, data), (rows, weights)):
            grouped = maxima if groups > 1 else maxima.max(0, keepdims=True)
            into.append(producer_channels(reader.of, pair, grouped, largest=True))
    x, w = (np.maximum(np.max(maxima, 0), LEAST) for maxima in (data, weights))
    s = x**alpha / w ** (1 - alpha)
    return (s / np.exp(np.log(s).mean(1, keepdims=True))).astype(np.float32)
