"""`argosy config`: the settings of a run, who set each, and what can be set."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from argosy.cli.output import answer, conclude, say
from argosy.core.errors import BadInput, SettingsError
from argosy.core.settings import Settings, diff, dump, flatten
from argosy.core.settings.explain import annotated_yaml, explain, settings_reference, value_text
from argosy.run.settings.compose import compose, editor_schema
from argosy.run.settings.recipe_files import recipes

app = typer.Typer(rich_markup_mode=None, add_completion=False)

SCHEMA = "argosy.schema.json"
NEW = """# yaml-language-server: $schema={schema}
# Settings that differ from the recipe `{recipe}` go here: uncomment a line, and the group it is in.
# `argosy train {file}` trains by it, `argosy config show {file}` shows the resulting settings.
extends: {recipe}

"""
RECIPE = typer.Argument(help="a recipe's name, a YAML file, or a run directory", show_default=False)
WORDS = typer.Argument(metavar="[key=value ...]", help="settings over the recipe's", show_default=False)
JSON = typer.Option("--json", help="one JSON document on stdout")


@app.callback(invoke_without_command=True)
def config(context: typer.Context) -> None:
    """The settings of a run, who set each, and what can be set."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("show")
def show(
    words: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [key=value ...]", show_default=False)] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Prints every setting of a run and who set it."""
    recipe, words = split_recipe(words or [])
    reading = compose(root(), recipe, words)
    answer(annotated_yaml(reading), {"settings": dump(reading.value), "set_by": reading.origin}, as_json)


@app.command("explain")
def explain_key(
    key: Annotated[str, typer.Argument(help="a dotted key, or a group of keys")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE] [key=value ...]", show_default=False)] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Explains a setting: its meaning, its default, its value in this run (by default the recipe `tiny`), and who set it."""
    recipe, words = split_recipe(words or [])
    if recipe is not None and key in recipes() and recipe not in recipes():
        raise BadInput(f"`{key}` is a recipe", hint=f"the key comes first: argosy config explain {recipe} {key}")
    try:
        reading = compose(root(), recipe, words, with_examples=True)
    except SettingsError:
        if recipe is not None or words:
            raise
        reading = compose(root(), "tiny", words)  # no run is complete without a recipe
    try:
        text = explain(reading, key)
    except BadInput:
        group = key.split(".")[0]
        if recipe is None and group in root().model_fields and getattr(reading.value, group) is None:
            hint = f"a recipe that has it comes after the key: `argosy config explain {key} grpo`"
            raise BadInput(f"`tiny` has no {group}", hint=hint) from None
        raise
    document = [
        {"key": name, "value": value, "set_by": reading.origin[name], "tried": _attempts(reading.tried.get(name, []))}
        for name, value in flatten(reading.value).items()
        if name == key or name.startswith(f"{key}.")
    ]
    answer(text, document, as_json)


@app.command("diff")
def show_difference(
    a: Annotated[str, RECIPE],
    b: Annotated[str, RECIPE],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Lists the settings in which two recipes, files or runs differ."""
    differences = diff(compose(root(), a).value, compose(root(), b).value)
    width = max((len(key) for key, _, _ in differences), default=0)
    lines = [f"{key:{width}}  {value_text(left)} -> {value_text(right)}" for key, left, right in differences]
    document = [{"key": key, "a": left, "b": right} for key, left, right in differences]
    answer("\n".join(lines) or "no difference", document, as_json)


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="the recipe's name: NAME.yml is written here", show_default=False)],
    recipe: Annotated[str, typer.Argument(help="the recipe to start from")] = "tiny",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Writes a recipe to start from: every setting in a comment with its meaning, and a schema for editors."""
    from argosy.core.settings.explain import commented_yaml

    path = Path(name if name.endswith((".yml", ".yaml")) else f"{name}.yml")
    if path.exists():
        raise BadInput(f"{path} exists already", hint="choose another name, or remove it")
    text = NEW.format(file=path.name, recipe=recipe, schema=SCHEMA) + commented_yaml(compose(root(), recipe))
    schema = json.dumps(editor_schema(root()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / SCHEMA).write_text(schema, encoding="utf-8")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {(error.strerror or '').lower()}") from None
    say(f"Next: argosy train {path}")
    conclude(str(path), {"recipe": str(path), "schema": str(path.parent / SCHEMA)}, as_json)


@app.command("reference")
def show_reference() -> None:
    """Prints the reference of all settings, in Markdown."""
    print(settings_reference(root()), end="")


@app.command("schema")
def show_schema() -> None:
    """Prints the JSON Schema of a recipe, for editors."""
    answer("", editor_schema(root()), as_json=True)


def root() -> type[Settings]:
    """The settings of a run; imported late, because they import every room's."""
    from argosy.run.settings.run import Run

    return Run


def split_recipe(words: list[str]) -> tuple[str | None, list[str]]:
    """The recipe, where the first word is one, and the `key=value` words."""
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return None, words


def _attempts(tried: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [{"by": origin, "value": dump(value) if isinstance(value, Settings) else value} for origin, value in tried]
