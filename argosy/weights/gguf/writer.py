"""Writes GGUF files: a model's settings as metadata, its weights through the reader's tables of names, and its tokenizer.

The metadata are read back before anything is written. Otherwise settings that have no key, such as a window of Qwen's, would be lost
without notice. The module changes weights as llama.cpp does, which the reader undoes.
"""

import math
from collections.abc import Callable, Iterable, KeysView, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import BadInput, Unsupported
from argosy.core.formats import Shape, TensorEntry, TensorReader, problem_list
from argosy.core.formats.files import File
from argosy.core.formats.gguf_writer import EncodedTensor, gguf_file
from argosy.core.keymap import KeyMap
from argosy.core.settings.schema import Choice
from argosy.models import FAMILIES
from argosy.models.parts.weight import float32_addresses
from argosy.models.settings import Rope
from argosy.weights.gguf.keys import DESCRIBERS, frequencies
from argosy.weights.gguf.metadata import KIND, ROPE_TENSORS, Metadata
from argosy.weights.gguf.mixtures import Mixture, is_float32, type_of
from argosy.weights.gguf.reader import READERS
from argosy.weights.gguf.rows import Described
from argosy.weights.staging import write_staged
from argosy.weights.stream import in_order

# Tensors whose presence or shape is part of the description of a model, by the parameter that they hold.
TELLING = {
    "embed.w": "token_embd.weight", "head.w": "output.weight",
    "attn_norm.scale": "attn_norm.weight", "attn.q.b": "attn_q.bias", "attn.o.b": "attn_output.bias", "mlp.gate.b": "ffn_gate.bias",
    "mlp.router.w": "ffn_gate_inp.weight",
}  # fmt: skip
# Settings of training, which change no logits.
OF_TRAINING = ("preset", "moe.balance", "moe.balance_over", "moe.bias_rate", "moe.z_loss")
QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class GGUFContent:
    """The contents of a GGUF file that is to be written."""

    meta: dict[str, Any]
    tensors: list[EncodedTensor]

    def file(self, name: str) -> File:
        return gguf_file(name, self.meta, self.tensors)

    def write(self, target: Path, identity: Mapping[str, Any] | None, progress: Callable[[int, int, int], None]) -> None:
        """Writes the file, completely or not at all. Other arguments and errors are those of `staging.write_staged`.

        Raises:
            BadInput: a weight is not finite.
        """
        write_staged(target, self.file(target.name), identity, in_order, progress)


def gguf_content(
    config: Any,
    weights: TensorReader,
    mixture: Mixture | None,
    *,
    tokenizer: Any = None,
    hub: Mapping[str, Any] | None = None,
    name: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> GGUFContent:
    """Returns the metadata and tensors of a model's GGUF file. Weights are read only when it is written.

    Args:
        weights: the weights, by per-layer name.
        mixture: the types of the tensors. None keeps the types of the weights, and float32 where llama.cpp needs it.
        hub: the contents of config.json, which has the tokens that end a text.
        name: the name of the model in the metadata.
        say: called with each message for the user.

    Raises:
        Unsupported: llama.cpp has no table for this family, or no key for a setting.
    """
    if type(config) not in DESCRIBERS:
        family = Choice(FAMILIES, tag="family").name_of(config)
        families = ", ".join(name for name in FAMILIES if FAMILIES[name] in DESCRIBERS)
        raise Unsupported(f"the family `{family}` cannot be written as GGUF", hint=f"families that can be: {families}")
    architecture, keys = DESCRIBERS[type(config)](config)
    meta = {KIND: architecture, "general.type": "model"} | ({"general.name": name} if name else {})
    meta |= {f"{architecture}.{key}": value for key, value in keys.items()}
    factors = frequencies(config)
    described = _describe(config, Outline(meta, _telling(weights) | {n: a.shape for n, a in factors.items()}, factors))
    exact = float32_addresses(config.build())
    table = KeyMap(described.rows, described.sizes, ignore=ROPE_TENSORS)
    entries = list(table.inverse(weights))
    paths = table.ours_of(entry.name for entry in entries)
    tensors = []
    for entry in entries:
        stays = not exact.isdisjoint(paths[entry.name])
        usual = _own_type(entry) if mixture is None else type_of(entry.name, entry.shape, mixture, config, architecture)
        kind = "F32" if stays else usual
        tensors.append(EncodedTensor(_raised(entry) if described.raised else entry, kind))
    tensors += [EncodedTensor(TensorEntry(n, a.shape, a.dtype, lambda a=a: a), "F32") for n, a in factors.items()]  # type: ignore[misc]
    number = _file_type(tensors) if mixture is None else mixture.number
    meta |= {"general.file_type": number, "general.quantization_version": QUANTIZATION_VERSION}
    return GGUFContent(meta | _tokens(tokenizer, config.vocab, hub or {}, say), tensors)


def _describe(config: Any, outline: "Outline") -> Described:
    """Reads the outline of the file as the reader will read the file.

    Raises:
        Unsupported: the reader would see a model with other settings.
    """
    meta = Metadata(outline)  # type: ignore[arg-type]
    described = None
    try:
        described = READERS[meta.kind](meta)
        lost = [*meta.problems, *meta.unasked] or list(_differences(config, described.config))
    except (ValueError, BadInput) as error:
        lost = meta.problems or [str(error)]
    if described is None or lost:
        problems = problem_list(lost, 8)
        hint = "Argosy's own format holds it: to=argosy; and to=hub, if the Hub's has such a model"
        raise Unsupported(f"a GGUF file of the architecture `{meta.kind}` cannot hold this model: {problems}", hint=hint)
    return described


class Outline:
    """Stands for a file that is not written yet, as far as `Metadata` reads it.

    shapes: the shapes of the tensors in `TELLING`, by name in the file.
    arrays: the tensors of frequency factors, by name in the file.
    """

    def __init__(self, meta: dict[str, Any], shapes: Mapping[str, Shape], arrays: Mapping[str, np.ndarray]):
        self.path, self.meta, self.shapes, self.arrays = Path("model.gguf"), meta, dict(shapes), arrays

    @property
    def names(self) -> KeysView[str]:
        return self.shapes.keys()

    def shape(self, name: str) -> Shape:
        return self.shapes[name]

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]


def _telling(weights: TensorReader) -> dict[str, Shape]:
    shapes = {}
    for path in weights.names:
        head, _, rest = path.partition(".")
        layer, _, rest = rest.partition(".") if head == "layers" else ("", "", path)
        if rest in TELLING:
            shape = weights.shape(path)
            shapes[f"blk.{layer}.{TELLING[rest]}" if layer else TELLING[rest]] = shape
    return shapes


def _differences(ours: Any, theirs: Any) -> Iterable[str]:
    """Yields the settings whose values the file would change. Numbers are compared as float32, as files store them."""
    a, b = (dict(_flat(config.resolved().model_dump())) for config in (ours, theirs))
    same_turns = _turns(ours) == _turns(theirs)
    # Only the number of rotated features matters, and several shares result in the same number.
    same_part = ours.rope.rotated_size(ours.H) == theirs.rope.rotated_size(theirs.H)
    for key in sorted(a.keys() | b.keys()):
        if key in OF_TRAINING or (same_turns and key.startswith("rope.scaling.")) or (same_part and key == "rope.part"):
            continue
        if not _alike(a.get(key), b.get(key)):
            yield f"`{key}` is {a.get(key)} and would be {b.get(key)}"


def _flat(value: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flat(part, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def _turns(config: Any) -> Any:
    """The scaled rotary frequencies and the attention factor, to five digits. NaN, which equals nothing, where they depend on the
    length of the sequence."""
    rope: Rope = config.rope
    try:
        frequencies, factor = rope.frequencies(rope.rotated_size(config.H))
    except ValueError:
        return math.nan
    return [f"{x:.4e}" for x in (*frequencies, factor)]


def _own_type(entry: TensorEntry) -> str:
    """Returns the GGUF type of an unquantized tensor: its own type where llama.cpp accepts that, else float32."""
    types = {"float16": "F16", "bfloat16": "BF16"}
    return "F32" if is_float32(entry.name, entry.shape) else types.get(entry.dtype.name, "F32")


def _file_type(tensors: list[EncodedTensor]) -> int:
    """The `general.file_type` of a file without quantized tensors: the most frequent type of its matrices."""
    kinds = [tensor.type for tensor in tensors if len(tensor.entry.shape) > 1]
    return {"F32": 0, "F16": 1, "BF16": 32}[max(set(kinds), key=kinds.count)]


def _raised(entry: TensorEntry) -> TensorEntry:
    """Returns the tensor, plus one if it is the scale of a norm."""
    if not entry.name.endswith("_norm.weight"):
        return entry
    return entry._replace(dtype=np.dtype(np.float32), make=lambda: entry.make().astype(np.float32) + np.float32(1), parts=None)


def _tokens(tokenizer: Any, vocab: int, hub: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the keys of the tokenizer, and the key of a second token that ends a text."""
    from argosy.data.tokenizers.gguf_writer import gguf_tables

    none = {"tokenizer.ggml.model": "none"}
    if tokenizer is None:
        return none
    try:
        table = gguf_tables(tokenizer, vocab)
    except Unsupported as error:
        say(f"{error.what}: the file has no tokenizer")
        return none
    ends = hub.get("eos_token_id")
    more = [end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int and end != tokenizer.eos]
    return table | ({"tokenizer.ggml.eot_token_id": more[0]} if more else {})
