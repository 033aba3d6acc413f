"""The examples and figures of docs/guides/rewards.md."""

import doctest
import re
from pathlib import Path

import pytest
from helpers import can_confine

from argosy.core.errors import BadInput
from argosy.rl import sandbox
from argosy.rl.rewards.functions import open_rewards
from argosy.rl.rewards.settings import RewardSettings
from argosy.rl.rewards.sources import REWARDS

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "rewards.md").read_text(encoding="utf-8")


def block(beginning: str) -> str:
    """The indented block that begins like this, blank lines included."""
    blocks = re.split(r"\n(?=\S)", GUIDE)
    example = next(part for part in blocks if re.search(rf"^    {re.escape(beginning)}", part, re.MULTILINE))
    lines = [line[4:] for line in example.splitlines()[1:]]
    return "\n".join(lines).strip() + "\n"


@pytest.fixture
def _functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(block("def short(") + block("short.per_completion"))


@pytest.mark.usefixtures("_functions")
def test_the_first_example():
    names: dict = {}
    exec(block("from argosy.rl.rewards.functions"), names)
    scored = names["scored"]
    assert scored.names == ("short", "maths")
    assert scored.values[0].tolist() == pytest.approx([-0.028, 1.0], abs=1e-6)
    assert names["rewards"].weights == (1, 2)


@pytest.mark.usefixtures("_functions")
def test_the_error():
    with pytest.raises(BadInput) as caught:
        open_rewards([RewardSettings(of="rewards.py:right")], 1, columns=["solution", "level"])
    assert str(caught.value) == block("error: the reward").strip()


@pytest.mark.skipif(not can_confine(), reason="needs Linux with Landlock")
def test_the_sessions():
    examples = doctest.DocTestParser().get_doctest(GUIDE, {}, "rewards.md", None, 0)
    assert len(examples.examples) == 6
    assert doctest.DocTestRunner(verbose=False).run(examples).failed == 0


def test_the_figures():
    limits = sandbox.SandboxLimits()
    for text in (
        f"{limits.cpu_s} s of CPU, {limits.wall_s} s by the clock",
        f"{limits.threads} threads",
        f"{limits.memory_mb} MB; {limits.file_mb} MB a file, {limits.folder_mb} MB and {limits.files} files in all; ",
        f"{limits.output_kb} KB of output",
        f"`timeout` seconds for a call ({RewardSettings(of='x').timeout:g})",
        *(f"| `{name}` |" for name in REWARDS._items),
    ):
        assert text in GUIDE, text


def test_a_gguf_file_is_no_reward_and_one_that_does_not_exist_is_not_called_a_file(tmp_path: Path):
    path = tmp_path / "reward.gguf"
    with pytest.raises(BadInput, match="no reward"):
        open_rewards([RewardSettings(of=str(path))], 1)
    path.touch()
    with pytest.raises(BadInput, match="which has no head of scores"):
        open_rewards([RewardSettings(of=str(path))], 1)
