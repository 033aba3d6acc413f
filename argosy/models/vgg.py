"""VGG as a net of features: what its stages say of an image, after the last ReLU of each, as LPIPS compares them.

    x = (image - m) / s        stage l: relu conv, a few times        maps: the last x of each stage, then halved on each side

Simonyan and Zisserman 2014 (arXiv:1409.1556), as torchvision's `vgg16` (and 11, 13, 19, without batch norms); its classifier is
not read. m and s are those of LPIPS (Zhang et al. 2018, arXiv:1801.03924), for images in -1..1. A net may have a weight for each
channel of its maps: LPIPS's linear layers. B batch, H height, W width, C channels of an image, K of a map.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.base.config import InputKind, ModelConfig
from argosy.models.diffusion.base import ImageSpace
from argosy.models.hub.nets import LayerSite, site_flops, site_rows

# A convolution and its ReLU each have a number in torchvision's list of layers, and so has the pooling between stages.
LAYER, POOL = 2, 1
KERNEL = 3
# What a net of features is for.
USE = "argosy train vae objective.perceptual.net=FILE compares an autoencoder's images by its features"
CONVOLUTION = re.compile(r"^features\.(\d+)\.(weight|bias)$")
# Their layers are called `features` too.
OTHER_NETS = "torchvision's vgg16; AlexNet and SqueezeNet, LPIPS's other nets, are not built"


class VGGConfig(ModelConfig):
    """VGG without its classifier (arXiv:1409.1556)."""

    inputs: ClassVar[InputKind] = "images"

    channels: int = Field(3, gt=0)
    """Channels of an image."""
    widths: tuple[int, ...] = Field((64, 128, 256, 512, 512), min_length=1)
    """Channels of each stage. Height and width are halved between stages."""
    depths: tuple[int, ...] = (2, 2, 3, 3, 3)
    """Convolutions of each stage."""
    linear: bool = False
    """Whether each stage has LPIPS's weights of its channels."""

    @model_validator(mode="after")
    def _stages_agree(self) -> "VGGConfig":
        if len(self.widths) != len(self.depths) or min(self.depths) < 1:
            raise ValueError("widths and depths need one number for each stage, of at least one layer")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        return {"plain": cls(widths=(5, 7), depths=(1, 2)), "linear": cls(widths=(6, 4, 9), depths=(2, 1, 3), linear=True)}

    @property
    def smallest_side(self) -> int:
        """The fewest pixels of a side with which every map has a position."""
        return 2 ** (len(self.widths) - 1)

    @property
    def size_multiple(self) -> int:
        """Positions that FLOPs count are pixels."""
        return 1

    @property
    def id_spaces(self) -> ImageSpace:
        return ImageSpace(self.channels, 1, 0)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of each stage's convolutions in torchvision's list of layers."""
        numbers, at = [], 0
        for count in self.depths:
            numbers.append(tuple(at + LAYER * i for i in range(count)))
            at += LAYER * count + POOL
        return tuple(numbers)

    def sites(self) -> tuple[LayerSite, ...]:
        """The layers, each with its level counted from the image."""
        sites, inner = [], self.channels
        for level, (numbers, width) in enumerate(zip(self.stages, self.widths, strict=True)):
            for number in numbers:
                sites.append(LayerSite(f"features.{number}", "conv", inner, width, level=level))
                inner = width
        if self.linear:
            widths = enumerate(self.widths)
            sites += [LayerSite(f"lin{level}.model.1", "conv", width, 1, 1, bias=False, level=level) for level, width in widths]
        return tuple(sites)

    @property
    def dims(self) -> dict[str, int]:
        return site_rows(self.sites())[1]

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return site_rows(self.sites())

    def flops(self, tokens: int) -> int:
        """FLOPs of the maps of an image of `tokens` pixels, and of the weighted sums of their channels."""
        return site_flops(self.sites(), tokens)

    def maps_flops(self, tokens: int) -> int:
        """FLOPs of `VGG.maps` and `VGG.weighted_sum` for an image of `tokens` pixels."""
        return self.flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        return 0

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """The module. Its layers are no stack: `run` says what is computed again, and no more."""
        from argosy.models.blocks.vgg import VGG

        return VGG(self, "none" if run is None else run.remat)


def vgg_settings(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The settings of a VGG with these tensors, in torchvision's names.

    Raises:
        BadInput: it has batch norms, layers of another kind, or kernels of another size.
    """
    if any(name.endswith("running_mean") for name in shapes):
        raise BadInput("a VGG with batch norms is not built", hint="torchvision's vgg16, not vgg16_bn")
    matches = ((CONVOLUTION.match(name), shape) for name, shape in shapes.items() if name.startswith("features."))
    convolutions = {int(match[1]): shape for match, shape in matches if match and match[2] == "weight"}
    others = [name for name in shapes if name.startswith("features.") and not CONVOLUTION.match(name)]
    kernels = {shape[2:] for shape in convolutions.values()}
    if others or kernels != {(KERNEL, KERNEL)}:
        sizes = ", ".join("x".join(map(str, kernel)) or "no axes" for kernel in sorted(kernels))
        problem = f"layers {', '.join(sorted(others)[:3])}" if others else f"kernels of {sizes}"
        raise BadInput(f"{problem}, where those of a VGG are convolutions of {KERNEL}x{KERNEL}", hint=OTHER_NETS)
    stages: list[list[int]] = []
    for number in sorted(convolutions):
        follows = bool(stages) and number - LAYER in convolutions
        stages = [*stages[:-1], [*stages[-1], number]] if follows else [*stages, [number]]
    settings = {
        "channels": shapes["features.0.weight"][1],
        "widths": tuple(convolutions[numbers[-1]][0] for numbers in stages),
        "depths": tuple(map(len, stages)),
        "linear": "lin0.model.1.weight" in shapes,
    }
    if VGGConfig(**settings).stages != tuple(map(tuple, stages)):
        numbers = ", ".join(map(str, sorted(convolutions)))
        raise BadInput(f"convolutions have the numbers {numbers}, which are not those of a VGG", hint="torchvision's vgg16")
    return settings
