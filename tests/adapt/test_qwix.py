"""Rules of Qwix, and its trees of parameters. The golden holds what Qwix 0.1.8 computes and the fields of its classes
(tests/reference/qwix_rules.py); that it reads what we write is checked by tests/reference/qwix_check.py."""

import json
from dataclasses import field, make_dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import relative
from laws.families import CASES, noisy_model, tokens_of

from argosy.adapt.quant import QuantizedEinsum, apply_schemes, by_layer, quantized_einsum
from argosy.adapt.qwix import as_rules, module_pattern, rule_of_qwix
from argosy.adapt.qwix_params import put_qwix_params, qwix_params
from argosy.adapt.rules import Rule, preset_rules, schemes_of
from argosy.adapt.surgery import find
from argosy.core.errors import ArgosyError, BadInput, UserError
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.stack import Unroll

GOLDEN = np.load(Path(__file__).parents[1] / "goldens" / "qwix_rules.npz")
FACTS = json.loads(str(GOLDEN["facts"]))
EQUATIONS = {"up": "BTD,DF->BTF", "out": "BTNH,NHD->BTD"}


def immutable(value):
    return tuple(value) if isinstance(value, list) else value


def kind_of(name):
    """A class of Qwix by its fields."""
    fields_of = {
        key: field(default=immutable(fact["default"])) if "default" in fact else field() for key, fact in FACTS["kinds"][name].items()
    }
    return make_dataclass(name, [(key, object, field_of) for key, field_of in fields_of.items()], frozen=True, kw_only=True)


QuantizationRule, QtRule, LoraRule = map(kind_of, ("QuantizationRule", "QtRule", "LoraRule"))


@pytest.mark.parametrize("key", [key for key in GOLDEN.files if key.split(".")[0] in EQUATIONS and key[-2:] not in (".w", ".x")])
def test_products_are_those_of_qwix(key):
    name, rule = key.split(".")
    eq, w, x = EQUATIONS[name], GOLDEN[f"{name}.w"], GOLDEN[f"{name}.x"]
    of = Einsum(eq, dict(zip(eq.split(",")[1], w.shape, strict=False)))
    of.w.set_value(jnp.asarray(w))
    scheme = rule_of_qwix(QuantizationRule(**FACTS["rules"][rule])).scheme()
    y = quantized_einsum(of, scheme)(jnp.asarray(x))
    assert relative(y, GOLDEN[key]) < 1e-5
    assert relative(y, np.asarray(of(jnp.asarray(x)))) > 1e-3


def test_rules_are_taken_where_rules_are():
    model = noisy_model(CASES["llama-plain"], Unroll())
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
    assert module_pattern("layers/[^/]+/attn/(q|k)") == r"layers\.[^.]+\.attn\.(q|k)"
    assert module_pattern(r"layers\/0") == r"layers\.0"


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
    lora = {key: 4.0 for key, fact in FACTS["kinds"]["LoraRule"].items() if "default" not in fact}
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

    config = CASES["llama-plain"]
    model = noisy_model(config, Unroll())
    lm = SimpleNamespace(module=model, config=config, tokenizer=None, forget=lambda: None)
    names = LM.quantize(lm, [QuantizationRule(module_path="layers/.*/mlp/.*", weight_qtype="int8")])
    assert len(names) == 9
    assert all(isinstance(contraction, QuantizedEinsum) == (name in names) for name, contraction in find(model, ".*").items())


# ---- trees of parameters


ARRAYS = sorted({key.split(".")[1] for key in GOLDEN.files if key.startswith("array.") and key.count(".") == 2})


class Alone(nnx.Module):
    """A model of one contraction."""

    def __init__(self):
        self.up = Einsum("BTD,DF->BTF", {"D": 64, "F": 24})


def parts_of(name):
    kind = jnp.dtype(str(GOLDEN[f"array.{name}.type"]))
    parts = {part: GOLDEN[f"array.{name}.{part}"] for part in ("qvalue", "scale", "zero_point") if f"array.{name}.{part}" in GOLDEN}
    return {part: jnp.asarray(a) if part == "scale" else jnp.asarray(a).astype(kind) for part, a in parts.items()}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("boxed", [True, False])
def test_arrays_of_qwix_are_read_and_written(name, boxed):
    """The floats are those that Qwix makes of its array, and what is written is that array again, in its types."""
    model, parts = Alone(), parts_of(name)
    assert put_qwix_params(model, {"up": {"w": {"array": parts} if boxed else parts}}) == ["up"]
    np.testing.assert_allclose(model.up.weight.dequantized(), GOLDEN[f"array.{name}.dense"], rtol=1e-6, atol=1e-7)
    again = qwix_params(model)["up"]["w"]["array"]
    assert again.keys() == parts.keys()
    for part, array in parts.items():
        assert again[part].dtype == array.dtype, part
        np.testing.assert_array_equal(np.asarray(again[part], np.float32), np.asarray(array, np.float32))
    # What is quantized here by the scheme that was read is the same array.
    if "fp8" not in name:
        fresh = model.up.scheme.quantize(model.up, jnp.asarray(GOLDEN["array.w"]))
        assert fresh.scale.shape == model.up.weight.scale.shape
        assert fresh.values.shape == model.up.weight.values.shape


def test_a_whole_model_goes_out_and_in():
    config = CASES["llama-tied-biased"]
    model, other = noisy_model(config, Unroll()), config.build(Unroll())
    rules = [Rule(where=r"layers\..*\.mlp\..*", weights="int4", granularity=2), Rule(weights="int8")]
    names = apply_schemes(model, by_layer(model, schemes_of(model, rules)))
    assert put_qwix_params(other, qwix_params(model)) == names
    tokens = tokens_of(config)
    expected, got = (network(tokens, config.attend(jnp.ones_like(tokens)))[0] for network in (model, other))
    np.testing.assert_array_equal(got, expected)


def test_trees_that_do_not_fit_are_refused():
    good = parts_of("int8")
    for tree, problem in (
        ({"up": {"w": GOLDEN["array.w"]}}, "no quantized parameter"),
        ({"up": {"w": good}, "down": {"w": good}}, "does not have"),
        ({}, "no parameter `up.w`"),
        ({"up": {"w": good | {"qvalue": good["qvalue"][:32]}}}, "qvalue is"),
        ({"up": {"w": good | {"qvalue": good["qvalue"].astype(jnp.int16)}}}, "int16"),
        ({"up": {"w": good | {"sparsity": good["scale"]}}}, "sparsity"),
        ({"up": {"w": good | {"scale": jnp.ones((1, 12))}}}, "cannot be said"),
    ):
        with pytest.raises(ArgosyError, match=problem):
            put_qwix_params(Alone(), tree)
    model = Alone()
    model.up.w.set_value(jnp.asarray(GOLDEN["array.w"]))
    model.up = quantized_einsum(model.up, Rule(weights="mxfp4").scheme())
    with pytest.raises(ArgosyError, match="mxfp4"):
        qwix_params(model)
