"""The interface of the places that keep the steps of a run.

One rule holds for every medium: the manifest of a step is written last and removed first, so a step has a manifest only while it is
complete. A commit renames nothing, because object stores cannot rename.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from argosy.checkpoint.saving.pace import SavePace
from argosy.core.formats.files import File
from argosy.core.storage import Store
from argosy.weights import manifest

Wanted = Callable[[str], bool]


class Medium(ABC):
    """The steps of a run, each a directory of files.

    Args:
        store: the directory of all steps.
    """

    def __init__(self, store: Store):
        self.store = store

    def steps(self) -> list[int]:
        """Returns all steps that have any files, committed or not, oldest first."""
        return sorted(int(name) for name in self.store.list() if name.isdecimal())

    def is_committed(self, step: int) -> bool:
        return self.store.exists(f"{step}/{manifest.NAME}")

    def sweep(self) -> None:
        """Removes the files of uncommitted steps, which a killed process was writing or removing."""
        for step in self.steps():
            if not self.is_committed(step):
                self.store.remove(str(step))

    @abstractmethod
    def put(self, step: int, files: Iterable[File], pace: SavePace) -> manifest.Files:
        """Writes files of a step. Returns their sizes and hashes, which are computed while they are written."""

    @abstractmethod
    def commit(self, step: int, files: manifest.Files) -> None:
        """Writes the manifest of a step after all of its files."""

    @abstractmethod
    def files(self, step: int) -> manifest.Files:
        """Returns the files of a step, as its manifest lists them.

        Raises:
            Damaged: the manifest is missing or differs from what was written.
            ArgosyError: the manifest cannot be reached.
        """

    @abstractmethod
    def verify(self, step: int, files: Mapping[str, Any], keep: bool) -> None:
        """Compares files of a step with their sizes and hashes.

        Args:
            files: the size and hash of each file to compare.
            keep: whether files that are fetched for this stay on this machine.

        Raises:
            Damaged: a file is missing, or differs from what was written.
            ArgosyError, OSError: a file cannot be reached, so its bytes are unknown.
        """

    @abstractmethod
    def local(self, step: int, is_wanted: Wanted = lambda name: True) -> Path:
        """Returns a folder of this machine with those files of a step whose names `is_wanted` accepts. Fetches them where necessary.

        Raises:
            BadInput: there is no such step.
            Damaged: a file differs from what was written.
        """

    @abstractmethod
    def release(self) -> None:
        """Removes fetched files from this machine's disk."""

    @abstractmethod
    def retire(self, step: int, pace: SavePace) -> None:
        """Removes a step, unless it is being read."""

    @abstractmethod
    def set_aside(self, step: int) -> str:
        """Renames a damaged step. Returns its new name."""
