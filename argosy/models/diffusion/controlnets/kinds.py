"""Finds the kind of ControlNet for a denoiser."""

from typing import Any

from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.controlnets.flux import FluxControlNetConfig
from argosy.models.diffusion.controlnets.sd3 import SD3ControlNetConfig
from argosy.models.diffusion.controlnets.unet import ControlNetConfig

CONTROLNETS: tuple[type[ControlNetSettings], ...] = (ControlNetConfig, FluxControlNetConfig, SD3ControlNetConfig)
STEERED_MODELS = "UNets of Stable Diffusion 1, 2 and XL, Flux.1, and Stable Diffusion 3 and 3.5"


def controlnet_kind(denoiser: Any) -> type[ControlNetSettings] | None:
    """Returns the config class of the ControlNets that steer a denoiser with this config. None: there are none."""
    return next((kind for kind in CONTROLNETS if isinstance(denoiser, kind.steers)), None)
