"""Reads config.json: the model family of a folder and its settings.

Code that `auto_map` in a config names is never imported. Sizes are checked before any layers are built.
"""

import json
from pathlib import Path
from typing import Any

from argosy.core.counts import plural
from argosy.core.errors import BadInput, Damaged, complaint, nearest
from argosy.core.formats.quants import FP8_BLOCK
from argosy.models import FAMILIES
from argosy.models.base.config import with_scores
from argosy.models.base.language import LanguageConfig
from argosy.weights.hub.quantized.settings import METHODS, check_layout

CONFIG_BYTES = 16 << 20
# The deepest published model has 126.
MOST_LAYERS = 10_000
# The limit of experts in all layers together. Kimi K2 has 23,040.
MOST_EXPERTS = 1_000_000
# Levels of nested JSON values; published configs have 4.
MOST_DEPTH = 32


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of limited size.

    Raises:
        Damaged: the file is not a JSON object.
    """
    if path.stat().st_size > CONFIG_BYTES:
        raise Damaged(f"{path.name} has {plural(path.stat().st_size, 'byte')}", where=str(path))
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} is not JSON: {str(error)[:120]}", where=str(path)) from None
    if not isinstance(value, dict):
        raise Damaged(f"{path.name} is not an object", where=str(path))
    return value


def config_from(hub: dict[str, Any], where: str) -> LanguageConfig:
    """Returns the settings that a config.json describes.

    Args:
        hub: the contents of config.json.
        where: the path of the file, for errors.

    Raises:
        BadInput: the architecture is not implemented, or a key that is not supported would change the results.
    """
    check_bounds(hub, where)
    hub = hub if "model_type" in hub or not is_diffusers(hub) else hub | {"model_type": hub["_class_name"]}
    kind = hub.get("model_type")
    families = by_hub_type()
    if not isinstance(kind, str) or kind not in families:
        near = nearest(str(kind), families) or ""
        hint = f"{near}{'' if near.endswith('?') else '.'} A new family is one file and one line: docs/new-family.md"
        raise BadInput(f"architecture `{kind}` is not built", where=where, hint=hint)
    check_quantised(hub, where)
    try:
        text = families[kind].hub_text(without_quantization(hub))
        check_bounds(text, where)
        config = with_scores(families[kind].from_hub(text), hub)
    except BadInput as error:
        raise BadInput(error.what, where=error.where or where, hint=error.hint) from None
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise BadInput(f"config.json does not describe a model: {complaint(error)}", where=where) from None
    if getattr(config, "experts", None) and config.layers * config.experts.count > MOST_EXPERTS:
        many = f"{config.experts.count:.4g} experts in each of {config.layers} layers"
        raise BadInput(f"config.json: {many}: at most {MOST_EXPERTS:,} in all are supported", where=where)
    return config


def is_diffusers(hub: dict[str, Any]) -> bool:
    """Whether a config.json is that of a diffusers model, which names a class instead of an architecture."""
    return "_class_name" in hub


def by_hub_type() -> dict[str, type[LanguageConfig]]:
    """Returns the family that reads each `model_type`.

    Raises:
        ValueError: two families read the same `model_type`.
    """
    out: dict[str, type[LanguageConfig]] = {}
    for name in FAMILIES:
        for kind in FAMILIES[name].hub_types:
            if kind in out:
                raise ValueError(f"{FAMILIES[name].__name__} and {out[kind].__name__} both read `{kind}`")
            out[kind] = FAMILIES[name]
    return out


def check_quantised(hub: dict[str, Any], where: str) -> None:
    """Checks that a folder's weights are stored in a way that can be read: not quantized, in blocks with scales as those of DeepSeek-V3
    and gpt-oss, or in a layout of `weights.hub.quantized`.

    Raises:
        BadInput: the weights are quantized in another way.
    """
    quantization = hub.get("quantization_config")
    if not quantization:
        return
    method = str(quantization.get("quant_method", "?"))[:40]
    blocks = quantization.get("weight_block_size")
    if method == "mxfp4" or (method == "fp8" and blocks == [FP8_BLOCK, FP8_BLOCK]):
        return
    if method in METHODS:
        return check_layout(quantization, where)
    description = f"`{method}`" + (f" in blocks of {str(blocks)[:40]}" if method == "fp8" else "")
    supported = f"{', '.join(METHODS)}, mxfp4, and fp8 in blocks of {FP8_BLOCK}"
    hint = f"supported are {supported}; or take the original weights, or a GGUF file"
    raise BadInput(f"weights quantized by {description} are not supported", where=where, hint=hint)


def is_packed(hub: dict[str, Any]) -> bool:
    """Whether the weights of a folder are in a layout of `weights.hub.quantized`."""
    return (hub.get("quantization_config") or {}).get("quant_method") in METHODS


def without_quantization(hub: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the config.json without `quantization_config`, because weights are floats once they are read."""
    return {key: value for key, value in (hub or {}).items() if key != "quantization_config"}


def check_bounds(hub: dict[str, Any], where: str) -> None:
    """Checks that the sizes in a config.json are plausible, before any layers are built.

    Raises:
        BadInput: there are more than `MOST_LAYERS` layers, or values are nested too deeply.
    """
    for key, value in hub.items():
        if "layer" in key and type(value) is int and abs(value) > MOST_LAYERS:
            raise BadInput(f"config.json: `{key}` = {value:.4g}: at most {MOST_LAYERS:,} are supported", where=where)
        if depth(value, MOST_DEPTH) > MOST_DEPTH:
            raise BadInput(f"config.json: `{key[:80]}` is nested over {MOST_DEPTH} deep", where=where)
    if not isinstance(hub.get("quantization_config") or {}, dict):
        raise BadInput("config.json: `quantization_config` is not an object", where=where)


def depth(value: Any, most: int) -> int:
    """Returns how deeply a JSON value is nested. Counting stops at `most` + 1."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((depth(child, most - 1) for child in inner), default=0) if most >= 0 else 0
