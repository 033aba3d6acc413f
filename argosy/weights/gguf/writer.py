"""Writes GGUF files: a model's settings as metadata, its weights through the tables by which the reader reads them, its tokenizer.

The metadata are read again before anything is written: settings that have no key, such as a window of Qwen's, would otherwise be lost
without notice. llama.cpp's changes of weights are made here as the reader undoes them.
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

# The tensors that tell a reader which parts a model has, by the weights that they hold.
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
    """What a file will hold."""

    meta: dict[str, Any]
    tensors: list[EncodedTensor]

    def file(self, name: str) -> File:
        return gguf_file(name, self.meta, self.tensors)

    def write(self, target: Path, identity: Mapping[str, Any] | None, progress: Callable[[int, int, int], None]) -> None:
        """Writes the file, completely or not at all. Arguments and errors as `staging.write_staged`; and BadInput: a weight is not
        finite."""
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
    """Metadata and tensors of a model. Nothing is read yet.

    Args:
        weights: by per-layer name.
        mixture: the types of the tensors; None: as the weights have them, and float32 where llama.cpp needs it.
        hub: its config.json, for the tokens that end a text.
        name: of the model.

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
    """How the reader will see the file.

    Raises:
        Unsupported: it would see another model.
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
    """A file that is not written yet, as far as `Metadata` looks at it.

    shapes: of the tensors that tell which parts the model has.
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
    """The settings that would come back with other values. Numbers are float32 in a file."""
    a, b = (dict(_flat(config.resolved().model_dump())) for config in (ours, theirs))
    same_turns = _turns(ours) == _turns(theirs)
    # The number of turned features counts, of which the share is one of many.
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
    """What the rotary scaling comes to, to five digits; None for one that depends on the length."""
    rope: Rope = config.rope
    try:
        frequencies, factor = rope.frequencies(rope.rotated_size(config.H))
    except ValueError:
        return math.nan
    return [f"{x:.4e}" for x in (*frequencies, factor)]


def _own_type(entry: TensorEntry) -> str:
    """The type as it is, where llama.cpp takes it."""
    types = {"float16": "F16", "bfloat16": "BF16"}
    return "F32" if is_float32(entry.name, entry.shape) else types.get(entry.dtype.name, "F32")


def _file_type(tensors: list[EncodedTensor]) -> int:
    """The mixture of a file in whose matrices no numbers are rounded."""
    kinds = [tensor.type for tensor in tensors if len(tensor.entry.shape) > 1]
    return {"F32": 0, "F16": 1, "BF16": 32}[max(set(kinds), key=kinds.count)]


def _raised(entry: TensorEntry) -> TensorEntry:
    """The tensor plus one, if it is a norm's scale."""
    if not entry.name.endswith("_norm.weight"):
        return entry
    return entry._replace(dtype=np.dtype(np.float32), make=lambda: entry.make().astype(np.float32) + np.float32(1), parts=None)


def _tokens(tokenizer: Any, vocab: int, hub: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The tokenizer's keys, and a second token that ends a text."""
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
