"""Flux.2: like Flux.1, with one modulation for all layers of a kind, gated feed-forward layers, and no pooled text.

    double:  x += g1 joint(modulate(x))          x += g2 GLU(modulate(x))          for image and for text, with their own weights
    single:  z += g (O joint(modulate(z)) + W2 (silu(W3 modulate(z)) W1 modulate(z)))       z: text and image, one after the other
    joint: attention over the tokens of text and image; queries and keys are normalized and rotated by image, row, column and word

shift, scale, gate = M silu(c), with one M for each kind of layer and stream; c = time step (+ scale of guidance). There are no biases.
The autoencoder packs latents two by two and normalizes them, so that each position of the latents is one token. Black Forest Labs 2025
(FLUX.2).

B batch, T tokens, D width, F feed-forward, N heads, K key heads, H head size, I channels of a position, S width of text states, W sines
and cosines, E width of embedders, G parts of a modulation, M width of a part.
"""

from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.diffusion.base import DenoiserConfig
from argosy.models.hub.flux2 import Flux2Hub


class Flux2Config(Flux2Hub, DenoiserConfig):
    """Flux.2, klein and dev."""

    text_paths: ClassVar[tuple[str, ...]] = ("text_embed.", "layers.{l}.text.")
    joint_paths: ClassVar[tuple[str, ...]] = ("single_layers.",)
    adapted: ClassVar[str | None] = r"layers\.(.*\.)?(image|text)\.(attn|mlp)\..*|single_layers\.(.*\.)?(attn\.[qkv]|gate|up)"

    layers: int = Field(gt=0)
    """Layers in which image and text have weights of their own."""
    single_layers: int = Field(gt=0)
    """Layers whose weights image and text share, after the others."""
    heads: int = Field(gt=0)
    """Heads N."""
    head_size: int = Field(gt=0)
    """Head size H; the width of both streams is heads times this."""
    expansion: float = Field(3.0, gt=0)
    """Width of the feed-forward layer over that of the model."""
    axes: tuple[int, int, int, int] = (32, 32, 32, 32)
    """Features of a head that turn by each axis of positions: a number of the image, row, column, place in the text."""
    rope_base: float = Field(2000.0, gt=0)
    """Base of the frequencies."""
    text_width: int = Field(gt=0)
    """Width of the text encoder's states S: those of three of its layers, side by side."""
    text_tokens: int = Field(512, gt=0)
    """Tokens of a prompt that pipelines read and FLOPs count."""
    waves: int = Field(256, gt=2, multiple_of=2)
    """Cosines and sines of the time step W."""
    guided: bool = False
    """Whether the scale of guidance is an input (dev)."""

    @model_validator(mode="after")
    def _axes_fit(self) -> "Flux2Config":
        if sum(self.axes) != self.head_size or any(n % 2 for n in self.axes):
            raise ValueError(f"axes = {self.axes} must be even and add up to head_size = {self.head_size}")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"channels": 5, "heads": 2, "head_size": 14, "axes": (2, 4, 6, 2), "text_width": 10, "text_tokens": 5}
        odd |= {"waves": 14}
        return {
            "klein": cls(**odd, layers=1, single_layers=2),
            "dev": cls(**odd, layers=2, single_layers=1, guided=True, expansion=1.5),
        }

    @property
    def width(self) -> int:
        """The width D of both streams."""
        return self.heads * self.head_size

    @property
    def conditions(self) -> frozenset[str]:
        return frozenset(["text", "guidance"] if self.guided else ["text"])

    @property
    def dims(self) -> dict[str, int]:
        heads = {"N": self.heads, "K": self.heads, "H": self.head_size}
        inputs = {"I": self.channels, "S": self.text_width, "W": self.waves}
        return {"D": self.width, "F": int(self.width * self.expansion), **heads, **inputs, "E": self.width, "M": self.width}

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module."""
        from argosy.models.blocks.flux2 import Flux2

        return Flux2(self, run)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return self.tensor_rows()

    def mixing_flops(self, tokens: int) -> int:
        return 4 * (tokens + self.text_tokens) ** 2 * self.width * (self.layers + self.single_layers)
