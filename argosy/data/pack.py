"""Packs documents into rows of equal length.

There are two packings. Both compute any row directly from its number:

    SplitRows   joins the documents to one stream. Row i reads stream[i T : i T + T + 1]. The overlap of one token keeps every target.
                Only the last row has padding. A document may begin in one row and end in the next.
    FitRows     keeps documents whole, one per row or packed by best fit decreasing (Johnson, 1973). Documents longer than a row
                continue in other rows, or are cut or dropped. Every position holds an input with its target, so a document of n
                tokens takes n - 1 positions.

A document is never predicted from the one before it, because the first token of a document is not a target. The model has to keep
attention within `segments`. Nothing here knows text, files or tokenizers. Rows that belong together, such as preference pairs, are in
`data.rows.groups`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.batch import LANGUAGE_MODELING, Batch, Field, Fields

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Corpus:
    """The tokens of all documents, concatenated, in memory or mapped from a file.

    tokens: [n] unsigned integers.
    starts: [documents + 1] int64, the index of the first token of each document, then n.
    weights: [n], the weight of each token in the loss: uint8 if all are 0 or 1, else float32; None: all are 1.
    columns: further numbers per token, such as advantages, as an array [n] for each name. Packing aligns them with the targets.
    values: numbers per document, as an array [documents] for each name. Only corpora of sequences have them (`data.rows.sequences`).
    """

    tokens: np.ndarray
    starts: np.ndarray
    weights: np.ndarray | None = None
    columns: Columns = field(default_factory=dict)
    values: Columns = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if name in LANGUAGE_MODELING:
                raise BadInput(f"a column may not be called `{name}`", hint="that is a field of every batch")
            if column.shape != self.tokens.shape:
                raise BadInput(f"the column `{name}` has {plural(len(column), 'number')} for {plural(len(self.tokens), 'token')}")

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    @property
    def fields(self) -> Fields:
        """The fields that batches of this corpus can hold."""
        return {**LANGUAGE_MODELING, **{name: Field("B T", column.dtype) for name, column in self.columns.items()}}

    @property
    def target_arrays(self) -> dict[str, np.ndarray]:
        """The arrays that packing aligns with the targets: the columns, and the weights under the name `mask`."""
        return dict(self.columns) | ({} if self.weights is None else {"mask": self.weights})


@dataclass(frozen=True)
class Encoded:
    """An encoded document, or a piece of one.

    tokens: [n] ids.
    weights, columns: as in `Corpus`.
    begins: whether a document begins with this piece.
    group: further documents of the same group, which follow this one, such as the rejected answer of a pair.
    values: numbers of this document, by name.
    """

    tokens: np.ndarray
    weights: np.ndarray | None = None
    begins: bool = True
    columns: Columns = field(default_factory=dict)
    group: "tuple[Encoded, ...]" = ()
    values: Mapping[str, float] = field(default_factory=dict)


class PackedRows(Protocol):
    """A table of rows. Any row can be computed from its number.

    per_group: the number g of rows in a group. Group i has the rows g i to g i + g - 1.
    fields: the fields that `gather` returns.
    """

    per_group: int
    fields: Fields

    def __len__(self) -> int: ...

    def gather(self, rows: np.ndarray) -> Batch:
        """Returns the batch of the rows with these numbers, [B]. The caller passes the rows of a group together and in order."""
        ...


class SplitRows:
    """Rows of `sequence` tokens, cut from the stream of all documents."""

    per_group = 1

    def __init__(self, corpus: Corpus, sequence: int):
        self.corpus, self.sequence, self.fields = corpus, sequence, corpus.fields
        self.count = max(0, -(-(len(corpus.tokens) - 1) // sequence))  # a target needs a token before it

    def __len__(self) -> int:
        return self.count

    def gather(self, rows: np.ndarray) -> Batch:
        tokens, starts, width = self.corpus.tokens, self.corpus.starts, self.sequence + 1
        first = rows.astype(np.int64) * self.sequence
        last = np.minimum(first + width, len(tokens))
        columns = self.corpus.target_arrays
        blank = Blank(len(rows), width, {name: self.fields[name].dtype for name in columns})
        cuts = zip(np.searchsorted(starts, first, side="right"), np.searchsorted(starts, last, side="left"))
        for row, (start, stop, (low, high)) in enumerate(zip(first.tolist(), last.tolist(), cuts)):
            blank.window[row, : stop - start] = tokens[start:stop]
            blank.begins[row, starts[low:high] - start] = True
            blank.filled[row] = stop - start
            for name, column in columns.items():
                blank.beside[name][row, : stop - start] = column[start:stop]
        return _finish(blank)


class Blank:
    """Empty rows of T + 1 tokens, to be filled in place.

    window: [B T+1] int32, the tokens.
    begins: [B T+1] bool, True at the first token of each document.
    filled: [B], the number of tokens in each row.
    beside: further numbers per token, [B T+1] for each name.
    """

    def __init__(self, rows: int, width: int, columns: Mapping[str, np.dtype]):
        self.window = np.zeros((rows, width), np.int32)
        self.begins = np.zeros((rows, width), bool)
        self.filled = np.zeros(rows, np.int64)
        self.beside = {name: np.zeros((rows, width), dtype) for name, dtype in columns.items()}


def _finish(blank: Blank) -> Batch:
    """The batch of filled rows: inputs, targets, segments, mask and columns. Documents in a row follow each other without a gap."""
    begins, column = blank.begins[:, :-1], np.arange(blank.window.shape[1], dtype=np.int32)
    is_input = column[:-1] < blank.filled[:, None]
    has_target = column[1:] < blank.filled[:, None]
    own_target = has_target & ~blank.begins[:, 1:]
    aligned = {
        name: np.where(own_target, values[:, 1:], 0).astype(values.dtype) for name, values in blank.beside.items()
    }
    return {
        "tokens": np.ascontiguousarray(blank.window[:, :-1]),
        "targets": np.ascontiguousarray(blank.window[:, 1:]),
        "segments": (np.cumsum(begins, axis=1, dtype=np.int32) + 1) * is_input,
        "mask": own_target.astype(np.float32),
    } | aligned


class FitRows:
    """Rows of `sequence` positions that hold whole documents.

    Planning takes about 2 s for a million documents, and the plan takes 24 bytes of memory per document.

    cut: number of documents longer than a row whose end is left out.
    dropped: number of documents longer than a row that are left out.
    unlearned: number of documents that are left out because none of their remaining targets counts in the loss.
    """

    per_group = 1

    def __init__(self, corpus: Corpus, sequence: int, too_long: str = "continue", *, alone: bool = False):
        """Args:
            sequence: the number of tokens in a row.
            too_long: what happens to documents longer than a row: `continue` in further rows, `cut`, `drop`, or `error`.
            alone: whether each row holds only one document, or one piece of a longer document.

        Raises:
            BadInput: a document is longer than a row, and `too_long` is `error`.
        """
        self.corpus, self.sequence, self.fields = corpus, sequence, corpus.fields
        self.cut = self.dropped = self.unlearned = 0
        if too_long == "continue":
            self.begin, self.size = cut_long(corpus.starts, sequence)
        else:
            self.begin, self.size = self.kept(np.diff(corpus.starts) - 1, too_long)
        row_of = np.arange(len(self.size)) if alone else best_fit_decreasing(self.size, sequence)
        # Pieces by row, then in the order of the corpus.
        self.order = np.argsort(row_of, kind="stable")
        self.offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of))]).astype(np.int64)

    def kept(self, places: np.ndarray, too_long: str) -> tuple[np.ndarray, np.ndarray]:
        """The first token of each document that is kept, and the number of input positions that it takes.

        Also sets `dropped`, `unlearned` and `cut`.

        Args:
            places: [documents], the number of input positions of each document.
        """
        long, short = places > self.sequence, places > 0
        if too_long == "error" and long.any():
            are = "is" if long.sum() == 1 else "are"
            problem = f"{long.sum():,} of {plural(len(places), 'document')} {are} longer than a row of {self.sequence:,} tokens"
            where = f"the longest has {places.max() + 1:,} tokens (data.too_long=error)"
            raise BadInput(problem, where=where, hint="raise `data.sequence`, or set `data.too_long=cut` or `drop`")
        usable = short & ~long if too_long == "drop" else short
        begin, size = self.corpus.starts[:-1][usable], np.minimum(places[usable], self.sequence)
        learns = self.learned(begin, size) > 0
        self.dropped = int(long.sum()) if too_long == "drop" else 0
        self.unlearned = int((~learns).sum())
        self.cut = int((long[usable] & learns).sum())
        return begin[learns], size[learns]

    def learned(self, begin: np.ndarray, size: np.ndarray) -> np.ndarray:
        """The number of targets of each piece that count in the loss."""
        if self.corpus.weights is None or not len(begin):
            return size
        edges = np.stack([begin + 1, begin + size + 1], axis=1).ravel()
        # The sum from the last edge on is never read, and numpy wants every edge inside.
        edges = edges[:-1] if edges[-1] == len(self.corpus.weights) else edges
        return np.add.reduceat(self.corpus.weights != 0, edges, dtype=np.int64)[::2]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def gather(self, rows: np.ndarray) -> Batch:
        batch: Batch = {name: np.zeros((len(rows), self.sequence), field.dtype) for name, field in self.fields.items()}
        for row, number in enumerate(rows.tolist()):
            at = 0
            pieces = self.order[self.offsets[number] : self.offsets[number + 1]]
            for segment, piece in enumerate(pieces.tolist(), start=1):
                begin, size = int(self.begin[piece]), int(self.size[piece])
                place(batch, (row, slice(at, at + size)), self.corpus, begin, size, segment)
                at += size
        return batch


def place(batch: Batch, where: tuple[int, slice], corpus: Corpus, begin: int, size: int, segment: int) -> None:
    """Writes `size` inputs of a document and their targets into a batch, in place.

    Args:
        where: the row and the slice of positions to write to.
        begin: the index of the first input in `corpus.tokens`.
        segment: the number of the document in its row.
    """
    batch["tokens"][where] = corpus.tokens[begin : begin + size]
    batch["targets"][where] = corpus.tokens[begin + 1 : begin + size + 1]
    batch["segments"][where] = segment
    batch["mask"][where] = 1
    for name, column in corpus.target_arrays.items():
        batch[name][where] = column[begin + 1 : begin + size + 1]


def cut_long(starts: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents into pieces of at most `sequence` inputs. Returns the first token and the number of inputs of each piece. A
    document of a single token has no input and gives no piece.
    """
    places = np.diff(starts) - 1
    pieces = -(-places // sequence)
    document = np.repeat(np.arange(len(places)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = starts[:-1][document] + number * sequence
    return begin, np.minimum(places[document] - number * sequence, sequence)


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Packs n items into bins. Returns the bin of each item, [n].

    The largest item comes first, and each goes into the fullest bin that has enough room. Among equal sizes the earlier item comes
    first. Open bins are stored by their remaining room. The rooms that occur are the bits of one integer, so the fullest bin is found
    with a shift and a lowest set bit.

    Args:
        sizes: [n], each at most `capacity`.
    """
    bin_of = np.zeros(len(sizes), np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = bins = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            bin_index = with_room[room].pop()
            rooms &= ~(1 << room) if not with_room[room] else -1
        else:
            room, bin_index, bins = capacity, bins, bins + 1
        bin_of[item] = bin_index
        with_room[room - size].append(bin_index)
        rooms |= 1 << (room - size)
    return bin_of


def rows_of(corpus: Corpus, packing: str, sequence: int, too_long: str = "continue") -> PackedRows:
    """The rows of a corpus.

    Args:
        packing: `split`, `fit` or `alone`, as in `data.packing`.
        sequence: number of tokens in a row.
        too_long: what happens to documents longer than a row, as in `FitRows`.
    """
    return SplitRows(corpus, sequence) if packing == "split" else FitRows(corpus, sequence, too_long, alone=packing == "alone")


@dataclass(frozen=True)
class PackCounts:
    """Counts of what packing did to documents.

    cut, dropped, unlearned: as in `FitRows`.
    parted: number of documents that begin in one row and continue in another.
    targets: number of targets.
    learned: number of targets that count in the loss; None: all.
    """

    cut: int = 0
    dropped: int = 0
    unlearned: int = 0
    parted: int = 0
    targets: int = 0
    learned: int | None = None


def counts_of(rows: PackedRows) -> PackCounts:
    """The counts of rows that are packed from documents; all 0 for other rows."""
    if (counts := getattr(rows, "counts", None)) is not None:
        return counts
    if isinstance(rows, FitRows):
        learned = None if rows.corpus.weights is None else int(rows.learned(rows.begin, rows.size).sum())
        return PackCounts(rows.cut, rows.dropped, rows.unlearned, 0, int(rows.size.sum()), learned)
    if isinstance(rows, SplitRows):
        starts, weights = rows.corpus.starts, rows.corpus.weights
        # The targets of a document are all tokens but the first. Its last input is its last token but one.
        last = np.maximum(starts[1:] - 2, starts[:-1])
        parted = int((starts[:-1] // rows.sequence != last // rows.sequence).sum())
        targets = int(starts[-1]) - rows.corpus.documents
        learned = None if weights is None else int(np.count_nonzero(weights) - np.count_nonzero(weights[starts[:-1]]))
        return PackCounts(parted=parted, targets=targets, learned=learned)
    return PackCounts()


def corpus_of(encoded: Iterable[Encoded]) -> Corpus:
    """Builds a corpus in memory. If a document has no weights, all its tokens count in the loss.

    Raises:
        BadInput: some documents have a column that others lack.
    """
    pieces = [piece for piece in encoded if len(piece.tokens)]
    if not pieces:
        return Corpus(np.zeros(0, np.uint16), np.zeros(1, np.int64))
    ends = np.cumsum([len(piece.tokens) for piece in pieces])
    begins = np.array([True, *(piece.begins for piece in pieces[1:])])
    starts = np.append((ends - [len(piece.tokens) for piece in pieces])[begins], ends[-1]).astype(np.int64)
    weights = None
    if any(piece.weights is not None for piece in pieces):
        weights = np.concatenate([np.ones(len(p.tokens), np.uint8) if p.weights is None else p.weights for p in pieces])
    names = set(pieces[0].columns)
    if odd := next((piece for piece in pieces if set(piece.columns) != names), None):
        listed = ", ".join(f"`{name}`" for name in sorted(names ^ set(odd.columns)))
        raise BadInput(f"only some documents have the column {listed}")
    columns = {name: np.concatenate([piece.columns[name] for piece in pieces]) for name in sorted(names)}
    return Corpus(np.concatenate([piece.tokens for piece in pieces]), starts, weights, columns)
