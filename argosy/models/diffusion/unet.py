"""The UNet of Stable Diffusion 1, 2 and XL: convolutions at several levels, each with attention to the text.

    down: resnet, (transformer), halve      middle: resnet, transformer, resnet      up: concatenate skip, resnet, (transformer)
    resnet(x) = x + conv silu norm (conv silu norm x + P silu c)        c = time step (+ pooled text and sizes, in XL)
    transformer(x): h = x + self(norm x); h += cross(norm h, text); h += gated(norm h)

Ronneberger et al. 2015 (arXiv:1505.04597); Rombach et al. 2021 (arXiv:2112.10752); Podell et al. 2023 (SDXL, arXiv:2307.01952). UNets
are trained with a beta schedule (`noise.BetaNoise`). In diffusers' format, the scheduler's settings say what the UNet predicts.
"""

from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from argosy.models import parts
from argosy.models.diffusion.base import DenoiserConfig, Prediction
from argosy.models.diffusion.unet_encoder import UNetEncoderConfig
from argosy.models.hub.nets import LayerSite, resnet_sites
from argosy.models.hub.unet import UNetHub


class UNetConfig(UNetHub, UNetEncoderConfig, DenoiserConfig):
    """The UNet of Stable Diffusion (arXiv:2112.10752)."""

    pipeline_part: ClassVar[str] = "unet"
    pipeline_settings: ClassVar[tuple[str, ...]] = ("prediction", "pixels")
    adapted: ClassVar[str | None] = r".*transformer_blocks\.\d+\.(attn[12]|ff)\..*"

    prediction: Prediction = "epsilon"
    """What the output predicts: epsilon, or v in Stable Diffusion 2 at 768 pixels."""
    size: int = Field(64, gt=0)
    """Height and width of the latents that the model was made for: the default size of images."""
    pixels: int = Field(8, gt=0)
    """Pixels of an image for each latent, in each direction."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"channels": 3, "widths": (4, 8), "groups": 2, "layers": 1, "text_width": 10, "text_tokens": 5, "size": 8}
        return {
            "sd": cls(**odd, transformers=(1, 0), heads=(2, 2)),
            "xl": cls(**odd, transformers=(0, 2), heads=(1, 4), middle_transformer=2, linear=True, pooled_width=9, size_waves=6),
        }

    def sites(self) -> tuple[LayerSite, ...]:
        return self._sites

    @cached_property
    def _sites(self) -> tuple[LayerSite, ...]:
        w, last = self.widths, len(self.widths) - 1
        sites, time = self.encoder_sites(), 4 * w[0]
        for i in range(last + 1):
            level, name = last - i, f"up_blocks.{i}"
            for j, (inner, skip) in enumerate(self.up_channels(i)):
                sites += resnet_sites(f"{name}.resnets.{j}", inner + skip, w[level], level, time)
                sites += self.transformer_sites(f"{name}.attentions.{j}", w[level], level, self.transformers[level])
            if level:
                sites.append(LayerSite(f"{name}.upsamplers.0.conv", "conv", w[level], w[level], level=level - 1))
        sites += [LayerSite("conv_norm_out", "norm", w[0], w[0]), LayerSite("conv_out", "conv", w[0], self.channels)]
        return tuple(sites)

    def up_channels(self, i: int) -> list[tuple[int, int]]:
        """Returns the input channels of each residual block of up level i: those from the block before, and those of the skip."""
        level = len(self.widths) - 1 - i
        width, below, above = self.widths[level], self.widths[min(level + 1, len(self.widths) - 1)], self.widths[max(level - 1, 0)]
        return [(below if j == 0 else width, above if j == self.layers else width) for j in range(self.layers + 1)]

    def mixing_flops(self, tokens: int) -> int:
        return self._mixing(tokens, 2 * self.layers + 1)

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module. Its layers are no stack, so there is one way to run them."""
        from argosy.models.blocks.unet import UNet

        return UNet(self)
