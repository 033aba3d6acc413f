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
SCORED = {name: config for name, config in examples().items() if getattr(type(config), "can_score", False)}


@pytest.mark.parametrize("name", SCORED)
def test_a_head_of_scores_is_counted_and_survives_config_json(name):
    plain = SCORED[name]
    config = plain.model_copy(update={"scores": 3, "labels": ("no", "yes", "?"), "problem_type": "multi_label_classification"})
    model = config.build()
    assert variables(model)["head.w"].shape == (config.width, 3)
    assert config.parameters() == parameter_count(abstract(model))
    names = {row.names for row in config.hub_rows()[0]}
    assert names & {"score.weight", "classifier.weight", "classifier.out_proj.weight"}
    try:
        hub_config = plain.to_hub()
    except ArgosyError:
        return  # this combination has no architecture on the Hub, with either head
    scored = config.to_hub()
    kind = hub_config["architectures"][0]
    for end in ("ForCausalLM", "LMHeadModel", "Model"):
        kind = kind.removesuffix(end)
    assert scored["architectures"] == [kind + "ForSequenceClassification"]
    assert scored["id2label"] == {"0": "no", "1": "yes", "2": "?"}
    assert config_from(scored, "").resolved() == config.resolved()


@pytest.mark.parametrize(
    ("changes", "labels", "problem_type"),
    [
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}}, (), None),
        ({"id2label": {"1": "b", "0": "a"}}, ("a", "b"), None),
        ({}, (), None),
        ({"id2label": {"0": "LABEL_0"}, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, (), "regression"),
        ({"id2label": {"0": "LABEL_0"}, "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, (), None),
    ],
)
def test_names_of_classes_are_read_from_config_json(changes, labels, problem_type):
    bert = SCORED["bert-plain"].to_hub() | {"architectures": ["BertForSequenceClassification"]}
    config = config_from(bert | changes, "")
    assert (config.labels, config.problem_type) == (labels, problem_type)
    assert config.label_names == (labels or tuple(f"LABEL_{i}" for i in range(config.scores)))


def test_classes_that_are_not_numbered_from_0_are_refused():
    bert = SCORED["bert-plain"].to_hub() | {"architectures": ["BertForSequenceClassification"]}
    with pytest.raises(BadInput, match="does not number its 2 classes"):
        config_from(bert | {"id2label": {"1": "a", "2": "b"}}, "")
    with pytest.raises(BadInput, match="unknown `problem_type` 'many'"):
        config_from(bert | {"problem_type": "many"}, "")


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
