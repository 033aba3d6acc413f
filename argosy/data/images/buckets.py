"""Aspect-ratio buckets: images fall into the size whose ratio is nearest to theirs, and a batch is of one size.

The sizes are those of kohya's sd-scripts, after NovelAI's "Aspect ratio bucketing" (2022): sides are multiples of a step, between half
and twice the side of the square, and a height is the largest whose area does not exceed the square's. Ratios are compared by their
logarithms, so that wide and high images are treated alike.

    batch n of the run  ->  (bucket b, batch k of that bucket)  ->  places k B to k B + B of the bucket's own epochs

Buckets take turns by the number of their images: in as many batches as there are images, bucket b has as many as it has images, evenly
spread. So each image is seen equally often in the long run, none is dropped, and an image waits until its bucket's next batch. A bucket
with fewer images than a batch fills it with its next epoch. All follows from the number of the batch, so the position is one number.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from argosy.data.batch import Batch, Fields
from argosy.data.mixtures.order import named_seed
from argosy.data.order import Order
from argosy.data.sources.synthetic import splitmix
from argosy.data.summary import MixedPart


def bucket_sizes(size: int, step: int, shortest: int | None = None, longest: int | None = None) -> list[tuple[int, int]]:
    """Heights and widths of buckets whose area is at most that of a square with this side, in order.

    Args:
        size: side of the square, in pixels.
        step: divides each side.
        shortest, longest: of a side; None: half and twice the size.
    """
    shortest = -(-(shortest or size // 2) // step) * step
    longest = (longest or 2 * size) // step * step
    square = size // step * step
    sizes = {(square, square)}
    for width in range(shortest, longest + 1, step):
        height = min(longest, size * size // width // step * step)
        if height >= shortest:
            sizes |= {(height, width), (width, height)}
    return sorted(sizes)


def nearest_bucket(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> int:
    """The number of the size whose ratio is nearest to that of an image."""
    ratio = math.log(height / width)
    return min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i][0] / sizes[i][1]) - ratio))


class BucketOrder:
    """Maps places to rows, where rows of a bucket follow those of the bucket before. A place past the end of a bucket in an evaluation
    is -1 - r, r a row of the same bucket.

    Args:
        counts: images of each bucket.
        batch: rows of a batch.
        seed: of the order; None: images come in the order of the source.
        repeats: False for an evaluation: each image comes once, and the last batch of a bucket is filled up.
    """

    def __init__(self, counts: Sequence[int], batch: int, seed: int | None, *, repeats: bool = True):
        self.counts, self.batch, self.seed, self.repeats = np.asarray(counts, np.int64), batch, seed, repeats
        self.offsets = np.cumsum(self.counts) - self.counts
        # Batches of each bucket before the schedule begins anew.
        self.turns = self.counts if repeats else -(-self.counts // batch)
        seeds = [None if seed is None else named_seed(seed, f"bucket {b}") for b in range(len(self.counts))]
        self.orders = [Order(count, bucket_seed) for count, bucket_seed in zip(self.counts.tolist(), seeds)]
        self._schedule: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def batches(self) -> int:
        """Batches of the schedule: those of one evaluation."""
        return int(self.turns.sum())

    def turn(self, batch: int) -> tuple[int, int]:
        """The bucket of a batch, and the number of the batch among those of its bucket."""
        cycle, at = divmod(batch, self.batches)
        buckets, numbers = self._cycle(cycle)
        bucket = int(buckets[at])
        return bucket, cycle * int(self.turns[bucket]) + int(numbers[at])

    def _cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """The bucket of each batch of a cycle, and its number within the cycle."""
        if self._schedule is None or self._schedule[0] != cycle:
            bucket = np.repeat(np.arange(len(self.turns)), self.turns)
            number = np.arange(len(bucket)) - np.repeat(np.cumsum(self.turns) - self.turns, self.turns)
            at = np.full(len(bucket), 0.5)
            if self.seed is not None:
                seed = np.array([named_seed(self.seed, f"turns {cycle}")], np.uint64)
                at = splitmix(seed, np.arange(len(bucket), dtype=np.uint64)) / 2.0**64
            order = np.argsort((number + at) / self.turns[bucket], kind="stable")
            self._schedule = cycle, bucket[order], number[order]
        return self._schedule[1:]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The rows at some places; both int64 [B]."""
        rows = np.zeros(len(places), np.int64)
        batches = places // self.batch
        for batch in np.unique(batches).tolist():
            mask = batches == batch
            bucket, number = self.turn(batch)
            draws = number * self.batch + places[mask] % self.batch
            offset, count = int(self.offsets[bucket]), int(self.counts[bucket])
            if self.repeats:
                rows[mask] = offset + self.orders[bucket](draws)
            else:
                rows[mask] = np.where(draws < count, offset + draws, -1 - offset)
        return rows

    def draws(self, batches: int) -> np.ndarray:
        """How many rows of each bucket the first batches of a run hold, int64 [buckets]."""
        cycles, within = divmod(batches, self.batches)
        buckets, _ = self._cycle(cycles)
        return self.batch * (cycles * self.turns + np.bincount(buckets[:within], minlength=len(self.turns)))


class BucketRows:
    """The rows of several buckets, those of each after those of the one before. Rows that are gathered together are of one bucket."""

    per_group = 1
    reads_places = True
    tokens_per_row = 1

    def __init__(self, buckets: Sequence[Any]):
        """buckets: rows of one size each."""
        self.buckets = list(buckets)
        self.fields: Fields = buckets[0].fields
        self.ends = np.cumsum([len(rows) for rows in buckets])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def counts(self) -> list[int]:
        """Images of each bucket."""
        return [len(rows) for rows in self.buckets]

    @property
    def bucket_axes(self) -> list[dict[str, int]]:
        """The sizes of each bucket's rows, by the letters of their fields; the largest bucket is first."""
        return sorted((dict(rows.own_sizes) for rows in self.buckets), key=lambda axes: (-axes["h"] * axes["w"], axes["h"]))

    @property
    def own_sizes(self) -> dict[str, int]:
        """The sizes of the largest bucket."""
        return self.bucket_axes[0]

    @property
    def numbers_per_row(self) -> int:
        return max(rows.numbers_per_row for rows in self.buckets)

    def gather(self, rows: np.ndarray, places: np.ndarray | None = None) -> Batch:
        number = int(np.searchsorted(self.ends, rows[0], side="right"))
        first = int(self.ends[number]) - len(self.buckets[number])
        if (rows < first).any() or (rows >= self.ends[number]).any():
            raise ValueError("the rows asked for are of several buckets")
        return self.buckets[number].gather(rows - first, places)

    def parts(self, draws: np.ndarray | None) -> tuple[MixedPart, ...]:
        """The buckets in numbers.

        Args:
            draws: rows of each bucket in the run; None: unknown.
        """
        names = ["{} x {}".format(*rows.table.size) for rows in self.buckets]
        epochs = [None] * len(names) if draws is None else (draws / np.array(self.counts)).tolist()
        return tuple(MixedPart(name, count, None, epochs=passes) for name, count, passes in zip(names, self.counts, epochs))
