"""Frozen models of a diffusers folder that every step of a run reads: the denoiser that a ControlNet learns to steer, or the UNet and
the text encoders that read a learned token. Their weights are on the devices."""

from pathlib import Path
from typing import Any

from argosy.checkpoint.open import open_model
from argosy.checkpoint.run_directory import TEACHER, RunDirectory
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.infer.denoise.control import check_controlnet
from argosy.infer.denoise.trained_parts import open_denoiser, open_unet
from argosy.models.clip import ClipTextConfig
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.run.frozen.perceptual_net import PerceptualNet
from argosy.run.frozen.stored import FrozenModel
from argosy.train.objectives.images.controlnet import STEERED
from argosy.train.objectives.images.perceptual import PERCEPTUAL
from argosy.train.objectives.images.textual_inversion import UNET


class FrozenPart(FrozenModel):
    """A frozen model of the diffusers folder that a run names in `encoders.pipeline`.

    Args:
        part: the subfolder of the model.
        record: the file in the run directory that describes the model.
        steered: whether the run trains a ControlNet that steers the model.
    """

    def __init__(self, run: Any, decided: Any, mesh: Any, stored: Any, config: Any, part: str, record: str, steered: bool = False):
        super().__init__(run, decided, mesh, stored, config)
        self.part, self.record, self.steered = part, record, steered
        # Gradients reach what is trained through it.
        self.remat = run.execution.recompute
        self.name = str(Path(str(run.encoders.pipeline)) / part)

    def settle(self, assembly: Any, directory: RunDirectory, say: Say) -> None:
        """Reads the weights before the first step.

        Raises:
            BadInput: the model no longer exists, or has changed since the run began.
        """
        noun = "UNet" if self.part == UNET else self.part
        role = f"the {noun} that this run's ControlNet steers" if self.steered else f"the {self.part} that reads this run's token"
        _, stored = self.same(self.name, directory, say, role, self.record)
        say(f"{noun} {self.name}, {self.config.parameters():,} parameters, frozen")
        assembly.frozen[STEERED if self.steered else self.part] = self.read(stored)


def frozen_parts(run: Any, decided: Any, mesh: Any) -> "dict[str, FrozenPart | PerceptualNet]":
    """Opens the frozen models that the objective of an image model needs, by role. Returns an empty mapping if it needs none.

    Raises:
        BadInput, Damaged: a model is missing, or does not fit the trained model.
    """
    if PERCEPTUAL in run.objective.roles:
        return {PERCEPTUAL: PerceptualNet(run, decided, mesh)}
    folder = Path(str(run.encoders.pipeline))
    if STEERED in run.objective.roles:
        part, stored, config = open_denoiser(folder)
        check_controlnet(run.model, config, getattr(config, "pixels", 1))
        return {STEERED: FrozenPart(run, decided, mesh, stored, config, part, TEACHER, steered=True)}
    if UNET not in run.objective.roles:
        return {}
    stored, config = open_unet(folder)
    parts: dict[str, FrozenPart | PerceptualNet] = {UNET: FrozenPart(run, decided, mesh, stored, config, UNET, TEACHER)}
    if isinstance(run.model, LearnedEmbeddingsConfig):
        check_latents(run.model, config)
        for name, width in zip(run.model.encoders, run.model.widths, strict=True):
            encoder: Any = open_model(folder / name)
            if not isinstance(encoder.config, ClipTextConfig) or encoder.config.width != width:
                problem = f"{folder / name} is a {type(encoder.config).__name__} of width {getattr(encoder.config, 'width', None)}"
                raise BadInput(f"{problem}, and the learned rows are of width {width}", hint="another dir=, or the folder as it was")
            parts[name] = FrozenPart(run, decided, mesh, encoder, encoder.config, name, f"{name}.json")
    return parts


def check_latents(learned: LearnedEmbeddingsConfig, unet: Any) -> None:
    """Checks that the settings of a run's learned embeddings fit the latents of a UNet.

    Raises:
        BadInput: they do not fit.
    """
    for name, ours, theirs in (("channels", learned.channels, unet.channels), ("multiple", learned.multiple, unet.size_multiple)):
        if ours != theirs:
            raise BadInput(f"model.{name} = {ours}, and the UNet's is {theirs}", hint="model=FOLDER sets it")
