"""The encoders of T5 and UMT5, with which Flux, SD3 and Wan read prompts.

    h = x + Attention(RMSNorm(x))        y = h + MLP(RMSNorm(h))        scores = q k' + b[bucket(k - q)]

Scores are not scaled. Instead of positions, there is a learned bias for each head and each bucket of distances. T5 has one table of
biases for all layers, UMT5 one for each layer. Raffel et al. 2019 (arXiv:1910.10683); gated: Shazeer 2020 (arXiv:2002.05202); UMT5:
Chung et al. 2023 (arXiv:2304.09151).
B batch, T time, D width, F feed-forward, N heads, H head size, V vocabulary, A buckets.
"""

from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.models import parts
from argosy.models.base.language import LanguageConfig
from argosy.models.hub.t5 import T5Hub
from argosy.models.settings import Activation, Reach


class T5Config(T5Hub, LanguageConfig):
    """The encoder of T5 (arXiv:1910.10683) and UMT5."""

    causal: ClassVar[bool] = False
    can_score: ClassVar[bool] = False
    framing: ClassVar[tuple[str | None, str | None]] = (None, "eos_token")

    ffn: int = Field(gt=0)
    """Width of the feed-forward layer F."""
    heads: int = Field(gt=0)
    """Heads N."""
    head_size: int = Field(gt=0)
    """Head size H."""
    buckets: int = Field(32, gt=3, multiple_of=2)
    """Number of buckets of distances A, half of them for tokens before a token and half for those after it."""
    distance: int = Field(128, gt=1)
    """Distances from here on share a bucket, in tokens."""
    shared_bias: bool = True
    """One table of biases for all layers (T5), or one for each (UMT5)."""
    gated: bool = True
    """Whether the feed-forward layer is gated (T5 1.1), or plain (T5 1.0)."""
    activation: Activation = "gelu_tanh"
    """Activation of the feed-forward layer."""
    norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square in RMSNorm."""

    @model_validator(mode="after")
    def _no_head(self) -> "T5Config":
        if self.tied or self.scores:
            raise ValueError("tied and scores: this encoder has no head")
        if self.distance <= self.buckets // 4:
            raise ValueError(f"distance = {self.distance} must be more than a quarter of buckets = {self.buckets}")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "layers": 3, "ffn": 70, "heads": 4, "head_size": 6, "context": 90}
        return {
            "plain": cls(**odd, gated=False, activation="relu", buckets=8, distance=20),
            "umt5": cls(**odd, shared_bias=False, buckets=8, distance=13),
            "gated": cls(**odd, buckets=10, distance=17, norm_eps=1e-5),
        }

    @property
    def dims(self) -> dict[str, int]:
        heads = {"N": self.heads, "K": self.heads, "H": self.head_size}
        return {"D": self.width, "F": self.ffn, **heads, "V": self.vocab, "A": self.buckets}

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module. All layers are equal."""
        from argosy.models.blocks.t5 import T5Encoder

        return T5Encoder(self, [parts.Layer("block", Reach())] * self.layers, run)

    def mixing_flops(self, tokens: int) -> int:
        return 4 * tokens * tokens * self.heads * self.head_size * self.layers
