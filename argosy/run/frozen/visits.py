"""Finds the rows of data that a run will visit, and passes over them before the first step to compute a frozen model's outputs."""

import time
from collections.abc import Callable, Iterator

import numpy as np

from argosy.core.progress import Say
from argosy.data.pipeline import RowBatches
from argosy.observe.readable import format_duration

# Seconds between two lines of progress, and between two times that results are put on disk.
EVERY_S = 10.0


def visited_groups(batches: RowBatches, steps: int | None) -> np.ndarray:
    """Returns the indices of the groups of rows that the first `steps` batches visit, in ascending order.

    Args:
        steps: the number of batches; None: all.
    """
    blocks = batches.blocks
    each, all_groups = blocks.batch // blocks.per_group, len(blocks.rows) // blocks.per_group
    places = min(blocks.count, steps if steps is not None else blocks.count) * each
    if places >= all_groups and not (steps is None and places < all_groups):
        return np.arange(all_groups)
    groups = blocks.order(np.arange(places))
    return np.unique(groups[groups >= 0])


def passes(groups: np.ndarray, each: int, name: str, say: Say, keep: Callable[[], None]) -> Iterator[tuple[int, np.ndarray]]:
    """Yields `each` groups at a time, as (number of new groups, groups [each]). The last groups are repeated to fill up `each`. Between
    passes it reports progress, and calls `keep` to write results to disk.

    Args:
        groups: the indices of all groups.
        name: the name of the passes in reports.
    """
    start = last_report = time.monotonic()
    for at in range(0, len(groups), each):
        some = groups[at : at + each]
        yield len(some), np.concatenate([some, np.repeat(some[-1:], each - len(some))])
        if (now := time.monotonic()) - last_report > EVERY_S:
            last_report, share = now, (at + len(some)) / len(groups)
            keep()
            say(f"{name}: {share:.0%}, {format_duration((now - start) * (1 / share - 1))} left")
