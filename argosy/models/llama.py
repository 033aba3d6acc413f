"""Llama, and models that differ only in sizes: Llama 1 to 3.3, SmolLM2, TinyLlama, Mistral 7B and Nemo, Ministral.

    h = x + Attention(RMSNorm(x))        y = h + SwiGLU(RMSNorm(h))

Touvron et al. 2023 (arXiv:2302.13971, 2307.09288), the Llama team 2024 (arXiv:2407.21783); grouped queries from Ainslie et al.
2023 (arXiv:2305.13245), sliding windows from Jiang et al. 2023 (arXiv:2310.06825).
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary.
"""

from functools import partial
from typing import Any, ClassVar

from argosy.models import parts
from argosy.models.base.language import DecoderConfig
from argosy.models.hub.llama import LlamaHub
from argosy.models.settings import LinearScaling, Llama3Scaling, Rope, Yarn


def block(config: "LlamaConfig", kind: str) -> "parts.Block":
    """Builds one layer. All layers are of one kind."""
    bias = config.attention_bias
    attention = parts.Attention(config.dims, config.layers, bias=bias, out_bias=bias)
    mlp = parts.GLU(config.dims, config.activation, bias=config.mlp_bias)
    return parts.Block(attention, mlp, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class LlamaConfig(LlamaHub, DecoderConfig):
    """Llama (arXiv:2302.13971, 2307.09288, 2407.21783), Mistral 7B (arXiv:2310.06825) and relatives."""

    make: ClassVar[Any] = block

    attention_bias: bool = False
    """Adds biases to the four projections of attention."""
    mlp_bias: bool = False
    """Adds biases to the three projections of the feed-forward layer."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "layers": 3, "ffn": 70, "heads": 4, "context": 200}
        scaled = Rope(scaling=Llama3Scaling(original=16))
        return {
            "plain": cls(**odd, kv_heads=2, head_size=14, rope=Rope(scaling=LinearScaling(factor=3))),
            "tied-biased": cls(
                **odd, kv_heads=1, head_size=10, tied=True, attention_bias=True, mlp_bias=True, rope=scaled
            ),
            "window": cls(
                **odd, head_size=12, window=7, activation="gelu_tanh", rope=Rope(scaling=Yarn(factor=4, original=16))
            ),
            "pattern": cls(**{**odd, "layers": 5}, kv_heads=2, head_size=12, window=6, pattern="LLG"),
        }
