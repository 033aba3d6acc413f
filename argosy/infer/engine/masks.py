"""What the next token of a sequence may be, as rows for the sampler's state: masks of grammars, and biases that have changed. Host
only: NumPy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from argosy.infer.engine.scheduler import Sequence as Scheduled
from argosy.infer.tools.grammar import masks, unpacked

# A slot, and the row that is written into it.
Row = tuple[int, np.ndarray]


def mask_rows(due: Sequence[Scheduled], vocab: int, close: Callable[[Scheduled, Any], None]) -> list[Row]:
    """The masks that differ from those in their slots, of sequences with a grammar.

    Args:
        close: ends a sequence that has no token left, for a reason.
    """
    rows: list[Row] = []
    if not due:
        return rows
    for sequence, row, state in zip(due, *masks([sequence.what.matcher for sequence in due]), strict=True):
        wanted = sequence.what
        goes_on, answer = state in ("open", "accepting"), sequence.tokens[sequence.prompt :]
        if goes_on and wanted.bias:
            goes_on = wanted.bias.leaves(unpacked(row, vocab), answer)
        if not goes_on:
            close(sequence, "stop" if state in ("accepting", "complete") else "blocked")
        elif (packed := row.tobytes()) != wanted.mask:
            wanted.mask = packed
            rows.append((sequence.slot, row))
    return rows


def bias_rows(due: Sequence[Scheduled]) -> list[Row]:
    """The biases that differ from those in their slots, of sequences with one."""
    rows = [(s.slot, s.what.bias.row(s.tokens[s.prompt :])) for s in due]
    return [(slot, row) for slot, row in rows if row is not None]


def spread(rows: Sequence[Row], count: int, nobody: int) -> tuple[np.ndarray, np.ndarray]:
    """The slots and the rows as arrays of this many; what is left over has a slot that nobody has."""
    where, values = np.full(count, nobody, np.int32), np.zeros((count, len(rows[0][1])), rows[0][1].dtype)
    for i, (slot, row) in enumerate(rows):
        where[i], values[i] = slot, row
    return where, values
