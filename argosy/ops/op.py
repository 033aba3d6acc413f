"""`Op`: a mathematical function with several implementations, and the choice among these.

    ATTENTION = Op("attention", "attention", prefer={"cpu": ("blocked",), "tpu": ("splash",)})
    ATTENTION.add("reference", Implementation(reference))
    ATTENTION.add("blocked", "argosy.ops.attention.blocked:BLOCKED")

    y = ATTENTION.choose(q, k, v).run(q, k, v)

    with implementations(attention="reference"):      # set by `execution.attention` and `execution.experts`
        jax.jit(step).lower(...)

    with winners({"attention float32 B8 T256 ...": "reference"}):     # the fastest in the measurements of `argosy autotune`
        jax.jit(step).lower(...)

The choice is made while a program is traced. Both contexts must therefore be around tracing, not around running.
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
    """A context in which traced programs use these implementations, by the key of the op. None: the op chooses."""
    token = _requested.set(dict(_requested.get()) | {op: name for op, name in names.items() if name is not None})
    try:
        yield
    finally:
        _requested.reset(token)


@contextmanager
def winners(names: Mapping[str, str]) -> Iterator[None]:
    """A context in which traced programs prefer these implementations, given by the name of the case.

    A winner is not used if it refuses the arguments, or if `implementations` names another one.
    """
    token = _winners.set(names)
    try:
        yield
    finally:
        _winners.reset(token)


@contextmanager
def recorded_cases() -> Iterator[dict[str, "Case"]]:
    """A context that records the cases for which traced programs choose an implementation. Yields a dict of cases by name."""
    cases: dict[str, Case] = {}
    token = _cases.set(cases)
    try:
        yield cases
    finally:
        _cases.reset(token)


def requested_implementations() -> dict[str, str]:
    """Returns the implementations that the current contexts request, by the key of the op or the name of the case."""
    return dict(_requested.get()) | dict(_winners.get())


@runtime_checkable
class Case(Protocol):
    """The interface of a description of an op's call: shapes, dtypes and options, without data.

    op: the key of the op.
    name: a name made of the op, dtype, sizes and options. Sizes that come from the batch are rounded up to powers of two. Cases with
        equal names share a winner.
    rows: the number of rows that do not depend on each other.
    reference_bytes: the memory that the reference implementation takes for one row.
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
        """Returns the case with fewer rows."""
        ...

    def arguments(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns random arguments: (arrays to differentiate with respect to, other arrays by name)."""
        ...

    def described(self, inputs: tuple[Any, ...], more: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the arguments of `Implementation.refuses`, from the result of `arguments`."""
        ...

    def call(self, implementation: "Implementation", inputs: tuple[Any, ...], more: dict[str, Any]) -> Any:
        """Runs an implementation on the result of `arguments`."""
        ...


class Implementation(NamedTuple):
    """An implementation of an op.

    run: the function.
    refuses: a function of the arguments that returns why the implementation cannot compute them. None: it can.
    blocks: a function of the arguments that returns further block sizes that are worth measuring, besides the default. `run` takes one
        as its argument `block`. In an op, an implementation with a block size has the name `name:size`.
    """

    run: Callable[..., Any]
    refuses: Callable[..., str | None] = lambda *_: None
    blocks: Callable[..., Sequence[int]] = lambda *_: ()


class Op(Registry):
    """The implementations of one op by name.

    Args:
        key: the name of the op in `implementations` and in settings.
        noun: the name of the op in error messages.
        prefer: for each platform, the implementations to try before `default`, in this order.
        always: the implementations to try first on any platform. They refuse unless they are needed.
        default: the implementation that refuses nothing. It is the specification of the others.
        case: "module:name" of a function that describes arguments as a `Case`. None: the op is not tuned.
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
        """The implementation that the context `implementations` names for this op. None: it names none."""
        return _requested.get().get(self.key)

    @property
    def preferred(self) -> tuple[str, ...]:
        """The implementations to try, in order, on the platform of the program being traced."""
        return (*self.always, *self.prefer.get(platform(), ()), self.default)

    def choose(self, *args: Any, implementation: str | None = None) -> Implementation:
        """Chooses the implementation for these arguments: a requested one, otherwise a winner, otherwise the first that can.

        Args:
            implementation: the name of an implementation. Default: the one of the context `implementations`.

        Raises:
            Unsupported: the requested implementation refuses the arguments.
            UnknownName: there is no implementation of the requested name.
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
        """Returns the winner for these arguments, if there is one and it does not refuse them. Also records the case of the arguments,
        inside of `recorded_cases`."""
        case = self.case(*args)
        if case is None:
            return None
        if (cases := _cases.get()) is not None:
            cases.setdefault(case.name, case)
        name = _winners.get().get(case.name)
        # A user's implementation that won earlier may no longer be registered.
        if name is None or name.partition(":")[0] not in self or any(self[other].refuses(*args) is None for other in self.always):
            return None
        implementation: Implementation = self[name]
        return implementation if implementation.refuses(*args) is None else None

    def case(self, *args: Any) -> Any:
        """Describes these arguments as a case. None: the op is not tuned, or a size is unknown."""
        if self._case is None:
            return None
        module, _, attribute = self._case.partition(":")
        return getattr(import_module(module), attribute)(*args)
