"""The example and the figures of docs/guides/environments.md."""

import re
from pathlib import Path

import pytest
from rl.talking import Scripted, ids, language_model, prompts

from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.rl.environments.settings import (
    ENVIRONMENTS,
    CustomEnvironment,
    EnvironmentSettings,
    ToolsEnvironment,
    open_table,
)
from argosy.rl.rollouts.episodes.trajectories import EpisodeLimits, EpisodeRunner

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "environments.md").read_text(encoding="utf-8")


def test_the_example(tmp_path: Path):
    code = re.search(r"\n    import random\n(.*?)\n\n`environment.args", GUIDE, re.DOTALL)
    assert code is not None
    (tmp_path / "game.py").write_text("import random\n" + "\n".join(line[4:] for line in code[1].splitlines()) + "\n")
    lm = language_model()
    data = prompts(lm, ["count down:\n"])
    setup = open_table(CustomEnvironment(of=f"{tmp_path}/game.py:Countdown", args={"start": 1}, stop="\n"), data, None)
    try:
        playing = EpisodeRunner(lm, data(0, 1), EpisodeLimits(Sampling(), 40, 80), (1,), setup, lambda: False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LM, "engine", lambda *_: Scripted({0: ["0\n"]}))
            (answer,) = playing.run()
    finally:
        setup.close()
    assert answer.prompt.tokens == ids("count down:\n1\n")
    assert (answer.text, answer.played.reward, answer.played.counts) == ("1\n0\n", 1, {"countdown/right": 1})


def test_the_figures_and_names():
    base, tools = EnvironmentSettings(), ToolsEnvironment(functions=["a.py:b"])
    assert f"for a step ({base.timeout:g})" in GUIDE
    assert f"after its turn ({base.wait})" in GUIDE
    assert f"`environment.call_timeout`, {tools.call_timeout:g} s" in GUIDE
    for name in set(ENVIRONMENTS) - {"none", "custom"}:
        assert f"| `{name}` |" in GUIDE
