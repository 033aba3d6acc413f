"""Thoughts in gpt-oss's channels: completions hold them between marks that rewards know, and rewards grade what follows."""

import json
from pathlib import Path

import pytest

from argosy.data.rows.prompts import Prompt
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.byte import ByteTokenizer, tokenizer_json
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.sampling.sample import Sampling
from argosy.infer.tools.channels import MARKS
from argosy.rl.rewards.builtin import maths
from argosy.rl.rollouts.completions import SampledCompletion, sample_trajectories

THOUGHT = "<|channel|>analysis<|message|>Perhaps \\boxed{5}<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>#### 6<|return|>"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """A byte-level tokenizer with the marks as special tokens."""
    content = json.loads(tokenizer_json())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [{"id": i, "content": name, "special": True} | plain for i, name in enumerate(MARKS, 258)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    return load_tokenizer(str(tmp_path))


class Remote:
    """An engine elsewhere that answers with these tokens."""

    lost, weights_s = 0, 0.0

    def __init__(self, tokenizer: Tokenizer, text: str):
        self.tokenizer, self.tokens = tokenizer, tokenizer.encode(text, special=True)

    def drawn(self, prompts, sampling, interrupted):
        ended = self.tokens[-1] == self.tokenizer.eos
        return [SampledCompletion(self.tokens, [0.0] * len(self.tokens), ended) for _ in prompts]

    def sleep(self): ...


def completion(tokenizer: Tokenizer, text: str) -> str:
    (trajectory,) = sample_trajectories(Remote(tokenizer, text), [Prompt("?", [63], {}, "line 1")], 99, Sampling(), (0, 0))
    return trajectory.text


def test_thoughts_of_channels_are_not_graded(tokenizer: Tokenizer):
    text = completion(tokenizer, THOUGHT + FINAL)
    assert text == "<think>Perhaps \\boxed{5}</think>#### 6"
    assert maths([text, text], ["6", "5"]) == [1.0, 0.0]


@pytest.mark.parametrize("cut", [THOUGHT, THOUGHT.removesuffix("<|end|>"), THOUGHT + "<|start|>assistant"])
def test_a_completion_that_ends_in_a_thought_earns_nothing(tokenizer: Tokenizer, cut: str):
    text = completion(tokenizer, cut)
    assert text == "<think>Perhaps \\boxed{5}"
    assert maths([text], ["5"]) == [0.0]


def test_without_channels_a_completion_is_its_text(tokenizer: Tokenizer):
    assert completion(tokenizer, "#### 6<|return|>") == "#### 6"
    assert completion(ByteTokenizer(), "<|channel|>analysis") == "<|channel|>analysis"
    assert completion(tokenizer, FINAL) == "#### 6"
