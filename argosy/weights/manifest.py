"""The manifest of a committed checkpoint: the size and SHA-256 of every file, and a SHA-256 of the manifest itself.

Orbax commits atomically but does not check array data. In a test, 160 of 160 single flipped bits were read as wrong weights without an
error, because zstd is written without its checksum. So a checkpoint is committed by its manifest, which is written last, when every
file is on disk. Files that do not match the manifest are never read.
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
# The version of the layout of a checkpoint's files. Folders without a version are older than the first release.
FORMAT = 1
CHUNK_BYTES = 1 << 20
# The number of files that are hashed or synced at once.
THREADS = 8

# The size and SHA-256 of each file, by its path inside the folder.
Files = dict[str, dict[str, Any]]


def write_manifest(folder: Path) -> None:
    """Hashes and syncs every file, then commits the manifest by renaming it into place."""
    commit(folder, {str(f.relative_to(folder)): hash_file(f, sync=True) for f in _files(folder)})


def commit(folder: Path, files: Mapping[str, Any]) -> None:
    """Writes the manifest of files that are already on disk, by renaming it into place.

    Args:
        files: the size and hash of each file, by path in the folder.
    """
    # Imported here because it imports numpy, which readers of a run directory do not need.
    from argosy.core.formats.files import sync

    # Threads wait for the disk, which syncs several folders in one go.
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
    """Returns the manifest of {file: size and hash} as JSON."""
    return json.dumps({"format": FORMAT, "files": files, "sha256": manifest_digest(files)}, indent=1)


def verify_folder(folder: Path) -> None:
    """Reads every file, several at a time, and compares it with the manifest.

    Raises:
        Damaged: a file is missing, has another size or other bytes, or cannot be read from the disk (EIO). The message names the first.
        BadInput: a file cannot be reached (no permission, no network), so that its bytes are unknown.
    """
    for error in compare_files(folder, read_manifest(folder)).values():
        if error is not None:
            raise error


def compare_files(folder: Path, files: Mapping[str, Any]) -> dict[str, ArgosyError | None]:
    """Compares files with their sizes and hashes. Returns the error of each file, None for one that matches. Threads compare several
    files at once, because hashing releases the interpreter's lock."""
    def compare_file(name: str) -> ArgosyError | None:
        path = folder / name
        try:
            _compare(path, name, files[name])
        except OSError as error:
            return _unread(path, error)
        except Damaged as damage:
            return damage
        return None

    # The largest files come first, so that no core is left with a large file at the end.
    order = sorted(files, key=lambda name: -files[name]["bytes"])
    with ThreadPoolExecutor(min(THREADS, core_count()), "verify") as pool:
        problems = dict(zip(order, pool.map(compare_file, order)))
    return {name: problems[name] for name in files}


def _unread(path: Path, error: OSError) -> ArgosyError:
    """Returns the error for a file that cannot be read. EIO means that the disk cannot read what it stored, so the file is damaged."""
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
    """Reads the manifest of a folder: the size and hash of each file.

    Raises:
        Damaged: there is no manifest, or it differs from what was written.
        BadInput: the manifest cannot be reached, or has a version that is not known here.
    """
    path = folder / NAME
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise Damaged("it was never committed: it has no manifest", where=str(folder)) from None
    except OSError as error:
        raise _unread(path, error) from None


def parse_manifest(data: bytes, where: str) -> Files:
    """Parses a manifest: the size and hash of each file.

    Args:
        where: the path of the manifest, for errors.

    Raises:
        Damaged: the manifest differs from what was written.
        BadInput: the manifest has a version that is not known here.
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
    """Returns the SHA-256 that identifies a manifest."""
    return _sha256([FORMAT, files])


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
