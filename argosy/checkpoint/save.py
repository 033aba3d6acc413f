"""Writes a model as files: a loaded model, or weights that are converted from one format to another.

All files are planned, checked and their bytes counted before the first byte is written. Tensors are then written one by one into a
folder beside the target, which is renamed to the target when it is complete (`weights.staging`).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from flax import nnx

from argosy.adapt.quant import QuantizedEinsum, Scheme, by_layer
from argosy.adapt.surgery import find
from argosy.checkpoint.step.layout import META, array_by_array
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.formats import TensorEntry, TensorReader, is_apart, read_part
from argosy.core.formats.files import File, of_text
from argosy.core.settings import dump
from argosy.core.settings.schema import Choice
from argosy.data.tokenizers.load import is_vocabulary
from argosy.models import FAMILIES
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.models.parts.einsum import Contraction, Einsum
from argosy.models.parts.weight import variables
from argosy.ops.native.products import Panels
from argosy.weights import manifest
from argosy.weights.build import as_dtype
from argosy.weights.fill import check_fit, model_weights
from argosy.weights.hub.learned_embeddings import learned_arrays, learned_embeddings_file
from argosy.weights.hub.quantized.writer import compressed_files
from argosy.weights.hub.writer import cast_weights, companion_files, hub_files
from argosy.weights.peft.writer import contents_of, write_adapter
from argosy.weights.quantized import describe_schemes, quantized_model
from argosy.weights.staging import StagedFolder, is_occupied
from argosy.weights.stream import in_order

# Called with (bytes written since the last call, bytes in total, bytes kept from an earlier process).
Progress = Callable[[int, int, int], None]


class Saved(Protocol):
    """A model that `save_model` can write: a `weights.build.LoadedModel`, or an `LM`."""

    @property
    def config(self) -> Any: ...

    @property
    def module(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def hub(self) -> Mapping[str, Any]: ...

    @property
    def companions(self) -> Path | None: ...

    @property
    def dtypes(self) -> Mapping[str, Any]: ...


def save_model(lm: Saved, folder: Path, format: Literal["hub", "argosy", "peft"], dtype: Any = None) -> None:
    """Writes a model with its tokenizer, or with the format "peft" only its adapters.

    Args:
        dtype: the type of the tensors, as in `cast_weights`. The default is the type in which each tensor was stored.

    Raises:
        BadInput: the folder is not empty, adapters are not merged, there are no adapters to write, or the dtype is unknown.
    """
    if any(isinstance(v.get_value(), Panels) for v in variables(lm.module).values()):
        raise BadInput("the weights are packed for this CPU, which no file holds", hint="load the model again without `blocks`")
    if format == "peft":
        base = lm.hub.get("_name_or_path") or (str(lm.companions) if lm.companions else None)
        contents = contents_of(lm.module)
        write_adapter(folder, lm.config, contents.adapters, base, contents.whole, contents.dropout)
        return
    # A convolutional network has no contractions.
    contractions = find(lm.module, ".*") if any(isinstance(node, Contraction) for _, node in nnx.iter_modules(lm.module)) else {}
    if adapted := [name for name, of in contractions.items() if not isinstance(of, Einsum | QuantizedEinsum)]:
        hint = 'lm.merge() first, or format="peft" for the adapters alone'
        raise BadInput(f"the model has adapters, such as on {adapted[0]}", hint=hint)
    schemes = by_layer(lm.module, {name: of.scheme for name, of in contractions.items() if isinstance(of, QuantizedEinsum)})
    if schemes and format == "hub":
        hint = 'format="argosy" keeps them quantized'
        raise BadInput(f"{plural(len(schemes), 'weight', 'is', 'are')} quantized, which a Hub folder has no place for", hint=hint)
    dtype = None if dtype is None else as_dtype(dtype)
    came_in = lm.hub.get("dtype") or lm.hub.get("torch_dtype")
    weights = model_weights(lm.module)
    if dtype is None and came_in is not None:
        dtype = {name: lm.dtypes.get(name, came_in) for name in weights.names}
    write_model_folder(folder, format, lm.config, weights, dict(lm.hub), lm.companions, dtype, lm.tokenizer, schemes=schemes)


def write_model_folder(
    folder: Path,
    format: str,
    config: Any,
    weights: TensorReader,
    hub: dict[str, Any],
    companions: Path | None,
    dtype: Any = None,
    tokenizer: Any = None,
    *,
    shard_bytes: float = 5e9,
    identity: Mapping[str, Any] | None = None,
    progress: Progress = lambda new, all, reused: None,
    schemes: Mapping[str, Scheme] | None = None,
) -> None:
    """Writes a model from its per-layer weights, with a slab of one tensor in memory at a time.

    Args:
        format: hub, argosy or compressed-tensors.
        weights: reads the weights, by per-layer name. With `schemes`, these are the arrays of the quantized model.
        hub: the config.json of the model.
        companions: the folder whose small files (tokenizer, configs) are copied.
        dtype: the type of the tensors, as in `cast_weights`. None keeps the stored types.
        shard_bytes: the most bytes of one file of a Hub folder.
        identity: a JSON object that identifies the conversion. A process with the same identity continues one that was killed.
        progress: called while bytes are written (`Progress`).
        schemes: the scheme of each quantized contraction, by per-layer name.

    Raises:
        BadInput: the folder is not empty, the weights are not those of the plain model (adapters, int8), the disk is too small, or an
            unfinished folder belongs to another conversion.
    """
    if format not in ("hub", "argosy", "compressed-tensors"):
        raise BadInput(f"unknown format `{format}`", hint="hub, argosy, compressed-tensors or peft")
    if is_occupied(folder):
        raise BadInput(f"{folder} is not empty", hint="name a new folder; nothing is ever overwritten")
    check_fit(quantized_model(config, schemes or {}), weights)
    hub = _with_ids(hub, tokenizer)
    if format == "hub" and isinstance(config, LearnedEmbeddingsConfig):
        files = [learned_embeddings_file(config.token, learned_arrays(config, weights, dtype))]
    elif format == "hub":
        files = hub_files(config, weights, hub=hub, dtype=dtype, shard_bytes=shard_bytes)
    elif format == "compressed-tensors":
        files = compressed_files(config, weights, schemes or {}, hub=hub, dtype=dtype, shard_bytes=shard_bytes)
    else:
        files = _checkpoint_of(config, weights, hub, dtype, schemes)
    files += companion_files(companions)
    all_bytes = sum(file.bytes for file in files)
    with StagedFolder(folder, identity) as part:
        reused = part.plan(files)
        progress(0, all_bytes, reused)
        part.progress = lambda new: progress(new, all_bytes, reused)
        part.write(files, in_order)
        if tokenizer is not None and not any(is_vocabulary(file.name) for file in files):
            tokenizer.save(part.folder)
        if format == "argosy":
            part.write([_manifest_of(part)])
        part.commit()


def _with_ids(hub: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns the config.json with the tokenizer's special tokens, if it lacks them. Without them, other programs would use their own
    defaults."""
    if tokenizer is None:
        return hub
    ids = {f"{n}_token_id": getattr(tokenizer, n) for n in ("bos", "eos", "pad")}
    return {k: v for k, v in ids.items() if v is not None} | hub


def _checkpoint_of(
    config: Any, weights: TensorReader, hub: dict[str, Any], dtype: Any, schemes: Mapping[str, Scheme] | None
) -> list[File]:
    """Returns the files of a checkpoint that belongs to no run: the weights by layer, and the settings."""
    weights = cast_weights(config, weights, dtype)
    entries = [_entry(weights, name) for name in weights.names]
    family = Choice(FAMILIES, tag="family").name_of(config)
    meta = {"model": {"family": family} | dump(config), "decided": {"layers": "unroll"}, "hub": hub}
    if schemes:
        meta["quantization"] = describe_schemes(schemes)
    return [*array_by_array(entries), of_text(META, json.dumps(meta, indent=1))]


def _entry(weights: TensorReader, name: str) -> TensorEntry:
    shape = weights.shape(name)
    parts = (lambda: (read_part(weights, name, i) for i in range(shape[0]))) if is_apart(weights, name) else None
    return TensorEntry(name, shape, weights.dtype(name), lambda: weights.read(name), parts)


def _manifest_of(part: StagedFolder) -> File:
    """Returns the manifest from the hashes that were computed while writing. Only files that the tokenizer saved are read again."""
    saved = [f for f in part.folder.iterdir() if f.is_file() and not f.name.startswith((".", manifest.NAME))]
    extra_files = {f.name: manifest.hash_file(f, sync=True) for f in saved if f.name not in part.done}
    files = dict(sorted((part.done | extra_files).items()))
    return of_text(manifest.NAME, manifest.manifest_text(files))
