"""Names to things: the one class behind every plug-in point.

    OPTIMIZERS = Registry("optimizer")
    OPTIMIZERS.add("adamw", "argosy.train.optim:AdamW")      # one line registers; nothing is imported until it is asked for

A package outside Argosy registers in the same way, from its own `__init__`.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from argosy.core.errors import UnknownName


class Registry(Mapping[str, Any]):
    """A read-mostly mapping from a short lower-case name to a class or function, given itself or as "module:name"."""

    def __init__(self, noun: str, items: Mapping[str, Any] | None = None):
        self.noun = noun
        self._items: dict[str, Any] = dict(items or {})

    def add(self, name: str, item: Any) -> None:
        """Registers `item`, or the "module:name" it will be imported from.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._items:
            raise ValueError(f"{self.noun} `{name}` is already registered as {self._items[name]!r}")
        self._items[name] = item

    def __getitem__(self, name: str) -> Any:
        if name not in self._items:
            raise UnknownName(self.noun, name, self._items)
        item = self._items[name]
        if isinstance(item, str):
            module, _, attribute = item.partition(":")
            item = self._items[name] = getattr(import_module(module), attribute)
        return item

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Registry({self.noun!r}: {', '.join(self._items)})"
