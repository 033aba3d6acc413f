"""Files as authors published them: Flux.1's denoiser, or the models of Stable Diffusion 1, 2 and XL in one file. They are read and
written. torchvision's VGG is read.

    FILE.safetensors <-> {"transformer": ...}, or {"unet": ..., "vae": ..., "text_encoder": ..., "text_encoder_2": ...}

Such a file has neither settings nor a tokenizer: settings follow from the shapes of its tensors (`models.hub.single_file`), so a model
whose settings would be read back otherwise is not written.
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

# Reads settings from the shapes of tensors.
ReadSettings = Callable[[Mapping[str, tuple[int, ...]]], dict[str, Any]]

DENOISER = "model.diffusion_model."
FLUX, UNET = "double_blocks.0.img_attn.qkv.weight", "input_blocks.0.0.weight"
VAE = "first_stage_model."
# OpenAI's text encoder, of Stable Diffusion 1 and the first of XL.
CLIPS = ("cond_stage_model.transformer.", "conditioner.embedders.0.transformer.")
# OpenCLIP's, of Stable Diffusion 2 and the second of XL.
OPENCLIP, OPENCLIP_2 = "cond_stage_model.model.", "conditioner.embedders.1.model."
# The last layer of OpenCLIP's in Stable Diffusion 2: its output is not read, and diffusers' folders have it not.
UNREAD = "transformer.resblocks.23."
# Settings that no tensor tells: the folder of the pipeline gives them, or they change no number that is drawn but by rounding.
UNTOLD = frozenset(("size", "eos", "prediction", "pixels", "force_upcast"))
# A part of the names in files of other kinds, what they are, and what to do with them.
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
    """The denoiser of a file, or the VGG (`vgg_files`).

    Args:
        warn: called with what else the file has.

    Raises:
        BadInput: the file is of no kind that is read, which names what it looks like, or its tensors do not fit that kind.
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
    """The models of a file, by the names of their folders in a pipeline of diffusers; the denoiser first.

    Raises:
        BadInput, Damaged: as `open_single_file`.
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
    """The tensors of a pipeline's models in their authors' names. Nothing is read yet.

    Args:
        parts: by the names of their folders in a pipeline of diffusers; the denoiser alone, or others with it.
        dtype: the type of the tensors, as in `cast_weights`.

    Raises:
        BadInput: there is no denoiser with such names, or a model would be read back with other settings.
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
    """The tensors of a model, which would be read back as it is."""
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
    """The names that begin so, without it: {short name: name}."""
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
