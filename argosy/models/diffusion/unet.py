"""The UNet of Stable Diffusion 1, 2 and XL: convolutions at several levels, each with attention to the text.

    down: resnet, (transformer), halve      middle: resnet, transformer, resnet      up: join what "down" left, resnet, (transformer)
    resnet(x) = x + conv silu norm (conv silu norm x + P silu c)        c = time step (+ pooled text and sizes, in XL)
    transformer(x): h = x + self(norm x); h += cross(norm h, text); h += gated(norm h)

Ronneberger et al. 2015 (arXiv:1505.04597); Rombach et al. 2021 (arXiv:2112.10752); Podell et al. 2023 (SDXL, arXiv:2307.01952). It is
trained with betas: what it predicts is written in the settings of its scheduler.
"""

from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.diffusion.base import DenoiserConfig, Prediction
from argosy.models.hub.nets import LayerSite, resnet_sites, site_flops, site_rows
from argosy.models.hub.unet import UNetHub


class UNetConfig(UNetHub, DenoiserConfig):
    """The UNet of Stable Diffusion (arXiv:2112.10752)."""

    pipeline_part: ClassVar[str] = "unet"
    pipeline_settings: ClassVar[tuple[str, ...]] = ("prediction", "pixels")
    adapted: ClassVar[str | None] = r".*transformer_blocks\.\d+\.(attn[12]|ff)\..*"

    prediction: Prediction = "epsilon"
    """What the output predicts: epsilon, or v in Stable Diffusion 2 at 768 pixels."""
    size: int = Field(64, gt=0)
    """Height and width of the latents that the model was made for: the default size of images."""
    widths: tuple[int, ...] = Field(min_length=1)
    """Channels of each level. Height and width are halved between levels."""
    transformers: tuple[int, ...]
    """Layers of each transformer at each level; 0 for a level without any."""
    middle_transformer: int = Field(1, gt=0)
    """Layers of the transformer in the middle."""
    heads: tuple[int, ...]
    """Heads of attention at each level."""
    layers: int = Field(2, gt=0)
    """Residual blocks of a level on the way down; on the way up it has one more."""
    groups: int = Field(32, gt=0)
    """Groups of channels that are normalized together."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in norms of residual blocks."""
    text_width: int = Field(gt=0)
    """Width of the text encoder's states."""
    text_tokens: int = Field(77, gt=0)
    """Tokens of a prompt that FLOPs count."""
    linear: bool = False
    """Whether transformers begin and end with a linear layer (2 and XL), or a convolution of one tap (1)."""
    pooled_width: int | None = Field(None, gt=0)
    """Width of the text's one vector (XL). None: it is not read."""
    size_waves: int = Field(256, gt=0, multiple_of=2)
    """Cosines and sines of each of the six sizes that XL reads."""
    pixels: int = Field(8, gt=0)
    """Pixels of an image for each latent, in each direction."""

    @model_validator(mode="after")
    def _levels_agree(self) -> "UNetConfig":
        if not len(self.widths) == len(self.transformers) == len(self.heads):
            raise ValueError("widths, transformers and heads need one number for each level")
        for width, heads in zip(self.widths, self.heads, strict=True):
            if width % self.groups or width % heads:
                raise ValueError(f"widths: {width} is no multiple of groups = {self.groups} and of its {heads} heads")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"channels": 3, "widths": (4, 8), "groups": 2, "layers": 1, "text_width": 10, "text_tokens": 5, "size": 8}
        return {
            "sd": cls(**odd, transformers=(1, 0), heads=(2, 2)),
            "xl": cls(**odd, transformers=(0, 2), heads=(1, 4), middle_transformer=2, linear=True, pooled_width=9, size_waves=6),
        }

    @property
    def conditions(self) -> frozenset[str]:
        return frozenset(["text"]) | (frozenset() if self.pooled_width is None else frozenset(["pooled"]))

    @property
    def size_multiple(self) -> int:
        return 2 ** (len(self.widths) - 1)

    @property
    def dims(self) -> dict[str, int]:
        return site_rows(self._sites)[1]

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return site_rows(self._sites)

    def sites(self) -> tuple[LayerSite, ...]:
        """The layers, with their levels."""
        return self._sites

    @cached_property
    def _sites(self) -> tuple[LayerSite, ...]:
        w, last = self.widths, len(self.widths) - 1
        time = 4 * w[0]
        sites = [LayerSite("conv_in", "conv", self.channels, w[0])]
        sites += embedder_sites("time_embedding", w[0], time)
        if self.pooled_width is not None:
            sites += embedder_sites("add_embedding", self.pooled_width + 6 * self.size_waves, time)
        at = w[0]
        for level, width in enumerate(w):
            name = f"down_blocks.{level}"
            for j in range(self.layers):
                sites += resnet_sites(f"{name}.resnets.{j}", at, width, level, time)
                sites += self._transformer(f"{name}.attentions.{j}", width, level, self.transformers[level])
                at = width
            if level < last:
                sites.append(LayerSite(f"{name}.downsamplers.0.conv", "conv", width, width, stride=2, level=level + 1))
        for j in range(2):
            sites += resnet_sites(f"mid_block.resnets.{j}", w[last], w[last], last, time)
        sites += self._transformer("mid_block.attentions.0", w[last], last, self.middle_transformer)
        for i in range(last + 1):
            level, name = last - i, f"up_blocks.{i}"
            for j, (inner, skip) in enumerate(self.up_channels(i)):
                sites += resnet_sites(f"{name}.resnets.{j}", inner + skip, w[level], level, time)
                sites += self._transformer(f"{name}.attentions.{j}", w[level], level, self.transformers[level])
            if level:
                sites.append(LayerSite(f"{name}.upsamplers.0.conv", "conv", w[level], w[level], level=level - 1))
        sites += [LayerSite("conv_norm_out", "norm", w[0], w[0]), LayerSite("conv_out", "conv", w[0], self.channels)]
        return tuple(sites)

    def up_channels(self, i: int) -> list[tuple[int, int]]:
        """Channels that come from below, and from the way down, at each residual block of a level on the way up."""
        level = len(self.widths) - 1 - i
        width, below, above = self.widths[level], self.widths[min(level + 1, len(self.widths) - 1)], self.widths[max(level - 1, 0)]
        return [(below if j == 0 else width, above if j == self.layers else width) for j in range(self.layers + 1)]

    def _transformer(self, name: str, width: int, level: int, layers: int) -> list[LayerSite]:
        if not layers:
            return []
        ends = ("linear", 1) if self.linear else ("conv", 1)
        sites = [LayerSite(f"{name}.norm", "norm", width, width, eps=1e-6)]
        sites.append(LayerSite(f"{name}.proj_in", ends[0], width, width, ends[1], level=level))
        for j in range(layers):
            at = f"{name}.transformer_blocks.{j}"
            sites += [LayerSite(f"{at}.norm{k}", "layer_norm", width, width) for k in (1, 2, 3)]
            for attn, inner, text in (("attn1", width, False), ("attn2", self.text_width, True)):
                sites.append(LayerSite(f"{at}.{attn}.to_q", "linear", width, width, bias=False, level=level))
                for x in "kv":
                    sites.append(LayerSite(f"{at}.{attn}.to_{x}", "linear", inner, width, bias=False, level=level, reads_text=text))
                sites.append(LayerSite(f"{at}.{attn}.to_out.0", "linear", width, width, level=level))
            sites.append(LayerSite(f"{at}.ff.net.0.proj", "linear", width, 8 * width, level=level))
            sites.append(LayerSite(f"{at}.ff.net.2", "linear", 4 * width, width, level=level))
        return [*sites, LayerSite(f"{name}.proj_out", ends[0], width, width, ends[1], level=level)]

    def flops(self, tokens: int) -> int:
        """FLOPs of one forward pass over latents with `tokens` positions at the smallest level."""
        return site_flops(self._sites, tokens * self.size_multiple**2, self.text_tokens) + self.mixing_flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        last = len(self.widths) - 1
        found = [(self.middle_transformer, last)]
        found += [(self.transformers[level] * (2 * self.layers + 1), level) for level in range(last + 1)]
        total = 0
        for count, level in found:
            positions = tokens * 4 ** (last - level)
            total += 4 * count * self.widths[level] * positions * (positions + self.text_tokens)
        return total

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """The module. Its layers are no stack, so there is one way to run them."""
        from argosy.models.blocks.unet import UNet

        return UNet(self)


def embedder_sites(name: str, inner: int, outer: int) -> list[LayerSite]:
    """Two layers on one vector for an image."""
    return [
        LayerSite(f"{name}.linear_1", "vector", inner, outer, level=None),
        LayerSite(f"{name}.linear_2", "vector", outer, outer, level=None),
    ]
