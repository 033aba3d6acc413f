"""Which layers make a run: base.yml, the model's preset, the recipe with what it extends, then `key=value` words.

    configs/base.yml < configs/models/PRESET.yml < files the recipe extends < the recipe < words

Whoever names the preset drops what earlier layers said of the model, because they said it of another one:
`model=llama3.2-1b` on the command line replaces the recipe's model whole. What the same or a later layer says of the
model overrides the preset like anything else, and provenance shows it. Composing reads files and has no other effect.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from argosy.core.errors import BadInput, UnknownName
from argosy.core.explain import json_schema
from argosy.core.settings import Layer, Reading, Settings, read_settings, words_layer, yaml_layer
from argosy.core.words import SELF

T = TypeVar("T", bound=Settings)

CONFIGS = Path(__file__).parents[1] / "configs"
PRESET_FOLDERS = "ARGOSY_PRESETS"  # folders of users' own presets, separated as in PATH
EXTENDS = "extends"


def compose(
    schema: type[T], recipe: str | Path | None, words: Iterable[str] = (), configs: Path = CONFIGS
) -> Reading[T]:
    """The settings of a run.

    Args:
        schema: the root settings; only one with a `model` key has presets.
        recipe: a name under `configs/recipes`, a YAML file, a run directory (its `settings.yml`), or None.
        words: `key=value`, as typed.
        configs: the folder of base.yml, models/ and recipes/.

    Raises:
        UnknownName: no such recipe or preset.
        BadInput, SettingsError: everything wrong with the files, or with the settings.
    """
    layers = [yaml_layer(configs / "base.yml")] if (configs / "base.yml").exists() else []
    layers += recipe_layers(recipe, configs) if recipe is not None else []
    layers.append(words_layer(words))
    if "model" in schema.model_fields:
        layers = with_preset(with_folders(layers), configs)
    return read_settings(schema, *layers)


def recipes(configs: Path = CONFIGS) -> list[str]:
    """The names of the recipes that come with the package."""
    return list(_named(configs / "recipes"))


def presets(configs: Path = CONFIGS) -> list[str]:
    """The names of all model presets: the package's, and those in the folders of $ARGOSY_PRESETS."""
    return sorted({name for folder in _preset_folders(configs) for name in _named(folder)})


def recipe_layers(recipe: str | Path, configs: Path = CONFIGS) -> list[Layer]:
    """A recipe after everything it extends, oldest first."""
    return _chain(_recipe_file(str(recipe), configs), lambda name: _recipe_file(name, configs), configs)


def preset_layers(preset: str, configs: Path = CONFIGS, where: str | None = None) -> list[Layer]:
    """A model preset (a name, or a YAML file) after everything it extends; keys are those under `model`."""
    return _chain(_preset_file(preset, configs, where), lambda name: _preset_file(name, configs), configs)


def editor_schema(schema: type[Settings], configs: Path = CONFIGS) -> dict[str, Any]:
    """The JSON Schema of a recipe: of the settings, with `extends`, and `model` as the name of a preset."""
    document = json_schema(schema)
    document["properties"] = {EXTENDS: {"type": "string"}, **document["properties"]}
    model = document["properties"].get("model", {})
    if "oneOf" in model:
        model["oneOf"][0] = {"type": "string", "examples": presets(configs)}
    return document


# ---- models at rest among the layers


def with_folders(layers: list[Layer]) -> list[Layer]:
    """The layers, where `model=FOLDER` (a Hub folder, .gguf file, run directory or checkpoint) brings its architecture, weights
    and tokenizer, and `init.weights=FOLDER` its architecture and tokenizer. What the same or a later layer says of the model
    overrides the folder; a layer that spells out the whole model, as a run's settings.yml does, needs no folder."""
    out: list[Layer] = []
    for layer in map(_spelt_out, layers):
        model = layer.values.get("model")
        named = str(model["preset"]) if isinstance(model, dict) and model.get("preset") is not None else None
        init = layer.values.get("init")
        weights = init.get("weights") if isinstance(init, dict) else None
        folder = named if named is not None and is_model(named) else None
        if folder is None and named is None and isinstance(weights, str) and is_model(weights):
            folder = weights
        if folder is None or (isinstance(model, dict) and "family" in model):
            out.append(layer)
            continue
        out = [_without_model(older) for older in out]
        out.append(_of_folder(folder, brings_weights=folder == named))
        if folder == named:
            rest = {key: value for key, value in layer.values["model"].items() if key != "preset"}
            layer = replace(layer, values={**layer.values, "model": rest})
        out.append(layer)
    return out


def is_model(name: str) -> bool:
    """Whether a name is a model at rest here, not a preset: a folder that is no recipe's, or a .gguf file."""
    return Path(name).is_dir() or (name.endswith(".gguf") and Path(name).is_file())


def _of_folder(folder: str, brings_weights: bool) -> Layer:
    from argosy.checkpoint.stored import model_of
    from argosy.data.tokenize import find_tokenizer

    values: dict[str, Any] = {"model": model_of(folder)}
    if brings_weights:
        values["init"] = {"weights": folder}
    if find_tokenizer(Path(folder)) is not None:
        values["data"] = {"tokenizer": folder}
    return Layer(folder, values)


# ---- presets among the layers


def with_preset(layers: list[Layer], configs: Path = CONFIGS) -> list[Layer]:
    """The layers with the preset they ask for beneath the one that asks, and older words on the model dropped."""
    layers = [_spelt_out(layer) for layer in layers]
    naming = max((i for i, layer in enumerate(layers) if _preset_of(layer)), default=None)
    if naming is None:
        return layers
    preset, where = _preset_of(layers[naming]), layers[naming].where("model.preset")
    beneath = [layer.under("model") for layer in preset_layers(str(preset), configs, f"set by {where}")]
    older = [_without_model(layer) for layer in layers[:naming]]
    return [*older, *beneath, *layers[naming:]]


def _spelt_out(layer: Layer) -> Layer:
    """`model: NAME`, alone or beside keys of the model, as `model.preset`."""
    model = layer.values.get("model")
    name = model.get(SELF) if isinstance(model, dict) else model
    if not isinstance(name, str | int | float) or isinstance(name, bool):
        return layer
    rest = {key: value for key, value in model.items() if key != SELF} if isinstance(model, dict) else {}
    marks = dict(layer.marks)
    if "model" in marks:
        marks["model.preset"] = marks["model"]
    preset = {"preset": layer.text("model") or str(name)}
    return replace(layer, values={**layer.values, "model": preset | rest}, marks=marks)


def _preset_of(layer: Layer) -> str | None:
    model = layer.values.get("model")
    preset = model.get("preset") if isinstance(model, dict) else None
    return None if preset is None else layer.text("model.preset") or str(preset)


def _without_model(layer: Layer) -> Layer:
    return replace(layer, values={key: value for key, value in layer.values.items() if key != "model"})


# ---- files


def _named(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.yml")):
        yield path.relative_to(folder).with_suffix("").as_posix()


def _is_path(name: str) -> bool:
    return name.endswith((".yml", ".yaml")) or Path(name).is_dir()


def _recipe_file(name: str, configs: Path) -> Path:
    if _is_path(name) and name not in recipes(configs):
        return _run_file(Path(name))
    if name not in recipes(configs):
        raise UnknownName("recipe", name, recipes(configs))
    return configs / "recipes" / f"{name}.yml"


def _run_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if not (path / "settings.yml").is_file():
        where = "it holds no settings.yml"
        raise BadInput(f"`{path}` is no run directory", where=where, hint="name a recipe or a YAML file")
    return path / "settings.yml"


def _preset_folders(configs: Path) -> list[Path]:
    users = [Path(folder) for folder in os.environ.get(PRESET_FOLDERS, "").split(os.pathsep) if folder]
    return [*users, configs / "models"]


def _preset_file(name: str, configs: Path, where: str | None = None) -> Path:
    if name.endswith((".yml", ".yaml")):
        return Path(name)
    for folder in _preset_folders(configs):
        if name in _named(folder):
            return folder / f"{name}.yml"
    raise UnknownName("model preset", name, presets(configs), where=where)


def _chain(path: Path, find: Callable[[str], Path], configs: Path) -> list[Layer]:
    """A file after those it extends. `extends: other` is a path beside the file, or a name."""
    layers: list[Layer] = []
    seen: list[Path] = []
    while True:
        layer = yaml_layer(path, _origin(path, configs))
        seen.append(path.resolve())
        parent = layer.values.get(EXTENDS)
        layers.insert(0, replace(layer, values={key: value for key, value in layer.values.items() if key != EXTENDS}))
        if parent is None:
            return layers
        where = f"in {layer.where(EXTENDS)}"
        if not isinstance(parent, str):
            raise BadInput(f"`{EXTENDS}` names one file", where=where, hint="write `extends: NAME`")
        path = path.parent / parent if parent.endswith((".yml", ".yaml")) else find(parent)
        if path.resolve() in seen:
            raise BadInput(f"`{EXTENDS}: {parent}` goes in a circle", where=where)


def _origin(path: Path, configs: Path) -> str:
    """What provenance calls a file: its place in the package's configs, else the path as it was given."""
    return path.relative_to(configs).as_posix() if path.is_relative_to(configs) else str(path)
