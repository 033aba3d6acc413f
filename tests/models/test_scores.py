"""Heads of scores: built, counted and named as transformers' ForSequenceClassification in every family that has one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import relative, shared
from safetensors.numpy import load_file, save_file

import argosy
from argosy.core.errors import ArgosyError, BadInput
from argosy.models.parts.weight import abstract, parameter_count, variables
from argosy.weights.hub.config import config_from
from tools.seams import examples

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "preferences.json").read_text(encoding="utf-8"))["scores"]
SCORED = {name: config for name, config in examples().items() if "scores" in type(config).model_fields}


@pytest.mark.parametrize("name", SCORED)
def test_a_head_of_scores_is_counted_and_survives_config_json(name):
    plain = SCORED[name]
    config = plain.model_copy(update={"scores": 3})
    model = config.build()
    assert variables(model)["head.w"].shape == (config.width, 3)
    assert config.parameters() == parameter_count(abstract(model))
    assert "score.weight" in {row.names for row in config.hub_rows()[0]}
    try:
        written = plain.to_hub()
    except ArgosyError:
        return  # this combination has no architecture on the Hub, with either head
    scored = config.to_hub()
    assert scored["architectures"] == [written["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]
    assert config_from(scored, "").resolved() == config.resolved()


def test_scores_equal_those_of_transformers(tmp_path):
    """stories260K with a given head; sequences of uneven lengths in one batch."""
    folder = Path(shutil.copytree(shared("models/stories260k"), tmp_path / "model", copy_function=shutil.copyfile))
    folder.chmod(0o755)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = np.sin(np.arange(config["hidden_size"], dtype=np.float32))[None]
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    lm = argosy.load(folder)
    assert lm.config.scores == 1
    assert relative(lm.rewards(GOLDEN["tokens"]), GOLDEN["scores"]) < 2e-5


def test_a_family_without_such_a_head_says_so():
    gpt2 = next(config for name, config in examples().items() if name.startswith("gpt2"))
    written = gpt2.to_hub() | {"architectures": ["GPT2ForSequenceClassification"]}
    with pytest.raises(BadInput, match="a head of scores"):
        config_from(written, "")
