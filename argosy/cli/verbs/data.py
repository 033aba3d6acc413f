"""`argosy data`: tokenizes a corpus, shows what a model will see of it, trains a vocabulary."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from argosy.cli.output import answer, can_color, conclude, say
from argosy.core.process import signals
from argosy.core.settings import Settings, read_settings, words_layer

app = typer.Typer(rich_markup_mode=None, add_completion=False)

TELL_S = 5.0  # between lines of progress

WORDS = typer.Argument(
    metavar="[key=value ...]", help="settings: data settings for a source, any for a recipe", show_default=False
)
JSON = typer.Option("--json", help="one JSON document on stdout")
SOURCE = typer.Argument(
    help="a text or JSONL file, a folder, a glob, a data source's name, or a recipe", show_default=False
)


class Vocabulary(Settings):
    """The training of a tokenizer."""

    vocab: int = Field(1024, gt=0)
    """Size of the vocabulary: 256 bytes, <|bos|>, <|eos|>, and merges."""
    max_bytes: int | None = Field(4_000_000, gt=0)
    """Most bytes of text to read, in the order of the source. None: all of it."""


@app.callback(invoke_without_command=True)
def data(context: typer.Context) -> None:
    """Tokenizes a corpus, shows what a model will see of it, trains a vocabulary."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("prepare")
def prepare(
    source: Annotated[str, SOURCE],
    target: Annotated[str, typer.Argument(help="a new folder; `data.source=FOLDER` trains on it", show_default=False)],
    words: Annotated[list[str] | None, WORDS] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Tokenizes a corpus once, into a folder that training reads without copying it into memory. The folder keeps the tokenizer
    and the settings. If this is stopped or killed, the folder does not appear, and the same command goes on from there."""
    from argosy.data.prepare import WriterStopped
    from argosy.jobs import data as job

    settings = job.data_settings(source, words or [])
    stop = signals.Stop("noting what is written; again to end now")
    try:
        result = job.prepare(settings, Path(target), say, PreparationProgress(), lambda: signals.asked_to_stop(stop))
    except WriterStopped as stopped:
        say(f"{target} is not finished; the same command {'goes on from there' if stopped.kept else 'starts over'}")
        raise typer.Exit(stop.code) from None
    conclude(prepared_text(result), result, as_json)


@app.command("inspect")
def inspect(
    recipe: Annotated[str, typer.Argument(help="a recipe's name, or a YAML file", show_default=False)],
    words: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", show_default=False)] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="rows of the batch to show")] = 2,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Shows the first rows that a model will see. Tokens that count in the loss are green; without color, the others are in ⟦ ⟧."""
    from argosy.jobs import data as job

    text, document = job.inspect(recipe, words or [], rows, can_color(sys.stdout), say)
    answer(text, document, as_json)


@app.command("tokenizer")
def tokenizer(
    source: Annotated[str, SOURCE],
    target: Annotated[str, typer.Argument(help="a new folder; `data.tokenizer=FOLDER` uses it", show_default=False)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[vocab=1024] [max_bytes=4M]", show_default=False)
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Trains a byte-level BPE on a corpus."""
    from argosy.jobs import data as job

    vocabulary = read_settings(Vocabulary, words_layer(words or [])).value
    settings = job.data_settings(source, []).model_copy(update={"max_bytes": vocabulary.max_bytes})
    result = job.train_tokenizer(settings, vocabulary.vocab, Path(target))
    if result["vocab"] < vocabulary.vocab:
        say(f"the text has repeated pairs for {result['vocab']} tokens only; {vocabulary.vocab} were asked for")
    conclude(f"{target}: {result['vocab']:,} tokens, from {result['bytes']:,} bytes of text", result, as_json)


def prepared_text(result: dict[str, Any]) -> str:
    """The contents of a prepared corpus, one line per split."""
    lines = [f"{result['target']}: tokens of `{result['tokenizer']}`, {result['vocab']:,} in its vocabulary"]
    for split in ("train", "held_out"):
        part = result[split]
        each = f", {part['bytes'] / part['tokens']:.2f} bytes each" if part["tokens"] and part["bytes"] else ""
        lines.append(f"  {split:8}  {part['documents']:,} documents, {part['tokens']:,} tokens{each}")
    return "\n".join([*lines, *([result["summary"]] if "format" in result else [])])


class PreparationProgress:
    """Prints progress every few seconds."""

    def __init__(self) -> None:
        self.printed_at = time.monotonic()

    def __call__(self, done_bytes: int, all_bytes: int | None) -> None:
        if time.monotonic() - self.printed_at < TELL_S:
            return
        self.printed_at = time.monotonic()
        share = f" of {all_bytes / 1e6:,.0f}" if all_bytes else ""
        say(f"{done_bytes / 1e6:,.0f}{share} MB of text tokenized")
