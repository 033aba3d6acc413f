"""`AutoencoderConfig`: the settings that every autoencoder of images has.

    module.encode(images [B H W 3] in -1..1)     what the encoder says of latents: their moments, or the latents themselves
    module.decode(latents [B h w C])             images
    module.to_latents(...), module.from_latents(...)     between the encoder's latents and those that denoisers are trained on

Autoencoders of videos read [B F H W 3] too, and give the latents of F frames, [B f h w C].

Denoisers read latents of about variance 1: (z - shift) scale.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from argosy.core.keymap import KeyRow
from argosy.models.base.config import InputKind, ModelConfig
from argosy.models.diffusion.base import ImageSpace
from argosy.models.hub.nets import LayerSite, site_flops, site_rows


class AutoencoderConfig(ModelConfig):
    """Settings of an autoencoder of images."""

    inputs: ClassVar[InputKind] = "images"

    channels: int = Field(3, gt=0)
    """Channels of an image."""
    latent_channels: int = Field(gt=0)
    """Channels of latents C."""
    scale: float = Field(1.0, gt=0)
    """Denoisers read (latents - shift) scale."""
    shift: float = 0.0
    """Subtracted from the encoder's latents, see `scale`."""

    @property
    def size_multiple(self) -> int:
        """Positions that FLOPs count are pixels."""
        return 1

    @property
    def id_spaces(self) -> ImageSpace:
        return ImageSpace(self.channels, self.factor, 0)

    @property
    def factor(self) -> int:
        """An image is so many times as high and wide as its latents."""
        raise NotImplementedError

    @property
    def frame_factor(self) -> int:
        """A video has so many times the frames of its latents, not counting the first; 0: it reads no videos."""
        return 0

    def sites(self) -> Sequence[LayerSite]:
        """The layers, each with its level counted from the image."""
        raise NotImplementedError

    @property
    def dims(self) -> dict[str, int]:
        return site_rows(self.sites())[1]

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return site_rows(self.sites())

    def flops(self, tokens: int) -> int:
        """FLOPs of encoding and decoding an image of `tokens` pixels."""
        return site_flops(self.sites(), tokens) + self.mixing_flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        return 0

    def to_latents(self, encoded: Any) -> Any:
        """What denoisers read, from the encoder's latents."""
        return (encoded - self.shift) * self.scale

    def from_latents(self, latents: Any) -> Any:
        """What the decoder reads, from a denoiser's latents."""
        return latents / self.scale + self.shift
