"""Rounding methods: GPTQ against Optimal Brain Quantization written out, scale search against every scale, and no method worse than
nearest on the data that it was given."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from argosy.adapt.calibration.statistics import InputStatistics
from argosy.adapt.formats.format import nearest_elements
from argosy.adapt.formats.table import FORMATS
from argosy.adapt.methods import gptq
from argosy.adapt.methods.gptq import inverse_factor, output_error
from argosy.adapt.methods.matrices import along_inputs, as_matrices, from_matrices
from argosy.adapt.methods.settings import GPTQ, METHODS, Nearest, ScaleSearch
from argosy.adapt.quant import Scheme
from argosy.models.parts.einsum import Einsum

DIMS = {"D": 32, "N": 3, "H": 8, "E": 3, "M": 20}


def contraction(eq: str) -> Einsum:
    return Einsum(eq, DIMS)


def inputs_of(size: int, experts: int = 1, rows: int = 200, seed: int = 0) -> InputStatistics:
    """Correlated inputs, some channels larger than others."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(experts, rows, size)) @ random.normal(size=(size, size)) * np.exp(random.normal(size=size))
    x = x.astype(np.float32)
    gram = np.einsum("gri,grj->gij", x, x)
    return InputStatistics(gram, np.abs(x).sum(1), np.abs(x).max(1), np.full(experts, rows, np.float32))


def weight_of(of: Einsum, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=of.shape).astype(np.float32)


def brain_quantized(w: np.ndarray, scale: np.ndarray, gram: np.ndarray, damping: float, order: np.ndarray) -> np.ndarray:
    """Optimal Brain Quantization (arXiv:2208.11580, equations 3 and 4) of int4 in a given order, an inverse Hessian for each step."""
    w, hessian = w.astype(np.float64).copy(), gram.astype(np.float64)
    inverse = np.linalg.inv(hessian + damping * np.mean(np.diag(hessian)) * np.eye(len(w)))
    for i in order:
        q = np.clip(np.round(w[i] / scale[i]), -8, 7) * scale[i]
        w = w - np.outer(inverse[:, i] / inverse[i, i], w[i] - q)
        w[i] = q
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        # The rounded channel has no part in what follows.
        inverse[i], inverse[:, i], inverse[i, i] = 0.0, 0.0, 1.0
    return w


@pytest.mark.parametrize("order", ["stored", "activation"])
def test_gptq_is_optimal_brain_quantization_step_by_step(order):
    of, scheme = contraction("BTD,DNH->BTNH"), Scheme("int4", 16)
    inputs = inputs_of(32)
    w = weight_of(of)
    got = GPTQ(order=order, scales="absmax").quantize(of, w, scheme, inputs)
    matrix = w.reshape(32, 24)
    scale = np.repeat(np.abs(matrix.reshape(2, 16, 24)).max(1) / 7.5, 16, 0).astype(np.float32)
    steps = np.argsort(-np.diag(inputs.gram[0]), kind="stable") if order == "activation" else np.arange(32)
    expected = brain_quantized(matrix, scale, inputs.gram[0], 0.01, steps)
    # A weight between two codes may fall to either side in float32.
    same = np.isclose(np.asarray(got.dequantized()).reshape(32, 24), expected, atol=1e-5)
    assert same.mean() > 0.995
    nearest = np.asarray(scheme.quantize(of, w).dequantized()).reshape(32, 24)
    assert np.isclose(nearest, expected, atol=1e-5).mean() < 0.9


@pytest.mark.parametrize("name", FORMATS)
def test_the_output_error_falls_from_nearest_to_scale_search_to_gptq(name):
    of, scheme = contraction("BTNH,NHD->BTD"), Scheme(name, "channel" if FORMATS[name].block is None else 8)
    inputs, w = inputs_of(24), weight_of(contraction("BTNH,NHD->BTD"))
    errors = [output_error(of, w, m.quantize(of, w, scheme, inputs).dequantized(), inputs) for m in (Nearest(), ScaleSearch(), GPTQ())]
    # Of formats with many elements the scale hardly matters.
    assert errors[1] < errors[0] * 1.02
    assert errors[2] < errors[1] * 0.95


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_the_output_error_of_inputs_that_are_not_finite_is_not_finite(garbage):
    of, inputs, w = contraction("BTD,DNH->BTNH"), inputs_of(32), weight_of(contraction("BTD,DNH->BTNH"))
    gram = inputs.gram.copy()
    gram[0, 3, 5] = garbage
    assert not np.isfinite(output_error(of, w, 0.9 * w, replace(inputs, gram=gram)))
    assert output_error(of, w, 0.9 * w, replace(inputs, gram=np.zeros_like(gram))) == 0.0


@pytest.mark.parametrize("calibration", ["absmax", "minmax"])
@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_gptq_keeps_the_minimum_of_its_scheme(name, calibration):
    of = contraction("BTD,DNH->BTNH")
    scheme, inputs, w = Scheme(name, 16, calibration), inputs_of(32), weight_of(of) + 0.7
    rounded = GPTQ(scales="absmax").quantize(of, w, scheme, inputs)
    nearest = scheme.quantize(of, w)
    assert (rounded.minimum is None) == (calibration == "absmax")
    np.testing.assert_array_equal(rounded.scale, nearest.scale)
    assert output_error(of, w, rounded.dequantized(), inputs) < output_error(of, w, nearest.dequantized(), inputs)


@pytest.mark.parametrize("name", FORMATS)
def test_scale_search_finds_no_worse_scale_without_data(name):
    """By squared error, and better where a block has an outlier."""
    of, scheme = contraction("BTD,DNH->BTNH"), Scheme(name, 16)
    w = weight_of(of)
    w[3, 1, 2] = 9.0
    nearest, searched = (np.asarray(m.quantize(of, w, scheme, None).dequantized()) for m in (Nearest(), ScaleSearch()))
    before, after = (float(np.square(codes - w).sum()) for codes in (nearest, searched))
    assert after <= before * 1.001
    if name in ("int2", "nvfp4", "nf4"):
        assert after < before * 0.98


def test_each_expert_has_its_own_hessian_and_one_without_tokens_is_nearest():
    of, scheme = contraction("XD,EDM->XM"), Scheme("int4", 16)
    inputs, w = inputs_of(32, experts=3), weight_of(of)
    inputs.tokens[1] = 2
    got = np.asarray(GPTQ(scales="absmax").quantize(of, w, scheme, inputs).dequantized())
    nearest = np.asarray(scheme.quantize(of, w).dequantized())
    np.testing.assert_array_equal(got[1], nearest[1])
    alone = Einsum("BTD,DF->BTF", {"D": 32, "F": 20})
    for e in (0, 2):
        parts = InputStatistics(*(a[e : e + 1] for a in (inputs.gram, inputs.absolute, inputs.largest, inputs.tokens)))
        np.testing.assert_array_equal(got[e], GPTQ(scales="absmax").quantize(alone, w[e], scheme, parts).dequantized())
        assert not np.array_equal(got[e], nearest[e])


def test_readers_of_one_input_share_a_factor(monkeypatch: pytest.MonkeyPatch):
    """Experts do not, nor other settings; the weights are those of statistics of their own."""
    dampings = list[float]()
    monkeypatch.setattr(gptq, "inverse_factor", lambda *arguments: dampings.append(arguments[-1]) or inverse_factor(*arguments))
    of, scheme, inputs = contraction("BTD,DNH->BTNH"), Scheme("int4", 16), inputs_of(32)
    for seed in (1, 2):
        w = weight_of(of, seed)
        got = GPTQ().quantize(of, w, scheme, inputs)
        np.testing.assert_array_equal(got.values, GPTQ().quantize(of, w, scheme, inputs_of(32)).values)
    assert dampings == [0.01] * 3
    stored = GPTQ(order="stored").quantize(of, w, scheme, inputs)
    assert len(dampings) == 4
    assert not np.array_equal(stored.values, got.values)
    experts = contraction("XD,EDM->XM")
    for seed in (1, 2):
        GPTQ().quantize(experts, weight_of(experts, seed), scheme, inputs_of(32, experts=3))
    assert len(dampings) == 10


def test_channels_without_inputs_stay_nearest():
    of, scheme = contraction("BTD,DNH->BTNH"), Scheme("nf4", "channel")
    inputs, w = inputs_of(32), weight_of(of)
    inputs.gram[0, 5], inputs.gram[0, :, 5] = 0.0, 0.0
    got = np.asarray(GPTQ(scales="absmax").quantize(of, w, scheme, inputs).dequantized())
    np.testing.assert_allclose(got[5], np.asarray(scheme.quantize(of, w).dequantized())[5], rtol=1e-6)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", FORMATS)
def test_nearest_elements_are_those_of_the_format(name):
    format = FORMATS[name]
    w = np.random.default_rng(2).normal(size=(64, 16)).astype(np.float32)
    rounded = format.quantize(w, (16, 1))
    scale = np.repeat(np.asarray(rounded.scales), 16, 0)
    got = nearest_elements(format, jnp.asarray(w / scale)) * scale
    np.testing.assert_allclose(got, rounded.dequantized(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("eq", ["BTD,DNH->BTNH", "BTNH,NHD->BTD", "XD,EDM->XM", "XM,EMD->XD"])
def test_matrices_are_the_weight_in_another_order(eq):
    of = contraction(eq)
    w = weight_of(of)
    m = as_matrices(of, jnp.asarray(w))
    np.testing.assert_array_equal(from_matrices(of, m, w.shape), w)
    channels = np.arange(m.shape[0] * m.shape[1], dtype=np.float32).reshape(m.shape[:2])
    scaled = as_matrices(of, jnp.asarray(w) * along_inputs(of, jnp.asarray(channels), w.shape))
    np.testing.assert_allclose(scaled, m * channels[..., None], rtol=1e-6)


def test_every_method_is_registered_with_settings():
    assert {type(METHODS[name]()) for name in METHODS} >= {Nearest, ScaleSearch, GPTQ}
