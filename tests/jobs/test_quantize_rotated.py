"""`argosy quantize ... rotate=hadamard`: the rotated model loads anywhere, with a head of its own where it was tied."""

import json
from pathlib import Path

import pytest
from helpers import relative, shared
from laws.families import CASES, built

import argosy
from argosy.adapt.methods.settings import GPTQ
from argosy.adapt.rules import preset_rules
from argosy.core.errors import Unsupported
from argosy.data.settings import DataSettings
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.jobs.quantize import quantize
from argosy.models.parts.stack import Unroll

TOKENS = [[5, 9, 100, 23, 7, 60]]


@pytest.mark.parametrize("to", ["argosy", "compressed-tensors"])
def test_a_rotated_folder_answers_as_the_model_does(to: str, tmp_path: Path):
    source, said = shared("models/stories260k"), []
    plain = argosy.load(source)
    assert plain.config.tied
    quantize(str(source), tmp_path / "out", preset_rules("w8"), rotate="hadamard", to=to, say=said.append)
    assert any("Hadamard matrix" in line and "tied head" in line for line in said)
    lm = argosy.load(tmp_path / "out")
    assert not lm.config.tied
    assert relative(lm.logits(TOKENS), plain.logits(TOKENS)) < 0.02
    if to == "compressed-tensors":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_methods_calibrate_the_rotated_model(tmp_path: Path):
    source, text = shared("models/stories260k"), tmp_path / "text.txt"
    text.write_text(shared("text/tinystories_sample.txt").read_text(encoding="utf-8")[:9000], encoding="utf-8")
    data = DataSettings(source=str(text), sequence=64)
    how = {"rotate": "hadamard", "method": GPTQ(), "data": data, "samples": 16}
    rows = quantize(str(source), tmp_path / "out", preset_rules("w4"), **how)["weights"]
    assert all(row["output_error"] < row["nearest_error"] for row in rows)
    plain, lm = argosy.load(source), argosy.load(tmp_path / "out")
    assert relative(lm.logits(TOKENS), plain.logits(TOKENS)) < 0.25


def test_a_structure_that_does_not_allow_it_is_refused_before_a_file_is_written(tmp_path: Path):
    config = CASES["gemma-2"]
    LM(config, built(config, Unroll()), None).save(tmp_path / "plain", format="argosy")
    with pytest.raises(Unsupported, match="post_attn_norm"):
        quantize(str(tmp_path / "plain"), tmp_path / "out", preset_rules("w4"), rotate="hadamard")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
    assert load_lm(tmp_path / "plain").config == config
