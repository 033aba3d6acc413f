"""ControlNets of UNets: a copy of a UNet's down and middle blocks that reads an image of edges, depth or poses and steers the UNet.

    x = conv(latents) + E(control)          E: convolutions from pixels to the size of latents
    r_i = Z_i (skip i of x)                 r_m = Z_m (middle of x)
    the UNet's up blocks read skip_i + scale r_i and middle + scale r_m

The convolutions Z, and the last convolution of E, are initialized to zero, so that before training the UNet's output is unchanged.
Zhang et al. 2023 (arXiv:2302.05543). The format is diffusers' ControlNetModel. Published ControlNets of XL without attention in the
middle are not supported.
"""

from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from argosy.models import parts
from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.unet import UNetConfig
from argosy.models.diffusion.unet_encoder import UNetEncoderConfig
from argosy.models.hub.controlnets import ControlNetHub
from argosy.models.hub.nets import LayerSite

# The channels of E's convolutions in diffusers. Each convolution but the first halves the image.
EMBEDDING = (16, 32, 96, 256)


class ControlNetConfig(ControlNetHub, ControlNetSettings, UNetEncoderConfig):
    """A ControlNet of Stable Diffusion (arXiv:2302.05543)."""

    steers: ClassVar[type] = UNetConfig
    steered: ClassVar[str] = "UNets (Stable Diffusion 1, 2 and XL)"
    copied: ClassVar[tuple[str, ...]] = tuple(name for name in UNetEncoderConfig.model_fields if name != "preset")
    compared: ClassVar[tuple[str, ...]] = ("channels", "widths", "layers", "text_width", "pooled_width")
    reads_latents: ClassVar[bool] = False
    guesses: ClassVar[bool] = True

    control_channels: int = Field(3, gt=0)
    """Channels of the control image."""
    embedding: tuple[int, ...] = Field(EMBEDDING, min_length=1)
    """Channels of the convolutions that make a control image as small as latents: each after the first halves it."""
    channel_order: Literal["rgb", "bgr"] = "rgb"
    """The order in which the channels of control images are read."""

    @model_validator(mode="after")
    def _reads_colors(self) -> "ControlNetConfig":
        if self.control_channels != 3:
            raise ValueError(f"control_channels = {self.control_channels}: control images have 3 channels")
        return self

    @classmethod
    def of_denoiser(cls, denoiser: Any) -> "ControlNetConfig":
        # diffusers' channels, with as many halvings as the UNet's `pixels` needs.
        halvings = denoiser.pixels.bit_length() - 1
        embedding = (*EMBEDDING[:halvings], EMBEDDING[-1])[: halvings + 1]
        return cls(**{name: getattr(denoiser, name) for name in cls.copied}, embedding=embedding)

    @classmethod
    def examples(cls) -> dict[str, Any]:
        small = {"embedding": (5, 6)}
        return {name: cls.of_denoiser(unet).model_copy(update=small) for name, unet in UNetConfig.examples().items()}

    @property
    def factor(self) -> int:
        """The height and width of a control image, as a multiple of those of the latents."""
        return 2 ** (len(self.embedding) - 1)

    @property
    def residual_count(self) -> int:
        return len(self.residual_channels) + 1

    @property
    def residual_channels(self) -> tuple[int, ...]:
        """The number of channels of the residual for each skip of the UNet."""
        channels = [self.widths[0]]
        for level, width in enumerate(self.widths):
            channels += [width] * (self.layers + (level < len(self.widths) - 1))
        return tuple(channels)

    def sites(self) -> tuple[LayerSite, ...]:
        return self._sites

    @cached_property
    def _sites(self) -> tuple[LayerSite, ...]:
        name, sizes, first = "controlnet_cond_embedding", self.embedding, 1 - len(self.embedding)
        sites = [*self.encoder_sites(), LayerSite(f"{name}.conv_in", "conv", self.control_channels, sizes[0], level=first)]
        for i, (inner, outer) in enumerate(pairwise(sizes)):
            sites.append(LayerSite(f"{name}.blocks.{2 * i}", "conv", inner, inner, level=first + i))
            sites.append(LayerSite(f"{name}.blocks.{2 * i + 1}", "conv", inner, outer, stride=2, level=first + i + 1))
        sites.append(LayerSite(f"{name}.conv_out", "conv", sizes[-1], self.widths[0], zero=True))
        level, at = 0, 1 + self.layers
        for i, channels in enumerate(self.residual_channels):
            # The output of a level's downsampling has the size of the next level.
            level, at = (level + 1, at + self.layers + 1) if i == at else (level, at)
            sites.append(LayerSite(f"controlnet_down_blocks.{i}", "conv", channels, channels, 1, level=level, zero=True))
        last = self.widths[-1]
        sites.append(LayerSite("controlnet_mid_block", "conv", last, last, 1, level=len(self.widths) - 1, zero=True))
        return tuple(sites)

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module. Its layers are no stack, so there is one way to run them."""
        from argosy.models.blocks.controlnets.unet import ControlNet

        return ControlNet(self)
