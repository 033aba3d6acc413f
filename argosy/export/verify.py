"""Verifies all files of a bundle before they are parsed as programs or weights.

A bundle contains exactly the files of its manifest: no others, no links, no devices. This module does not import jax.
"""

import os
import stat
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from argosy.core.errors import BadInput, Damaged
from argosy.core.formats.safetensors import SafeTensors
from argosy.export.manifest import MANIFEST, MOST_MANIFEST_BYTES, SEAL, BundleManifest, WeightsFile, read_bundle_text
from argosy.export.seal import SIGNATURE_BYTES, check_signature
from argosy.weights.manifest import compare_files

# A warning is printed during this time before the guarantee of jax ends.
WARN = timedelta(days=30)


def verify_bundle(path: str | Path, key: str | Path | None = None) -> BundleManifest:
    """Reads every file of a bundle and compares it with the manifest.

    Args:
        path: the folder of the bundle.
        key: a file with a public key, whose owner must have signed the manifest. With None, a signature is ignored.

    Raises:
        BadInput: there is no bundle, or the key cannot be read.
        Damaged: a file is changed, missing or unexpected (the message names it), or the signature was not made with this key.
        Unsupported: the format of the bundle is not known here.
    """
    folder = Path(path)
    manifest = read_bundle_manifest(folder, key)
    _check_listing(folder, manifest)
    for error in compare_files(folder, {name: record.model_dump() for name, record in manifest.files.items()}).values():
        if error is not None:
            raise error
    return manifest


def read_bundle_manifest(folder: Path, key: str | Path | None = None) -> BundleManifest:
    """Reads the manifest of a bundle without checking its other files. Arguments and errors are those of `verify_bundle`."""
    if not folder.is_dir():
        raise BadInput(f"no bundle at `{folder}`", hint="a bundle is a folder: `argosy export MODEL BUNDLE` writes one")
    data = _small_file(folder, MANIFEST, MOST_MANIFEST_BYTES)
    if data is None:
        raise BadInput(f"{folder} is no bundle: it has no {MANIFEST}", hint="`argosy export MODEL BUNDLE` writes one")
    if key is not None:
        # Checked before the manifest is parsed, so that nothing of an unsigned manifest is parsed.
        signature = _small_file(folder, SEAL, SIGNATURE_BYTES)
        if signature is None:
            raise Damaged(f"it is not signed: there is no {SEAL}", where=str(folder))
        check_signature(data, signature, key, str(folder))
    return read_bundle_text(data, str(folder / MANIFEST))


def _small_file(folder: Path, name: str, most: int) -> bytes | None:
    """Returns the contents of a regular file of at most `most` bytes; None if there is no file."""
    path = folder / name
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{name} cannot be read: {error.strerror}", where=str(path)) from None
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{name} is {_kind(status.st_mode)}, and a bundle has plain files only", where=str(path))
    if status.st_size > most:
        raise Damaged(f"{name} has {status.st_size} bytes, over the limit of {most}", where=str(path))
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{name} cannot be read: {error.strerror}", where=str(path)) from None


def _kind(mode: int) -> str:
    return "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no plain file"


def _check_listing(folder: Path, manifest: BundleManifest) -> None:
    """Checks that the folder contains no file that the manifest lacks, and only regular files and folders."""
    folders = {"/".join(name.split("/")[:depth]) for name in manifest.files for depth in range(1, name.count("/") + 1)}
    for name, mode in _entries(folder):
        if stat.S_ISDIR(mode):
            if name not in folders:
                raise Damaged(f"{name} does not belong to the bundle", where=str(folder / name))
        elif not stat.S_ISREG(mode):
            raise Damaged(f"{name} is {_kind(mode)}, and a bundle has plain files only", where=str(folder / name))
        elif name not in manifest.files and name not in (MANIFEST, SEAL):
            raise Damaged(f"{name} does not belong to the bundle", where=str(folder / name))
        elif name == SEAL:
            _check_seal_size(folder)


def _check_seal_size(folder: Path) -> None:
    if (folder / SEAL).stat().st_size != SIGNATURE_BYTES:
        raise Damaged(f"{SEAL} does not have {SIGNATURE_BYTES} bytes", where=str(folder / SEAL))


def _entries(folder: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yields the path and the mode of everything in a folder. Links are not followed."""
    with os.scandir(folder / prefix) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        mode = entry.stat(follow_symlinks=False).st_mode
        yield prefix + entry.name, mode
        if stat.S_ISDIR(mode):
            yield from _entries(folder, f"{prefix}{entry.name}/")


def open_bundle_weights(folder: Path, weights: WeightsFile) -> SafeTensors:
    """Memory-maps a file of weights.

    Raises:
        Damaged: the header of the file differs from the manifest.
    """
    opened = SafeTensors.open(folder / weights.file)
    stored = {name: (list(opened.shape(name)), str(opened.dtype(name))) for name in opened.names}
    listed = {name: (layout.shape, layout.dtype) for name, layout in weights.tensors.items()}
    if stored != listed:
        name = next((name for name in {**stored, **listed} if stored.get(name) != listed.get(name)), "")
        raise Damaged(f"{weights.file}: tensor `{name}` is not that of the manifest", where=str(folder))
    return opened


def days_left(manifest: BundleManifest, today: date | None = None) -> int:
    """Returns the number of days in which newer versions of jax still guarantee to read the programs; negative afterwards."""
    return (date.fromisoformat(manifest.readable_until) - (today or datetime.now(UTC).date())).days
