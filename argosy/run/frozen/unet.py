"""The UNet that a ControlNet learns to steer: that of `encoders.pipeline`, frozen, with its weights on the devices in every step."""

from pathlib import Path
from typing import Any

from argosy.checkpoint.run_directory import RunDirectory
from argosy.core.progress import Say
from argosy.infer.denoise.control import check_controlnet
from argosy.infer.denoise.folder import opened_unet
from argosy.run.frozen.stored import FrozenModel
from argosy.train.objectives.images.controlnet import UNET


class SteeredUNet(FrozenModel):
    """The UNet that a run's ControlNet steers.

    Raises:
        BadInput, Damaged: there is none, or it is not the one of this ControlNet.
    """

    def __init__(self, run: Any, decided: Any, mesh: Any):
        folder = Path(str(run.encoders.pipeline))
        stored, config = opened_unet(folder)
        super().__init__(run, decided, mesh, stored, config)
        self.name = str(folder / "unet")
        check_controlnet(run.model, config, config.pixels)

    def settle(self, assembly: Any, directory: RunDirectory, say: Say) -> None:
        """Reads the weights, before the run's first step.

        Raises:
            BadInput: the UNet is gone, or it has changed since the run began.
        """
        _, stored = self.same(self.name, directory, say, "the UNet that this run's ControlNet steers")
        say(f"UNet {self.name}, {self.config.parameters():,} parameters, frozen")
        assembly.frozen[UNET] = self.read(stored)
