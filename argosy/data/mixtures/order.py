"""The order of a mixture: which row of which source stands at each place. A place is an index in the endless sequence of rows.

The row at a place is computed by arithmetic alone. So the position of a mixture is one number, as for a single source, and holds for
any number of processes. Each source has its own order (`data.order.Order`). Draw d of a source, which is the d-th of its rows in the
mixture, is entry d in that order. So all rows of a source are read before any comes again.

    by size     There are no weights. One epoch draws every row of a source `epochs` times, and a permutation mixes the sources.
    by weight   Every block of BLOCK places holds a fixed number of rows of each source (its share, to 1/BLOCK), and each block is
                shuffled. If weights are scheduled, these numbers change at given places.

The draws of a source before a place are computed without a loop over places: the whole blocks times the quota, and a part of one block.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.order import Order
from argosy.data.sources.synthetic import splitmix

# Number of places in a block, in which shares are exact. Shares are multiples of 1/BLOCK.
BLOCK = 4096
BLOCKS_CACHED = 8


class DrawOrder(Protocol):
    """Maps places to sources and draws.

    places_per_epoch: the number of places in one epoch; None: a mixture by weight has no epochs.
    """

    places_per_epoch: int | None

    def __call__(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The index of the source at each place, and the number of the draw from that source; int64 [B] each."""
        ...

    def draws(self, place: int) -> np.ndarray:
        """The number of draws from each source before a place, int64 [sources]. For a mixture by size, this is an estimate in
        proportion to the counts of the sources."""
        ...


class OrderBySize:
    """The order without weights. One epoch draws `counts` rows from each source.

    counts: the number of draws from each source in an epoch.
    seed: the random seed; None: sources follow each other without mixing.
    """

    def __init__(self, counts: Sequence[int], seed: int | None):
        self.counts = np.asarray(counts, np.int64)
        self.ends = np.cumsum(self.counts)
        self.places_per_epoch: int | None = int(self.ends[-1])
        self.order = Order(self.places_per_epoch, seed)

    def __call__(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs = places // self.ends[-1]
        slots = self.order(places)
        source = np.searchsorted(self.ends, slots, side="right")
        within = slots - (self.ends - self.counts)[source]
        return source, epochs * self.counts[source] + within

    def draws(self, place: int) -> np.ndarray:
        return (self.counts * (place / int(self.ends[-1]))).astype(np.int64)


@dataclass(frozen=True)
class WeightStage:
    """The weights that hold from a place on.

    start: the first place.
    quotas: the number of rows of each source in a block, int64 [sources].
    before: the number of draws from each source before `start`, int64 [sources].
    """

    start: int
    quotas: np.ndarray
    before: np.ndarray


class OrderByWeight:
    """The order with weights. Every block of BLOCK places holds a fixed number of rows of each source.

    shares: (first place, weight of each source) for each stage. The first stage begins at place 0.
    """

    places_per_epoch: int | None = None

    def __init__(self, shares: Sequence[tuple[int, Sequence[float]]], seed: int | None):
        # Without shuffling sources still alternate, in an order that no seed changes.
        self.seed = seed or 0
        self.cached: OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self.stages: list[WeightStage] = []
        for start, weights in shares:
            before = self.draws(start) if self.stages else np.zeros(len(weights), np.int64)
            self.stages.append(WeightStage(start, quotas_of(weights), before))

    def __call__(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        source, draw = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
        starts = np.array([stage.start for stage in self.stages])
        stage_of = np.searchsorted(starts, places, side="right") - 1
        blocks = (places - starts[stage_of]) // BLOCK
        for number, block in sorted(set(zip(stage_of.tolist(), blocks.tolist()))):
            mask = (stage_of == number) & (blocks == block)
            stage = self.stages[number]
            within = (places[mask] - stage.start) % BLOCK
            labels, ranks = self.block(number, block)
            source[mask] = labels[within]
            draw[mask] = stage.before[labels[within]] + block * stage.quotas[labels[within]] + ranks[within]
        return source, draw

    def block(self, stage: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The source at each place of a block, and the number of places before it in the block with the same source."""
        key = stage, number
        if key not in self.cached:
            quotas = self.stages[stage].quotas
            keys = splitmix(np.array([named_seed(self.seed, f"block {stage} {number}")], np.uint64), np.arange(BLOCK, dtype=np.uint64))
            labels = np.repeat(np.arange(len(quotas)), quotas)[np.argsort(keys, kind="stable")]
            ranks = np.zeros(BLOCK, np.int64)
            for source in range(len(quotas)):
                at = np.flatnonzero(labels == source)
                ranks[at] = np.arange(len(at))
            self.cached[key] = labels, ranks
            while len(self.cached) > BLOCKS_CACHED:
                self.cached.popitem(last=False)
        return self.cached[key]

    def draws(self, place: int) -> np.ndarray:
        number = max(i for i, stage in enumerate(self.stages) if stage.start <= place)
        stage = self.stages[number]
        block, within = divmod(place - stage.start, BLOCK)
        labels, _ = self.block(number, block)
        return stage.before + block * stage.quotas + np.bincount(labels[:within], minlength=len(stage.quotas))


def quotas_of(weights: Sequence[float]) -> np.ndarray:
    """The number of places of a block that each source gets, int64 [sources]. Shares are rounded by largest remainders. A source whose
    weight is not 0 gets at least one place.

    Raises:
        BadInput: a share is not 0 but below 0.5 / BLOCK.
    """
    share = np.asarray(weights, np.float64) / np.sum(weights)
    if (small := (share > 0) & (share < 0.5 / BLOCK)).any():
        least = float(share[small].min())
        problem = f"a weight is {least:.2g} of the whole, and a mixture is exact to 1/{BLOCK}"
        raise BadInput(problem, where="data.source", hint="leave that source out, or raise its weight")
    exact = share * BLOCK
    quotas = np.maximum(np.floor(exact).astype(np.int64), share > 0)
    order = np.argsort(-(exact - np.floor(exact)), kind="stable")
    short = BLOCK - int(quotas.sum())
    if short > 0:
        quotas[order[:short]] += 1
    else:
        # Sources that were raised to one place take it from the largest.
        for _ in range(-short):
            quotas[int(np.argmax(quotas))] -= 1
    return quotas


class MixedOrder:
    """Maps places to row numbers (or numbers of groups of rows) in the table of all sources, which follow each other there.

    sizes: the number of rows (or groups) of each source.
    order: chooses the source at each place.
    seed: the random seed of the orders of sources; None: rows are not shuffled.
    """

    repeats = True

    def __init__(self, sizes: Sequence[int], order: DrawOrder, seed: int | None):
        self.sizes, self.order = np.asarray(sizes, np.int64), order
        self.offsets = np.cumsum(self.sizes) - self.sizes
        seeds = [None if seed is None else named_seed(seed, f"source {number}") for number in range(len(sizes))]
        self.orders = [Order(size, source_seed) for size, source_seed in zip(self.sizes.tolist(), seeds)]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The row numbers, int64 [B], at the places, int64 [B]."""
        source, draw = self.order(places)
        rows = np.zeros(len(places), np.int64)
        for number in np.unique(source).tolist():
            mask = source == number
            rows[mask] = self.offsets[number] + self.orders[number](draw[mask])
        return rows


def named_seed(seed: int, name: str) -> int:
    """A 64-bit seed for the part of a mixture that has this name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big")
