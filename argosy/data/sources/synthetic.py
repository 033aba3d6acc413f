"""Random tokens for benchmarks, without a corpus or a tokenizer.

A token is one step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) at a counter made from row and column. So any process can make
any row without the rows before it, and the tokens do not depend on the version of a library.
"""

from typing import Any

import numpy as np

from argosy.data.batch import LANGUAGE_MODELING, Batch
from argosy.data.sources import RowSource

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Synthetic(RowSource):
    """A source of `count` rows of random tokens per epoch, and 64 other rows for evaluation."""

    def __init__(self, count: int = 1 << 20):
        self.count = count

    def rows(self, *, sequence: int, vocab: int, seed: int, held_out: bool = False) -> "SyntheticRows":
        first, count = (self.count, 64) if held_out else (0, self.count)
        return SyntheticRows(first, count, sequence, vocab, seed)

    def fingerprint(self) -> dict[str, Any]:
        return {"source": "synthetic", "source.rows": self.count}


class SyntheticRows:
    """Rows `first` up to `first + count` of an endless table of uniform tokens below `vocab`."""

    per_group, fields = 1, LANGUAGE_MODELING

    def __init__(self, first: int, count: int, sequence: int, vocab: int, seed: int):
        self.first, self.count, self.sequence, self.vocab = first, count, sequence, vocab
        # The seed is mixed, so that the streams of neighboring seeds do not overlap.
        self.seed = mix(np.array([seed % 2**64], np.uint64))

    def __len__(self) -> int:
        return self.count

    def gather(self, rows: np.ndarray) -> Batch:
        width = self.sequence + 1
        counter = (rows.astype(np.uint64) + np.uint64(self.first))[:, None] * np.uint64(width)
        bits = splitmix(self.seed, counter + np.arange(width, dtype=np.uint64))
        tokens = ((bits >> np.uint64(32)) * np.uint64(self.vocab) >> np.uint64(32)).astype(np.int32)
        shape = (len(rows), self.sequence)
        return {
            "tokens": np.ascontiguousarray(tokens[:, :-1]),
            "targets": np.ascontiguousarray(tokens[:, 1:]),
            "segments": np.ones(shape, np.int32),
            "mask": np.ones(shape, np.float32),
        }


def splitmix(seed: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """The output at index `counter` of the SplitMix64 stream that starts at `seed`. All are uint64."""
    return mix(seed + (counter + np.uint64(1)) * GOLDEN)


def mix(z: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's finalizer, a bijection of 64-bit integers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
