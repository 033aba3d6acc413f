"""GGUF files whose matrices are in blocks: random weights of any model, rounded by the gguf library."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf_files import Packed, write_gguf

from argosy.core.formats import Arrays
from argosy.core.keymap import KeyMap
from argosy.models.base.language import LanguageConfig


def gguf_in_blocks(path: Path, config: LanguageConfig, kinds: tuple[str, ...], seed: int = 0) -> Path:
    """A file with every matrix in one of these types, in turn."""
    table, rng, count = KeyMap(*config.hub_rows()), np.random.default_rng(seed), 0
    weights = {name: rng.normal(0, 0.1, table.shape(name)).astype(np.float32) for name in table.paths}
    theirs = {entry.name: entry.make() for entry in table.inverse(Arrays(weights))}

    def packed(name: str, tensor: np.ndarray) -> Packed:
        nonlocal count
        if tensor.ndim < 2 or tensor.shape[-1] % 32 or "norm" in name:
            return tensor, None
        kind, count = Kind[kinds[count % len(kinds)]], count + 1
        return gguf.quants.quantize(tensor, kind), kind

    return write_gguf(path, config.to_hub(), theirs, pack=packed)
