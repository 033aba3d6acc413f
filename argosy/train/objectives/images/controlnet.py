"""ControlNet: a copy of a part of a denoiser learns to steer it by control images, while the denoiser stays as it is.

    loss = L of the denoiser with the ControlNet's residuals        L: the error of `diffusion`

Zhang et al. 2023 (arXiv:2302.05543), as diffusers' train_controlnet.py, train_controlnet_flux.py and train_controlnet_sd3.py. The
trained model is the ControlNet, and the denoiser is frozen beside it. `objective.label_dropout` replaces captions by the empty one:
half of them in the paper, so that the ControlNet reads what is to be drawn from the control image.

For Stable Diffusion 3 a new one reads pooled texts and shifted latents, as the denoiser does. diffusers' script zeroes the texts and
does not shift the latents, which is `model.zero_pooled=true`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from argosy.train.objectives.images.diffusion import Diffusion

if TYPE_CHECKING:
    from jaxtyping import Array

    from argosy.data.batch import Fields
    from argosy.models.diffusion.base import Conditions
    from argosy.train.objectives.loss import Loss, Models

STEERED = "denoiser"
"""The role of the frozen denoiser."""


class ControlNetDiffusion(Diffusion):
    """Denoising by a frozen denoiser that a ControlNet steers."""

    condition: Literal["text"] = "text"
    """What the model reads beside the image: captions, and control images."""
    label_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of captions that are replaced by the empty one; 0.5 in the paper."""

    @property
    def roles(self) -> Mapping[str, str]:
        return {STEERED: "online"}

    def reads(self) -> "Fields":
        import numpy as np

        from argosy.data.batch import Field as BatchField

        return {**super().reads(), "control": BatchField("B y x k", np.float32, "row")}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        from argosy.models.blocks.controlnets.controlled import with_controlnets

        return super().__call__({"model": with_controlnets(models[STEERED], [models["model"]])}, batch, key)

    def conditions_of(self, config: Any, batch: "dict[str, Array]", key: Any) -> "Conditions":
        return super().conditions_of(config, batch, key)._replace(control=(batch["control"],))
