"""Builds the pipeline of a denoiser that a run trained. The run's objective determines the noise schedule, and so the sampler."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from argosy.checkpoint.open import open_model
from argosy.checkpoint.step.load import read_meta
from argosy.core.errors import BadInput
from argosy.core.settings import Choice
from argosy.infer.denoise.autoencoder import ImageAutoencoder
from argosy.infer.denoise.classes import ClassPrompts
from argosy.infer.denoise.encoder_settings import EncoderSettings
from argosy.infer.denoise.encoders import autoencoder_factor, pipeline_around
from argosy.infer.denoise.pipeline import ImageDefaults, ImagePipeline, PromptEncoder
from argosy.infer.denoise.settings import SamplerSettings
from argosy.models.autoencoders.base import AutoencoderConfig
from argosy.models.diffusion.base import DenoiserConfig
from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.models.diffusion.noise import EDMNoise
from argosy.train.objectives import OBJECTIVES
from argosy.train.objectives.images.diffusion import Diffusion
from argosy.weights.build import load_model

STEPS = 20


def sampler_for(model: Any, objective: Any) -> SamplerSettings:
    """The sampler for a model that this objective trained: Euler's method for flows, Heun's for EDM, DDIM for beta schedules.

    Args:
        model: the settings of the denoiser.
    """
    noise = objective.noise_of(model.prediction)
    if "interval" in model.conditions:
        # Such models draw in few steps. With spacing=linspace the last step would have a length of only 1/1000.
        return SamplerSettings(name="euler", noise=noise, prediction="velocity", spacing="trailing")
    if isinstance(noise, EDMNoise):
        return SamplerSettings(name="heun", noise=noise, prediction=model.prediction, levels="karras")
    if model.prediction == "velocity":
        return SamplerSettings(name="euler", noise=noise, prediction="velocity")
    return SamplerSettings(name="ddim", noise=noise, prediction=model.prediction, spacing="trailing")


def pipeline_of(
    module: Any,
    objective: Any,
    sample: Mapping[str, Any],
    encoders: EncoderSettings,
    size: tuple[int, int] | None = None,
    prompts: PromptEncoder | None = None,
    dtype: Any = None,
    say: Callable[[str], None] | None = None,
) -> ImagePipeline:
    """Builds the pipeline of a denoiser.

    Args:
        module: the module of the denoiser.
        objective: the objective that trained it.
        sample: the run's settings `sample`: the default `steps` and `guidance`.
        encoders: the run's settings `encoders`.
        size: the default height and width of images in pixels; None: those that the model was made for.
        prompts: converts prompts to conditions in place of the text encoders, which are then not loaded.
        dtype: the type of the encoders' weights and activations.
    """
    config = module.config
    factor = autoencoder_factor(encoders)
    side = factor * getattr(config, "size", config.size_multiple)
    defaults = ImageDefaults(int(sample.get("steps", STEPS)), float(sample.get("guidance", 1.0)), size or (side, side))
    if prompts is None and not encoders.reads_text:
        prompts = ClassPrompts(config.classes_known)
    return pipeline_around(
        module, encoders, sampler=sampler_for(config, objective), prompts=prompts, defaults=defaults, dtype=dtype, say=say
    )


def load_images(path: str | Path, dtype: Any = None, warn: Callable[[str], None] = lambda _: None) -> ImagePipeline | ImageAutoencoder:
    """Loads the pipeline of a run that trained a denoiser; or an autoencoder, from a run or a folder.

    Raises:
        BadInput, Damaged: as `load_pipeline`.
    """
    stored = open_model(path, warn)
    if isinstance(stored.config, AutoencoderConfig):
        return ImageAutoencoder(load_model(stored, dtype=dtype).module)
    return load_pipeline(path, dtype, warn)


def load_pipeline(path: str | Path, dtype: Any = None, warn: Callable[[str], None] = lambda _: None) -> ImagePipeline:
    """Loads the pipeline of a run, at its last good checkpoint, or of one checkpoint.

    Raises:
        BadInput, Damaged: there is no good checkpoint, it is of no denoiser, or the run's encoders are not where they were.
    """
    stored = open_model(path, warn)
    if isinstance(stored.config, ControlNetSettings):
        problem = f"{path} is a ControlNet, which steers another model"
        raise BadInput(problem, hint=f"argosy.load(FOLDER, controlnet={path}); argosy generate FOLDER ... controlnet={path}")
    if isinstance(stored.config, LearnedEmbeddingsConfig):
        problem = f"{path} has learned embeddings, which the text encoder of another model reads"
        raise BadInput(problem, hint=f"argosy.load(FOLDER, embeddings={path}); argosy generate FOLDER ... embeddings={path}")
    if not isinstance(stored.config, DenoiserConfig):
        raise BadInput(f"{path} is an autoencoder, which draws nothing", hint=f"encoders.autoencoder={path} trains a denoiser on it")
    settings = read_meta(stored.path).get("settings") or {}
    objective = Choice(OBJECTIVES).build(settings["objective"]) if "objective" in settings else Diffusion()
    encoders = EncoderSettings(**settings.get("encoders") or {})
    module = load_model(stored, dtype=dtype).module
    return pipeline_of(module, objective, settings.get("sample") or {}, encoders, dtype=dtype, say=warn)
