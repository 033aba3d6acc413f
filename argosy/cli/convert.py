"""`argosy convert SOURCE TARGET [to=hub or argosy] [dtype=...]`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from argosy.cli.output import answer
from argosy.core.settings import Settings, read_settings, words_layer

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Convert(Settings):
    """What to write."""

    to: Literal["hub", "argosy"] = "hub"
    """A Hub folder, or an Argosy checkpoint."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the tensors; as they are unless told."""


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="Hub folder, .gguf file, run directory or checkpoint", show_default=False)
    ],
    target: Annotated[str, typer.Argument(help="a new folder", show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[to=hub|argosy] [dtype=...]", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Converts a model, tensor by tensor."""
    how = read_settings(Convert, words_layer(words or [])).value
    from argosy.jobs.convert import convert as job

    told = job(source, Path(target), how.to, how.dtype)
    answer(f"{target}: {told['tensors']} tensors, {told['parameters']:,} parameters, {how.to} format", told, as_json)
