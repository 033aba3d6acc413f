"""Combines a denoiser with the ControlNets that steer it."""

from collections.abc import Sequence
from typing import Any

from argosy.models.blocks.controlnets.mmdit import ControlledMMDiT
from argosy.models.blocks.controlnets.unet import ControlledUNet
from argosy.models.diffusion.unet import UNetConfig


def with_controlnets(denoiser: Any, controlnets: Sequence[Any]) -> Any:
    """Returns a module that is called like the denoiser, and also reads control images (`Conditions.control`)."""
    return (ControlledUNet if isinstance(denoiser.config, UNetConfig) else ControlledMMDiT)(denoiser, controlnets)
