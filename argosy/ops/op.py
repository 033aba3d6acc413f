"""`Op`: one function of pure maths with several implementations, and the choice among them.

    ATTENTION = Op("attention", "attention", prefer={"cpu": ("blocked",), "tpu": ("splash",)})
    ATTENTION.add("reference", Implementation(reference))
    ATTENTION.add("blocked", "argosy.ops.attention.blocked:BLOCKED")

    y = ATTENTION.choose(q, k, v).run(q, k, v)

    with implementations(attention="reference"):      # what `execution.attention` and `execution.experts` set
        jax.jit(step).lower(...)

The choice is made while a program is traced, so `implementations` belongs around tracing, not around running.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

from argosy.core.errors import Unsupported
from argosy.core.registry import Registry
from argosy.parallel.scope import platform

_named: ContextVar[Mapping[str, str]] = ContextVar("implementations", default=MappingProxyType({}))


@contextmanager
def implementations(**names: str | None) -> Iterator[None]:
    """Programs traced inside use these implementations, by the key of the op; None leaves the choice to the op."""
    token = _named.set(dict(_named.get()) | {op: name for op, name in names.items() if name is not None})
    try:
        yield
    finally:
        _named.reset(token)


def requested_implementations() -> dict[str, str]:
    """The implementations that programs traced here use by name, by the key of their op."""
    return dict(_named.get())


class Implementation(NamedTuple):
    """run: the function. refuses: says why it cannot be used on some arguments, or None where it can."""

    run: Callable[..., Any]
    refuses: Callable[..., str | None] = lambda *_: None


class Op(Registry):
    """The implementations of one op by name.

    Args:
        key: the name of the op in `implementations` and in settings.
        noun: what error messages call the op.
        prefer: for each platform, what to try in this order before `default`.
        always: what to try before those on any platform; it refuses unless it is needed.
        default: the implementation that refuses nothing: the specification of the others.
    """

    def __init__(
        self,
        key: str,
        noun: str,
        *,
        prefer: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        always: tuple[str, ...] = (),
        default: str = "reference",
    ):
        super().__init__(f"{noun} implementation")
        self.key, self.title, self.prefer, self.always, self.default = key, noun, dict(prefer), always, default

    @property
    def requested(self) -> str | None:
        """The implementation that `implementations` names, or None."""
        return _named.get().get(self.key)

    @property
    def preferred(self) -> tuple[str, ...]:
        """What is tried on the platform of the program being traced, in order."""
        return (*self.always, *self.prefer.get(platform(), ()), self.default)

    def choose(self, *args: Any, implementation: str | None = None) -> Implementation:
        """The implementation for these arguments: a named one, otherwise the first that does not refuse them.

        Raises:
            Unsupported: the named one refuses.
            UnknownName: there is no implementation of this name.
        """
        if name := implementation or self.requested:
            chosen: Implementation = self[name]
            if reason := chosen.refuses(*args):
                raise Unsupported(f"{self.title} `{name}`: {reason}")
            return chosen
        return next(found for name in self.preferred if (found := self[name]).refuses(*args) is None)
