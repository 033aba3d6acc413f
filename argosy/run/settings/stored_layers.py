"""Makes settings layers of stored models: a folder or file of a model sets architecture, tokenizer and weights of a run."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from argosy.core.addresses import is_hub
from argosy.core.hub.download import local_model, pin_revision
from argosy.core.settings import SettingsLayer
from argosy.core.settings.words import SELF

# Settings that name a model.
HUB_KEYS = (("model", "preset"), ("init", "weights"), ("objective", "teacher"), ("objective", "perceptual", "net"))


class StoredModel(SettingsLayer):
    """The settings layer of a stored model, with its architecture, tokenizer and weights."""


class TokenizerOfState(SettingsLayer):
    """The settings layer of the tokenizer that belongs to `init.state`, whichever layer names the model."""


def with_folders(layers: list[SettingsLayer], objective: str = "") -> list[SettingsLayer]:
    """Inserts layers of stored models, and returns the new layers.

    `model=FOLDER` (a Hub folder, .gguf file, run directory, checkpoint or hf:OWNER/NAME) adds the architecture, weights and tokenizer
    of the stored model. `init.weights=FOLDER` and `init.state=RUN` add its architecture and tokenizer. Model settings of the same or a
    later layer override those of the folder. A layer that contains the complete model, such as the settings.yml of a run, needs no
    folder.

    If layers give both `init.weights` and `init.state`, the later layer decides.

    Args:
        objective: the name of the objective. Some objectives train another model for the denoiser of a diffusers folder, such as a
            ControlNet.
    """
    out: list[SettingsLayer] = []
    for layer in (with_commits(spelt_out(layer)) for layer in layers):
        model = layer.values.get("model")
        preset = str(model["preset"]) if isinstance(model, dict) and model.get("preset") is not None else None
        weights, state = init_of(layer, "weights"), init_of(layer, "state")
        if isinstance(model, dict) and "family" in model:
            out.append(layer)
            continue
        folder = preset if preset is not None and is_model(preset) else None
        if folder is None and preset is None:
            folder = next((source for source in (weights, state) if source is not None and is_model(source)), None)
        if state is not None:
            out = _without_init(out, "weights")
        elif weights is not None or (folder is not None and folder == preset):
            out = _without_init(out, "state")
        if state is not None and is_model(state) and (tokenizer := _tokenizer_of(state)) is not None:
            out.append(TokenizerOfState(state, {"data": {"tokenizer": tokenizer}}))
        if folder is None:
            out.append(layer)
            continue
        out = layers_below_model(out)
        # A state includes weights.
        out.append(_shortened(_of_folder(folder, folder == preset and state is None, objective), out))
        if folder == preset:
            rest = {key: value for key, value in layer.values["model"].items() if key != "preset"}
            layer = replace(layer, values={**layer.values, "model": rest})
        out.append(layer)
    return out


def is_model(name: str) -> bool:
    """Whether a name is a stored model and not a preset: a folder that is not a recipe's run, a .gguf or .safetensors file, or a model
    of the Hub."""
    return is_hub(name) or Path(name).is_dir() or (name.endswith((".gguf", ".safetensors")) and Path(name).is_file())


def with_commits(layer: SettingsLayer) -> SettingsLayer:
    """Adds the commit to each name of a Hub model in a layer, because the branch may move before the run resumes."""
    values = dict(layer.values)
    for keys in HUB_KEYS:
        values = _with_commit(values, keys)
    return replace(layer, values=values)


def _with_commit(values: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    first, *rest = keys
    inner = values.get(first)
    if rest:
        return {**values, first: _with_commit(inner, tuple(rest))} if isinstance(inner, dict) else values
    return {**values, first: pin_revision(str(inner), _say)} if is_hub(inner) else values


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def init_of(layer: SettingsLayer, name: str) -> str | None:
    """Returns the value of `init.weights` or `init.state` in a layer; None if the layer does not set it."""
    init = layer.values.get("init")
    value = init.get(name) if isinstance(init, dict) else None
    return value if isinstance(value, str) else None


def _without_init(layers: list[SettingsLayer], name: str) -> list[SettingsLayer]:
    """Removes `init.weights`, or `init.state` with the tokenizers that came with it, from layers."""
    remaining = [layer for layer in layers if name != "state" or not isinstance(layer, TokenizerOfState)]
    return [
        replace(layer, values=dict(layer.values) | {"init": {k: v for k, v in layer.values["init"].items() if k != name}})
        if init_of(layer, name) is not None
        else layer
        for layer in remaining
    ]


def _of_folder(folder: str, brings_weights: bool, objective: str) -> SettingsLayer:
    from argosy.checkpoint.open import model_layer

    if (Path(folder) / "model_index.json").is_file():
        from argosy.infer.denoise.trained_parts import denoiser_layers

        values = denoiser_layers(folder, objective)
        return StoredModel(folder, values if brings_weights else {k: v for k, v in values.items() if k != "init"})
    values: dict[str, Any] = {"model": model_layer(folder)}
    if brings_weights:
        values["init"] = {"weights": folder}
    if (tokenizer := _tokenizer_of(folder)) is not None:
        values["data"] = {"tokenizer": tokenizer}
    return StoredModel(folder, values)


def _tokenizer_of(folder: str) -> str | None:
    """Returns the path of the tokenizer of a stored model; None if it has none."""
    from argosy.checkpoint.open import open_model
    from argosy.data.tokenizers.load import find_tokenizer

    # Folders of adapters mostly have none: it is that of their base.
    opened = open_model(folder)
    # A single file in its authors' names has none.
    places = (None if opened.kind == "file" else Path(local_model(folder)), opened.companions)
    home = next((place for place in places if place is not None and find_tokenizer(place) is not None), None)
    return None if home is None else folder if home == places[0] else str(home)


def _shortened(stored: SettingsLayer, before: list[SettingsLayer]) -> SettingsLayer:
    """Sets `data.sequence` in the layer of a stored model to the model's context, if the recipe's is longer. A recipe does not know the
    model."""
    sequences = [layer.values["data"]["sequence"] for layer in before if "sequence" in (layer.values.get("data") or {})]
    context = stored.values["model"].get("context")
    if not sequences or not isinstance(sequences[-1], int) or not isinstance(context, int) or sequences[-1] <= context:
        return stored
    return replace(stored, values={**stored.values, "data": {**stored.values.get("data", {}), "sequence": context}})


def spelt_out(layer: SettingsLayer) -> SettingsLayer:
    """Rewrites `model: NAME`, alone or beside other keys of the model, as `model.preset`."""
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


def layers_below_model(layers: list[SettingsLayer]) -> list[SettingsLayer]:
    """Removes model settings and stored models from layers, because a later layer names another model."""
    remaining = [layer for layer in layers if not isinstance(layer, StoredModel)]
    return [replace(layer, values={k: v for k, v in layer.values.items() if k != "model"}) for layer in remaining]
