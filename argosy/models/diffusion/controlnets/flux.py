"""ControlNets of Flux.1: a copy of some of Flux's layers that reads the latents of a control image and steers Flux.

    image tokens = P latents + E control          E: from patches of the control image's latents
    r_i = Z_i (image after double layer i)        s_j = Z_j (image after single layer j)
    Flux with L double layers adds r_(i / ceil(L / R)) after layer i, with R the number of r. Single layers add s in the same way.

A union supports several kinds of control, such as edges and depth: a token for the kind is put before the text. E and Z are initialized
to zero, so that before training Flux's output is unchanged. The format is diffusers' FluxControlNetModel in the layout of InstantX and
Shakker Labs. That of XLabs, which reads pixels, and ControlNets for inpainting are not supported. Zhang et al. 2023 (arXiv:2302.05543).

U kinds of control, R width of a residual. The other letters are Flux's (`models.diffusion.flux`).
"""

from typing import Any, ClassVar

from pydantic import Field

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.flux import FluxConfig, FluxLayersConfig
from argosy.models.hub.controlnets import FluxControlNetHub

# The number of layers of each kind that are copied, as in diffusers' train_controlnet_flux.py.
COPIED = 4


class FluxControlNetConfig(FluxControlNetHub, ControlNetSettings, FluxLayersConfig):
    """A ControlNet of Flux.1."""

    steers: ClassVar[type] = FluxConfig
    steered: ClassVar[str] = "Flux.1"
    copied: ClassVar[tuple[str, ...]] = (
        "channels", "patch", "heads", "head_size", "text_width", "pooled_width", "text_tokens", "waves", "axes", "guided",
    )  # fmt: skip
    compared: ClassVar[tuple[str, ...]] = ("channels", "patch", "width", "text_width", "pooled_width")

    modes: int | None = Field(None, gt=0)
    """Kinds of control that a union knows U. None: it knows one."""

    @classmethod
    def of_denoiser(cls, denoiser: Any) -> Any:
        layers: dict[str, Any] = {name: min(COPIED, most) for name, most in cls.most_layers(denoiser).items()}
        return cls(**{name: getattr(denoiser, name) for name in cls.copied}, **layers)

    @staticmethod
    def most_layers(denoiser: Any) -> dict[str, int]:
        return {"layers": denoiser.layers, "single_layers": denoiser.single_layers}

    @classmethod
    def examples(cls) -> dict[str, Any]:
        examples = {name: cls.of_denoiser(flux) for name, flux in FluxConfig.examples().items()}
        union = examples["schnell"].model_copy(update={"layers": 2, "single_layers": 0, "modes": 3})
        return {"plain": examples["dev"], "union": union}

    @property
    def residual_count(self) -> int:
        return self.layers + self.single_layers

    @property
    def dims(self) -> dict[str, int]:
        return super().dims | {"R": self.width} | ({} if self.modes is None else {"U": self.modes})

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module."""
        from argosy.models.blocks.controlnets.flux import FluxControlNet

        return FluxControlNet(self, run)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return self.tensor_rows()
