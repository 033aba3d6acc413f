"""CLIP's and T5's text encoders against transformers: small random ones (tests/reference/images.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative
from safetensors.numpy import load_file, save_file

import argosy
from argosy.core.errors import BadInput
from argosy.jobs.convert import convert
from argosy.models.blocks.t5 import distance_buckets
from argosy.models.parts.stack import Scan
from argosy.weights.build import load_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
TOLERANCE = 1e-5  # of the largest number; 4e-7 was measured
CLIPS, T5S = ["clip-l", "clip-g"], ["t5", "t5-plain", "umt5"]


def open_golden(name: str, folder: Path) -> tuple[Path, argosy.LM, dict[str, np.ndarray]]:
    folder = write_model(GOLDENS / name, folder / name)
    return folder, argosy.load(folder), dict(np.load(GOLDENS / name / "golden.npz"))


@pytest.mark.parametrize("name", CLIPS)
def test_clip_is_that_of_transformers(name: str, tmp_path: Path):
    """The vectors of tokens, those before the last layer, and of texts: at the end-of-text token, by either rule, and projected."""
    folder, lm, golden = open_golden(name, tmp_path)
    tokens = jnp.asarray(golden["tokens"], jnp.int32)
    attend = lm.config.attend(jnp.ones_like(tokens))
    states = jax.jit(lambda module: module.states(tokens, attend))
    hidden, penultimate = states(lm.module)
    assert relative(hidden, golden["out_hidden"]) < TOLERANCE
    assert relative(penultimate, golden["out_penultimate"]) < TOLERANCE
    assert relative(lm.module.pooled(hidden, tokens), golden["out_pooled"]) < TOLERANCE
    texts = [[int(i) for i in row[: list(row).index(89) + 1]] for row in golden["tokens"]]
    assert relative(lm.embed(texts), golden["out_pooled"]) < TOLERANCE
    from argosy.checkpoint.open import open_model

    scanned = load_model(open_model(folder), run=Scan()).module
    assert relative(states(scanned)[1], golden["out_penultimate"]) < TOLERANCE


@pytest.mark.parametrize("name", T5S)
def test_t5_is_that_of_transformers(name: str, tmp_path: Path):
    """One row whole, one padded, and that one again with its padding read as text."""
    _, lm, golden = open_golden(name, tmp_path)
    tokens, live = (jnp.asarray(golden[key], jnp.int32) for key in ("tokens", "mask"))
    encode = jax.jit(lambda module, tokens, live: module.hidden(tokens, module.config.attend(live))[0])
    hidden = encode(lm.module, tokens, live)
    seen = np.asarray(live, bool)
    assert relative(np.asarray(hidden)[seen], golden["out_hidden"][seen]) < TOLERANCE
    whole = encode(lm.module, tokens, jnp.ones_like(tokens))[1:]
    assert relative(whole, golden["out_unmasked"]) < TOLERANCE


def test_distances_of_the_longest_prompts():
    """T5's own sizes: 16 buckets each way, of which 8 are exact; from 128 tokens on all distances share one (arXiv:1910.10683)."""
    row = np.asarray(distance_buckets(jnp.arange(512), 32, 128))[300]
    assert list(row[300 - 7 : 301]) == [7, 6, 5, 4, 3, 2, 1, 0]
    assert list(row[301:308]) == list(range(17, 24))
    assert set(row[: 300 - 128]) == {15}
    assert set(row[300 + 128 :]) == {31}
    assert np.all(np.diff(row[301:]) >= 0)


@pytest.mark.parametrize("name", [*CLIPS, *T5S])
def test_folder_to_argosy_to_folder_is_exact(name: str, tmp_path: Path):
    folder, lm, _ = open_golden(name, tmp_path)
    convert(str(folder), tmp_path / "argosy", "argosy", None)
    convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
    theirs = load_file(folder / "model.safetensors")
    prefix = "text_model." if name == "clip-l" else ""  # published so; transformers 5 leaves it out
    ours = load_file(tmp_path / "hub" / "model.safetensors")
    assert {prefix + n for n in theirs} == set(ours)
    assert all((ours[prefix + n] == w).all() for n, w in theirs.items())
    assert argosy.load(tmp_path / "hub").config == lm.config
    config = json.loads((tmp_path / "hub" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]


def test_t5_folders_with_a_decoder_or_a_second_name_of_the_embedding_are_read(tmp_path: Path, capsys):
    folder, lm, _ = open_golden("t5", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"encoder.embed_tokens.weight": tensors["shared.weight"], "decoder.final_layer_norm.weight": np.ones(3, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    rows = [[5, 7, 9, 1], [3, 1]]
    np.testing.assert_array_equal(argosy.load(folder).embed(rows), lm.embed(rows))
    assert "decoder.*" in capsys.readouterr().err


def test_an_activation_that_is_not_built_is_named(tmp_path: Path):
    folder, _, _ = open_golden("t5", tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"feed_forward_proj": "gated-mish"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(BadInput, match="gated-mish"):
        argosy.load(folder)
