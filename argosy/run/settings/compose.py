"""Composes the settings layers of a run: base.yml, the model's preset, the recipe with what it extends, then `key=value` words.

    configs/base.yml < configs/models/PRESET.yml < files the recipe extends < the recipe < words

A layer that names a preset discards the model settings of earlier layers, because they described another model: `model=llama3.2-1b` on
the command line replaces the recipe's model completely. Model settings of the same or a later layer override the preset, as usual, and
provenance shows it. Composing only reads files.

A recipe may name settings that it leaves to the user (`needs`, each with an example; of `a or b` one is enough), and defaults that
depend on a choice (`when`):

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
    """The settings of a run.

    Args:
        schema: the root settings; only one with a `model` key has presets.
        recipe: a name under `configs/recipes`, a YAML file, a run directory or the address of one (its `settings.yml`), or None.
        words: `key=value`, as typed.
        configs: the folder of base.yml, models/ and recipes/.
        origin: who gave the words.
        with_examples: whether required settings that no layer sets get an example value, so that the recipe can be explained.

    Raises:
        UnknownName: no such recipe or preset.
        BadInput, SettingsError: all mistakes in the files or the settings.
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
    """Layers of defaults that follow from the objective: the head of a reward model, and rollouts. Layers of the user override them."""
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
    """Default values that follow from the labels of the data: the classes of the data and of the model. If the run starts from a
    classifier, they are that model's.
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
    """How the model that a run starts from makes vectors of texts, by its small files; None without a model, or without them.

    Raises:
        BadInput: it has a step that is not trained.
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
    """Resolves the conditional keys of recipes. Returns the layers, with `when` defaults inserted after their recipe if the choice is
    made, and the settings that the recipe needs: {dotted key: example}.
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
    """The name that the layers give to a choice at the root."""
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
        SettingsError: one is not; all other mistakes are reported with it.
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
    """A layer with an example for everything that a recipe needs and no layer gives; for a model, a preset as if it had weights."""
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
    """The last value that layers give to a dotted key; None: none does."""
    return next((value for layer in reversed(layers) if (value := _value_of(layer.values, key)) is not None), None)


def _gives(values: Mapping[str, Any], key: str) -> bool:
    """Whether a layer sets a dotted key, or the group that it begins."""
    return _value_of(values, key) is not None


def _value_of(values: Mapping[str, Any], key: str) -> Any:
    """What a layer gives to a dotted key, or to the group that it begins; None: nothing."""
    at: Any = values
    for name in key.split("."):
        if not isinstance(at, Mapping) or name not in at:
            return None
        at = at[name]
    return at


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


def editor_schema(schema: type[Settings], configs: Path = CONFIGS) -> dict[str, Any]:
    """The JSON Schema of a recipe: the settings, plus `extends`, plus `model` as a preset's name."""
    document = json_schema(schema)
    extends = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    conditions = {NEEDS: {"type": "object"}, WHEN: {"type": "object"}}
    document["properties"] = {EXTENDS: extends, **conditions, **document["properties"]}
    model = document["properties"].get("model", {})
    if "oneOf" in model:
        model["oneOf"][0] = {"type": "string", "examples": presets(configs)}
    return document


def key_meant(key: str) -> str:
    """The setting that a name refers to: itself, or the suggestion for an unknown name."""
    from argosy.run.settings.run import Run

    names = compose(Run, "tiny").names
    if key in names.known:
        return key
    hint = mistakes.unknown_key(key, None, names).hint or ""
    match = re.match(r"did you mean `([^`]+)`\?", hint)
    return match[1] if match else key


# ---- presets among the layers


def with_preset(layers: list[SettingsLayer], configs: Path = CONFIGS, families: Iterable[str] = ()) -> list[SettingsLayer]:
    """The layers with the chosen preset inserted before the layer that names it, and earlier model settings removed."""
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
    """The error for `model=llama`: a family has no sizes."""
    sized = presets_of_family(name, presets(configs))
    some = f"name a preset: {', '.join(f'model={preset}' for preset in sized[:5])}" if sized else "name a preset of it"
    hint = f"{some}; or set model.family={name} and its sizes"
    return BadInput(f"`{name}` is a model family, which has no sizes", where=where, hint=hint)


def _preset_of(layer: SettingsLayer) -> str | None:
    model = layer.values.get("model")
    preset = model.get("preset") if isinstance(model, dict) else None
    return None if preset is None else layer.text("model.preset") or str(preset)
