"""Tiny autoencoders that were distilled from large ones: TAESD, TAESDXL, TAEF1 and, with pooling blocks, TAEF2.

    block(x) = relu(conv relu conv relu conv x + x)
    pool(x) = x + conv1 relu norm conv1 x                before some blocks of TAEF2, normalized over the whole image

Madebyollin/taesd. Images are -1..1 outside and 0..1 inside; latents are squashed to -3..3 before they are decoded.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.autoencoders.base import AutoencoderConfig
from argosy.models.hub.autoencoders import AutoencoderTinyHub
from argosy.models.hub.nets import LayerSite


class TinyStep(NamedTuple):
    """A step of a tiny autoencoder.

    kind: conv, block or up (twice the size).
    """

    kind: str
    inner: int
    outer: int
    number: int
    level: int
    stride: int = 1
    bias: bool = True
    pools: bool = False


class AutoencoderTinyConfig(AutoencoderTinyHub, AutoencoderConfig):
    """A tiny autoencoder (TAESD)."""

    width: int = Field(64, gt=0)
    """Channels of all inner layers."""
    encoder_blocks: tuple[int, ...] = (1, 3, 3, 3)
    """Blocks of each level of the encoder."""
    decoder_blocks: tuple[int, ...] = (3, 3, 3, 1)
    """Blocks of each level of the decoder, from the smallest on."""
    pools: bool = False
    """Whether the blocks of the smallest level pool over the image (TAEF2)."""
    pool_groups: int = Field(4, gt=0)
    """Groups of channels that pooling blocks normalize together."""
    numbered: int = Field(0, ge=0, le=1)
    """Number of the decoder's first layer in a file: 0 in diffusers' files, 1 in its author's."""
    magnitude: float = Field(3.0, gt=0)
    """Latents are squashed to plus and minus this before they are decoded."""

    @model_validator(mode="after")
    def _levels_agree(self) -> "AutoencoderTinyConfig":
        if len(self.encoder_blocks) != len(self.decoder_blocks):
            raise ValueError("encoder_blocks and decoder_blocks need one number for each level")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"width": 6, "latent_channels": 3}
        return {
            "plain": cls(**odd, encoder_blocks=(1, 2), decoder_blocks=(2, 1), magnitude=2.5),
            "pools": cls(**odd, encoder_blocks=(1, 1, 1), decoder_blocks=(1, 1, 1), pools=True, pool_groups=2, numbered=1),
        }

    @property
    def factor(self) -> int:
        return 2 ** (len(self.encoder_blocks) - 1)

    @cached_property
    def encoder_steps(self) -> tuple[TinyStep, ...]:
        w, last = self.width, len(self.encoder_blocks) - 1
        steps: list[TinyStep] = []
        for level, blocks in enumerate(self.encoder_blocks):
            stride = 2 if level else 1
            steps.append(TinyStep("conv", w if level else self.channels, w, len(steps), level, stride, not level))
            for _ in range(blocks):
                steps.append(TinyStep("block", w, w, len(steps), level, pools=self.pools and level == last))
        return (*steps, TinyStep("conv", w, self.latent_channels, len(steps), last))

    @cached_property
    def decoder_steps(self) -> tuple[TinyStep, ...]:
        w, last = self.width, len(self.decoder_blocks) - 1
        # Number 1 is a ReLU.
        steps = [TinyStep("conv", self.latent_channels, w, 0, last), TinyStep("relu", w, w, 1, last)]
        for i, blocks in enumerate(self.decoder_blocks):
            for _ in range(blocks):
                steps.append(TinyStep("block", w, w, len(steps), last - i, pools=self.pools and not i))
            if i < last:
                steps.append(TinyStep("up", w, w, len(steps), last - i - 1))
                steps.append(TinyStep("conv", w, w, len(steps), last - i - 1, bias=False))
        return (*steps, TinyStep("conv", w, self.channels, len(steps), 0))

    def sites(self) -> tuple[LayerSite, ...]:
        sites: list[LayerSite] = []
        for side, steps in (("encoder", self.encoder_steps), ("decoder", self.decoder_steps)):
            for step in steps:
                name, (i, o, level) = f"{side}.layers.{step.number}", (step.inner, step.outer, step.level)
                if step.kind == "conv":
                    sites.append(LayerSite(name, "conv", i, o, bias=step.bias, stride=step.stride, level=level))
                if step.pools:
                    inner = 4 * step.inner
                    sites.append(LayerSite(f"{name}.pool.0", "conv", i, inner, 1, bias=False, level=level))
                    sites.append(LayerSite(f"{name}.pool.1", "norm", inner, inner))
                    sites.append(LayerSite(f"{name}.pool.3", "conv", inner, i, 1, bias=False, level=level))
                if step.kind == "block":
                    sites += [LayerSite(f"{name}.conv.{j}", "conv", i, o, level=level) for j in (0, 2, 4)]
        return tuple(sites)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        rows, sizes = super().hub_rows()
        return [replace(row, names=self._numbered(str(row.names))) for row in rows], sizes

    def _numbered(self, name: str) -> str:
        side, layers, number, *rest = name.split(".")
        return name if side == "encoder" else ".".join([side, layers, str(int(number) + self.numbered), *rest])

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """The module. Its layers are no stack, so there is one way to run them."""
        from argosy.models.blocks.autoencoder_tiny import AutoencoderTiny

        return AutoencoderTiny(self)
