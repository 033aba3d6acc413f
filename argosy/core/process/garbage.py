"""Python's garbage collector beside training.

A collection of the oldest generation looks at every object of the process: 0.2 s after jax has compiled a step, in the middle of some
step, and of several processes all wait for the one that collects. What exists when training begins lives until it ends, so the
collector need not look at it again.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Inside, collections pass over the objects that exist already. Nothing changes where the program has set some aside itself
    (`gc.freeze`)."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
