"""The manifest of a bundle: its signatures, programs and weights, and the size and SHA-256 of every file.

The text of a manifest is canonical: if it is parsed and written again, the bytes are the same. So every byte is checked, including
blanks, and two bundles with equal contents have equal manifests except for their dates. A file name in a manifest is a path inside the
bundle. This module does not import jax, so a bundle can be verified on a machine that cannot run its programs.
"""

import hashlib
import json
import re
from typing import Any, Literal

import ml_dtypes
import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from argosy.core.errors import BadInput, Damaged, Unsupported, complaint
from argosy.core.settings import Settings
from argosy.export.mesh import fits_mesh
from argosy.export.steps import (
    DetokenizeStep,
    InputStep,
    LabelsStep,
    NormalizeStep,
    ProbabilitiesStep,
)
from argosy.parallel.mesh import ORDER

# The version of the layout of a bundle's files.
FORMAT = 1
MANIFEST, SEAL = "manifest.json", "manifest.sig"
# The limit of a manifest, which is enough for a million tensors. A manifest is read into memory before anything of it is known.
MOST_MANIFEST_BYTES = 256 << 20
SIGNATURE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


# The types of inputs and outputs, by their names in numpy and ml_dtypes.
_KINDS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_KINDS += ("complex64", "complex128", "bfloat16", "int4", "uint4")
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in _KINDS}
DTYPES |= {str(np.dtype(kind)): np.dtype(kind) for name, kind in vars(ml_dtypes).items() if name.startswith("float")}


class TensorSignature(Settings):
    """An input or output of a signature."""

    name: str
    """Its name in requests and results."""
    shape: list[int | str]
    """Sizes; a name stands for a size that differs from call to call."""
    dtype: str
    """Type of the numbers, by numpy's names and those of ml_dtypes."""
    description: str = ""
    """Meaning, in a sentence."""
    default: int | float | None = None
    """The number that fills an input which is left out. None: the input is required."""
    pad: int = 0
    """The value of padding, in rows and positions that are added to reach the size of a program."""
    minimum: int | float | None = None
    """The least number of an input. None: any."""
    maximum: int | float | list[int] | None = None
    """The largest number of an input, or one for each place of its last axis. None: any."""

    @model_serializer(mode="wrap")
    def _without_open_ranges(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A bundle from before there were ranges has the same text as when it was written."""
        return {name: value for name, value in handler(self).items() if value is not None or name not in ("minimum", "maximum")}


class BundleProgram(Settings):
    """A program of a signature."""

    file: str
    """Name of the file that `jax.export` serialized."""
    platforms: list[str]
    """The platforms that it was lowered for: cpu, cuda, rocm, tpu."""
    shapes: dict[str, int] = Field(default_factory=dict)
    """The size of each named axis; empty: any size."""


class BundleSignature(Settings):
    """One way to call a bundle."""

    description: str = ""
    """What the signature computes, in a sentence."""
    inputs: list[TensorSignature]
    """Inputs of its programs."""
    outputs: list[TensorSignature]
    """Outputs of its programs."""
    programs: list[BundleProgram]
    """One program for each platform and shape. The first that fits is run."""
    weights: list[str]
    """Names of the tensors that the programs take."""
    padding: list[str] = Field(default_factory=list)
    """Named axes that may be padded to the next size of a program, because the padding does not change other results."""
    limits: dict[str, int] = Field(default_factory=dict)
    """Largest size of each named axis."""
    preprocess: list[InputStep] = Field(default_factory=list)
    """Steps before the program."""
    postprocess: list[NormalizeStep | ProbabilitiesStep | LabelsStep | DetokenizeStep] = Field(default_factory=list)
    """Steps after it."""
    example: dict[str, Any] = Field(default_factory=dict)
    """Example inputs, for a first call and for warming up."""

    @property
    def platforms(self) -> list[str]:
        """The platforms for which there is a program."""
        return list(dict.fromkeys(platform for program in self.programs for platform in program.platforms))


class TensorLayout(Settings):
    """Shape and type of a stored tensor."""

    shape: list[int]
    dtype: str
    split: list[str | None] = Field(default_factory=list)
    """The axis of the bundle's mesh that each of its axes is split over. Empty: every device has the whole tensor."""

    @model_serializer(mode="wrap")
    def _without_split(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A bundle for one device has the same text as when no other was known."""
        return {name: value for name, value in handler(self).items() if name != "split" or value}


class WeightsFile(Settings):
    """A file of weights and its tensors by name."""

    file: str
    tensors: dict[str, TensorLayout]


class FileRecord(Settings):
    """The size and hash of a file."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class BundleManifest(Settings):
    """The description of a bundle: everything that can be known without running it."""

    format: Literal[1] = FORMAT
    default: str
    """The signature that is called if a request names none."""
    signatures: dict[str, BundleSignature]
    weights: list[WeightsFile]
    files: dict[str, FileRecord]
    versions: dict[str, str]
    """Versions of argosy, jax, jaxlib, StableHLO and the calling convention that the bundle was written with."""
    written: str
    """Time of writing, as an ISO date and time in UTC."""
    readable_until: str
    """The date until which newer versions of jax promise to read its programs."""
    implementations: dict[str, str] = Field(default_factory=dict)
    """The implementation of each op in its programs, by op."""
    lineage: dict[str, Any] = Field(default_factory=dict)
    """The model, run, data and parent that the bundle was made from."""
    mesh: dict[str, int] = Field(default_factory=dict)
    """The number of devices along each axis of the mesh that its programs run on together. Empty: one device."""

    @model_serializer(mode="wrap")
    def _without_mesh(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A bundle for one device has the same text as when no other was known."""
        return {name: value for name, value in handler(self).items() if name != "mesh" or value}

    def signature(self, name: str | None = None) -> BundleSignature:
        """A signature by name; None: the default.

        Raises:
            BadInput: there is no signature of this name.
        """
        name = self.default if name is None else name
        if name not in self.signatures:
            raise BadInput(f"this bundle has no signature `{name}`", hint=f"it has {', '.join(self.signatures)}")
        return self.signatures[name]

    def splits(self) -> dict[str, list[str | None]]:
        """For each tensor, the axis of the mesh that each of its axes is split over; empty for a tensor that is not split."""
        return {name: layout.split for file in self.weights for name, layout in file.tensors.items()}


def bundle_text(manifest: BundleManifest) -> str:
    """Returns the canonical text of a manifest, which includes its hash."""
    content = manifest.model_dump(mode="json")
    return _canonical(content | {"sha256": _digest(content)})


def bundle_digest(manifest: BundleManifest) -> str:
    """Returns the hash that identifies a bundle."""
    return _digest(manifest.model_dump(mode="json"))


def _canonical(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n"


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


def read_bundle_text(data: bytes, where: str) -> BundleManifest:
    """Parses a manifest.

    Args:
        where: the path of the file, for errors.

    Raises:
        Damaged: the manifest differs from what was written, or contradicts itself.
        Unsupported: the version of the layout is not known here.
    """
    altered = Damaged(f"{MANIFEST} differs from what was written", where=where)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise altered from None
    if not isinstance(content, dict):
        raise altered
    # A later format may have other keys, so its number is read before anything else.
    if type(content.get("format")) is int and content["format"] != FORMAT:
        problem = f"{MANIFEST} has format {content['format']}, and this version of argosy reads format {FORMAT}"
        raise Unsupported(problem, where=where, hint="use the version of argosy that wrote it, or a newer one")
    digest = content.pop("sha256", None)
    try:
        manifest = BundleManifest.model_validate(content)
        text = bundle_text(manifest).encode()
    except (ValidationError, RecursionError) as error:
        raise Damaged(f"{MANIFEST}: {complaint(error)}", where=where) from None
    if text != data or digest != bundle_digest(manifest):
        raise altered
    _check_names(manifest, where)
    return manifest


def dtype_of_name(name: str) -> np.dtype:
    """Returns the type of a name.

    Raises:
        Damaged: there is no such type.
    """
    if name not in DTYPES:
        raise Damaged(f"unknown type `{name}`")
    return DTYPES[name]


def _check_names(manifest: BundleManifest, where: str) -> None:
    """Checks that every file has a path inside the bundle, and that every file that is used has a hash."""
    used = [weights.file for weights in manifest.weights]
    used += [program.file for signature in manifest.signatures.values() for program in signature.programs]
    for name in (*manifest.files, *used):
        if FILE_NAME.fullmatch(name) is None or ".." in name.split("/"):
            raise Damaged(f"`{name}` is no name of a file inside the bundle", where=f"in {where}")
        if name in (MANIFEST, SEAL):
            raise Damaged(f"`{name}` lists itself", where=f"in {where}")
    for name in used:
        if name not in manifest.files:
            raise Damaged(f"`{name}` is used and has no hash", where=f"in {where}")
    for weights in manifest.weights:
        if weights.file != f"weights/{manifest.files[weights.file].sha256}.safetensors":
            raise Damaged(f"`{weights.file}` is not named by its contents", where=f"in {where}")
    if manifest.default not in manifest.signatures:
        raise Damaged(f"the default signature `{manifest.default}` is missing", where=f"in {where}")
    if any(axis not in ORDER or size < 2 for axis, size in manifest.mesh.items()):
        raise Damaged(f"its mesh is {manifest.mesh}", where=f"in {where}")
    for weights in manifest.weights:
        for name, layout in weights.tensors.items():
            if not fits_mesh(layout.split, layout.shape, manifest.mesh):
                raise Damaged(f"tensor `{name}` of shape {layout.shape} cannot be split as {layout.split}", where=f"in {where}")
    stored = {name for weights in manifest.weights for name in weights.tensors}
    for name, signature in manifest.signatures.items():
        if unknown := [spec.dtype for spec in (*signature.inputs, *signature.outputs) if spec.dtype not in DTYPES]:
            raise Damaged(f"signature `{name}` has a tensor of unknown type `{unknown[0]}`", where=f"in {where}")
        if missing := [tensor for tensor in signature.weights if tensor not in stored]:
            raise Damaged(f"signature `{name}` takes `{missing[0]}`, which no file holds", where=f"in {where}")
        for step in signature.preprocess:
            for folder in step.folders:
                if not any(file.startswith(folder + "/") for file in manifest.files):
                    raise Damaged(f"signature `{name}` has a tokenizer in `{folder}`, which holds no file", where=f"in {where}")
