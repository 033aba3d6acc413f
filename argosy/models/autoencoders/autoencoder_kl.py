"""The variational autoencoder of latent diffusion: Stable Diffusion's, SDXL's, SD3's and Flux's.

    encode: image -> (mean, log variance)        z = mean + exp(log variance / 2) noise        decode: z -> image

Residual blocks of convolutions at each level, attention over all positions at the smallest. Kingma and Welling 2013 (arXiv:1312.6114);
Rombach et al. 2021 (arXiv:2112.10752). Stable Diffusion has latents of 4 channels, with a convolution of one tap on either side;
those of SD3 and Flux have 16, with a shift, and no such convolutions.
"""

from functools import cached_property
from typing import Any

from pydantic import Field, model_validator

from argosy.models import parts
from argosy.models.autoencoders.base import AutoencoderConfig
from argosy.models.hub.autoencoders import AutoencoderKLHub
from argosy.models.hub.nets import LayerSite, resnet_sites, site_flops


class AutoencoderKLConfig(AutoencoderKLHub, AutoencoderConfig):
    """The autoencoder of latent diffusion (arXiv:2112.10752)."""

    widths: tuple[int, ...] = Field(min_length=1)
    """Channels of each level, from that of the image on. Height and width are halved between levels."""
    layers: int = Field(2, gt=0)
    """Residual blocks of a level in the encoder; the decoder has one more."""
    groups: int = Field(32, gt=0)
    """Groups of channels that are normalized together."""
    attention: bool = True
    """Whether there is attention at the smallest level."""
    moments_conv: bool = True
    """Whether there is a convolution of one tap on the moments (`quant_conv`)."""
    latents_conv: bool = True
    """Whether there is one on the latents that are decoded (`post_quant_conv`)."""
    force_upcast: bool = True
    """Computes in float32 whatever the type of the pipeline: SDXL's overflows in float16."""

    @model_validator(mode="after")
    def _groups_divide(self) -> "AutoencoderKLConfig":
        if wrong := [n for n in self.widths if n % self.groups]:
            raise ValueError(f"widths {', '.join(map(str, wrong))} are not multiples of groups = {self.groups}")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"widths": (6, 10), "groups": 2, "latent_channels": 3}
        bare = {"attention": False, "moments_conv": False, "latents_conv": False, "scale": 0.36, "shift": 0.12, "force_upcast": False}
        return {"bare": cls(**{**odd, "widths": (4,)}, **bare, layers=1), "full": cls(**odd, layers=2)}

    @property
    def factor(self) -> int:
        return 2 ** (len(self.widths) - 1)

    @property
    def smallest_side(self) -> int:
        """The fewest pixels of a side with which every map of the encoder has a position."""
        return 2 ** (len(self.widths) - 1)

    @cached_property
    def _sites(self) -> tuple[LayerSite, ...]:
        last, z = len(self.widths) - 1, self.latent_channels
        first, deepest = self.widths[0], self.widths[-1]
        sites = [LayerSite("encoder.conv_in", "conv", self.channels, first)]
        at = first
        for level, width in enumerate(self.widths):
            name = f"encoder.down_blocks.{level}"
            for i in range(self.layers):
                sites += resnet_sites(f"{name}.resnets.{i}", at, width, level)
                at = width
            if level < last:
                sites.append(LayerSite(f"{name}.downsamplers.0.conv", "conv", width, width, stride=2, level=level + 1))
        sites += self._middle("encoder", deepest, last)
        sites += [LayerSite("encoder.conv_norm_out", "norm", deepest, deepest)]
        sites += [LayerSite("encoder.conv_out", "conv", deepest, 2 * z, level=last)]
        sites += [LayerSite("quant_conv", "conv", 2 * z, 2 * z, 1, level=last)] if self.moments_conv else []
        sites += [LayerSite("post_quant_conv", "conv", z, z, 1, level=last)] if self.latents_conv else []
        sites += [LayerSite("decoder.conv_in", "conv", z, deepest, level=last), *self._middle("decoder", deepest, last)]
        at = deepest
        for i, width in enumerate(reversed(self.widths)):
            name = f"decoder.up_blocks.{i}"
            for j in range(self.layers + 1):
                sites += resnet_sites(f"{name}.resnets.{j}", at, width, last - i)
                at = width
            if i < last:
                sites.append(LayerSite(f"{name}.upsamplers.0.conv", "conv", width, width, level=last - i - 1))
        sites += [LayerSite("decoder.conv_norm_out", "norm", first, first)]
        return (*sites, LayerSite("decoder.conv_out", "conv", first, self.channels))

    def sites(self) -> tuple[LayerSite, ...]:
        return self._sites

    def _middle(self, side: str, width: int, level: int) -> list[LayerSite]:
        """The blocks at the smallest level."""
        name = f"{side}.mid_block"
        sites = [*resnet_sites(f"{name}.resnets.0", width, width, level)]
        if self.attention:
            sites.append(LayerSite(f"{name}.attentions.0.group_norm", "norm", width, width))
            layers = ("to_q", "to_k", "to_v", "to_out.0")
            sites += [LayerSite(f"{name}.attentions.0.{layer}", "linear", width, width, level=level) for layer in layers]
        return [*sites, *resnet_sites(f"{name}.resnets.1", width, width, level)]

    def maps_flops(self, tokens: int) -> int:
        """FLOPs of `AutoencoderKL.maps` for an image of `tokens` pixels."""
        return site_flops((s for s in self._sites if s.name.startswith(("encoder.conv_in", "encoder.down_blocks."))), tokens)

    def mixing_flops(self, tokens: int) -> int:
        positions = tokens // 4 ** (len(self.widths) - 1)
        return 2 * 4 * positions * positions * self.widths[-1] if self.attention else 0

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """The module. Its layers are no stack: `run` says what is computed again, and no more."""
        from argosy.models.blocks.autoencoder_kl import AutoencoderKL

        return AutoencoderKL(self, "none" if run is None else run.remat)
