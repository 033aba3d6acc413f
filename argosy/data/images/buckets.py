"""Aspect-ratio buckets: each image goes to the size with the nearest aspect ratio, and all images of a batch have one size.

The sizes are those of kohya's sd-scripts, after NovelAI's "Aspect ratio bucketing" (2022). Sides are multiples of a step, between half
and twice the side of the square. For each width, the height is the largest with which the area does not exceed that of the square.
Ratios are compared by their logarithms, so that wide and high images are treated alike.

    batch n of the run  ->  (bucket b, batch k of that bucket)  ->  indices k B to k B + B in the bucket's own sequence of epochs

The buckets alternate. In a cycle of as many batches as there are images, each bucket has as many batches as it has images, evenly
spread. So in the long run all images are read equally often, and none is dropped. An image waits for the next batch of its bucket. A
bucket with fewer images than a batch fills the batch with images of its next epoch. Everything follows from the number of the batch, so
the position is one number.
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
    """The (height, width) of each bucket in pixels, sorted. Areas are at most that of a square with the side `size`.

    Args:
        size: the side of the square, in pixels.
        step: the step between sides, in pixels. All sides are multiples of it.
        shortest, longest: the limits of a side, in pixels; None: half of `size`, and twice `size`.
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
    """The index in `sizes` of the size whose aspect ratio is nearest to that of an image."""
    ratio = math.log(height / width)
    return min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i][0] / sizes[i][1]) - ratio))


class BucketOrder:
    """Maps places, the indices in the sequence of all rows of a run, to row numbers in a table in which the buckets follow each other.

    Args:
        counts: the number of images in each bucket.
        batch: the number of rows in a batch.
        seed: the random seed of the order; None: images come in the order of the source.
        repeats: whether epochs follow each other. If not, as in an evaluation, each image comes once, and padding of the last batch of
            a bucket is -1 - r, where r is a row of the bucket.
    """

    def __init__(self, counts: Sequence[int], batch: int, seed: int | None, *, repeats: bool = True):
        self.counts, self.batch, self.seed, self.repeats = np.asarray(counts, np.int64), batch, seed, repeats
        self.offsets = np.cumsum(self.counts) - self.counts
        # The number of batches of each bucket in a cycle of the schedule.
        self.turns = self.counts if repeats else -(-self.counts // batch)
        seeds = [None if seed is None else named_seed(seed, f"bucket {b}") for b in range(len(self.counts))]
        self.orders = [Order(count, bucket_seed) for count, bucket_seed in zip(self.counts.tolist(), seeds)]
        self._schedule: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def batches(self) -> int:
        """The number of batches in a cycle of the schedule, which is one evaluation if `repeats` is False."""
        return int(self.turns.sum())

    def turn(self, batch: int) -> tuple[int, int]:
        """The bucket of a batch, and the number of the batch among the batches of that bucket."""
        cycle, at = divmod(batch, self.batches)
        buckets, numbers = self._cycle(cycle)
        bucket = int(buckets[at])
        return bucket, cycle * int(self.turns[bucket]) + int(numbers[at])

    def _cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """For each batch of a cycle, its bucket, and its number among the batches of that bucket in the cycle."""
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
        """The row numbers, int64 [B], at the places, int64 [B]."""
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
        """The number of rows of each bucket in the first `batches` batches of a run, int64 [buckets]."""
        cycles, within = divmod(batches, self.batches)
        buckets, _ = self._cycle(cycles)
        return self.batch * (cycles * self.turns + np.bincount(buckets[:within], minlength=len(self.turns)))


class BucketRows:
    """The rows of several buckets, which follow each other. The rows of one call of `gather` must be of one bucket."""

    per_group = 1
    reads_places = True
    tokens_per_row = 1

    def __init__(self, buckets: Sequence[Any]):
        """buckets: the tables of rows, each with images of one size."""
        self.buckets = list(buckets)
        self.fields: Fields = buckets[0].fields
        self.ends = np.cumsum([len(rows) for rows in buckets])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def counts(self) -> list[int]:
        """The number of images in each bucket."""
        return [len(rows) for rows in self.buckets]

    @property
    def bucket_axes(self) -> list[dict[str, int]]:
        """The sizes of axes in each bucket, by letter. The bucket with the largest images is first."""
        return sorted((dict(rows.own_sizes) for rows in self.buckets), key=lambda axes: (-axes["h"] * axes["w"], axes["h"]))

    @property
    def own_sizes(self) -> dict[str, int]:
        """The sizes of axes in the bucket with the largest images, by letter."""
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
        """The size and the epochs of each bucket, for a summary.

        Args:
            draws: the number of rows of each bucket in the run; None: unknown.
        """
        names = ["{} x {}".format(*rows.table.size) for rows in self.buckets]
        epochs = [None] * len(names) if draws is None else (draws / np.array(self.counts)).tolist()
        return tuple(MixedPart(name, count, None, epochs=passes) for name, count, passes in zip(names, self.counts, epochs))
