"""`argosy autotune [RECIPE key=value ...]`: which implementations of ops are the fastest on this device."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from argosy.cli.output import answer, say
from argosy.core.errors import BadInput
from argosy.core.settings import read_settings, words_layer
from argosy.jobs import machine
from argosy.observe.readable import columns

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def autotune(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [ops=attention,experts] [out=FILE] [seconds=1] [key=value ...]",
            help="a recipe's name or a YAML file, and settings; without a recipe, usual shapes",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Measures every implementation of attention and of the products of experts on this device, for the shapes of a run, and keeps
    those that are at least 5 % faster than what is taken otherwise. New runs with these shapes take them.

    \b
    Examples:
      argosy autotune
      argosy autotune tiny data.sequence=512
      argosy autotune pretrain model=smollm2-135m ops=attention out=tuned.json"""
    words = list(words or [])
    recipe = words.pop(0) if words and "=" not in words[0] else None
    machine.start_jax()
    from argosy.jobs.autotune import AutotuneSettings, tuned_document

    setting_words = [word for word in words if word.partition("=")[0] in AutotuneSettings.model_fields]
    rest = [word for word in words if word not in setting_words]
    if rest and recipe is None:
        raise BadInput(f"`{rest[0]}` is a setting of a run, and no recipe is named", hint=f"argosy autotune RECIPE {' '.join(rest)}")
    document = tuned_document(recipe, rest, read_settings(AutotuneSettings, words_layer(setting_words)).value, say)
    answer(_text(document), document, as_json)


def _text(document: Mapping[str, Any]) -> str:
    parts = [document["device"]]
    for case in document["cases"]:
        rows = [_row(implementation, implementation["implementation"] == case["winner"]) for implementation in case["implementations"]]
        parts.append(f"{case['case']}\n" + columns(("", "ms", "speed", "difference", ""), rows, figures=(1, 2, 3)))
    places = [f"winners are kept in {path}" for path in document["written"]]
    parts.append("\n".join(places) or "winners are kept nowhere: out=FILE names a file")
    return "\n\n".join(parts)


def _row(implementation: Mapping[str, Any], wins: bool) -> tuple[str, ...]:
    remark = "winner" if wins else "default" if implementation["default"] else ""
    return (
        implementation["implementation"],
        "-" if implementation["seconds"] is None else f"{1000 * implementation['seconds']:.3g}",
        "-" if implementation["ratio"] is None else f"{implementation['ratio']:.2f} x",
        "-" if implementation["error"] is None else f"{implementation['error']:.1e}",
        implementation["reason"] or remark,
    )
