"""Identifies other models that a run needs: the base under its adapters, and its teacher.

A model is identified by its path and by the size and SHA-256 of its weight files. It is opened again from that path. A changed model
is refused, because adapters on other weights give plausible nonsense. When a model is loaded, a file with the recorded size and time
counts as unchanged. A run that resumes hashes every file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.core.addresses import is_hub, is_missing
from argosy.core.errors import BadInput
from argosy.weights import manifest
from argosy.weights.model import OpenedModel
from argosy.weights.peft.sites import FILES


@dataclass(frozen=True)
class ModelRole:
    """Texts of errors about a model that a run needs.

    model: the role of the model, such as "the base model under these adapters".
    missing: the hint if the model does not exist.
    mismatch: the hint if its weights have changed.
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
    """Describes a base model for a checkpoint: its path, and the size, SHA-256 and time of every weight file.

    Args:
        address: the path or address of the model, as the user gave it.
    """
    # The path of the step is recorded, because the newest checkpoint of a run changes.
    path = address if "://" in address or is_hub(address) else str(stored.path.resolve())
    files = {file.name: manifest.hash_file(file) | {"mtime_ns": file.stat().st_mtime_ns} for file in files_of(stored)}
    return {"path": path, "files": files}


def files_of(stored: OpenedModel) -> list[Path]:
    """Returns the files that identify a model's weights. For a checkpoint that is the manifest, which holds the hashes of the
    others."""
    if stored.path.is_file():
        return [stored.path]
    if stored.kind == "peft" and stored.adapted is not None:
        return [*files_of(stored.adapted.base), *(stored.path / name for name in FILES)]
    return [stored.path / manifest.NAME] if stored.kind == "argosy" else sorted(stored.path.glob("*.safetensors"))


def check_exists(description: Mapping[str, Any], role: ModelRole) -> None:
    """Checks that a described model still exists at its path.

    Raises:
        BadInput: the model does not exist.
    """
    if is_missing(path := description["path"]):
        raise BadInput(f"{role.model} is not at {path}", hint=role.missing)


def check_same_weights(stored: OpenedModel, description: Mapping[str, Any], role: ModelRole, thorough: bool) -> None:
    """Checks that a model's weight files match their description.

    Args:
        thorough: whether files of the recorded size and time are hashed too.

    Raises:
        BadInput: the files differ from their description.
    """
    path = description["path"]
    files = {file.name: file for file in files_of(stored)}
    if files.keys() != description["files"].keys():
        problem = f"{path} has {', '.join(sorted(files))}, and {role.model} {', '.join(sorted(description['files']))}"
        raise BadInput(problem, hint=role.mismatch)
    for name, expected in description["files"].items():
        about = files[name].stat()
        if not thorough and (about.st_size, about.st_mtime_ns) == (expected["bytes"], expected["mtime_ns"]):
            continue
        if about.st_size != expected["bytes"] or manifest.hash_file(files[name])["sha256"] != expected["sha256"]:
            raise BadInput(f"{path} has other weights than {role.model}", where=str(files[name]), hint=role.mismatch)
