"""`Op`: one function of pure maths with several implementations, and the choice among them.

    ATTENTION = Op("attention", "attention", prefer={"cpu": ("blocked",), "tpu": ("splash",)})
    ATTENTION.add("reference", Implementation(reference))
    ATTENTION.add("blocked", "argosy.ops.attention.blocked:BLOCKED")

    y = ATTENTION.choose(q, k, v).run(q, k, v)

    with implementations(attention="reference"):      # what `execution.attention` and `execution.experts` set
        jax.jit(step).lower(...)

    with winners({"attention float32 B8 T256 ...": "reference"}):     # what `argosy autotune` measured to be the fastest
        jax.jit(step).lower(...)

The choice is made while a program is traced, so both belong around tracing, not around running.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from argosy.core.errors import BadInput, Unsupported
from argosy.core.registry import Registry
from argosy.parallel.scope import platform

_requested: ContextVar[Mapping[str, str]] = ContextVar("implementations", default=MappingProxyType({}))
_winners: ContextVar[Mapping[str, str]] = ContextVar("winners", default=MappingProxyType({}))
_cases: ContextVar[dict[str, "Case"] | None] = ContextVar("cases", default=None)


@contextmanager
def implementations(**names: str | None) -> Iterator[None]:
    """Programs traced inside use these implementations, by the key of the op; None leaves the choice to the op."""
    token = _requested.set(dict(_requested.get()) | {op: name for op, name in names.items() if name is not None})
    try:
        yield
    finally:
        _requested.reset(token)


@contextmanager
def winners(names: Mapping[str, str]) -> Iterator[None]:
    """Programs traced inside prefer these implementations, by the name of the case, where nothing else is named and they do not
    refuse.
    """
    token = _winners.set(names)
    try:
        yield
    finally:
        _winners.reset(token)


@contextmanager
def recorded_cases() -> Iterator[dict[str, "Case"]]:
    """The cases of all ops that programs traced inside choose an implementation for, by name."""
    cases: dict[str, Case] = {}
    token = _cases.set(cases)
    try:
        yield cases
    finally:
        _cases.reset(token)


def requested_implementations() -> dict[str, str]:
    """The implementations that programs traced here use by name, by the key of their op or the name of the case."""
    return dict(_requested.get()) | dict(_winners.get())


@runtime_checkable
class Case(Protocol):
    """Shapes, types and options of a call of an op.

    op: the key of the op.
    name: the op, the type, sizes, and the options. Sizes that come from the batch are rounded up to powers of two. Equal names share
        a winner.
    rows: rows that do not depend on each other.
    reference_bytes: memory that the reference takes for one row.
    """

    @property
    def op(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> int: ...

    @property
    def reference_bytes(self) -> int: ...

    def cut(self, rows: int) -> "Case":
        """The case with fewer rows."""
        ...

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(arrays that are differentiated, other arrays), random."""
        ...

    def described(self, inputs: tuple[Any, ...], more: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments that implementations accept or refuse."""
        ...

    def call(self, implementation: "Implementation", inputs: tuple[Any, ...], more: dict[str, Any]) -> Any:
        """The result of an implementation."""
        ...


class Implementation(NamedTuple):
    """An implementation of an op.

    run: the function.
    refuses: (arguments) -> why it cannot be used on them; None if it can.
    blocks: (arguments) -> sizes of blocks beside its own choice that are worth measuring; `run` takes one as `block`. An op has them
        as `name:size`.
    """

    run: Callable[..., Any]
    refuses: Callable[..., str | None] = lambda *_: None
    blocks: Callable[..., Sequence[int]] = lambda *_: ()


class Op(Registry):
    """The implementations of one op by name.

    Args:
        key: the name of the op in `implementations` and in settings.
        noun: what error messages call the op.
        prefer: for each platform, what to try in this order before `default`.
        always: what to try before those on any platform; it refuses unless it is needed.
        default: the implementation that refuses nothing: the specification of the others.
        case: "module:name" of the function that describes arguments as a `Case`; None for an op that is not tuned.
    """

    def __init__(
        self,
        key: str,
        noun: str,
        *,
        prefer: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        always: tuple[str, ...] = (),
        default: str = "reference",
        case: str | None = None,
    ):
        super().__init__(f"{noun} implementation")
        self.key, self.title, self.prefer, self.always, self.default = key, noun, dict(prefer), always, default
        self._case = case

    def __getitem__(self, name: str) -> Any:
        base, _, size = name.partition(":")
        implementation = super().__getitem__(base if size.isdecimal() else name)
        if not size.isdecimal():
            return implementation
        if implementation.blocks is Implementation._field_defaults["blocks"]:
            raise BadInput(f"{self.title} `{base}` has no sizes of blocks", where=name, hint=f"`{base}`")
        return implementation._replace(run=partial(implementation.run, block=int(size)))

    @property
    def requested(self) -> str | None:
        """The implementation that `implementations` names, or None."""
        return _requested.get().get(self.key)

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
            choice: Implementation = self[name]
            if reason := choice.refuses(*args):
                raise Unsupported(f"{self.title} `{name}`: {reason}")
            return choice
        if self._case is not None and (_winners.get() or _cases.get() is not None):
            winner = self._winner(args)
            if winner is not None:
                return winner
        return next(candidate for name in self.preferred if (candidate := self[name]).refuses(*args) is None)

    def _winner(self, args: tuple[Any, ...]) -> Implementation | None:
        """The winner for these arguments, if there is one that does not refuse them; records their case where cases are recorded."""
        case = self.case(*args)
        if case is None:
            return None
        if (cases := _cases.get()) is not None:
            cases.setdefault(case.name, case)
        name = _winners.get().get(case.name)
        # An own implementation may be missing by now.
        if name is None or name.partition(":")[0] not in self or any(self[other].refuses(*args) is None for other in self.always):
            return None
        implementation: Implementation = self[name]
        return implementation if implementation.refuses(*args) is None else None

    def case(self, *args: Any) -> Any:
        """The case of these arguments; None if none describes them."""
        if self._case is None:
            return None
        module, _, attribute = self._case.partition(":")
        return getattr(import_module(module), attribute)(*args)
