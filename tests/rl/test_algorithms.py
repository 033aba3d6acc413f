"""What is registered of algorithms, and what comes from files of users."""

import ast
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from argosy.core.errors import BadInput, UnknownName, UserError
from argosy.core.settings import read_settings, words_layer
from argosy.rl import algorithms
from argosy.rl.advantages.credit import RolloutRewards, rollout_advantages
from argosy.rl.algorithms import ADVANTAGES, ALGORITHMS, ALIASES, LOSSES
from argosy.rl.algorithms.grpo import GRPO, grpo
from argosy.rl.policy.objective import token_losses
from argosy.rl.policy.settings import Policy
from argosy.run.settings.run import Run
from argosy.train.objectives import OBJECTIVES

MODEL = ["model.family=llama", "model.vocab=258", "model.width=16", "model.layers=1", "model.ffn=16", "model.heads=2"]
MODEL += ["model.context=512", "reward=exact", "rollout.tokens=8"]
OWN = """
from argosy.rl.algorithms.grpo import GRPO
from argosy.rl.policy.settings import AdvantageName, LossName

class Median(GRPO):
    \"\"\"Rewards against the median of their group.\"\"\"

    sharpness: float = 2.0
    \"\"\"What advantages are multiplied by.\"\"\"

def median(rewards, lengths):
    import jax.numpy as jnp
    from argosy.rl.advantages.groups import groups
    return groups(rewards).advantages(rewards - jnp.median(rewards, 1, keepdims=True) + 0 * lengths)

def negative(new, advantages, mask):
    from argosy.rl.policy.token_losses import TokenLoss
    return TokenLoss(-advantages * new * mask, {})

number = 3
"""
REWARDS = np.array([[[0.0], [1.0], [5.0]]], np.float32)
LIVE = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], np.float32)


@pytest.fixture
def code_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    for registry in (OBJECTIVES, ADVANTAGES, LOSSES):
        monkeypatch.setattr(registry, "_items", dict(registry._items))
    return tmp_path / "own.py"


def test_every_algorithm_is_an_objective_in_a_file_of_its_own():
    for name, place in ALGORITHMS.items():
        module, _, cls = place.partition(":")
        assert module == f"argosy.rl.algorithms.{name}"
        assert OBJECTIVES[name].__name__ == cls
        assert issubclass(OBJECTIVES[name], Policy)


def test_algorithms_are_read_without_jax():
    modules = [file.stem for file in Path(algorithms.__file__).parent.glob("*.py") if file.stem in ALGORITHMS]
    assert len(modules) == len(ALGORITHMS)
    imports = "; ".join(f"import argosy.rl.algorithms.{name}" for name in modules)
    code = f"import sys; {imports}; print([name for name in ('jax', 'numpy', 'jaxtyping') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_every_file_of_an_algorithm_begins_with_its_equation_and_paper():
    for file in Path(algorithms.__file__).parent.glob("[!_]*.py"):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        assert "arXiv:" in text or "Williams" in text, file.name
        assert "\n\n    " in text, f"{file.name} has no equation"


def test_the_words_of_settings_are_names_of_algorithms():
    """What a reward is compared with has two names, which are one thing."""
    of = RolloutRewards(REWARDS, [1.0], LIVE, greedy=np.array([[0.5]], np.float32))
    assert set(ALIASES.values()) == set(ADVANTAGES)
    for word, name in ALIASES.items():
        both = [rollout_advantages(GRPO(advantages=algorithm), of).values for algorithm in (word, name)]
        np.testing.assert_array_equal(*both)
        assert GRPO(advantages=word).advantages == word
    values = {name: rollout_advantages(GRPO(advantages=name), of).values.tobytes() for name in ADVANTAGES}
    assert len(set(values.values())) >= len(values) - 1


def test_what_an_algorithm_compares_with_follows_from_its_parameters():
    assert [name for name in ADVANTAGES if GRPO(advantages=name).needs_greedy] == ["remax"]
    assert [name for name in ADVANTAGES if not GRPO(advantages=name).compares_groups] == ["reinforce_pp", "remax"]


def test_advantages_of_a_file(code_file):
    policy = GRPO(advantages="own.py:median")
    advantages = rollout_advantages(policy, RolloutRewards(REWARDS, [1.0], LIVE))
    np.testing.assert_allclose(advantages.values, np.array([[-1, -1, 0], [0, 0, 0], [4, 4, 4]], np.float32))
    assert policy.compares_groups


def test_a_loss_of_a_file_has_the_metrics_of_ratios(code_file):
    new, old = jnp.full((3, 3), -1.0), jnp.full((3, 3), -2.0)
    advantages = jnp.ones((3, 3))
    losses = token_losses(GRPO(loss="own.py:negative"), new, old, advantages, jnp.asarray(LIVE))
    np.testing.assert_allclose(losses.tokens, LIVE)
    assert float(losses.metrics["ratio/mean"].value()) == pytest.approx(np.e, rel=1e-6)


def test_an_objective_of_a_file_has_settings_of_its_own(code_file):
    words = ["objective=own.py:Median", "objective.sharpness=3", "objective.kl=0.5"]
    run = read_settings(Run, words_layer([*MODEL, *words])).value
    assert type(run.objective).__name__ == "Median"
    assert (run.objective.sharpness, run.objective.kl) == (3.0, 0.5)
    assert run.rollout is not None, "what follows from learning by rewards follows here too"


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("gone.py:f", UnknownName, "unknown comparison of rewards `gone.py:f`"),
        ("own.py:medain", UnknownName, "did you mean `own.py:median`"),
        ("wrong.py:f", BadInput, "NameError: name 'undefined' is not defined"),
    ],
)
def test_what_a_file_does_not_hold_is_said(code_file, name, kind, text):
    code_file.with_name("wrong.py").write_text("undefined\n")
    with pytest.raises(kind) as caught:
        ADVANTAGES[name]
    assert text in f"{caught.value}"


def test_names_that_nothing_has():
    for name in ("advantages", "loss"):
        with pytest.raises((UserError, ValueError), match="did you mean"):
            GRPO(**{name: {"advantages": "rlo", "loss": "cispoo"}[name]})


def test_a_number_is_no_objective(code_file):
    with pytest.raises(UserError) as caught:
        read_settings(Run, words_layer([*MODEL, "objective=own.py:number"]))
    assert "is no class of settings" in str(caught.value)


def test_the_registered_function_is_that_of_the_file():
    assert ADVANTAGES["grpo"] is grpo
