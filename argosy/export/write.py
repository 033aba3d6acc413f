"""Writes a bundle: programs, weights whose files are named by their hashes, the tokenizer's files, and last the manifest.

The folder is written as `TARGET.part` and renamed once it is on disk. Weights are sorted by name and divided into files of about a
gigabyte, so two versions of a model with mostly equal weights have mostly equal files. With a store, equal files share disk space.
"""

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from argosy.core.errors import ArgosyError, BadInput
from argosy.core.formats import TensorEntry
from argosy.core.formats.files import File, of_bytes, of_text
from argosy.core.formats.safetensors import check_entries, tensor_shards, tensors_file
from argosy.export.manifest import (
    MANIFEST,
    SEAL,
    SIGNATURE_NAME,
    BundleManifest,
    BundleProgram,
    BundleSignature,
    FileRecord,
    TensorLayout,
    WeightsFile,
    bundle_text,
)
from argosy.export.seal import sign_manifest
from argosy.weights.manifest import hash_file
from argosy.weights.staging import StagedFolder

SHARD_BYTES = 1e9
# The guarantee of jax: versions that are released within six months after the one that wrote a program can read it.
WINDOW = timedelta(days=180)
# The errors of os.link on file systems without hard links.
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS}


@dataclass
class BundleContents:
    """The contents of a bundle that is to be written.

    signatures: the signatures by name, without programs.
    programs: (sizes of named axes, program) for the programs of each signature.
    weights: the tensors to write.
    files: further small files, by path in the bundle.
    implementations: the implementation of each op in the programs.
    lineage: the origin of the bundle.
    linked: existing files of weights by path, with descriptions of their tensors.
    mesh: the size of each axis of the programs' mesh; empty for one device.
    splits: the mesh axis of each axis, for tensors that are split over the mesh.
    """

    signatures: dict[str, BundleSignature]
    programs: dict[str, list[tuple[dict[str, int], export.Exported]]]
    weights: list[TensorEntry] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    implementations: dict[str, str] = field(default_factory=dict)
    lineage: dict[str, Any] = field(default_factory=dict)
    linked: dict[Path, WeightsFile] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    splits: dict[str, list[str | None]] = field(default_factory=dict)


def tensor_entry(name: str, value: Any) -> TensorEntry:
    """Describes a tensor to write, from an array on any device."""
    return TensorEntry(name, tuple(value.shape), np.dtype(value.dtype), lambda: np.asarray(value))


def write_bundle(
    target: str | Path,
    contents: BundleContents,
    *,
    store: str | Path | None = None,
    sign: str | Path | None = None,
    shard_bytes: float = SHARD_BYTES,
    progress: Callable[[int], None] = lambda _: None,
    now: datetime | None = None,
) -> BundleManifest:
    """Writes a bundle completely or not at all.

    Args:
        target: the path of the bundle, a new folder.
        store: a folder of weight files that bundles share by hard links.
        sign: a file with the ed25519 private key that signs the manifest. None leaves the bundle unsigned.
        shard_bytes: the most bytes of a file of weights.
        progress: called with the number of bytes written since the last call.
        now: the time of writing. The default is the current time.

    Raises:
        BadInput: the target exists, there is too little space, or the key cannot be used. Nothing is written.
        Unsupported: safetensors has no name for the type of a tensor.
    """
    target, now = Path(target), now or datetime.now(UTC)
    if sign is not None:
        sign_manifest(b"", sign)
    _check_contents(contents)
    shards = tensor_shards(sorted(contents.weights, key=lambda entry: entry.name), shard_bytes) if contents.weights else []
    weights = [tensors_file(f"weights/{i}.safetensors", shard, {}) for i, shard in enumerate(shards)]
    programs, signatures = _program_files(contents)
    others = [*programs, *(of_bytes(name, data) for name, data in sorted(contents.files.items()))]
    with StagedFolder(target, None, progress) as staged:
        staged.plan([*weights, *others])
        staged.write([*weights, *others])
        listed = [_named_by_content(staged, file, shard, store, contents.splits) for file, shard in zip(weights, shards)]
        listed += [_linked(staged, path, file) for path, file in contents.linked.items()]
        used = {file.file: file for file in listed}
        records = {name: FileRecord(**staged.done[name]) for name in [file.name for file in others] + list(used)}
        manifest = BundleManifest(
            default=next(iter(signatures)),
            signatures=signatures,
            weights=list(used.values()),
            files=records,
            versions=tool_versions(contents),
            written=now.isoformat(timespec="seconds"),
            readable_until=(now + WINDOW).date().isoformat(),
            implementations=contents.implementations,
            lineage=contents.lineage,
            mesh=contents.mesh,
        )
        text = bundle_text(manifest)
        last = [] if sign is None else [of_bytes(SEAL, sign_manifest(text.encode(), sign))]
        staged.write([of_text(MANIFEST, text), *last])
        staged.commit()
    return manifest


def _check_contents(contents: BundleContents) -> None:
    """Checks the names of signatures and the types of tensors.

    Raises:
        BadInput: there is no signature, or the name of one cannot be that of a file.
        Unsupported: safetensors has no name for the type of a tensor.
    """
    if not contents.signatures:
        raise BadInput("a bundle without signatures")
    for name in contents.signatures:
        if SIGNATURE_NAME.fullmatch(name) is None:
            raise BadInput(f"signature `{name}`", hint="letters, digits, - and _, at most 64")
    check_entries(contents.weights)


def _program_files(contents: BundleContents) -> tuple[list[File], dict[str, BundleSignature]]:
    """Returns the files of programs, and the signatures with the names of these files."""
    files, signatures = [], {}
    for name, signature in contents.signatures.items():
        listed = []
        for shapes, exported in contents.programs[name]:
            file = ".".join([name, *(f"{axis}-{size}" for axis, size in shapes.items()), "bin"])
            files.append(of_bytes(f"programs/{file}", bytes(exported.serialize())))
            listed.append(BundleProgram(file=f"programs/{file}", platforms=list(exported.platforms), shapes=shapes))
        signatures[name] = signature.model_copy(update={"programs": listed})
    return files, signatures


def _named_by_content(
    staged: StagedFolder,
    file: File,
    shard: Sequence[TensorEntry],
    store: str | Path | None,
    splits: Mapping[str, list[str | None]],
) -> WeightsFile:
    """Renames a file of weights to its hash. With a store, it becomes a hard link to the equal file there."""
    record = staged.done.pop(file.name)
    name = f"weights/{record['sha256']}.safetensors"
    path = staged.folder / file.name
    path.replace(staged.folder / name)
    staged.done[name] = record
    if store is not None:
        _shared(staged.folder / name, Path(store), record)
    tensors = {
        entry.name: TensorLayout(shape=list(entry.shape), dtype=str(entry.dtype), split=splits.get(entry.name, [])) for entry in shard
    }
    return WeightsFile(file=name, tensors=tensors)


def _shared(path: Path, store: Path, record: Mapping[str, Any]) -> None:
    """Hard-links a file with the file of the same name in the store. An altered file in the store is replaced, but stays in the bundles
    that have it."""
    store.mkdir(parents=True, exist_ok=True)
    store_file = store / path.name
    pending = path.with_name(f".{path.name}.{os.getpid()}.link")
    try:
        while True:
            if store_file.is_file() and not store_file.is_symlink() and hash_file(store_file) == record:
                os.link(store_file, pending)
                pending.replace(path)
                return
            store_file.unlink(missing_ok=True)
            try:
                os.link(path, store_file)
                return
            except FileExistsError:
                # Another process has added the file to the store in the meantime.
                continue
    except OSError as error:
        pending.unlink(missing_ok=True)
        if error.errno not in _NO_LINKS:
            raise
        problem = f"{store} and {path.parent.parent.parent} cannot share files: {(error.strerror or '').lower()}"
        raise ArgosyError(problem, hint="a store is on the same file system as its bundles; or leave out `store`") from None


def _linked(staged: StagedFolder, path: Path, file: WeightsFile) -> WeightsFile:
    """Adds a file of another bundle to this one, as a hard link, or as a copy on file systems without hard links."""
    target = staged.folder / file.file
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        try:
            os.link(path, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            target.write_bytes(path.read_bytes())
    staged.done[file.file] = hash_file(target)
    return file


def tool_versions(contents: BundleContents) -> dict[str, str]:
    """Returns the versions of the tools that write the programs."""
    conventions = {exported.calling_convention_version for some in contents.programs.values() for _, exported in some}
    return {
        "argosy": installed_version("argosy"),
        "jax": jax.__version__,
        "jaxlib": installed_version("jaxlib"),
        "stablehlo": _stablehlo_version(),
        "calling_convention": ", ".join(map(str, sorted(conventions))),
    }


def installed_version(package: str) -> str:
    """Returns the version of a package; "unknown" for a source tree that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _stablehlo_version() -> str:
    """Returns the version of StableHLO in which `jax.export` writes programs, which is at least four weeks old."""
    from jaxlib.mlir.dialects import stablehlo

    four_weeks = stablehlo.StablehloCompatibilityRequirement.WEEK_4
    return stablehlo.get_version_from_compatibility_requirement(four_weeks)
