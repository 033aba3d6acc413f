"""Reads local files, and files at any URL that fsspec knows (`s3://`, `gs://`, `https://`, `hf://`, `memory://`).

A file is opened for random access, and its size is known without reading it. This module does not know what files hold.
"""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import cached_property
from glob import glob
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from argosy.core.addresses import is_address, local_path
from argosy.core.errors import ArgosyError, BadInput
from argosy.core.storage import Missing, file_system

WILDCARDS = "*?["
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class InputFile:
    """A file to read.

    place: the local path or URL of the file.
    """

    def __init__(self, place: "str | Path | InputFile"):
        self.place = str(place)
        self.is_local = not is_address(self.place)
        if self.is_local:
            self.place = str(Path(local_path(self.place)).expanduser())

    def __str__(self) -> str:
        return self.place

    def __repr__(self) -> str:
        return f"InputFile({self.place!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputFile) and other.place == self.place

    def __hash__(self) -> int:
        return hash(self.place)

    @property
    def name(self) -> str:
        """The last part of the path, without the query of a URL."""
        return self.place.rpartition("/")[2].partition("?")[0] if not self.is_local else Path(self.place).name

    @property
    def path(self) -> Path:
        """The local path. Only for local files."""
        return Path(self.place)

    @cached_property
    def _remote(self) -> tuple[Any, str]:
        return file_system(self.place)

    @property
    def full_place(self) -> str:
        """The local path, or the URL in the form of its file system, in which the URLs of files below a folder begin with that of the
        folder."""
        if self.is_local:
            return self.place
        files, address = self._remote
        return files.unstrip_protocol(address)

    def open(self) -> BinaryIO:
        """Opens the file for random access to its bytes.

        Raises:
            BadInput: there is no such file, or it cannot be read.
        """
        with reading(self.place):
            if self.is_local:
                return self.path.open("rb")
            files, address = self._remote
            return cast(BinaryIO, files.open(address, "rb"))

    @property
    def is_file(self) -> bool:
        with reading(self.place):
            return self.path.is_file() if self.is_local else self._remote[0].isfile(self._remote[1])

    @property
    def is_folder(self) -> bool:
        with reading(self.place):
            return self.path.is_dir() if self.is_local else self._remote[0].isdir(self._remote[1])

    @property
    def size_bytes(self) -> int:
        """The size of the file in bytes.

        Raises:
            BadInput: there is no such file, or its server does not tell the size.
        """
        with reading(self.place):
            size = self.path.stat().st_size if self.is_local else self._remote[0].size(self._remote[1])
        if size is None:
            raise BadInput("the server does not say how large the file is", where=self.place, hint="copy the file to this machine")
        return int(size)

    @property
    def modified_ns(self) -> int:
        """The modification time in ns since 1970; 0 if the file system does not tell it."""
        with reading(self.place):
            if self.is_local:
                return self.path.stat().st_mtime_ns
            try:
                return int(self._remote[0].modified(self._remote[1]).timestamp() * 1e9)
            except (NotImplementedError, AttributeError, KeyError):
                return 0

    def sibling(self, name: str) -> "InputFile":
        """The file with this name in the same folder."""
        return InputFile(f"{self.place.rpartition('/')[0]}/{name}" if not self.is_local else self.path.with_name(name))


@contextmanager
def reading(where: str):
    """A context manager that converts errors of the operating system, and of the client of a remote file system.

    Args:
        where: the path or URL that is read, for errors.

    Raises:
        BadInput: a file cannot be read.
    """
    try:
        yield
    except ArgosyError:
        raise
    except FileNotFoundError:
        raise Missing("no such file", where=where) from None
    except OSError as error:
        raise BadInput(f"cannot read the file: {error.strerror or error}"[:200], where=where) from None
    except Exception as error:
        if not is_address(where):
            raise
        message = (str(error).strip().splitlines() or [""])[0]
        raise BadInput(f"cannot read the file: {message or type(error).__name__}"[:200], where=where) from None


def has_wildcards(place: str) -> bool:
    """Whether a path or URL is a pattern, with wildcards or with a range such as `{000..010}`."""
    return any(character in place for character in WILDCARDS) or RANGE.search(place) is not None


def matching_files(place: str) -> list[InputFile]:
    """The files that a pattern matches, sorted by path, or in the order of a range such as `{000..010}`.

    Raises:
        BadInput: a file of a range does not exist.
    """
    if (match := RANGE.search(place)) is not None:
        first, last = match.groups()
        names = (place[: match.start()] + f"{i:0{len(first)}}" + place[match.end() :] for i in range(int(first), int(last) + 1))
        parts = {name: matching_files(name) for name in names}
        if missing := [name for name, files in parts.items() if not files]:
            raise BadInput(f"no such file: `{missing[0]}`", where=place, hint="a range in braces names files that are all there")
        return [file for files in parts.values() for file in files]
    if not is_address(place):
        local_files = (InputFile(path) for path in sorted(glob(str(Path(local_path(place)).expanduser()), recursive=True)))
        return [file for file in local_files if file.is_file]
    files, address = file_system(place)
    with reading(place):
        paths = sorted(files.glob(address))
    return [file for file in (InputFile(files.unstrip_protocol(path)) for path in paths) if file.is_file]


def files_below(folder: InputFile, is_wanted: Callable[[str], bool]) -> list[InputFile]:
    """The files below a folder whose names pass `is_wanted`, sorted by relative path, without hidden files and folders."""
    if folder.is_local:
        root = folder.path
        paths = [path for path in root.rglob("*") if path.is_file()]
        by_path = {path.relative_to(root).as_posix(): InputFile(path) for path in paths}
    else:
        files, address = file_system(folder.place)
        with reading(folder.place):
            addresses = files.find(address)
        by_path = {str(PurePosixPath(path).relative_to(address)): InputFile(files.unstrip_protocol(path)) for path in addresses}
    visible = {name: file for name, file in by_path.items() if not any(part.startswith(".") for part in name.split("/"))}
    return [visible[name] for name in sorted(visible) if is_wanted(visible[name].name)]


def common_folder(files: Iterable[InputFile]) -> str:
    """The path or URL of the deepest folder that contains all of these files."""
    parents = [file.place.rpartition("/")[0] if not file.is_local else str(file.path.parent) for file in files]
    if any(is_address(parent) for parent in parents):
        columns = takewhile(lambda parts: len(set(parts)) == 1, zip(*(parent.split("/") for parent in parents)))
        return "/".join(parts[0] for parts in columns)
    return os.path.commonpath(parents)
