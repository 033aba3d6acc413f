"""`argosy bundle`: reads, verifies, compares and runs bundles, with inputs and outputs as files."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import BadInput, Damaged
from argosy.core.json_text import parse_json
from argosy.data.sources.kinds import IMAGE_NAMES
from argosy.export.manifest import SEAL, BundleManifest
from argosy.export.verify import days_left, read_bundle_manifest, verify_bundle
from argosy.jobs.export import bundle_facts

MOST_INPUT_BYTES = 1 << 30


def show_bundle(path: str) -> dict[str, Any]:
    """Returns the manifest of a bundle as JSON. The other files are not read."""
    manifest = read_bundle_manifest(Path(path))
    return {"path": path} | bundle_facts(manifest) | {"days_left": days_left(manifest), "signed": (Path(path) / SEAL).is_file()}


def verified_bundle(path: str, key: str | None) -> dict[str, Any]:
    """Verifies every file of a bundle, and its signature if a key is given. Returns the facts of the bundle."""
    manifest = verify_bundle(path, key)
    facts = bundle_facts(manifest)
    return {
        "path": path,
        "sha256": facts["sha256"],
        "files": len(manifest.files),
        "bytes": facts["bytes"],
        "signed": (Path(path) / SEAL).is_file(),
        "signed_by": key,
        "readable_until": manifest.readable_until,
        "days_left": days_left(manifest),
    }


def compared_bundles(a: str, b: str) -> dict[str, Any]:
    """Compares two bundles by their manifests. Returns the differences."""
    left, right = read_bundle_manifest(Path(a)), read_bundle_manifest(Path(b))
    tensors = [_tensors(manifest) for manifest in (left, right)]
    files = [{file.file: manifest.files[file.file].bytes for file in manifest.weights} for manifest in (left, right)]
    shared = sum(size for name, size in files[0].items() if name in files[1])
    first, second = left.model_dump(mode="json"), right.model_dump(mode="json")
    differences = {
        part: _differences(first[part], second[part]) for part in ("signatures", "versions", "implementations", "lineage", "files")
    }
    differences["mesh"] = _differences(left.mesh, right.mesh)
    return {
        "a": a,
        "b": b,
        "equal": first | {"written": "", "readable_until": ""} == second | {"written": "", "readable_until": ""},
        "tensors": _differences(*tensors),
        "shared_weight_bytes": shared,
        **differences,
    }


def _tensors(manifest: BundleManifest) -> dict[str, Any]:
    return {name: layout.model_dump() for file in manifest.weights for name, layout in file.tensors.items()}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the keys that only one mapping has, and the keys whose values differ."""
    return {
        "only_in_a": sorted(set(a) - set(b)),
        "only_in_b": sorted(set(b) - set(a)),
        "changed": sorted(name for name in set(a) & set(b) if a[name] != b[name]),
    }


def run_bundle(
    path: str,
    source: str | None,
    *,
    signature: str | None = None,
    output: str | None = None,
    key: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Calls a signature of a bundle.

    Args:
        path: the folder of the bundle.
        source: a file of inputs (.json, .npz, .txt), - for JSON on stdin, JSON itself, or a text. None uses the example of the
            signature.
        signature: the name of the signature. None stands for the default one.
        output: a .json or .npz file for the outputs. With None they are only returned.
        key: a file with the public key whose owner must have signed the bundle.

    Returns:
        the outputs by name, as lists and texts.
    """
    from argosy.export.bundle import Bundle

    if output is not None and not output.endswith((".json", ".npz")):
        raise BadInput(f"output={output}", hint="a file that ends in .json or .npz")
    bundle = Bundle.open(path, key=key, say=say)
    of = bundle.manifest.signature(signature)
    files = [step.input for step in of.preprocess if step.step == "decode_image"]
    texts = [step.input for step in of.preprocess if step.input not in files]
    inputs = of.example if source is None else read_inputs(source, texts, files)
    if not inputs:
        raise BadInput("no input", hint="input=FILE.json, or input='{\"NAME\": [[1, 2]]}'")
    outputs = bundle.run(inputs, signature)
    outputs = dict(map(_widened, outputs.items()))
    if output is not None and output.endswith(".npz"):
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in outputs.items()}
        np.savez(output, **arrays)
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in outputs.items()}
    if output is not None and output.endswith(".json"):
        Path(output).write_text(json.dumps(plain) + "\n", encoding="utf-8")
    return plain


def _widened(item: tuple[str, Any]) -> tuple[str, Any]:
    """Converts numbers of a type that numpy's files and JSON lack, such as bfloat16, to float32."""
    name, value = item
    small = isinstance(value, np.ndarray) and value.dtype.kind not in "biuf"
    return name, value.astype(np.float32) if small else value


def read_inputs(source: str, texts: list[str], files: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the inputs of a call by name, from a file or from a text on the command line.

    Args:
        texts: the names of inputs that are lists of texts. A text file has one text per line.
        files: the names of inputs that are lists of image files.

    Raises:
        BadInput: there is no such file, or it has no inputs.
        Damaged: a file cannot be read.
    """
    path = Path(source)
    if source.lstrip().startswith("{"):
        return _object(source, "input")
    if source == "-":
        return _object(sys.stdin.read(MOST_INPUT_BYTES), "stdin")
    if not path.is_file():
        if texts and not path.suffix:
            return {texts[0]: [source]}
        hint = "input=FILE.json, FILE.npz or FILE.txt; input='{...}'; input=- reads JSON from stdin"
        raise BadInput(f"no file `{source}`", hint=hint)
    if path.stat().st_size > MOST_INPUT_BYTES:
        raise BadInput(f"{source} has more than {MOST_INPUT_BYTES} bytes")
    if files and path.suffix.lower() in IMAGE_NAMES:
        return {files[0]: [path.read_bytes()]}
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (ValueError, OSError, KeyError) as error:
            raise Damaged(f"{source} cannot be read: {str(error).splitlines()[0][:160]}") from None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Damaged(f"{source} is not UTF-8 at byte {error.start}") from None
    if path.suffix == ".json":
        return _object(text, source)
    if not texts:
        raise BadInput(f"{source} is a text, and this signature takes none", hint="a .json or .npz file")
    return {texts[0]: [line for line in text.splitlines() if line.strip()]}


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        document = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadInput(f"{where} is no JSON object", hint='{"NAME": [[1, 2]]}')
    return document
