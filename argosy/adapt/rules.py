"""Rules that select the contractions of a model to quantize and their formats, as an ordered list or a preset. This module does not
import jax, so that mistakes in settings are reported at once.

The first rule that matches a contraction applies. Contractions without a matching rule are not quantized. Rules name modules as
adapters do, by a regular expression that matches the whole path, such as `layers\\..*\\.mlp\\..*`. Tied embeddings, heads and routers
are quantized only if a rule names them.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from argosy.adapt.formats.blocks import granularity_of
from argosy.adapt.methods.settings import METHODS
from argosy.adapt.settings import LAYERS, WAY_OUT
from argosy.core.errors import BadInput, nearest
from argosy.core.settings import Also, Repeats, Settings, read_settings, yaml_layer

if TYPE_CHECKING:
    from argosy.adapt.quant import Scheme

# The formats of `adapt.formats.table`, which imports jax.
NAMES = (
    "int8", "int4", "int2", "nf4", "fp8_e4m3", "fp8_e5m2", "mxint8", "mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4",
    "nvfp4",
)  # fmt: skip
ACTIVATIONS = ("int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxint8", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4")
# The formats whose scales can be any float, so that activations can have a static scale.
STATIC = ("int8", "int4", "fp8_e4m3", "fp8_e5m2")


class Rule(Settings):
    """The quantization of the contractions that match a pattern."""

    where: Annotated[str, Also("module_path", "targets", "pattern")] = LAYERS
    """A regular expression that matches the whole path of a contraction, as `argosy models show` prints it. By default every matrix of
    the layers except routers."""
    weights: Annotated[str | None, Also("weight_qtype", "weight_dtype", "qtype")] = None
    """Number format of the weights. None: they are not quantized, even if later rules match."""
    granularity: Annotated[str | int | None, Also("group_size", "tile_size", "q_group_size", "strategy", "block_size")] = None
    """The weights that share a scale: `tensor`, `channel`, a number along the summed axes such as 128, or a tile such as 128x128. None:
    the format's usual granularity: a channel for int8 and fp8, 64 for int4 and nf4, 32 for MX, 16 for NVFP4.
    """
    calibration: Annotated[str, Also("weight_calibration_method", "observer")] = "absmax"
    """How the range of each block is chosen: `absmax`, `minmax` (with a minimum, for integers), `rms:K` (K root mean squares) or
    `fixed:X`.
    """
    activations: Annotated[str | None, Also("act_qtype", "input_activations", "activation_dtype")] = None
    """Number format of the activations that are multiplied with the weights. None: they are not rounded."""
    activation_block: int | None = Field(None, gt=0)
    """Number of activations along the summed axes that share a scale. None: a whole token, or the block of an MX format."""
    activations_scale: Annotated[Literal["dynamic", "static"], Also("activation_scheme", "act_scale")] = "dynamic"
    """Source of the activations' scales. dynamic: their own largest magnitude, at run time; static: one scale for each contraction,
    from the largest magnitude in calibration data; larger activations saturate.
    """

    @model_validator(mode="after")
    def _check_names(self) -> "Rule":
        for key, names in (("weights", NAMES), ("activations", ACTIVATIONS)):
            name = getattr(self, key)
            if name is not None and name not in names:
                raise ValueError(f"{key}: no number format `{name}`; {nearest(name, names)}")
        is_static = self.activations_scale == "static"
        if self.weights is None and (self.activations or self.granularity or self.calibration != "absmax" or is_static):
            raise ValueError("weights = null keeps a module as it is, so nothing else can be set beside it")
        if is_static and self.activations not in STATIC:
            raise ValueError(f"activations_scale=static is for activations in {', '.join(STATIC)}, not {self.activations}")
        if is_static and self.activation_block is not None:
            raise ValueError("activations_scale=static is one scale for all data, so activation_block has no meaning")
        kind, _, number = self.calibration.partition(":")
        if self.calibration not in ("absmax", "minmax") and not (kind in ("rms", "fixed") and _is_positive(number)):
            raise ValueError(f"calibration `{self.calibration}`: absmax, minmax, rms:K or fixed:X")
        if self.calibration == "minmax" and self.weights not in ("int8", "int4", "int2"):
            raise ValueError(f"{self.weights} has no minimum: calibration=minmax is for int8, int4 and int2")
        granularity_of(self.granularity)
        return self

    def scheme(self) -> "Scheme | None":
        """The scheme of a matching contraction; None: it is not quantized."""
        from argosy.adapt.quant import Scheme

        if self.weights is None:
            return None
        block = self.activation_block
        return Scheme(self.weights, self.granularity, self.calibration, self.activations, block, self.activations_scale)


class RuleFile(Settings):
    """A file of rules."""

    rules: Annotated[list[Rule], Repeats()] = Field(default_factory=list)
    """The rules in order. The first that matches a contraction decides."""


class QuantizedTraining(Settings):
    """Training in low precision."""

    train: Literal["none", "qat", "int8", "fp8"] = "none"
    """none: matrix products in `precision`. qat: weights, and activations if the rules say so, are rounded in the forward pass, and
        gradients pass straight through, so that `argosy quantize` by the same rules loses less. int8, fp8: both factors of every
        product are rounded, in the backward pass too.
    """
    preset: Annotated[str | None, Also("scheme")] = None
    """The rounding of qat: a preset of `argosy quantize`, such as w4a4."""
    rules: str | None = None
    """A YAML file of rules in place of a preset."""
    where: str = LAYERS
    """The contractions whose products int8 and fp8 round: a regular expression that matches their whole path. By default every matrix
    of the layers except routers.
    """
    scaling: Annotated[Literal["dynamic", "delayed"], Also("fp8_recipe", "scaling_recipe")] = "dynamic"
    """Source of the scales of fp8. dynamic: each row of a tensor in this step. delayed: one scale per tensor, from its largest
    magnitude in the last `history` steps, so that no product waits for a reduction (arXiv:2209.05433).
    """
    history: Annotated[int, Also("amax_history_len", "amax_history_length")] = Field(1024, gt=0)
    """Number of steps that scaling=delayed remembers. 1024, as in Transformer Engine; 12 kB for each contraction of a layer."""
    rounding: Annotated[Literal["nearest", "stochastic"], Also("stochastic_rounding")] = "nearest"
    """How int8 gradients are rounded. stochastic: up with a probability equal to the fraction, by the run's seed, so that they are
    unbiased (arXiv:1502.02551).
    """

    @model_validator(mode="after")
    def _check_consistent(self) -> "QuantizedTraining":
        sources = [name for name in ("preset", "rules") if getattr(self, name) is not None]
        if self.train == "qat" and len(sources) != 1:
            raise ValueError("train=qat needs either a preset or rules")
        if self.train != "qat" and sources:
            raise ValueError(f"{sources[0]} is for train=qat")
        if self.train in ("none", "qat") and self.where != LAYERS:
            raise ValueError("where is for train=int8 and train=fp8; qat takes it from its rules")
        if self.train != "fp8" and self.scaling != "dynamic":
            raise ValueError("scaling=delayed is for train=fp8")
        if self.scaling != "delayed" and self.history != 1024:
            raise ValueError("history is for scaling=delayed")
        if self.train != "int8" and self.rounding != "nearest":
            raise ValueError("rounding=stochastic is for train=int8")
        return self

    def put_on(self, model: Any) -> list[str]:
        """Applies low-precision training to a model. Returns the names of the affected contractions.

        Raises:
            UserError: there is no such preset or file, nothing matches, or a weight has an adapter or is quantized.
        """
        if self.train == "none":
            return []
        from argosy.adapt.training import train_in_few_bits, train_quantization_aware

        if self.train != "qat":
            history = self.history if self.scaling == "delayed" else 0
            return train_in_few_bits(model, self.where, self.train, stochastic=self.rounding == "stochastic", history=history)
        rules = preset_rules(self.preset) if self.preset is not None else read_rules(Path(str(self.rules)))
        check_dynamic(rules, "quant.train=qat")
        return train_quantization_aware(model, schemes_of(model, rules))


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


PRESETS: dict[str, dict[str, Any]] = {
    "w8": {"weights": "int8"},
    "w8a8": {"weights": "int8", "activations": "int8"},
    "w8a8-static": {"weights": "int8", "activations": "int8", "activations_scale": "static"},
    "w4": {"weights": "int4"},
    "w4a8": {"weights": "int4", "activations": "int8"},
    "w4a4": {"weights": "int4", "granularity": 32, "activations": "int4", "activation_block": 32},
    "w2": {"weights": "int2", "calibration": "minmax"},
    "nf4": {"weights": "nf4"},
    "fp8": {"weights": "fp8_e4m3", "activations": "fp8_e4m3"},
    "fp8-static": {"weights": "fp8_e4m3", "activations": "fp8_e4m3", "activations_scale": "static"},
    "fp8-blocks": {"weights": "fp8_e4m3", "granularity": "128x128", "activations": "fp8_e4m3", "activation_block": 128},
    "mxint8": {"weights": "mxint8", "activations": "mxint8"},
    "mxfp8": {"weights": "mxfp8", "activations": "mxfp8"},
    "mxfp6": {"weights": "mxfp6_e2m3"},
    "mxfp4": {"weights": "mxfp4"},
    "nvfp4": {"weights": "nvfp4"},
}
"""The presets. Each is one rule for every matrix of the layers except routers."""

ALIASES = {
    "int8": "w8", "w8a16": "w8", "int8_w8a8": "w8a8", "w4a16": "w4", "int4": "w4", "q4": "w4", "q8": "w8", "fp8_dynamic": "fp8",
    "fp8_block": "fp8-blocks", "nvfp4a16": "nvfp4", "mxfp4a16": "mxfp4", "bnb-nf4": "nf4", "fp8_static": "fp8-static",
    "int8_static": "w8a8-static", "w8a8_static": "w8a8-static",
}  # fmt: skip
"""The names of these presets in other tools: compressed-tensors, torchao, bitsandbytes, MLX."""

# Matches the names of llama.cpp's presets. `weights.gguf.mixtures` has those in which files can be written.
GGUF_PRESET = re.compile(r"i?q[1-8]_([01]|k|k_[sml]|nl|xs|xxs|s|m)")


def preset_rules(name: str) -> list[Rule]:
    """Returns the rules of a preset.

    Raises:
        BadInput: there is no preset of this name.
    """
    preset = name if name in PRESETS else ALIASES.get(name.lower(), "")
    if preset not in PRESETS:
        hint = nearest(name, PRESETS, len(PRESETS))
        if name.lower() in METHODS:
            hint = f"{name} is a method: `argosy quantize MODEL OUT preset=w4 method={name}`"
        elif GGUF_PRESET.fullmatch(name.lower()):
            hint = f"a GGUF file has it: `argosy quantize MODEL OUT.gguf preset={name.lower()}`"
        raise BadInput(f"no preset `{name}`", hint=hint)
    return [Rule(**PRESETS[preset])]


def read_rules(path: Path) -> list[Rule]:
    """Reads the rules of a YAML file, under the key `rules`.

    Raises:
        UserError: the file does not exist, or has mistakes. The message names each mistake with its line.
    """
    rules = read_settings(RuleFile, yaml_layer(path)).value.rules
    if not rules:
        hint = "rules: a list such as [{where: 'layers\\..*\\.mlp\\..*', weights: int4, granularity: 128}]"
        raise BadInput(f"{path} holds no rules", where="set by rules", hint=hint)
    return rules


def rules_named(name: str) -> list[Rule]:
    """Returns the rules of a preset or a YAML file, as in the setting `quantization`.

    Raises:
        UserError: the errors of `preset_rules` and `read_rules`.
    """
    return read_rules(Path(name)) if name.endswith((".yml", ".yaml")) else preset_rules(name)


def check_dynamic(rules: Iterable[Rule], purpose: str) -> None:
    """Checks that no rule needs calibration data.

    Args:
        purpose: the operation that has no calibration data, for the error message.

    Raises:
        BadInput: a rule needs calibration data.
    """
    for number, rule in enumerate(rules, 1):
        if rule.activations_scale == "static":
            hint = "argosy quantize MODEL OUT preset=w8a8-static data.source=FILE; or activations_scale: dynamic, as preset=w8a8 has it"
            raise BadInput(f"{purpose}: activations_scale=static (rule {number}) needs calibration data", hint=hint)


def schemes_of(model: Any, rules: list[Rule], *, is_calibrated: bool = False) -> dict[str, "Scheme"]:
    """Returns the scheme of each contraction that is quantized, by its name in the model's layout. There is at least one.

    Args:
        model: the model. Its weights may be shapes.
        rules: the rules, in order.
        is_calibrated: whether there is calibration data.

    Raises:
        BadInput: there are no rules, a rule matches nothing that is not matched before, every rule leaves its matches unquantized, or a
            rule needs calibration data that is missing or does not reach a contraction.
    """
    from argosy.adapt.surgery import find

    if not is_calibrated:
        check_dynamic(rules, "quantization")
    out: dict[str, Scheme | None] = {}
    for number, rule in enumerate(rules, 1):
        try:
            matches = find(model, rule.where)
        except BadInput as error:
            raise BadInput(f"rule {number}: {error.what}", where=error.where, hint=error.hint or WAY_OUT) from None
        new = [name for name in matches if name not in out]
        if not new:
            hint = "the first rule that matches decides: put the narrow ones first"
            raise BadInput(f"rule {number}: everything that `{rule.where}` matches has an earlier rule", hint=hint)
        out |= dict.fromkeys(new, rule.scheme())
    schemes = {name: scheme for name, scheme in out.items() if scheme is not None}
    if not schemes:
        raise BadInput("no rule quantizes anything", hint="preset=w8, or a rule with `weights`")
    if outside := [name for name, scheme in schemes.items() if scheme.is_static and not name.startswith("layers.")]:
        problem = f"activations_scale=static: calibration data reaches matrices of the layers alone, not `{outside[0]}`"
        raise BadInput(problem, hint="activations_scale: dynamic in a rule for it")
    return schemes
