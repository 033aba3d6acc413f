"""Keeps steps in a folder that all processes of a run see."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from argosy.checkpoint.medium.medium import Medium, Wanted
from argosy.checkpoint.saving.pace import SavePace, remove_files
from argosy.checkpoint.step import files as step_files
from argosy.checkpoint.step.locks import exclusive
from argosy.core.formats.files import File, sync
from argosy.weights import manifest


class Folder(Medium):
    """A folder of steps. Steps are read in place."""

    def folder(self, step: int) -> Path:
        return self.store.local_path(str(step))

    def put(self, step: int, files: Iterable[File], pace: SavePace) -> manifest.Files:
        return step_files.write_files(self.folder(step), files, pace)

    def commit(self, step: int, files: manifest.Files) -> None:
        manifest.commit(self.folder(step), files)

    def files(self, step: int) -> manifest.Files:
        return manifest.read_manifest(self.folder(step))

    def verify(self, step: int, files: Mapping[str, Any], keep: bool) -> None:
        for error in manifest.compare_files(self.folder(step), files).values():
            if error is not None:
                raise error

    def local(self, step: int, is_wanted: Wanted = lambda name: True) -> Path:
        return self.folder(step)

    def release(self) -> None: ...

    def retire(self, step: int, pace: SavePace) -> None:
        folder = self.folder(step)
        with exclusive(folder) as free:
            if not free:
                return
            (folder / manifest.NAME).unlink()
        # After a power cut, the manifest must not exist without the files.
        sync(folder)
        remove_files(folder, pace)
        shutil.rmtree(folder)

    def set_aside(self, step: int) -> str:
        aside, n = self.store.local_path(f"{step}.damaged"), 1
        while aside.exists():
            n += 1
            aside = self.store.local_path(f"{step}.damaged-{n}")
        self.folder(step).rename(aside)
        return aside.name
