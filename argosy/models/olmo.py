"""OLMo 2 and 3: norms on the outputs of attention and feed-forward layers instead of their inputs, and one norm across all query heads
and one across all key heads.

    h = x + norm(Attention(x))        y = h + norm(SwiGLU(h))

OLMo 3 has three local layers to each global one; only global layers scale their rotary positions.

OLMo team 2025 (arXiv:2501.00656, 2512.13961).
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary.
"""

from functools import partial
from typing import Any, ClassVar

from argosy.models import parts
from argosy.models.base.language import DecoderConfig
from argosy.models.hub.olmo import OlmoHub
from argosy.models.settings import Rope, Yarn


def block(config: "OlmoConfig", kind: str) -> "parts.Block":
    """Builds one layer. All layers are of one kind."""

    def over_all_heads(heads: int) -> "parts.RMSNorm":
        return parts.RMSNorm((heads, config.H), config.norm_eps, letters="NH" if heads == config.heads else "KH")

    bias = config.attention_bias
    attention = parts.Attention(config.dims, config.layers, bias=bias, out_bias=bias, norms=over_all_heads)
    mlp = parts.GLU(config.dims, config.activation)
    return parts.Block(attention, mlp, post=partial(parts.RMSNorm, config.width, config.norm_eps))


class OlmoConfig(OlmoHub, DecoderConfig):
    """OLMo 2 and 3 (arXiv:2501.00656, 2512.13961)."""

    make: ClassVar[Any] = block

    attention_bias: bool = False
    """Adds biases to the four projections of attention."""
    local_rope: Rope | None = None
    """Rotary positions of local layers, if they differ."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 48, "ffn": 70, "heads": 4, "context": 200}
        scaled = Rope(base=5e5, scaling=Yarn(factor=8, original=16))
        return {
            "2": cls(**odd, layers=3, kv_heads=2, attention_bias=True),
            "3": cls(**odd, layers=5, window=6, pattern="LLLG", rope=scaled, local_rope=Rope(base=5e5)),
        }

    @property
    def rope_of_local_layers(self) -> Rope:
        return self.local_rope or self.rope
