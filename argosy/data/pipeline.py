"""Batches from settings: Grain over a prepared corpus, over rows in memory, or over documents as they come.

A prepared corpus is a table of rows. An epoch is a permutation of the table, epochs follow each other without a break, and
batch b is places b B up to b B + B of that sequence. So the position is one number, the same on every host, and any number
of hosts can continue from it. Rows that belong together (`Rows.per_group`) are permuted, batched and shared out as a whole.
Grain's element is one process's rows of a few global batches, gathered at once: one element per row would cost ten times
the time (60 us of Python each).

Online (`data.online`) there is no table. The position is that of one process, and holds only among as many processes.

Grain imports jax, so it is imported when a pipeline is built.
"""

import hashlib
import json
import os
import shutil
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.errors import BadInput, Damaged
from argosy.data.batch import LANGUAGE_MODELING, Batch, Batches, Fields, Fingerprint, check_fields
from argosy.data.encode import Encoder
from argosy.data.pack import Corpus, Rows, corpus_of, rows_of
from argosy.data.prepare import (
    HeldOut,
    Prepared,
    Progress,
    fingerprint_of,
    grouped,
    is_prepared,
    open_prepared,
    prepare,
)
from argosy.data.settings import MADE_WITH, DataSettings
from argosy.data.sources import Document, RowSource, Source, find_source
from argosy.data.sources.synthetic import splitmix
from argosy.data.summary import CorpusSummary

if TYPE_CHECKING:
    from grain.experimental import ThreadPrefetchDatasetIterator

    from argosy.data.tokenize import Tokenizer

CORPUS_BYTES = 10**9  # larger corpora are prepared beforehand, not while a run starts
BLOCK_TOKENS = 1 << 14  # made at once: Grain's 60 us an element do not count, and the first batch comes within 1 ms
SORTED_ROWS = 1 << 20  # 8 MB of permutation, made in 0.1 s an epoch
PLANS = 4  # packings kept in memory: a run builds its data twice, training and evaluation each time
ENDLESS = sys.maxsize

Data = Source | RowSource | Prepared | Corpus


@dataclass(frozen=True)
class Table:
    """All rows of one split, what identifies them, the bytes of text for each target (None: there is no text), and what the
    corpus consists of."""

    rows: Rows
    identity: Fingerprint
    bytes_per_token: float | None
    summary: CorpusSummary


def build(
    settings: DataSettings,
    tokenizer: "Tokenizer | None",
    *,
    vocab: int,
    seed: int,
    fields: Fields | None = None,
    rows_per_group: int = 1,
    process: int = 0,
    processes: int = 1,
    source: Data | None = None,
    progress: Progress | None = None,
) -> Batches:
    """The batches to train on: this process's rows of each global batch.

    Args:
        vocab: the model's vocabulary size.
        seed: the run's random seed, used where the settings have none.
        fields: what a batch holds, by name; those of language modeling by default.
        rows_per_group: rows that belong together, as the objective expects them.
        source: in place of `settings.source`; also a `Corpus` or `Examples` in memory.

    Raises:
        UserError: the data is missing, empty, lacks a field, or does not fit the tokenizer, the model or the number of
            processes.
    """
    share = share_of(settings.batch, process, processes, rows_per_group)
    source, seed = source or find(settings), seed if settings.seed is None else settings.seed
    if settings.online and isinstance(source, Source):
        if rows_per_group > 1:
            raise ungrouped(rows_per_group, 1)
        tokenizer = fitting(tokenizer, settings, vocab)
        return OnlineBatches(source, settings, tokenizer, seed, process, processes, fields or LANGUAGE_MODELING)
    table = table_of(source, "train", settings, tokenizer, vocab, seed, progress)
    rows = len(table.rows)
    count = ENDLESS if settings.epochs is None else int(settings.epochs * rows) // settings.batch
    if not count:
        what = f"{settings.epochs:g} epochs of {rows} rows do not fill a batch of {settings.batch}"
        raise BadInput(what, hint="lower `data.batch` or `data.sequence`, or raise `data.epochs`")
    order = Order(rows // rows_per_group, seed if settings.shuffle else None)
    blocks = Blocks(table.rows, order, share, count, settings, fields or LANGUAGE_MODELING, rows_per_group)
    return RowBatches(table, blocks, settings, seed)


def eval_batches(
    settings: DataSettings,
    tokenizer: "Tokenizer | None",
    *,
    vocab: int,
    seed: int,
    fields: Fields | None = None,
    rows_per_group: int = 1,
    process: int = 0,
    processes: int = 1,
    source: Data | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Batches:
    """The held-out rows in their order, once; `rewind()` before each evaluation. The last batch is filled up with padding.

    limit: batches at most. The rest as for `build`.

    Raises:
        UserError: as `build` does, and where nothing is held out.
    """
    share = share_of(settings.batch, process, processes, rows_per_group)
    source, seed = source or find(settings), seed if settings.seed is None else settings.seed
    table = table_of(source, "held_out", settings, tokenizer, vocab, seed, progress, limit)
    count = min(-(-len(table.rows) // settings.batch), limit or ENDLESS)
    order = Order(len(table.rows) // rows_per_group, None, repeats=False)
    blocks = Blocks(table.rows, order, share, count, settings, fields or LANGUAGE_MODELING, rows_per_group)
    return RowBatches(table, blocks, settings, seed)


def share_of(batch: int, process: int, processes: int, per_group: int = 1) -> slice:
    """The groups of a global batch that are this process's; without groups, its rows.

    Raises:
        BadInput: the batch does not divide among the processes in whole groups.
    """
    if batch % (processes * per_group):
        groups = f" in groups of {per_group} rows" if per_group > 1 else ""
        what = f"a batch of {batch} rows does not divide among {processes} processes{groups}"
        raise BadInput(what, where="data.batch", hint=f"make it a multiple of {processes * per_group}")
    each = batch // per_group // processes
    return slice(process * each, (process + 1) * each)


def ungrouped(wanted: int, found: int) -> BadInput:
    """The error for data whose rows do not come in the groups that the objective expects."""
    has = f"groups of {found} rows" if found > 1 else "single rows"
    return BadInput(f"the objective reads groups of {wanted} rows, and this data has {has}" if wanted > 1 else
                    f"the objective reads single rows, and this data has {has}")  # fmt: skip


def find(settings: DataSettings) -> Source | RowSource | Prepared:
    """What `settings.source` names. A folder written by `prepare` is read as it is.

    Raises:
        BadInput: there is no such source, or the settings ask for another corpus than the one that was prepared.
    """
    if not is_prepared(settings.source):
        return find_source(settings)
    if settings.online:
        raise BadInput("a prepared corpus is not read online", where=settings.source, hint="leave `data.online` off")
    prepared = open_prepared(settings.source)
    check_prepared(prepared, settings)
    return prepared


def check_prepared(prepared: Prepared, settings: DataSettings) -> None:
    """Compares the settings that were given with those that a corpus was prepared with.

    Raises:
        BadInput: one differs; it cannot be changed after the fact.
    """
    made = prepared.fingerprint
    was = {
        "held_out": made.get("held_out"), "max_bytes": made.get("source.max_bytes"), "bos": made.get("bos"),
        "documents": made.get("source.documents", "whole"), "invalid": made.get("source.invalid", "error"),
        "special": made.get("special", False),
    }  # fmt: skip
    for name in (name for name in MADE_WITH if name in was and name in settings.model_fields_set):
        value = getattr(settings, name)
        if value != was[name] and not (name == "bos" and value is None):
            raise BadInput(
                f"the corpus was prepared with data.{name}={was[name]}, not {value}",
                where=str(prepared.folder),
                hint=f"leave `data.{name}` out, or prepare the corpus again with `{name}={value}`",
            )


def tokenizer_for(settings: DataSettings) -> "Tokenizer | None":
    """The tokenizer of the data: the one that is set, else the one that a prepared corpus brings. None for synthetic tokens.

    Raises:
        UserError: there is no such tokenizer.
    """
    from argosy.data.tokenize import load_tokenizer

    if settings.source.partition(":")[0] == "synthetic":
        return None
    if "tokenizer" not in settings.model_fields_set and is_prepared(settings.source):
        kept = open_prepared(settings.source).tokenizer
        return load_tokenizer(kept or settings.tokenizer)
    return load_tokenizer(settings.tokenizer)


def holds_out(settings: DataSettings, source: Data) -> bool:
    """Whether a share of the data is kept for evaluation."""
    if isinstance(source, Prepared):
        return bool(len(source.held_out.tokens))
    return not isinstance(source, Corpus) and settings.held_out > 0


def fitting(tokenizer: "Tokenizer | None", settings: DataSettings, vocab: int) -> "Tokenizer":
    """The tokenizer, which must exist and make no token that the model lacks."""
    if tokenizer is None:
        raise BadInput("text needs a tokenizer", where=f"data.source={settings.source}", hint="set `data.tokenizer`")
    if tokenizer.vocab > vocab:
        what = f"the tokenizer has {tokenizer.vocab:,} tokens, the model only {vocab:,}"
        raise BadInput(what, where=f"data.tokenizer={settings.tokenizer}", hint=f"set `model.vocab={tokenizer.vocab}`")
    return tokenizer


def table_of(
    source: Data,
    split: str,
    settings: DataSettings,
    tokenizer: "Tokenizer | None",
    vocab: int,
    seed: int,
    progress: Progress | None,
    limit: int | None = None,
) -> Table:
    """The rows of the split `train` or `held_out`; text is tokenized on the way, where that has not been done."""
    if isinstance(source, RowSource):
        rows = source.rows(sequence=settings.sequence, vocab=vocab, seed=seed, held_out=split == "held_out")
        needed(rows, split, settings)
        made = source.fingerprint()
        return Table(rows, made | {"vocab": vocab}, None, described(made["source"], settings, rows=rows))
    if isinstance(source, Corpus):
        return table_in_memory(source, split, settings, vocab)
    tokenizer = fitting(tokenizer, settings, vocab)
    if isinstance(source, Source) and settings.online:
        return held_out_online(source, settings, tokenizer, limit)
    prepared = source if isinstance(source, Prepared) else cached(source, settings, tokenizer, progress)
    if prepared.fingerprint.get("tokenizer") != tokenizer.fingerprint:
        kept = f"leave it out, or set `data.tokenizer={prepared.tokenizer}`" if prepared.tokenizer else "set that one"
        what = f"the corpus was prepared with another tokenizer than `{settings.tokenizer}`"
        raise BadInput(what, where=str(prepared.folder), hint=f"{kept}; or prepare the corpus again")
    rows = needed(planned(prepared, split, settings), split, settings)
    return Table(rows, prepared.fingerprint, prepared.bytes_per_token(split), summary_of(prepared, settings, rows))


def table_in_memory(corpus: Corpus, split: str, settings: DataSettings, vocab: int) -> Table:
    """The rows of a corpus that the caller holds."""
    if split == "held_out":
        raise BadInput("a corpus in memory holds nothing out", hint="build batches from a second corpus to evaluate on")
    if len(corpus.tokens) and int(corpus.tokens.max()) >= vocab:
        raise BadInput(f"token {corpus.tokens.max()} is outside the model's vocabulary of {vocab}")
    digest = hashlib.sha256()
    for name, array in {"tokens": corpus.tokens, "starts": corpus.starts, **corpus.beside}.items():
        digest.update(f"{name} {array.dtype}".encode() + np.ascontiguousarray(array).tobytes())
    rows = needed(rows_of(corpus, settings.packing, settings.sequence), split, settings)
    identity = {"source": "corpus in memory", "source.sha256": digest.hexdigest()}
    return Table(rows, identity, None, described("in memory", settings, corpus, rows))


def planned(prepared: Prepared, split: str, settings: DataSettings) -> Rows:
    """The rows of a split. The last few plans are kept, because a run builds its data more than once and packing takes 2 s for
    a million documents."""
    corpus = prepared.train if split == "train" else prepared.held_out
    files = json.dumps(prepared.manifest["splits"][split]["files"], sort_keys=True)
    key = (str(prepared.folder), files, settings.packing, settings.sequence)
    if key not in KEPT:
        KEPT[key] = rows_of(corpus, settings.packing, settings.sequence)
        while len(KEPT) > PLANS:
            KEPT.popitem(last=False)
    return KEPT[key]


KEPT: OrderedDict[tuple[str, str, str, int], Rows] = OrderedDict()


def described(
    name: str, settings: DataSettings, corpus: Corpus | None = None, rows: Rows | None = None, **more: Any
) -> CorpusSummary:
    """A summary of these rows; `rows` and `batch` are what batches are made of."""
    if corpus is not None:
        short = int((np.diff(corpus.starts) < 2).sum()) if settings.packing == "fit" else 0
        more |= {"documents": corpus.documents, "tokens": len(corpus.tokens), "short_documents": short}
    count = None if rows is None else len(rows)
    return CorpusSummary(source=name, rows=count, sequence=settings.sequence, batch=settings.batch, **more)


def summary_of(prepared: Prepared, settings: DataSettings, rows: Rows | None = None) -> CorpusSummary:
    """What a prepared corpus consists of."""
    source, special = prepared.manifest.get("source", {}), prepared.manifest.get("special", {})
    train, held_out = (prepared.manifest["splits"][split] for split in ("train", "held_out"))
    return described(
        settings.source, settings, prepared.train, rows,
        bytes=train["bytes"], held_out_documents=held_out["documents"], held_out_tokens=held_out["tokens"],
        files=source.get("files"), source_bytes=source.get("disk_bytes"), max_bytes=source.get("max_bytes"),
        special_documents=special.get("documents", 0), special_names=tuple(special.get("names", ())),
    )  # fmt: skip


def needed(rows: Rows, split: str, settings: DataSettings) -> Rows:
    """The rows, of which there must be some."""
    if not len(rows):
        purpose, hint = ("train", "") if split == "train" else ("evaluate", "raise `data.held_out`, or ")
        raise BadInput(f"the corpus holds nothing to {purpose} on", where=settings.source, hint=f"{hint}give more text")
    return rows


def cached(source: Source, settings: DataSettings, tokenizer: "Tokenizer", progress: Progress | None) -> Prepared:
    """The source's prepared corpus in the cache, where it is written first if it is not there.

    Raises:
        BadInput: more text than should be tokenized while a run starts.
    """
    fingerprint = fingerprint_of(source, tokenizer, settings.held_out, settings.bos, settings.special)
    key = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder(settings) / f"{fingerprint['source']}-{key}"
    if is_prepared(folder):
        try:
            return open_prepared(folder)
        except Damaged:
            shutil.rmtree(folder)  # a cache is made again
    if (source.size_bytes or 0) > CORPUS_BYTES:
        raise BadInput(
            f"{source.size_bytes or 0:,} bytes of text are too many to tokenize while a run starts",
            where=f"data.source={settings.source}",
            hint=f"run `argosy data prepare {settings.source} FOLDER`, then train with `data.source=FOLDER`",
        )
    how: dict[str, Any] = {"held_out": settings.held_out, "bos": settings.bos, "special": settings.special}
    return prepare(source, tokenizer, folder, **how, progress=progress)


def cache_folder(settings: DataSettings) -> Path:
    if settings.cache is not None:
        return Path(settings.cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "argosy" / "corpora"


def held_out_online(source: Source, settings: DataSettings, tokenizer: "Tokenizer", limit: int | None) -> Table:
    """The documents that training online leaves out, in memory. With a limit of batches, reading stops once they are full.

    Raises:
        BadInput: nothing is left out, for instance because all the text is one document.
    """
    chooser, encoder = HeldOut(settings.held_out), Encoder(tokenizer, settings.bos, settings.special)
    enough = ENDLESS if limit is None else limit * settings.batch * settings.sequence + 1
    encoded, tokens, size_bytes = [], 0, 0
    for group in grouped(document for document in source.documents() if chooser.takes(document)):
        for document, one in zip(group, encoder.encode(group)):
            if tokens < enough:
                encoded.append(one)
                tokens, size_bytes = tokens + len(one.tokens), size_bytes + len(document.text.encode())
        if tokens >= enough:
            break
    corpus = corpus_of(encoded)
    rows = rows_of(corpus, settings.packing, settings.sequence)
    if not len(rows):
        raise BadInput(
            "data.online holds out whole documents, and none of this source was",
            where=settings.source,
            hint="`data.documents=paragraphs`, a larger `data.held_out`, or `data.held_out=0` to train without evaluation",
        )
    identity = fingerprint_of(source, tokenizer, settings.held_out, settings.bos, settings.special)
    bytes_per_token = size_bytes / (len(corpus.tokens) - corpus.documents) if size_bytes else None
    return Table(rows, identity, bytes_per_token, described(settings.source, settings, corpus, rows))


def ordered(identity: Fingerprint, settings: DataSettings, seed: int) -> Fingerprint:
    """Everything that decides which rows come in which order. The number of processes and of steps do not."""
    shuffle = "order 1" if settings.shuffle else False  # another way of shuffling gets another number
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

    def __init__(
        self,
        rows: Rows,
        order: Order,
        share: slice,
        count: int,
        settings: DataSettings,
        fields: Fields = LANGUAGE_MODELING,
        per_group: int = 1,
    ):
        if rows.per_group != per_group:
            raise ungrouped(per_group, rows.per_group)
        check_fields(fields, rows.fields)
        self.rows, self.order, self.count, self.batch = rows, order, count, settings.batch
        self.fields, self.per_group = fields, per_group
        self.per_block = max(1, BLOCK_TOKENS // (settings.batch * settings.sequence))
        self.share = np.arange(share.start, share.stop)  # groups of a batch

    def __len__(self) -> int:
        return -(-self.count // self.per_block)

    def __getitem__(self, index: int) -> Batch:
        first, groups_per_batch = index * self.per_block, self.batch // self.per_group
        batches = np.arange(first, min(first + self.per_block, self.count))
        groups = self.order((batches[:, None] * groups_per_batch + self.share).ravel())
        rows = (np.maximum(groups, 0)[:, None] * self.per_group + np.arange(self.per_group)).ravel()
        made = picked(self.rows.gather(rows), self.fields)
        if (groups < 0).any():  # past the end of the last batch of an evaluation
            there = {"group": groups >= 0, "row": np.repeat(groups >= 0, self.per_group)}
            there["token"] = there["row"]
            made = {name: blanked(array, there[self.fields[name].per]) for name, array in made.items()}
        return made

    def entries(self, name: str) -> int:
        """How many entries of a field are one batch's."""
        return len(self.share) * (1 if self.fields[name].per == "group" else self.per_group)


def picked(made: Batch, fields: Fields) -> Batch:
    """The fields that were asked for, in the types that were asked for."""
    return {name: made[name].astype(field.dtype, copy=False) for name, field in fields.items()}


def blanked(array: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Zeros in place of the entries that are not there."""
    return np.where(there.reshape(-1, *[1] * (array.ndim - 1)), array, np.zeros((), array.dtype))


class RowBatches(Batches):
    """Batches of a table. The position is the place of the next global batch's first row."""

    def __init__(self, table: Table, blocks: Blocks, settings: DataSettings, seed: int):
        import grain

        grouped_ = {"rows_per_group": blocks.per_group} if blocks.per_group > 1 else {}
        self.fingerprint = ordered(table.identity | grouped_, settings, seed)
        self.tokens_per_batch = settings.batch * settings.sequence
        self.bytes_per_token = table.bytes_per_token
        self.table, self.blocks, self.block, self.handed = table, blocks, None, 0
        self.epochs = settings.epochs if blocks.order.repeats else None
        ahead = grain.ReadOptions(num_threads=min(1, settings.prefetch), prefetch_buffer_size=settings.prefetch)
        self.iterator = iter(grain.MapDataset.source(blocks).to_iter_dataset(ahead))

    def __next__(self) -> Batch:
        if self.handed >= self.blocks.count:
            raise StopIteration
        number = self.handed % self.blocks.per_block
        if self.block is None or number == 0:
            self.block = next(self.iterator)
        self.handed += 1
        sizes = {name: self.blocks.entries(name) for name in self.block}
        return {name: array[number * sizes[name] : (number + 1) * sizes[name]] for name, array in self.block.items()}

    def summary(self, steps: int | None = None) -> CorpusSummary:
        rows, batch = len(self.blocks.rows), self.blocks.batch
        ends = None if self.blocks.count == ENDLESS else self.blocks.count
        made = steps if steps is None or ends is None else min(steps, ends)
        reached = ends is not None and (steps is None or steps >= ends)
        tail = int((self.epochs or 0) * rows) - (ends or 0) * batch if reached and self.epochs else 0
        epochs = None if made is None else made * batch / rows
        return replace(self.table.summary, epochs=epochs, ends_after=ends, tail_rows=tail)

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


class OnlineBatches(Batches):
    """Batches of documents that are tokenized and packed as they come."""

    def __init__(
        self,
        source: Source,
        settings: DataSettings,
        tokenizer: "Tokenizer",
        seed: int,
        process: int,
        processes: int,
        fields: Fields = LANGUAGE_MODELING,
    ):
        from grain.experimental import ThreadPrefetchDatasetIterator

        if settings.epochs is not None and processes > 1:
            what = "several processes cannot end online data together: `data.epochs` counts each one's own documents"
            raise BadInput(what, hint="leave `data.epochs` out, or prepare the corpus (`data.online=false`)")
        check_fields(fields, LANGUAGE_MODELING)
        identity = fingerprint_of(source, tokenizer, settings.held_out, settings.bos, settings.special)
        self.fingerprint = ordered(identity, settings, seed)
        self.tokens_per_batch = settings.batch * settings.sequence
        self.bytes_per_token = None
        self.among = {"process": process, "processes": processes}
        make = lambda: Encoder(tokenizer, settings.bos, settings.special)  # noqa: E731
        self.source, self.settings, self.make_encoder = source, settings, make
        windows = Windows(source, settings, make, seed, process, processes, fields)
        self.held = [ThreadPrefetchDatasetIterator(windows, settings.prefetch)]
        # Grain's iterator closes itself when deleted, which prints a traceback once the interpreter shuts down.
        self.release = weakref.finalize(self, lambda held: held.pop().close(), self.held)

    def __next__(self) -> Batch:
        return next(self.iterator)

    @property
    def iterator(self) -> "ThreadPrefetchDatasetIterator":
        if not self.held:
            raise ValueError("these batches are closed")
        return self.held[0]

    def summary(self, steps: int | None = None) -> CorpusSummary:
        """What is known before reading: files and bytes; names of special tokens in the first MiB of text."""
        encoder, source = self.make_encoder(), self.source
        for document in next(grouped(source.documents()), []):
            encoder.skip(document)
        limit = self.settings.max_bytes
        cut = limit is not None and (source.disk_bytes is None or source.disk_bytes > limit)
        known: dict[str, Any] = {"files": source.files, "source_bytes": source.disk_bytes, "max_bytes": limit if cut else None}
        known |= {"special_documents": encoder.special_documents, "special_names": tuple(encoder.special_names)}
        return described(self.settings.source, self.settings, online=True, **known)

    def position(self) -> dict[str, Any]:
        return self.iterator.get_state() | self.among

    def seek(self, position: dict[str, Any]) -> None:
        wanted = whole_numbers(position, Windows.POSITION)
        if position and any(position.get(name) != number for name, number in self.among.items()):
            raise BadInput(
                "the position in online data holds only for the same process of as many: "
                + "; ".join(f"`{name}` was {position.get(name)}, is {number}" for name, number in self.among.items()),
                hint="with a prepared corpus (`data.online=false`) a run resumes under any number of processes",
            )
        self.iterator.set_state(wanted)

    def close(self) -> None:
        self.release()


class Windows:
    """An endless iterator over windows of about 1 MiB of text: each is tokenized, packed, shuffled and handed out.

    Process p of P takes every P-th document. A position names the first document of the open window, counted over those
    of this process, and the rows taken from it. Seeking reads the source from its start, and tokenizes one window.
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
        fields: Fields,
    ):
        self.source, self.settings, self.make_encoder, self.fields = source, settings, make_encoder, fields
        self.seed, self.process, self.processes = seed, process, processes
        self.set_state(dict.fromkeys(self.POSITION, 0))

    def get_state(self) -> dict[str, int]:
        return dict(self.state)

    def set_state(self, state: dict[str, int]) -> None:
        self.state = dict(state)
        self.feed = self.rows_from(**state)

    def __iter__(self) -> "Windows":
        return self

    def __next__(self) -> Batch:
        rows = [next(self.feed) for _ in range(self.settings.batch // self.processes)]
        self.state = rows[-1][0]
        return {name: np.concatenate([row[name] for _, row in rows]) for name in rows[0][1]}

    def rows_from(self, epoch: int, document: int, row: int) -> Iterator[tuple[dict[str, int], Batch]]:
        """Batches of one row from a position on, each with the position after it."""
        while self.settings.epochs is None or epoch < self.settings.epochs:
            empty = document == 0
            for first, rows in self.windows(document):
                order = Order(len(rows), self.seed if self.settings.shuffle else None)
                window = picked(rows.gather(order(epoch * len(rows) + np.arange(len(rows)))), self.fields)
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
            encoder.skip(document)
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
