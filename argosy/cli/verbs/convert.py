"""`argosy convert SOURCE TARGET [to=hub, argosy, gguf, single_file or peft] [dtype=...]`, and `argosy convert A --check B`."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO, cast

import typer
from pydantic import Field

from argosy.cli.output import answer, conclude, say
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.process.streams import Unfailing
from argosy.core.settings import Settings, read_settings, words_layer
from argosy.observe.readable import format_duration

app = typer.Typer(rich_markup_mode=None, add_completion=False)

# Between lines where no line can be replaced.
TELL_S = 5.0
REDRAW_S = 0.2
MOST_LISTED = 20


class Convert(Settings):
    """The output of the conversion."""

    to: Literal["hub", "argosy", "gguf", "single_file", "peft"] = "hub"
    """Format to write: a Hub folder, an Argosy checkpoint or a GGUF file, into which adapters are merged; models of images as one file
    in their authors' names; or the adapters of a run alone, as a folder of the PEFT library. A target that ends in .gguf is a GGUF
    file, one that ends in .safetensors a single file."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the tensors. None: as they are in the source."""
    adapter: str | None = None
    """A folder of low-rank adapters, as the PEFT library writes it, to merge into the weights."""
    shard_gb: float = Field(5.0, gt=0)
    """Largest file of a Hub folder, in 1e9 bytes; a larger tensor gets its own file."""


class CheckedConversion(Settings):
    """When two models count as the same."""

    tolerance: float | None = Field(None, ge=0)
    """Share of a tensor's largest magnitude by which values may differ, whatever their types. None: every byte must agree."""


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="Hub folder, .gguf file, run, checkpoint or hf:OWNER/NAME", show_default=False)
    ],
    target: Annotated[
        str | None, typer.Argument(help="a new folder, or a new file that ends in .gguf or .safetensors", show_default=False)
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[to=hub|argosy|gguf|single_file|peft] [dtype=...] [adapter=FOLDER] [shard_gb=5]", show_default=False),
    ] = None,
    check: Annotated[
        str | None, typer.Option("--check", metavar="OTHER", help="compare with this model; write nothing [tolerance=]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Converts a model, tensor by tensor; after a kill, the same command resumes. With --check, compares two models: exit
    code 0 if they are equal, 1 if not."""
    # No accelerator is needed, and another program may be using it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if check is not None:
        _check(source, check, [word for word in (target, *(words or [])) if word is not None], as_json)
        return
    if target is None:
        raise BadInput("no target", hint="`argosy convert SOURCE TARGET`, or `argosy convert A --check B`")
    settings = read_settings(Convert, words_layer(words or [])).value
    from argosy.jobs.convert import convert as job

    with ConversionProgress("written") as progress:
        result = job(
            *(source, Path(target), settings.to, settings.dtype),
            shard_gb=settings.shard_gb,
            adapter=settings.adapter,
            say=progress.say,
            progress=progress,
        )
    text = f"{target}: {result['tensors']} tensors, {result['parameters']:,} parameters, {result['format']} format\n"
    rate = (result["bytes"] - result["kept_bytes"]) / max(result["seconds"], 1e-9)
    resumed = f", {_size(result['kept_bytes'])} of them kept from before" if result["kept_bytes"] else ""
    text += f"{_size(result['bytes'])} in {format_duration(result['seconds'])}{resumed}, {_size(rate)}/s; {memory(result['memory'])}"
    conclude(text, result, as_json)


def _check(a: str, b: str, words: list[str], as_json: bool) -> None:
    if words and "=" not in words[0]:
        raise BadInput(
            f"`{words[0]}` and --check", hint="a target to write, or --check and another model to compare with"
        )
    settings = read_settings(CheckedConversion, words_layer(words)).value
    from argosy.jobs.history.compare import compare

    with ConversionProgress("compared") as progress:
        result = compare(a, b, settings.tolerance, say=progress.say, progress=progress)
    answer(compared_text(result), result, as_json)
    if not result["equal"]:
        raise typer.Exit(1)


def memory(result: dict[str, Any]) -> str:
    """Memory used, the bound, and the tensor it comes from."""
    peak, bound = _size(result["peak_bytes"]), _size(result["bound_bytes"])
    return f"peak memory {peak}, bound {bound} = 2 x largest tensor (`{result['largest']}`) + 500 MB"


def _size(n_bytes: float) -> str:
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.2f} GB"
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 1e7 else f"{n_bytes / 1e3:.0f} kB"


def compared_text(result: dict[str, Any]) -> str:
    """Equal, or the first differences, one per line."""
    lines = [f"only in {result[side]}: {name}" for side in ("a", "b") for name in result[f"only_in_{side}"]]
    lines += [f"setting {s['name']}: {s['a']} | {s['b']}" for s in result["settings"]]
    lines += [_line(difference) for difference in result["differences"]]
    rest = [f"and {len(lines) - MOST_LISTED} more; --json lists all"] if len(lines) > MOST_LISTED else []
    within = f" within {result['tolerance']:g}" if result["tolerance"] is not None else ""
    verdict = f"equal{within}" if result["equal"] else f"differences: {len(lines)}{within}"
    verdict = f"{plural(result['tensors'], 'tensor')} in both; {verdict}"
    return "\n".join([*lines[:MOST_LISTED], *rest, verdict, memory(result["memory"])])


def _line(difference: dict[str, Any]) -> str:
    if difference["what"] == "shape":
        return f"{difference['name']}: shape {difference['a']} | {difference['b']}"
    types = f"{difference['a']} | {difference['b']}, " if difference["a"] != difference["b"] else ""
    apart = (
        f"{difference['max_abs']:.3g} apart at most, {difference['relative']:.3g} of the largest, cosine {difference['cosine']:.9f}"
    )
    return f"{difference['name']}: {types}{apart}"


class ConversionProgress:
    """Progress on stderr: one line replaced in place on a terminal, elsewhere a line every few seconds. A context
    manager, which removes the line at the end."""

    def __init__(self, done: str, stream: TextIO | None = None):
        self.done, self.stream = done, cast(TextIO, Unfailing(stream or sys.stderr))
        self.is_live = self.stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.start = self.shown = time.monotonic()
        self.new = 0
        self.width = 0

    def __call__(self, new: int, all: int, kept_bytes: int) -> None:
        now = time.monotonic()
        if not self.new:
            self.start = now  # what went before was looking
            if kept_bytes and not new:
                self.say(f"resuming: {_size(kept_bytes)} of {_size(all)} are already written and intact")
        self.new += new
        if now - self.shown >= (REDRAW_S if self.is_live else TELL_S):
            self.shown = now
            self._show(self.line(all, kept_bytes, now - self.start))

    def line(self, all: int, kept_bytes: int, seconds: float) -> str:
        """Bytes, share, speed, time left."""
        at = kept_bytes + self.new
        rate = self.new / max(seconds, 1e-9)
        eta = format_duration((all - at) / rate) if rate else "?"
        return f"{_size(at)} of {_size(all)} {self.done}, {at / max(all, 1):.0%}, {_size(rate)}/s, {eta} left"

    def say(self, text: str) -> None:
        """Prints a message above the line."""
        self._clear()
        say(text)

    def _show(self, line: str) -> None:
        if not self.is_live:
            say(line)
            return
        self.stream.write("\r" + line.ljust(self.width))
        self.stream.flush()
        self.width = len(line)

    def _clear(self) -> None:
        if self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.stream.flush()
            self.width = 0

    def __enter__(self) -> "ConversionProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()
