"""Decides the order of rows, a permutation for each epoch, and what identifies that order in a saved position."""

import hashlib
from collections import OrderedDict
from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.batch import Batch, Fields, Fingerprint
from argosy.data.settings import DataSettings
from argosy.data.sources.records import GROUPS, LABELED
from argosy.data.sources.synthetic import splitmix

# Tables up to this size sort random keys, which takes 8 MB and 0.1 s per epoch.
SORTED_ROWS = 1 << 20
# Number of windows of blocks whose order is kept, because a batch may reach into a second window.
WINDOWS_KEPT = 4


class Order:
    """Maps indices in the endless sequence of epochs to row numbers.

    rows: the number of rows in the table.
    seed: the random seed; None: rows are not shuffled.
    repeats: whether epochs follow each other; if not, indices past the end of the table give -1.
    """

    def __init__(self, rows: int, seed: int | None, *, repeats: bool = True):
        self.rows, self.seed, self.repeats = rows, seed, repeats
        self.sorted: dict[int, np.ndarray] = {}

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The row numbers, int64 [B], at the indices `places`, int64 [B]."""
        if not self.repeats:
            return np.where(places < self.rows, places, -1)
        epochs, rows = np.divmod(places, self.rows)
        if self.seed is not None:
            for epoch in np.unique(epochs).tolist():
                mask = epochs == epoch
                rows[mask] = self.shuffled(epoch, rows[mask])
        return rows

    def shuffled(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """Applies the permutation of an epoch to indices within the epoch.

        Small tables sort random keys. Larger tables use Grain's index shuffle, which needs no memory, but works in a domain of at least
        65,536 and so takes 0.3 ms for each row of a table of 100.
        """
        if self.rows > SORTED_ROWS:
            from grain.experimental import index_shuffle

            seed = self.epoch_seed(epoch) % 2**32
            return np.array([index_shuffle(row, self.rows - 1, seed, 4) for row in rows.tolist()], np.int64)
        if epoch not in self.sorted:
            self.sorted = {epoch: random_permutation(self.epoch_seed(epoch), self.rows)}
        return self.sorted[epoch][rows]

    def epoch_seed(self, epoch: int) -> int:
        """A 64-bit seed for an epoch. It is a hash: with seed + epoch, the second epoch of seed 1 would be the first of seed 2."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest(), "big")


class BlockOrder(Order):
    """Shuffles blocks of consecutive rows, then the rows of each window of blocks (Levanter's hierarchical block shuffle).

    So the rows of a window come from a few contiguous ranges of the file. A last, shorter block stays in the last window. Two
    permutations give the row at any index: the epoch's permutation of blocks, and the window's permutation of rows.
    """

    def __init__(self, rows: int, seed: int, block: int, window: int):
        """Args:
            block: the number of rows in a block.
            window: the number of blocks in a window.
        """
        super().__init__(rows, seed)
        self.block, self.per_window = block, block * window
        # The permutation of whole blocks by epoch, and the rows of a window by (epoch, window).
        self.blocks: dict[int, np.ndarray] = {}
        self.windows: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def shuffled(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        windows, out = rows // self.per_window, np.zeros_like(rows)
        for window in np.unique(windows).tolist():
            mask = windows == window
            out[mask] = self.window_rows(epoch, window)[rows[mask] - window * self.per_window]
        return out

    def window_rows(self, epoch: int, window: int) -> np.ndarray:
        """The row numbers of a window in shuffled order."""
        key = epoch, window
        if key not in self.windows:
            first = window * self.per_window
            places = np.arange(first, min(first + self.per_window, self.rows))
            blocks, whole = self.epoch_blocks(epoch), self.rows // self.block
            of = places // self.block
            rows = np.where(of < whole, blocks[np.minimum(of, whole - 1)] if whole else 0, whole) * self.block + places % self.block
            seed = int.from_bytes(hashlib.blake2b(f"{self.seed}/{epoch}/{window}".encode(), digest_size=8).digest(), "big")
            self.windows[key] = rows[random_permutation(seed, len(rows))]
            while len(self.windows) > WINDOWS_KEPT:
                self.windows.popitem(last=False)
        return self.windows[key]

    def epoch_blocks(self, epoch: int) -> np.ndarray:
        """The epoch's permutation of the whole blocks."""
        if epoch not in self.blocks:
            self.blocks = {epoch: random_permutation(self.epoch_seed(epoch), self.rows // self.block)}
        return self.blocks[epoch]


def random_permutation(seed: int, count: int) -> np.ndarray:
    """A permutation of 0 to count - 1, int64 [count], made by sorting random keys."""
    return np.argsort(splitmix(np.array([seed], np.uint64), np.arange(count, dtype=np.uint64)), kind="stable")


def row_order(rows: int, settings: DataSettings, seed: int) -> Order:
    """The order in which training reads `rows` rows, or as many groups of rows."""
    if settings.shuffle and settings.shuffle_block:
        return BlockOrder(rows, seed, settings.shuffle_block, settings.shuffle_window)
    return Order(rows, seed if settings.shuffle else None)


def check_blocks(settings: DataSettings, packing: str, other: str | None = None) -> None:
    """Checks that `data.shuffle_block` applies to this data.

    Args:
        other: a phrase for the data if it is not one table of rows, such as "a mixture"; None: it is one table.

    Raises:
        BadInput: the setting would be ignored, or the rows of a block do not lie together in the file.
    """
    if not settings.shuffle_block:
        return
    where = f"data.shuffle_block={settings.shuffle_block}"
    if not settings.shuffle:
        raise BadInput("a block of rows to shuffle, and nothing is shuffled", where=where, hint="leave one of both out")
    if other is not None:
        raise BadInput(f"blocks of rows are shuffled in one table of rows, not in {other}", where=where, hint="leave it out")
    if packing == "fit":
        problem = "data.packing=fit puts documents from anywhere into a row, so rows of a block do not lie together"
        raise BadInput(problem, where=where, hint="set `data.packing=split` or `alone`, or leave `data.shuffle_block` out")


def of_records(identity: Fingerprint) -> bool:
    """Whether data with this fingerprint was made from records, such as conversations, and not from text."""
    return "source.format" in identity


def of_sequences(identity: Fingerprint) -> int:
    """The number of sequences per record, in data with this fingerprint; 0 if it has no records of sequences."""
    return GROUPS.get(str(identity.get("source.format")), 0) + int(identity.get("negatives") or 0)


def packing_of(settings: DataSettings, identity: Fingerprint) -> str:
    """The packing of this data: `data.packing`, or the default for this kind of data.

    Raises:
        BadInput: the setting does not apply to such data.
    """
    if not of_sequences(identity):
        return settings.packing or ("fit" if of_records(identity) else "split")
    if settings.packing == "split":
        problem = f"data.packing=split would cut `{identity['source.format']}` records, which are compared as a whole"
        raise BadInput(problem, hint="set `data.packing=fit`, or leave it out")
    return settings.packing or "alone"


def too_long_of(settings: DataSettings, identity: Fingerprint) -> str:
    """The treatment of a document longer than a row: `data.too_long`, or the default for this kind of data.

    Raises:
        BadInput: the setting does not apply to such data, or the packing would ignore it.
    """
    if of_sequences(identity):
        if settings.too_long == "continue":
            problem = f"data.too_long=continue would cut `{identity['source.format']}` records, which are compared as a whole"
            raise BadInput(problem, hint="set `data.too_long=drop`, `cut_prompt`, `cut` or `error`, or leave it out")
        if settings.too_long == "cut_prompt" and identity["source.format"] in ("stepwise", *LABELED):
            problem = "data.too_long=cut_prompt is for pairs and labeled answers"
            raise BadInput(problem, hint="set `data.too_long=drop`, `cut` or `error`")
        return settings.too_long or ("cut" if identity["source.format"] in LABELED else "drop")
    if settings.too_long == "cut_prompt":
        problem = "data.too_long=cut_prompt is for pairs and labeled answers, which are one prompt and its answers"
        raise BadInput(problem, hint="set `data.too_long=cut`, `drop` or `error`, or leave it out")
    if settings.too_long is not None and packing_of(settings, identity) == "split":
        problem = f"data.too_long={settings.too_long} is for whole documents: data.packing=split joins them and cuts the stream"
        raise BadInput(problem, hint="set `data.packing=fit` or `alone`, or leave `data.too_long` out")
    return settings.too_long or ("cut" if of_records(identity) else "continue")


def order_fingerprint(identity: Fingerprint, settings: DataSettings, seed: int) -> Fingerprint:
    """The fingerprint of the rows and their order. It does not depend on the number of processes or steps."""
    # A changed shuffling algorithm needs another number here.
    shuffle: str | bool = "order 1" if settings.shuffle else False
    if shuffle and settings.shuffle_block:
        shuffle = f"{settings.shuffle_window} blocks of {settings.shuffle_block}"
    packing, too_long = packing_of(settings, identity), too_long_of(settings, identity)
    packed = {"sequence": settings.sequence, "batch": settings.batch, "packing": packing}
    # The default of older runs is left out, so that they resume.
    packed |= {"too_long": too_long} if packing != "split" and too_long != "continue" else {}
    return identity | packed | {"shuffle": shuffle, "seed": seed, "online": settings.online}


def whole_numbers(position: dict[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """Reads these integers from a saved position. In an empty position all are 0.

    Raises:
        BadInput: an integer is missing or negative, so the position belongs to another kind of pipeline.
    """
    numbers = {name: position.get(name, None if position else 0) for name in names}
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise BadInput(f"not a position in this data: `{name}` is {value!r}", where="the saved position")
    return numbers


def select_fields(batch: Batch, fields: Fields) -> Batch:
    """The requested fields of a batch, converted to the requested types."""
    return {name: batch[name].astype(field.dtype, copy=False) for name, field in fields.items()}
