"""Saying what takes long while it takes long. Knows nothing of jax.

    with telling(say, "compiling for 512 tokens"):
        ...                                      # said after a second, and only if this is still running then
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

Say = Callable[[str], None]
PATIENCE = 1.0  # seconds without a word


@contextmanager
def telling(say: Say | None, text: str) -> Iterator[None]:
    """Calls `say(text)` from a thread of its own once the block has taken longer than a second; never for shorter blocks."""
    if say is None:
        yield
        return
    timer = Timer(PATIENCE, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
