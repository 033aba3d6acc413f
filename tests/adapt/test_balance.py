"""Balancing of neighboring weights: which pairs each structure allows, that the layer computes the same, and what AWQ and SmoothQuant
choose."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, FULL_OF, noisy_model

from argosy.adapt.calibration.layers import LayerRunner
from argosy.adapt.calibration.statistics import InputStatistics
from argosy.adapt.methods.awq import BalancedReader, awq_scales
from argosy.adapt.methods.balance import BalancedPair, fold_scales
from argosy.adapt.methods.gptq import output_error
from argosy.adapt.methods.matrices import as_matrices
from argosy.adapt.methods.settings import AWQ, SmoothQuant
from argosy.adapt.methods.smoothquant import smooth_scales
from argosy.adapt.quant import Scheme, by_layer
from argosy.adapt.rules import Rule, schemes_of
from argosy.data.settings import DataSettings
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.jobs.quantize import quantize
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.stack import Unroll
from argosy.weights.fill import model_weights

# The producers of balanced channels in the last layer of each structure.
PAIRS = {
    "llama": {"attn_norm", "mlp_norm", "attn.v", "mlp.up"},
    "gemma": {"attn_norm", "mlp_norm", "attn.v", "mlp.up"},
    # A clipped activation is not linear in `up`.
    "gpt_oss": {"attn_norm", "mlp_norm", "attn.v"},
    "deepseek": {"attn_norm", "mlp_norm", "attn.kv_norm", "attn.v_up", "mlp.up", "mlp.shared.up"},
    "qwen3_next": {"attn_norm", "mlp_norm", "attn.v", "mlp.up", "mlp.shared.up"},
}


def runner_of(name):
    config = CASES[name]
    model = config.build(Unroll())
    schemes = by_layer(model, schemes_of(model, [Rule(weights="int4", granularity=8)]))
    return LayerRunner(config, model_weights(noisy_model(config, Unroll())), schemes)


def last_attention(runner):
    """The last layer that attends; a delta net convolves its values, so they cannot be scaled."""
    return max(i for i in range(len(runner.plan)) if "attn.z" not in runner.contractions(i))


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in PAIRS if name != "llama")])
def test_pairs_of_each_structure(family):
    runner = runner_of(FULL_OF[family])
    i = last_attention(runner)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11, runner.plain.config.width)), jnp.float32)
    pairs = runner.balanced_pairs(i, runner.read(i), x, jnp.ones((2, 11), jnp.int32))
    expected = PAIRS[family]
    contractions = runner.contractions(i)
    assert {pair.source for pair in pairs} == {name for name in expected if "_norm" in name or name in contractions}
    assert all(pair.readers for pair in pairs)


def test_a_pair_that_is_not_exact_is_left_out():
    """BERT's plain feed-forward part has a nonlinearity between its matrices, and its norms stand after the addition."""
    runner = runner_of("bert-plain")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11, 44)), jnp.float32)
    pairs = runner.balanced_pairs(0, runner.read(0), x, jnp.ones((2, 11), jnp.int32))
    assert [pair.source for pair in pairs] == ["attn.v"]


def test_folding_moves_scales_and_keeps_products():
    of, up = Einsum("BTF,FD->BTD", {"F": 6, "D": 4}), Einsum("BTD,DF->BTF", {"F": 6, "D": 4}, bias=True)
    random = np.random.default_rng(0)
    shapes = {"down.w": (6, 4), "up.w": (4, 6), "up.b": 6}
    leaves = {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    s = np.exp(random.normal(size=(1, 6))).astype(np.float32)
    new = fold_scales(None, leaves, {"up": up, "down": of}, BalancedPair("up", ("down",)), s)
    x = random.normal(size=(3, 4)).astype(np.float32)
    before, after = ((x @ w["up.w"] + w["up.b"]) @ w["down.w"] for w in (leaves, new))
    np.testing.assert_allclose(after, before, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(new["down.w"], leaves["down.w"] * s[0][:, None], rtol=1e-6)


def reader(outlier: float) -> BalancedReader:
    of = Einsum("BTD,DF->BTF", {"D": 32, "F": 24})
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 32)).astype(np.float32)
    x[:, 3] *= outlier
    inputs = InputStatistics((x.T @ x)[None], np.abs(x).sum(0)[None], np.abs(x).max(0)[None], np.full(1, 400, np.float32))
    return BalancedReader(of, jnp.asarray(random.normal(size=(32, 24)), jnp.float32), Scheme("int4", 16), inputs)


def test_awq_scales_up_the_channel_with_large_inputs():
    weight_reader, pair = reader(20.0), BalancedPair("norm", ("w",))
    s = awq_scales(pair, [weight_reader], 1)
    assert s[0, 3] == s.max() > 1.4 * np.median(s)
    scaled = weight_reader.w * s[0][:, None]
    changed = weight_reader.scheme.quantize(weight_reader.of, scaled).dequantized() / s[0][:, None]
    before = output_error(
        weight_reader.of,
        weight_reader.w,
        weight_reader.scheme.quantize(weight_reader.of, weight_reader.w).dequantized(),
        weight_reader.inputs,
    )
    assert output_error(weight_reader.of, weight_reader.w, changed, weight_reader.inputs) < 0.9 * before
    assert not np.array_equal(s, awq_scales(pair, [reader(1.0)], 1))


def test_smoothquant_gives_data_and_weights_the_same_range():
    weight_reader = reader(50.0)
    s = smooth_scales(BalancedPair("norm", ("w",)), [weight_reader], 1, 0.5)
    rows = np.asarray(jnp.abs(as_matrices(weight_reader.of, weight_reader.w)).max(2))
    ratio = (weight_reader.inputs.largest / s) / (rows * s)
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-4)
    assert (weight_reader.inputs.largest / rows).max() > 20 * (weight_reader.inputs.largest / rows).min()


@pytest.mark.parametrize("method", [AWQ(steps=4), pytest.param(SmoothQuant(), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["llama-plain", *(pytest.param(FULL_OF[family], marks=pytest.mark.slow) for family in PAIRS)])
def test_a_balanced_model_in_eight_bits_is_the_model(name, method, tmp_path):
    """Norms, biases and routers that balancing changed are written too."""
    config = CASES[name]
    LM(config, noisy_model(config, Unroll()), None).save(tmp_path / "plain", format="argosy")
    rules = [Rule(where=r"layers\.\d+\.mlp\.(up|down)", weights="int8"), Rule(where=r"layers\.\d+\.attn\.(v|o|v_up)", weights="int8")]
    data = DataSettings(source="synthetic", sequence=16)
    result = quantize(str(tmp_path / "plain"), tmp_path / "out", rules, method=method, data=data, samples=8)
    assert any(row["balanced"] for row in result["weights"])
    tokens = [[5, 9, 100, 23, 7, 60]]
    exact = load_lm(tmp_path / "plain").logits(tokens)
    lm = load_lm(tmp_path / "out")
    plain = quantize(str(tmp_path / "plain"), tmp_path / "near", rules) and load_lm(tmp_path / "near").logits(tokens)
    assert relative(lm.logits(tokens), exact) < max(3 * relative(plain, exact), 0.02)
