"""ControlNets of Stable Diffusion 3 and 3.5: a copy of some of the model's layers that reads a control image's latents and steers it.

    image tokens = P latents + positions + E control          E: from patches of the control image's latents
    r_i = Z_i (image after layer i)
    a model with L layers adds r_(i R / L) after layer i, with R the number of r, but none after the last layer

E and Z are initialized to zero, so that before training the model's output is unchanged. ControlNets of InstantX read no pooled text.
ControlNets of Stability AI for 3.5 large read no text, and read the tokens that the model itself computes from latents. The format is
diffusers' SD3ControlNetModel. ControlNets for inpainting are not supported. Zhang et al. 2023 (arXiv:2302.05543).

R width of a residual. The other letters are those of the model (`models.diffusion.sd3`).
"""

from typing import Any, ClassVar

from pydantic import Field

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.sd3 import SD3Config, SD3LayersConfig
from argosy.models.hub.controlnets import SD3ControlNetHub

# The number of layers that are copied, as in diffusers' `SD3ControlNetModel.from_transformer`. The last layer, which computes no text,
# is never copied.
COPIED = 12


class SD3ControlNetConfig(SD3ControlNetHub, ControlNetSettings, SD3LayersConfig):
    """A ControlNet of Stable Diffusion 3 and 3.5."""

    steers: ClassVar[type] = SD3Config
    steered: ClassVar[str] = "Stable Diffusion 3 and 3.5"
    copied: ClassVar[tuple[str, ...]] = (
        "channels", "patch", "heads", "head_size", "text_width", "pooled_width", "text_tokens", "waves", "size", "grid", "qk_norm",
        "dual_layers",
    )  # fmt: skip
    compared: ClassVar[tuple[str, ...]] = ("channels", "patch", "width", "text_width", "pooled_width")

    text_width: int | None = Field(None, gt=0)  # pyright: ignore[reportIncompatibleVariableOverride]
    """Width of the text encoder's states S. None: it reads no text, and its layers are of the image alone."""
    positions: bool = True
    """Whether it makes tokens of latents itself, with its own table of positions. Otherwise it reads those of the model."""
    zero_pooled: bool = False
    """Whether it reads zeros in place of the pooled text (InstantX), and latents of control images are not shifted, as in diffusers."""

    @classmethod
    def of_denoiser(cls, denoiser: Any) -> Any:
        fields = {name: getattr(denoiser, name) for name in cls.copied}
        return cls(**fields, layers=max(1, min(COPIED, *cls.most_layers(denoiser).values())))

    @staticmethod
    def most_layers(denoiser: Any) -> dict[str, int]:
        return {"layers": denoiser.layers - 1}

    @classmethod
    def examples(cls) -> dict[str, Any]:
        plain = cls.of_denoiser(SD3Config.examples()["sd3.5"])
        alone = {"text_width": None, "positions": False, "layers": 2}
        return {"text": plain, "alone": plain.model_copy(update=alone)}

    @property
    def residual_count(self) -> int:
        return self.layers

    @property
    def dims(self) -> dict[str, int]:
        return {letter: size for letter, size in super().dims.items() if size is not None} | {"R": self.width}

    @property
    def conditions(self) -> frozenset[str]:
        return frozenset(["pooled"]) if self.text_width is None else super().conditions

    @property
    def normalizes(self) -> bool:
        # Layers over image tokens only have no norms on queries and keys, whatever the settings say.
        return self.qk_norm and self.text_width is not None

    @property
    def second_layers(self) -> tuple[int, ...]:
        # `dual_layers` may name layers that the model has and the ControlNet does not.
        return tuple(i for i in self.dual_layers if i < self.layers) if self.text_width is not None else ()

    @property
    def text_layers(self) -> tuple[range, range]:
        return range(0 if self.text_width is None else self.layers), range(0)

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer: the structure of its weights."""
        if self.text_width is None:
            return ["alone"] * self.layers
        return ["dual" if i in self.second_layers else "block" for i in range(self.layers)]

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module."""
        from argosy.models.blocks.controlnets.sd3 import SD3ControlNet

        return SD3ControlNet(self, run)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return self.tensor_rows()

    def mixing_flops(self, tokens: int) -> int:
        alone = 4 * self.width * self.layers * tokens**2
        return alone if self.text_width is None else super().mixing_flops(tokens)
