"""Gemma 1, 2 and 3 (text): embeddings scaled by sqrt(D), norms that store their scale minus one, a tied head.

    Gemma 1     h = x + Attention(norm(x))              y = h + GeGLU(norm(h))
    Gemma 2, 3  h = x + norm(Attention(norm(x)))        y = h + norm(GeGLU(norm(h)))

Gemma 2 alternates local and global layers and caps scores and logits. Gemma 3 has five local layers to a global one, normalises
queries and keys over each head, and local and global layers have different rotary positions.

Gemma team 2024, 2024, 2025 (arXiv:2403.08295, 2408.00118, 2503.19786).
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from argosy.models import parts
from argosy.models.base.language import DecoderConfig
from argosy.models.hub.gemma import GemmaHub
from argosy.models.settings import Activation, LinearScaling, Rope


def block(config: "GemmaConfig", kind: str) -> "parts.Block":
    """Builds one layer. Local and global layers have weights of the same structure. They differ only in window and rope base."""

    def head_norm(heads: int) -> "parts.RMSNorm":
        return parts.RMSNorm(config.H, config.norm_eps, offset=1.0, letters="H")

    attention = parts.Attention(
        config.dims,
        config.layers,
        scale=(config.query_scalar or config.H) ** -0.5,
        bias=config.attention_bias,
        out_bias=config.attention_bias,
        norms=head_norm if config.qk_norm else None,
        cap=config.score_cap,
    )
    norm = partial(parts.RMSNorm, config.width, config.norm_eps, offset=1.0)
    mlp = parts.GLU(config.dims, config.activation)
    return parts.Block(attention, mlp, pre=norm, post=norm if config.post_norms else None)


class GemmaConfig(GemmaHub, DecoderConfig):
    """Gemma 1, 2 and 3, text (arXiv:2403.08295, 2408.00118, 2503.19786)."""

    make: ClassVar[Any] = block

    tied: bool = True
    """Uses the embedding as the output head (tied embeddings)."""
    norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square in RMSNorm."""
    activation: Activation = "gelu_tanh"
    """Activation of the feed-forward gate."""
    attention_bias: bool = False
    """Adds biases to the four projections of attention."""
    query_scalar: int | None = Field(None, gt=0)
    """Scores are divided by the square root of this. None: of the head size."""
    post_norms: bool = False
    """Also normalizes the outputs of attention and feed-forward layer before they are added (Gemma 2 and 3)."""
    qk_norm: bool = False
    """Applies RMSNorm to each head of queries and keys (Gemma 3)."""
    score_cap: float | None = Field(None, gt=0)
    """Attention scores become cap * tanh(score / cap) (Gemma 2: 50)."""
    logit_cap: float | None = Field(None, gt=0)
    """Logits become cap * tanh(logit / cap) (Gemma 2: 30)."""
    local_rope: Rope | None = None
    """Rotary positions of local layers, if they differ (Gemma 3)."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "ffn": 70, "heads": 4, "context": 200, "head_size": 14}
        two = {"window": 7, "pattern": "LG", "score_cap": 3.0, "logit_cap": 4.0, "query_scalar": 11}
        three = {"window": 6, "pattern": "LLG", "qk_norm": True, "rope": Rope(base=1e6, scaling=LinearScaling(factor=8))}
        return {
            "1": cls(**odd, layers=2, kv_heads=1, attention_bias=True),
            "2": cls(**odd, layers=4, kv_heads=2, post_norms=True, **two),
            "3": cls(**odd, layers=5, kv_heads=4, post_norms=True, local_rope=Rope(), **three, tied=False),
        }

    @property
    def rope_of_local_layers(self) -> Rope:
        return self.local_rope or self.rope

    def build(self, run: "parts.Execution | None" = None) -> "parts.Decoder":
        """Builds the module. Layers differ in how far back they attend and in their rotary positions."""
        norm = parts.RMSNorm(self.width, self.norm_eps, offset=1.0)
        return parts.Decoder(self, self.plan(), self.make, norm, run, gain=self.width**0.5, logit_cap=self.logit_cap)

    def resolved(self) -> "GemmaConfig":
        """Returns the config with all derived values set. Gemma 1 has no separate query scale, and only Gemma 3 has two rope bases."""
        local = (self.local_rope or self.rope) if self.qk_norm else None
        scalar = (self.query_scalar or self.H) if self.post_norms else self.query_scalar
        return super().resolved().model_copy(update={"local_rope": local, "query_scalar": scalar})
