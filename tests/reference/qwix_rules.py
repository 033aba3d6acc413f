"""The golden of Qwix's rules: `python tests/reference/qwix_rules.py`, in an environment with qwix==0.1.8 beside jax and flax.

It holds the fields of its rule classes with their defaults, and the products of small modules that Qwix quantized by such rules.
"""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx

GOLDEN = Path(__file__).parents[1] / "goldens" / "qwix_rules.npz"
EQUATIONS = {"up": ("BTD,DF->BTF", (64, 24)), "out": ("BTNH,NHD->BTD", (3, 16, 40))}
RULES = {
    "int8": {"weight_qtype": "int8"},
    "int8-data": {"weight_qtype": "int8", "act_qtype": "int8"},
    "int8-minmax": {"weight_qtype": "int8", "weight_calibration_method": "minmax"},
    "int8-rms": {"weight_qtype": "int8", "weight_calibration_method": "rms,3"},
    "int8-fixed": {"weight_qtype": "int8", "weight_calibration_method": "fixed,-1,1"},
    "int4-tiles": {"weight_qtype": "int4", "tile_size": 32},
    "int4-tiles-data": {"weight_qtype": "int4", "act_qtype": "int4", "tile_size": 16},
    "int4": {"weight_qtype": "int4"},
    "nf4-tiles": {"weight_qtype": "nf4", "tile_size": 16},
    "fp8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
    "fp8-e5m2": {"weight_qtype": "float8_e5m2"},
}

ARRAYS = {
    "int8": ("int8", 64, "absmax"), "int8-minmax": ("int8", 32, "minmax"), "int4": ("int4", 32, "absmax"),
    "int4-minmax": ("int4", 16, "minmax"), "nf4": ("nf4", 16, "absmax"), "fp8": ("float8_e4m3fn", 64, "absmax"),
}  # fmt: skip


class Product(nnx.Module):
    def __init__(self, eq: str, w: np.ndarray):
        self.eq, self.w = eq, nnx.Param(jnp.asarray(w))

    def __call__(self, x):
        return jnp.einsum(self.eq, x, self.w[...])


def defaults(kind: type) -> dict:
    out = {}
    for rule_field in dataclasses.fields(kind):
        plain = rule_field.default is None or isinstance(rule_field.default, (str, int, float, tuple))
        out[rule_field.name] = {"default": rule_field.default} if plain else {}
    return out


def without_ties(a: np.ndarray, axis: int) -> np.ndarray:
    """Normal numbers whose largest of each 16 along an axis is positive: half of a step is between the two most negative integers,
    and float rounding decides which one the largest becomes if it is negative."""
    a = np.moveaxis(a, axis, -1)
    blocks = a.reshape(*a.shape[:-1], -1, 16)
    top = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
    return np.ascontiguousarray(np.moveaxis((blocks * np.sign(top)).reshape(a.shape), -1, axis))


def main() -> None:
    rng = np.random.default_rng(3)
    kinds = {kind.__name__: defaults(kind) for kind in (qwix.QuantizationRule, qwix.QtRule, qwix.LoraRule)}
    arrays = {}
    for name, (eq, shape) in EQUATIONS.items():
        w = without_ties(rng.standard_normal(shape).astype(np.float32), len(shape) - 2)
        x = without_ties(rng.standard_normal((2, 5, *shape[:-1])).astype(np.float32), -1)
        arrays |= {f"{name}.w": w, f"{name}.x": x}
        for rule, options in RULES.items():
            if name == "out" and "tile_size" in options:
                continue
            model = Product(eq, w)
            rules = [qwix.QuantizationRule(module_path=".*", **options)]
            model = qwix.quantize_model(model, qwix.PtqProvider(rules), jnp.asarray(x))
            arrays[f"{name}.{rule}"] = np.asarray(model(jnp.asarray(x)))
    w = without_ties(rng.standard_normal((64, 24)).astype(np.float32), 0)
    arrays["array.w"] = w
    for name, (kind, tile, method) in ARRAYS.items():
        quantized = qwix.quantize(jnp.asarray(w), kind, channelwise_axes=(1,), tiled_axes={0: tile}, calibration_method=method)
        parts = {
            "qvalue": quantized.qvalue,
            "scale": quantized.scale,
            "zero_point": quantized.zero_point,
            "dense": qwix.dequantize(quantized),
        }
        # NumPy's files know no types of four and eight bits.
        wide = {part: np.asarray(a, np.float32) for part, a in parts.items() if a is not None}
        arrays |= {f"array.{name}.{part}": a for part, a in wide.items()} | {f"array.{name}.type": str(quantized.qvalue.dtype)}
    np.savez_compressed(GOLDEN, facts=json.dumps({"version": qwix.__version__, "kinds": kinds, "rules": RULES}), **arrays)


if __name__ == "__main__":
    main()
