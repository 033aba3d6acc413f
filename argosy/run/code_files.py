"""Files of code that a run's settings name as FILE.py:NAME: what each held when a checkpoint was written, and what changed since.

Maps, filters and sources of data are not among them: their text is part of the data's fingerprint, so a run does not go on with others.
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
    """The settings that name something in a file, and what they name: ("optimizer.name", "mine.py:Signsgd")."""
    for key, value in flatten(settings).items():
        if is_file(value):
            yield key, str(value)
        elif isinstance(value, list):
            yield from ((key, item) for item in value if is_file(item))


def code_hashes(settings: Any) -> dict[str, str]:
    """The SHA-256 of each file, by what names it. A file that is gone has none."""
    hashes: dict[str, str] = {}
    for key, name in named_code(settings):
        path = Path(name.rpartition(":")[0]).expanduser()
        if not key.startswith(OF_DATA) and path.is_file():
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def changed_code(settings: Any, before: Mapping[str, str]) -> list[str]:
    """What names files that no longer are what they were when a checkpoint was written."""
    return [name for name, digest in code_hashes(settings).items() if before.get(name, digest) != digest]
