"""Llama 4 (text): layers with RoPE and chunked attention, and layers with full attention and no positions. A routed expert's weight
scales the expert's input. There is also a shared expert.

    h = x + Attention(RMSNorm(x))        y = h + MoE(RMSNorm(h)), in some layers h + SwiGLU(RMSNorm(h))
    MoE(x) = Shared(x) + sum over the k best experts e of  Expert_e(sigmoid(r_e) x),  r = W_r x

Queries and keys of rotary layers may be normalized over each head, without a weight. Queries of the other layers grow with their
position, so that attention over millions of tokens stays sharp. Only the text model of a folder is read.

Meta 2025, "The Llama 4 herd"; Yang et al. 2025 (arXiv:2501.18795) on layers without positions.
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary, E experts, M expert ffn.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.models import parts
from argosy.models.base.language import DecoderConfig, shortest_pattern
from argosy.models.hub.llama4 import Llama4Hub
from argosy.models.settings import Experts, Llama3Scaling, Reach, Rope, Temper


def block(config: "Llama4Config", kind: str) -> "parts.Block":
    """Builds one layer. `kind` is "dense" or "experts"."""
    d, bias = config.dims, config.attention_bias
    attention = parts.Attention(d, config.layers, bias=bias, out_bias=bias)
    experts = kind == "experts"
    mlp = parts.MoE(d, config.moe, config.activation) if experts else parts.GLU(d, config.activation)
    return parts.Block(attention, mlp, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class Llama4Config(Llama4Hub, DecoderConfig):
    """Llama 4 (text)."""

    moe_parts: ClassVar[frozenset[str]] = frozenset(["shared"])
    make: ClassVar[Any] = block

    window: int | None = Field(8192, gt=0)
    """Tokens per chunk: in a local layer, a token attends only to its own chunk."""
    pattern: str | None = "LLLG"
    """Which layers have rotary positions and chunked attention (L), and which have full attention without positions (G), repeated
    up to the last
    layer."""
    rope: Rope = Rope(base=500_000, pairs="interleaved")
    """Rotary positions of local layers."""
    qk_norm: bool = False
    """Divides each head of queries and keys by its RMS after rotary positions, in local layers."""
    temper: Temper | None = None
    """How queries grow with their position, in layers with full attention."""
    attention_bias: bool = False
    """Adds biases to the four projections of attention."""
    moe: Experts
    """The experts."""
    moe_pattern: str = Field("E", pattern="^[DE]+$")
    """Which layers have experts (E) and which a feed-forward layer (D), repeated up to the last layer."""

    @model_validator(mode="after")
    def _has_experts(self) -> "Llama4Config":
        if "experts" not in self.kinds:
            raise ValueError(f"moe_pattern = {self.moe_pattern} leaves none of {self.layers} layers with experts")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "ffn": 70, "heads": 4, "context": 200, "window": 7}
        weighed: dict[str, Any] = {"score": "sigmoid", "normalized": False, "weigh": "input"}
        scaled = Rope(base=5e5, pairs="interleaved", scaling=Llama3Scaling(factor=16, low=1, high=1, original=16))
        return {
            "experts": cls(
                **odd,
                layers=3,
                kv_heads=1,
                head_size=10,
                pattern="LG",
                attention_bias=True,
                moe=Experts(count=5, active=2, ffn=26, shared=26, **weighed),
            ),
            "interleaved": cls(
                **odd,
                layers=5,
                kv_heads=2,
                head_size=14,
                tied=True,
                rope=scaled,
                qk_norm=True,
                temper=Temper(floor=4, scale=0.3),
                moe=Experts(count=6, active=1, ffn=22, shared=22, **weighed),
                moe_pattern="DE",
            ),
        }

    @property
    def kinds(self) -> list[str]:
        """The feed-forward part of each layer: "dense" or "experts"."""
        letters = (self.moe_pattern * self.layers)[: self.layers]
        return ["experts" if letter == "E" else "dense" for letter in letters]

    def reaches(self) -> list[Reach]:
        local = Reach(
            self.window,
            self.rotary(self.rope),
            chunked=True,
            unit=self.norm_eps if self.qk_norm else None,
        )
        return [local if span == "L" else Reach(temper=self.temper) for span in self.spans]

    def resolved(self) -> "Llama4Config":
        fed = "".join("E" if kind == "experts" else "D" for kind in self.kinds)
        return super().resolved().model_copy(update={"moe_pattern": shortest_pattern(fed)})
