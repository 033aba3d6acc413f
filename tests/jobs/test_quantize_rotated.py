"""`argosy quantize ... rotate=hadamard`: the rotated model loads anywhere, with a head of its own where it was tied. `rotate=quarot`:
it also rotates data while it runs, and other formats refuse it."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import relative, shared
from laws.families import CASES, noisy_model
from safetensors.numpy import load_file, save_file

import argosy
from argosy.adapt.methods.settings import GPTQ
from argosy.adapt.rotation import rotated_model
from argosy.adapt.rules import Rule, preset_rules
from argosy.core.errors import Unsupported
from argosy.data.settings import DataSettings
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.infer.settings import EngineSettings
from argosy.jobs.convert import convert, open_source
from argosy.jobs.quantize import quantize
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import put
from argosy.weights.hub.sentence_steps import EmbeddingSteps, write_steps

TOKENS = [[5, 9, 100, 23, 7, 60]]
READERS = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")


@pytest.mark.parametrize("to", ["argosy", "compressed-tensors"])
def test_a_rotated_folder_answers_as_the_model_does(to: str, tmp_path: Path):
    source, messages = shared("models/stories260k"), []
    plain = argosy.load(source)
    assert plain.config.tied
    quantize(str(source), tmp_path / "out", preset_rules("w8"), rotate="hadamard", to=to, say=messages.append)
    assert any("Hadamard matrix" in line and "tied head" in line for line in messages)
    lm = argosy.load(tmp_path / "out")
    assert not lm.config.tied
    assert relative(lm.logits(TOKENS), plain.logits(TOKENS)) < 0.02
    if to == "compressed-tensors":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_folder_that_rotates_while_it_runs_answers_as_the_model_does(tmp_path: Path):
    """From caches too, which hold rotated keys, in eight bits or in floats."""
    source, messages = shared("models/stories260k"), []
    plain = argosy.load(source)
    quantize(str(source), tmp_path / "out", preset_rules("w8a8"), rotate="quarot", say=messages.append)
    assert any(
        "5 down projections and queries, keys and heads of 5 layers are rotated while the model runs" in line for line in messages
    )
    lm, narrow = (load_lm(tmp_path / "out", engine=EngineSettings(cache_dtype=form)) for form in (None, "int8"))
    assert lm.config.rotations == ("ffn", "heads", "keys")
    assert relative(lm.logits(TOKENS), plain.logits(TOKENS)) < 0.02
    expected = plain.generate(["Once upon a time"], max_tokens=24, temperature=0.0)[0].tokens
    assert lm.generate(["Once upon a time"], max_tokens=24, temperature=0.0)[0].tokens == expected
    assert narrow.generate(["Once upon a time"], max_tokens=24, temperature=0.0)[0].tokens == expected
    with pytest.raises(Unsupported, match=r"rotations = \('ffn', 'heads', 'keys'\)"):
        convert(str(tmp_path / "out"), tmp_path / "hub", "hub", None)
    with pytest.raises(Unsupported, match="rotations"):
        convert(str(tmp_path / "out"), tmp_path / "out.gguf", "gguf", None)
    with pytest.raises(Unsupported, match="no place here for rotations"):
        quantize(str(source), tmp_path / "other", preset_rules("w8a8"), rotate="quarot", to="compressed-tensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("rotate", ["hadamard", pytest.param("quarot", marks=pytest.mark.slow)])
def test_methods_calibrate_the_rotated_model(rotate: str, tmp_path: Path):
    source, text = shared("models/stories260k"), tmp_path / "text.txt"
    text.write_text(shared("text/tinystories_sample.txt").read_text(encoding="utf-8")[:9000], encoding="utf-8")
    data = DataSettings(source=str(text), sequence=64)
    options = {"rotate": rotate, "method": GPTQ(), "data": data, "samples": 16}
    rows = quantize(str(source), tmp_path / "out", preset_rules("w4"), **options)["weights"]
    assert all(row["output_error"] < row["nearest_error"] for row in rows)
    plain, lm = argosy.load(source), argosy.load(tmp_path / "out")
    assert relative(lm.logits(TOKENS), plain.logits(TOKENS)) < 0.25


def test_a_structure_that_does_not_allow_it_is_refused_before_a_file_is_written(tmp_path: Path):
    config = CASES["gemma-2"]
    LM(config, noisy_model(config, Unroll()), None).save(tmp_path / "plain", format="argosy")
    with pytest.raises(Unsupported, match="post_attn_norm"):
        quantize(str(tmp_path / "plain"), tmp_path / "out", preset_rules("w4"), rotate="hadamard")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
    assert load_lm(tmp_path / "plain").config == config
    # What reads the last hidden states would see them rotated.
    encoder = tmp_path / "encoder"
    shutil.copytree(shared("models/stories260k"), encoder, copy_function=shutil.copyfile)
    write_steps(encoder, EmbeddingSteps("last", normalize=True, tokens=64), 64)
    with pytest.raises(Unsupported, match="embeds texts"):
        quantize(str(encoder), tmp_path / "out", preset_rules("w4"), rotate="hadamard")


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K with two channels of every normed stream forty times as large, and their rows of the readers as much smaller: the
    same function, whose data has the outliers of large models."""
    folder = tmp_path_factory.mktemp("outliers") / "model"
    shutil.copytree(shared("models/stories260k"), folder, copy_function=shutil.copyfile)
    weights = load_file(folder / "model.safetensors")
    for i in range(5):
        for norm, readers in (("input_layernorm", READERS[:3]), ("post_attention_layernorm", READERS[3:])):
            weights[f"model.layers.{i}.{norm}.weight"][[7, 30]] *= 40
            for reader in readers:
                weights[f"model.layers.{i}.{reader}_proj.weight"][:, [7, 30]] /= 40
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_rotated_floats_are_the_function_with_outliers(outliers: Path):
    plain, stored = argosy.load(shared("models/stories260k")), rotated_model(open_source(str(outliers)))
    model = stored.config.build(Unroll())
    put(model, {name: jnp.asarray(stored.weights.read(name)) for name in stored.weights.names})
    assert relative(LM(stored.config, model, None).logits(TOKENS), plain.logits(TOKENS)) < 2e-5


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param({"weights": "int8", "activations": "int8"}, marks=pytest.mark.slow),
        pytest.param({"weights": "int4", "granularity": 32, "activations": "int4", "activation_block": 32}, marks=pytest.mark.slow),
        {"weights": "int4", "granularity": "channel", "activations": "mxint8"},
    ],
)
def test_rotation_and_gptq_lose_less_than_gptq_alone_where_channels_have_outliers(rule, outliers: Path, tmp_path: Path):
    """By the mean KL of the next token. QuaRot (arXiv:2404.00456, table 1) rounds by GPTQ after the rotation in the same way."""
    text = shared("text/tinystories_sample.txt").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text[:20000], encoding="utf-8")
    data = DataSettings(source=str(tmp_path / "text.txt"), sequence=64)
    plain = argosy.load(shared("models/stories260k"))
    tokens = [plain.tokenizer.encode(text[-1500:])[:300]]
    exact = jax.nn.log_softmax(plain.logits(tokens))
    divergences = []
    for rotate in (None, "hadamard"):
        out = tmp_path / str(rotate)
        quantize(str(outliers), out, [Rule(**rule)], rotate=rotate, method=GPTQ(), data=data, samples=32)
        rounded = jax.nn.log_softmax(argosy.load(out).logits(tokens))
        divergences.append(float(jnp.mean(jnp.sum(jnp.exp(exact) * (exact - rounded), -1))))
    assert divergences[1] < 0.4 * divergences[0]
