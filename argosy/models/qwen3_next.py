"""Qwen3-Next: three gated delta nets to each gated attention, all followed by experts.

    h = x + Mix(norm(x))        y = h + MoE(norm(h)) + sigmoid(w_s norm(h)) Shared(norm(h))

    attention    W_o (softmax attention * sigmoid(W_g x)), queries and keys normalized, rotary positions on a quarter of each head
    delta net    W_o (norm(delta rule(q, k, v)) * silu(W_z x)), where q, k, v pass a short convolution and silu,
                 q and k have length 1; the state decays by exp(-exp(A) softplus(W_a x + dt)) and is written with rate
                 sigmoid(W_b x)

A delta net keeps a state of fixed size per sequence, whatever the sequence's length. Norms store their scale minus one, except the norm
inside the delta net. Attention layers attend to all earlier tokens; none is local.

The Qwen team 2025, Yang et al. 2024 (arXiv:2412.06464).
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary, E experts, M expert ffn; in a
delta net K key heads of size H, each serving G value heads of size U, and W taps.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.settings import Settings
from argosy.models import parts
from argosy.models.base.language import DecoderConfig, shortest_pattern
from argosy.models.hub.qwen3_next import Qwen3NextHub
from argosy.models.settings import Experts, Reach, Rope, Yarn


def block(config: "Qwen3NextConfig", kind: str) -> "parts.Block":
    """Builds one layer. `kind` is "delta" or "attention", followed by "_dense" or "_experts"."""
    from argosy.models.blocks.qwen3_next import DeltaNet, GatedAttention

    d = config.dims

    def head_norm(heads: int) -> "parts.RMSNorm":
        return parts.RMSNorm(config.H, config.norm_eps, offset=1.0, letters="H")

    if kind.startswith("delta"):
        mix = DeltaNet(config.delta, config.width, config.layers, config.norm_eps)
    else:
        mix = GatedAttention(d, config.layers, bias=config.attention_bias, norms=head_norm)
    dense = kind.endswith("dense")
    mlp = parts.GLU(d, config.activation) if dense else parts.MoE(d, config.moe, config.activation)
    return parts.Block(mix, mlp, pre=partial(parts.RMSNorm, config.width, config.norm_eps, offset=1.0))


class DeltaHeads(Settings):
    """Sizes of a gated delta net."""

    key_heads: int = Field(gt=0)
    """Query and key heads."""
    value_heads: int = Field(gt=0)
    """Value heads, each with a state; a multiple of `key_heads`."""
    key_size: int = Field(gt=0)
    """Size of a query or key."""
    value_size: int = Field(gt=0)
    """Size of a value."""
    taps: int = Field(4, gt=0)
    """Tokens that the short convolution reads: the token itself and those just before it."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "DeltaHeads":
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads = {self.value_heads} is not a multiple of key_heads = {self.key_heads}")
        return self

    @property
    def dims(self) -> dict[str, int]:
        group = self.value_heads // self.key_heads
        return {"K": self.key_heads, "G": group, "H": self.key_size, "U": self.value_size, "W": self.taps}


class Qwen3NextConfig(Qwen3NextHub, DecoderConfig):
    """Qwen3-Next (arXiv:2412.06464 for its delta nets)."""

    moe_parts: ClassVar[frozenset[str]] = frozenset(["shared", "shared_gate"])
    make: ClassVar[Any] = block

    norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square in RMSNorm."""
    rope: Rope = Rope(base=1e7, part=0.25)
    """Rotary positions of the attention layers."""
    pattern: str | None = "RRRG"
    """Which layers are recurrent (R, a delta net) and which attend to all earlier tokens (G), repeated up to the last layer."""
    delta: DeltaHeads
    """The delta net of recurrent layers."""
    attention_bias: bool = False
    """Adds biases to the projections of attention, including its gate."""
    moe: Experts
    """The experts that replace the feed-forward layer."""
    dense: tuple[int, ...] = ()
    """Indices of layers, from 0, that keep the feed-forward layer."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Qwen3NextConfig":
        """Checks the rules of every decoder, and those of this family. The pattern has its own letters."""
        DecoderConfig._sizes_fit(self.model_copy(update={"pattern": None}))  # pyright: ignore[reportCallIssue]
        if self.window is not None:
            raise ValueError(f"window = {self.window}: no layer of this family is local")
        if not self.pattern or set(self.pattern) - {"R", "G"}:
            raise ValueError(f"pattern = {self.pattern}: R for a recurrent layer, G for one that attends to everything")
        if not set(self.dense) <= set(range(self.layers)):
            raise ValueError(f"dense = {list(self.dense)}: must be some of the {self.layers} layers")
        return self

    @model_validator(mode="after")
    def _has_a_shared_expert(self) -> "Qwen3NextConfig":
        if not (self.moe.shared and self.moe.shared_gate):
            raise ValueError(
                "moe.shared, moe.shared_gate: this family always has a gated shared expert"
            )
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "ffn": 70, "heads": 4, "context": 200}
        shared = {"shared": 26, "shared_gate": True}
        return {
            "plain": cls(
                **odd,
                layers=4,
                kv_heads=2,
                head_size=12,
                rope=Rope(part=0.5),
                delta=DeltaHeads(key_heads=2, value_heads=6, key_size=10, value_size=14),
                moe=Experts(count=6, active=2, ffn=34, **shared),
            ),
            "mixed": cls(
                **odd,
                layers=5,
                kv_heads=1,
                head_size=10,
                tied=True,
                rope=Rope(scaling=Yarn(factor=4, original=16)),
                pattern="RG",
                attention_bias=True,
                delta=DeltaHeads(key_heads=3, value_heads=3, key_size=8, value_size=9, taps=3),
                moe=Experts(count=5, active=3, ffn=22, normalized=False, **shared),
                dense=(0, 3),
            ),
        }

    def resolved(self) -> "Qwen3NextConfig":
        return super().resolved().model_copy(update={"pattern": shortest_pattern(self.spans)})

    @property
    def recurrent(self) -> bool:
        return "R" in self.spans

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer: how it mixes tokens, and its feed-forward part, such as "delta_experts"."""
        mixes = ("delta" if span == "R" else "attention" for span in self.spans)
        return [f"{mix}_{'dense' if i in self.dense else 'experts'}" for i, mix in enumerate(mixes)]

    def build(self, run: "parts.Execution | None" = None) -> "parts.Decoder":
        """Builds the module. Layers differ in how they mix tokens, and in their feed-forward part."""
        reach = Reach(None, self.rope.decided(self.context))
        plan = [parts.Layer(kind, reach if kind.startswith("attention") else None) for kind in self.kinds]
        norm = parts.RMSNorm(self.width, self.norm_eps, offset=1.0)
        return parts.Decoder(self, plan, self.make, norm, run)

    def mixing_flops(self, tokens: int) -> int:
        from argosy.ops import delta

        recurrent = self.spans.count("R")
        sizes = {letter: size for letter, size in self.delta.dims.items() if letter != "W"}
        attention = 4 * tokens * tokens * self.heads * self.H * (self.layers - recurrent)
        return attention + recurrent * delta.delta_flops(tokens, **sizes)
