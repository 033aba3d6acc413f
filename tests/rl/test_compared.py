"""Every name of a policy compares rewards as the file of its algorithm does, and refuses settings that would mean nothing."""

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from argosy.rl.advantages.credit import RolloutRewards, rollout_advantages
from argosy.rl.advantages.gae import gae
from argosy.rl.advantages.totals import at_last, total
from argosy.rl.algorithms.cispo import CISPO
from argosy.rl.algorithms.dapo import DAPO
from argosy.rl.algorithms.dr_grpo import DrGRPO
from argosy.rl.algorithms.gdpo import gdpo
from argosy.rl.algorithms.gpg import GPG, gpg
from argosy.rl.algorithms.grpo import GRPO, grpo
from argosy.rl.algorithms.gspo import GSPO
from argosy.rl.algorithms.opo import OPO, opo
from argosy.rl.algorithms.ppo import PPO
from argosy.rl.algorithms.reinforce_pp import ReinforcePP, reinforce_pp, reinforce_pp_baseline
from argosy.rl.algorithms.remax import ReMax, remax
from argosy.rl.algorithms.rloo import RLOO, rloo
from argosy.rl.policy.settings import Policy
from argosy.run.settings.run import OBJECTIVES

GROUPS, EACH, LONGEST = 3, 4, 6
WEIGHTS = (1.0, 0.5)


def judgment() -> RolloutRewards:
    """Two rewards of three groups, the last one useless, one answer without any; answers of 1 to 6 tokens."""
    rng = np.random.default_rng(3)
    rewards = rng.normal(0, 1, (GROUPS, EACH, 2)).astype(np.float32)
    rewards[1, 2], rewards[2] = np.nan, 1.0
    live = (np.arange(LONGEST) < rng.integers(1, LONGEST + 1, (GROUPS * EACH, 1))).astype(np.float32)
    tokens = [rng.normal(0, 1, live.shape).astype(np.float32) for _ in range(2)]
    return RolloutRewards(rewards, WEIGHTS, live, rng.normal(0, 1, (GROUPS, 2)).astype(np.float32), 0.1 * tokens[0], tokens[1],
                    np.zeros(len(live), np.float32))  # fmt: skip


OF = judgment()
LIVE = jnp.asarray(OF.live)
SUMMED = total(jnp.asarray(OF.rewards), WEIGHTS)
LESS = SUMMED - jnp.sum(OF.penalty * LIVE, 1).reshape(SUMMED.shape)
PENALTY = OF.penalty * LIVE
GREEDY = total(jnp.asarray(OF.greedy)[:, None], WEIGHTS)
LENGTHS = jnp.sum(LIVE, 1).reshape(SUMMED.shape)
# By the registered name, what its paper compares.
EXPECTED = {
    "grpo": lambda: grpo(SUMMED),
    "dr_grpo": lambda: grpo(SUMMED, scale="none"),
    "dapo": lambda: grpo(SUMMED),
    "gspo": lambda: grpo(SUMMED),
    "cispo": lambda: grpo(SUMMED),
    "rloo": lambda: rloo(LESS),
    "reinforce_pp": lambda: reinforce_pp(SUMMED, LIVE, PENALTY),
    "remax": lambda: remax(SUMMED, GREEDY),
    "gpg": lambda: gpg(SUMMED),
    "opo": lambda: opo(SUMMED, LENGTHS),
    "ppo": lambda: gae(at_last(SUMMED.reshape(-1), LIVE) - PENALTY, jnp.asarray(OF.values), LIVE, jnp.zeros(len(LIVE)), lam=0.95),
}
# With parts exchanged.
OTHERS = {
    "over the batch": (GRPO(scale="batch"), lambda: grpo(SUMMED, scale="batch")),
    "each reward alone": (GRPO(normalize="each"), lambda: gdpo(jnp.asarray(OF.rewards), WEIGHTS)),
    "with a baseline": (ReinforcePP(advantages="group_batch"), lambda: reinforce_pp_baseline(LESS)),
}
POLICIES = [CISPO, DAPO, GPG, GRPO, GSPO, OPO, PPO, RLOO, DrGRPO, ReinforcePP, ReMax]


def check(policy: Policy, expected) -> None:
    penalized = policy.kl_in == "reward"
    result = rollout_advantages(policy, OF if penalized else OF._replace(penalty=None))
    values = jnp.where(LIVE > 0, jnp.broadcast_to(jnp.asarray(expected.values).reshape(len(LIVE), -1), LIVE.shape), 0.0)
    assert np.isfinite(result.values).all()
    np.testing.assert_allclose(result.values, values, rtol=1e-6, atol=1e-7)
    assert result.counted.tolist() == [i != EACH + 2 for i in range(len(LIVE))], "the answer without a reward counts nowhere"
    # Advantages of tokens compare with more than a group: every group teaches.
    teaches = np.asarray(expected.useful).reshape(-1) if hasattr(expected, "useful") else np.ones(GROUPS, bool)
    assert result.useful.tolist() == teaches.tolist()
    assert float(result.metrics["groups/useless"].value()) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_name_compares_as_its_algorithm(name: str):
    check(OBJECTIVES[name](), EXPECTED[name]())


@pytest.mark.parametrize("name", OTHERS)
def test_parts_can_be_exchanged(name: str):
    policy, expected = OTHERS[name]
    check(policy, expected())


def test_every_policy_is_compared_here():
    assert {type(OBJECTIVES[name]()) for name in EXPECTED} == set(POLICIES)
    assert {name for name in OBJECTIVES if issubclass(OBJECTIVES[name], Policy)} == set(EXPECTED)


@pytest.mark.parametrize(
    ("policy", "settings", "problem"),
    [
        (PPO, {"scale": "none"}, "scale = none does not apply: with a critic"),
        (PPO, {"advantages": "leave_one_out"}, "advantages = leave_one_out does not apply: with a critic"),
        (PPO, {"kl_estimator": "k2"}, "estimated by k1"),
        (GRPO, {"kl_estimator": "k2"}, "objective.kl is 0"),
        (RLOO, {"high": 0.3}, "no ratio to clip"),
        (GRPO, {"loss": "reinforce", "low": 0.1}, "no ratio to clip"),
        (GRPO, {"loss": "cispo"}, "bound the ratio itself"),
    ],
)
def test_settings_that_mean_nothing_are_refused(policy: type[Policy], settings: dict, problem: str):
    with pytest.raises(ValidationError, match=problem):
        policy(**settings)
