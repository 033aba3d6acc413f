"""Which implementation of an op a program is traced with: a named one, otherwise the best known for its platform.

    with implementations(attention="reference"):      # what `execution.attention` and `execution.experts` set
        jax.jit(step).lower(...)

It is read while a program is traced, so it belongs around tracing, not around running.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

_named: ContextVar[Mapping[str, str]] = ContextVar("implementations", default=MappingProxyType({}))


@contextmanager
def implementations(**names: str | None) -> Iterator[None]:
    """Programs traced inside use these implementations, by op; None leaves the choice to the op."""
    token = _named.set(dict(_named.get()) | {op: name for op, name in names.items() if name is not None})
    try:
        yield
    finally:
        _named.reset(token)


def asked_for(op: str) -> str | None:
    """The implementation named for an op, or None."""
    return _named.get().get(op)
