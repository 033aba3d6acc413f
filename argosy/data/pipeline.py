"""Builds batches from settings, with Grain over a table of rows.

A prepared corpus is a table of rows. An epoch is a permutation of the table, and epochs follow each other without a break. Batch b of B
rows has the places b B to b B + B - 1 in this sequence. So the position is one number, the same on every host, and any number of hosts
can continue from it. Groups of rows (`PackedRows.per_group`) are permuted, batched and divided among processes as a whole. An element
of Grain holds one process's rows of a few global batches, because one element per row would take ten times as long (60 us of Python
each).

Grain imports jax, so it is imported when a pipeline is built.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.batch import LANGUAGE_MODELING, Batch, Batches, Fields, check_fields
from argosy.data.images.buckets import BucketOrder, BucketRows
from argosy.data.mixtures.order import MixedOrder
from argosy.data.mixtures.table import DataMixture, MixedTable, mixture_table
from argosy.data.mixtures.table import find_data as find
from argosy.data.mixtures.table import mixture_holds_out as holds_out
from argosy.data.online import OnlineBatches
from argosy.data.order import (
    Order,
    check_blocks,
    of_records,
    order_fingerprint,
    packing_of,
    row_order,
    select_fields,
    whole_numbers,
)
from argosy.data.pack import PackedRows
from argosy.data.prepare import Progress
from argosy.data.settings import DataSettings
from argosy.data.sources import Source
from argosy.data.sources.records import GROUPS
from argosy.data.summary import CorpusSummary
from argosy.data.tables import ENDLESS, Data, RowTable, fitting, summary_of, table_of, tokenizer_for

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer

__all__ = ["build", "eval_batches", "find", "fitting", "holds_out", "summary_of", "tokenizer_for"]

# The name of a field that every table has: the number of each row of a batch in the table, or -1 for a padding row.
ROW = "row"
# Tokens per Grain element. With this many, the 60 us per element are negligible, and the first batch comes within 1 ms.
BLOCK_TOKENS = 1 << 14


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
    source: Data | DataMixture | None = None,
    progress: Progress | None = None,
) -> Batches:
    """Builds the training batches: this process's rows of each global batch.

    Args:
        vocab: the model's vocabulary size.
        seed: the run's random seed, used if `settings.seed` is None.
        fields: the fields of a batch, by name; None: those of language modeling.
        rows_per_group: the number of rows in a group that the objective expects.
        process: the index of this process.
        processes: the number of processes.
        source: the data to read instead of `settings.source`. It may also be a `Corpus` or `Examples` in memory.
        progress: called while text is tokenized.

    Raises:
        UserError: the data is missing, empty, lacks a field, or does not fit the tokenizer, the model or the number of processes.
    """
    share = share_of(settings.batch, process, processes, rows_per_group)
    source, seed = source or find(settings), seed if settings.seed is None else settings.seed
    if settings.online and isinstance(source, Source):
        check_blocks(settings, "split", "data that is read online")
        if source.format in GROUPS:
            raise BadInput(f"`{source.format}` records are not read online", hint="leave `data.online` off")
        if rows_per_group > 1:
            raise ungrouped_rows_error(rows_per_group, 1)
        tokenizer = fitting(tokenizer, settings, vocab)
        return OnlineBatches(source, settings, tokenizer, seed, process, processes, fields or LANGUAGE_MODELING)
    mixed = mixture_table(source, "train", tokenizer, vocab, seed, progress) if isinstance(source, DataMixture) else None
    table = mixed.table if mixed else table_of(source, "train", settings, tokenizer, vocab, seed, progress)  # type: ignore[arg-type]
    rows = mixed.places_per_epoch * rows_per_group if mixed and mixed.places_per_epoch else len(table.rows)
    count = ENDLESS if settings.epochs is None else int(settings.epochs * rows) // settings.batch
    if not count:
        problem = f"{settings.epochs:g} epochs of {rows} rows do not fill a batch of {settings.batch}"
        raise BadInput(problem, hint="lower `data.batch` or `data.sequence`, or raise `data.epochs`")
    other = "a mixture" if mixed else "buckets of images" if isinstance(table.rows, BucketRows) else None
    check_blocks(settings, packing_of(settings, table.identity), other)
    if isinstance(table.rows, BucketRows):
        order: Any = BucketOrder(table.rows.counts, settings.batch, seed if settings.shuffle else None)
    else:
        order = mixed.order if mixed and mixed.order else row_order(rows // rows_per_group, settings, seed)
    blocks = BatchBlocks(table.rows, order, share, count, settings, fields or LANGUAGE_MODELING, rows_per_group)
    return RowBatches(table, blocks, settings, seed, mixed)


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
    source: Data | DataMixture | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Batches:
    """Builds batches that read the held-out rows once, in order. The last batch is padded. Call `rewind()` before each evaluation.

    Args:
        limit: the largest number of batches; None: no limit. The other arguments are as in `build`.

    Raises:
        UserError: as in `build`, or no data is held out.
    """
    share = share_of(settings.batch, process, processes, rows_per_group)
    source, seed = source or find(settings), seed if settings.seed is None else settings.seed
    if isinstance(source, DataMixture):
        table = mixture_table(source, "held_out", tokenizer, vocab, seed, progress, limit).table
    else:
        table = table_of(source, "held_out", settings, tokenizer, vocab, seed, progress, limit)
    if isinstance(table.rows, BucketRows):
        order: Any = BucketOrder(table.rows.counts, settings.batch, None, repeats=False)
        count = min(order.batches, limit or ENDLESS)
    else:
        order = Order(len(table.rows) // rows_per_group, None, repeats=False)
        count = min(-(-len(table.rows) // settings.batch), limit or ENDLESS)
    blocks = BatchBlocks(table.rows, order, share, count, settings, fields or LANGUAGE_MODELING, rows_per_group)
    return RowBatches(table, blocks, settings, seed)


def share_of(batch: int, process: int, processes: int, per_group: int = 1) -> slice:
    """The slice of a global batch that this process reads, counted in groups of `per_group` rows.

    Raises:
        BadInput: the batch does not divide among the processes in whole groups.
    """
    if batch % (processes * per_group):
        groups = f" in groups of {per_group} rows" if per_group > 1 else ""
        problem = f"a batch of {plural(batch, 'row')} does not divide among {processes} processes{groups}"
        raise BadInput(problem, where="data.batch", hint=f"make it a multiple of {processes * per_group}")
    each = batch // per_group // processes
    return slice(process * each, (process + 1) * each)


def ungrouped_rows_error(expected: int, rows: int) -> BadInput:
    """The error for data whose groups have another number of rows than the objective expects."""
    has, reads = (f"groups of {count} rows" if count > 1 else "single rows" for count in (rows, expected))
    return BadInput(f"the objective reads {reads}, and this data has {has}")


class BatchBlocks:
    """The data source of Grain. Maps the number of a block to this process's rows of `per_block` consecutive global batches."""

    def __init__(
        self,
        rows: PackedRows,
        order: "Order | MixedOrder | BucketOrder",
        share: slice,
        count: int,
        settings: DataSettings,
        fields: Fields = LANGUAGE_MODELING,
        per_group: int = 1,
    ):
        if rows.per_group != per_group:
            raise ungrouped_rows_error(per_group, rows.per_group)
        self.of_table = {name: field for name, field in fields.items() if name != ROW}
        check_fields(self.of_table, rows.fields)
        self.rows, self.order, self.count, self.batch = rows, order, count, settings.batch
        self.fields, self.per_group = fields, per_group
        each = getattr(rows, "numbers_per_row", settings.sequence)
        # Rows of different buckets have different sizes, so that one array cannot hold several batches.
        self.per_block = 1 if isinstance(order, BucketOrder) else max(1, BLOCK_TOKENS // (settings.batch * each))
        # Images are cropped and mirrored differently in each epoch, so their rows also depend on the position in the run.
        self.by_place = getattr(rows, "reads_places", False)
        self.share = np.arange(share.start, share.stop)  # groups of a batch

    def __len__(self) -> int:
        return -(-self.count // self.per_block)

    def __getitem__(self, index: int) -> Batch:
        first, groups_per_batch = index * self.per_block, self.batch // self.per_group
        batches = np.arange(first, min(first + self.per_block, self.count))
        places = (batches[:, None] * groups_per_batch + self.share).ravel()
        groups = self.order(places)
        # Past the end, an order returns -1 - r, where r is a row whose arrays have the right shape.
        rows = (np.where(groups < 0, -1 - groups, groups)[:, None] * self.per_group + np.arange(self.per_group)).ravel()
        gathered = self.rows.gather(rows, places) if self.by_place else self.rows.gather(rows)  # type: ignore[call-arg]
        batch = select_fields(gathered, self.of_table)
        if ROW in self.fields:
            batch[ROW] = rows.astype(self.fields[ROW].dtype)
        # Rows past the end of the last batch of an evaluation become padding.
        if (groups < 0).any():
            live = {"group": groups >= 0, "row": np.repeat(groups >= 0, self.per_group)}
            live["token"] = live["row"]
            batch = {name: zero_outside(array, live[self.fields[name].per]) for name, array in batch.items()}
            if ROW in batch:
                batch[ROW] = np.where(live["row"], batch[ROW], -1)
        return batch

    def entries(self, name: str) -> int:
        """The length of a field's first axis in this process's share of one batch."""
        return len(self.share) * (1 if self.fields[name].per == "group" else self.per_group)


def zero_outside(array: np.ndarray, live: np.ndarray) -> np.ndarray:
    """The array with zeros in the rows where `live`, [rows] bool, is False."""
    return np.where(live.reshape(-1, *[1] * (array.ndim - 1)), array, np.zeros((), array.dtype))


class RowBatches(Batches):
    """Batches from a table of rows. The position is the index of the next global batch's first row in the sequence of epochs."""

    def __init__(self, table: RowTable, blocks: BatchBlocks, settings: DataSettings, seed: int, mixed: MixedTable | None = None):
        """mixed: the mixture that the table was made from; None: there is one source."""
        import grain

        self.mixed = mixed

        grouped_ = {"rows_per_group": blocks.per_group} if blocks.per_group > 1 else {}
        self.fingerprint = order_fingerprint(table.identity | grouped_, settings, seed)
        self.tokens_per_batch = settings.batch * getattr(blocks.rows, "tokens_per_row", settings.sequence)
        self.bytes_per_token = table.bytes_per_token
        self.table, self.blocks, self.block, self.handed = table, blocks, None, 0
        self.sizes = getattr(blocks.rows, "own_sizes", {})
        self.buckets = tuple(blocks.rows.bucket_axes) if isinstance(blocks.rows, BucketRows) else ()
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
        if self.mixed and self.mixed.places_per_epoch:
            rows = self.mixed.places_per_epoch * self.blocks.per_group
        ends = None if self.blocks.count == ENDLESS else self.blocks.count
        batches = steps if steps is None or ends is None else min(steps, ends)
        reached = ends is not None and (steps is None or steps >= ends)
        tail = int((self.epochs or 0) * rows) - (ends or 0) * batch if reached and self.epochs else 0
        epochs = None if batches is None or (self.mixed and not self.mixed.places_per_epoch) else batches * batch / rows
        if isinstance(self.blocks.rows, BucketRows) and isinstance(self.blocks.order, BucketOrder):
            parts = self.blocks.rows.parts(None if batches is None else self.blocks.order.draws(batches))
            return replace(self.table.summary, epochs=epochs, ends_after=ends, buckets=parts)
        if self.mixed:
            parts = self.mixed.parts if batches is None else self.mixed.seen(batches * batch // self.blocks.per_group)
            return replace(self.table.summary, epochs=epochs, ends_after=ends, tail_rows=tail, parts=parts)
        return replace(self.table.summary, epochs=epochs, ends_after=ends, tail_rows=tail)

    def example(self) -> Batch | None:
        rows = self.blocks.rows
        return rows.gather(np.arange(rows.per_group)) if of_records(self.table.identity) else None

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
