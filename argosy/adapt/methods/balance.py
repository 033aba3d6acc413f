"""Balancing: multiplies input channels of matrices by s, and divides the module that produces these channels by s. The layer computes
the same function, and its weights or activations are easier to round. `awq` and `smoothquant` choose s.

    x = norm(h) or W_1 h,  y = W_2 x        becomes        x' = norm(h) / s,  y = (W_2 s) x'

The norm's scale is divided, or the rows of W_1 and its bias. The modules of a block determine the candidate pairs. Each pair is tried
with random s on calibration data. A pair that changes the output of the layer is left out, because there is a nonlinearity between the
two, or another reader of the norm.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.adapt.calibration.statistics import InputStatistics
from argosy.adapt.methods.matrices import along_inputs, along_outputs
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.norm import RMSNorm
from argosy.models.parts.weight import Leaves

# The largest relative change of a layer's output that counts as rounding.
SAME = 1e-4


@dataclass(frozen=True)
class BalancedPair:
    """A producer of channels, and the contractions that read the channels, by their names within the layer.

    source: the name of the producer, a norm or a contraction.
    readers: the names of the contractions.
    heads: the number of consecutive heads of the readers that share one head of the producer (grouped queries).
    """

    source: str
    readers: tuple[str, ...]
    heads: int = 1


def candidate_pairs(block: Any, contractions: Mapping[str, Contraction]) -> Iterator[BalancedPair]:
    """Yields the pairs of a block that may be balanced, those nearest to the input first.

    Args:
        contractions: all contractions of the block by name, including those whose output only selects something.
    """
    for part in ("attn", "mlp"):
        if getattr(block, f"{part}_norm", None) is not None:
            readers = tuple(name for name, of in contractions.items() if name.startswith(f"{part}.") and of.inner == "D")
            yield BalancedPair(f"{part}_norm", readers)
    if "attn.k_up" in contractions:
        yield BalancedPair("attn.kv_norm", ("attn.k_up", "attn.v_up"))
    for source, reader in (("attn.v", "attn.o"), ("attn.v_up", "attn.o"), ("mlp.up", "mlp.down"), ("mlp.shared.up", "mlp.shared.down")):
        if source in contractions and reader in contractions:
            outputs, inputs = (_channels(contractions[name], side) for name, side in ((source, "kept"), (reader, "inner")))
            if inputs % outputs == 0:
                yield BalancedPair(source, (reader,), inputs // outputs)


def fold_scales(
    block: Any, leaves: Leaves, contractions: Mapping[str, Contraction], pair: BalancedPair, s: Float[np.ndarray, "G C"]
) -> Leaves:
    """Balances a pair. Returns the changed weights, by name within the layer.

    Args:
        leaves: the weights of the layer, by name within the layer.
        s: the scale of each channel of the producer, [G C]. G is the number of experts, 1 without experts.
    """
    out: Leaves = {}
    for name in pair.readers:
        of, w = contractions[name], leaves[f"{name}.w"]
        out[f"{name}.w"] = w * along_inputs(of, jnp.asarray(reader_scales(of, pair, s)), w.shape)
    if (of := contractions.get(pair.source)) is not None:
        w = leaves[f"{pair.source}.w"]
        out[f"{pair.source}.w"] = w / along_outputs(of, jnp.asarray(s), w.shape)
        if (b := leaves.get(f"{pair.source}.b")) is not None:
            out[f"{pair.source}.b"] = b / jnp.asarray(s).reshape(b.shape)
        return out
    norm: Any = block
    for step in pair.source.split("."):
        norm = getattr(norm, step)
    offset = norm.offset if isinstance(norm, RMSNorm) else 0.0
    out[f"{pair.source}.scale"] = (leaves[f"{pair.source}.scale"] + offset) / s[0] - offset
    if f"{pair.source}.b" in leaves:
        out[f"{pair.source}.b"] = leaves[f"{pair.source}.b"] / s[0]
    return out


def reader_scales(of: Contraction, pair: BalancedPair, s: Float[np.ndarray, "G C"]) -> Float[np.ndarray, "E I"]:
    """Returns the scales of the input channels of a reader, from the scales of the producer's channels."""
    if pair.heads > 1:
        size = of.sizes[of.inner[-1]]
        s = np.repeat(s.reshape(len(s), -1, size), pair.heads, 1).reshape(len(s), -1)
    return np.broadcast_to(s, (of.sizes[of.group] if of.group else 1, s.shape[1]))


def producer_channels(of: Contraction, pair: BalancedPair, a: Float[np.ndarray, "E I"], largest: bool) -> Float[np.ndarray, "E C"]:
    """Reduces numbers of a reader's input channels to the producer's channels, by the mean over the heads that share a channel.

    Args:
        a: the numbers of the input channels.
        largest: whether the maximum is taken instead of the mean.
    """
    if pair.heads == 1:
        return a
    size = of.sizes[of.inner[-1]]
    parts = a.reshape(len(a), -1, pair.heads, size)
    return (parts.max(2) if largest else parts.mean(2)).reshape(len(a), -1)


def divided_inputs(inputs: InputStatistics, s: Float[np.ndarray, "E I"]) -> InputStatistics:
    """Returns the statistics of the inputs divided by s."""
    gram = inputs.gram / (s[:, :, None] * s[:, None, :])
    return InputStatistics(gram.astype(np.float32), inputs.absolute / s, inputs.largest / s, inputs.tokens)


def random_scales(source: Contraction | None, size: int) -> Float[np.ndarray, "G C"]:
    """Returns random scales, to test whether a pair can be balanced.

    Args:
        source: the producer, None if it is a norm.
        size: the number of channels.
    """
    groups = source.sizes[source.group] if source is not None and source.group else 1
    return np.exp(np.random.default_rng(0).uniform(-0.5, 0.5, (groups, size))).astype(np.float32)


def source_size(pair: BalancedPair, contractions: Mapping[str, Contraction]) -> int:
    """Returns the number of channels of the producer."""
    return _channels(contractions[pair.readers[0]], "inner") // pair.heads


def is_same(output: Array | np.ndarray, other: Array | np.ndarray) -> bool:
    """Whether two outputs of a layer differ only by rounding."""
    output, other = np.asarray(output), np.asarray(other)
    return float(np.abs(output - other).max()) <= SAME * max(float(np.abs(output).max()), 1e-30)


def _channels(of: Contraction, side: str) -> int:
    letters = of.inner if side == "inner" else "".join(letter for letter in of.spec if letter not in of.inner + of.group)
    return int(np.prod([of.sizes[letter] for letter in letters]))
