"""Reward models as rewards. That scores are those of transformers is shown by tests/models/test_scores.py."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import shared
from safetensors.numpy import load_file, save_file

from argosy.core.errors import BadInput
from argosy.infer.load import load_lm
from argosy.rl.rewards.functions import open_rewards
from argosy.rl.rewards.models import whole_conversation
from argosy.rl.rewards.settings import RewardSettings


def folder_of(tmp_path: Path, scores: int) -> Path:
    """stories260K, with a head of so many scores in place of its own."""
    folder = Path(shutil.copytree(shared("models/stories260k"), tmp_path / f"scores-{scores}", copy_function=shutil.copyfile))
    folder.chmod(0o755)
    if scores:
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {str(i): f"LABEL_{i}" for i in range(scores)}}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        head = np.sin(np.arange(scores * config["hidden_size"], dtype=np.float32))
        tensors["score.weight"] = head.reshape(scores, -1)
        (folder / "model.safetensors").unlink()
        save_file(tensors, folder / "model.safetensors")
    return folder


def test_scores_of_prompts_with_completions_beside_a_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(completions): return [len(c) for c in completions]")
    folder = folder_of(tmp_path, 1)
    prompts, completions = ["Once upon", "Once upon", "The cat"], [" a time", " the moon there was", " sat"]
    with open_rewards([RewardSettings(of=str(folder)), RewardSettings(of="mine.py:f")], 1) as rewards:
        scored = rewards(prompts, completions, {})
    expected = load_lm(folder).rewards([prompt + completion for prompt, completion in zip(prompts, completions)])
    assert len(np.unique(expected)) == 3
    np.testing.assert_allclose(scored.values[:, 0], expected, rtol=1e-5)
    assert scored.values[:, 1].tolist() == [7, 19, 4]
    assert rewards.names == ("scores-1", "f")
    assert not scored.counts


def test_a_conversation_too_long_is_missing_and_said(tmp_path):
    messages = []
    folder = folder_of(tmp_path, 1)
    with open_rewards([RewardSettings(of=str(folder))], 0, say=messages.append) as rewards:
        scored = rewards(["Once"] * 3, [" upon", " upon a time" * 400, ""], {})
    assert np.isfinite(scored.values[:, 0]).tolist() == [True, False, True]
    assert scored.counts == {"scores-1": {"raised": 1}}
    assert "more than the model's context" in scored.messages["scores-1"]["raised"]
    assert len(messages) == 1


@pytest.mark.parametrize(("scores", "expected"), [(0, "has no head of scores"), (3, "gives 3 scores, not one")])
def test_a_model_of_another_kind_is_refused(tmp_path, scores, expected):
    with pytest.raises(BadInput, match=expected):
        open_rewards([RewardSettings(of=str(folder_of(tmp_path, scores)))], 1)


def test_the_conversation():
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    assert whole_conversation("a", "b") == "ab"
    assert whole_conversation([user], "yes") == whole_conversation([user], [answer]) == [user, answer]
    with pytest.raises(BadInput, match="the prompt is a text and its completion a list of messages"):
        whole_conversation("a", [answer])
