"""`activations_scale: static`: one scale of data for a contraction, from calibration data: by hand, reloaded, refused without data."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative, stories_model, stories_text
from laws.families import CASES, noisy_model

from argosy.adapt.calibration.data import calibration_data
from argosy.adapt.formats.activations import Activations
from argosy.adapt.quant import QuantizedEinsum
from argosy.adapt.qwix_params import qwix_params
from argosy.adapt.rules import QuantizedTraining, Rule, preset_rules
from argosy.adapt.surgery import find
from argosy.checkpoint.open import open_model
from argosy.cli import main
from argosy.core.errors import BadInput, Unsupported
from argosy.data.settings import DataSettings
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.jobs.quantize import quantize
from argosy.jobs.quantize_search import preset_scheme
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import put, variables

SYNTHETIC = DataSettings(source="synthetic", sequence=24)
TOKENS = [[5, 9, 100, 23, 7, 60]]


def scales_of(folder) -> dict[str, np.ndarray]:
    reader = open_model(folder).quantized.reader
    return {name.removesuffix(".x_scale"): reader.read(name) for name in reader.names if name.endswith(".x_scale")}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny model and the same with static scales."""
    folder, config = tmp_path_factory.mktemp("llama"), CASES["llama-plain"]
    LM(config, noisy_model(config, Unroll()), None).save(folder / "plain", format="argosy")
    quantize(str(folder / "plain"), folder / "out", preset_rules("w8a8-static"), data=SYNTHETIC, samples=3)
    return folder


def test_a_static_folder_is_what_one_computes_by_hand(llama):
    config, plain, scales = (
        CASES["llama-plain"],
        variables(load_lm(llama / "plain", run=Unroll()).module),
        scales_of(llama / "out"),
    )
    assert len(scales) == 7 * config.layers
    assert {(a.shape, a.dtype) for a in scales.values()} == {((), np.dtype(np.float32))}
    # The inputs of the first layer's attention: normalized rows of the embedding.
    data = calibration_data(SYNTHETIC, 3, None, vocab=config.vocab, context=config.context)
    x = np.asarray(plain["embed.w"].get_value(), np.float64)[data.tokens]
    x = (
        x
        / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
        * np.asarray(plain["layers.0.attn_norm.scale"].get_value())
    )
    for name in "qkv":
        assert scales[f"layers.0.attn.{name}"] == pytest.approx(np.abs(x).max() / 127.5, rel=1e-6)
    # A product: rounded to whole numbers, of which some saturate.
    module = load_lm(llama / "out", run=Unroll()).module
    of, scale = find(module, r"layers\.1\.mlp\.up")["layers.1.mlp.up"], scales["layers.1.mlp.up"]
    x = np.random.default_rng(0).normal(size=(1, 4, config.width)).astype(np.float32) * np.float32(100 * scale)
    q = np.clip(np.round(x / scale), -128, 127)
    assert (q == -128).any()
    exact = (q * scale) @ open_model(llama / "out").weights.read("layers.1.mlp.up.w")
    assert relative(of(jnp.asarray(x)), exact) < 1e-5


def test_it_loads_in_every_layout_and_again_bit_for_bit(llama, tmp_path):
    lm = load_lm(llama / "out")
    np.testing.assert_array_equal(lm.logits(TOKENS), load_lm(llama / "out").logits(TOKENS))
    assert (
        relative(load_lm(llama / "out", run=Unroll()).logits(TOKENS), load_lm(llama / "out", run=Scan()).logits(TOKENS))
        < 1e-5
    )
    stacked = find(load_lm(llama / "out", run=Scan()).module, ".*")
    assert {of.x_scale.shape for of in stacked.values() if isinstance(of, QuantizedEinsum)} == {
        (CASES["llama-plain"].layers,)
    }
    plain = load_lm(llama / "plain").logits(TOKENS)
    assert 1e-4 < relative(lm.logits(TOKENS), plain) < 0.1
    with pytest.raises(Unsupported, match="has a static scale of data"):
        qwix_params(load_lm(llama / "out", run=Unroll()).module)


def test_the_engine_answers_as_the_model(tmp_path):
    """stories260K, whose weights the compiled kernels multiply."""
    data = DataSettings(source=str(stories_text()), sequence=64)
    quantize(str(stories_model()), tmp_path / "out", preset_rules("w8a8-static"), data=data, samples=8)
    lm, prompt = load_lm(tmp_path / "out"), [1, 403, 407, 261, 378]
    tokens = lm.generate([prompt], max_tokens=12, ignore_eos=True)[0].tokens
    logits = np.asarray(lm.logits([[*prompt, *tokens]]))[0]
    assert list(tokens) == list(logits.argmax(-1)[len(prompt) - 1 : -1])


@pytest.mark.slow
def test_experts_have_one_scale_for_all_tokens(tmp_path):
    config = CASES["deepseek-3.2"]
    LM(config, noisy_model(config, Unroll()), None).save(tmp_path / "plain", format="argosy")
    quantize(str(tmp_path / "plain"), tmp_path / "out", preset_rules("w8a8-static"), data=SYNTHETIC, samples=4)
    scales = scales_of(tmp_path / "out")
    # Shared experts read every token.
    assert scales["layers.2.mlp.gate"].shape == ()
    assert scales["layers.2.mlp.gate"] == scales["layers.2.mlp.up"] == scales["layers.2.mlp.shared.gate"]
    assert np.isfinite(load_lm(tmp_path / "out").logits(TOKENS)).all()


def test_garbage_in_calibration(tmp_path):
    """Inputs of zeros have a scale of 1, and what is not finite is an error that leaves nothing half-written."""
    assert Activations("int8").static_scale(0.0) == Activations("fp8_e4m3").static_scale(1e-40) == 1
    assert Activations("fp8_e4m3").static_scale(896.0) == 2
    config = CASES["llama-plain"]
    model = noisy_model(config, Unroll())
    put(model, {"layers.1.attn_norm.scale": jnp.zeros(config.width)})
    LM(config, model, None).save(tmp_path / "zeros", format="argosy")
    quantize(str(tmp_path / "zeros"), tmp_path / "out", preset_rules("fp8-static"), data=SYNTHETIC, samples=1)
    assert scales_of(tmp_path / "out")["layers.1.attn.q"] == 1
    assert np.isfinite(load_lm(tmp_path / "out").logits(TOKENS)).all()
    put(model, {"layers.1.attn_norm.scale": jnp.full(config.width, jnp.inf)})
    LM(config, model, None).save(tmp_path / "inf", format="argosy")
    with pytest.raises(BadInput, match=r"`layers\.1\.attn\.[qkv]` has inputs that are not finite"):
        quantize(str(tmp_path / "inf"), tmp_path / "bad", preset_rules("fp8-static"), data=SYNTHETIC, samples=1)
    assert not (tmp_path / "bad").exists()


def test_without_data_it_is_refused_before_work_starts(llama, tmp_path, capsys):
    assert main(["quantize", str(llama / "plain"), str(tmp_path / "out"), "preset=w8a8-static"]) == 2
    assert "activations_scale=static (rule 1) needs calibration data" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadInput, match="quantization: activations_scale=static"):
        load_lm(llama / "plain", rules=preset_rules("w8a8-static"))
    lm = load_lm(llama / "plain")
    with pytest.raises(BadInput, match="quantization: activations_scale=static"):
        lm.quantize("fp8-static")
    with pytest.raises(BadInput, match=r"quant\.train=qat: activations_scale=static"):
        QuantizedTraining(train="qat", preset="w8a8-static").put_on(lm.module)
    with pytest.raises(BadInput, match="search with fp8-static: activations_scale=static"):
        preset_scheme("fp8-static")
    rules = [Rule(where="head", weights="int8", activations="int8", activations_scale="static")]
    with pytest.raises(BadInput, match="not `head`"):
        quantize(str(llama / "plain"), tmp_path / "out", rules, data=SYNTHETIC, samples=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ({"weights": "mxfp4", "activations": "mxfp4", "activations_scale": "static"}, "not mxfp4"),
        ({"weights": "int8", "activations_scale": "static"}, "not None"),
        (
            {"weights": "int8", "activations": "int8", "activation_block": 32, "activations_scale": "static"},
            "activation_block",
        ),
        ({"activations_scale": "static"}, "keeps a module"),
    ],
)
def test_rules_that_cannot_be_static(rule, complaint):
    with pytest.raises(ValueError, match=complaint):
        Rule(**rule)
