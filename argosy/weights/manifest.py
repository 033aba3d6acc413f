"""The manifest of a committed checkpoint: size and SHA-256 of every file, and of the manifest itself.

Orbax commits atomically but does not check array data: 160 of 160 single flipped bits were read as wrong weights without an error
(zstd is written without its checksum). So a checkpoint is committed by its manifest, which is written last, after every file is
on disk. Files that do not match it are never read.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.process.cores import core_count

NAME = "manifest.json"
# Counts up when files of a checkpoint are laid out in another way. Folders without one are older than the first release.
FORMAT = 1
CHUNK_BYTES = 1 << 20
# At most so many files are hashed at once.
THREADS = 8

# The size and SHA-256 of each file, by its path inside the folder.
Files = dict[str, dict[str, Any]]


def write_manifest(folder: Path) -> None:
    """Hashes and syncs every file, then commits the manifest by renaming it into place."""
    commit(folder, {str(f.relative_to(folder)): hash_file(f, sync=True) for f in _files(folder)})


def commit(folder: Path, files: Mapping[str, Any]) -> None:
    """Writes the manifest of files that are on disk already, {file: size and hash}, by renaming it into place."""
    # It imports numpy, which readers of a run directory do not need.
    from argosy.core.formats.files import sync

    # Waiting for the disk, which takes several in one go.
    with ThreadPoolExecutor(THREADS, "sync") as pool:
        list(pool.map(sync, (folder, *(d for d in folder.rglob("*") if d.is_dir()))))
    temporary = folder / (NAME + ".part")
    with temporary.open("w") as out:
        out.write(manifest_text(files))
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(folder / NAME)
    sync(folder)
    sync(folder.parent)


def manifest_text(files: Mapping[str, Any]) -> str:
    """A manifest of {file: size and hash}."""
    return json.dumps({"format": FORMAT, "files": files, "sha256": manifest_digest(files)}, indent=1)


def verify_folder(folder: Path) -> None:
    """Reads every file, several at a time, and compares it with the manifest.

    Raises:
        Damaged: names the first file that is missing, has another size or other bytes, or that the disk cannot read (EIO).
        BadInput: a file cannot be reached, which says nothing about its bytes: no permission, no network.
    """
    for error in compare_files(folder, read_manifest(folder)).values():
        if error is not None:
            raise error


def compare_files(folder: Path, files: Mapping[str, Any]) -> dict[str, ArgosyError | None]:
    """What is wrong with each file, None where nothing is. Hashing lets other threads run, so each core takes a file."""
    def compare_file(name: str) -> ArgosyError | None:
        path = folder / name
        try:
            _compare(path, name, files[name])
        except OSError as error:
            return _unread(path, error)
        except Damaged as damage:
            return damage
        return None

    # The largest first, so that no core is left with one at the end.
    order = sorted(files, key=lambda name: -files[name]["bytes"])
    with ThreadPoolExecutor(min(THREADS, core_count()), "verify") as pool:
        problems = dict(zip(order, pool.map(compare_file, order)))
    return {name: problems[name] for name in files}


def _unread(path: Path, error: OSError) -> ArgosyError:
    """EIO is a disk that cannot read what it stored."""
    kind = Damaged if error.errno == errno.EIO else BadInput
    return kind(f"{path.name} cannot be read: {error.strerror}", where=str(path))


def _compare(path: Path, name: str, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise Damaged(f"{name} is missing", where=str(path))
    if path.stat().st_size != expected["bytes"]:
        raise Damaged(f"{name} has {plural(path.stat().st_size, 'byte')}, not {expected['bytes']}", where=str(path))
    if hash_file(path) != expected:
        raise Damaged(f"{name} differs from what was written: its SHA-256 is another", where=str(path))


def read_manifest(folder: Path) -> Files:
    """The files of a folder.

    Raises:
        Damaged: there is no manifest, or it differs from what was written.
        BadInput: it cannot be reached, or has another format.
    """
    path = folder / NAME
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise Damaged("it was never committed: it has no manifest", where=str(folder)) from None
    except OSError as error:
        raise _unread(path, error) from None


def parse_manifest(data: bytes, where: str) -> Files:
    """The files of a manifest.

    Args:
        where: the manifest, for errors.

    Raises:
        Damaged: it differs from what was written.
        BadInput: it has another format.
    """
    try:
        stored = json.loads(data)
        files, version = stored["files"], stored.get("format")
        good = stored["sha256"] == _sha256(files if version is None else [version, files])
        good &= all({"bytes", "sha256"} == set(file) for file in files.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        files, version, good = {}, FORMAT, False
    if not good:
        raise Damaged("the manifest differs from what was written", where=where)
    if version is None:
        problem = "this checkpoint was written before the first release, and nothing reads such run directories"
        raise BadInput(problem, where=where, hint="train again with dir=NEW")
    if version != FORMAT:
        raise BadInput(f"this checkpoint has format {version}, and this version of argosy reads format {FORMAT}", where=where)
    return files


def hash_file(path: Path, sync: bool = False) -> dict[str, Any]:
    manifest_digest, size = hashlib.sha256(), 0
    # Read into one buffer: new memory for each chunk costs as much as reading it.
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb+" if sync else "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            manifest_digest.update(buffer[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return {"bytes": size, "sha256": manifest_digest.hexdigest()}


def _files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file() and not f.name.startswith(NAME))


def manifest_digest(files: Mapping[str, Any]) -> str:
    """What tells this manifest from any other."""
    return _sha256([FORMAT, files])


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
