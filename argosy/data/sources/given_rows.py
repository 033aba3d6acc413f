"""Writes rows in memory to a file that every process of a run reads: lists, generators, data frames, or data sets of `datasets`.

The file is JSON lines in the cache, and its name is its hash. The same rows give the same file, so the call that resumes a run finds
its data. A generator is read once, to its end, with one row in memory at a time.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from argosy.core.caches import cache_home
from argosy.core.errors import BadInput
from argosy.data.sources.record_files import plain


def rows_file(rows: Any, folder: Path | None = None) -> Path:
    """Writes rows to a file of JSON lines, and returns it.

    Args:
        rows: texts, or mappings of columns.
        folder: the folder to write to; None: `argosy/rows` in the user's cache.

    Raises:
        BadInput: a row is neither a text nor a mapping, there are no rows, or there is no home directory.
    """
    if folder is None and (home := cache_home()) is None:
        raise BadInput("there is no home directory to keep rows in", hint="set XDG_CACHE_HOME")
    folder = folder or home / "rows"  # type: ignore[operator]
    folder.mkdir(parents=True, exist_ok=True)
    digest, count = hashlib.sha256(), 0
    handle, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            for count, row in enumerate(_iterate(rows), 1):
                line = json.dumps(columns_of_row(row, count - 1), ensure_ascii=False).encode() + b"\n"
                digest.update(line)
                file.write(line)
        if not count:
            raise BadInput("no rows to train on", where="data")
        path = folder / f"{digest.hexdigest()[:24]}.jsonl"
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return path


def _iterate(rows: Any) -> Iterator[Any]:
    """Iterates over the rows of a list, generator, data frame or data set.

    Raises:
        BadInput: the object is a mapping of splits, or cannot be iterated over.
    """
    if isinstance(rows, Mapping):
        raise BadInput("several splits where rows belong", where="data", hint=f"give one: data=...[{next(iter(rows), 'train')!r}]")
    # A data frame iterates over the names of its columns.
    if hasattr(rows, "iterrows"):
        return (row.to_dict() for _, row in rows.iterrows())
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        problem = f"rows to train on are a list or the like, not {type(rows).__name__}"
        raise BadInput(problem, where="data", hint="data.source=FILE reads a file")
    return iter(rows)


def columns_of_row(row: Any, number: int) -> dict[str, Any]:
    """Converts a row to a mapping of columns. A text becomes the column `text`.

    Raises:
        BadInput: the row is neither a text nor a mapping.
    """
    where = f"row {number} of data"
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, Mapping):
        raise BadInput(f"a row that is {type(row).__name__}", where=where, hint="a text, or a mapping of columns")
    return {str(name): plain(_number(value), where, str(name)) for name, value in row.items()}


def _number(value: Any) -> Any:
    """Converts numpy numbers and arrays to Python numbers and lists. Other values are unchanged."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, Mapping) else value
