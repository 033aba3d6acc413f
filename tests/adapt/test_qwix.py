"""Rules of Qwix. The golden holds what Qwix 0.1.8 computes by them and the fields of its classes (tests/reference/qwix_rules.py)."""

import json
from dataclasses import field, make_dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, built

from argosy.adapt.quant import QuantizedEinsum, quantized
from argosy.adapt.qwix import as_rules, dotted, rule_of_qwix
from argosy.adapt.rules import Rule, preset_rules, schemes_of
from argosy.adapt.surgery import find
from argosy.core.errors import BadInput, UserError
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.stack import Unroll

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "qwix_rules.npz")
FACTS = json.loads(str(GOLDEN["facts"]))
EQUATIONS = {"up": "BTD,DF->BTF", "out": "BTNH,NHD->BTD"}


def immutable(value):
    return tuple(value) if isinstance(value, list) else value


def kind_of(name):
    """A class of Qwix by its fields."""
    own = {key: field(default=immutable(one["default"])) if "default" in one else field() for key, one in FACTS["kinds"][name].items()}
    return make_dataclass(name, [(key, object, one) for key, one in own.items()], frozen=True, kw_only=True)


QuantizationRule, QtRule, LoraRule = map(kind_of, ("QuantizationRule", "QtRule", "LoraRule"))


@pytest.mark.parametrize("key", [key for key in GOLDEN.files if "." in key and key[-2:] not in (".w", ".x")])
def test_products_are_those_of_qwix(key):
    name, rule = key.split(".")
    eq, w, x = EQUATIONS[name], GOLDEN[f"{name}.w"], GOLDEN[f"{name}.x"]
    of = Einsum(eq, dict(zip(eq.split(",")[1], w.shape, strict=False)))
    of.w.set_value(jnp.asarray(w))
    scheme = rule_of_qwix(QuantizationRule(**FACTS["rules"][rule])).scheme()
    y = quantized(of, scheme)(jnp.asarray(x))
    assert relative(y, GOLDEN[key]) < 1e-5
    assert relative(y, np.asarray(of(jnp.asarray(x)))) > 1e-3


def test_rules_are_taken_where_rules_are():
    model = built(CASES["llama-plain"], Unroll())
    rules = as_rules(
        [
            QuantizationRule(module_path="layers/0/.*"),
            {"where": r"layers\..*\.attn\..*", "weights": "int8"},
            Rule(where=r"layers\..*\.mlp\.up", weights="nf4"),
            QuantizationRule(module_path="layers/[^/]+/mlp/.*", weight_qtype=jnp.int4, tile_size=4, act_qtype=jnp.int8),
        ]
    )
    schemes = schemes_of(model, rules)
    assert {name.split(".")[1] for name in schemes} == {"1", "2"}
    assert schemes["layers.1.attn.q"].weights == "int8"
    assert schemes["layers.2.mlp.up"].weights == "nf4"
    down = schemes["layers.2.mlp.down"]
    assert (down.weights, down.granularity, down.activations, down.activation_block) == ("int4", 4, "int8", 4)
    assert as_rules("w4") == preset_rules("w4")


def test_a_type_of_jax_is_a_format():
    kinds = {"int8": jnp.int8, "int4": jnp.int4, "fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": np.dtype(jnp.float8_e5m2)}
    for name, kind in kinds.items():
        assert rule_of_qwix(QuantizationRule(weight_qtype=kind)).weights == name


def test_paths_have_dots():
    assert dotted("layers/[^/]+/attn/(q|k)") == r"layers\.[^.]+\.attn\.(q|k)"
    assert dotted(r"layers\/0") == r"layers\.0"


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (QuantizationRule(weight_qtype="int8", op_names=("dot_general",)), "op_names"),
        (QuantizationRule(weight_qtype="int5"), "weight_qtype"),
        (QuantizationRule(weight_qtype=jnp.bfloat16), "weight_qtype"),
        (QuantizationRule(act_qtype="int8"), "act_qtype"),
        (QuantizationRule(weight_qtype="int8", act_qtype="int6"), "act_qtype"),
        (QuantizationRule(weight_qtype="int8", tile_size=0.25), "tile_size"),
        (QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True), "act_static_scale"),
        (QuantizationRule(weight_qtype="int8", weight_calibration_method="absmax,0.8"), "weight_calibration_method"),
        (QuantizationRule(weight_qtype="int8", weight_calibration_method="fixed,-1,2"), "weight_calibration_method"),
        (QuantizationRule(weight_qtype="int8", act_qtype="int8", act_calibration_method="minmax"), "act_calibration_method"),
        (QuantizationRule(weight_qtype="int8", act_batch_axes=(0, 1)), "act_batch_axes"),
        (QtRule(weight_qtype="int8", bwd_qtype="int8"), "bwd_qtype"),
        (QtRule(weight_qtype="int8", bwd_stochastic_rounding="uniform"), "bwd_stochastic_rounding"),
        (QuantizationRule(weight_qtype="nf4", weight_calibration_method="minmax"), "minmax"),
    ],
)
def test_a_field_that_cannot_be_said_is_named(rule, name):
    with pytest.raises(BadInput, match=f"rule 1: .*{name}") as error:
        as_rules([rule])
    assert error.value.hint


def test_rules_of_other_kinds_are_refused():
    lora = {key: 4.0 for key, one in FACTS["kinds"]["LoraRule"].items() if "default" not in one}
    with pytest.raises(BadInput, match="rank"):
        as_rules([LoraRule(weight_qtype="nf4", **lora)])
    with pytest.raises(BadInput, match="no rule"):
        as_rules([3])
    with pytest.raises(UserError, match="wheights"):
        as_rules([{"wheights": "int8"}])
    with pytest.raises(BadInput, match="no preset"):
        as_rules("w5")


def test_a_model_in_place_is_quantized_by_them():
    from types import SimpleNamespace

    from argosy.infer.lm import LM

    model = built(CASES["llama-plain"], Unroll())
    lm = SimpleNamespace(module=model, forget=lambda: None)
    names = LM.quantize(lm, [QuantizationRule(module_path="layers/.*/mlp/.*", weight_qtype="int8")])
    assert len(names) == 9
    assert all(isinstance(one, QuantizedEinsum) == (name in names) for name, one in find(model, ".*").items())
