"""`ControlNetSettings`: the base class of the settings of ControlNets."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.models.base.config import InputKind, ModelConfig
from argosy.models.diffusion.base import ImageSpace


class ControlNetSettings(ModelConfig):
    """Settings of a network that reads a control image beside a denoiser and steers it."""

    inputs: ClassVar[InputKind] = "images"
    # The config class of the denoisers that it steers, and the name of these denoisers in errors.
    steers: ClassVar[type]
    steered: ClassVar[str]
    # Settings that a new ControlNet takes from the denoiser, since it is initialized as a copy of the denoiser's layers.
    copied: ClassVar[tuple[str, ...]]
    # Settings that must be equal to those of the denoiser.
    compared: ClassVar[tuple[str, ...]]
    # Whether it reads latents of control images. False: it reads their pixels.
    reads_latents: ClassVar[bool] = True
    # Whether it supports diffusers' guess mode, in which its effect on details is weaker than on the whole.
    guesses: ClassVar[bool] = False

    @classmethod
    def of_denoiser(cls, denoiser: Any) -> Any:
        """Returns the settings of a ControlNet that steers this denoiser and is initialized as a copy of the denoiser's layers."""
        raise NotImplementedError

    def check_copy(self, denoiser: Any) -> None:
        """Checks that the ControlNet can be initialized as a copy of a denoiser's layers.

        Raises:
            BadInput: the ControlNet has more layers than may be copied.
        """
        for name, most in self.most_layers(denoiser).items():
            if (count := getattr(self, name)) > most:
                problem = f"model.{name} = {count}: a ControlNet begins as a copy of at most {most} of this model's"
                raise BadInput(problem, hint=f"model.{name}={most}")

    @staticmethod
    def most_layers(denoiser: Any) -> dict[str, int]:
        """Returns how many layers of each kind may be copied, by the name of the setting. Empty if all layers are copied."""
        return {}

    @property
    def residual_count(self) -> int:
        """The number of residuals that the ControlNet computes for the denoiser."""
        raise NotImplementedError

    @property
    def factor(self) -> int:
        """The height and width of the control input, as a multiple of those of the latents."""
        return 1

    @property
    def id_spaces(self) -> ImageSpace:
        config: Any = self
        return ImageSpace(config.channels, config.size_multiple, 0)
