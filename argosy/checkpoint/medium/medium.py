"""Where the steps of a run are kept.

One rule holds for every medium: the manifest of a step is written last and removed first, so a step has a manifest only while it is
complete. Nothing is renamed to commit it, because object stores cannot rename.
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
        """All steps of which there is anything, committed or not, oldest first."""
        return sorted(int(name) for name in self.store.list() if name.isdecimal())

    def is_committed(self, step: int) -> bool:
        return self.store.exists(f"{step}/{manifest.NAME}")

    def sweep(self) -> None:
        """Removes what a kill left of steps that were being written or removed."""
        for step in self.steps():
            if not self.is_committed(step):
                self.store.remove(str(step))

    @abstractmethod
    def put(self, step: int, files: Iterable[File], pace: SavePace) -> manifest.Files:
        """Writes files of a step and returns their sizes and hashes, which are taken meanwhile."""

    @abstractmethod
    def commit(self, step: int, files: manifest.Files) -> None:
        """Writes the manifest of a step, all of whose files are there."""

    @abstractmethod
    def files(self, step: int) -> manifest.Files:
        """The files of a step, as its manifest lists them.

        Raises:
            Damaged: its manifest is missing or differs from what was written.
            ArgosyError: it cannot be reached.
        """

    @abstractmethod
    def verify(self, step: int, files: Mapping[str, Any], keep: bool) -> None:
        """Compares files of a step with their sizes and hashes.

        Args:
            keep: whether fetched files stay on this machine.

        Raises:
            Damaged: one is missing, or differs from what was written.
            ArgosyError, OSError: a file cannot be reached, so its bytes are unknown.
        """

    @abstractmethod
    def local(self, step: int, is_wanted: Wanted = lambda name: True) -> Path:
        """A folder of this machine with the files of a step that are wanted.

        Raises:
            BadInput: there is no such step.
            Damaged: a file differs from what was written.
        """

    @abstractmethod
    def release(self) -> None:
        """Removes fetched files from the disk."""

    @abstractmethod
    def retire(self, step: int, pace: SavePace) -> None:
        """Removes a step, unless it is being read."""

    @abstractmethod
    def set_aside(self, step: int) -> str:
        """Renames a damaged step. Returns its new name."""
