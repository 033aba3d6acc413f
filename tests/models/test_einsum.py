"""Seam 1: quantized arrays contract as plain ones do, whatever their scales lie on; other equations of the same weight."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.adapt.formats.activations import Activations
from argosy.adapt.quant import QuantizedEinsum, Scheme
from argosy.models.parts.einsum import Einsum, Route, contract
from argosy.models.parts.weight import fill
from argosy.ops.quantized import Quantized

RNG = np.random.default_rng(0)
SIZES = {"B": 2, "T": 3, "D": 8, "N": 4, "H": 6, "X": 9, "E": 3, "M": 4, "V": 7}


def array(letters):
    return jnp.asarray(RNG.standard_normal([SIZES[a] for a in letters]), jnp.float32)


def quantized(spec, scale_shape, zero=False):
    shape = [SIZES[a] for a in spec]
    scale = jnp.asarray(RNG.uniform(0.5, 2, scale_shape), jnp.float32)
    minimum = jnp.asarray(RNG.uniform(-5, 5, scale_shape), jnp.float32) if zero else None
    return Quantized(jnp.asarray(RNG.integers(-127, 128, shape), jnp.int8), scale, minimum)


DENSE = {
    "kept": ("BTD,DNH->BTNH", (1, 4, 6)),
    "one kept letter": ("BTD,DNH->BTNH", (1, 1, 6)),
    "summed": ("BTD,DNH->BTNH", (8, 1, 1)),
    "both": ("BTD,DNH->BTNH", (8, 4, 1)),
    "blocks of the summed": ("BTD,DNH->BTNH", (2, 4, 6)),
    "one for all": ("BTD,DNH->BTNH", (1, 1, 1)),
    "weight last": ("BTNH,NHD->BTD", (1, 1, 8)),
    "words": ("BTD,VD->BTV", (7, 1)),
    "words, summed": ("BTV,VD->BTD", (7, 1)),
}


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_scales_on_any_letters(name, zero):
    eq, scale = DENSE[name]
    spec = eq.split(",")[1].split("->")[0]
    w = quantized(spec, scale, zero)
    x = array(eq.split(",")[0])
    assert relative(contract(eq, x, w), jnp.einsum(eq, x, w.dequantized())) < 1e-6


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("scale", [(3, 1, 4), (1, 1, 4), (3, 8, 1), (3, 2, 4)])
def test_experts_have_scales_of_their_own(scale, even):
    w = quantized("EDM", scale)
    sizes = [3, 3, 3] if even else [4, 0, 5]
    expert = np.repeat(np.arange(3), sizes)
    x = array("XD")
    got = contract("XD,EDM->XM", x, w, Route(jnp.asarray(sizes, jnp.int32), jnp.asarray(expert), even))
    dense = np.asarray(w.dequantized())
    assert relative(got, np.stack([np.asarray(x[i]) @ dense[e] for i, e in enumerate(expert)])) < 1e-6


def test_rows_of_a_quantized_embedding():
    ids = jnp.asarray([[5, 0, 6]])
    for scale in ((7, 1), (1, 8), (7, 2)):
        w = quantized("VD", scale)
        assert relative(w.rows(ids), w.dequantized()[ids]) == 0


def test_activations_are_rounded_by_their_scale():
    w = Quantized(jnp.ones((8, 4), jnp.int8), jnp.ones((1, 4)), x_scale=jnp.float32(0.5), activations=Activations("int8"))
    x = jnp.full((1, 1, 8), 0.6)
    assert (contract("BTD,DM->BTM", x, w) == 8 * 0.5).all()


def test_another_equation_has_data_of_its_own():
    """The scale was calibrated on the data of the first: here a token has its own, as 1e3 would saturate."""
    scheme, plain = Scheme("int8", activations="int8", activations_scale="static"), make_einsum("BTD,DM->BTM")
    of = QuantizedEinsum(plain, scheme.quantize(plain, plain.w[...]), scheme)
    of.x_scale[...] = jnp.float32(0.5)
    x = jnp.full((1, 1, SIZES["D"]), 0.6)
    y = jnp.full((1, 1, SIZES["M"]), 1e3)
    dense = of.weight.dequantized()
    assert relative(of(x), jnp.einsum("BTD,DM->BTM", x * 0.5 / 0.6, dense)) < 1e-6
    assert relative(of.via("BTM,DM->BTD", y), jnp.einsum("BTM,DM->BTD", y, dense)) < 0.01
    assert relative(of.via("BTD,DM->BTM", x), of(x)) == 0


@pytest.mark.parametrize("of_platform", ["cpu", "tpu"])
def test_static_scales_saturate_and_faults_stay_visible(of_platform, monkeypatch):
    """By hand; the product of whole numbers as on TPUs, and that of floats."""
    monkeypatch.setattr("argosy.models.parts.einsum.platform", lambda: of_platform)
    codes = jnp.asarray(np.random.default_rng(0).integers(-128, 128, (8, 5)), jnp.int8)
    step = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, (1, 5)), jnp.float32)
    w = Quantized(codes, step, x_scale=jnp.float32(0.013), activations=Activations("int8"))
    x = np.random.default_rng(2).normal(size=(1, 6, 8)).astype(np.float32)
    x[0, 1] *= 100
    q = np.clip(np.round(x / np.float32(0.013)), -128, 127)
    assert (q[0, 1] == -128).any()
    assert (q[0, 1] == 127).any()
    exact = (q @ np.asarray(codes, np.float64)) * np.asarray(step, np.float64) * np.float32(0.013)
    assert relative(contract("BTD,DM->BTM", jnp.asarray(x), w), exact) < 1e-6
    program = str(jax.make_jaxpr(lambda x: contract("BTD,DM->BTM", x, w))(jnp.asarray(x)))
    assert ("preferred_element_type=int32" in program) == (of_platform == "tpu")
    x[0, 2, 3], x[0, 3, 0], x[0, 4] = np.nan, -np.inf, 0
    y = np.asarray(contract("BTD,DM->BTM", jnp.asarray(x), w))
    assert np.isnan(y[0, [2, 3]]).all()
    assert relative(y[0, [0, 1, 5]], exact[0, [0, 1, 5]]) < 1e-6
    assert (y[0, 4] == 0).all()


@pytest.mark.parametrize("activations", [Activations("int8", 4), Activations("mxint8", 4)])
def test_blocks_of_data_are_no_single_product_of_whole_numbers(activations, monkeypatch):
    """Each block has its own scale, so on TPUs as well the numbers are those of the rounded data in floats."""
    x, w = array("BTD"), quantized("DM", (1, 4))
    expected = activations.quantize(x, (2,)).dequantized() @ w.dequantized()
    monkeypatch.setattr("argosy.models.parts.einsum.platform", lambda: "tpu")
    assert relative(contract("BTD,DM->BTM", x, replace(w, activations=activations)), expected) < 1e-6


def test_a_product_of_bfloat16_can_leave_in_float32():
    x, w = array("BTD").astype(jnp.bfloat16), array("DNH")
    got = contract("BTD,DNH->BTNH", x, w, dtype=jnp.float32)
    assert got.dtype == jnp.float32
    exact = np.einsum("btd,dnh->btnh", np.asarray(x, np.float64), np.asarray(w.astype(jnp.bfloat16), np.float64))
    assert relative(got, exact) < 1e-6
    assert relative(contract("BTD,DNH->BTNH", x, w), exact) > 1e-4


def make_einsum(eq, **options):
    einsum = Einsum(eq, {a: SIZES[a] for a in eq.split(",")[1].split("->")[0]}, **options)
    fill(einsum, jax.random.key(0), addresses=lambda a: [a])
    return einsum


def test_another_equation_needs_the_same_letters_and_no_bias():
    einsum = make_einsum("BTD,DNH->BTNH")
    x = array("BTNH")
    assert relative(einsum.via("BTNH,DNH->BTD", x), jnp.einsum("BTNH,DNH->BTD", x, einsum.w[...])) < 1e-6
    with pytest.raises(ValueError, match="DNH"):
        einsum.via("BTNH,NHD->BTD", x)
    with pytest.raises(ValueError, match="bias"):
        make_einsum("BTD,DNH->BTNH", bias=True).via("BTNH,DNH->BTD", x)
    with pytest.raises(ValueError, match="route"):
        make_einsum("XD,EDM->XM").via("XM,EDM->XD", array("XM"))
