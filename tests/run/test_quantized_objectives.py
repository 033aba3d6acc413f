"""Quantization-aware training with objectives besides the next token: the rounded model is trained and sampled; references and teachers
are floats."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import numbers
from run import test_distill_runs as distillation
from run import test_preference_runs as preferences
from run import test_reinforce_runs as reinforcement

from argosy.jobs.quickstart.proof import digest

QAT = ["quant.train=qat", "quant.preset=w4"]
pairs, answers, prompts = preferences.data, distillation.data, reinforcement.data

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]


def resumed_as_whole(fit: Callable[..., str], folder: Path, steps: int) -> dict[int, float]:
    """The losses of a run, which another one has that stopped halfway. fit: trains in a folder, to a step."""
    fit(folder / "whole", steps=steps)
    for until in (steps // 2, steps):
        fit(folder / "halves", steps=until)
    assert numbers(folder / "whole", "loss") == numbers(folder / "halves", "loss")
    assert digest(folder / "whole", steps) == digest(folder / "halves", steps)
    return numbers(folder / "whole", "loss")


@pytest.mark.parametrize(("recipe", "rows"), [("dpo", "pairs"), ("orpo", "pairs"), ("reward", "pairs"), ("kto", "labeled")])
def test_preferences(recipe: str, rows: str, pairs: dict[str, Path], tmp_path: Path):
    def fit(run: Path, steps: int, words: list[str] = QAT) -> str:
        return preferences.fit(recipe, pairs[rows], run, "model.layers=1", *words, steps=steps)

    loss = resumed_as_whole(fit, tmp_path, 8)
    fit(tmp_path / "floats", 8, [])
    exact = numbers(tmp_path / "floats", "loss")
    # Another model from the first step on, and learned all the same.
    assert 1e-4 < abs(loss[1] - exact[1]) < 0.05
    assert loss[8] < 0.8 * loss[1]
    assert loss[8] == pytest.approx(exact[8], abs=0.2 * exact[1])


def test_distillation(answers: Path, tmp_path: Path):
    distillation.fit(answers, tmp_path / "teacher", "model.family=qwen", "model.layers=2", steps=6, recipe="sft")

    def fit(run: Path, steps: int, words: list[str] = QAT) -> str:
        return distillation.fit(answers, run, f"objective.teacher={tmp_path / 'teacher'}", *words, steps=steps)

    loss = resumed_as_whole(fit, tmp_path, 6)
    fit(tmp_path / "floats", 6, [])
    assert 1e-4 < abs(loss[1] - numbers(tmp_path / "floats", "loss")[1]) < 0.05
    assert loss[6] < 0.9 * loss[1]


def test_rollouts_are_sampled_by_the_rounded_model(prompts: Path, tmp_path: Path):
    """What the sampler says of a token is what the trainer says of it."""

    def fit(run: Path, steps: int) -> str:
        return reinforcement.fit("grpo", prompts, run, *QAT, steps=steps)

    resumed_as_whole(fit, tmp_path, 6)
    assert max(numbers(tmp_path / "whole", "sampler/difference_max").values()) < 1e-5
