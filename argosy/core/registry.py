"""A registry maps names to classes and functions; every plug-in point uses this one class.

    OPTIMIZERS = Registry("optimizer")
    OPTIMIZERS.add("adamw", "argosy.train.optim:AdamW")      # one line registers; imported on first use

A package outside Argosy registers the same way, from its own `__init__`. To be known to the command line too, it declares an
entry point in the group that the registry names.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from argosy.core.errors import UnknownName


class Registry(Mapping[str, Any]):
    """A mapping from a short lower-case name to a class or function, given itself or as "module:name"."""

    def __init__(self, noun: str, items: Mapping[str, Any] | None = None):
        self.noun = noun
        self._items: dict[str, Any] = dict(items or {})
        self._groups: list[str] = []

    def add_installed(self, group: str) -> None:
        """Also offers what installed packages declare under this group of entry points. They are searched only when a missing
        name or the list of names is asked for, because the search takes 40 ms. It imports none of them."""
        self._groups.append(group)

    def _look_for_installed(self) -> None:
        if not self._groups:
            return
        from importlib.metadata import entry_points

        groups, self._groups = self._groups, []
        for point in (point for group in groups for point in entry_points(group=group)):
            self.add(point.name, point.value)

    def add(self, name: str, item: Any) -> None:
        """Registers `item`, or the "module:name" from which it is imported on first use.

        Raises:
            ValueError: the name is taken, or the text is not "module:name".
        """
        if isinstance(item, str) and not all(item.partition(":")):
            raise ValueError(f"{self.noun} `{name}`: `{item}` is not module:name")
        if name in self._items and _named(self._items[name]) != _named(item):
            raise ValueError(f"{self.noun} `{name}` is already registered as {self._items[name]!r}")
        self._items.setdefault(
            name, item
        )  # the same again, by an entry point and by the module it names: once is enough

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise UnknownName(self.noun, name, self._items)
        item = self._items[name]
        if isinstance(item, str):
            module, _, attribute = item.partition(":")
            try:
                item = self._items[name] = getattr(import_module(module), attribute)
            except (ImportError, AttributeError) as error:
                error.add_note(f"{self.noun} `{name}` is registered as {item}")
                raise
        return item

    def __contains__(self, name: object) -> bool:
        if name not in self._items:
            self._look_for_installed()
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        self._look_for_installed()
        return iter(self._items)

    def __len__(self) -> int:
        self._look_for_installed()
        return len(self._items)

    def __repr__(self) -> str:
        return f"Registry({self.noun!r}: {', '.join(self)})"


def _named(item: Any) -> Any:
    """A class or function as "module:name"; anything else unchanged."""
    is_named = hasattr(item, "__module__") and hasattr(item, "__qualname__")
    return f"{item.__module__}:{item.__qualname__}" if is_named else item
