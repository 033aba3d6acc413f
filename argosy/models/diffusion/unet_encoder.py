"""`UNetEncoderConfig`: the settings of the down and middle blocks, which a UNet and its ControlNets share.

    down: resnet, (transformer), halve      middle: resnet, transformer, resnet

The config classes of both derive from it.
"""

from collections.abc import Sequence

from pydantic import Field, model_validator

from argosy.core.keymap import KeyRow
from argosy.models.base.config import ModelConfig
from argosy.models.hub.nets import LayerSite, resnet_sites, site_flops, site_rows


class UNetEncoderConfig(ModelConfig):
    """Settings of the way down and the middle of a UNet."""

    channels: int = Field(gt=0)
    """Channels of the images or latents C."""
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

    @model_validator(mode="after")
    def _levels_agree(self) -> "UNetEncoderConfig":
        if not len(self.widths) == len(self.transformers) == len(self.heads):
            raise ValueError("widths, transformers and heads need one number for each level")
        for width, heads in zip(self.widths, self.heads, strict=True):
            if width % self.groups or width % heads:
                raise ValueError(f"widths: {width} is no multiple of groups = {self.groups} and of its {heads} heads")
        return self

    @property
    def conditions(self) -> frozenset[str]:
        """The fields of `Conditions` that the model reads."""
        return frozenset(["text"]) | (frozenset() if self.pooled_width is None else frozenset(["pooled"]))

    @property
    def size_multiple(self) -> int:
        """The number that must divide height and width of the inputs."""
        return 2 ** (len(self.widths) - 1)

    @property
    def dims(self) -> dict[str, int]:
        return site_rows(self.sites())[1]

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return site_rows(self.sites())

    def sites(self) -> Sequence[LayerSite]:
        """Returns all layers of the network."""
        raise NotImplementedError

    def encoder_sites(self) -> list[LayerSite]:
        """Returns the layers of the down blocks and the middle block."""
        w, last = self.widths, len(self.widths) - 1
        time = 4 * w[0]
        sites = [LayerSite("conv_in", "conv", self.channels, w[0])]
        sites += _embedder_sites("time_embedding", w[0], time)
        if self.pooled_width is not None:
            sites += _embedder_sites("add_embedding", self.pooled_width + 6 * self.size_waves, time)
        at = w[0]
        for level, width in enumerate(w):
            name = f"down_blocks.{level}"
            for j in range(self.layers):
                sites += resnet_sites(f"{name}.resnets.{j}", at, width, level, time)
                sites += self.transformer_sites(f"{name}.attentions.{j}", width, level, self.transformers[level])
                at = width
            if level < last:
                sites.append(LayerSite(f"{name}.downsamplers.0.conv", "conv", width, width, stride=2, level=level + 1))
        for j in range(2):
            sites += resnet_sites(f"mid_block.resnets.{j}", w[last], w[last], last, time)
        return sites + self.transformer_sites("mid_block.attentions.0", w[last], last, self.middle_transformer)

    def transformer_sites(self, name: str, width: int, level: int, layers: int) -> list[LayerSite]:
        """Returns the layers of a transformer over the positions of a level. Empty if `layers` is 0."""
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
        """Counts the FLOPs of one forward pass over latents with `tokens` positions at the smallest level."""
        return site_flops(self.sites(), tokens * self.size_multiple**2, self.text_tokens) + self.mixing_flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        return self._mixing(tokens, self.layers)

    def _mixing(self, tokens: int, blocks: int) -> int:
        """Counts the FLOPs of attention. `blocks` is the number of transformers at each level, apart from the middle."""
        last = len(self.widths) - 1
        transformers = [(self.middle_transformer, last)]
        transformers += [(self.transformers[level] * blocks, level) for level in range(last + 1)]
        total = 0
        for count, level in transformers:
            positions = tokens * 4 ** (last - level)
            total += 4 * count * self.widths[level] * positions * (positions + self.text_tokens)
        return total


def _embedder_sites(name: str, inner: int, outer: int) -> list[LayerSite]:
    """Returns the two linear layers of an embedder, which reads one vector for each image."""
    return [
        LayerSite(f"{name}.linear_1", "vector", inner, outer, level=None),
        LayerSite(f"{name}.linear_2", "vector", outer, outer, level=None),
    ]
