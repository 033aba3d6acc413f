"""Objects of Gymnasium's form: one without the library, and a real `gymnasium.Env` where it is installed."""

from pathlib import Path

import pytest
from rl.talking import Scripted, language_model, prompts

from argosy.core.errors import BadInput
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.rl.environments.settings import GymnasiumEnvironment, open_table
from argosy.rl.rollouts.episodes.trajectories import EpisodeLimits, EpisodeRunner

CODE = """
class Plain:
    "Counts letters; nothing of Gymnasium."
    def __init__(self, most=4): self.most = most
    def reset(self, seed=None, options=None):
        self.total, self.options = 0, options
        return f"seed {type(seed).__name__}, {options['prompt']} {options['answer']}:", {}
    def step(self, action):
        self.total += len(action)
        return f"{action}={self.total}\\n", self.total / 2, self.total >= self.most, action == "stop", {}

class Numbers(Plain):
    def step(self, action): return 5, 0.0, False, False, {}
"""
REAL = """
import gymnasium
import numpy as np
from gymnasium.spaces import Text

class Letters(gymnasium.Env):
    "The next letter of a word that the seed chooses."
    observation_space, action_space = Text(20), Text(20)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = ["abc", "xyz"][int(self.np_random.integers(2))]
        self.place = 0
        return self.word[0], {}

    def step(self, action):
        self.place += 1
        right = action == self.word[self.place]
        return self.word[self.place], np.float64(right), self.place == 2, False, {}

def limited():
    return gymnasium.wrappers.TimeLimit(Letters(), 1)
"""


@pytest.fixture(scope="module")
def lm() -> LM:
    return language_model()


def play(lm: LM, tmp_path: Path, code: str, name: str, texts: list[str], **args):
    (tmp_path / "game.py").write_text(code)
    data = prompts(lm, ["say"], answer=["it"])
    setup = open_table(GymnasiumEnvironment(make=f"{tmp_path}/game.py:{name}", args=args, stop="\n"), data, None)
    try:
        playing = EpisodeRunner(lm, data(0, 1), EpisodeLimits(Sampling(), 90, 150), (1,), setup, lambda: False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LM, "engine", lambda *_: Scripted({0: texts}))
            return playing.run()[0]
    finally:
        setup.close()


def test_any_object_of_that_form(lm: LM, tmp_path: Path):
    answer = play(lm, tmp_path, CODE, "Plain", ["ab\n", " c \n", "def\n"], most=6)
    assert answer.said == "seed int, say it:ab\nab=2\n c \nc=3\ndef\n"
    assert (answer.played.reward, answer.ended, answer.played.why) == (1 + 1.5 + 3, True, "done")
    cut = play(lm, tmp_path, CODE, "Plain", ["stop\n"], most=9)
    assert (cut.ended, cut.played.why) == (False, "environment"), "it was truncated"


def test_an_exception_is_blamed_on_the_users_file(lm: LM, tmp_path: Path):
    broken = CODE + "\nclass Broken(Plain):\n    def step(self, action): raise KeyError('mine')\n"
    answer = play(lm, tmp_path, broken, "Broken", ["a\n"])
    kind, message = answer.played.failure
    assert kind == "raised"
    assert message.splitlines()[0] == f"KeyError: 'mine', in {tmp_path}/game.py:16: def step(self, action): raise KeyError('mine')"


def test_observations_are_texts(lm: LM, tmp_path: Path):
    answer = play(lm, tmp_path, CODE, "Numbers", ["a\n"])
    assert "an observation is a int, not a text" in answer.played.failure[1]
    with pytest.raises(BadInput, match="unexpected keyword argument 'fewest'"):
        play(lm, tmp_path, CODE, "Plain", [], fewest=1)


def test_a_real_environment_and_its_wrappers(lm: LM, tmp_path: Path):
    """Opt-in: Gymnasium is no dependency."""
    pytest.importorskip("gymnasium")
    answer = play(lm, tmp_path, REAL, "Letters", ["b\n", "c\n"])
    assert answer.said in ("ab\nbc\n", "xb\nyc\n")
    assert answer.played.reward == (2 if answer.said[0] == "a" else 0)
    assert answer.ended
    limited = play(lm, tmp_path, REAL, "limited", ["b\n"])
    assert (limited.ended, limited.played.turn_count) == (False, 1)
