"""Documents to rows of equal length: which tokens of a corpus make row i.

Two ways, both giving any row at once from its number:

    SplitRows   the documents as one stream; row i reads stream[i T : i T + T + 1]. The overlap of one keeps every
                target, the only padding is in the last row, and a document may begin in one row and end in the next.
    FitRows     whole documents, best fit decreasing (Johnson, 1973); only documents longer than a row are cut. Every
                place holds an input with its target, so a document of n tokens takes n - 1.

A document is never predicted from the one before it: the first token of a document is no target in either. That
attention stays within `segments` is the model's part. Nothing here knows text, files or tokenizers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from argosy.data.batch import Batch


@dataclass(frozen=True)
class Corpus:
    """Tokens of all documents in a row, in memory or mapped from a file.

    tokens: [n] unsigned integers.  starts: [documents + 1] int64, where each document begins, then n.
    learn: [n] uint8, 1 where a token counts in the loss; None means all do.
    """

    tokens: np.ndarray
    starts: np.ndarray
    learn: np.ndarray | None = None

    @property
    def documents(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True)
class Encoded:
    """A document, or a piece of one: tokens [n], learn [n] or None as in Corpus, and whether a document begins here."""

    tokens: np.ndarray
    learn: np.ndarray | None = None
    begins: bool = True


class Rows(Protocol):
    """A table of rows, any of which can be made from its number."""

    def __len__(self) -> int: ...

    def gather(self, rows: np.ndarray) -> Batch:
        """The batch of those rows: [B] numbers to [B T] arrays."""
        ...


class SplitRows:
    """Rows of `sequence` tokens cut from the stream."""

    def __init__(self, corpus: Corpus, sequence: int):
        self.corpus, self.sequence = corpus, sequence
        self.count = max(0, -(-(len(corpus.tokens) - 1) // sequence))  # a target needs a token before it

    def __len__(self) -> int:
        return self.count

    def gather(self, rows: np.ndarray) -> Batch:
        tokens, starts, width = self.corpus.tokens, self.corpus.starts, self.sequence + 1
        first = rows.astype(np.int64) * self.sequence
        last = np.minimum(first + width, len(tokens))
        blank = Blank(len(rows), width, self.corpus.learn is not None)
        cuts = zip(np.searchsorted(starts, first, side="right"), np.searchsorted(starts, last, side="left"))
        for row, (start, stop, (low, high)) in enumerate(zip(first.tolist(), last.tolist(), cuts)):
            blank.window[row, : stop - start] = tokens[start:stop]
            blank.begins[row, starts[low:high] - start] = True
            blank.filled[row] = stop - start
            if blank.learn is not None and self.corpus.learn is not None:
                blank.learn[row, : stop - start] = self.corpus.learn[start:stop]
        return finish(blank)


class Blank:
    """Rows of T + 1 tokens while they are filled; `begins` marks where documents do, after column 0."""

    def __init__(self, rows: int, width: int, learn: bool):
        self.window = np.zeros((rows, width), np.int32)
        self.begins = np.zeros((rows, width), bool)
        self.filled = np.zeros(rows, np.int64)
        self.learn = np.zeros((rows, width), np.uint8) if learn else None


def finish(blank: Blank) -> Batch:
    """Inputs, targets, segments, positions and mask of windows whose documents abut."""
    begins, column = blank.begins[:, :-1], np.arange(blank.window.shape[1], dtype=np.int32)
    is_input = column[:-1] < blank.filled[:, None]
    has_target = column[1:] < blank.filled[:, None]
    since = np.maximum.accumulate(np.where(begins, column[:-1], 0), axis=1)
    mask = has_target & ~blank.begins[:, 1:]
    if blank.learn is not None:
        mask &= blank.learn[:, 1:].astype(bool)
    return {
        "tokens": np.ascontiguousarray(blank.window[:, :-1]),
        "targets": np.ascontiguousarray(blank.window[:, 1:]),
        "segments": (np.cumsum(begins, axis=1, dtype=np.int32) + 1) * is_input,
        "positions": (column[:-1] - since) * is_input,
        "mask": mask.astype(np.float32),
    }


class FitRows:
    """Rows of `sequence` places holding whole documents.

    The plan takes 24 bytes a document in memory and about 2 s for a million documents.
    """

    def __init__(self, corpus: Corpus, sequence: int):
        self.corpus, self.sequence = corpus, sequence
        self.begin, self.size = cut_long(corpus.starts, sequence)
        row_of = best_fit_decreasing(self.size, sequence)
        self.order = np.argsort(row_of, kind="stable")  # pieces by row, then in the order of the corpus
        self.offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of))]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def gather(self, rows: np.ndarray) -> Batch:
        shape = (len(rows), self.sequence)
        batch: Batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segments", "positions")}
        batch["mask"] = np.zeros(shape, np.float32)
        for row, number in enumerate(rows.tolist()):
            at = 0
            pieces = self.order[self.offsets[number] : self.offsets[number + 1]]
            for segment, piece in enumerate(pieces.tolist(), start=1):
                begin, size = int(self.begin[piece]), int(self.size[piece])
                self.place(batch, (row, slice(at, at + size)), begin, size, segment)
                at += size
        return batch

    def place(self, batch: Batch, where: tuple[int, slice], begin: int, size: int, segment: int) -> None:
        tokens, learn = self.corpus.tokens, self.corpus.learn
        batch["tokens"][where] = tokens[begin : begin + size]
        batch["targets"][where] = tokens[begin + 1 : begin + size + 1]
        batch["segments"][where] = segment
        batch["positions"][where] = np.arange(size)
        batch["mask"][where] = 1 if learn is None else learn[begin + 1 : begin + size + 1]


def cut_long(starts: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each piece begins and how many input places it takes: at most `sequence`, and none for lone tokens."""
    places = np.diff(starts) - 1
    pieces = -(-places // sequence)
    document = np.repeat(np.arange(len(places)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = starts[:-1][document] + number * sequence
    return begin, np.minimum(places[document] - number * sequence, sequence)


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """[n] sizes up to `capacity` to the [n] bins they go in: longest first, each in the fullest bin that takes it.

    Open bins are kept by the room left in them, and which rooms occur as the bits of one integer, so that finding the
    fullest bin is a shift and a lowest set bit. Among equals the earlier item comes first.
    """
    bin_of = np.zeros(len(sizes), np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = bins = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            rooms &= ~(1 << room) if not with_room[room] else -1
        else:
            room, chosen, bins = capacity, bins, bins + 1
        bin_of[item] = chosen
        with_room[room - size].append(chosen)
        rooms |= 1 << (room - size)
    return bin_of


def rows_of(corpus: Corpus, packing: str, sequence: int) -> Rows:
    """The rows of a corpus under one of the two packings."""
    return (FitRows if packing == "fit" else SplitRows)(corpus, sequence)


def corpus_of(encoded: Iterable[Encoded]) -> Corpus:
    """A corpus in memory."""
    pieces = [piece for piece in encoded if len(piece.tokens)]
    if not pieces:
        return Corpus(np.zeros(0, np.uint16), np.zeros(1, np.int64))
    ends = np.cumsum([len(piece.tokens) for piece in pieces])
    begins = np.array([True, *(piece.begins for piece in pieces[1:])])
    starts = np.append((ends - [len(piece.tokens) for piece in pieces])[begins], ends[-1]).astype(np.int64)
    learn = None
    if any(piece.learn is not None for piece in pieces):
        learn = np.concatenate([np.ones(len(p.tokens), np.uint8) if p.learn is None else p.learn for p in pieces])
    return Corpus(np.concatenate([piece.tokens for piece in pieces]), starts, learn)
