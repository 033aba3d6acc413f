"""Reads the settings of a run that trains on a diffusers folder: its denoiser, or a ControlNet or learned embeddings for it."""

from pathlib import Path
from typing import Any

from argosy.checkpoint.open import model_layer, open_model
from argosy.core.errors import BadInput
from argosy.core.settings import dump
from argosy.core.settings.schema import Choice
from argosy.infer.denoise.folder import CONTROLNET, DENOISERS, INDEX, KINDS, SCHEDULER, sd_pipeline, sdxl_pipeline
from argosy.infer.denoise.hub import sampler_of
from argosy.infer.denoise.learned import learned_layer
from argosy.models import FAMILIES
from argosy.models.diffusion.controlnets.kinds import STEERED_MODELS, controlnet_kind
from argosy.models.diffusion.noise import EDMNoise, FlowNoise
from argosy.models.diffusion.unet import UNetConfig
from argosy.weights.hub.config import read_json_object
from argosy.weights.model import OpenedModel

# Objectives that train something other than the denoiser of a diffusers folder, and what they train.
BESIDE = {"controlnet": "a ControlNet", "textual_inversion": "a learned token"}


def open_denoiser(folder: str | Path) -> tuple[str, OpenedModel, Any]:
    """Opens the denoiser of a diffusers folder. Returns the name of its part, the model, and its settings, completed from the folder's
    other parts.

    Raises:
        BadInput, Damaged: as `load_diffusers`, or there is no denoiser.
    """
    path = Path(folder)
    part = next((part for part in DENOISERS if (path / part).is_dir()), None)
    if part is None:
        raise BadInput("a ControlNet is for the denoiser of a pipeline, and this folder has none", where=str(path))
    if part == "unet":
        return part, *open_unet(path)
    stored = open_model(path / part)
    update = {"prediction": sampler_of(read_json_object(path / SCHEDULER)).prediction}
    return part, stored, stored.config.model_copy(update=update)


def open_unet(folder: str | Path, subject: str = "a learned token") -> tuple[OpenedModel, UNetConfig]:
    """Opens the UNet of a diffusers folder. Returns the model, and its settings, completed from the folder's other parts.

    Args:
        subject: the thing that needs a UNet, for error messages.

    Raises:
        BadInput, Damaged: as `load_diffusers`, or its denoiser is no UNet.
    """
    path = Path(folder)
    if not (path / "unet").is_dir():
        raise BadInput(f"{subject} is for the UNet of Stable Diffusion 1, 2 or XL, and this folder has none", where=str(path))
    stored, vae = open_model(path / "unet"), open_model(path / "vae")
    update = {"prediction": sampler_of(read_json_object(path / SCHEDULER)).prediction, "pixels": getattr(vae.config, "factor", 1)}
    if not isinstance(stored.config, UNetConfig):
        raise BadInput(f"unet: the model is a {type(stored.config).__name__}", where=str(path / "unet"))
    return stored, stored.config.model_copy(update=update)


def denoiser_layers(folder: str | Path, objective_name: str = "") -> dict[str, Any]:
    """The settings to be merged for a run with `model=FOLDER`, where the folder is a diffusers folder.

    Args:
        objective_name: the objective. `controlnet` and `textual_inversion` train a ControlNet or learned embeddings for the denoiser;
            others train the denoiser.

    Raises:
        BadInput, Damaged: as `load_diffusers`; or ControlNets or learned embeddings are not built for this model.
    """
    path = Path(folder)
    index = read_json_object(path / INDEX)
    part = next((part for part in DENOISERS if part in index), None)
    if part is None or str(index.get("_class_name")) not in KINDS:
        raise BadInput(f"{INDEX}: the pipeline {index.get('_class_name')} is not built", where=str(path))
    if CONTROLNET in index:
        hint = f"model=FOLDER of the pipeline without it; argosy train controlnet goes on with it: init.weights={path / CONTROLNET}"
        raise BadInput(f"{INDEX}: the pipeline has a ControlNet beside the model to train", where=str(path), hint=hint)
    sampler = sampler_of(read_json_object(path / SCHEDULER))
    update: dict[str, Any] = {"prediction": sampler.prediction}
    if part == "unet":
        vae: Any = open_model(path / "vae").config
        update["pixels"] = vae.factor
    objective: dict[str, Any] = {"condition": "text"}
    if isinstance(sampler.noise, FlowNoise):
        # A shift that depends on the image size is not applied in training.
        objective["timesteps"] = {"name": "logit_normal", "shift": 1.0 if sampler.shift.dynamic else sampler.shift.factor}
    elif isinstance(sampler.noise, EDMNoise):
        objective |= {"name": "edm", "noise": sampler.noise.model_dump(exclude={"kind"})}
    else:
        objective |= {"betas": sampler.noise.model_dump(exclude={"kind"}), "timesteps": {"name": "uniform"}}
    weights = str(path / part)
    init: dict[str, Any] = {"weights": weights}
    model: dict[str, Any]
    if objective_name in BESIDE:
        trained = BESIDE[objective_name]
        if isinstance(sampler.noise, EDMNoise):
            raise BadInput(f"{trained} for a model that was trained with EDM's noise is not built", where=str(path))
        if objective_name == "textual_inversion":
            unet = open_unet(path, trained)[1]
            if KINDS[str(index["_class_name"])].make not in (sd_pipeline, sdxl_pipeline):
                raise BadInput(f"{trained} of {index['_class_name']} is not built", where=str(path))
            model, init = {"family": "learned_embeddings"} | learned_layer(path, unet), {}
        else:
            denoiser = open_denoiser(path)[2]
            if (kind := controlnet_kind(denoiser)) is None:
                problem = f"{trained} of {index['_class_name']} is not built"
                raise BadInput(problem, where=str(path), hint=f"those of {STEERED_MODELS} are")
            controlnet = kind.of_denoiser(denoiser)
            model = {"family": Choice(FAMILIES, tag="family").name_of(controlnet)} | dump(controlnet)
    else:
        model = model_layer(weights) | update
    return {
        "model": model,
        "init": init,
        "encoders": {"pipeline": str(path)},
        "objective": objective,
    }
