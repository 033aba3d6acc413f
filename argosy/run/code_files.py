"""Tracks the files of code that a run's settings name as FILE.py:NAME, to report which of them changed since a checkpoint was written.

Maps, filters and sources of data are not tracked here. Their text is part of the data's fingerprint, so a run cannot resume with other
ones.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from argosy.core.registry import is_file
from argosy.core.settings import flatten

# Settings whose files are part of the data's fingerprint.
OF_DATA = ("data.source", "data.map", "data.filter")


def named_code(settings: Any) -> Iterator[tuple[str, str]]:
    """Yields each setting that names code in a file, and its value, such as ("optimizer.name", "mine.py:Signsgd")."""
    for key, value in flatten(settings).items():
        if is_file(value):
            yield key, str(value)
        elif isinstance(value, list):
            yield from ((key, item) for item in value if is_file(item))


def code_hashes(settings: Any) -> dict[str, str]:
    """Returns the SHA-256 of each file of code, by the value that names it (FILE.py:NAME). A file that does not exist is left out."""
    hashes: dict[str, str] = {}
    for key, name in named_code(settings):
        path = Path(name.rpartition(":")[0]).expanduser()
        if not key.startswith(OF_DATA) and path.is_file():
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def changed_code(settings: Any, before: Mapping[str, str]) -> list[str]:
    """Returns the values (FILE.py:NAME) whose files changed since a checkpoint was written.

    Args:
        before: the hashes in the checkpoint (`code_hashes`).
    """
    return [name for name, digest in code_hashes(settings).items() if before.get(name, digest) != digest]
