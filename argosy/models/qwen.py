"""Qwen 2, 2.5 and 3, dense and with experts.

    h = x + Attention(RMSNorm(x))        y = h + SwiGLU(RMSNorm(h)), or h + MoE(RMSNorm(h))

Qwen2 has biases on queries, keys and values. Qwen3 instead normalizes queries and keys over each head. Qwen2 with experts has a gated
shared expert. Qwen3 with experts has none.

Yang et al. 2024 (arXiv:2407.10671, 2412.15115), the Qwen team 2025 (arXiv:2505.09388).
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary, E experts, M expert ffn.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import model_validator

from argosy.models import parts
from argosy.models.base.language import DecoderConfig
from argosy.models.hub.qwen import QwenHub
from argosy.models.settings import Experts, Rope, Yarn


def block(config: "QwenConfig", kind: str) -> "parts.Block":
    """Builds one layer. `kind` is "dense" or "experts"."""
    d, moe, bias = config.dims, config.moe, config.qkv_bias

    def head_norm(heads: int) -> "parts.RMSNorm":
        return parts.RMSNorm(config.H, config.norm_eps, letters="H")

    norms = head_norm if config.qk_norm else None
    attention = parts.Attention(d, config.layers, bias=bias, out_bias=config.out_bias, norms=norms)
    mlp = parts.MoE(d, moe, config.activation) if moe and kind == "experts" else parts.GLU(d, config.activation)
    return parts.Block(attention, mlp, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class QwenConfig(QwenHub, DecoderConfig):
    """Qwen 2, 2.5 and 3 (arXiv:2407.10671, 2412.15115, 2505.09388)."""

    moe_parts: ClassVar[frozenset[str]] = frozenset(["shared", "shared_gate"])
    make: ClassVar[Any] = block

    qkv_bias: bool = False
    """Adds biases to queries, keys and values."""
    out_bias: bool = False
    """Adds a bias to the output projection of attention."""
    qk_norm: bool = False
    """Applies RMSNorm to each head of queries and keys."""
    moe: Experts | None = None
    """The experts that replace the feed-forward layer. None: no layer has experts."""
    dense: tuple[int, ...] = ()
    """Indices of layers, from 0, that keep the feed-forward layer."""

    @model_validator(mode="after")
    def _dense_are_layers(self) -> "QwenConfig":
        if self.dense and (self.moe is None or not set(self.dense) < set(range(self.layers))):
            raise ValueError(f"dense = {list(self.dense)}: must be some of the {self.layers} layers, and needs experts (moe)")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "layers": 3, "ffn": 70, "heads": 4, "context": 200}
        return {
            "2": cls(**{**odd, "width": 48}, kv_heads=2, qkv_bias=True, window=7, pattern="GLL"),
            "3": cls(
                **odd, kv_heads=1, head_size=10, qk_norm=True, tied=True, rope=Rope(scaling=Yarn(factor=4, original=16))
            ),
            "2-experts": cls(
                **odd,
                head_size=10,
                qkv_bias=True,
                moe=Experts(count=5, active=2, ffn=34, shared=26, shared_gate=True, normalized=False),
            ),
            "3-experts": cls(
                **{**odd, "layers": 4},
                kv_heads=2,
                head_size=14,
                qk_norm=True,
                qkv_bias=True,
                out_bias=True,
                moe=Experts(count=9, active=3, ffn=22),
                dense=(0, 2),
            ),
        }

    @property
    def kinds(self) -> list[str]:
        """The feed-forward part of each layer: "dense" or "experts"."""
        return ["dense" if self.moe is None or i in self.dense else "experts" for i in range(self.layers)]
