"""`argosy export`: loads a model and writes it as a bundle."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.hub.download import local_model
from argosy.core.hub.names import name_of_path
from argosy.export.manifest import BundleManifest, bundle_digest
from argosy.jobs.image_models import check_one_tower, draws_images
from argosy.weights.staging import is_occupied

Say = Callable[[str], None]


def export_bundle(
    model: str,
    target: str,
    *,
    signatures: Sequence[str] | None,
    dtype: str | None = None,
    quantization: str | None = None,
    adapter: str | None = None,
    controlnet: str | Sequence[str] | None = None,
    embeddings: str | Sequence[str] | None = None,
    steps: int | None = None,
    size: tuple[int, int] | None = None,
    say: Say = lambda _: None,
    **options: Any,
) -> dict[str, Any]:
    """Writes a model as a bundle. Returns the facts about what was written.

    Args:
        dtype, quantization, adapter, controlnet, embeddings: the arguments of `argosy.load`.
        signatures, options: the arguments of `export.model.export_model`.
        steps, size: the arguments of `export.images.export_images`, for models that draw images.

    Raises:
        BadInput, Damaged: there is no model, it has no such signature, or the target exists. Nothing is written.
    """
    if is_occupied(Path(target)):
        raise BadInput(f"{target} is not empty", hint="name a new folder; nothing is ever overwritten")
    start = time.monotonic()
    from argosy.export.model import export_model
    from argosy.jobs.api import load

    if draws_images(model, say):
        _check_drawing(signatures, options)
        options = {name: value for name, value in options.items() if name not in ("length", "max_tokens", "mesh")}
        say(f"loading {model}")
        more: Any = {"controlnet": controlnet, "embeddings": embeddings}
        pipeline = load(model, dtype=dtype, quantization=quantization, adapter=adapter, **more)
        manifest = pipeline.export(target, steps=steps, size=size, lineage=source_lineage(model), say=say, **options)
        return bundle_facts(manifest) | {"source": model, "target": target, "seconds": time.monotonic() - start}
    if steps is not None or size is not None or "denoise" in (signatures or ()):
        raise BadInput("signature=denoise, steps and size are for models that draw images", hint="leave them out")
    if controlnet is not None or embeddings is not None:
        raise BadInput("controlnet and embeddings are for models of a diffusers folder, which draw images", hint="leave them out")
    check_one_tower(model, "export", say)
    say(f"loading {model}")
    lm = load(model, dtype=dtype, quantization=quantization, adapter=adapter)
    lineage = source_lineage(model) | ({} if quantization is None else {"quantization": quantization})
    manifest = export_model(lm, target, signature=signatures, lineage=lineage, say=say, **options)
    return bundle_facts(manifest) | {"source": model, "target": target, "seconds": time.monotonic() - start}


def _check_drawing(signatures: Sequence[str] | None, options: dict[str, Any]) -> None:
    """Raises:
    BadInput: a setting is for models of another kind.
    """
    if other := [name for name in signatures or () if name != "denoise"]:
        raise BadInput(f"signature={other[0]}: this model draws images", hint="signature=denoise")
    if options.get("mesh") is not None:
        raise BadInput("mesh: bundles of models that draw images are for one device", hint="leave it out")
    if unsupported := [name for name in ("length", "max_tokens") if options.get(name) is not None]:
        raise BadInput(f"{unsupported[0]} is for models of text, and this model draws images", hint="leave it out")


def source_lineage(model: str) -> dict[str, Any]:
    """Returns the origin of a model: its name and kind, and for a run also the data, the weights and the step."""
    model = local_model(model)
    hub_name = name_of_path(model)
    name = str(hub_name) if hub_name else Path(model).name
    if (Path(model) / "model_index.json").is_file():
        return {"source": {"name": name, "kind": "diffusers"}}
    from argosy.checkpoint.open import open_model

    opened = open_model(model, lambda _: None)
    lineage: dict[str, Any] = {"source": {"name": name, "kind": opened.kind}}
    folders = (Path(model), *Path(model).absolute().parents[:2])
    settings = next((folder / "settings.yml" for folder in folders if (folder / "settings.yml").is_file()), None)
    if opened.kind == "argosy" and settings is not None:
        from argosy.core.settings import yaml_layer

        values = yaml_layer(settings).values
        lineage["run"] = {"dir": settings.parent.name, "checkpoint": opened.path.name}
        lineage["data"] = str((values.get("data") or {}).get("source"))
        if parent := (values.get("init") or {}).get("weights"):
            lineage["parent"] = str(parent)
    return lineage


def bundle_facts(manifest: BundleManifest) -> dict[str, Any]:
    """Returns the description of a bundle as JSON."""
    return {
        "sha256": bundle_digest(manifest),
        "default": manifest.default,
        "signatures": {name: signature_facts(signature) for name, signature in manifest.signatures.items()},
        "tensors": sum(len(file.tensors) for file in manifest.weights),
        "bytes": sum(record.bytes for record in manifest.files.values()),
        "files": {name: record.model_dump() for name, record in manifest.files.items()},
        "versions": manifest.versions,
        "written": manifest.written,
        "readable_until": manifest.readable_until,
        "implementations": manifest.implementations,
        "lineage": manifest.lineage,
        "mesh": manifest.mesh,
    }


def signature_facts(signature: Any) -> dict[str, Any]:
    """Returns a signature as JSON, with the number of weights in place of their names."""
    return signature.model_dump(mode="json", exclude={"weights"}) | {"weights": len(signature.weights)}
