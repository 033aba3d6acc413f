"""`argosy convert`: converts a model from one format to another, tensor by tensor, without building it.

Memory stays below twice the source's largest tensor plus 500 MB; the result reports this bound and the memory used. After an
interruption, a kill or a full disk, the same command resumes.
"""

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from argosy.checkpoint.open import open_model
from argosy.checkpoint.save import Progress, write_model_folder
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.formats.safetensors import tensors_file
from argosy.core.hub.download import local_model
from argosy.core.hub.names import name_of_path
from argosy.core.process.signals import before_leaving
from argosy.data.tokenizers.load import matching
from argosy.models import FAMILIES
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.observe import memory
from argosy.run.settings.recipe_files import no_model
from argosy.weights import manifest
from argosy.weights.build import stored_tokenizer
from argosy.weights.gguf.mixtures import MIXTURES, Mixture
from argosy.weights.gguf.writer import GGUFContent, gguf_content
from argosy.weights.hub.learned_embeddings import learned_arrays, learned_embeddings_file
from argosy.weights.hub.reader import MappedTensors, check_tied_head
from argosy.weights.hub.single_file import single_file_entries
from argosy.weights.model import COMPANIONS, OpenedModel
from argosy.weights.peft.merge import merged_weights
from argosy.weights.peft.reader import check_base, config_for, read_contents
from argosy.weights.peft.sites import FILES
from argosy.weights.peft.writer import write_adapter
from argosy.weights.staging import write_staged
from argosy.weights.stream import in_order, largest_tensor, streaming_model

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# The format of a target with this suffix.
FILES_OF = {".gguf": "gguf", ".safetensors": "single_file"}
# Endings of files in formats of others, which no folder is meant to have.
OTHER_FILES = frozenset((".onnx", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".h5", ".keras", ".tflite", ".mlmodel", ".npz", ".msgpack"))
DIFFUSERS_INDEX = "model_index.json"
# The subfolders of a diffusers folder whose models a single file may contain.
SINGLE_FILE_PARTS = ("transformer", "unet", "vae", "text_encoder", "text_encoder_2")
MIXTURE_OF = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
# The memory beside tensors: the interpreter with its libraries takes 210 MB, slabs that are being written 130 MB.
REST_BYTES = 500_000_000

Say = Callable[[str], None]


def convert(
    source: str,
    target: Path,
    to: str,
    dtype: str | None,
    *,
    shard_gb: float = 5.0,
    adapter: str | None = None,
    say: Say = lambda _: None,
    progress: Progress = lambda new, all, kept_bytes: None,
) -> dict[str, Any]:
    """Converts the model `source` to the new folder or file `target`. Returns the facts about what was written. A run that trained
    adapters is merged with its base.

    Args:
        to: the format: hub, argosy, gguf, single_file or peft. single_file is for image models in their authors' names and for learned
            embeddings. peft writes only the adapters of a run, unmerged. A target that ends in .gguf or .safetensors is such a file.
        dtype: float32, float16 or bfloat16. None keeps the type of each tensor.
        shard_gb: the size of the largest file of a Hub folder, in 1e9 bytes.
        adapter: a PEFT folder that is merged during the conversion.
        progress: called with (bytes written since the last call, bytes in total, bytes kept from a killed process).

    Raises:
        BadInput, Damaged: the source is not a model, the target exists, or the disk is too small. Nothing is written.
    """
    to = target_format(target, to)
    start = time.monotonic()
    if to == "single_file":
        return write_single_file(source, target, dtype, adapter, CountedProgress(progress), start, say)
    original = stored = open_source(source, say)
    if to == "peft":
        return adapters_alone(stored, source, target, dtype, adapter, start)
    if stored.adapted is not None:
        say(f"merging adapters on {plural(len(stored.adapted.adapters), 'weight')} into {stored.adapted.base.path}")
        if stored.adapted.is_quantized:
            say("the base was quantized for training: its weights are rounded likewise, then the adapters are added")
    if dtype is None and isinstance(stored.weights, MappedTensors) and (scaled := stored.weights.scaled):
        many = f"{plural(len(scaled), 'tensor', 'is', 'are')} stored in blocks with scales (fp8, mxfp4)"
        say(f"{many} and become float32; dtype=bfloat16 halves their size")
    identity = identity_of(stored, to, dtype, shard_gb)
    if adapter is not None:
        adapter = local_model(adapter, say)
        config = config_for(adapter, stored.config)
        contents = read_contents(adapter, config)
        check_base(contents, stored.weights)
        stored = replace(stored, config=config, weights=merged_weights(stored.weights, contents, config))
        identity["adapter"] = [manifest.hash_file(Path(adapter) / name)["sha256"][:12] for name in FILES]
        say(f"merging adapters on {plural(len(contents.adapters), 'weight')}")
    tokenizer = stored_tokenizer(stored)
    if tokenizer is not None and tokenizer.vocab > stored.config.vocab:
        say(f"the tokenizer has {tokenizer.vocab} tokens, the model {stored.config.vocab}: do they belong together?")
    count = CountedProgress(progress)

    def stopped() -> None:
        if count.all and to != "gguf":
            say(f"stopped; complete files are kept in {target}.part, and the same command resumes from there")

    with before_leaving(stopped):
        if to == "gguf":
            write_gguf(stored, target, MIXTURES[MIXTURE_OF[dtype]] if dtype else None, tokenizer, identity, say, count)
        else:
            write_model_folder(
                *(target, to, stored.config, stored.weights, stored.hub, stored.companions),
                DTYPES[dtype] if dtype else None,
                tokenizer,
                shard_bytes=shard_gb * 1e9,
                identity=identity,
                progress=count,
            )
    seconds = time.monotonic() - start
    weights = stored.weights
    parameters = sum(math.prod(weights.shape(n)) for n in weights.names)
    return {
        "source": source,
        "target": str(target),
        "format": to,
        "tensors": len(weights.names),
        "parameters": parameters,
        "bytes": count.all,
        "kept_bytes": count.kept,
        "seconds": seconds,
        "memory": memory_used([original]),
    }


def target_format(target: Path, to: str) -> str:
    """Returns the format of a target: that of its suffix if it has one of a file, else `to`.

    Raises:
        BadInput: the suffix of the target contradicts `to`.
    """
    ending_format = FILES_OF.get(target.suffix)
    if to in FILES_OF.values() and ending_format != to:
        raise BadInput(f"{target} and to={to}", hint=f"name a file that ends in {next(end for end in FILES_OF if FILES_OF[end] == to)}")
    if ending_format is not None and to not in (ending_format, "hub"):
        raise BadInput(f"{target} and to={to}", hint="name a new folder")
    if target.suffix.lower() in OTHER_FILES:
        problem = f"{target.suffix} files are not written"
        raise BadInput(problem, where=str(target), hint=f"a new folder, or a file that ends in {' or '.join(FILES_OF)}")
    return ending_format or to


def write_gguf(
    stored: OpenedModel,
    target: Path,
    mixture: Mixture | None,
    tokenizer: Any,
    identity: dict[str, Any],
    say: Say,
    progress: Progress,
) -> GGUFContent:
    """Writes a GGUF file, completely or not at all. Arguments and errors are those of `gguf_content` and `GGUFContent.write`."""
    content = gguf_content(stored.config, stored.weights, mixture, tokenizer=tokenizer, hub=stored.hub, name=target.stem, say=say)
    content.write(target, identity, progress)
    return content


def write_single_file(
    source: str, target: Path, dtype: str | None, adapter: str | None, progress: "CountedProgress", start: float, say: Say
) -> dict[str, Any]:
    """Writes the models of a diffusers folder, or a denoiser, as one file in their authors' names, completely or not at all.

    Raises:
        BadInput: the models have no such names, a setting would be read back differently, or the target exists.
    """
    if adapter is not None:
        hint = "argosy.load(FOLDER, adapter=FILE).save(OUT) merges it; then convert OUT"
        raise BadInput("adapter is not merged into a single file", hint=hint)
    folder = Path(local_model(source, say))
    if (folder / DIFFUSERS_INDEX).is_file():
        models = {part: streaming_model(open_model(folder / part, say)) for part in SINGLE_FILE_PARTS if (folder / part).is_dir()}
    else:
        denoiser = open_source(source, say)
        if isinstance(denoiser.config, LearnedEmbeddingsConfig):
            return write_learned_embeddings(denoiser, source, target, dtype, progress, start)
        models = {"unet" if isinstance(denoiser.config, FAMILIES["unet"]) else "transformer": denoiser}
    entries = single_file_entries(models, DTYPES[dtype] if dtype else None)
    parts = models if "unet" in models else {"transformer": models["transformer"]}
    if left_out := models.keys() - parts.keys():
        say(f"{target.name} has the denoiser alone, as Black Forest Labs published it; {', '.join(sorted(left_out))} are left out")
    if "unet" in models:
        say("no tensor says whether a UNet predicts noise or v: whoever reads the file has to know")
    identity = {"source": [identity_of(model, "single_file", dtype, 0)["source"] for model in parts.values()], "dtype": dtype or "kept"}
    write_staged(target, tensors_file(target.name, entries, {"format": "pt"}), identity, in_order, progress)
    return {
        "source": source,
        "target": str(target),
        "format": "single_file",
        "tensors": len(entries),
        "parameters": sum(math.prod(entry.shape) for entry in entries),
        "bytes": progress.all,
        "kept_bytes": progress.kept,
        "seconds": time.monotonic() - start,
        "memory": memory_used(list(parts.values())),
    }


def write_learned_embeddings(
    stored: OpenedModel, source: str, target: Path, dtype: str | None, progress: "CountedProgress", start: float
) -> dict[str, Any]:
    """Writes the embeddings of a learned token as one file, completely or not at all."""
    config: Any = stored.config
    rows = learned_arrays(config, stored.weights, DTYPES[dtype] if dtype else None)
    file = learned_embeddings_file(config.token, rows, target.name)
    write_staged(target, file, {"source": identity_of(stored, "single_file", dtype, 0)["source"]}, in_order, progress)
    return {
        "source": source,
        "target": str(target),
        "format": "single_file",
        "tensors": len(rows),
        "parameters": sum(row.size for row in rows),
        "bytes": progress.all,
        "kept_bytes": progress.kept,
        "seconds": time.monotonic() - start,
        "memory": memory_used([stored]),
    }


def adapters_alone(
    stored: OpenedModel, source: str, target: Path, dtype: str | None, adapter: str | None, start: float
) -> dict[str, Any]:
    """Writes the adapters of a run as a PEFT folder.

    Raises:
        BadInput: the source has no adapters, or another setting does not apply to adapters.
    """
    if stored.adapted is None:
        raise BadInput(f"{source} has no adapters", hint="to=peft is for a run with adapter=lora, dora or qlora")
    if dtype is not None or adapter is not None:
        raise BadInput("to=peft takes neither dtype nor adapter: adapters are written in float32", hint="leave them out")
    adapters, whole, dropout, _ = stored.adapted.contents
    write_adapter(target, stored.config, adapters, str(stored.adapted.base.path), whole, dropout)
    sizes = [array.size for adapter in adapters.values() for array in (adapter.a, adapter.b, adapter.m) if array is not None]
    sizes += [array.size for array in whole.values()]
    n_bytes = sum(file.stat().st_size for file in target.iterdir())
    return {
        "source": source,
        "target": str(target),
        "format": "peft",
        "tensors": len(sizes),
        "parameters": sum(sizes),
        "bytes": n_bytes,
        "kept_bytes": 0,
        "seconds": time.monotonic() - start,
        "memory": memory_used([stored]),
    }


def open_source(source: str, say: Say = lambda _: None) -> OpenedModel:
    """Opens a model so that its weights are read one at a time.

    Raises:
        BadInput, Damaged: the source is not a model.
    """
    source = local_model(source, say)
    if not Path(source).exists():
        raise no_model(source)
    stored = streaming_model(open_model(source, say))
    check_tied_head(stored)
    hub_name = name_of_path(source)
    return replace(stored, hub={**stored.hub, "_name_or_path": hub_name.repository}) if hub_name and stored.kind == "hub" else stored


def identity_of(stored: OpenedModel, to: str, dtype: str | None, shard_gb: float) -> dict[str, Any]:
    """Returns the identity of a conversion: names, sizes and times of the source's files, and the output format."""
    if stored.kind == "argosy":
        digest = hashlib.sha256((stored.path / manifest.NAME).read_bytes())
    else:
        digest = hashlib.sha256()
        for file in _files_of(stored.path):
            about = file.stat()
            digest.update(f"{file.name}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    output = {"to": to, "dtype": dtype or "kept"} | ({"shard_gb": shard_gb} if to == "hub" else {})
    return {"source": f"{stored.kind} {digest.hexdigest()[:12]}", **output}


def _files_of(path: Path) -> list[Path]:
    """Returns the files of a Hub folder that a conversion reads, or the single file."""
    if path.is_file():
        return [path]
    return matching(path, [*COMPANIONS, "config.json", "model.safetensors.index.json", "*.safetensors"])


def memory_used(models: list[OpenedModel]) -> dict[str, Any]:
    """Returns the peak memory of this process, its bound, and the tensor that determines the bound."""
    name, size = max((largest_tensor(stored) for stored in models), key=lambda item: item[1])
    return {
        "peak_bytes": memory.peak_bytes(),
        "bound_bytes": 2 * size + REST_BYTES,
        "largest": name,
        "largest_bytes": size,
    }


class CountedProgress:
    """Forwards progress, and keeps the totals."""

    def __init__(self, progress: Progress):
        self.progress, self.all, self.kept = progress, 0, 0

    def __call__(self, new: int, all: int, kept_bytes: int) -> None:
        self.all, self.kept = all, kept_bytes
        self.progress(new, all, kept_bytes)
