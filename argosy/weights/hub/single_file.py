"""Reads and writes image models in single files with their authors' names of tensors: the denoiser of Flux.1, or all models of Stable
Diffusion 1, 2 and XL. Also reads torchvision's VGG.

    FILE.safetensors <-> {"transformer": ...}, or {"unet": ..., "vae": ..., "text_encoder": ..., "text_encoder_2": ...}

Such a file has neither settings nor a tokenizer. Settings are derived from the shapes of its tensors (`models.hub.single_file`).
Therefore a model is written only if the shapes lead back to its settings.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.formats import TensorEntry, TensorView
from argosy.core.formats.safetensors import SafeTensors
from argosy.core.keymap import KeyMap
from argosy.models import FAMILIES
from argosy.models.hub import single_file as names
from argosy.weights.hub.reader import MappedTensors
from argosy.weights.hub.vgg_files import open_vgg, vgg_names
from argosy.weights.hub.writer import cast_weights
from argosy.weights.model import OpenedModel

# Derives settings from the shapes of tensors.
ReadSettings = Callable[[Mapping[str, tuple[int, ...]]], dict[str, Any]]

DENOISER = "model.diffusion_model."
FLUX, UNET = "double_blocks.0.img_attn.qkv.weight", "input_blocks.0.0.weight"
VAE = "first_stage_model."
# The prefixes of OpenAI's text encoder in Stable Diffusion 1 and in XL, whose first encoder it is.
CLIPS = ("cond_stage_model.transformer.", "conditioner.embedders.0.transformer.")
# The prefixes of OpenCLIP's text encoder in Stable Diffusion 2 and in XL, whose second encoder it is.
OPENCLIP, OPENCLIP_2 = "cond_stage_model.model.", "conditioner.embedders.1.model."
# The last layer of OpenCLIP's encoder in Stable Diffusion 2. Its output is not used, and diffusers' folders do not contain it.
UNREAD = "transformer.resblocks.23."
# Settings that do not follow from tensors. The folder of the pipeline has them, or they change images only by rounding.
UNTOLD = frozenset(("size", "eos", "prediction", "pixels", "force_upcast"))
# Files of other kinds: a part of their tensors' names, what they contain, and the hint for the user.
OTHERS = (
    (".lora_", "low-rank adapters", "argosy.load(FOLDER, adapter=FILE)"),
    ("joint_blocks.0.", "Stable Diffusion 3 in its authors' names", "the folder of diffusers is read"),
    ("single_stream_modulation.", "Flux.2", "the folder of diffusers is read"),
    ("noise_refiner.0.", "Z-Image", "the folder of diffusers is read"),
    ("head.modulation", "Wan", None),
    ("control_model.", "a ControlNet", None),
    ("decoder.up.0.block.0.", "an autoencoder alone, whose scale is not in it", "the folder of diffusers is read"),
    ("model.layers.0.", "a language model without its config.json", "the folder that it is from"),
    ("transformer_blocks.0.", "a model of diffusers without its config.json", "the folder that it is from"),
)


def open_single_file(path: Path, warn: Callable[[str], None] = lambda _: None) -> OpenedModel:
    """Opens the denoiser of a file, or the VGG (`vgg_files`).

    Args:
        warn: called with a sentence about the other models of the file, which are not read.

    Raises:
        BadInput: the file is of no kind that is read (the message says what it looks like), or its tensors do not fit its kind.
        Damaged: the file contradicts itself.
    """
    file = SafeTensors.open(path)
    if tensors := vgg_names(file):
        return open_vgg(path, file, tensors)
    first, *others = single_file_parts(path).items()
    if others:
        warn(f"{path}: its denoiser alone is read, without {', '.join(name for name, _ in others)}")
    return first[1]


def single_file_parts(path: Path) -> dict[str, OpenedModel]:
    """Opens the models of a file, by the names of their folders in a diffusers pipeline. The denoiser comes first.

    Raises:
        BadInput, Damaged: the errors of `open_single_file`.
    """
    file = SafeTensors.open(path)
    inner = _under(file, DENOISER) or {name: name for name in file.names}
    if FLUX in inner:
        return {"transformer": _open_part(path, file, inner, "flux", names.flux_settings, names.flux_rows)}
    if UNET not in inner or not inner[UNET].startswith(DENOISER):
        raise _refusal(path, list(file.names))
    parts = {"unet": _open_part(path, file, inner, "unet", names.unet_settings, names.unet_rows)}
    width: Any = parts["unet"].config
    if vae := _under(file, VAE):
        vae = {name: source for name, source in vae.items() if name.startswith(("encoder.", "decoder.", "quant", "post_quant"))}
        settings = lambda shapes: names.vae_settings(shapes, width.text_width)  # noqa: E731
        parts["vae"] = _open_part(path, file, vae, "autoencoder_kl", settings, names.vae_rows)
    if clip := next((sources for start in CLIPS if (sources := _under(file, start))), {}):
        clip = {name: source for name, source in clip.items() if not name.endswith("position_ids")}
        parts["text_encoder"] = _open_part(path, file, clip, "clip_text", names.clip_settings, lambda config: config.hub_rows())
    if clip := _under(file, OPENCLIP):
        parts["text_encoder"] = _openclip(path, file, clip, False)
    if clip := _under(file, OPENCLIP_2):
        parts["text_encoder_2"] = _openclip(path, file, clip, True)
    return parts


def _openclip(path: Path, file: SafeTensors, sources: Mapping[str, str], projects: bool) -> OpenedModel:
    unused = {"logit_scale", "attn_mask"} | (set() if projects else {"text_projection"})
    sources = {name: source for name, source in sources.items() if name not in unused and (projects or not name.startswith(UNREAD))}
    return _open_part(path, file, sources, "clip_text", lambda shapes: names.openclip_settings(shapes, projects), names.openclip_rows)


def single_file_entries(parts: Mapping[str, OpenedModel], dtype: Any = None) -> list[TensorEntry]:
    """Returns the tensors of a pipeline's models in their authors' names. Weights are read only when the tensors are written.

    Args:
        parts: the models, by the names of their folders in a diffusers pipeline: the denoiser, alone or with others.
        dtype: the type of the tensors, as in `cast_weights`.

    Raises:
        BadInput: no single-file names exist for the denoiser, or the settings of a model would be read back differently.
    """
    if (flux := parts.get("transformer")) is not None and isinstance(flux.config, FAMILIES["flux"]):
        return _entries("transformer", flux, "", names.flux_settings, names.flux_rows, dtype)
    unet = parts.get("unet")
    if unet is None or not isinstance(unet.config, FAMILIES["unet"]):
        families = ", ".join(type(model.config).__name__ for model in parts.values())
        hint = "Flux.1 in Black Forest Labs' names; Stable Diffusion 1, 2 and XL in Stability AI's"
        raise BadInput(f"no single file in its authors' names is written of {families}", hint=hint)
    width: int = unet.config.text_width  # pyright: ignore[reportAttributeAccessIssue]
    entries = _entries("unet", unet, DENOISER, names.unet_settings, names.unet_rows, dtype)
    if vae := parts.get("vae"):
        entries += _entries("vae", vae, VAE, lambda shapes: names.vae_settings(shapes, width), names.vae_rows, dtype)
    for part, starts in (("text_encoder", (*CLIPS, OPENCLIP)), ("text_encoder_2", (OPENCLIP_2,))):
        if (clip := parts.get(part)) is None:
            continue
        if getattr(clip.config, "activation", None) == "gelu" or part == "text_encoder_2":
            start, projects = starts[-1], part == "text_encoder_2"
            settings = lambda shapes, projects=projects: names.openclip_settings(shapes, projects)  # noqa: E731
            entries += _entries(part, clip, start, settings, names.openclip_rows, dtype)
        else:
            start = CLIPS["text_encoder_2" in parts]
            entries += _entries(part, clip, start, names.clip_settings, lambda config: config.hub_rows(), dtype)
    return entries


def _entries(
    part: str, model: OpenedModel, start: str, settings: ReadSettings, rows: Callable[[Any], Any], dtype: Any
) -> list[TensorEntry]:
    """Returns the tensors of a model, after a check that the model's settings can be read back from their shapes.

    Args:
        part: the name of the model's folder in the pipeline, for errors.
        start: the prefix of the names in the file.
        settings: derives settings from shapes.
        rows: gives the table of names for a config.
    """
    entries = list(KeyMap(*rows(model.config)).inverse(cast_weights(model.config, model.weights, dtype)))
    try:
        read_back = settings({entry.name: entry.shape for entry in entries})
    except KeyError as error:
        raise BadInput(f"{part}: no published file has such a model: {error} is missing") from None
    again = type(model.config)(**read_back)
    for name in type(again).model_fields:
        stated, value = getattr(model.config, name), getattr(again, name)
        if name not in UNTOLD and value != stated:
            raise BadInput(f"{part}: {name}={stated} would be read back as {value}, since such a file has no settings")
    return [entry._replace(name=start + entry.name) for entry in entries]


def _under(file: SafeTensors, start: str) -> dict[str, str]:
    """Returns {name without the prefix: name} for the tensors whose names begin with `start`."""
    return {name.removeprefix(start): name for name in file.names if name.startswith(start)}


def _open_part(
    path: Path,
    file: SafeTensors,
    sources: Mapping[str, str],
    family: str,
    settings: ReadSettings,
    rows: Callable[[Any], Any],
) -> OpenedModel:
    shapes = {name: file.shape(source) for name, source in sources.items()}
    try:
        config: Any = FAMILIES[family](**settings(shapes))
    except BadInput as error:
        raise BadInput(error.what, where=str(path), hint=error.hint) from None
    except (KeyError, IndexError, ValueError) as error:
        raise BadInput(f"the tensors do not fit a {family}: {error}", where=str(path)) from None
    weights = MappedTensors(KeyMap(*rows(config)), TensorView(file, names=sources), str(path))
    return OpenedModel(path, "file", config, weights)


def _refusal(path: Path, tensor_names: list[str]) -> BadInput:
    for part, kind, hint in OTHERS:
        if any(part in name for name in tensor_names):
            return BadInput(f"{path} looks like {kind}, which is not read from a single file", hint=hint)
    problem = f"{path} is of no kind that is read: its tensors begin with {', '.join(sorted(tensor_names)[:3])}"
    return BadInput(problem, hint="Flux.1 in Black Forest Labs' names; Stable Diffusion 1, 2 and XL in Stability AI's")
