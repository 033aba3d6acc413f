"""A decoder kept from call to call, and made again when the structure of its module changed.

Splitting a module of 270 weights costs 15 ms, walking it 1. The walk finds the identity of every variable and attribute: surgery,
adapters and another dtype are seen, because each replaces an object. Values are no part of it: a decoder reads them at each
call, so weights that were put are used at once, and replaced ones are not kept in memory.
"""

import operator
from typing import Any

from flax import nnx

from argosy.core.progress import Say
from argosy.infer.decode import Decoder


class Held:
    """The decoder of a module as it is now."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._decoder: Decoder | None = None

    def decoder(self, module: Any, say: Say | None = None) -> Decoder:
        found = identities(module)
        if self._decoder is None or len(found) != len(self._found) or not all(map(operator.is_, found, self._found)):
            self._decoder, self._found = Decoder(module), found
        self._decoder.say = say
        return self._decoder


def identities(module: Any) -> list[Any]:
    """Every object that a module is made of, in the order of its attributes; of weights the variables, not their values. Kept
    alive by the list, so that no identity comes again."""
    out: list[Any] = []
    inside: set[int] = set()

    def walk(node: Any) -> None:
        out.append(node)
        if isinstance(node, nnx.Variable):
            out.extend(node.get_metadata().values())
        elif isinstance(node, nnx.Module | dict | list | tuple) and id(node) not in inside:
            inside.add(id(node))
            for name, value in _children(node):
                out.append(name)
                walk(value)

    walk(module)
    return out


def _children(node: Any) -> Any:
    if isinstance(node, nnx.Module):
        return vars(node).items()
    return node.items() if isinstance(node, dict) else ((None, value) for value in node)
