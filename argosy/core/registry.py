"""Registries map names to classes and functions. Every plug-in point uses the class `Registry`.

    OPTIMIZERS = Registry("optimizer")
    OPTIMIZERS.add("adamw", "argosy.train.optimizers.adam:AdamW")      # registers a name; the module is imported on first use

A package outside Argosy registers in the same way, in its own `__init__`. For the command line, it declares an entry point in the group
that the registry searches. In a registry with `files`, FILE.py:NAME is a name too.
"""

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput, UnknownName


class Registry(Mapping[str, Any]):
    """A mapping from a short lower-case name to a class or function. An item may be given as "module:name".

    noun: the word for an item, for errors.
    files: whether FILE.py:NAME, relative to the working directory, is a name too. It is registered when it is first asked for.
    """

    def __init__(self, noun: str, items: Mapping[str, Any] | None = None, files: bool = False):
        self.noun, self.files = noun, files
        self._items: dict[str, Any] = dict(items or {})
        self._groups: list[str] = []

    def add_installed(self, group: str) -> None:
        """Adds the entry points that installed packages declare in this group. The search takes 40 ms, so it is made only when a
        missing name or the list of names is asked for. It imports none of the packages."""
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
            ValueError: the name stands for something else already, or the text is not "module:name".
        """
        if isinstance(item, str) and not all(item.partition(":")):
            raise ValueError(f"{self.noun} `{name}`: `{item}` is not module:name")
        if name in self._items and _import_path(self._items[name]) != _import_path(item):
            raise ValueError(f"{self.noun} `{name}` is already registered as {self._items[name]!r}")
        self._items.setdefault(
            name, item
        )  # the same again, by an entry point and by the module it names: once is enough

    def __getitem__(self, name: str) -> Any:
        if name not in self._items and self.files and is_file(name):
            self._items[name] = from_file(self.noun, name)
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
        # FILE.py:NAME is not listed among the names.
        return (name for name in self._items if not is_file(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Registry({self.noun!r}: {', '.join(self)})"


def is_file(name: object) -> bool:
    """Whether a name is written as FILE.py:NAME."""
    return isinstance(name, str) and name.rpartition(":")[0].endswith(".py")


def from_file(noun: str, name: str) -> Any:
    """Runs a file, and returns what FILE.py:NAME names.

    Args:
        noun: the word for the result, for errors.
        name: FILE.py:NAME.

    Raises:
        UnknownName: there is no such file, or it defines no such name.
        BadInput: running the file fails.
    """
    place, _, attribute = name.rpartition(":")
    path = Path(place)
    if not path.is_file():
        others = path.parent.glob("*.py") if path.parent.is_dir() else ()
        raise UnknownName(noun, name, [f"{other}:{attribute}" for other in others])
    spec = spec_from_file_location(f"argosy_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # Dataclasses and pickle look up the module of a class by name.
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"the {noun} `{name}` cannot be loaded: {type(error).__name__}: {error}", where=f"in {path}") from error
    if not hasattr(module, attribute):
        raise UnknownName(noun, name, [f"{place}:{other}" for other in vars(module) if not other.startswith("_")])
    return getattr(module, attribute)


def _import_path(item: Any) -> Any:
    """A class or function as "module:name"; other values unchanged."""
    is_named = hasattr(item, "__module__") and hasattr(item, "__qualname__")
    return f"{item.__module__}:{item.__qualname__}" if is_named else item
