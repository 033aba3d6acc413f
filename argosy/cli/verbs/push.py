"""`argosy push MODEL hf:OWNER/NAME`: a model to the Hub, with a card."""

from typing import Annotated, Literal

import typer

from argosy.cli.output import conclude, say
from argosy.core.settings import Settings, read_settings, words_layer
from argosy.observe.readable import format_bytes

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Push(Settings):
    """The upload."""

    private: bool = False
    """Whether a new repository is private. One that is there stays as it is."""
    revision: str | None = None
    """The branch, which is made if it is not there. None: main."""
    message: str | None = None
    """The message of the commit."""
    merge: bool = False
    """Of a run that trained adapters: true uploads the merged weights, false the adapters alone."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the tensors of a run or checkpoint. None: as they are."""
    license: str | None = None
    """The license in the card, such as apache-2.0. None: that of the base model, if its card says one."""
    card: Literal["keep", "replace"] = "keep"
    """A card on the Hub that was written by hand: keep it, or replace it by the one of this push."""
    dry: bool = False
    """true: shows the files and the card, and sends nothing."""


@app.command()
def push_words(
    model: Annotated[
        str, typer.Argument(help="run, checkpoint, .gguf file, or a folder: Hub, PEFT, diffusers, quantized", show_default=False)
    ],
    target: Annotated[str, typer.Argument(metavar="hf:OWNER/NAME", help="the repository, which is made if it is not there")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="settings: " + ", ".join(Push.model_fields), show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Uploads a model to the Hub, as safetensors with a card written from its lineage, in one commit."""
    settings = read_settings(Push, words_layer(words or [])).value
    from argosy.jobs.push import push

    result = push(model, target, **{name: getattr(settings, name) for name in Push.model_fields}, say=say)
    lines = [f"{format_bytes(file['bytes']):>9}  {file['path']}" for file in result["files"]]
    lines += [f"  removed  {path}" for path in result["removed"]]
    if settings.dry:
        lines = [f"would go to {result['url']}:", *lines, "", *([] if result["card"] == "kept" else [result["card_text"]])]
    else:
        lines = [*lines, f"{result['url']}, commit {str(result['commit'])[:12]}: argosy generate hf:{result['repository']}"]
    conclude("\n".join(lines), result, as_json)
