"""Reads GGUF files: the settings from the metadata, and the weights through a table of tensor names, as for Hub folders.

llama.cpp changes some weights when it converts a model, and this module undoes the changes: interleaved rotary pairs, frequency
factors stored as tensors, and the 1 added to Gemma's norm scales. Keys that are not understood are refused, and reported together with
all other mistakes. The architectures are in `gguf.families` and `gguf.deepseek`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import BadInput, Unsupported, complaint, nearest
from argosy.core.formats import TensorReader, TensorView, problem_list
from argosy.core.formats.gguf import GGUF
from argosy.core.keymap import KeyMap
from argosy.models.base.language import LanguageConfig
from argosy.weights.gguf import families as families
from argosy.weights.gguf.blocks import BlockedWeights
from argosy.weights.gguf.deepseek import read_deepseek2
from argosy.weights.gguf.metadata import ROPE_TENSORS, Metadata
from argosy.weights.gguf.rows import Described
from argosy.weights.hub.reader import MappedTensors
from argosy.weights.model import OpenedModel


def open_gguf(path: Path) -> OpenedModel:
    """Opens a GGUF file.

    Raises:
        BadInput: the architecture is not implemented, the metadata describe no model or have keys that are not understood, or tensors
            are missing, unexpected or of the wrong shape. All mistakes of one kind are reported at once.
        Damaged: the file contradicts itself.
    """
    file = GGUF.open(path)
    meta = Metadata(file)
    if meta.kind not in READERS:
        hint = nearest(meta.kind, READERS)
        raise BadInput(f"GGUF architecture `{meta.kind[:80]}` is not built", where=str(path), hint=hint)
    model = _model(READERS[meta.kind], meta)
    table = KeyMap(model.rows, model.sizes, ignore=[name for name in ROPE_TENSORS if meta.has(name)])
    tensors: TensorReader = without_norm_offset(file) if model.raised else file
    mapped = MappedTensors(table, tensors, str(path))
    return OpenedModel(path, "gguf", model.config, mapped, path, _hub(model.config, file.meta), blocks=BlockedWeights(file, mapped))


def _model(read: Callable[[Metadata], Described], meta: Metadata) -> Described:
    """Reads the model that a file describes. Mistakes in the metadata are reported first, because later failures follow from them."""
    model, problems = None, []
    try:
        model = read(meta)
        problems = meta.problems + meta.unasked
    except BadInput as error:
        problems = meta.problems or [error.what]
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        problems = meta.problems or [complaint(error)]
    if model is None or problems:
        raise BadInput(f"the metadata do not describe a model: {problem_list(problems, 8)}", where=str(meta.file.path))
    return model


def _hub(config: LanguageConfig, meta: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json for this model: the architecture, if the Hub has it, and the ids of the special tokens."""
    try:
        hub = config.to_hub()
    except Unsupported:
        hub = {}
    ends = [_token(meta, name) for name in ("eos", "eot")]
    ids = {"bos": _token(meta, "bos"), "eos": list(dict.fromkeys(end for end in ends if end is not None))}
    ids |= {"pad": _token(meta, "padding")}
    ids["eos"] = ids["eos"][0] if len(ids["eos"]) == 1 else ids["eos"] or None
    return hub | {f"{name}_token_id": token for name, token in ids.items() if token is not None}


def _token(meta: dict[str, Any], name: str) -> int | None:
    token = meta.get(f"tokenizer.ggml.{name}_token_id")
    return token if type(token) is int else None


def without_norm_offset(file: GGUF) -> TensorReader:
    """Returns a reader of the tensors that subtracts the 1 that llama.cpp added to norm scales."""
    norms = dict.fromkeys((name for name in file.names if name.endswith("_norm.weight")), np.dtype(np.float32))

    def change(name: str, read: Callable[[], np.ndarray], _part: int | None) -> np.ndarray:
        return read().astype(np.float32) - np.float32(1) if name in norms else read()

    return TensorView(file, dtypes=norms, change=change)


READERS: dict[str, Callable[[Metadata], Described]] = {
    "llama": families.read_llama,
    "qwen2": families.read_qwen2,
    "qwen2moe": families.read_qwen2moe,
    "qwen3": families.read_qwen3,
    "qwen3moe": families.read_qwen3moe,
    "gemma": families.read_gemma,
    "gemma2": families.read_gemma2,
    "gemma3": families.read_gemma3,
    "phi3": families.read_phi3,
    "deepseek2": read_deepseek2,
    "gpt-oss": families.read_gpt_oss,
}
