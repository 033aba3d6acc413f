"""`argosy models`, `argosy models show NAME [context=TOKENS]`."""

from typing import Annotated, Any

import typer
from pydantic import Field

from argosy.cli.output import answer
from argosy.core.settings import Settings, read_settings, words_layer
from argosy.observe.readable import columns, count_text, flops_text, format_bytes

app = typer.Typer(rich_markup_mode=None, add_completion=False)

JSON = typer.Option("--json", help="one JSON document on stdout")


class Show(Settings):
    """The length for which memory and FLOPs are counted."""

    context: int | None = Field(None, gt=0)
    """Sequence length in tokens, for memory and FLOPs. None: the model's context."""


@app.callback(invoke_without_command=True)
def models(context: typer.Context, as_json: Annotated[bool, JSON] = False) -> None:
    """Lists the model families and presets; `show` describes one: its block, sizes, memory and FLOPs."""
    if context.invoked_subcommand is not None:
        return
    from argosy.jobs.models import listing

    document = listing()
    rows = [
        (p["name"], p["family"], f"{p['parameters']:,}", "" if p["context"] is None else f"{p['context']:,}")
        for p in document["presets"]
    ]
    text = columns(("preset", "family", "parameters", "context"), rows, figures=(2, 3))
    answer(f"families: {', '.join(document['families'])}\n\n{text}", document, as_json)


@app.command("show")
def show(
    name: Annotated[
        str, typer.Argument(help="a preset, Hub folder, .gguf file, run, checkpoint or hf:OWNER/NAME", show_default=False)
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar="[context=TOKENS]", show_default=False)] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Shows a model: the structure of its block, its sizes, parameters, FLOPs and memory, and the recipes that use the model."""
    settings = read_settings(Show, words_layer(words or [])).value
    from argosy.jobs.models import describe

    document = describe(name, settings.context)
    answer(_text_of(document), document, as_json)


def _text_of(document: dict[str, Any]) -> str:
    """The description as text."""
    total, at = document["parameters"], f"at {document['context']:,} tokens"
    parts = ", ".join(f"{name} {n / total:.1%}" for name, n in document["parts"].items())
    weights = ", ".join(f"{format_bytes(n)} in {dtype}" for dtype, n in document["weight_bytes"].items())
    cache, token = document["cache_bytes"], document["cache_bytes_per_token"]
    window = f", window {document['window']:,}" if document["window"] else ""
    active = document["parameters_active"]
    active_text = f", {active:,} ({count_text(active)}) of them for each token" if active != total and document["experts"] else ""
    state = f", beside {format_bytes(document['state_bytes'])} a sequence" if document["state_bytes"] else ""
    facts = {
        "parameters": f"{total:,} ({count_text(total)}){active_text}",
        "": parts,
        "sizes": "  ".join(f"{letter} {size}" for letter, size in document["dims"].items() if size),
        "forward": f"{flops_text(document['flops_per_token_at_1'])} a token, "
        f"{flops_text(document['flops_per_token'])} {at}, attention in full; "
        f"backward {flops_text(document['flops_per_token_backward'])}",
        "weights": weights,
        "cache": f"{format_bytes(token['bfloat16'])} a token in bfloat16, {format_bytes(token['float32'])} in float32{state}",
        " ": f"{format_bytes(cache['bfloat16'])} and {format_bytes(cache['float32'])} {at}{window}",
        "training": training_text(document["training_bytes"], at),
        "recipes": recipes_text(document["recipes"]),
        "modules": ", ".join(document["modules"]),
    }
    lines = [f"  {name:<12}{value}".rstrip() for name, value in facts.items() if value]
    return "\n".join([f"{document['name']}: {document['family']}", "", document["block"], "", *lines])


def training_text(need: dict[str, int] | None, at: str) -> str:
    """Memory to train: the state, and activations of one sequence."""
    if need is None:
        return ""
    activations, recomputed = format_bytes(need["activations"]), format_bytes(need["activations_recomputed"])
    return (
        f"{format_bytes(need['state'])} of weights, gradients and AdamW in float32; activations of a sequence {at} {activations}, "
        f"{recomputed} with execution.remat=full"
    )


def recipes_text(recipes: list[str] | None) -> str:
    if recipes is None:
        return "none: it is an encoder"
    return ", ".join(recipes) or "none names it; any takes model=NAME"
