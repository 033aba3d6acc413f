"""A registry maps names to classes and functions; every plug-in point uses this one class.

    OPTIMIZERS = Registry("optimizer")
    OPTIMIZERS.add("adamw", "argosy.train.optimizers.adam:AdamW")      # one line registers; imported on first use

A package outside Argosy registers the same way, from its own `__init__`. To be known to the command line too, it declares an
entry point in the group that the registry names. A registry with `files` also knows what a file holds, as FILE.py:NAME.
"""

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput, UnknownName


class Registry(Mapping[str, Any]):
    """A mapping from a short lower-case name to a class or function, given itself or as "module:name".

    files: FILE.py:NAME, from the working directory, is a name too. It is registered when it is first asked for.
    """

    def __init__(self, noun: str, items: Mapping[str, Any] | None = None, files: bool = False):
        self.noun, self.files = noun, files
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
        # A file that was asked for is no name to offer.
        return (name for name in self._items if not is_file(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Registry({self.noun!r}: {', '.join(self)})"


def is_file(name: object) -> bool:
    """Whether a name is written as FILE.py:NAME."""
    return isinstance(name, str) and name.rpartition(":")[0].endswith(".py")


def from_file(noun: str, name: str) -> Any:
    """What FILE.py:NAME names. The file is run.

    Raises:
        UnknownName: there is no such file, or nothing of that name in it.
        BadInput: the file cannot be run.
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
    # Dataclasses and pickle look a class's module up by its name.
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInput(f"the {noun} `{name}` cannot be loaded: {type(error).__name__}: {error}", where=f"in {path}") from error
    if not hasattr(module, attribute):
        raise UnknownName(noun, name, [f"{place}:{other}" for other in vars(module) if not other.startswith("_")])
    return getattr(module, attribute)


def _import_path(item: Any) -> Any:
    """A class or function as "module:name"; anything else unchanged."""
    is_named = hasattr(item, "__module__") and hasattr(item, "__qualname__")
    return f"{item.__module__}:{item.__qualname__}" if is_named else item
