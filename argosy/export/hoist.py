"""Turns arrays that a function closes over into weights of its program.

JAX puts such arrays into a program as constants, but a bundle keeps weights beside its programs. So a traced function is evaluated
again with its large constants as arguments: those of the function itself, and those of jitted functions that it calls. A large
constant inside a loop or a branch is an error with a hint.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from argosy.core.errors import Unsupported
from argosy.export.lower import NamedFunction

# Constants of at least this size become weights. Smaller ones are tables, which XLA may fold into the operations that use them.
LARGE_BYTES = 4096
# The primitives of calls that are evaluated equation by equation.
CALLS = ("jit", "pjit", "closed_call", "core_call")


class Hoisted:
    """The large constants of traced functions, by name. Equal arrays share one name."""

    def __init__(self) -> None:
        self.constants: dict[str, np.ndarray] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def function(self, function: NamedFunction, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> NamedFunction:
        """Returns the function with its large constants as further weights, for inputs of these shapes, and collects the constants.

        Raises:
            Unsupported: a large constant is inside a loop or a branch.
        """
        like = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in weights.items()}
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(like, dict(inputs))
        # `closed` keeps the arrays alive, so their ids stay unique.
        names = {id(value): self._constant_name(value) for value in _large_constants(closed)}
        if not names:
            return function
        tree = jax.tree.structure(shapes)

        def run(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
            values = {key: weights[name] for key, name in names.items()}
            flat = jax.tree.leaves(({name: weights[name] for name in like}, dict(inputs)))
            return jax.tree.unflatten(tree, _evaluated(closed, flat, lambda value: values.get(id(value), value)))

        return run

    def _constant_name(self, value: Any) -> str:
        array = np.asarray(value)
        key = array.shape, str(array.dtype), hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
        if key not in self._names:
            self._names[key] = f"constant.{len(self._names)}"
            self.constants[self._names[key]] = array
        return self._names[key]


def _is_large(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and np.size(value) * np.dtype(value.dtype).itemsize >= LARGE_BYTES


def _large_constants(closed: Any) -> Iterator[Any]:
    """Yields the large constants of a traced function and of the functions that it calls.

    Raises:
        Unsupported: a large constant is inside a loop or a branch.
    """
    yield from filter(_is_large, closed.consts)
    for equation in closed.jaxpr.eqns:
        yield from (v.val for v in equation.invars if isinstance(v, Literal) and _is_large(v.val))
        for inner in _inner(equation.params):
            constants = list(_large_constants(inner))
            if constants and equation.primitive.name not in CALLS:
                shapes = ", ".join(str(list(np.shape(value))) for value in constants)
                problem = f"the function closes over arrays of shape {shapes} inside `{equation.primitive.name}`"
                raise Unsupported(problem, hint="make them arguments of the function, or attributes of an nnx.Module")
            yield from constants


def _inner(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the functions in the parameters of an equation."""
    for value in params.values():
        for element in value if isinstance(value, tuple | list) else (value,):
            if isinstance(element, ClosedJaxpr):
                yield element
            elif hasattr(element, "eqns"):
                yield ClosedJaxpr(element, [])


def _evaluated(closed: Any, args: list[Any], replaced: Callable[[Any], Any]) -> list[Any]:
    """Evaluates a traced function, with some of its constants replaced."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(replaced, closed.consts)))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return replaced(v.val) if isinstance(v, Literal) else values[v]

    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        inner = next(_inner(equation.params), None) if equation.primitive.name in CALLS else None
        if inner is not None:
            results = _evaluated(inner, inputs, replaced)
        else:
            with equation.ctx.manager:
                output = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
            results = output if equation.primitive.multiple_results else [output]
        values |= dict(zip(equation.outvars, results))
    return [read(v) for v in jaxpr.outvars]
