"""The settings of denoisers in which image and text have separate weights and attend to each other (joint attention).

`MMDiTConfig` is for the denoisers, and `MMDiTLayersConfig` has the settings that they share with their ControlNets. Flux and Stable
Diffusion 3 are such models. Esser et al. 2024 (MMDiT, arXiv:2403.03206).
"""

from typing import ClassVar

from pydantic import Field

from argosy.models.diffusion.base import DenoiserConfig, LatentNetConfig


class MMDiTLayersConfig(LatentNetConfig):
    """Settings of layers with joint attention of image and text, and of what comes before them."""

    text_paths: ClassVar[tuple[str, ...]] = ("text_embed.", "layers.{l}.text.")
    adapted: ClassVar[str | None] = r"layers\.(.*\.)?((image|text)\.(attn|mlp)|second)\..*"

    patch: int = Field(2, gt=0)
    """Height and width of a patch of latents."""
    layers: int = Field(gt=0)
    """Layers in which image and text have weights of their own."""
    heads: int = Field(gt=0)
    """Heads N."""
    head_size: int = Field(gt=0)
    """Head size H; the width of both streams is heads times this."""
    text_width: int = Field(gt=0)
    """Width of the text encoder's states S."""
    pooled_width: int = Field(gt=0)
    """Width of the text's one vector O."""
    text_tokens: int = Field(512, gt=0)
    """Tokens of a prompt that pipelines read and FLOPs count."""
    waves: int = Field(256, gt=2, multiple_of=2)
    """Cosines and sines of the time step W."""

    @property
    def width(self) -> int:
        """The width D of both streams."""
        return self.heads * self.head_size

    @property
    def conditions(self) -> frozenset[str]:
        """The fields of `Conditions` that the model reads."""
        return frozenset(["text", "pooled"])

    @property
    def size_multiple(self) -> int:
        return self.patch

    @property
    def dims(self) -> dict[str, int]:
        heads = {"N": self.heads, "K": self.heads, "H": self.head_size}
        inputs = {"I": self.channels * self.patch**2, "S": self.text_width, "O": self.pooled_width, "W": self.waves}
        return {"D": self.width, "F": 4 * self.width, **heads, **inputs, "E": self.width, "M": self.width}


class MMDiTConfig(MMDiTLayersConfig, DenoiserConfig):
    """Settings of a denoiser with joint attention of image and text."""
