"""gpt-oss: a window in every second layer, a learned attention sink per head, experts with biases and a clipped, shifted SwiGLU.

    h = x + Attention(RMSNorm(x))        y = h + MoE(RMSNorm(h))
    expert(x) = W_down ((up + 1) * gate * sigmoid(alpha gate)),  gate at most `limit`, up within +-limit

OpenAI 2025 (arXiv:2508.10925). The experts' weights are published in MXFP4: 4-bit values in blocks of 32 with a power of two as scale.
B batch, T time, D width, N query heads, K key heads, H head size, V vocabulary, E experts, M expert ffn.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.models import parts
from argosy.models.base.language import DecoderConfig
from argosy.models.hub.gpt_oss import GptOssHub
from argosy.models.settings import Experts, Rope, Yarn


def block(config: "GptOssConfig", kind: str) -> "parts.Block":
    """Builds one layer. All layers are of one kind."""
    from argosy.models.blocks.gpt_oss import clipped_swiglu

    bias = config.attention_bias
    attention = parts.Attention(config.dims, config.layers, bias=bias, out_bias=bias, sinks=True)
    act = partial(clipped_swiglu, limit=config.limit, alpha=config.alpha)
    moe = parts.MoE(config.dims, config.moe, act=act, bias=True)
    return parts.Block(attention, moe, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class GptOssConfig(GptOssHub, DecoderConfig):
    """gpt-oss (arXiv:2508.10925). Every layer has experts, so `ffn` must equal their width, `moe.ffn`."""

    make: ClassVar[Any] = block

    attention_bias: bool = True
    """Adds biases to the four projections of attention."""
    moe: Experts
    """The experts of every layer."""
    limit: float = Field(7.0, gt=0)
    """Bound to which gate and up are clipped."""
    alpha: float = 1.702
    """Factor inside the sigmoid of the gate."""

    @model_validator(mode="after")
    def _is_all_experts(self) -> "GptOssConfig":
        if self.ffn != self.moe.ffn:
            raise ValueError(
                f"ffn = {self.ffn}, moe.ffn = {self.moe.ffn}: must be equal, because every layer has experts"
            )
        if self.activation != "silu":
            raise ValueError(
                f"activation = {self.activation}: this family has a fixed activation, the clipped SwiGLU"
            )
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "ffn": 38, "heads": 4, "context": 200}
        experts = {"ffn": 38, "score": "softmax_chosen"}
        scaled = Rope(base=150_000.0, scaling=Yarn(factor=8, original=16, truncate=False))
        return {
            "unbiased": cls(
                **odd, layers=3, head_size=14, attention_bias=False, limit=0.3, moe=Experts(count=5, active=3, **experts)
            ),
            "plain": cls(
                **odd,
                layers=3,
                kv_heads=2,
                head_size=10,
                window=7,
                pattern="LG",
                rope=scaled,
                limit=0.5,
                moe=Experts(count=6, active=2, **experts),
            ),
        }
