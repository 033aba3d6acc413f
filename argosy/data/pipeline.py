"""Batches from settings: Grain over a prepared corpus, over made-up rows, or over a stream of documents.

A prepared corpus is a table of rows. An epoch is a permutation of the table, epochs follow each other without a seam,
and batch b is places b B up to b B + B of that sequence. So the position is one number, the same on every host, and any
number of hosts may go on from it. Grain's element is one process's rows of a few global batches, gathered at once: an
element for each row costs ten times the time (60 us of Python each).

A stream (`data.online`) has no such table. Its position is that of one process, and holds only among as many.

Grain imports jax, so it is imported when a pipeline is built.
"""

import hashlib
import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.errors import BadInput, Damaged
from argosy.data.batch import Batch, Batches, Fingerprint
from argosy.data.pack import Rows, corpus_of, rows_of
from argosy.data.prepare import (
    Encoder,
    HeldOut,
    Prepared,
    Progress,
    fingerprint_of,
    grouped,
    is_prepared,
    open_prepared,
    prepare,
)
from argosy.data.settings import DataSettings
from argosy.data.sources import Document, RowSource, Source, find_source
from argosy.data.sources.synthetic import splitmix

if TYPE_CHECKING:
    from grain.experimental import ThreadPrefetchDatasetIterator

    from argosy.data.tokenize import Tokenizer

CORPUS_BYTES = 10**9  # more text than this is prepared on purpose, not on the way into training
BLOCK_TOKENS = 1 << 14  # made at once: Grain's 60 us an element weigh nothing, the first batch still comes within 1 ms
SORTED_ROWS = 1 << 20  # 8 MB of permutation, made in 0.1 s an epoch
ENDLESS = sys.maxsize


@dataclass(frozen=True)
class Table:
    """All rows of one split, what identifies them, and the bytes of text for each target (None: there is no text)."""

    rows: Rows
    identity: Fingerprint
    bytes_per_token: float | None


def build(
    settings: DataSettings,
    tokenizer: "Tokenizer | None",
    *,
    vocab: int,
    seed: int,
    process: int = 0,
    processes: int = 1,
    source: Source | RowSource | Prepared | None = None,
    progress: Progress | None = None,
) -> Batches:
    """The batches to train on: this process's rows of each global batch.

    vocab: the model's.  seed: the run's, for where the settings give none.  source: in place of `settings.source`.

    Raises:
        UserError: the data is missing, empty, or does not fit the tokenizer, the model or the number of processes.
    """
    share = share_of(settings.batch, process, processes)
    source, seed = source or find(settings), seed if settings.seed is None else settings.seed
    if settings.online and isinstance(source, Source):
        return StreamBatches(source, settings, fitting(tokenizer, settings, vocab), seed, process, processes)
    table = table_of(source, "train", settings, tokenizer, vocab, seed, progress)
    rows = len(table.rows)
    count = ENDLESS if settings.epochs is None else int(settings.epochs * rows) // settings.batch
    if not count:
        what = f"{settings.epochs:g} epochs of {rows} rows hold no batch of {settings.batch}"
        raise BadInput(what, hint="lower `data.batch` or `data.sequence`, or raise `data.epochs`")
    order = Order(rows, seed if settings.shuffle else None)
    return RowBatches(table, Blocks(table.rows, order, share, count, settings), settings, seed)


def eval_batches(
    settings: DataSettings,
    tokenizer: "Tokenizer | None",
    *,
    vocab: int,
    seed: int,
    process: int = 0,
    processes: int = 1,
    source: Source | RowSource | Prepared | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Batches:
    """The held-out rows in their order, once; `rewind()` before each evaluation. The last batch is filled with padding.

    limit: batches at most. The rest as for `build`.

    Raises:
        UserError: as `build` does, and where nothing is held out.
    """
    share = share_of(settings.batch, process, processes)
    source, seed = source or find(settings), seed if settings.seed is None else settings.seed
    table = table_of(source, "held_out", settings, tokenizer, vocab, seed, progress)
    count = min(-(-len(table.rows) // settings.batch), limit or ENDLESS)
    order = Order(len(table.rows), None, repeats=False)
    return RowBatches(table, Blocks(table.rows, order, share, count, settings), settings, seed)


def share_of(batch: int, process: int, processes: int) -> slice:
    """The rows of a global batch that are this process's.

    Raises:
        BadInput: the batch does not divide among the processes.
    """
    if batch % processes:
        what = f"a batch of {batch} rows does not divide among {processes} processes"
        raise BadInput(what, where="data.batch", hint=f"make it a multiple of {processes}")
    return slice(process * batch // processes, (process + 1) * batch // processes)


def find(settings: DataSettings) -> Source | RowSource | Prepared:
    """What `settings.source` names; a folder written by `prepare` is read as it is."""
    if not is_prepared(settings.source):
        return find_source(settings)
    if settings.online:
        raise BadInput("a prepared corpus is not read online", where=settings.source, hint="leave `data.online` off")
    return open_prepared(settings.source)


def fitting(tokenizer: "Tokenizer | None", settings: DataSettings, vocab: int) -> "Tokenizer":
    """The tokenizer, which must be there and make no token that the model lacks."""
    if tokenizer is None:
        raise BadInput("text needs a tokenizer", where=f"data.source={settings.source}", hint="set `data.tokenizer`")
    if tokenizer.vocab > vocab:
        what = f"the tokenizer has {tokenizer.vocab:,} tokens, the model only {vocab:,}"
        raise BadInput(what, where=f"data.tokenizer={settings.tokenizer}", hint=f"set `model.vocab={tokenizer.vocab}`")
    return tokenizer


def table_of(
    source: Source | RowSource | Prepared,
    split: str,
    settings: DataSettings,
    tokenizer: "Tokenizer | None",
    vocab: int,
    seed: int,
    progress: Progress | None,
) -> Table:
    """The rows of the split `train` or `held_out`; text is tokenized on the way, where that has not been done."""
    if isinstance(source, RowSource):
        rows = source.rows(sequence=settings.sequence, vocab=vocab, seed=seed, held_out=split == "held_out")
        return Table(rows, source.fingerprint() | {"vocab": vocab}, None)
    tokenizer = fitting(tokenizer, settings, vocab)
    if isinstance(source, Source) and settings.online:
        return held_out_of_stream(source, settings, tokenizer)
    prepared = source if isinstance(source, Prepared) else cached(source, settings, tokenizer, progress)
    if prepared.fingerprint.get("tokenizer") != tokenizer.fingerprint:
        what = f"the corpus was prepared with another tokenizer than `{settings.tokenizer}`"
        raise BadInput(what, where=str(prepared.folder), hint="set `data.tokenizer` to that one, or prepare it again")
    corpus = prepared.train if split == "train" else prepared.held_out
    rows = needed(rows_of(corpus, settings.packing, settings.sequence), split, settings)
    return Table(rows, prepared.fingerprint, prepared.bytes_per_token(split))


def needed(rows: Rows, split: str, settings: DataSettings) -> Rows:
    """The rows, of which there must be some."""
    if not len(rows):
        purpose, hint = ("train", "") if split == "train" else ("evaluate", "raise `data.held_out`, or ")
        raise BadInput(f"the corpus holds nothing to {purpose} on", where=settings.source, hint=f"{hint}give more text")
    return rows


def cached(source: Source, settings: DataSettings, tokenizer: "Tokenizer", progress: Progress | None) -> Prepared:
    """The source's prepared corpus in the cache, where it is written first if need be.

    Raises:
        BadInput: more text than anybody wants to wait for unasked.
    """
    fingerprint = fingerprint_of(source, tokenizer, settings.held_out, settings.bos)
    key = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder(settings) / f"{fingerprint['source']}-{key}"
    if is_prepared(folder):
        try:
            return open_prepared(folder)
        except Damaged:
            shutil.rmtree(folder)  # a cache is made again
    if (source.size_bytes or 0) > CORPUS_BYTES:
        raise BadInput(
            f"{source.size_bytes or 0:,} bytes of text are too many to tokenize on the way into training",
            where=f"data.source={settings.source}",
            hint=f"run `argosy data prepare {settings.source} FOLDER`, then train with `data.source=FOLDER`",
        )
    return prepare(source, tokenizer, folder, held_out=settings.held_out, bos=settings.bos, progress=progress)


def cache_folder(settings: DataSettings) -> Path:
    if settings.cache is not None:
        return Path(settings.cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "argosy" / "corpora"


def held_out_of_stream(source: Source, settings: DataSettings, tokenizer: "Tokenizer") -> Table:
    """The documents that a stream leaves out, read once and kept in memory."""
    chooser, encoder = HeldOut(settings.held_out), Encoder(tokenizer, settings.bos)
    kept = [document for document in source.documents() if chooser.takes(document)]
    corpus = corpus_of(encoder.encode(kept))
    rows = needed(rows_of(corpus, settings.packing, settings.sequence), "held_out", settings)
    size_bytes = sum(len(document.text.encode()) for document in kept)
    identity = fingerprint_of(source, tokenizer, settings.held_out, settings.bos)
    return Table(rows, identity, size_bytes / (len(corpus.tokens) - corpus.documents) if size_bytes else None)


def ordered(identity: Fingerprint, settings: DataSettings, seed: int) -> Fingerprint:
    """Whatever decides which rows come in which order; not the number of processes, nor how long the run is."""
    shuffle = "order 1" if settings.shuffle else False  # a number for each way of shuffling there will have been
    packed = {"sequence": settings.sequence, "batch": settings.batch, "packing": settings.packing}
    return identity | packed | {"shuffle": shuffle, "seed": seed, "online": settings.online}


class Order:
    """Place in the endless sequence of epochs -> row, or -1 past the end where the table is read once."""

    def __init__(self, rows: int, seed: int | None, *, repeats: bool = True):
        self.rows, self.seed, self.repeats = rows, seed, repeats
        self.sorted: dict[int, np.ndarray] = {}

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """[B] places to [B] rows, both int64."""
        if not self.repeats:
            return np.where(places < self.rows, places, -1)
        epochs, rows = np.divmod(places, self.rows)
        if self.seed is not None:
            for epoch in np.unique(epochs).tolist():
                here = epochs == epoch
                rows[here] = self.shuffled(epoch, rows[here])
        return rows

    def shuffled(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """The epoch's permutation. Small tables sort random keys; Grain's index shuffle needs no memory, but works in a
        domain of at least 65,536 and takes 0.3 ms for each row of a table of 100.
        """
        if self.rows > SORTED_ROWS:
            from grain.experimental import index_shuffle

            seed = self.epoch_seed(epoch) % 2**32
            return np.array([index_shuffle(row, self.rows - 1, seed, 4) for row in rows.tolist()], np.int64)
        if epoch not in self.sorted:
            keys = splitmix(np.array([self.epoch_seed(epoch)], np.uint64), np.arange(self.rows, dtype=np.uint64))
            self.sorted = {epoch: np.argsort(keys, kind="stable")}
        return self.sorted[epoch][rows]

    def epoch_seed(self, epoch: int) -> int:
        """64 bits for each epoch. Hashed: under seed + epoch, run 1's second epoch would be run 2's first."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest(), "big")


class Blocks:
    """Grain's source: number of a block -> this process's rows of `per_block` global batches in a row."""

    def __init__(self, rows: Rows, order: Order, share: slice, count: int, settings: DataSettings):
        self.rows, self.order, self.count, self.batch = rows, order, count, settings.batch
        self.per_block = max(1, BLOCK_TOKENS // (settings.batch * settings.sequence))
        self.share = np.arange(share.start, share.stop)

    def __len__(self) -> int:
        return -(-self.count // self.per_block)

    def __getitem__(self, index: int) -> Batch:
        first = index * self.per_block
        batches = np.arange(first, min(first + self.per_block, self.count))
        rows = self.order((batches[:, None] * self.batch + self.share).ravel())
        made = self.rows.gather(np.maximum(rows, 0))
        if (rows < 0).any():
            made = {name: array * (rows >= 0)[:, None].astype(array.dtype) for name, array in made.items()}
        return made


class RowBatches(Batches):
    """Batches of a table. The position is the place of the next global batch's first row."""

    def __init__(self, table: Table, blocks: Blocks, settings: DataSettings, seed: int):
        import grain

        self.fingerprint = ordered(table.identity, settings, seed)
        self.tokens_per_batch = settings.batch * settings.sequence
        self.bytes_per_token = table.bytes_per_token
        self.blocks, self.block, self.handed = blocks, None, 0
        ahead = grain.ReadOptions(num_threads=min(1, settings.prefetch), prefetch_buffer_size=settings.prefetch)
        self.iterator = iter(grain.MapDataset.source(blocks).to_iter_dataset(ahead))

    def __next__(self) -> Batch:
        if self.handed >= self.blocks.count:
            raise StopIteration
        number, rows = self.handed % self.blocks.per_block, len(self.blocks.share)
        if self.block is None or number == 0:
            self.block = next(self.iterator)
        self.handed += 1
        return {name: array[number * rows : (number + 1) * rows] for name, array in self.block.items()}

    def position(self) -> dict[str, Any]:
        return {"row": self.handed * self.blocks.batch}

    def seek(self, position: dict[str, Any]) -> None:
        from grain.experimental import set_next_index

        row, batch = whole_numbers(position, ("row",))["row"], self.blocks.batch
        if row % batch:
            raise BadInput(f"row {row} does not begin a batch of {batch}", where="the saved position")
        self.handed, self.block = row // batch, None
        set_next_index(self.iterator, self.handed // self.blocks.per_block)

    def close(self) -> None:
        self.block = None
        self.iterator.close()


class StreamBatches(Batches):
    """Batches of documents tokenized and packed as they come."""

    def __init__(
        self, source: Source, settings: DataSettings, tokenizer: "Tokenizer", seed: int, process: int, processes: int
    ):
        from grain.experimental import ThreadPrefetchDatasetIterator

        if settings.epochs is not None and processes > 1:
            what = "several processes cannot end a stream together: `data.epochs` counts each one's own documents"
            raise BadInput(what, hint="leave `data.epochs` out, or prepare the corpus (`data.online=false`)")
        identity = fingerprint_of(source, tokenizer, settings.held_out, settings.bos)
        self.fingerprint = ordered(identity, settings, seed)
        self.tokens_per_batch = settings.batch * settings.sequence
        self.bytes_per_token = None
        self.among = {"process": process, "processes": processes}
        stream = Stream(source, settings, lambda: Encoder(tokenizer, settings.bos), seed, process, processes)
        self.held = [ThreadPrefetchDatasetIterator(stream, settings.prefetch)]
        # Grain's iterator closes itself when deleted, which prints a traceback once the interpreter shuts down.
        self.release = weakref.finalize(self, lambda held: held.pop().close(), self.held)

    def __next__(self) -> Batch:
        return next(self.iterator)

    @property
    def iterator(self) -> "ThreadPrefetchDatasetIterator":
        if not self.held:
            raise ValueError("these batches are closed")
        return self.held[0]

    def position(self) -> dict[str, Any]:
        return self.iterator.get_state() | self.among

    def seek(self, position: dict[str, Any]) -> None:
        wanted = whole_numbers(position, Stream.POSITION)
        if position and any(position.get(name) != number for name, number in self.among.items()):
            raise BadInput(
                "the position in a stream holds only for the same process of as many: "
                + "; ".join(f"`{name}` was {position.get(name)}, is {number}" for name, number in self.among.items()),
                hint="a prepared corpus (`data.online=false`) goes on under any number of processes",
            )
        self.iterator.set_state(wanted)

    def close(self) -> None:
        self.release()


class Stream:
    """An endless iterator over windows of about a mebibyte of text: tokenized, packed, shuffled within, handed out.

    Process p of P takes every P-th document. A position names the first document of the open window, counted over those
    of this process, and the rows taken from it: going there reads the source from its start, tokenizes one window.
    """

    POSITION = ("epoch", "document", "row")

    def __init__(
        self,
        source: Source,
        settings: DataSettings,
        make_encoder: Callable[[], Encoder],
        seed: int,
        process: int,
        processes: int,
    ):
        self.source, self.settings, self.make_encoder = source, settings, make_encoder
        self.seed, self.process, self.processes = seed, process, processes
        self.set_state(dict.fromkeys(self.POSITION, 0))

    def get_state(self) -> dict[str, int]:
        return dict(self.state)

    def set_state(self, state: dict[str, int]) -> None:
        self.state = dict(state)
        self.feed = self.rows_from(**state)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Batch:
        rows = [next(self.feed) for _ in range(self.settings.batch // self.processes)]
        self.state = rows[-1][0]
        return {name: np.concatenate([row[name] for _, row in rows]) for name in rows[0][1]}

    def rows_from(self, epoch: int, document: int, row: int) -> Iterator[tuple[dict[str, int], Batch]]:
        """Batches of one row from a position on, each with the position behind it."""
        while self.settings.epochs is None or epoch < self.settings.epochs:
            empty = document == 0
            for first, rows in self.windows(document):
                order = Order(len(rows), self.seed if self.settings.shuffle else None)
                window = rows.gather(order(epoch * len(rows) + np.arange(len(rows))))
                for taken in range(row, len(rows)):
                    one = {name: array[taken : taken + 1] for name, array in window.items()}
                    yield {"epoch": epoch, "document": first, "row": taken + 1}, one
                row, empty = 0, False
            if empty:
                who = f"process {self.process} of {self.processes}"
                raise BadInput(f"the corpus holds nothing to train on for {who}", where=self.settings.source)
            epoch, document = epoch + 1, 0

    def windows(self, start: int) -> Iterator[tuple[int, Rows]]:
        """The rows of each window from document `start` on, with the number of its first document."""
        encoder, documents = self.make_encoder(), self.own_documents()
        for document in islice(documents, start):
            encoder.inside = not document.ends
        for group in grouped(documents):
            rows = rows_of(corpus_of(encoder.encode(group)), self.settings.packing, self.settings.sequence)
            if len(rows):
                yield start, rows
            start += len(group)

    def own_documents(self) -> Iterator[Document]:
        """This process's documents that are not held out. Pieces of one stay together."""
        chooser, number, inside = HeldOut(self.settings.held_out), -1, False
        for document in self.source.documents():
            number += not inside
            inside = not document.ends
            if not chooser.takes(document) and number % self.processes == self.process:
                yield document


def whole_numbers(position: dict[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """The named parts of a saved position, 0 where it is empty.

    Raises:
        BadInput: it is not a position of this kind of pipeline.
    """
    found = {name: position.get(name, None if position else 0) for name in names}
    for name, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise BadInput(f"not a position in this data: `{name}` is {value!r}", where="the saved position")
    return found
