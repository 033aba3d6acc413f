"""Reads and writes diffusers folders. Their model_index.json names the parts of a pipeline, each of which has its own folder.

    transformer/ (or unet/) vae/ scheduler/ text_encoder/ tokenizer/ text_encoder_2/ tokenizer_2/ ...

A part that the pipeline's class does not have, or whose class is not built, is an error that names it. Parts that were not changed are
written as they were read: scheduler settings and tokenizers byte for byte, tensors in their stored types.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from argosy.checkpoint.open import open_model
from argosy.checkpoint.save import save_model
from argosy.core.errors import BadInput, Damaged, nearest
from argosy.core.progress import Say
from argosy.data.tokenizers.config import read_config
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.denoise.chat_prompts import ChatReader, Flux2Prompts, ZImagePrompts
from argosy.infer.denoise.hub import sampler_of, scheduler_config
from argosy.infer.denoise.learned import LearnedToken, learned_rows
from argosy.infer.denoise.pipeline import ImageDefaults, ImagePipeline, PromptEncoder
from argosy.infer.denoise.prompts import (
    FluxPrompts,
    PromptReader,
    SD3Prompts,
    SDPrompts,
    WanPrompts,
    prompt_length,
)
from argosy.infer.denoise.settings import SamplerSettings
from argosy.weights.build import LoadedModel, as_dtype, load_model
from argosy.weights.hub.config import read_json_object
from argosy.weights.hub.image_lora import UpdatedTensors, image_updates
from argosy.weights.hub.learned_embeddings import LearnedRows
from argosy.weights.hub.single_file import single_file_parts
from argosy.weights.model import OpenedModel

INDEX = "model_index.json"
SCHEDULER = "scheduler/scheduler_config.json"
# The folders of denoisers.
DENOISERS = ("transformer", "unet")
CONTROLNET = "controlnet"
# The classes that model_index.json names for one and for several ControlNets. diffusers writes several only for UNets.
ONE, SEVERAL = "ControlNetModel", "MultiControlNetModel"
# Number of T5 tokens that Stable Diffusion 3 reads.
SD3_TOKENS = 256
# Layers of the text encoder whose outputs Flux.2 reads: of Qwen 3 for klein, of Mistral Small 3 for dev.
FLUX2_LAYERS, FLUX2_DEV_LAYERS = (9, 18, 27), (10, 20, 30)
# The system message before every prompt of Flux.2 dev, as in its training (black-forest-labs/flux2, system_messages.py).
FLUX2_SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object relationships, object\n"
    "attribution and actions without speculation."
)


@dataclass(frozen=True)
class PipelineParts:
    """The parts of a pipeline.

    path: the folder that they were read from.
    index: the contents of its model_index.json.
    models: the loaded models, by the names of their folders.
    sampler: the settings of the folder's scheduler.
    say: called with warnings.
    learned: for each text encoder, the embeddings of each learned token; empty: there are none.
    """

    path: Path
    index: Mapping[str, Any]
    models: Mapping[str, LoadedModel]
    sampler: SamplerSettings
    say: Say | None = field(default=None, compare=False)
    learned: Sequence[LearnedRows] = ()

    @property
    def denoiser(self) -> Any:
        return self.models[next(part for part in DENOISERS if part in self.models)].module

    @property
    def controlnets(self) -> list[Any]:
        return [model.module for part, model in self.models.items() if part.startswith(CONTROLNET)]

    def reader(self, number: int, length: int | None = None) -> PromptReader:
        """Makes the reader of a text encoder, with its tokenizer.

        Args:
            number: 1 for text_encoder, 2 for text_encoder_2 and so on.
            length: number of tokens of a text; None: the tokenizer's `model_max_length`.
        """
        end = "" if number == 1 else f"_{number}"
        module, folder = self.models[f"text_encoder{end}"].module, self.path / f"tokenizer{end}"
        learned = self.learned[number - 1] if self.learned else None
        longest = length or prompt_length(folder, module.config.context)
        return PromptReader(module, load_tokenizer(folder), longest, f"text_encoder{end}", self.say, learned)


def flux_pipeline(parts: PipelineParts) -> ImagePipeline:
    """Flux.1. dev takes the guidance scale as an input; schnell draws in few steps without guidance."""
    config, vae = parts.denoiser.config, parts.models["vae"].module
    prompts = FluxPrompts([parts.reader(1), parts.reader(2, config.text_tokens)])
    side = 128 * vae.config.factor
    defaults = ImageDefaults(28, 3.5, (side, side)) if config.guided else ImageDefaults(4, 1.0, (side, side))
    # diffusers' pipeline sets the noise levels, evenly from 1 to 1/steps.
    sampler = parts.sampler.model_copy(update={"spacing": "trailing"})
    return ImagePipeline(parts.denoiser, prompts, sampler, defaults, vae, say=parts.say, controlnets=parts.controlnets)


def sd3_pipeline(parts: PipelineParts) -> ImagePipeline:
    """Stable Diffusion 3 and 3.5, with T5 or without."""
    config, vae = parts.denoiser.config, parts.models["vae"].module
    t5 = [parts.reader(3, SD3_TOKENS)] if "text_encoder_3" in parts.models else []
    prompts = SD3Prompts([parts.reader(1), parts.reader(2), *t5], config.text_width, SD3_TOKENS)
    side = config.size * vae.config.factor
    more: Any = {"say": parts.say, "controlnets": parts.controlnets}
    return ImagePipeline(parts.denoiser, prompts, parts.sampler, ImageDefaults(28, 7.0, (side, side)), vae, **more)


def z_image_pipeline(parts: PipelineParts) -> ImagePipeline:
    """Z-Image. Turbo has the same folder, and needs `steps=9 guidance=1`."""
    denoiser, vae, encoder = parts.denoiser, parts.models["vae"].module, parts.models["text_encoder"].module
    length, thinks = denoiser.config.text_tokens, {"enable_thinking": True}
    tokenizer, before_last = load_tokenizer(parts.path / "tokenizer"), encoder.config.layers - 1
    prompts = ZImagePrompts([ChatReader(encoder, tokenizer, length, [before_last], "text_encoder", thinks, parts.say)])
    side = 128 * vae.config.factor
    # diffusers' pipeline sets the noise levels, evenly from 1 to 1/steps. Its guidance scale is one lower: 0 means none, and 5 is 6
    # here.
    sampler = parts.sampler.model_copy(update={"spacing": "trailing"})
    return ImagePipeline(denoiser, prompts, sampler, ImageDefaults(50, 6.0, (side, side)), vae, say=parts.say)


def flux2_pipeline(parts: PipelineParts) -> ImagePipeline:
    """Flux.2 klein, either distilled to four steps without guidance, or not distilled."""
    denoiser, encoder = parts.denoiser, parts.models["text_encoder"].module
    length, tokenizer = denoiser.config.text_tokens, load_tokenizer(parts.path / "tokenizer")
    reader = ChatReader(encoder, tokenizer, length, FLUX2_LAYERS, "text_encoder", {"enable_thinking": False}, parts.say)
    return _flux2_pipeline(parts, reader, *((4, 1.0) if parts.index.get("is_distilled") else (50, 4.0)))


def flux2_dev_pipeline(parts: PipelineParts) -> ImagePipeline:
    """Flux.2 dev, which takes the guidance scale as an input."""
    encoder, folder = parts.models["text_encoder"].module, parts.path / "tokenizer"
    options: Any = {"system": FLUX2_SYSTEM, "pads_left": read_config(folder).raw.get("padding_side") == "left"}
    length, tokenizer = parts.denoiser.config.text_tokens, load_tokenizer(folder)
    reader = ChatReader(encoder, tokenizer, length, FLUX2_DEV_LAYERS, "text_encoder", {}, parts.say, **options)
    return _flux2_pipeline(parts, reader, 50, 4.0)


def _flux2_pipeline(parts: PipelineParts, reader: ChatReader, steps: int, guidance: float) -> ImagePipeline:
    denoiser, vae = parts.denoiser, parts.models["vae"].module
    side = 64 * vae.config.factor
    defaults = ImageDefaults(steps, guidance, (side, side))
    # diffusers' pipeline sets the noise levels, evenly from 1 to 1/steps, and the shift.
    shift = parts.sampler.shift.model_copy(update={"empirical": parts.sampler.shift.dynamic})
    sampler = parts.sampler.model_copy(update={"spacing": "trailing", "shift": shift})
    return ImagePipeline(denoiser, Flux2Prompts([reader]), sampler, defaults, vae, say=parts.say)


def wan_pipeline(parts: PipelineParts) -> ImagePipeline:
    """Wan 2.1: videos, or images, which are videos of one frame."""
    if parts.index.get("expand_timesteps"):
        raise BadInput(f"{INDEX}: expand_timesteps, of Wan 2.2, is not built", where=str(parts.path), hint="Wan 2.1 is")
    denoiser, vae = parts.denoiser, parts.models["vae"].module
    prompts = WanPrompts([parts.reader(1, denoiser.config.text_tokens)])
    return ImagePipeline(denoiser, prompts, parts.sampler, ImageDefaults(50, 5.0, (480, 832), 81), vae, say=parts.say)


def sd_pipeline(parts: PipelineParts) -> ImagePipeline:
    """Stable Diffusion 1 and 2."""
    return _unet_pipeline(parts, SDPrompts([parts.reader(1)]), 7.5)


def sdxl_pipeline(parts: PipelineParts) -> ImagePipeline:
    """Stable Diffusion XL."""
    zeros = bool(parts.index.get("force_zeros_for_empty_prompt", True))
    return _unet_pipeline(parts, SDPrompts([parts.reader(1), parts.reader(2)], zeros), 5.0)


def _unet_pipeline(parts: PipelineParts, prompts: PromptEncoder, guidance: float) -> ImagePipeline:
    module, vae = parts.denoiser, parts.models["vae"].module
    # The scheduler's settings determine the kind of prediction, and the autoencoder the ratio of pixels to latents.
    update = {"prediction": parts.sampler.prediction, "pixels": vae.config.factor}
    module.config = module.config.model_copy(update=update)
    side = module.config.size * vae.config.factor
    more: Any = {"say": parts.say, "controlnets": parts.controlnets}
    return ImagePipeline(module, prompts, parts.sampler, ImageDefaults(50, guidance, (side, side)), vae, **more)


@dataclass(frozen=True)
class PipelineKind:
    """A class of pipelines of diffusers.

    models: the names of its models' folders.
    make: the function that builds the pipeline.
    optional: those of `models` that may be missing.
    """

    models: tuple[str, ...]
    make: Callable[[PipelineParts], ImagePipeline]
    optional: tuple[str, ...] = ()


KINDS = {
    "StableDiffusionPipeline": PipelineKind(("unet", "vae", "text_encoder"), sd_pipeline),
    "StableDiffusionXLPipeline": PipelineKind(("unet", "vae", "text_encoder", "text_encoder_2"), sdxl_pipeline),
    "StableDiffusionControlNetPipeline": PipelineKind(("unet", "vae", "text_encoder", CONTROLNET), sd_pipeline),
    "StableDiffusionXLControlNetPipeline": PipelineKind(
        ("unet", "vae", "text_encoder", "text_encoder_2", CONTROLNET), sdxl_pipeline
    ),
    "FluxPipeline": PipelineKind(("transformer", "vae", "text_encoder", "text_encoder_2"), flux_pipeline),
    "StableDiffusion3Pipeline": PipelineKind(
        ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"), sd3_pipeline, ("text_encoder_3",)
    ),
    "FluxControlNetPipeline": PipelineKind(("transformer", "vae", "text_encoder", "text_encoder_2", CONTROLNET), flux_pipeline),
    "StableDiffusion3ControlNetPipeline": PipelineKind(
        ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3", CONTROLNET), sd3_pipeline, ("text_encoder_3",)
    ),
    "Flux2Pipeline": PipelineKind(("transformer", "vae", "text_encoder"), flux2_dev_pipeline),
    "Flux2KleinPipeline": PipelineKind(("transformer", "vae", "text_encoder"), flux2_pipeline),
    "ZImagePipeline": PipelineKind(("transformer", "vae", "text_encoder"), z_image_pipeline),
    "WanPipeline": PipelineKind(("transformer", "vae", "text_encoder"), wan_pipeline),
}
# The class of each pipeline with a ControlNet.
WITH_CONTROLNET = {
    "StableDiffusionPipeline": "StableDiffusionControlNetPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLControlNetPipeline",
    "StableDiffusion3Pipeline": "StableDiffusion3ControlNetPipeline",
    "FluxPipeline": "FluxControlNetPipeline",
}
# Parts that are not used here: encoders for image prompts, and the safety checker.
UNUSED = ("feature_extractor", "image_encoder", "safety_checker")


def load_diffusers(
    path: str | Path,
    *,
    dtype: Any = None,
    adapter: str | Path | None = None,
    single_file: str | Path | None = None,
    denoiser: Any = None,
    controlnet: str | Path | Sequence[str | Path] | None = None,
    embeddings: str | Path | LearnedToken | Sequence[str | Path | LearnedToken] | None = None,
    texts: bool = True,
    say: Say | None = None,
) -> ImagePipeline:
    """Loads the pipeline of a diffusers folder.

    Args:
        dtype: the type of weights and activations, as in `weights.build.load_model`. An autoencoder with `force_upcast` stays in
            float32.
        adapter: a file of low-rank adapters (`weights.hub.image_lora`), which are merged into the weights as they are read.
        single_file: a file with the original authors' tensor names (`weights.hub.single_file`), whose models replace the folder's.
        denoiser: a module to use in place of the folder's denoiser, whose weights are then not read. It may be without weights yet.
        controlnet: one or several ControlNets for the folder's denoiser, each a folder, a run or a checkpoint.
        embeddings: learned embeddings (textual inversion) for Stable Diffusion 1, 2 and XL: files (`weights.hub.learned_embeddings`),
            folders with one, runs of `argosy train textual_inversion`, or `LearnedToken`s.
        texts: whether to read the weights of text encoders. Without these, a pipeline needs other prompts, and cannot be saved.
        say: called with warnings.

    Raises:
        BadInput: the pipeline or a part of it is not built, or a part is missing.
        Damaged: a file contradicts itself.
    """
    path = Path(path)
    index = read_json_object(path / INDEX)
    name = str(index.get("_class_name"))
    if name not in KINDS:
        raise BadInput(f"{INDEX}: the pipeline {name} is not built", where=str(path), hint=nearest(name, KINDS))
    nets = [] if controlnet is None else [controlnet] if isinstance(controlnet, str | Path) else list(controlnet)
    if nets:
        name = _with_controlnet(name, path)
        index = dict(index) | {"_class_name": name}
    tokens = [] if embeddings is None else [embeddings] if isinstance(embeddings, str | Path | LearnedToken) else list(embeddings)
    if tokens and KINDS[name].make not in (sd_pipeline, sdxl_pipeline):
        problem = f"embeddings: learned embeddings of {name} are not built"
        raise BadInput(problem, where=str(path), hint="those of Stable Diffusion 1, 2 and XL are")
    kind, opened = KINDS[name], dict[str, OpenedModel]()
    present = {CONTROLNET} if nets else set[str]()
    present |= {part for part, library in index.items() if isinstance(library, list) and library[:1] != [None]}
    numbers = [part.removeprefix("text_encoder") for part in kind.models if part.startswith("text_encoder")]
    expected = {*kind.models, *(f"tokenizer{end}" for end in numbers), "scheduler", *UNUSED}
    if other := sorted(present - expected):
        raise BadInput(f"{INDEX}: {name} with {', '.join(other)} is not built", where=str(path))
    for part in kind.models:
        if part not in present and part in kind.optional:
            continue
        if part == CONTROLNET and nets:
            opened |= {numbered(i): open_model(net, say or (lambda _: None)) for i, net in enumerate(nets)}
            class_name = next(iter(opened[CONTROLNET].config.hub_types), "")
            index |= {CONTROLNET: ["diffusers", class_name if len(nets) == 1 else f"{class_name.removesuffix(ONE)}{SEVERAL}"]}
            continue
        if not (path / part).is_dir():
            raise BadInput(f"there is no folder {part}/", where=str(path), hint="copy or download the folder again")
        opened[part] = _open_part(path, part, index[part], say or (lambda _: None))
    if str(index.get(CONTROLNET, [""])[-1]).endswith(SEVERAL) and not nets:
        for i in count(1):
            if not (path / numbered(i)).is_dir():
                break
            opened[numbered(i)] = _open_part(path, numbered(i), index[CONTROLNET], say or (lambda _: None))
    if single_file is not None:
        others = single_file_parts(Path(single_file))
        if missing := sorted(others.keys() - opened.keys()):
            problem = f"{single_file} has the model {missing[0]}, which {name} has not"
            raise BadInput(problem, where=str(path), hint="a folder of the pipeline that the file is of")
        for part, model in others.items():
            if type(model.config) is not type(opened[part].config) or model.config.hub_rows() != opened[part].config.hub_rows():
                raise BadInput(f"{part} of {single_file} is another model than that of the folder", where=str(path))
            # Settings that cannot be inferred from tensors are the folder's.
            opened[part] = replace(model, config=opened[part].config, hub=opened[part].hub)
        if remaining := sorted(opened.keys() - others.keys()):
            (say or (lambda _: None))(f"{single_file} has {', '.join(others)}; {', '.join(remaining)} are the folder's")
    if adapter is not None:
        tensors: dict[str, Any] = {part: model.weights for part, model in opened.items()}
        for part, updates in image_updates(adapter, {part: model.reader for part, model in tensors.items()}).items():
            if _is_partly_read(path / part):
                raise BadInput(f"adapters of {part}, whose other towers are copied as they are, are not merged", where=str(adapter))
            weights = tensors[part].with_reader(UpdatedTensors(tensors[part].reader, updates))
            opened[part] = replace(opened[part], weights=weights)
    models = dict[str, LoadedModel]()
    for part, model in opened.items():
        if part in DENOISERS and denoiser is not None:
            if type(denoiser.config) is not type(model.config):
                problem = f"{name} draws with a {type(model.config).__name__}, and the model is a {type(denoiser.config).__name__}"
                raise BadInput(problem, where=str(path), hint="encoders.autoencoder and encoders.text take parts for other models")
            models[part] = LoadedModel(denoiser.config, denoiser)
        elif part.startswith("text_encoder") and not texts:
            models[part] = LoadedModel(model.config, model.config.build())
        else:
            models[part] = _loaded(model, dtype)
    if not (path / SCHEDULER).is_file():
        raise BadInput(f"there is no {SCHEDULER}", where=str(path), hint="copy or download the folder again")
    widths = [model.config.width for part, model in models.items() if part.startswith("text_encoder")] if tokens else []
    learned = learned_rows(tokens, widths) if tokens else []
    pipe = kind.make(PipelineParts(path, index, models, sampler_of(read_json_object(path / SCHEDULER)), say, learned))
    if texts:
        pipe.writer = partial(save_diffusers, PipelineParts(path, index, models, pipe.sampler, say))
    return pipe


def _with_controlnet(name: str, path: Path) -> str:
    """The name of a pipeline's class with a ControlNet.

    Raises:
        BadInput: the pipeline has a ControlNet already, or there is no such class.
    """
    if name in WITH_CONTROLNET:
        return WITH_CONTROLNET[name]
    has_one = name in WITH_CONTROLNET.values()
    problem = "the folder has a ControlNet already" if has_one else f"{name} with a ControlNet is not built"
    hint = "leave `controlnet` out, or give the folder of the pipeline without it and all ControlNets"
    raise BadInput(f"controlnet: {problem}", where=str(path), hint=hint if has_one else "leave `controlnet` out")


def numbered(i: int) -> str:
    """The name of the folder of a pipeline's ControlNet with index i: controlnet, controlnet_1, controlnet_2 and so on."""
    return CONTROLNET if i == 0 else f"{CONTROLNET}_{i}"


def _open_part(path: Path, part: str, entry: Any, say: Say) -> OpenedModel:
    try:
        return open_model(path / part, say)
    except BadInput as error:
        raise BadInput(f"{part} ({entry[-1]}): {error.what}", where=error.where or str(path / part), hint=error.hint) from None
    except Damaged as error:
        raise Damaged(f"{part}: {error.what}", where=error.where, hint=error.hint) from None


def _loaded(opened: OpenedModel, dtype: Any) -> LoadedModel:
    upcast = getattr(opened.config, "force_upcast", False)
    return load_model(opened, dtype=jnp.float32 if upcast and as_dtype(dtype) != jnp.float64 else dtype)


def save_diffusers(parts: PipelineParts, pipe: ImagePipeline, folder: Path) -> None:
    """Writes a diffusers folder. It is first written as `NAME.part` in the same place, and renamed at the end.

    Args:
        parts: the parts that the pipeline was built from.
        folder: the folder to write.

    Raises:
        BadInput: the folder or `NAME.part` exists, or no class of diffusers samples as the pipeline does.
    """
    target, folder = folder, folder.with_name(f"{folder.name}.part")
    for path in (target, folder):
        if path.exists():
            raise BadInput(f"{path} exists", hint="another name, or remove it first")
    if len(parts.controlnets) > 1 and parts.index[CONTROLNET][-1] != SEVERAL:
        problem = f"{parts.index['_class_name']} with {len(parts.controlnets)} ControlNets: diffusers writes no folder of several"
        raise BadInput(problem, hint="save the pipeline without them: argosy.load(FOLDER); `controlnet=` takes several")
    # Computed first, so that an error comes before anything is written.
    scheduler = None if pipe.sampler == parts.sampler else scheduler_config(pipe.sampler)
    folder.mkdir(parents=True)
    for part, model in parts.models.items():
        if _is_partly_read(parts.path / part):
            shutil.copytree(parts.path / part, folder / part)
        else:
            save_model(model, folder / part, "hub", None)
    for part, library in parts.index.items():
        if part.startswith("tokenizer") and isinstance(library, list) and (parts.path / part).is_dir():
            shutil.copytree(parts.path / part, folder / part)
    (folder / "scheduler").mkdir()
    index = {part: entry if part not in UNUSED else [None, None] for part, entry in parts.index.items()}
    if scheduler is None:
        shutil.copyfile(parts.path / SCHEDULER, folder / SCHEDULER)
    else:
        _write_json(folder / SCHEDULER, scheduler)
        index["scheduler"] = ["diffusers", scheduler["_class_name"]]
    _write_json(folder / INDEX, index)
    folder.rename(target)


def _is_partly_read(folder: Path) -> bool:
    """Whether only the text model of a folder is read, and its other towers are not, so that the folder must be copied as it is."""
    config = folder / "config.json"
    # ControlNets that were loaded from elsewhere have no folder here.
    return config.is_file() and "text_config" in read_json_object(config)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

