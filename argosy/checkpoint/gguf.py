"""GGUF files in: a model's settings from the metadata, its weights through a table of names like the Hub's.

Notable: llama.cpp's changes to a model are undone here: rotary pairs side by side, factors of frequencies as tensors, Gemma's
norms plus one. What a file says and nothing here understands is refused, with everything else that is wrong.
Knows no architecture: those are in `gguf_families` and `gguf_deepseek`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint import gguf_families as families
from argosy.checkpoint.gguf_deepseek import read_deepseek2
from argosy.checkpoint.gguf_meta import ROPE_TENSORS, Metadata
from argosy.checkpoint.gguf_rows import Model
from argosy.checkpoint.hub import Mapped
from argosy.checkpoint.stored import Stored
from argosy.core.errors import BadInput, Unsupported, complaint, nearest
from argosy.core.formats import Over, Reader, listed
from argosy.core.formats.gguf import GGUF
from argosy.core.keymap import KeyMap
from argosy.models.family import FamilyConfig


def open_gguf(path: Path) -> Stored:
    """A GGUF file.

    Raises:
        BadInput: an architecture that is not built; metadata that make no model, or more than is understood; tensors missing,
            unexpected or misshapen; each all at once.
        Damaged: a file that contradicts itself.
    """
    file = GGUF.open(path)
    meta = Metadata(file)
    if meta.kind not in READERS:
        hint = nearest(meta.kind, READERS)
        raise BadInput(f"GGUF architecture `{meta.kind[:80]}` is not built", where=str(path), hint=hint)
    model = _model(READERS[meta.kind], meta)
    table = KeyMap(model.rows, model.sizes, ignore=[name for name in ROPE_TENSORS if meta.has(name)])
    tensors: Reader = Lowered(file) if model.raised else file
    return Stored(path, "gguf", model.config, Mapped(table, tensors, str(path)), path, _hub(model.config, file.meta))


def _model(read: Callable[[Metadata], Model], meta: Metadata) -> Model:
    """What a file describes. Its own mistakes come first: what fails after them follows from them."""
    model, problems = None, []
    try:
        model = read(meta)
        problems = meta.problems + meta.unasked
    except BadInput as error:
        problems = meta.problems or [error.what]
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        problems = meta.problems or [complaint(error)]
    if model is None or problems:
        raise BadInput(f"its metadata makes no model: {listed(problems, 8)}", where=str(meta.file.path))
    return model


def _hub(config: FamilyConfig, meta: dict[str, Any]) -> dict[str, Any]:
    """What a config.json would say: the architecture where the Hub has it, and the tokens that begin and end."""
    try:
        hub = config.to_hub()
    except Unsupported:
        hub = {}
    ends = [_token(meta, name) for name in ("eos", "eot")]
    said = {"bos": _token(meta, "bos"), "eos": list(dict.fromkeys(end for end in ends if end is not None))}
    said |= {"pad": _token(meta, "padding")}
    said["eos"] = said["eos"][0] if len(said["eos"]) == 1 else said["eos"] or None
    return hub | {f"{name}_token_id": token for name, token in said.items() if token is not None}


def _token(meta: dict[str, Any], name: str) -> int | None:
    token = meta.get(f"tokenizer.ggml.{name}_token_id")
    return token if type(token) is int else None


class Lowered(Over):
    """Tensors, norms among them less the one that llama.cpp added."""

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name.endswith("_norm.weight") else self.reader.dtype(name)

    def read(self, name: str) -> np.ndarray:
        values = self.reader.read(name)
        return values.astype(np.float32) - np.float32(1) if name.endswith("_norm.weight") else values


READERS: dict[str, Callable[[Metadata], Model]] = {
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
