"""Wan 2.1: a flow model of videos, whose layers read the text by cross-attention.

    x += g1 attention(norm(x) (1 + s1) + b1)        x += cross(norm(x), text)        x += g2 MLP(norm(x) (1 + s2) + b2)

(b, s, g) = table of the layer + M silu(c), with one M for the whole model and c an embedding of the time step. Queries and keys are
normalized across all heads. Queries and keys of self-attention are rotated by frame, row and column (RoPE). An image is a video of one
frame. Wan Team 2025 (arXiv:2503.20314).

B batch, T tokens, D width, F feed-forward, N heads, K key heads, H head size, I numbers of a patch, S width of text states, W sines and
cosines, E width of embedders, G parts of a modulation, M width of a part.
"""

from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.keymap import KeyRow, filled_tensors
from argosy.models import parts
from argosy.models.diffusion.base import PER_IMAGE, DenoiserConfig
from argosy.models.hub.wan import WanHub


class WanConfig(WanHub, DenoiserConfig):
    """Wan 2.1, text to video (arXiv:2503.20314)."""

    adapted: ClassVar[str | None] = r"layers\.(.*\.)?(attn|cross|mlp)\..*"
    draws_videos: ClassVar[bool] = True

    patch: int = Field(2, gt=0)
    """Height and width of a patch of latents, which is of one frame."""
    layers: int = Field(gt=0)
    """Layers."""
    heads: int = Field(gt=0)
    """Heads N."""
    head_size: int = Field(gt=5, multiple_of=2)
    """Head size H; the width is heads times this."""
    ffn: int = Field(gt=0)
    """Width of the feed-forward layer F."""
    text_width: int = Field(gt=0)
    """Width of the text encoder's states S."""
    text_tokens: int = Field(512, gt=0)
    """Tokens of a prompt that pipelines read and FLOPs count."""
    waves: int = Field(256, gt=2, multiple_of=2)
    """Cosines and sines of the time step W."""
    cross_attn_norm: bool = True
    """Whether what queries the text is normalized (LayerNorm)."""
    norm_eps: float = Field(1e-6, gt=0)
    """Added to the variance or the mean square in norms."""

    @model_validator(mode="after")
    def _axes_fit(self) -> "WanConfig":
        if any(n % 2 or n < 1 for n in self.axes):
            raise ValueError(f"head_size = {self.head_size} does not divide into even parts for frames, rows and columns")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"channels": 3, "heads": 2, "head_size": 14, "ffn": 20, "text_width": 10, "text_tokens": 5, "waves": 14}
        return {
            "plain": cls(**odd, layers=3),
            "bare": cls(**odd, layers=1, patch=1, cross_attn_norm=False, norm_eps=1e-5),
        }

    @property
    def width(self) -> int:
        """The width D of the residual stream."""
        return self.heads * self.head_size

    @property
    def axes(self) -> tuple[int, int, int]:
        """The number of features of a head that each axis of positions rotates: frame, row, column."""
        side = 2 * (self.head_size // 6)
        return self.head_size - 2 * side, side, side

    @property
    def conditions(self) -> frozenset[str]:
        return frozenset(["text"])

    @property
    def size_multiple(self) -> int:
        return self.patch

    @property
    def dims(self) -> dict[str, int]:
        heads = {"N": self.heads, "K": self.heads, "H": self.head_size}
        inputs = {"I": self.channels * self.patch**2, "S": self.text_width, "W": self.waves}
        return {"D": self.width, "F": self.ffn, **heads, **inputs, "E": self.width, "M": self.width}

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module."""
        from argosy.models.blocks.wan import Wan

        return Wan(self, run)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return self.tensor_rows()

    def flops(self, tokens: int) -> int:
        total = 0
        for tensor in filled_tensors(*self.hub_rows()):
            if tensor.path.endswith(".w"):
                times = tokens
                if tensor.path.startswith(("text_", "layers.{l}.cross.k", "layers.{l}.cross.v")):
                    times = self.text_tokens
                elif PER_IMAGE & set(tensor.axes):
                    times = 1
                total += 2 * tensor.size * tensor.layers * times
        return total + self.mixing_flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        return 4 * tokens * (tokens + self.text_tokens) * self.width * self.layers
