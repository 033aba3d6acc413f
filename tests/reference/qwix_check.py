"""Whether Qwix reads what we write: `python tests/reference/qwix_check.py`, in an environment with qwix==0.1.8 beside this package.

A module of plain NNX that Qwix quantized takes over our arrays by `process_prequantized_params`, and its products are ours.
"""

import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx

from argosy.adapt.quant import quantized_einsum
from argosy.adapt.qwix import rule_of_qwix
from argosy.adapt.qwix_params import qwix_params
from argosy.models.parts.einsum import Einsum

EQ = "BTD,DF->BTF"
RULES = (
    {"weight_qtype": "int8"},
    {"weight_qtype": "int8", "weight_calibration_method": "minmax"},
    {"weight_qtype": "int4", "tile_size": 32},
    {"weight_qtype": "nf4", "tile_size": 16},
    {"weight_qtype": "float8_e4m3fn"},
)


class Linear(nnx.Module):
    """Qwix looks for a local named `self` to find the module."""

    def __init__(self, w):
        self.w = nnx.Param(jnp.asarray(w))

    def __call__(self, x):
        return jnp.einsum(EQ, x, self.w[...])


class Theirs(nnx.Module):
    def __init__(self, w):
        self.up = Linear(w)

    def __call__(self, x):
        return self.up(x)


class Ours(nnx.Module):
    def __init__(self, w):
        self.up = Einsum(EQ, {"D": w.shape[0], "F": w.shape[1]})
        self.up.w.set_value(jnp.asarray(w))


def main() -> None:
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((64, 24)).astype(np.float32), jnp.asarray(rng.standard_normal((2, 3, 64)), jnp.float32)
    for options in RULES:
        rule = qwix.QuantizationRule(module_path=".*", **options)
        ours = Ours(w)
        ours.up = quantized_einsum(ours.up, rule_of_qwix(rule).scheme())
        params = qwix_params(ours)
        # Other numbers, so that ours must arrive.
        theirs = qwix.quantize_model(Theirs(w[::-1].copy()), qwix.PtqProvider([rule]), x)
        nnx.update(theirs, qwix.process_prequantized_params(params, theirs))
        expected = ours.up(x)
        difference = float(jnp.abs(theirs(x) - expected).max() / jnp.abs(expected).max())
        restored = qwix.restore_quantization_rules(params, qwix.QuantizationRule, tile_size=rule.tile_size or 64, act_qtype=None)
        assert difference < 1e-6, (options, difference)
        assert [restored_rule.module_path for restored_rule in restored] == ["up"], restored
        print(f"{options}: products differ by {difference:.1e}")


if __name__ == "__main__":
    main()
