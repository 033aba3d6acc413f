"""Applies functions of the user to records before they are read: `data.map` and `data.filter`, as FILE.py:FUNCTION.

    def shorter(row): return len(row["text"]) < 2000           # filter: true keeps the record
    def asked(row): return {"prompt": row["q"] + "\\n", "completion": row["a"]}
                                                               # map: the new record, a list of them, or None for none

The map comes first. A hash of each file is part of the fingerprint of the data, so a run does not resume with other functions. Modules
that a file imports are not part of it.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, nearest
from argosy.core.registry import from_file

Row = dict[str, Any]


class RecordSteps:
    """The map and the filter of a source's records.

    mapping: the map, as FILE.py:FUNCTION; None: there is none.
    keeping: the filter, as FILE.py:FUNCTION; None: there is none.
    """

    def __init__(self, mapping: str | None = None, keeping: str | None = None):
        self.mapping, self.keeping = mapping, keeping

    def __bool__(self) -> bool:
        return self.mapping is not None or self.keeping is not None

    @cached_property
    def functions(self) -> tuple[Callable[[Row], Any] | None, Callable[[Row], Any] | None]:
        return tuple(None if of is None else user_function(of, key) for of, key in self._settings())  # type: ignore[return-value]

    def _settings(self) -> tuple[tuple[str | None, str], ...]:
        return (self.mapping, "data.map"), (self.keeping, "data.filter")

    def __call__(self, fields: Mapping[str, Any], where: str) -> Iterator[Row]:
        """Applies the map and the filter to one record, and yields the resulting records.

        Raises:
            BadInput: a function fails or returns a wrong type. The message names the record.
        """
        change, keep = self.functions
        rows: Any = [dict(fields)] if change is None else _call(change, dict(fields), where, f"data.map={self.mapping}")
        rows = [] if rows is None else [rows] if isinstance(rows, Mapping) else rows
        if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
            problem = f"data.map={self.mapping} returned {type(rows).__name__}"
            raise BadInput(problem, where=where, hint="a mapping of columns, a list of them, or None for no record")
        for row in rows:
            if keep is None or _call(keep, dict(row), where, f"data.filter={self.keeping}"):
                yield dict(row)

    def fingerprint(self) -> dict[str, Any]:
        """A hash of each function's file. Empty if there are no functions, so that older runs resume."""
        return {f"source.{key[5:]}": _hash(of, key) for of, key in self._settings() if of is not None}


def _call(function: Callable[[Row], Any], row: Row, where: str, name: str) -> Any:
    try:
        return function(row)
    except ArgosyError:
        raise
    except Exception as error:
        problem = f"{name} failed: {type(error).__name__}: {error}".splitlines()[0][:200]
        raise BadInput(problem, where=where, hint=f"the record has {', '.join(map(str, row))}") from error


def _split(of: str, key: str) -> tuple[Path, str]:
    place, colon, function = of.rpartition(":")
    if not colon or not place.endswith(".py") or not function.isidentifier():
        raise BadInput(f"`{of}` names no function", where=f"{key}={of}", hint=f"{key}=FILE.py:FUNCTION")
    path = Path(place).expanduser()
    if not path.is_file():
        siblings = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise BadInput(f"no file `{path}`", where=f"{key}={of}", hint=nearest(path.name, siblings) if siblings else None)
    return path, function


def _hash(of: str, key: str) -> str:
    path, function = _split(of, key)
    return f"{function} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def user_function(of: str, key: str) -> Callable[[Row], Any]:
    """Imports a function from a file of the user.

    Args:
        of: FILE.py:FUNCTION.
        key: the setting that names the function, for errors.

    Raises:
        BadInput: there is no such file or function, or importing the file fails.
    """
    path, function = _split(of, key)
    imported = from_file(key, f"{path}:{function}")
    if not callable(imported):
        raise BadInput(f"`{function}` of `{path}` is no function", where=f"{key}={of}")
    return imported
