"""Merges adapters into a model's weights while they are read, a slab at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np

from argosy.core.formats import Arrays, OverlaidTensors, TensorReader, TensorView
from argosy.weights.peft.sites import Adapter, PeftContents, contractions

# The bytes of float32 values that are merged at a time.
SLAB_BYTES = 1 << 26


def merged_weights(weights: TensorReader, contents: PeftContents, config: Any) -> TensorReader:
    """Returns a reader of a model's weights that merges adapters when weights are read: W + gain A B, in the type of W. Weights that
    were trained in full replace those of the model."""
    specs, adapters = contractions(config), contents.adapters
    weights = OverlaidTensors(weights, Arrays(contents.whole))

    def change(name: str, read: Callable[[], np.ndarray], part: int | None) -> np.ndarray:
        name = name.removesuffix(".w")
        if name not in adapters:
            return read()
        if part is None:
            return with_adapter(specs[name], adapters[name], read(), 0)
        return with_adapter(specs[name], adapters[name], read()[None], part)[0]

    return TensorView(weights, change=change)


def with_adapter(of: Any, adapter: Adapter, weight: np.ndarray, first: int) -> np.ndarray:
    """Merges an adapter into a weight, or into a slice of its first axis.

    Args:
        of: the contraction of the weight.
        weight: the whole weight, or entries of its first axis.
        first: the index of the first of these entries.
    """
    outer = "".join(letter for letter in of.spec if letter not in of.inner + of.group)
    letters_a, letters_b, letters_m = f"{of.group}{of.inner}r", f"{of.group}r{outer}", of.kept
    out = np.empty_like(weight)
    rows = max(1, SLAB_BYTES * len(weight) // (4 * weight.size))
    slabs = [slice(low, min(low + rows, len(weight))) for low in range(0, len(weight), rows)]

    def part_of(array: np.ndarray, letters: str, slab: slice) -> np.ndarray:
        """The part of a factor that belongs to a slab."""
        there = slice(first + slab.start, first + slab.stop)
        return array[tuple(there if letter == of.spec[0] else slice(None) for letter in letters)].astype(np.float32)

    def merged_slab(slab: slice) -> np.ndarray:
        a, b = part_of(adapter.a, letters_a, slab), part_of(adapter.b, letters_b, slab)
        delta = np.einsum(f"{letters_a},{letters_b}->{of.spec}", a, b, optimize=True)
        return weight[slab].astype(np.float32) + np.float32(adapter.gain) * delta

    # Merging the whole weight at once would need five arrays of its size.
    if adapter.m is None:
        for slab in slabs:
            out[slab] = merged_slab(slab).astype(weight.dtype)
        return out
    inner = tuple(i for i, letter in enumerate(of.spec) if letter in of.inner)
    squares = [np.sum(np.square(merged_slab(slab)), inner) for slab in slabs]
    if 0 in inner:
        squares = [sum(squares)] * len(slabs)
    for slab, square in zip(slabs, squares):
        ratio = part_of(adapter.m, letters_m, slab) / np.sqrt(square)
        out[slab] = (merged_slab(slab) * np.expand_dims(ratio, inner)).astype(weight.dtype)
    return out
