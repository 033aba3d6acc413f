"""Whether answers share prompts in gradients: what is decided, that it changes no number, and that a run keeps its decision."""

from pathlib import Path
from typing import Any

import pytest
from helpers import numbers
from run.test_reinforce_runs import fit, prompts_and_rewards

from argosy.core.errors import ArgosyError
from argosy.run.assembly.shared_prompts import decided_sharing, resumed_on
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompts_and_rewards(tmp_path_factory.mktemp("prompts"))


def sharing_of(*words: str, platform: str = "cpu", recipe: str = "grpo") -> bool:
    model = [] if any(word.startswith("model=") for word in words) else ["model=llama3.2-1b"]
    common = ["data.source=prompts.jsonl", "reward=exact", *model, "data.sequence=64", "data.batch=8", "rollout.tokens=16"]
    return decided_sharing(compose(Run, recipe, [*common, *words]).value, platform)


RECURRENT = "model=qwen3-next-80b-a3b"
WINDOWS = ["model.window=32"]
CASES: dict[str, tuple[list[str], dict[str, Any], bool]] = {
    "by default": ([], {}, True),
    "on a gpu": ([], {"platform": "gpu"}, True),
    "on a tpu": ([], {"platform": "tpu"}, False),
    "on a tpu, asked for": (["rollout.share_prompts=true"], {"platform": "tpu"}, True),
    "not asked for": (["rollout.share_prompts=false"], {}, False),
    "one answer a prompt": (["rollout.completions=1"], {}, False),
    "windows shorter than a row": (WINDOWS, {}, False),
    "windows, asked for": ([*WINDOWS, "rollout.share_prompts=true"], {}, True),
    "a window longer than a row": (["model.window=64"], {}, True),
    "recurrent": ([RECURRENT], {}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_shared_where_it_is_faster(name: str):
    words, options, expected = CASES[name]
    assert sharing_of(*words, **options) == expected


@pytest.mark.parametrize(
    ("words", "message"), [([RECURRENT], "recurrent"), (["rollout.completions=1"], "shares it with none")], ids=["recurrent", "one"]
)
def test_what_cannot_share_is_refused_where_it_is_asked_for(words: list[str], message: str):
    with pytest.raises(ArgosyError, match=message):
        sharing_of(*words, "rollout.share_prompts=true")


def test_a_run_that_resumes_on_a_tpu_says_what_its_masks_cost():
    assert "no kernel for TPUs" in resumed_on(True, "tpu")
    assert resumed_on(True, "gpu") == resumed_on(False, "tpu") == ""


def test_a_run_that_shares_prompts_has_the_numbers_of_one_that_does_not(data: Path, tmp_path: Path):
    """Three updates, with a critic's values, the KL penalty's reference and two epochs, so that all that reads parts is compared. The
    first run is stopped between the updates of a rollout, and goes on as it began."""
    settings = ["rollout.epochs=2", "objective.kl=0.1", "data.sequence=40", "rollout.completions=4"]
    fit("ppo", data, tmp_path / "shared", *settings, steps=1)
    fit("ppo", data, tmp_path / "shared", *settings, steps=3)
    fit("ppo", data, tmp_path / "alone", *settings, "rollout.share_prompts=false", steps=3)
    spared = numbers(tmp_path / "shared", "tokens_spared")
    assert 0.1 < spared[1] == spared[2] < 0.5
    assert not numbers(tmp_path / "alone", "tokens_spared")
    for metric in ("loss", "reward", "grad_norm", "value/error", "sampler/difference_mean", "targets"):
        shared, other = numbers(tmp_path / "shared", metric), numbers(tmp_path / "alone", metric)
        assert set(shared) == {1, 2, 3}, metric
        assert shared == pytest.approx(other, rel=1e-4, abs=2e-6), metric
    tokens = [numbers(tmp_path / name, "tokens")[3] for name in ("shared", "alone")]
    assert tokens[0] < 0.9 * tokens[1]


def test_a_row_that_has_no_room_for_two_answers_is_told(data: Path, tmp_path: Path):
    words = ["data.sequence=13", "rollout.tokens=8", "rollout.ignore_eos=true"]
    output = fit("grpo", data, tmp_path / "asked", *words, "rollout.share_prompts=true", steps=1)
    assert "no two answers to a prompt fit into a row of 13 tokens" in output
    assert numbers(tmp_path / "asked", "tokens_spared") == {1: 0.0}
    assert "no two answers" not in fit("grpo", data, tmp_path / "default", *words, steps=1)


@pytest.mark.slow
def test_devices_share_rows_whose_answers_share_prompts(data: Path, tmp_path: Path):
    settings = ["rollout.epochs=2", "objective.kl=0.1", "data.sequence=40", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
    fit("ppo", data, tmp_path / "shared", *settings, steps=2)
    fit("ppo", data, tmp_path / "alone", *settings, "rollout.share_prompts=false", steps=2)
    assert numbers(tmp_path / "shared", "tokens_spared")[1] > 0.1
    for metric in ("loss", "reward", "grad_norm", "value/error"):
        shared, other = numbers(tmp_path / "shared", metric), numbers(tmp_path / "alone", metric)
        assert shared == pytest.approx(other, rel=1e-4, abs=2e-6), metric
