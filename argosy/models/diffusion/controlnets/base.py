"""`ControlNetSettings`: what the settings of every ControlNet have."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.models.base.config import InputKind, ModelConfig
from argosy.models.diffusion.base import ImageSpace


class ControlNetSettings(ModelConfig):
    """Settings of a network that reads a control image beside a denoiser and steers it."""

    inputs: ClassVar[InputKind] = "images"
    # The settings of denoisers that it steers, and what these are called in errors.
    steers: ClassVar[type]
    steered: ClassVar[str]
    # Settings that it has from the denoiser whose copy it begins as.
    copied: ClassVar[tuple[str, ...]]
    # Settings that must be those of a denoiser that it steers.
    compared: ClassVar[tuple[str, ...]]
    # Whether it reads latents of control images, or their pixels.
    reads_latents: ClassVar[bool] = True
    # Whether its effect on details may be weaker than on the whole (guess mode).
    guesses: ClassVar[bool] = False

    @classmethod
    def of_denoiser(cls, denoiser: Any) -> Any:
        """The ControlNet that steers a denoiser and begins as a copy of its layers."""
        raise NotImplementedError

    def check_copy(self, denoiser: Any) -> None:
        """Checks that it can begin as a copy of a denoiser's layers.

        Raises:
            BadInput: it has more layers.
        """
        for name, most in self.most_layers(denoiser).items():
            if (count := getattr(self, name)) > most:
                problem = f"model.{name} = {count}: a ControlNet begins as a copy of at most {most} of this model's"
                raise BadInput(problem, hint=f"model.{name}={most}")

    @staticmethod
    def most_layers(denoiser: Any) -> dict[str, int]:
        """How many layers of each kind may be copied, by the names of the settings; empty where all are."""
        return {}

    @property
    def residual_count(self) -> int:
        """Number of arrays that it adds to the denoiser."""
        raise NotImplementedError

    @property
    def factor(self) -> int:
        """What it reads of a control image is so many times as high and wide as the latents."""
        return 1

    @property
    def id_spaces(self) -> ImageSpace:
        config: Any = self
        return ImageSpace(config.channels, config.size_multiple, 0)
