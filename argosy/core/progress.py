"""Reports slow operations while they run, and each kind of problem once. Does not import jax.

    with telling(say, "compiling for 512 tokens"):
        ...                                      # reported after one second, if this is still running
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

Say = Callable[[str], None]
# The number of seconds after which an operation is reported.
PATIENCE = 1.0


class Complaining:
    """Reports each kind of problem only once."""

    def __init__(self, say: Say = lambda _: None):
        self.say = say
        self._known: set[str] = set()

    def complain(self, sentence: str, kind: str) -> None:
        if kind not in self._known:
            self._known.add(kind)
            self.say(sentence)


@contextmanager
def telling(say: Say | None, text: str) -> Iterator[None]:
    """Calls `say(text)` from another thread if the block takes longer than a second."""
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
