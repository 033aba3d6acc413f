"""`argosy quantize ... data.source=`: every structure, killed and resumed, in bounded steps, and mistakes before work starts."""

import json
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative, stories_model, stories_text
from laws.families import CASES, STRUCTURES, noisy_model, parameters_of

from argosy.adapt.calibration.data import CalibrationData
from argosy.adapt.calibration.folder import CalibrationFolder
from argosy.adapt.calibration.layers import LayerRunner
from argosy.adapt.methods.settings import GPTQ, Nearest, ScaleSearch
from argosy.adapt.quant import by_layer
from argosy.adapt.rules import Rule, preset_rules, schemes_of
from argosy.checkpoint.open import open_model
from argosy.cli import main
from argosy.core.errors import BadInput, Unsupported
from argosy.core.formats import Arrays
from argosy.data.settings import DataSettings
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.jobs.quantize import quantize
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import split, undrawn, variables

SYNTHETIC = DataSettings(source="synthetic", sequence=24)


def save_case(name, folder):
    config = CASES[name]
    LM(config, noisy_model(config, Unroll()), None).save(folder, format="argosy")
    return config


@pytest.mark.parametrize("name", [*parameters_of(STRUCTURES, ["deepseek"]), pytest.param("bert-pooler", marks=pytest.mark.slow)])
def test_every_structure_is_calibrated_layer_by_layer(name, tmp_path):
    save_case(name, tmp_path / "plain")
    rules = [Rule(weights="int4", granularity=8)]
    result = quantize(str(tmp_path / "plain"), tmp_path / "out", rules, method=GPTQ(), data=SYNTHETIC, samples=24)
    rows = [row for row in result["weights"] if row["output_error"] is not None]
    assert len(rows) >= 0.9 * len(result["weights"])
    errors = np.array([[row["output_error"], row["nearest_error"]] for row in rows])
    assert errors[:, 0].mean() < 0.95 * errors[:, 1].mean()
    load_lm(tmp_path / "out")
    assert not (tmp_path / "out.calibration").exists()


def test_what_is_before_the_layers_is_not_kept():
    """An embedding is the largest weight of a small model."""
    config = CASES["llama-plain"]
    leaves = {a: np.asarray(w) for a, w in split(noisy_model(config, Unroll()))[1].items()}
    runner = LayerRunner(config, Arrays(leaves), {})
    # Of the embedding only the rows of these tokens are copied.
    batches = [np.asarray(tokens, np.int32) for tokens in ([[100, 7, 7]], [[3, 100, 112]])]
    for tokens, x in zip(batches, runner.embedded((tokens, np.ones_like(tokens)) for tokens in batches), strict=True):
        np.testing.assert_array_equal(x, leaves["embed.w"][tokens])
    assert undrawn(runner.plain) == list(variables(runner.plain))


@pytest.mark.parametrize("name", parameters_of(STRUCTURES, ["qwen3_next"]))
def test_layers_one_by_one_compute_what_the_model_computes(name, tmp_path):
    """The outputs of the last layer, with weights in few bits, are those of the written model."""
    config = save_case(name, tmp_path / "plain")
    rules = [Rule(weights="int4", granularity=8)]
    quantize(str(tmp_path / "plain"), tmp_path / "out", rules)
    stored = open_model(tmp_path / "plain")
    runner = LayerRunner(config, stored.weights, by_layer(config.build(Unroll()), schemes_of(config.build(Unroll()), rules)))
    tokens = np.random.default_rng(0).integers(3, config.vocab, (2, 17)).astype(np.int32)
    data = CalibrationData(tokens, np.ones_like(tokens))
    x = next(runner.embedded(iter([data])))
    for i in range(len(runner.plan)):
        leaves = runner.read(i)
        quantized = {n: runner.contraction(i, n).scheme.quantize(runner.contraction(i, n), leaves[f"{n}.w"]) for n in runner.names[i]}
        x = runner.outputs(i, leaves, quantized, x, data.segments)
    lm = load_lm(tmp_path / "out", run=Unroll())
    exact, _, _ = lm.module.hidden(jnp.asarray(tokens), config.attend(jnp.asarray(data.segments)))
    assert relative(lm.module.norm(jnp.asarray(x)), exact) < 1e-4


def test_padding_changes_nothing(tmp_path):
    config = save_case("deepseek-3.2", tmp_path / "plain")
    stored, rules = open_model(tmp_path / "plain"), [Rule(weights="int4", granularity=8)]
    runner = LayerRunner(config, stored.weights, by_layer(config.build(Unroll()), schemes_of(config.build(Unroll()), rules)))
    i = len(runner.plan) - 1
    leaves = runner.read(i)
    x = np.random.default_rng(0).normal(size=(3, 9, config.width)).astype(np.float32)
    longer = np.concatenate([x, np.full((3, 4, config.width), 1e3, np.float32)], 1)
    segments = np.pad(np.ones((3, 9), np.int32), ((0, 0), (0, 4)))
    whole = runner.statistics(i, leaves, iter([(x, np.ones((3, 9), np.int32))]))
    padded = runner.statistics(i, leaves, iter([(longer, segments)]))
    assert {"mlp.gate", "attn.k_up"} <= whole.keys()
    for name, statistics in whole.items():
        assert relative(padded[name].gram, statistics.gram) < 1e-4
        np.testing.assert_array_equal(padded[name].tokens, statistics.tokens)
    # Each token is in the sums of as many experts as it goes to.
    assert whole["mlp.gate"].tokens.sum() == 27 * config.moe.active
    x_squared = whole["mlp.shared.gate"].gram.trace(axis1=1, axis2=2).sum() * config.moe.active
    assert whole["mlp.gate"].gram.trace(axis1=1, axis2=2).sum() == pytest.approx(x_squared, rel=1e-4)


KILL = """
import os, signal, sys
from argosy.adapt.calibration.folder import CalibrationFolder
from argosy.cli import main
real = CalibrationFolder.{0}
def then_die(self, i, *rest):
    if i == {1}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, i, *rest)
CalibrationFolder.{0} = then_die
sys.exit(main())
"""


@pytest.mark.parametrize(("call", "layer"), [("write_layer", 2), pytest.param("write_inputs", 3, marks=pytest.mark.slow)])
def test_killed_and_resumed_the_result_is_the_same_bit_for_bit(call, layer, tmp_path, capsys):
    words = ["quantize", str(stories_model()), str(tmp_path / "out"), "preset=w4", "method=gptq"]
    words += [f"data.source={stories_text()}", "samples=4", "data.sequence=64"]
    killed = subprocess.run([sys.executable, "-c", KILL.format(call, layer), *words], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.calibration"]
    before = os.stat(tmp_path / "out.calibration" / "layer.0.safetensors").st_mtime_ns
    assert CalibrationFolder.layers.fget(_folder(tmp_path / "out.calibration")) == 2  # type: ignore[attr-defined]
    assert main([*words[:6], "samples=5", words[7]]) == 2
    assert "unfinished calibration of another kind" in capsys.readouterr().err
    assert os.stat(tmp_path / "out.calibration" / "layer.0.safetensors").st_mtime_ns == before
    assert main(words) == 0
    assert "resuming: 2 layers of 5 are calibrated already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    words[2] = str(tmp_path / "whole")
    assert main(words) == 0
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes(), path


def _folder(path):
    calibration = object.__new__(CalibrationFolder)
    calibration.path = path
    return calibration


def test_the_table_says_what_the_data_says(tmp_path, capsys):
    words = ["preset=w4", "method=mse", f"data.source={stories_text()}", "samples=4", "data.sequence=64"]
    assert main(["quantize", str(stories_model()), str(tmp_path / "out"), *words, "--json"]) == 0
    out = capsys.readouterr()
    assert "calibrating on 4 sequences" in out.err
    assert "256 tokens" in out.err
    rows = json.loads(out.out)["weights"]
    assert np.mean([row["output_error"] for row in rows]) < np.mean([row["nearest_error"] for row in rows])
    assert not any(row["uncalibrated"] for row in rows)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["method=gptq"], "method=gptq needs calibration data"),
        (["method=gqtp"], "unknown method `gqtp`"),
        (["method=gptq", "data.source=TEXT", "samples=9000"], "fewer than samples=9000"),
        (["method=gptq", "data.source=TEXT", "data.sequence=4096"], "the model's context of 512"),
        (["method=gptq", "data.source=nothing.txt"], "nothing.txt"),
        (["samples=3"], "without data"),
        (["method.damping=1"], "damping"),
        (["method=gptq", "method.damping=0", "data.source=TEXT"], "damping"),
    ],
)
def test_mistakes_are_one_error_before_work_starts(words, problem, tmp_path, capsys):
    words = [word.replace("TEXT", str(stories_text())) for word in words]
    assert main(["quantize", str(stories_model()), str(tmp_path / "out"), "preset=w4", *words]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_the_layout_cannot_say_is_refused_before_calibration(tmp_path):
    data = DataSettings(source=str(stories_text()))
    with pytest.raises(Unsupported):
        quantize(str(stories_model()), tmp_path / "out", preset_rules("nf4"), method=GPTQ(), data=data, to="compressed-tensors")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(BadInput, match="not empty"):
        quantize(str(stories_model()), tmp_path / "full", preset_rules("w4"), method=GPTQ(), data=data)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_experts_with_too_few_tokens_are_told(tmp_path):
    from argosy.cli.verbs.quantize import quantization_table

    save_case("deepseek-3.2", tmp_path / "plain")
    data, rules = SYNTHETIC.model_copy(update={"sequence": 4}), [Rule(weights="int4", granularity=8)]
    result = quantize(str(tmp_path / "plain"), tmp_path / "out", rules, method=ScaleSearch(), data=data, samples=1)
    assert any(0 < row["uncalibrated"] <= 1 for row in result["weights"])
    assert "saw too few tokens" in quantization_table(result)


def test_nearest_with_data_is_nearest_without(tmp_path):
    for name, data in (("with", DataSettings(source=str(stories_text()), sequence=64)), ("without", None)):
        quantize(str(stories_model()), tmp_path / name, preset_rules("nvfp4"), method=Nearest(), data=data, samples=2)
    with_data, other = (load_lm(tmp_path / name).logits([[5, 9, 100]]) for name in ("with", "without"))
    np.testing.assert_array_equal(with_data, other)
