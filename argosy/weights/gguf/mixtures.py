"""Selects the type of each tensor of a GGUF file for a preset of llama.cpp's quantizer, such as `q4_k_m`.

The output matrix (the embedding, if tied) is in Q6_K, or in Q8_0 for `q8_0`. In `q4_k_m` and `q5_k_m`, some value and down projections
are in Q6_K: those of the first and last eighth of the layers, and of every third layer between. Norms, biases and routers are float32.
If the rows of a tensor are not whole blocks of 256 numbers, it takes a type with blocks of 32. If they are not whole blocks of 32
either, it takes float16. Source: llama.cpp's src/llama-quant.cpp at b11434, without importance matrices.
"""

import re
from dataclasses import dataclass
from typing import Any

from argosy.core.errors import BadInput, nearest
from argosy.core.formats import Shape
from argosy.core.formats.quants import BY_NAME


@dataclass(frozen=True)
class Mixture:
    """The tensor types of a GGUF preset.

    type: the type of most matrices.
    number: the value of `general.file_type` for this preset.
    more: whether the value and down projections of some layers get more bits.
    """

    type: str
    number: int
    more: bool = False


MIXTURES = {
    "f32": Mixture("F32", 0),
    "f16": Mixture("F16", 1),
    "bf16": Mixture("BF16", 32),
    "q8_0": Mixture("Q8_0", 7),
    "q6_k": Mixture("Q6_K", 18),
    "q5_k_m": Mixture("Q5_K", 17, more=True),
    "q4_k_m": Mixture("Q4_K", 15, more=True),
    "q4_1": Mixture("Q4_1", 3),
    "q4_0": Mixture("Q4_0", 2),
}
# The type with blocks of 32 that replaces each type with blocks of 256.
NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def mixture(name: str) -> Mixture:
    """Returns the preset of this name, in upper or lower case.

    Raises:
        BadInput: there is no such preset.
    """
    if name.lower() not in MIXTURES:
        raise BadInput(f"no preset `{name}` of GGUF files", where="set by preset", hint=nearest(name, MIXTURES))
    return MIXTURES[name.lower()]


def is_float32(name: str, shape: Shape) -> bool:
    """Returns whether a tensor is float32 in every preset."""
    return len(shape) < 2 or not name.endswith(".weight") or name.endswith("_norm.weight") or "ffn_gate_inp" in name


def type_of(name: str, shape: Shape, mixture: Mixture, config: Any, architecture: str) -> str:
    """Returns the type of a tensor, given its name in the file."""
    if is_float32(name, shape):
        return "F32"
    if BY_NAME[mixture.type].dtype is not None:
        return mixture.type
    return _fitting(usual_type(name, shape, mixture, config, architecture), shape[-1])


def usual_type(name: str, shape: Shape, mixture: Mixture, config: Any, architecture: str) -> str:
    """Returns the type of a matrix under the assumption that its rows are whole blocks of that type."""
    if name == "output.weight" or (name == "token_embd.weight" and config.tied):
        return "Q8_0" if mixture.type == "Q8_0" or shape[-1] % BY_NAME[mixture.type].values else "Q6_K"
    eight = config.experts is not None and config.experts.count == 8
    if re.search(r"attn_(v|qkv)\.weight", name):
        value_type = "Q6_K" if mixture.more and _has_more_bits(name, config.layers) else mixture.type
        # Llama 2 and 3 and Qwen 2 of 70B: eight query heads share a value head.
        if value_type == "Q4_K" and config.layers == 80 and config.heads > config.K and architecture in ("llama", "qwen2"):
            value_type = "Q5_K"
        return "Q8_0" if eight else value_type
    if "attn_k.weight" in name and eight:
        return "Q8_0"
    if "ffn_down" in name and mixture.more and _has_more_bits(name, config.layers):
        return "Q6_K"
    if "attn_output" in name and eight and mixture.type == "Q4_K":
        return "Q5_K"
    return mixture.type


def _has_more_bits(name: str, layers: int) -> bool:
    layer = int(name.split(".")[1])
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _fitting(name: str, width: int) -> str:
    """Returns the type `name`, or the type that replaces it where rows of this width are not whole blocks."""
    if width % BY_NAME[name].values:
        name = NARROWER.get(name, name)
    return "F16" if width % BY_NAME[name].values else name
