"""Finds and reads the files of recipes and presets, with the files that they extend, and makes the errors for unknown names.

This module only reads files. `run.settings.compose` merges them.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from argosy.checkpoint.run_directory import settings_elsewhere
from argosy.core.addresses import is_address, is_missing, local_path
from argosy.core.errors import BadInput, UnknownName, UserError
from argosy.core.settings import Choice, Settings, SettingsLayer, read_settings, yaml_layer
from argosy.data.sources import is_prepared

CONFIGS = Path(__file__).parents[2] / "configs"
# Folders with users' own presets, separated as in PATH.
PRESET_FOLDERS = "ARGOSY_PRESETS"
EXTENDS = "extends"
# ORGANIZATION/NAME of a model on the Hugging Face Hub.
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def recipes(configs: Path = CONFIGS) -> list[str]:
    """Returns the names of the recipes that come with the package."""
    return list(_names_in(configs / "recipes"))


def about(recipe: str, configs: Path = CONFIGS) -> str:
    """Returns the description of a recipe, which is the comment on its first line."""
    with (configs / "recipes" / f"{recipe}.yml").open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()


def run_folder(recipe: str | Path) -> str:
    """Returns the default run directory of a recipe."""
    return f"runs/{Path(recipe).stem}"


def presets(configs: Path = CONFIGS) -> list[str]:
    """Returns the names of all model presets: those of the package, and those in the folders of $ARGOSY_PRESETS."""
    return sorted({name for folder in _preset_folders(configs) for name in _names_in(folder)})


def recipe_layers(recipe: str | Path, configs: Path = CONFIGS) -> list[SettingsLayer]:
    """Returns the layers of a recipe: all files that it extends, from the most general on, then the recipe."""
    if is_address(recipe):
        return [settings_elsewhere(str(recipe))]
    recipe = local_path(recipe)
    return _chain(_recipe_file(recipe, configs), lambda name: _recipe_file(name, configs), configs)


def preset_layers(preset: str, configs: Path = CONFIGS, where: str | None = None) -> list[SettingsLayer]:
    """Returns the layers of a model preset, which is a name or a YAML file: all files that it extends, from the most general on, then
    the preset. Their keys are those under `model`.
    """
    return _chain(_preset_file(preset, configs, where), lambda name: _preset_file(name, configs), configs)


def preset_config(name: str) -> Any:
    """Returns the model config of a preset, which is a name or a YAML file."""
    layers = [layer.under("model") for layer in preset_layers(name)]
    return read_settings(_model_settings(), *layers).value.model


@cache
def _model_settings() -> Any:
    """Returns a class of settings with the single field `model`. Such a class takes 5 ms to make, so all presets are read with one."""
    from argosy.models import FAMILIES

    class Model(Settings):
        model: Annotated[Any, Choice(FAMILIES, tag="family")]

    return Model


def no_model(name: str, where: str | None = None, configs: Path = CONFIGS) -> UserError:
    """Makes the error for a model that does not exist. The name may be a Hub id, a path without a file, or the name of a preset where
    trained weights are needed.
    """
    models = presets(configs)
    if name in models:
        return BadInput(
            f"`{name}` is a preset: its name alone means random weights",
            hint="give the folder or file of its trained weights, or train one: argosy train RECIPE model=" + name,
        )
    prefix = "model=" if where else ""
    owner, _, repository = name.partition("/")
    if _HUB_ID.fullmatch(name) and owner != "runs" and not Path(owner).exists():
        same = [model for model in models if _plain(model) == _plain(repository)]
        random = f"; the preset `{same[0]}` has random weights" if same else ""
        hint = f"of the Hub: {prefix}hf:{name}{random}"
        return BadInput(f"no folder `{name}`", where=where, hint=hint)
    kind = "file" if name.endswith((".gguf", ".safetensors", ".yml", ".yaml")) else "folder"
    hint = f"{'model=FOLDER takes ' if where else ''}a Hub folder, a .gguf file, a run directory, a checkpoint or hf:OWNER/NAME"
    return BadInput(f"no such {kind}: `{name}`", where=where, hint=hint)


def check_start(weights: str | None, state: str | None) -> None:
    """Checks that the model or the run to start from exists.

    Raises:
        BadInput: it does not exist.
    """
    if weights and is_missing(weights):
        raise no_model(weights, "set by init.weights")
    if state and is_missing(state):
        hint = "name a run directory or one of its checkpoints; init.weights takes the weights of any model"
        raise BadInput(f"no such run: `{state}`", where="set by init.state", hint=hint)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def presets_of_family(name: str, models: Iterable[str]) -> list[str]:
    """Returns the presets whose names begin with a family's name, such as `gemma2-2b` for gemma, and `gpt-oss-20b` for gpt_oss."""
    begins = re.compile(re.escape(name.replace("_", "-")) + r"[-\d.]")
    return [model for model in models if len(name) > 2 and begins.match(model)]


def _names_in(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.yml")):
        yield path.relative_to(folder).with_suffix("").as_posix()


def _is_path(name: str) -> bool:
    return name.endswith((".yml", ".yaml")) or Path(name).is_dir()


def _recipe_file(name: str, configs: Path) -> Path:
    names = recipes(configs)
    if name in names:
        return configs / "recipes" / f"{name}.yml"
    if _is_path(name):
        return _run_file(Path(name))
    raise _unknown_recipe(name, names, configs)


def _unknown_recipe(name: str, names: list[str], configs: Path) -> UserError:
    """Makes the error for a name that is not a recipe. It suggests the file with its ending, or explains that the name is that of a
    model.
    """
    if "=" in name:
        hint = f"name a recipe first: argosy train {_usual(names)} {name}"
        return BadInput(f"`{name}` is a setting, not a recipe", where=recipes_named(names), hint=hint)
    error = UnknownName("recipe", name, names)
    for path in (Path(f"{name}{ending}") for ending in (".yml", ".yaml")):
        if path.is_file():
            return BadInput(error.what, hint=f"did you mean the file `{path}`?")
    if Path(name).is_file():
        hint = f"a recipe ends in .yml; to train on a text: argosy train {_usual(names)} data.source={name}"
        return BadInput(error.what, where=f"`{name}` is a file", hint=hint)
    if words := _objective_words(name, names):
        return BadInput(f"`{name}` is an objective, not a recipe", hint=f"name a recipe first: argosy train {words}")
    models = presets(configs)
    for kind, close in [("a model", [m for m in models if m == name]), ("a model family", presets_of_family(name, models))]:
        if close and names:
            hint = f"name a recipe first, then the model: {_usual(names)} model={close[0]}"
            return BadInput(f"`{name}` is {kind}, not a recipe", hint=hint)
    return error


# The recipe of objectives without one of their own, by the format of records that they train on.
_RECIPES = {"prompt": "grpo", "preference": "dpo", "stepwise": "reward"}
# Recipes with a name that tells the model, by their objective.
_OF_MODELS = {
    **{"rank": "ranker", "retrieve": "two-tower", "autoencode": "vae"},
    **{"edm": "diffusion objective=edm model.prediction=edm"},
    **{"mean_flow": "diffusion objective=mean_flow model.intervals=true"},
    **{"contrastive": "embed", "similarity": "embed objective=similarity"},
}


def _objective_words(name: str, names: list[str]) -> str | None:
    """Returns the recipe and the setting that choose the objective or the loss of DPO with this name; None if there is none."""
    from argosy.train.objectives import OBJECTIVES
    from argosy.train.objectives.preferences.dpo import LOSSES as DPO_LOSSES
    from argosy.train.objectives.preferences.dpo import SMOOTHED

    by_plain = {_plain(objective): objective for objective in OBJECTIVES}
    words = {_plain(loss): f"dpo objective.losses.{loss}=1" for loss in DPO_LOSSES}
    words |= {_plain(loss): f"{words[_plain(loss)]} objective.label_smoothing=0.1" for loss in SMOOTHED}
    for plain, objective in by_plain.items():
        formats = OBJECTIVES[objective].needs.formats
        recipe = _RECIPES.get(formats[0], "sft") if formats else "distill" if "teacher" in OBJECTIVES[objective].model_fields else "sft"
        words[plain] = objective if objective in names else _OF_MODELS.get(objective, f"{recipe} objective={objective}")
    choice = words.get(_plain(name.replace("++", "pp")))
    return choice if choice and choice.partition(" ")[0] in names else None


def recipes_named(names: list[str]) -> str:
    """Returns a phrase that lists recipes."""
    return f"recipes are {', '.join(names)}"


def _usual(names: list[str]) -> str:
    return "tiny" if "tiny" in names or not names else names[0]


def _run_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if not (path / "settings.yml").is_file():
        if is_prepared(path):
            hint = f"name a recipe first: argosy train tiny data.source={path}"
            raise BadInput(f"`{path}` is a prepared corpus, not a recipe", hint=hint)
        where = "it holds no settings.yml"
        raise BadInput(f"`{path}` is not a run directory", where=where, hint="name a recipe or a YAML file")
    return path / "settings.yml"


def _preset_folders(configs: Path) -> list[Path]:
    users = [Path(folder) for folder in os.environ.get(PRESET_FOLDERS, "").split(os.pathsep) if folder]
    return [*users, configs / "models"]


def _preset_file(name: str, configs: Path, where: str | None = None) -> Path:
    if name.endswith((".yml", ".yaml")):
        return Path(name)
    inside = ".." not in Path(name).parts and not Path(name).is_absolute()
    for folder in _preset_folders(configs):
        if inside and (path := folder / f"{name}.yml").is_file():
            return path
    raise UnknownName("model preset", name, presets(configs), where=where, all_names="`argosy models`")


def _chain(path: Path, find: Callable[[str], Path], configs: Path, below: tuple[Path, ...] = ()) -> list[SettingsLayer]:
    """Returns the layers of a file, after those of the files that it extends. `extends: other` is a path relative to the file, or a
    name. In a list, later files override earlier ones.

    Args:
        find: (name) -> the path of the file.
        below: the files that extend this one, to detect cycles.
    """
    layer = yaml_layer(path, _origin(path, configs))
    below = (*below, path.resolve())
    parents = layer.values.get(EXTENDS)
    layers: list[SettingsLayer] = []
    where = f"in {layer.where(EXTENDS)}"
    for parent in parents if isinstance(parents, list) else [] if parents is None else [parents]:
        if not isinstance(parent, str):
            raise BadInput(f"`{EXTENDS}` names files", where=where, hint=f"write `{EXTENDS}: NAME`, or a list of names")
        above = path.parent / parent if parent.endswith((".yml", ".yaml")) else find(parent)
        if above.resolve() in below:
            raise BadInput(f"`{EXTENDS}: {parent}` goes in a circle", where=where)
        layers += _chain(above, find, configs, below)
    return [*layers, replace(layer, values={key: value for key, value in layer.values.items() if key != EXTENDS})]


def _origin(path: Path, configs: Path) -> str:
    """Returns the name of a file in provenance: its path within the package's configs, otherwise the path as given."""
    return path.relative_to(configs).as_posix() if path.is_relative_to(configs) else str(path)
