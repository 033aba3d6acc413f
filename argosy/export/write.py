"""Writes a bundle: programs, weights named by their contents, the tokenizer's files, and last the manifest.

The folder is written as `TARGET.part` and renamed once it is on disk. Weights are sorted by name and cut into files of about a
gigabyte, so two versions of a model that share most weights share most files; with a store, equal files share one file on disk.
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
# What jax promises: programs are read by versions that are released in the six months after the one that wrote them.
WINDOW = timedelta(days=180)
# os.link on file systems that cannot.
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS}


@dataclass
class BundleContents:
    """The contents of a bundle to write.

    signatures: signatures by name, without programs.
    programs: the programs of each signature, each with the sizes of its named axes.
    weights: tensors to write.
    files: further small files by name.
    implementations: the implementation of each op in the programs.
    lineage: the origin of the bundle.
    linked: existing files of weights by path, with their tensors.
    mesh: the number of devices along each axis of the programs' mesh; empty: one device.
    splits: for tensors that are split over it, the mesh axis of each of their axes.
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
    """A tensor to write, from an array on any device."""
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
        target: a new folder.
        store: a folder of weight files that bundles share by hard links.
        sign: a file with the ed25519 private key that signs the manifest.
        progress: called with bytes as they are written.
        now: the time of writing.

    Raises:
        BadInput: the target exists, there is too little space, or the key cannot be used; nothing is written.
        Unsupported: a tensor has a type that safetensors has no name for.
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
    """Checks names of signatures and types of tensors.

    Raises:
        BadInput: a name that no file can have, or no signature.
        Unsupported: a type that safetensors has no name for.
    """
    if not contents.signatures:
        raise BadInput("a bundle without signatures")
    for name in contents.signatures:
        if SIGNATURE_NAME.fullmatch(name) is None:
            raise BadInput(f"signature `{name}`", hint="letters, digits, - and _, at most 64")
    check_entries(contents.weights)


def _program_files(contents: BundleContents) -> tuple[list[File], dict[str, BundleSignature]]:
    """The files of programs, and the signatures that name them."""
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
    """Renames a file of weights to its hash; with a store, it is the same file as the equal one there."""
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
    """Makes a file and the one of its name in the store one file. An altered one there is replaced; bundles that have it keep it."""
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
                # Another process has put it there meanwhile.
                continue
    except OSError as error:
        pending.unlink(missing_ok=True)
        if error.errno not in _NO_LINKS:
            raise
        problem = f"{store} and {path.parent.parent.parent} cannot share files: {(error.strerror or '').lower()}"
        raise ArgosyError(problem, hint="a store is on the same file system as its bundles; or leave out `store`") from None


def _linked(staged: StagedFolder, path: Path, file: WeightsFile) -> WeightsFile:
    """Puts a file of another bundle into this one: as a hard link, or a copy where there are none."""
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
    """The versions of the tools that write the programs."""
    conventions = {exported.calling_convention_version for some in contents.programs.values() for _, exported in some}
    return {
        "argosy": installed_version("argosy"),
        "jax": jax.__version__,
        "jaxlib": installed_version("jaxlib"),
        "stablehlo": _stablehlo_version(),
        "calling_convention": ", ".join(map(str, sorted(conventions))),
    }


def installed_version(package: str) -> str:
    """The version of a package; "unknown" for a source tree that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _stablehlo_version() -> str:
    """The version of StableHLO in which `jax.export` writes: that of four weeks ago, at least."""
    from jaxlib.mlir.dialects import stablehlo

    four_weeks = stablehlo.StablehloCompatibilityRequirement.WEEK_4
    return stablehlo.get_version_from_compatibility_requirement(four_weeks)
