"""The model of `argosy plan serve`: a preset, or files on this machine of which no weight is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput, nearest

# The rules by which weights are published in few bits, and the presets that stand for such weights.
MXFP4_EXPERTS = {"where": r"layers\..*\.mlp\.(gate|up|down)", "weights": "mxfp4"}
FP8_BLOCKS = {"weights": "fp8_e4m3", "granularity": "128x128", "activations": "fp8_e4m3", "activation_block": 128}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "gpt-oss-20b": MXFP4_EXPERTS,
    "gpt-oss-120b": MXFP4_EXPERTS,
    "deepseek3-671b": FP8_BLOCKS,
    "deepseek3.2-671b": FP8_BLOCKS,
    "deepseek-r1-671b": FP8_BLOCKS,
    "kimi-k2-1t": FP8_BLOCKS,
}


@dataclass(frozen=True)
class PlannedFiles:
    """The facts about a model that are known without reading its weights.

    schemes: the schemes of quantized contractions, by per-layer name.
    dtype: maps the per-layer name of a weight to its stored type.
    is_preset: whether the name is that of a preset, which stands for the published weights.
    """

    config: Any
    schemes: dict[str, Any]
    dtype: Callable[[str], Any]
    is_preset: bool = False


def planned_files(name: str) -> PlannedFiles:
    """Returns the facts about a model, by its name or path.

    Raises:
        BadInput: there is no such model on this machine, or it does not generate text.
    """
    from argosy.checkpoint.open import open_model
    from argosy.run.settings.recipe_files import preset_config, presets

    if name in presets():
        config = preset_config(name)
        return PlannedFiles(config, _published_schemes(name, config), lambda _: "bfloat16", is_preset=True)
    if name.startswith("hf:"):
        raise BadInput(f"{name} would be downloaded", hint="the name of a preset (`argosy models`), or a folder on this machine")
    path = Path(name)
    if not path.exists():
        hint = f"`argosy models` lists presets; {nearest(name, presets())}"
        raise BadInput(f"no preset, file or folder is named `{name}`", hint=hint)
    if (path / "config.json").is_file() and not [*path.glob("*.safetensors*")]:
        return _without_weights(path)
    stored = open_model(name)
    if stored.companions is not None and (stored.companions / "modules.json").is_file():
        raise BadInput(f"{name} embeds texts, and a plan is of an engine that generates text", hint="a language model with a head")
    quantized = stored.quantized or stored.published()
    names = set(stored.weights.names)
    return PlannedFiles(
        stored.config,
        {} if quantized is None else dict(quantized.schemes),
        lambda address: stored.weights.dtype(address) if address in names else "float32",
    )


def _published_schemes(name: str, config: Any) -> dict[str, Any]:
    """The schemes of a preset whose weights are published in few bits."""
    from argosy.adapt.quant import by_layer
    from argosy.adapt.rules import Rule, schemes_of
    from argosy.models.parts.stack import Unroll

    if name not in PUBLISHED:
        return {}
    single = config.build(Unroll())
    return by_layer(single, schemes_of(single, [Rule(**PUBLISHED[name])]))


def _without_weights(folder: Path) -> PlannedFiles:
    """A folder with config.json and no weights.

    Raises:
        BadInput: config.json says that weights are in few bits, but only the tensors say which.
    """
    from argosy.weights.hub.config import config_from, read_json_object

    hub = read_json_object(folder / "config.json")
    if hub.get("quantization_config"):
        problem = f"{folder} has no weights, and config.json says that some are in few bits: the files of the weights say which"
        raise BadInput(problem, hint="without `quantization_config` in config.json, and quantization=fp8-blocks, mxfp4, w4 ...")
    kind = str(hub.get("dtype") or hub.get("torch_dtype") or "bfloat16")
    return PlannedFiles(config_from(hub, str(folder / "config.json")), {}, lambda _: kind)
