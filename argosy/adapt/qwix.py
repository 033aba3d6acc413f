"""Converts Qwix's quantization rules to Argosy's.

    lm.quantize([qwix.QuantizationRule(module_path="layers/.*", weight_qtype=jnp.int4, tile_size=64)])

Qwix, an optional package, is not imported. A rule is recognized by its fields, which are those of `qwix.QuantizationRule` 0.1.8. A
field without a counterpart is an error that names the field, and is never ignored. Differences in meaning:

- Qwix matches the module that calls an operation, and also rounds products of activations in that module, such as those of attention. A
  rule here matches a contraction with a weight, and products of activations are not rounded.
- `tile_size` counts along all summed axes, the last fastest. If a contraction sums over two axes (heads and head size), Qwix tiles only
  the last one and shares each scale along the other.
- Embeddings stay floats in Qwix. Here a rule that names an embedding quantizes it.
"""

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import numpy as np

from argosy.adapt.rules import Rule, RuleFile, rules_named
from argosy.core.errors import BadInput
from argosy.core.settings import SettingsLayer, read_settings

# Our format for each type name of Qwix.
FORMAT_NAMES = {
    **{name: name for name in ("int8", "int4", "int2", "nf4", "mxfp8", "mxfp4", "nvfp4")},
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}
# The fields that have a counterpart here. Every other field must have its default.
FIELDS = {"module_path", "op_names", "weight_qtype", "act_qtype", "tile_size", "weight_calibration_method"}
DEFAULTS = {"act_static_scale": (None, False), "act_calibration_method": (None, "absmax")}
CONTRACTIONS = {"dot_general", "einsum"}


def as_rules(rules: "str | Sequence[Any]") -> list[Rule]:
    """Returns the rules that a Python argument stands for.

    Args:
        rules: the name of a preset or of a YAML file, or a list of rules, of mappings with the keys of a rule, and of rules of Qwix.

    Raises:
        UserError: there is no such preset or file, or a rule has no counterpart here.
    """
    if isinstance(rules, str):
        return rules_named(rules)
    return [_as_rule(rule, number) for number, rule in enumerate(rules, 1)]


def _as_rule(rule: Any, number: int) -> Rule:
    if isinstance(rule, Rule):
        return rule
    where = f"rule {number}"
    try:
        if isinstance(rule, dict):
            return read_settings(RuleFile, SettingsLayer("rules", {"rules": [rule]})).value.rules[0]
        if hasattr(rule, "module_path") and hasattr(rule, "weight_qtype"):
            return rule_of_qwix(rule)
    except BadInput as error:
        raise BadInput(f"{where}: {error.what}", hint=error.hint) from None
    except ValueError as error:
        raise BadInput(f"{where}: {_first_line(error)}", hint="docs/guides/quantization.md lists the keys of a rule") from None
    hint = "a preset by name, or a list of argosy.adapt.rules.Rule, of mappings, or of qwix.QuantizationRule"
    raise BadInput(f"{where} is a {type(rule).__name__}, and no rule", hint=hint)


def rule_of_qwix(rule: Any) -> Rule:
    """Converts a `qwix.QuantizationRule`, or one of its subclasses, to a rule.

    Raises:
        BadInput: a field has no counterpart. The message names the field.
    """
    for name, default in _fixed_fields(rule).items():
        if (value := getattr(rule, name)) not in default:
            raise _unsupported_field(name, value, f"leave it at {default[0]!r}")
    ops = set(rule.op_names)
    if ops and not ops >= CONTRACTIONS:
        hint = "a product with a weight is dot_general or einsum as the device likes: name both, or leave op_names empty"
        raise _unsupported_field("op_names", rule.op_names, hint)
    settings: dict[str, Any] = {"where": module_pattern(rule.module_path)}
    weights = _format("weight_qtype", rule.weight_qtype)
    activations = _format("act_qtype", rule.act_qtype)
    tile = rule.tile_size
    if weights is None:
        if activations is not None:
            raise _unsupported_field("act_qtype", rule.act_qtype, "it has an effect only with weight_qtype, in Qwix too")
        return Rule(**settings)
    if tile is not None and (isinstance(tile, float) or tile < 1):
        raise _unsupported_field("tile_size", tile, "a number of weights, such as 32")
    settings |= {"weights": weights, "calibration": _calibration(rule.weight_calibration_method)}
    if tile is not None:
        settings["granularity"] = tile
    elif not weights.startswith(("mx", "nv")):
        # Formats here have default blocks, whereas Qwix gives each channel one scale.
        settings["granularity"] = "channel"
    if activations is not None:
        settings |= {"activations": activations, "activation_block": tile}
    try:
        return Rule(**settings)
    except ValueError as error:
        raise BadInput(_first_line(error), hint="a rule of Qwix that no rule here can say") from None


def module_pattern(module_path: str) -> str:
    """Converts a regular expression for paths such as layers/0/mlp to one for layers.0.mlp."""
    return module_path.replace(r"\/", "/").replace("[^/]", r"[^.]").replace("/", r"\.")


def _fixed_fields(rule: Any) -> dict[str, tuple[Any, ...]]:
    """Returns the fields that must have one of the given values."""
    if not is_dataclass(rule):
        return DEFAULTS
    out = dict[str, tuple[Any, ...]]()
    for field in fields(rule):
        if field.name in FIELDS:
            continue
        if field.default is MISSING:
            raise _unsupported_field(field.name, getattr(rule, field.name), "only rules that quantize weights and data are taken")
        out[field.name] = DEFAULTS.get(field.name, (field.default,))
    return out


def _format(field: str, kind: Any) -> str | None:
    if kind is None:
        return None
    name = kind if isinstance(kind, str) else np.dtype(kind).name
    if name not in FORMAT_NAMES:
        raise _unsupported_field(field, name, ", ".join(FORMAT_NAMES))
    return FORMAT_NAMES[name]


def _calibration(method: str) -> str:
    """Converts `absmax`, `minmax`, `rms,7` and `fixed,-3,3` to the `calibration` of a rule."""
    name, *numbers = method.replace(" ", "").split(",")
    if name in ("absmax", "minmax") and not numbers:
        return name
    if name == "rms" and len(numbers) == 1:
        return f"rms:{numbers[0]}"
    if name == "fixed" and len(numbers) == 2 and float(numbers[0]) == -float(numbers[1]):
        return f"fixed:{numbers[1]}"
    raise _unsupported_field("weight_calibration_method", method, "absmax, minmax, rms,K, or fixed,-X,X")


def _unsupported_field(field: str, value: Any, hint: str) -> BadInput:
    return BadInput(f"{field} = {value!r} of a Qwix rule cannot be said here", hint=hint)


def _first_line(error: ValueError) -> str:
    """Returns the message of an error in settings without the text that pydantic puts around it."""
    errors = getattr(error, "errors", None)
    text = str(errors()[0]["msg"]) if errors is not None else str(error)
    return text.removeprefix("Value error, ").splitlines()[0]
