"""Phi 3 and 4: Llama with rotary positions on part of each head (Phi-4-mini) and LongRoPE (128k models). Projections are fused on the
Hub.

    h = x + Attention(RMSNorm(x))        y = h + SwiGLU(RMSNorm(h))

Abdin et al. 2024 (arXiv:2404.14219, 2412.08905), Microsoft 2025 (arXiv:2503.01743).
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary.
"""

from functools import partial
from typing import Any, ClassVar

from argosy.models import parts
from argosy.models.base.language import DecoderConfig
from argosy.models.hub.phi import PhiHub
from argosy.models.settings import LongRope, Rope


def block(config: "PhiConfig", kind: str) -> "parts.Block":
    """Builds one layer. All layers are of one kind."""
    attention, mlp = parts.Attention(config.dims, config.layers), parts.GLU(config.dims, config.activation)
    return parts.Block(attention, mlp, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class PhiConfig(PhiHub, DecoderConfig):
    """Phi 3 and 4 (arXiv:2404.14219, 2412.08905, 2503.01743)."""

    make: ClassVar[Any] = block

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 48, "layers": 3, "ffn": 70, "heads": 4, "context": 200}
        pairs: dict[str, Any] = {"short": (1.0, 1.1, 1.2, 1.4), "long": (1.0, 1.7, 3.0, 9.0)}
        turned = Rope(part=0.7, scaling=LongRope(**pairs, original=16, attention=1.19))
        return {
            "window": cls(**odd, window=7),
            "long": cls(**odd, kv_heads=2, tied=True, rope=turned),
        }
