"""Composes the settings of a run by merging layers. Each file and the command line is a layer, and later layers override earlier ones:

    configs/base.yml < configs/models/PRESET.yml < files the recipe extends < the recipe < `key=value` words of the command line

A layer that names a preset discards the model settings of earlier layers, because these described another model. So `model=llama3.2-1b`
on the command line replaces the recipe's model completely. Model settings of the same or a later layer override the preset, and
provenance shows it. Composing only reads files.

A recipe may name settings that the user must give (`needs`), each with an example; `a or b` needs one of the two. It may also have
defaults that depend on a choice (`when`):

    needs: {model: FOLDER, data: {source: chats.jsonl}, reward or environment: FILE.py:FUNCTION}
    when: {adapter: {none: {optimizer: {learning_rate: 2e-5}}}}
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

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
from argosy.data.settings import DataSettings
from argosy.models import FAMILIES
from argosy.run.settings.mesh_presets import with_mesh
from argosy.run.settings.recipe_files import (
    CONFIGS,
    EXTENDS,
    check_start,
    no_model,
    preset_layers,
    presets,
    presets_of_family,
    recipe_layers,
)
from argosy.run.settings.stored_layers import init_of, is_model, layers_below_model, spelt_out, with_folders
from argosy.train.objectives import OBJECTIVES

if TYPE_CHECKING:
    from argosy.weights.hub.sentence_steps import EmbeddingSteps

T = TypeVar("T", bound=Settings)

NEEDS, WHEN = "needs", "when"
# The columns of texts that a prompt is put before, of other objectives than `contrastive`.
TEXT_COLUMNS = {"similarity": ("sentence1", "sentence2")}
# Between keys of `needs` of which one is enough.
OR = " or "
# What a reward may be, for who has named none.
REWARDS = "reward=maths compares with the column `answer`; FILE.py has `def FUNCTION(completions, **columns)`, a number for each"
# The presets by which settings are explained that need a model, and those that need an encoder.
EXAMPLE, EXAMPLE_ENCODER = "llama3.2-1b", "minilm-l6"


def compose(
    schema: type[T],
    recipe: str | Path | None,
    words: Iterable[str] = (),
    configs: Path = CONFIGS,
    origin: str = COMMAND_LINE,
    *,
    with_examples: bool = False,
) -> Reading[T]:
    """Composes and checks the settings of a run.

    Args:
        schema: the class of the root settings. Presets exist only if it has a field `model`.
        recipe: a name under `configs/recipes`, a YAML file, or a run directory or its address (for its `settings.yml`). None: no
            recipe.
        words: `key=value` settings, as typed.
        configs: the folder of base.yml, models/ and recipes/.
        origin: the source of the words, for provenance.
        with_examples: whether required settings that no layer sets get an example value, so that the recipe can be explained.

    Raises:
        UnknownName: there is no such recipe or preset.
        BadInput, SettingsError: there are mistakes in the files or the settings. All of them are reported.
    """
    layers = [yaml_layer(configs / "base.yml")] if (configs / "base.yml").exists() else []
    layers += recipe_layers(recipe, configs) if recipe is not None else []
    layers.append(words_layer(words, origin))
    layers, needs = with_conditions(schema, layers)
    if "mesh" in schema.model_fields:
        layers = with_mesh(layers, configs)
    if "model" not in schema.model_fields:
        return read_settings(schema, *layers)
    layers = with_folders(layers, _choice_of(schema, layers, "objective"))
    if with_examples:
        layers = [_examples_of(schema, needs, layers), *layers]
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
    """Returns layers of defaults that follow from the objective, such as the head of a reward model, and rollouts. Layers of the user
    override them."""
    if "objective" not in schema.model_fields:
        return []
    try:
        objective = OBJECTIVES[_choice_of(schema, layers, "objective")]
        family = FAMILIES[_choice_of(schema, layers, "model", "family")]
    except (UnknownName, ImportError, AttributeError):
        # Reading the layers reports it.
        return []

    def is_given(key: str) -> bool:
        return any(_gives(layer.values, key) for layer in layers)

    values: dict[str, Any] = {}
    scores = objective.needs.scores
    if scores and "scores" in family.model_fields and not is_given("model.scores"):
        values["model"] = {"scores": scores}
    if (format := objective.needs.asked_format) is not None and not is_given("data.format"):
        values["data"] = {"format": format}
    if not is_given("data.negatives") and (negatives := _last_value(layers, "objective.negatives")) not in (None, 0, 1):
        values["data"] = values.get("data", {}) | {"negatives": negatives}
    if objective.needs.labels:
        for group, defaults in label_values(layers, is_given).items():
            values[group] = values.get(group, {}) | defaults
    pools = "pooling" in getattr(objective, "model_fields", {})
    steps = stored_steps(layers) if pools else None
    if pools and steps is None and getattr(family, "causal", False) and not is_given("objective.pooling"):
        values["objective"] = {"pooling": "last"}
    if steps is not None:
        if not is_given("objective.pooling"):
            values["objective"] = {"pooling": steps.pooling}
        if steps.prompt and not is_given("data.prompts"):
            columns = TEXT_COLUMNS.get(_choice_of(schema, layers, "objective"), ("anchor", "positive"))
            columns = (*columns, "negative") if _last_value(layers, "objective.negatives") else columns
            values["data"] = values.get("data", {}) | {"prompts": dict.fromkeys(columns, steps.prompt)}
        if (steps.prompt or is_given("data.prompts")) and not steps.include_prompt and not is_given("objective.include_prompt"):
            values["objective"] = values.get("objective", {}) | {"include_prompt": False}
    if objective.needs.rollouts != "none":
        if objective.needs.rollouts == "teacher" and not is_given("rollout.completions"):
            # Without rewards there are no groups to compare.
            values["rollout"] = {"completions": 1}
        elif not is_given("rollout"):
            values["rollout"] = {}
    return [SettingsLayer("the objective", values)] if values else []


def label_values(layers: list[SettingsLayer], is_given: Callable[[str], bool]) -> dict[str, Any]:
    """Returns default values that follow from the labels of the data: the classes of the data and of the model. If the run starts from
    a classifier, the classes are those of that model.

    Args:
        is_given: (dotted key) -> whether a layer sets it.
    """
    if is_given("model.scores"):
        label_lists = [layer.values["model"]["labels"] for layer in layers if _gives(layer.values, "model.labels")]
        return {"data": {"labels": list(label_lists[-1])}} if label_lists and not is_given("data.labels") else {}
    from argosy.data.labels import labels_of_source

    values: dict[str, Any] = {}
    for layer in layers:
        data = layer.values.get("data")
        fields = data if isinstance(data, dict) else {}
        if "source" in fields:
            values = {name: value for name, value in values.items() if name != "columns"}
        values |= {name: fields[name] for name in ("source", "columns", "invalid", "labels") if name in fields}
    try:
        settings = DataSettings.model_validate(values)
    except ValidationError:
        # Reading the layers reports it.
        return {}
    labels = labels_of_source(settings)
    names = tuple(settings.labels) or labels.names
    problem = {} if is_given("model.problem_type") else {"problem_type": labels.problem_type}
    return {"data": {"labels": list(names)}, "model": {"scores": len(names) or 1, "labels": names} | problem}


def stored_steps(layers: list[SettingsLayer]) -> "EmbeddingSteps | None":
    """Reads how the model that a run starts from makes vectors of texts, from its sentence-transformers files. Returns None if there is
    no such model or no such files.

    Raises:
        BadInput: the model has a step that Argosy cannot train.
    """
    from argosy.checkpoint.open import open_model
    from argosy.weights.hub.sentence_steps import read_steps

    sources = [weights for layer in layers if (weights := init_of(layer, "weights")) is not None]
    companions = open_model(sources[-1]).companions if sources and is_model(sources[-1]) else None
    if companions is None or not (companions / "modules.json").is_file():
        return None
    steps = read_steps(companions)
    if steps.lower:
        hint = "training reads texts as they are: write them so, and set do_lower_case to false"
        raise BadInput("this model reads texts in lower case", where=str(companions), hint=hint)
    return steps


def with_conditions(
    schema: type[Settings], layers: list[SettingsLayer]
) -> tuple[list[SettingsLayer], dict[str, Any]]:
    """Resolves the keys `when` and `needs` of recipes. Returns the layers, in which `when` defaults follow their recipe if their choice
    is made, and the settings that the recipe needs, {dotted key: example}.
    """
    out, needs = [], dict[str, Any]()
    for layer in layers:
        values = {key: value for key, value in layer.values.items() if key not in (NEEDS, WHEN)}
        out.append(replace(layer, values=values))
        needs |= flatten(layer.values.get(NEEDS) or {})
        for key, options in (layer.values.get(WHEN) or {}).items():
            choice = _choice_of(schema, layers, key)
            if isinstance(options, dict) and isinstance(options.get(choice), dict):
                prefix = f"{WHEN}.{key}.{choice}."
                marks = {k.removeprefix(prefix): mark for k, mark in layer.marks.items() if k.startswith(prefix)}
                out.append(SettingsLayer(layer.origin, options[choice], marks))
    return out, needs


def _choice_of(schema: type[Settings], layers: list[SettingsLayer], key: str, tag: str = "name") -> str:
    """Returns the name that the layers choose for a field of the root settings, such as the objective.

    Args:
        key: the field.
        tag: the key inside the field that holds the name.
    """
    for layer in reversed(layers):
        value = layer.values.get(key, {})
        names = [value[entry] for entry in (tag, SELF) if entry in value] if isinstance(value, dict) else [value]
        if names:
            return "none" if names[0] is None else str(names[0])
    field = schema.model_fields.get(key)
    return "" if field is None else str(field.default)


def check_needs(schema: type[Settings], recipe: str, layers: list[SettingsLayer], needs: Mapping[str, Any]) -> None:
    """Checks that every setting which a recipe leaves to the user is set.

    Raises:
        SettingsError: such a setting is not set. All other mistakes are reported with it.
    """
    missing = [key for key in needs if not any(_gives(layer.values, part) for layer in layers for part in key.split(OR))]
    if not missing:
        return
    # A model would have come with what the run starts from.
    start_mistakes = mistakes_of(*(partial(check_start, init_of(layer, "weights"), init_of(layer, "state")) for layer in layers))
    missing = [key for key in missing if key != "model" or not start_mistakes]
    errors = [*start_mistakes]
    if missing:
        words = shlex.join(f"{key.partition(OR)[0]}={example}" for key, example in needs.items())
        needed = " and ".join(f"`{key.replace(OR, f'`{OR}`')}`" for key in missing)
        more = f"; {REWARDS}" if any("reward" in key.split(OR) for key in missing) else ""
        errors.append(BadInput(f"`{recipe}` needs {needed}", where=mistakes.NOBODY, hint=f"argosy train {recipe} {words}{more}"))
    try:
        read_settings(schema, *layers)
    except UserError as also:
        # What is needed may be a broken rule too.
        parts = [part for key in missing for part in key.split(OR)]
        prefixes = ("`model`", "model ", *(f"{part} is missing" for part in parts), *(f"`{part}` is required" for part in parts))
        errors += [p for p in problems_of(also) if not p.what.startswith(prefixes)]
    raise SettingsError(errors) from None


def _examples_of(schema: type[Settings], needs: Mapping[str, Any], layers: list[SettingsLayer]) -> SettingsLayer:
    """Makes a layer with an example value for every setting that a recipe needs and no layer sets. The example of a model is a preset,
    which is treated as if it had weights."""
    values: dict[str, Any] = {}
    encoder = "pooling" in OBJECTIVES[_choice_of(schema, layers, "objective")].model_fields
    for key, example in needs.items():
        names = key.split(OR)
        if any(_gives(layer.values, name) for layer in layers for name in names):
            continue
        group = values
        *above, last = names[0].split(".")
        for name in above:
            group = group.setdefault(name, {})
        group[last] = (EXAMPLE_ENCODER if encoder else EXAMPLE) if names[0] == "model" else example
        if names[0] == "model":
            values["init"] = {"weights": example}
    return SettingsLayer("an example", values)


def _last_value(layers: list[SettingsLayer], key: str) -> Any:
    """Returns the value of a dotted key in the last layer that sets it; None if no layer does."""
    return next((value for layer in reversed(layers) if (value := _value_of(layer.values, key)) is not None), None)


def _gives(values: Mapping[str, Any], key: str) -> bool:
    """Whether the values of a layer contain a dotted key, which may be a group of settings."""
    return _value_of(values, key) is not None


def _value_of(values: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key, which may be a group of settings, in the values of a layer; None if it is not set."""
    at: Any = values
    for name in key.split("."):
        if not isinstance(at, Mapping) or name not in at:
            return None
        at = at[name]
    return at


def _beside_the_preset(
    schema: type[Settings], layers: list[SettingsLayer], configs: Path
) -> tuple[list[UserError], dict[str, Any]]:
    """Finds further mistakes in settings whose preset does not exist. The preset with the nearest name is used instead, and only
    mistakes that do not depend on the model are reported. If no name is near, none are.

    Returns:
        The mistakes, and the settings of the root without mistakes.
    """
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


def editor_schema(schema: type[Settings], configs: Path = CONFIGS) -> dict[str, Any]:
    """Makes the JSON Schema of a recipe for editors: the settings, `extends`, `needs` and `when`, and `model` as the name of a
    preset."""
    document = json_schema(schema)
    extends = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    conditions = {NEEDS: {"type": "object"}, WHEN: {"type": "object"}}
    document["properties"] = {EXTENDS: extends, **conditions, **document["properties"]}
    model = document["properties"].get("model", {})
    if "oneOf" in model:
        model["oneOf"][0] = {"type": "string", "examples": presets(configs)}
    return document


def key_meant(key: str) -> str:
    """Returns the setting that a name refers to: the name itself if it is a setting, or else the suggested setting."""
    from argosy.run.settings.run import Run

    names = compose(Run, "tiny").names
    if key in names.known:
        return key
    hint = mistakes.unknown_key(key, None, names).hint or ""
    match = re.match(r"did you mean `([^`]+)`\?", hint)
    return match[1] if match else key


# ---- presets among the layers


def with_preset(layers: list[SettingsLayer], configs: Path = CONFIGS, families: Iterable[str] = ()) -> list[SettingsLayer]:
    """Inserts the chosen preset before the layer that names it, and removes earlier model settings. Returns the new layers."""
    layers = [spelt_out(layer) for layer in layers]
    naming = max((i for i, layer in enumerate(layers) if _preset_of(layer)), default=None)
    if naming is None:
        return layers
    preset, where = _preset_of(layers[naming]), layers[naming].where("model.preset")
    try:
        stack = preset_layers(str(preset), configs, f"set by {where}")
    except UnknownName as error:
        if preset is not None and preset in families and error.name == preset:
            raise _a_family(str(preset), configs, f"set by {where}") from None
        if preset is not None and error.name == preset and ("/" in preset or preset.endswith((".gguf", ".safetensors"))):
            raise no_model(preset, f"set by {where}", configs) from None
        raise
    beneath = [layer.under("model") for layer in stack]
    return [*layers_below_model(layers[:naming]), *beneath, *layers[naming:]]


def _families(schema: type[Settings]) -> Iterable[str]:
    choice = next((mark for mark in schema.model_fields["model"].metadata if isinstance(mark, Choice)), None)
    return choice.registry if choice else ()


def _a_family(name: str, configs: Path, where: str) -> BadInput:
    """Makes the error for a model family in place of a preset, such as `model=llama`: a family has no sizes."""
    sized = presets_of_family(name, presets(configs))
    some = f"name a preset: {', '.join(f'model={preset}' for preset in sized[:5])}" if sized else "name a preset of it"
    hint = f"{some}; or set model.family={name} and its sizes"
    return BadInput(f"`{name}` is a model family, which has no sizes", where=where, hint=hint)


def _preset_of(layer: SettingsLayer) -> str | None:
    model = layer.values.get("model")
    preset = model.get("preset") if isinstance(model, dict) else None
    return None if preset is None else layer.text("model.preset") or str(preset)
