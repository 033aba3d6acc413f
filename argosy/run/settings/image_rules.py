"""The rules between the settings of a run that trains an image model. Each function yields a sentence for each rule that does not
hold."""

from collections.abc import Iterator
from typing import Any

from argosy.models.autoencoders.base import AutoencoderConfig
from argosy.models.diffusion.base import DenoiserConfig
from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.models.vgg import USE
from argosy.train.objectives.images.autoencode import Autoencode
from argosy.train.objectives.images.controlnet import ControlNetDiffusion
from argosy.train.objectives.images.dreambooth import DreamBooth
from argosy.train.objectives.images.edm import EDM
from argosy.train.objectives.images.textual_inversion import TextualInversion


def broken_by_conditions(run: Any) -> Iterator[str]:
    """Checks that the conditions which a denoiser reads are those that its objective provides."""
    if run.model.inputs != "images":
        return
    if isinstance(run.model, ControlNetSettings) or isinstance(run.objective, ControlNetDiffusion):
        yield from _broken_by_control(run)
        return
    if isinstance(run.model, LearnedEmbeddingsConfig) or isinstance(run.objective, TextualInversion):
        yield from _broken_by_learned_token(run)
        return
    if not isinstance(run.model, AutoencoderConfig | DenoiserConfig):
        yield f"the model is a net of features, which is not trained: {USE}"
        return
    if isinstance(run.model, AutoencoderConfig) != isinstance(run.objective, Autoencode):
        kind, other = ("an autoencoder", "autoencode") if isinstance(run.model, AutoencoderConfig) else ("a denoiser", "diffusion")
        yield f"the model is {kind}, which objective={other} trains"
        return
    if isinstance(run.model, AutoencoderConfig):
        return
    read, conditions = set(run.model.conditions), run.objective.conditions
    if "interval" in read and "interval" not in conditions:
        yield "model.intervals is for objective=mean_flow, which trains what reads them"
        return
    if "interval" in conditions and "interval" not in read:
        yield "objective=mean_flow trains models that read intervals: model.family=dit model.intervals=true"
        return
    if run.objective.needs.forward and run.execution.products == "amx":
        yield "objective=mean_flow differentiates the model forward, which execution.products=amx does not: xla"
    if run.objective.needs.forward and run.execution.attention not in (None, "reference"):
        name = run.execution.attention
        yield f"objective=mean_flow differentiates the model forward, which execution.attention={name} does not: reference"
    if "interval" in conditions and run.model.prediction != "velocity":
        yield f"objective=mean_flow trains velocities, and model.prediction = {run.model.prediction}"
    if isinstance(run.objective, EDM) and run.model.prediction not in ("edm", "v"):
        yield f"objective=edm trains model.prediction=edm or v, and it is {run.model.prediction}"
    if isinstance(run.objective, EDM) and run.objective.min_snr is not None:
        yield "objective.min_snr is not for objective=edm, whose loss weighs all levels alike: leave it out"
    if isinstance(run.objective, EDM) and "betas" in run.objective.model_fields_set:
        yield "objective.betas is not for objective=edm: objective.noise"
    if run.model.prediction == "edm" and not isinstance(run.objective, EDM):
        yield "model.prediction = edm is for objective=edm"
    if missing := sorted(read - conditions):
        yield f"the model reads {' and '.join(missing)}, and objective.condition = {run.objective.condition} gives none"
    if not read & conditions and conditions:
        yield f"objective.condition = {run.objective.condition}, and the model does not read it: objective.condition=none"


def _broken_by_control(run: Any) -> Iterator[str]:
    """Checks that a ControlNet is trained by its objective, with the denoiser of a diffusers folder."""
    if not isinstance(run.model, ControlNetSettings):
        yield "objective=controlnet trains a ControlNet for the denoiser of a diffusers folder: model=FOLDER"
    elif not isinstance(run.objective, ControlNetDiffusion):
        yield "the model is a ControlNet, which objective=controlnet trains"
    elif run.encoders.pipeline is None:
        yield "encoders.pipeline is missing, whose denoiser the ControlNet steers: model=FOLDER of diffusers sets it"
    if not run.adapter.trains_base:
        yield "adapters on a ControlNet are not built: adapter=none"
    if run.mesh.splits("stage"):
        yield "objective=controlnet with mesh.stage is not built: mesh.fsdp and mesh.tensor split its layers"
    if (modes := getattr(run.model, "modes", None)) is not None:
        yield f"model.modes = {modes}: training of unions of several kinds of control is not built: model.modes=null"
    if getattr(run.model, "text_width", 1) is None or not getattr(run.model, "positions", True):
        yield "training of ControlNets without text or positions of their own is not built: model.text_width and model.positions=true"


def _broken_by_learned_token(run: Any) -> Iterator[str]:
    """Checks that learned embeddings are trained by their objective, with the models of a diffusers folder."""
    if not isinstance(run.model, LearnedEmbeddingsConfig):
        yield "objective=textual_inversion trains a token for the text encoders of a diffusers folder: model=FOLDER"
    elif not isinstance(run.objective, TextualInversion):
        yield "the model is a learned token, which objective=textual_inversion trains"
    elif run.encoders.pipeline is None:
        yield "encoders.pipeline is missing, whose text encoders read the token: model=FOLDER of diffusers sets it"
    if run.encoders.text:
        yield "encoders.text takes the place of the text encoders that the token is for: leave it out"
    if run.data.image.caption is not None:
        yield "data.image.caption: prompts come from objective.templates"
    if not run.adapter.trains_base:
        yield "adapters on learned embeddings are not built: adapter=none"


def broken_by_encoders(run: Any) -> Iterator[str]:
    """Checks that captions have text encoders, and that only image models have encoders."""
    if run.model.inputs != "images":
        if run.encoders.used:
            yield "encoders are for models of images"
        return
    if isinstance(run.model, AutoencoderConfig):
        if run.encoders.used:
            yield "encoders are for denoisers"
        return
    captions = "text" in run.objective.conditions
    if isinstance(run.objective, TextualInversion):
        return
    if run.data.image.caption is not None and not captions:
        yield "data.image.caption is for models that read captions: objective.condition=text"
    # Data that is not read has states of captions without an encoder: `argosy plan`.
    if captions and not run.encoders.reads_text and run.data.source != "synthetic":
        hint = "encoders.pipeline=FOLDER of diffusers, or encoders.text=FOLDER of an encoder"
        yield f"objective.condition = text, and nothing reads the captions: {hint}"
    if isinstance(run.objective, DreamBooth) and run.data.image.buckets is not None:
        yield "pairs of a subject and its class are of one size: leave data.image.buckets out"
    if run.encoders.text and not captions:
        yield "encoders.text reads captions, and objective.condition=text is not set"
