"""`argosy quantize MODEL OUT preset=w4 [to=compressed-tensors]`, `argosy quantize MODEL OUT.gguf preset=q4_k_m`, and `argosy quantize
MODEL OUT.yml search=4.5 data.source=FILE`."""

import os
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field

from argosy.adapt.methods.settings import METHODS
from argosy.adapt.rules import PRESETS, Rule, preset_rules, read_rules
from argosy.cli.output import conclude
from argosy.cli.verbs.convert import ConversionProgress
from argosy.core.command import command_name
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.settings import Repeats, Settings, read_settings, words_layer
from argosy.core.settings.schema import Choice
from argosy.data.settings import DataSettings
from argosy.jobs import machine
from argosy.observe.readable import columns, format_duration
from argosy.weights.gguf.mixtures import MIXTURES

CANDIDATES = ("w8", "w4", "nvfp4")
RULE_FILES = (".yml", ".yaml")

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Quantize(Settings):
    """The quantization of a model."""

    preset: str | None = None
    """One rule by name: w8, w8a8, w4, w4a8, w4a4, nf4, fp8, fp8-blocks, mxint8, mxfp8, mxfp4, nvfp4 and so on. `w` is followed by the
    bits of the weights, `a` by the bits of the activations; without it activations are not rounded. GGUF files have their own presets:
    q8_0, q6_k, q5_k_m, q4_k_m, q4_1, q4_0, f16, bf16.
    """
    rules: str | None = None
    """A YAML file with a list of rules. The first rule that matches a module decides."""
    search: float | None = Field(None, gt=0)
    """Average number of bits per weight, scales included. Instead of a model, a file of rules is written, OUT.yml for `rules`: it
    assigns a preset to each matrix of the layers, within that number of bits and with the smallest divergence of the next token from
    the unquantized model. Needs `data.source`.
    """
    candidates: Annotated[list[str], Repeats()] = Field(default_factory=lambda: list(CANDIDATES))
    """Presets among which `search` chooses, at least two: `candidates=w8 candidates=w4`."""
    rotate: Literal["none", "hadamard", "quarot"] = "none"
    """Rotates the model before it is quantized, so that no channel has outliers; the float model computes the same function. It helps
        activations of four bits; models whose norms do not allow it are refused. hadamard: the residual stream and value heads, in
        stored weights alone. quarot: all of QuaRot (arXiv:2404.00456), so the written model also rotates what down and output
        projections read, and queries and keys, while it runs; Argosy's own format alone has it.
    """
    report: str | None = None
    """An HTML file for a report: the format, error and size of each weight, and a recommendation."""
    text: str | None = None
    """A text whose perplexity is measured before and after. Use another text than the calibration data, on which the result looks
    better than it is.
    """
    windows: int = Field(20, gt=0)
    """Number of windows of the text to measure."""
    to: Literal["argosy", "compressed-tensors", "gguf"] | None = None
    """Layout. compressed-tensors: a Hub folder that transformers and vLLM read, with int8, int4, fp8, NVFP4 or MXFP4; gguf: a file for
    llama.cpp. None: gguf if the target's name ends so, otherwise argosy."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights that are not quantized. None: as they are in the source."""
    method: Annotated[Any, Choice(METHODS)] = "nearest"
    """How weights are rounded."""
    samples: int = Field(128, gt=0)
    """Number of sequences of calibration data."""
    data: DataSettings = DataSettings()
    """Calibration data, read as in training: `data.source=FILE` turns it on. `data.sequence` is 512 tokens unless it is set."""


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Hub folder, .gguf file, run, checkpoint or hf:OWNER/NAME", show_default=False)],
    target: Annotated[
        str | None, typer.Argument(metavar="OUT", help="a new folder, a .gguf file, or a .yml file with search", show_default=False)
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="preset=" + "|".join(PRESETS) + " [rules=FILE.yml] [method=...] [to=...] [...]", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Writes a model in few bits: a folder that every verb takes, or a GGUF file; and a table of what became what. After a kill, the
    same command resumes."""
    if target is None or "=" in target:
        raise BadInput("no target", hint="`argosy quantize MODEL OUT preset=w4`")
    settings = read_settings(Quantize, words_layer(words or [])).value
    if settings.search is not None or target.endswith(RULE_FILES):
        check_search(settings, target)
        write_rules(model, target, settings, as_json)
        return
    is_gguf = target.endswith(".gguf") or settings.to == "gguf"
    check_target(settings, target, is_gguf)
    rules = [] if is_gguf else rules_of(settings)
    # No accelerator is needed, and another program may be using it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    machine.start_jax()
    from argosy.jobs import quantize_report as reports
    from argosy.jobs.quantize import quantize as job
    from argosy.jobs.quantize_gguf import quantize_gguf

    if settings.report is not None:
        reports.check_report(settings.report)
    measured = None if settings.text is None else reports.planned_text(model, settings.text, settings.windows)
    with ConversionProgress("written") as progress:
        if is_gguf:
            result = quantize_gguf(model, Path(target), str(settings.preset), say=progress.say, progress=progress)
        else:
            to = settings.to or "argosy"
            data = settings.data if "source" in settings.data.model_fields_set else None
            options: Any = {"method": settings.method, "data": data, "samples": settings.samples, "dtype": settings.dtype, "to": to}
            options["rotate"] = None if settings.rotate == "none" else settings.rotate
            result = job(model, Path(target), rules, **options, say=progress.say, progress=progress)
        if measured is not None:
            result["perplexity"] = reports.measure_change(model, target, *measured, progress.say)
    if settings.report is not None:
        command = shlex.join([*command_name().split(), "quantize", model, target, *(words or [])])
        reports.write_quantization_report(settings.report, result, command)
    conclude(quantization_table(result), result, as_json)


def check_target(settings: Quantize, target: str, is_gguf: bool) -> None:
    """Checks that the settings belong to the target.

    Raises:
        BadInput: one that has no meaning there.
    """
    presets = "preset=" + "|".join(MIXTURES)
    if not is_gguf and str(settings.preset).lower() in MIXTURES:
        raise BadInput(f"preset={settings.preset} is for GGUF files", hint=f"`argosy quantize MODEL OUT.gguf preset={settings.preset}`")
    if is_gguf and (settings.to not in (None, "gguf") or not target.endswith(".gguf")):
        raise BadInput(f"{target} and to={settings.to}", hint="a GGUF file ends in .gguf, and nothing else does")
    calibrates = bool(settings.data.model_fields_set) or "samples" in settings.model_fields_set
    if calibrates and "source" not in settings.data.model_fields_set:
        raise BadInput("settings of calibration data without data", hint="data.source=FILE")
    if is_gguf and (calibrates or "method" in settings.model_fields_set):
        raise BadInput("GGUF files are rounded as llama.cpp does, without calibration data", hint=presets)
    if "candidates" in settings.model_fields_set:
        raise BadInput("candidates are for search", hint="search=4.5 and OUT.yml")
    if settings.text is None and "windows" in settings.model_fields_set:
        raise BadInput("windows is for text", hint="text=FILE")
    if is_gguf and settings.rotate != "none":
        raise BadInput(f"rotate={settings.rotate} is for folders", hint="GGUF files here have no rotated weights")
    if settings.rotate == "quarot" and settings.to == "compressed-tensors":
        raise BadInput(
            "rotate=quarot is for Argosy's own format: other readers would leave out what the model rotates while it runs",
            hint="rotate=hadamard changes weights alone",
        )
    if is_gguf and (settings.preset is None or settings.rules is not None or settings.dtype is not None):
        raise BadInput("a GGUF file has a preset, and neither rules nor a dtype", hint=presets)


def check_search(settings: Quantize, target: str) -> None:
    """Checks that the settings and the target are those of a search, which writes a file of rules.

    Raises:
        BadInput: a setting is for writing a model, the target is no file of rules, or there is no calibration data.
    """
    hint = "`argosy quantize MODEL OUT.yml search=4.5 data.source=FILE`, then `argosy quantize MODEL OUT rules=OUT.yml`"
    if settings.search is None:
        raise BadInput(f"{target} is a file of rules, which only a search writes", hint=hint)
    if not target.endswith(RULE_FILES):
        raise BadInput(f"a search writes a file of rules, and {target} does not end in .yml", hint=hint)
    if other := settings.model_fields_set - {"search", "candidates", "samples", "data"}:
        raise BadInput(f"{min(other)} is for writing a model, and a search writes rules", hint=hint)
    if "source" not in settings.data.model_fields_set:
        raise BadInput("search needs calibration data", hint=hint)


def write_rules(model: str, target: str, settings: Quantize, as_json: bool) -> None:
    """Searches for a recipe and prints the result."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    machine.start_jax()
    from argosy.jobs.quantize_search import search_recipe

    with ConversionProgress("written") as progress:
        options: Any = {"samples": settings.samples, "say": progress.say}
        result = search_recipe(model, Path(target), float(settings.search or 0), settings.candidates, settings.data, **options)
    conclude(described_recipe(result), result, as_json)


def rules_of(settings: Quantize) -> list[Rule]:
    """The rules of the settings `preset` or `rules`.

    Raises:
        BadInput: neither or both settings are given, or the file has mistakes, as in `read_rules`.
    """
    if (settings.preset is None) == (settings.rules is None):
        problem = "neither a preset nor rules are" if settings.preset is None else "both a preset and rules are"
        raise BadInput(f"{problem} given", hint=f"preset={'|'.join(PRESETS)}, or rules=FILE.yml")
    return preset_rules(settings.preset) if settings.preset is not None else read_rules(Path(str(settings.rules)))


def quantization_table(result: dict[str, Any]) -> str:
    """The table: a line for each kind of module."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in result["weights"]:
        kind = ".".join(part for part in row["name"].split(".") if not part.isdecimal())
        data = " ".join(filter(None, (row["activations"], "static" if row.get("activations_scale") == "static" else None)))
        groups[kind, row["weights"], str(row["granularity"] or ""), data].append(row)
    is_calibrated = bool(result.get("samples"))
    lines = []
    for key, rows in groups.items():
        numbers, size = (sum(row[name] for row in rows) for name in ("numbers", "bytes"))
        errors = ["error", *(["output_error", "nearest_error"] if is_calibrated else [])]
        values = [[row[name] for row in rows if row[name] is not None] for name in errors]
        worst = [f"{max(some):.4f}" if some else "" for some in values]
        lines.append([*key, str(len(rows)), f"{8 * size / numbers:.2f}", f"{size / 1e6:.1f}", *worst])
    head = ("module", "weights", "scales for", "data", "layers", "bits", "MB", "largest RMS error")
    head += ("of the output", "by nearest") if is_calibrated else ()
    plain = result["kept"]
    rest = f"{plural(plain['tensors'], 'tensor')} kept ({plain['bytes'] / 1e6:.1f} MB), such as {', '.join(plain['largest'])}"
    summary = f"{result['target']}: {result['bytes'] / 1e6:.1f} MB in {format_duration(result['seconds'])}"
    if change := result.get("perplexity"):
        summary += f"\nperplexity {change['before']:.4g} before, {change['after']:.4g} after, over {change['tokens']:,.0f} tokens"
    if narrow := result.get("narrow"):
        rest += f"\nrows of {plural(len(narrow), 'tensor')} are no whole number of blocks, which have another type, such as {narrow[0]}"
    if scarce := [row for row in result["weights"] if row.get("uncalibrated")]:
        share, name = max((row["uncalibrated"], row["name"]) for row in scarce)
        rest += f"\n{plural(len(scarce), 'weight')} saw too few tokens, in whole or in part, and nearest rounding took their place: "
        rest += f"{share:.0%} of {name}"
    if any(row.get("balanced") for row in result["weights"]) and (rigid := [r for r in result["weights"] if not r["balanced"]]):
        rest += f"\n{plural(len(rigid), 'weight')} have inputs that cannot be scaled exactly, such as {rigid[0]['name']}"
    return "\n".join([columns(head, lines, figures=tuple(range(4, len(head)))), rest, summary])


def described_recipe(result: dict[str, Any]) -> str:
    """The tables of a search: each matrix by kind, and the recipe beside its candidates."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in result["weights"]:
        kind = ".".join(part for part in row["name"].split(".") if not part.isdecimal())
        groups[kind, row["preset"]].append(row)
    lines = []
    for (kind, preset), rows in sorted(groups.items(), key=lambda item: item[0]):
        numbers = sum(row["numbers"] for row in rows)
        layers = ",".join(next(part for part in row["name"].split(".") if part.isdecimal()) for row in rows)
        bits = sum(row["bits"] * row["numbers"] for row in rows) / numbers
        lines.append([kind, layers, preset, f"{bits:.3f}", f"{sum(row['divergence'] for row in rows):.2g}"])
    table = columns(("module", "layers", "preset", "bits", "KL"), lines, figures=(3, 4))
    every = result["presets"] | {"mixed": result["mixed"]}
    rows = [[name, f"{row['bits']:.3f}", f"{row['divergence']:.4g}"] for name, row in every.items()]
    whole = columns(("whole model", "bits", "KL"), rows, figures=(1, 2))
    rules, seconds = plural(len(result["rules"]), "rule"), format_duration(result["seconds"])
    end = f"{result['target']}: {rules}, {result['bits']:.3f} bits a weight, in {seconds}"
    if result["recipe"] != "mixed":
        end += f"\n{result['recipe']} alone is better than any mixture that was found within {result['budget']:g} bits"
    return f"{table}\n\n{whole}\n{end}"
