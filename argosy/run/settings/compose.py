"""Composes the settings layers of a run: base.yml, the model's preset, the recipe with what it extends, then `key=value` words.

    configs/base.yml < configs/models/PRESET.yml < files the recipe extends < the recipe < words

A layer that names a preset discards what earlier layers set for the model, because they described another one:
`model=llama3.2-1b` on the command line replaces the recipe's model completely. What the same or a later layer sets for the model
overrides the preset, as usual, and provenance shows it. Composing only reads files.

A recipe may name settings that it leaves to the user (`needs`, each with an example; of `a or b` one is enough), and defaults that
depend on a choice (`when`):

    needs: {model: FOLDER, data: {source: chats.jsonl}, reward or environment: FILE.py:FUNCTION}
    when: {adapter: {none: {optimizer: {learning_rate: 2e-5}}}}
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from argosy.checkpoint.run_directory import settings_elsewhere
from argosy.core.addresses import is_address, local_path
from argosy.core.errors import BadInput, SettingsError, UnknownName, UserError, mistakes_of, problems_of
from argosy.core.settings import (
    COMMAND_LINE,
    Choice,
    Mark,
    Reading,
    Settings,
    SettingsLayer,
    flatten,
    mistakes,
    read_settings,
    words_layer,
    yaml_layer,
)
from argosy.core.settings.explain import json_schema
from argosy.core.settings.words import SELF
from argosy.data.sources import is_prepared
from argosy.models import FAMILIES
from argosy.run.settings.mesh_presets import with_mesh
from argosy.run.settings.stored_layers import init_of, overruled, spelt_out, with_folders
from argosy.train.objectives import OBJECTIVES

T = TypeVar("T", bound=Settings)

CONFIGS = Path(__file__).parents[2] / "configs"
# Folders with users' own presets, separated as in PATH.
PRESET_FOLDERS = "ARGOSY_PRESETS"
EXTENDS, NEEDS, WHEN = "extends", "needs", "when"
# Between keys of `needs` of which one is enough.
OR = " or "
# What a reward may be, for who has named none.
REWARDS = "reward=maths compares with the column `answer`; FILE.py has `def FUNCTION(completions, **columns)`, a number for each"
# ORGANIZATION/NAME of a model on the Hugging Face Hub.
# The preset by which settings are explained that need a model.
EXAMPLE = "llama3.2-1b"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def compose(
    schema: type[T],
    recipe: str | Path | None,
    words: Iterable[str] = (),
    configs: Path = CONFIGS,
    origin: str = COMMAND_LINE,
    *,
    with_examples: bool = False,
) -> Reading[T]:
    """The settings of a run.

    Args:
        schema: the root settings; only one with a `model` key has presets.
        recipe: a name under `configs/recipes`, a YAML file, a run directory or the address of one (its `settings.yml`), or None.
        words: `key=value`, as typed.
        configs: the folder of base.yml, models/ and recipes/.
        origin: who gave the words.
        with_examples: what the recipe needs and nobody sets gets an example, so that its settings can be explained.

    Raises:
        UnknownName: no such recipe or preset.
        BadInput, SettingsError: everything wrong with the files, or with the settings.
    """
    layers = [yaml_layer(configs / "base.yml")] if (configs / "base.yml").exists() else []
    layers += recipe_layers(recipe, configs) if recipe is not None else []
    layers.append(words_layer(words, origin))
    layers, needs = with_conditions(schema, layers)
    if "mesh" in schema.model_fields:
        layers = with_mesh(layers, configs)
    if "model" not in schema.model_fields:
        return read_settings(schema, *layers)
    layers = with_folders(layers)
    if with_examples:
        layers = [_examples_of(needs, layers, configs), *layers]
    check_needs(schema, str(recipe), layers, needs)
    try:
        layers = with_preset(layers, configs, _families(schema))
    except UserError as error:
        others, error.good = _beside_the_preset(schema, layers, configs)
        if others:
            raise SettingsError([*problems_of(error), *others], error.good) from None
        raise
    return read_settings(schema, *layers, *objective_layers(schema, layers))


def objective_layers(schema: type[Settings], layers: list[SettingsLayer]) -> list[SettingsLayer]:
    """What follows from the objective, for settings that no layer gives: the head of a reward model, and rollouts."""
    if "objective" not in schema.model_fields:
        return []
    try:
        objective = OBJECTIVES[_chosen(schema, layers, "objective")]
        family = FAMILIES[_chosen(schema, layers, "model", "family")]
    except (UnknownName, ImportError, AttributeError):
        # Reading the layers reports it.
        return []

    def is_given(key: str) -> bool:
        return any(_gives(layer.values, key) for layer in layers)

    values: dict[str, Any] = {}
    scores = objective.needs.scores
    if scores and "scores" in family.model_fields and not is_given("model.scores"):
        values["model"] = {"scores": scores}
    if objective.needs.rollouts != "none":
        if objective.needs.rollouts == "teacher" and not is_given("rollout.completions"):
            # Without rewards there are no groups to compare.
            values["rollout"] = {"completions": 1}
        elif not is_given("rollout"):
            values["rollout"] = {}
    return [SettingsLayer("the objective", values)] if values else []


def with_conditions(
    schema: type[Settings], layers: list[SettingsLayer]
) -> tuple[list[SettingsLayer], dict[str, Any]]:
    """The layers, in which the defaults of a recipe that depend on a choice follow those of the recipe where the choice is made; and
    what the recipe needs: {dotted key: example}."""
    out, needs = [], dict[str, Any]()
    for layer in layers:
        values = {key: value for key, value in layer.values.items() if key not in (NEEDS, WHEN)}
        out.append(replace(layer, values=values))
        needs |= flatten(layer.values.get(NEEDS) or {})
        for key, options in (layer.values.get(WHEN) or {}).items():
            chosen = _chosen(schema, layers, key)
            if isinstance(options, dict) and isinstance(options.get(chosen), dict):
                prefix = f"{WHEN}.{key}.{chosen}."
                marks = {k.removeprefix(prefix): mark for k, mark in layer.marks.items() if k.startswith(prefix)}
                out.append(SettingsLayer(layer.origin, options[chosen], marks))
    return out, needs


def _chosen(schema: type[Settings], layers: list[SettingsLayer], key: str, tag: str = "name") -> str:
    """The name that the layers give to a choice at the root."""
    for layer in reversed(layers):
        value = layer.values.get(key, {})
        given = [value[own] for own in (tag, SELF) if own in value] if isinstance(value, dict) else [value]
        if given:
            return "none" if given[0] is None else str(given[0])
    field = schema.model_fields.get(key)
    return "" if field is None else str(field.default)


def check_needs(schema: type[Settings], recipe: str, layers: list[SettingsLayer], needs: Mapping[str, Any]) -> None:
    """Checks that everything a recipe leaves to the user is set.

    Raises:
        SettingsError: something is not, together with everything else that is wrong.
    """
    missing = [key for key in needs if not any(_gives(layer.values, one) for layer in layers for one in key.split(OR))]
    if not missing:
        return
    # A model would have come with what the run starts from.
    gone = mistakes_of(*(partial(check_start, init_of(one, "weights"), init_of(one, "state")) for one in layers))
    missing = [key for key in missing if key != "model" or not gone]
    errors = [*gone]
    if missing:
        words = " ".join(f"{key.partition(OR)[0]}={example}" for key, example in needs.items())
        named = " and ".join(f"`{key.replace(OR, f'`{OR}`')}`" for key in missing)
        more = f"; {REWARDS}" if any("reward" in key.split(OR) for key in missing) else ""
        errors.append(BadInput(f"`{recipe}` needs {named}", where=mistakes.NOBODY, hint=f"argosy train {recipe} {words}{more}"))
    try:
        read_settings(schema, *layers)
    except UserError as also:
        # What is needed may be a broken rule too.
        ones = [one for key in missing for one in key.split(OR)]
        said = ("`model`", "model ", *(f"{one} is missing" for one in ones), *(f"`{one}` is required" for one in ones))
        errors += [p for p in problems_of(also) if not p.what.startswith(said)]
    raise SettingsError(errors) from None


def _examples_of(needs: Mapping[str, Any], layers: list[SettingsLayer], configs: Path) -> SettingsLayer:
    """A layer with an example for everything that a recipe needs and no layer gives; for a model, a preset as if it had weights."""
    values: dict[str, Any] = {}
    for key, example in needs.items():
        names = key.split(OR)
        if any(_gives(layer.values, name) for layer in layers for name in names):
            continue
        group = values
        *above, last = names[0].split(".")
        for name in above:
            group = group.setdefault(name, {})
        group[last] = EXAMPLE if names[0] == "model" else example
        if names[0] == "model":
            values["init"] = {"weights": example}
    return SettingsLayer("an example", values)


def _gives(values: Mapping[str, Any], key: str) -> bool:
    """Whether a layer sets a dotted key, or the group that it begins."""
    at: Any = values
    for name in key.split("."):
        if not isinstance(at, Mapping) or name not in at:
            return False
        at = at[name]
    return at is not None


def _beside_the_preset(
    schema: type[Settings], layers: list[SettingsLayer], configs: Path
) -> tuple[list[UserError], dict[str, Any]]:
    """What else is wrong in settings whose preset does not exist, and the root's settings that are right. The nearest preset takes
    its place, so what is said of the model must be true of any; where none is near, nothing is."""
    layers = [spelt_out(layer) for layer in layers]
    naming = max(i for i, layer in enumerate(layers) if _preset_of(layer))
    layer = layers[naming]
    near = get_close_matches(str(_preset_of(layer)), presets(configs), n=1)
    model = layer.values["model"] | {"preset": near[0]} if near else {}
    layers[naming] = replace(layer, values={**layer.values, "model": model}, marks=dict(layer.marks) | {"model.preset": Mark()})
    try:
        good = read_settings(schema, *with_preset(layers, configs)).value
    except SettingsError as error:
        is_certain = ("unknown setting", " should be ") if near else ()
        return [p for p in error.problems if "model" not in p.what or any(w in p.what for w in is_certain)], error.good
    except UserError:
        # The nearest preset is in a file with a mistake.
        return [], {}
    return [], {name: getattr(good, name) for name in type(good).model_fields}


def recipes(configs: Path = CONFIGS) -> list[str]:
    """The names of the recipes that come with the package."""
    return list(_named(configs / "recipes"))


def about(recipe: str, configs: Path = CONFIGS) -> str:
    """The comment on the first line of a recipe."""
    with (configs / "recipes" / f"{recipe}.yml").open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()


def run_folder(recipe: str | Path) -> str:
    """The run directory of a recipe, unless `dir` names another."""
    return f"runs/{Path(recipe).stem}"


def presets(configs: Path = CONFIGS) -> list[str]:
    """The names of all model presets: the package's, and those in the folders of $ARGOSY_PRESETS."""
    return sorted({name for folder in _preset_folders(configs) for name in _named(folder)})


def recipe_layers(recipe: str | Path, configs: Path = CONFIGS) -> list[SettingsLayer]:
    """A recipe after everything it extends, oldest first."""
    if is_address(recipe):
        return [settings_elsewhere(str(recipe))]
    recipe = local_path(recipe)
    return _chain(_recipe_file(recipe, configs), lambda name: _recipe_file(name, configs), configs)


def preset_layers(preset: str, configs: Path = CONFIGS, where: str | None = None) -> list[SettingsLayer]:
    """A model preset (a name, or a YAML file) after everything it extends; its keys are those under `model`."""
    return _chain(_preset_file(preset, configs, where), lambda name: _preset_file(name, configs), configs)


def preset_config(name: str) -> Any:
    """The config of a preset, given by name or YAML file."""
    layers = [layer.under("model") for layer in preset_layers(name)]
    return read_settings(_model_settings(), *layers).value.model


@cache
def _model_settings() -> Any:
    """Settings that hold a model alone. A settings class costs 5 ms to make, so all presets are read by one."""
    from argosy.models import FAMILIES

    class Model(Settings):
        model: Annotated[Any, Choice(FAMILIES, tag="family")]

    return Model


def editor_schema(schema: type[Settings], configs: Path = CONFIGS) -> dict[str, Any]:
    """The JSON Schema of a recipe: the settings, plus `extends`, plus `model` as the name of a preset."""
    document = json_schema(schema)
    extends = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    conditions = {NEEDS: {"type": "object"}, WHEN: {"type": "object"}}
    document["properties"] = {EXTENDS: extends, **conditions, **document["properties"]}
    model = document["properties"].get("model", {})
    if "oneOf" in model:
        model["oneOf"][0] = {"type": "string", "examples": presets(configs)}
    return document


def key_meant(key: str) -> str:
    """The setting a name stands for: itself, or the one that the error for an unknown name suggests."""
    from argosy.run.settings.run import Run

    names = compose(Run, "tiny").names
    if key in names.known:
        return key
    hint = mistakes.unknown_key(key, None, names).hint or ""
    meant = re.match(r"did you mean `([^`]+)`\?", hint)
    return meant[1] if meant else key


# ---- presets among the layers


def with_preset(layers: list[SettingsLayer], configs: Path = CONFIGS, families: Iterable[str] = ()) -> list[SettingsLayer]:
    """The layers, with the requested preset inserted below the layer that requests it, and older model settings dropped."""
    layers = [spelt_out(layer) for layer in layers]
    naming = max((i for i, layer in enumerate(layers) if _preset_of(layer)), default=None)
    if naming is None:
        return layers
    preset, where = _preset_of(layers[naming]), layers[naming].where("model.preset")
    try:
        found = preset_layers(str(preset), configs, f"set by {where}")
    except UnknownName as error:
        if preset is not None and preset in families and error.name == preset:
            raise _a_family(str(preset), configs, f"set by {where}") from None
        if preset is not None and error.name == preset and ("/" in preset or preset.endswith(".gguf")):
            raise no_model(preset, f"set by {where}", configs) from None
        raise
    beneath = [layer.under("model") for layer in found]
    return [*overruled(layers[:naming]), *beneath, *layers[naming:]]


def _families(schema: type[Settings]) -> Iterable[str]:
    choice = next((mark for mark in schema.model_fields["model"].metadata if isinstance(mark, Choice)), None)
    return choice.registry if choice else ()


def _a_family(name: str, configs: Path, where: str) -> BadInput:
    """The error for `model=llama`: a family has no sizes."""
    sized = _of_family(name, presets(configs))
    some = f"name a preset: {', '.join(f'model={preset}' for preset in sized[:5])}" if sized else "name a preset of it"
    hint = f"{some}; or set model.family={name} and its sizes"
    return BadInput(f"`{name}` is a model family, which has no sizes", where=where, hint=hint)


def no_model(name: str, where: str | None = None, configs: Path = CONFIGS) -> UserError:
    """The error for a model that is not there: a Hub id, a path without a file, or the name of a preset where trained weights are
    needed."""
    models = presets(configs)
    if name in models:
        return BadInput(
            f"`{name}` is a preset: its name alone means random weights",
            hint="give the folder or file of its trained weights, or train one: argosy train RECIPE model=" + name,
        )
    given = "model=" if where else "the folder "
    owner, _, own = name.partition("/")
    if _HUB_ID.fullmatch(name) and owner != "runs" and not Path(owner).exists():
        same = [model for model in models if _plain(model) == _plain(own)]
        random = f"; the preset `{same[0]}` has random weights" if same else ""
        hint = f"nothing is downloaded: `hf download {name} --local-dir {own}`, then {given}{own}{random}"
        return BadInput(f"no folder `{name}`", where=where, hint=hint)
    what = "file" if name.endswith((".gguf", ".yml", ".yaml")) else "folder"
    hint = f"{'model=FOLDER takes ' if where else ''}a Hub folder, a .gguf file, a run directory or a checkpoint"
    return BadInput(f"no such {what}: `{name}`", where=where, hint=hint)


def check_start(weights: str | None, state: str | None) -> None:
    """Checks that the model or the run to start from exists.

    Raises:
        BadInput: it does not.
    """
    if weights and "://" not in weights and not Path(weights).exists():
        raise no_model(weights, "set by init.weights")
    if state and "://" not in state and not Path(state).exists():
        hint = "name a run directory or one of its checkpoints; init.weights takes the weights of any model"
        raise BadInput(f"no such run: `{state}`", where="set by init.state", hint=hint)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _of_family(name: str, models: Iterable[str]) -> list[str]:
    """The presets whose names begin with a family's name: `gemma2-2b` for gemma, `gpt-oss-20b` for gpt_oss."""
    begins = re.compile(re.escape(name.replace("_", "-")) + r"[-\d.]")
    return [model for model in models if len(name) > 2 and begins.match(model)]


def _preset_of(layer: SettingsLayer) -> str | None:
    model = layer.values.get("model")
    preset = model.get("preset") if isinstance(model, dict) else None
    return None if preset is None else layer.text("model.preset") or str(preset)


# ---- files


def _named(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.yml")):
        yield path.relative_to(folder).with_suffix("").as_posix()


def _is_path(name: str) -> bool:
    return name.endswith((".yml", ".yaml")) or Path(name).is_dir()


def _recipe_file(name: str, configs: Path) -> Path:
    known = recipes(configs)
    if name in known:
        return configs / "recipes" / f"{name}.yml"
    if _is_path(name):
        return _run_file(Path(name))
    raise _unknown_recipe(name, known, configs)


def _unknown_recipe(name: str, known: list[str], configs: Path) -> UserError:
    """The error for a name that is not a recipe; suggests the file with its ending, or explains that it names a model."""
    if "=" in name:
        hint = f"name a recipe first: argosy train {_usual(known)} {name}"
        return BadInput(f"`{name}` is a setting, not a recipe", where=recipes_named(known), hint=hint)
    error = UnknownName("recipe", name, known)
    for path in (Path(f"{name}{ending}") for ending in (".yml", ".yaml")):
        if path.is_file():
            return BadInput(error.what, hint=f"did you mean the file `{path}`?")
    if Path(name).is_file():
        hint = f"a recipe ends in .yml; to train on a text: argosy train {_usual(known)} data.source={name}"
        return BadInput(error.what, where=f"`{name}` is a file", hint=hint)
    if words := _objective_words(name, known):
        return BadInput(f"`{name}` is an objective, not a recipe", hint=f"name a recipe first: argosy train {words}")
    models = presets(configs)
    for what, close in [("a model", [m for m in models if m == name]), ("a model family", _of_family(name, models))]:
        if close and known:
            hint = f"name a recipe first, then the model: {_usual(known)} model={close[0]}"
            return BadInput(f"`{name}` is {what}, not a recipe", hint=hint)
    return error


# The recipe of objectives without one of their own, by the format of records that they train on.
_RECIPES = {"prompt": "grpo", "preference": "dpo", "stepwise": "reward"}


def _objective_words(name: str, known: list[str]) -> str | None:
    """The recipe and the setting that choose an objective, or a loss of DPO, of this name; None if there is none."""
    from argosy.train.objectives import OBJECTIVES
    from argosy.train.objectives.preferences.dpo import LOSSES as DPO_LOSSES
    from argosy.train.objectives.preferences.dpo import SMOOTHED

    named = {_plain(one): one for one in OBJECTIVES}
    words = {_plain(loss): f"dpo objective.losses.{loss}=1" for loss in DPO_LOSSES}
    words |= {_plain(loss): f"{words[_plain(loss)]} objective.label_smoothing=0.1" for loss in SMOOTHED}
    for plain, one in named.items():
        formats = OBJECTIVES[one].needs.formats
        recipe = _RECIPES.get(formats[0], "sft") if formats else "distill" if "teacher" in OBJECTIVES[one].model_fields else "sft"
        words[plain] = one if one in known else f"{recipe} objective={one}"
    found = words.get(_plain(name.replace("++", "pp")))
    return found if found and found.partition(" ")[0] in known else None


def recipes_named(known: list[str]) -> str:
    """All recipes, in one line."""
    return f"recipes are {', '.join(known)}"


def _usual(known: list[str]) -> str:
    return "tiny" if "tiny" in known or not known else known[0]


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
    """A file after those it extends. `extends: other` is a path relative to the file, or a name; in a list, later ones win."""
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
    """What provenance calls a file: its path within the package's configs, otherwise the path as given."""
    return path.relative_to(configs).as_posix() if path.is_relative_to(configs) else str(path)
