"""Which base model adapters belong to, and which model a run learns from.

A model is known by where it was and by the size and SHA-256 of the files of its weights. It is opened again from there; another one
is refused, because adapters on other weights give plausible nonsense. A file whose size and time are those that were recorded counts
as the same when a model is loaded. A run that resumes hashes every file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.weights import manifest
from argosy.weights.model import OpenedModel
from argosy.weights.peft.sites import FILES


@dataclass(frozen=True)
class ModelRole:
    """What a model is to a run, for errors.

    model: its role.
    missing: what to do where it is not there.
    mismatch: what to do where its weights are others.
    """

    model: str
    missing: str
    mismatch: str


UNDER_ADAPTERS = ModelRole(
    "the base model under these adapters",
    "put the base model back, or leave a link to it there",
    "adapters only fit the weights they were trained on: put those back, or train again with dir=NEW",
)



def describe_base(stored: OpenedModel, address: str) -> dict[str, Any]:
    """What a checkpoint says of its base: its path, and size, SHA-256 and time of every file of weights.

    Args:
        address: its path or address, as the user gave it.
    """
    # The newest checkpoint of a run changes; the step itself does not.
    path = address if "://" in address else str(stored.path.resolve())
    files = {file.name: manifest.hash_file(file) | {"mtime_ns": file.stat().st_mtime_ns} for file in files_of(stored)}
    return {"path": path, "files": files}


def files_of(stored: OpenedModel) -> list[Path]:
    """The files of a model's weights. A checkpoint's manifest holds the hashes of the others."""
    if stored.path.is_file():
        return [stored.path]
    if stored.kind == "peft" and stored.adapted is not None:
        return [*files_of(stored.adapted.base), *(stored.path / name for name in FILES)]
    return [stored.path / manifest.NAME] if stored.kind == "argosy" else sorted(stored.path.glob("*.safetensors"))


def check_exists(described: Mapping[str, Any], role: ModelRole) -> None:
    """Checks that a described model is still where it was.

    Raises:
        BadInput: it is not.
    """
    if "://" not in (path := described["path"]) and not Path(path).exists():
        raise BadInput(f"{role.model} is not at {path}", hint=role.missing)


def check_same_weights(stored: OpenedModel, described: Mapping[str, Any], role: ModelRole, thorough: bool) -> None:
    """Checks that a model has the files that were described.

    Args:
        thorough: hashes every file, also those of the same size and time.

    Raises:
        BadInput: its weights are others.
    """
    path = described["path"]
    files = {file.name: file for file in files_of(stored)}
    if files.keys() != described["files"].keys():
        what = f"{path} has {', '.join(sorted(files))}, and {role.model} {', '.join(sorted(described['files']))}"
        raise BadInput(what, hint=role.mismatch)
    for name, expected in described["files"].items():
        about = files[name].stat()
        if not thorough and (about.st_size, about.st_mtime_ns) == (expected["bytes"], expected["mtime_ns"]):
            continue
        if about.st_size != expected["bytes"] or manifest.hash_file(files[name])["sha256"] != expected["sha256"]:
            raise BadInput(f"{path} has other weights than {role.model}", where=str(files[name]), hint=role.mismatch)
