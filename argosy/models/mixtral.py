"""Mixtral: Mistral with eight experts in place of each feed-forward layer, two for each token.

    h = x + Attention(RMSNorm(x))        y = h + MoE(RMSNorm(h))

Jiang et al. 2024 (arXiv:2401.04088).
B batch, T time, D width, N query heads, K key heads, H head size, V vocabulary, E experts, M expert ffn.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import model_validator

from argosy.models import parts
from argosy.models.base.language import DecoderConfig
from argosy.models.hub.mixtral import MixtralHub
from argosy.models.settings import Experts


def block(config: "MixtralConfig", kind: str) -> "parts.Block":
    """Builds one layer. All layers are of one kind."""
    attention = parts.Attention(config.dims, config.layers)
    moe = parts.MoE(config.dims, config.moe, config.activation)
    return parts.Block(attention, moe, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class MixtralConfig(MixtralHub, DecoderConfig):
    """Mixtral (arXiv:2401.04088). Every layer has experts, so `ffn` must equal their width, `moe.ffn`."""

    make: ClassVar[Any] = block

    moe: Experts
    """The experts of every layer."""

    @model_validator(mode="after")
    def _is_all_experts(self) -> "MixtralConfig":
        if self.ffn != self.moe.ffn:
            raise ValueError(
                f"ffn = {self.ffn}, moe.ffn = {self.moe.ffn}: must be equal, because every layer has experts"
            )
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {
            "vocab": 113,
            "width": 44,
            "layers": 3,
            "ffn": 38,
            "heads": 4,
            "context": 200,
            "head_size": 10,
        }
        return {
            "plain": cls(**odd, kv_heads=2, moe=Experts(count=7, active=2, ffn=38)),
            "window": cls(**odd, kv_heads=1, window=7, tied=True, moe=Experts(count=4, active=3, ffn=38)),
        }
