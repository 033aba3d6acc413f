"""The variational autoencoder of Wan 2.1: videos to latents of a quarter of the frames, and back.

    block(x) = conv silu norm conv silu norm x + x        norm(x) = g x / rms(x) over channels

The first frame is coded alone, as an image is, and each latent frame after it stands for several frames. A convolution over time reads
the frames before its own and none after it, so a video is coded and decoded in pieces: of each convolution, the last two frames that it
read are kept. Height and width are halved between levels, the rate of frames between some of them. Wan Team 2025 (arXiv:2503.20314).
"""

from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.models import parts
from argosy.models.autoencoders.base import AutoencoderConfig
from argosy.models.hub.autoencoder_wan import AutoencoderKLWanHub
from argosy.models.hub.nets import LayerSite


class AutoencoderKLWanConfig(AutoencoderKLWanHub, AutoencoderConfig):
    """The autoencoder of Wan 2.1 (arXiv:2503.20314)."""

    # Its authors decode in float32 whatever the type of the pipeline.
    force_upcast: ClassVar[bool] = True

    width: int = Field(96, gt=0, multiple_of=2)
    """Channels of the encoder's first level."""
    decoder_width: int | None = Field(None, gt=0, multiple_of=2)
    """Channels of the decoder's last level. None: `width`."""
    multiples: tuple[int, ...] = Field((1, 2, 4, 4), min_length=1)
    """Channels of each level over those of the first. Height and width are halved between levels."""
    temporal: tuple[bool, ...] = (False, True, True)
    """Whether the rate of frames is halved too, from each level to the next."""
    layers: int = Field(2, gt=0)
    """Residual blocks of a level in the encoder; the decoder has one more."""
    mean: tuple[float, ...]
    """Mean of each channel of latents."""
    deviation: tuple[float, ...]
    """Standard deviation of each channel of latents: denoisers read (latents - mean) / deviation."""

    @model_validator(mode="after")
    def _levels_and_channels_agree(self) -> "AutoencoderKLWanConfig":
        if len(self.temporal) != len(self.multiples) - 1:
            raise ValueError(f"temporal has {len(self.temporal)} steps between {len(self.multiples)} levels")
        if len(self.mean) != self.latent_channels or len(self.deviation) != self.latent_channels:
            raise ValueError(f"mean and deviation need one number for each of latent_channels = {self.latent_channels}")
        if min(self.deviation) <= 0:
            raise ValueError("deviation: numbers above 0")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"latent_channels": 3, "mean": (0.1, -0.2, 0.3), "deviation": (1.5, 2.0, 0.7)}
        return {
            "plain": cls(**odd, width=4, multiples=(1, 2), temporal=(True,), layers=1),
            "wide": cls(**odd, width=4, decoder_width=6, multiples=(1, 2, 2), temporal=(False, True), layers=2),
        }

    @property
    def factor(self) -> int:
        return 2 ** len(self.temporal)

    @property
    def frame_factor(self) -> int:
        return 2 ** sum(self.temporal)

    @cached_property
    def _sites(self) -> tuple[LayerSite, ...]:
        last, z = len(self.temporal), self.latent_channels
        widths = [self.width * m for m in self.multiples]
        sites, at, number = [causal("encoder.conv_in", self.channels, self.width)], self.width, 0
        for level, width in enumerate(widths):
            for _ in range(self.layers):
                sites += causal_resnet(f"encoder.down_blocks.{number}", at, width, level)
                at, number = width, number + 1
            if level < last:
                name = f"encoder.down_blocks.{number}"
                sites.append(LayerSite(f"{name}.resample.1", "conv", width, width, stride=2, level=level + 1))
                sites += [between_frames(f"{name}.time_conv", width, width)] if self.temporal[level] else []
                number += 1
        sites += [*self._middle("encoder", at, last), LayerSite("encoder.norm_out", "channel_norm", at, at)]
        sites += [causal("encoder.conv_out", at, 2 * z, last), causal("quant_conv", 2 * z, 2 * z, last, 1)]
        widths = [(self.decoder_width or self.width) * m for m in reversed(self.multiples)]
        sites += [causal("post_quant_conv", z, z, last, 1), causal("decoder.conv_in", z, widths[0], last)]
        sites += self._middle("decoder", at := widths[0], last)
        for i, width in enumerate(widths):
            name = f"decoder.up_blocks.{i}"
            for j in range(self.layers + 1):
                sites += causal_resnet(f"{name}.resnets.{j}", at, width, last - i)
                at = width
            if i < last:
                sites.append(LayerSite(f"{name}.upsamplers.0.resample.1", "conv", width, width // 2, level=last - i - 1))
                sites += [between_frames(f"{name}.upsamplers.0.time_conv", width, 2 * width)] if self.temporal[-1 - i] else []
                at = width // 2
        sites.append(LayerSite("decoder.norm_out", "channel_norm", at, at))
        return (*sites, causal("decoder.conv_out", at, self.channels))

    def sites(self) -> tuple[LayerSite, ...]:
        return self._sites

    def _middle(self, side: str, width: int, level: int) -> list[LayerSite]:
        """The blocks at the smallest level."""
        name = f"{side}.mid_block"
        sites = [*causal_resnet(f"{name}.resnets.0", width, width, level)]
        sites.append(LayerSite(f"{name}.attentions.0.norm", "frame_norm", width, width))
        sites.append(LayerSite(f"{name}.attentions.0.to_qkv", "conv", width, 3 * width, 1, level=level))
        sites.append(LayerSite(f"{name}.attentions.0.proj", "conv", width, width, 1, level=level))
        return [*sites, *causal_resnet(f"{name}.resnets.1", width, width, level)]

    def mixing_flops(self, tokens: int) -> int:
        positions = tokens // 4 ** len(self.temporal)
        widths = self.width * self.multiples[-1], (self.decoder_width or self.width) * self.multiples[-1]
        return 4 * positions * positions * sum(widths)

    def to_latents(self, encoded: Any) -> Any:
        return (encoded - _channels(self.mean)) / _channels(self.deviation)

    def from_latents(self, latents: Any) -> Any:
        return latents * _channels(self.deviation) + _channels(self.mean)

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """The module. Its layers are no stack, so there is one way to run them."""
        from argosy.models.blocks.autoencoder_kl_wan import AutoencoderKLWan

        return AutoencoderKLWan(self)


def causal(name: str, inner: int, outer: int, level: int = 0, taps: int = 3) -> LayerSite:
    """A convolution over height, width and the frames up to its own."""
    return LayerSite(name, "causal", inner, outer, taps, level=level, frame_taps=taps)


def between_frames(name: str, inner: int, outer: int) -> LayerSite:
    """A convolution over time alone, where the rate of frames changes. A video's first frame goes past it."""
    return LayerSite(name, "causal", inner, outer, 1, frame_taps=3, reads_first=False)


def causal_resnet(name: str, inner: int, outer: int, level: int) -> list[LayerSite]:
    """A residual block of convolutions over videos."""
    sites = [LayerSite(f"{name}.norm1", "channel_norm", inner, inner), causal(f"{name}.conv1", inner, outer, level)]
    sites += [LayerSite(f"{name}.norm2", "channel_norm", outer, outer), causal(f"{name}.conv2", outer, outer, level)]
    return sites + ([causal(f"{name}.conv_shortcut", inner, outer, level, 1)] if inner != outer else [])


def _channels(values: tuple[float, ...]) -> Any:
    import numpy as np

    return np.asarray(values, np.float32)
