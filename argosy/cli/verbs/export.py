"""`argosy export MODEL OUT [signature=...] [platforms=cpu,cuda,tpu] [batch=1,4,16]`."""

import re
from shlex import quote
from typing import Annotated, Any, ClassVar, Literal

import typer
from pydantic import Field

from argosy.adapt.methods.settings import AT_LOAD
from argosy.cli.output import Doing, conclude
from argosy.core.command import command_name
from argosy.core.counts import plural
from argosy.core.errors import BadInput, UnknownName
from argosy.core.settings import Settings, read_settings, words_layer
from argosy.export.mesh import ExportMesh, device_count
from argosy.jobs.image_models import parsed_size
from argosy.observe.readable import format_bytes, format_duration

app = typer.Typer(rich_markup_mode=None, add_completion=False)

SIGNATURES = ("logits", "embed", "classify", "generate", "rank", "user", "item", "denoise")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Settings of `argosy.load`.
LOADING = ("dtype", "quantization", "adapter", "controlnet", "embeddings")


class Export(Settings):
    """The bundle to write."""

    elsewhere: ClassVar = AT_LOAD

    signature: str | None = None
    """logits, embed, classify, generate, rank, user, item or denoise, or several, separated by commas; the first is the default of the
    bundle. None: denoise for models that draw images, rank for rankers, classify where there is a head of scores, else embed for
    models of vectors and logits for decoders."""
    platforms: str = "cpu,cuda,tpu"
    """What the programs run on, separated by commas: cpu, cuda, rocm, tpu. One program serves all of them."""
    batch: int | str = "symbolic"
    """Sizes of a batch, separated by commas, with a program for each; smaller batches are filled up. symbolic: any size, compiled when
    it is first met."""
    length: int | str | None = None
    """Sequence lengths in tokens, separated by commas, with a program for each; for generate, the lengths of prompts, by default 128.
    None: any length.
    """
    max_tokens: int | None = Field(None, gt=0)
    """Limit of a completion in tokens, for signature=generate. None: 64."""
    steps: int | None = Field(None, gt=0)
    """Steps of the sampler, for signature=denoise. None: the model's own number."""
    size: str | int | None = None
    """Pixels of its images as WIDTHxHEIGHT, or one number for both. None: the model's own size."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of weights and activations. None: float32 on CPUs, bfloat16 elsewhere."""
    quantization: str | None = None
    """A preset of `argosy quantize`, such as w8 or w4, or a YAML file of rules. Folders that are quantized already stay so."""
    adapter: str | None = None
    """A folder of low-rank adapters, which become part of the program."""
    controlnet: str | tuple[str, ...] | None = None
    """A ControlNet that steers the denoiser of a diffusers folder, as `argosy generate` takes it; several as a list. Its control image
    is an input of the bundle."""
    embeddings: str | tuple[str, ...] | None = None
    """Learned embeddings (textual inversion) of a diffusers folder, as `argosy generate` takes them; prompts name their tokens."""
    mesh: ExportMesh = ExportMesh()
    """The devices that its programs run on together, for a model that one host cannot hold. They need not be here."""
    store: str | None = None
    """A folder of weight files that bundles on the same file system share by hard links."""
    sign: str | None = None
    """A file with an ed25519 private key in PEM, which signs the manifest. Needs the package `cryptography`."""


@app.command()
def export_words(
    model: Annotated[str, typer.Argument(help="Hub folder, .gguf file, run, checkpoint or hf:OWNER/NAME", show_default=False)],
    target: Annotated[str | None, typer.Argument(metavar="OUT", help="a new folder", show_default=False)] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[signature=" + "|".join(SIGNATURES) + "] [platforms=cpu,cuda,tpu] [batch=1,4,16|symbolic] [length=...] [...]",
            help="settings: " + ", ".join(Export.model_fields),
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Writes a model as a bundle: a verified folder of programs, weights and a manifest that runs without this package's models."""
    if target is None or "=" in target:
        raise BadInput("no target", hint="`argosy export MODEL OUT`")
    settings = read_settings(Export, words_layer(words or [])).value
    platforms = names_of("platforms", settings.platforms, PLATFORMS)
    signatures = None if settings.signature is None else names_of("signature", settings.signature, SIGNATURES)
    options: dict[str, Any] = settings.model_dump(include={*LOADING, "max_tokens", "store", "sign", "steps"})
    options["size"] = parsed_size(settings.size)
    options["mesh"] = settings.mesh if settings.mesh.sizes() else None
    options |= {"platforms": platforms, "batch": sizes_in("batch", settings.batch), "length": sizes_in("length", settings.length)}
    with Doing() as doing:
        doing("loading jax")
        from argosy.jobs.export import export_bundle

        result = export_bundle(model, target, signatures=signatures, say=doing, **options)
    conclude(exported_text(result), result, as_json)


def names_of(key: str, text: str, choices: tuple[str, ...]) -> list[str]:
    """Names separated by commas.

    Raises:
        UnknownName: one that is not known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if wrong := [name for name in names if name not in choices]:
        raise UnknownName(key.removesuffix("s"), wrong[0], choices)
    if not names:
        raise BadInput(f"{key}={text}", hint=f"{key}={','.join(choices)}")
    return list(dict.fromkeys(names))


def sizes_in(key: str, text: int | str | None) -> list[int] | None:
    """Sizes separated by commas; None: any.

    Raises:
        BadInput: it is something else.
    """
    if text is None or text == "symbolic":
        return None
    if not re.fullmatch(r" *[1-9]\d*( *, *[1-9]\d*)* *", str(text)):
        raise BadInput(f"{key}={text}", hint=f"sizes of at least 1, separated by commas: {key}=1,4,16; or {key}=symbolic for any")
    return [int(size) for size in str(text).split(",")]


def exported_text(result: dict[str, Any]) -> str:
    """A summary of the written bundle, in a few lines."""
    programs = sum(len(signature["programs"]) for signature in result["signatures"].values())
    devices = f" for {plural(device_count(result['mesh']), 'device')}" if result["mesh"] else ""
    counts = f"{plural(programs, 'program')}, {plural(result['tensors'], 'tensor')}, {format_bytes(result['bytes'])}"
    text = f"{result['target']}: {', '.join(result['signatures'])}{devices}; {counts}, in {format_duration(result['seconds'])}\n"
    text += f"newer versions of jax read it until {result['readable_until']} at least; sha256 {result['sha256']}\n"
    return text + next_line(result)


def next_line(result: dict[str, Any]) -> str:
    """The command that runs a written bundle, and where."""
    command, count = f"{command_name()} bundle run {quote(result['target'])}", device_count(result["mesh"])
    platforms = {p for signature in result["signatures"].values() for program in signature["programs"] for p in program["platforms"]}
    if "cpu" not in platforms:
        devices = f"{count} devices" if count > 1 else "a device"
        return f"next, where there {'are' if count > 1 else 'is'} {devices} of {' or '.join(sorted(platforms))}: {command}"
    if count == 1:
        return f"next: {command}"
    flags = f"JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count={count}"
    return f"next: {flags} {command}\n      (without the two variables where there are {count} devices)"
