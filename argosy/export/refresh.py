"""Renews the programs of a bundle from the bundle itself.

Programs are deserialized and exported again by this version of jax, which begins a new window of compatibility. Weights, tokenizer and
signatures stay as they are.
"""

import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
from jax import export

from argosy.export.bundle import Bundle
from argosy.export.manifest import BundleManifest, bundle_digest
from argosy.export.mesh import described_mesh, sharding_of
from argosy.export.write import BundleContents, write_bundle
from argosy.parallel.scope import scope


def refresh_bundle(
    path: str | Path,
    target: str | Path | None = None,
    *,
    key: str | Path | None = None,
    sign: str | Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    now: datetime | None = None,
) -> BundleManifest:
    """Rewrites a bundle with programs exported by this version of jax.

    Args:
        path: the folder of the bundle.
        target: the path of the new bundle, a new folder. None replaces the old bundle.
        key: a file with a public key, whose owner must have signed the bundle. With None, a signature is ignored.
        sign: a file with the private key that signs the new manifest. None leaves the new bundle unsigned.
        say: called with progress messages.
        now: the time of writing. The default is the current time.

    Raises:
        BadInput, Damaged: an error of `Bundle.open`, or the target exists.
        Unsupported: this version of jax can no longer read the programs.
    """
    path = Path(path)
    bundle = Bundle.open(path, key=key, expired=True, runs=False)
    manifest = bundle.manifest
    contents = BundleContents(
        {name: signature.model_copy(update={"programs": []}) for name, signature in manifest.signatures.items()},
        {name: [] for name in manifest.signatures},
        implementations=manifest.implementations,
        lineage=manifest.lineage | {"parent": bundle_digest(manifest)},
        linked={path / file.file: file for file in manifest.weights},
        mesh=manifest.mesh,
    )
    for name, signature in manifest.signatures.items():
        for program in signature.programs:
            say(f"exporting {program.file} with jax {jax.__version__}")
            contents.programs[name].append((program.shapes, exported_again(bundle.exported(program), manifest)))
    used = {file.file for file in manifest.weights} | {p.file for s in manifest.signatures.values() for p in s.programs}
    contents.files = {name: (path / name).read_bytes() for name in manifest.files if name not in used}
    pending = Path(target) if target is not None else path.with_name(f"{path.name}.{uuid4().hex[:8]}.new")
    new_manifest = write_bundle(pending, contents, sign=sign, now=now)
    if target is None:
        _replace(path, pending)
    return new_manifest


def exported_again(exported: export.Exported, manifest: BundleManifest) -> export.Exported:
    """Exports a deserialized program again with this version of jax, for the mesh of its bundle."""


    def program(*args: Any) -> Any:
        return exported.call(*args)

    args, keywords = jax.tree.unflatten(
        exported.in_tree, [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    )
    assert not keywords
    platforms = list(exported.platforms)
    if not manifest.mesh:
        return export.export(jax.jit(program), platforms=platforms)(*args)
    mesh = described_mesh(manifest.mesh)
    splits, everywhere = manifest.splits(), sharding_of([], mesh)
    places = {name: sharding_of(splits[name], mesh) for name in args[0]}
    with scope(mesh):
        return export.export(jax.jit(program, in_shardings=(places, everywhere), out_shardings=everywhere), platforms=platforms)(*args)


def _replace(path: Path, pending: Path) -> None:
    """Replaces a folder by another, complete one. A kill between the two renames leaves the old folder under the name `*.old`."""
    previous = path.with_name(f"{path.name}.{uuid4().hex[:8]}.old")
    path.rename(previous)
    try:
        pending.rename(path)
    except OSError:
        previous.rename(path)
        raise
    shutil.rmtree(previous)
