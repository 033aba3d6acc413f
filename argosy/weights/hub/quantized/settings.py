"""Finds the packed modules of a folder, from `quantization_config` of config.json and the names of the tensors.

The names of the tensors decide which modules are packed, and config.json says how. Modules that it lists under `ignore` or
`modules_to_not_convert` are not quantized.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from argosy.core.errors import BadInput, Damaged
from argosy.core.formats import TensorReader, quote_name
from argosy.weights.hub.quantized.awq import AwqPacked
from argosy.weights.hub.quantized.fp4 import Fp4Packed, Mxfp4Experts
from argosy.weights.hub.quantized.gptq import GptqPacked
from argosy.weights.hub.quantized.module import PackedModule, check_number
from argosy.weights.hub.quantized.naive_quantized import NaiveQuantized
from argosy.weights.hub.quantized.pack_quantized import PackQuantized

METHODS = ("compressed-tensors", "awq", "gptq")
COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
)  # fmt: skip
"""The formats of compressed-tensors that are read."""

FP8_SCALES = "weight_scale_inv"
"""The last part of the name of scales in `fp8`."""

SCALES_OF_DATA = ("input_scale", "input_zero_point", "input_global_scale", "k_scale", "v_scale", "q_scale", "output_scale")
"""Names of calibrated scales of activations and of the KV cache. Only `input_scale` is used, if it is one number without a zero
point."""


def check_layout(settings: dict[str, Any], where: str) -> None:
    """Checks that the layout of a `quantization_config` is supported.

    Raises:
        BadInput: the layout is not supported. The message lists the supported ones.
    """
    if settings.get("quant_method") != "compressed-tensors":
        return
    formats = {str(group.get("format") or settings.get("format"))[:40] for group in _groups(settings, where)}
    if wrong := sorted(formats - set(COMPRESSED)):
        raise BadInput(f"`compressed-tensors` in the format `{wrong[0]}` is not supported", where=where, hint=", ".join(COMPRESSED))
    if settings.get("sparsity_config") and settings["sparsity_config"].get("format") not in (None, "dense"):
        raise BadInput("`compressed-tensors` with sparse weights is not supported", where=where, hint="take the dense weights")


def packed_modules(settings: dict[str, Any], tensors: TensorReader, where: str) -> list[PackedModule]:
    """Returns the packed modules of a folder without reading their weights.

    Args:
        settings: the `quantization_config` of config.json.
        where: the path of the folder, for errors.

    Raises:
        BadInput, Damaged: the tensors of a module do not fit together, or are packed in a way that is not supported.
    """
    try:
        return list(_modules(settings, tensors, where))
    except (BadInput, Damaged) as error:
        raise type(error)(error.what, where=error.where or where, hint=error.hint) from None


def _modules(settings: dict[str, Any], tensors: TensorReader, where: str) -> Iterator[PackedModule]:
    method = settings.get("quant_method")
    if method in ("awq", "gptq"):
        parts = ("qweight", "qzeros", "scales", "g_idx")
        for name in dict.fromkeys(n.rpartition(".")[0] for n in tensors.names if n.rpartition(".")[2] in parts):
            yield AwqPacked.of(name, tensors, settings) if method == "awq" else GptqPacked.of(name, tensors, settings)
        return
    if method == "fp8":
        # Activations are not rounded. Published programs round them to FP8, which saves time on their devices and costs accuracy.
        args = {"type": "float", "strategy": "block", "block_structure": settings["weight_block_size"]}
        for name in [n.removesuffix(f".{FP8_SCALES}") for n in tensors.names if n.endswith(f".{FP8_SCALES}")]:
            yield NaiveQuantized.of(name, tensors, args, scales=FP8_SCALES)
        return
    if method == "mxfp4":
        for name in [n.removesuffix("_blocks") for n in tensors.names if n.endswith("_blocks")]:
            yield Mxfp4Experts.of(name, tensors)
        return
    groups = _groups(settings, where)
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape", "weight_g_idx")
    plain = {n for n in tensors.names if n.endswith(".weight") and tensors.dtype(n).itemsize == 1 and tensors.dtype(n) != np.uint8}
    for name in dict.fromkeys(n.rpartition(".")[0] for n in tensors.names if n.rpartition(".")[2] in parts or n in plain):
        group = _group_for(groups, name)
        if group is None:
            raise BadInput(f"{quote_name(name)} is packed, and no group of `config_groups` has it as a target")
        format = str(group.get("format") or settings.get("format"))
        args, data = group["weights"], _activations(group.get("input_activations"))
        if "activations_scale" in data:
            check_number(tensors, f"{name}.input_scale")
        if format == "pack-quantized":
            yield PackQuantized.of(name, tensors, args, **data)
        elif format.endswith("fp4-pack-quantized"):
            yield Fp4Packed.of(name, tensors, args, format=format.partition("-")[0], **data)
        else:
            yield NaiveQuantized.of(name, tensors, args, **data)


def _groups(settings: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Returns the entries of `config_groups` that quantize weights.

    Raises:
        BadInput: there are none, or they are not JSON objects with targets.
    """
    groups = settings.get("config_groups")
    entries = list(groups.values()) if isinstance(groups, dict) else []
    if not entries or not all(isinstance(g, dict) and isinstance(g.get("targets"), list) for g in entries):
        raise BadInput("`config_groups` of `quantization_config` is no object of groups with targets", where=where)
    entries = [group for group in entries if group.get("weights")]
    if not entries or not all(isinstance(group["weights"], dict) for group in entries):
        raise BadInput("`config_groups` of `quantization_config` quantizes no weights", where=where)
    return entries


def _group_for(groups: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Returns the config group of a module. A group that names the module, by path or regular expression, comes before a group that
    names a class such as Linear."""
    for group in groups:
        for target in map(str, group["targets"]):
            if target == name or (target.startswith("re:") and _matches(target[3:], name)):
                return group
    return next((group for group in groups if any("." not in str(t) and ":" not in str(t) for t in group["targets"])), None)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise BadInput(f"the target {quote_name('re:' + pattern)} is no regular expression: {error}") from None


def _activations(args: Any) -> dict[str, Any]:
    """Returns the fields of `PackedModule` that say how activations are rounded, with dynamic scales or one static scale. Returns none,
    which leaves activations as they are, for zero points and for other static scales."""
    if not isinstance(args, dict) or not args.get("symmetric", True):
        return {}
    number = f"{args.get('type')} {args.get('num_bits')}"
    kind = {"int 8": "int8", "int 4": "int4", "float 8": "fp8_e4m3", "float 4": "mxfp4"}.get(number)
    if args.get("dynamic") is False and args.get("strategy") == "tensor" and kind not in (None, "mxfp4"):
        return {"activations": kind, "activations_scale": "static"}
    if args.get("dynamic") is not True:
        return {}
    if args.get("strategy") == "token" and kind not in (None, "mxfp4"):
        return {"activations": kind}
    block = args.get("group_size")
    if args.get("strategy") == "group" and type(block) is int and block > 0 and kind is not None:
        return {"activations": kind, "activation_block": None if kind == "mxfp4" else block}
    return {}
