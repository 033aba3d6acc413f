"""Tokens of an environment in an update: whatever their numbers are, nothing changes and nothing becomes NaN."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from helpers import default
from laws.families import noisy_model
from rl.talking import CASE, language_model, prompts, table
from rl.test_rollouts import Found

from argosy.core.errors import BadInput
from argosy.data.rows.prompts import Prompt, Prompts
from argosy.infer.lm import LM
from argosy.models.parts.stack import Unroll
from argosy.rl.algorithms.grpo import GRPO
from argosy.rl.policy.settings import Policy
from argosy.rl.rollouts.batches import RolloutBatches
from argosy.rl.rollouts.completions import Episode, Trajectory
from argosy.rl.rollouts.episodes.turn_rewards import environment_rewards, episode_numbers, failed_episodes
from argosy.rl.rollouts.packing import PartShape, pack_trajectories, per_token
from argosy.rl.rollouts.records import NoRewards, PolicyTrainer, TrajectoryRecord
from argosy.rl.rollouts.sampled import restored_rollouts, stored_rollouts
from argosy.rl.rollouts.settings import Rollout
from argosy.rl.rollouts.signals.rewards import reward_batches
from argosy.run.settings.run import OBJECTIVES

NAMES = [name for name in OBJECTIVES if issubclass(OBJECTIVES[name], Policy)]
LONGEST = 20
CODE = """
class Own:
    def reset(self, prompt, seed):
        self.left, self.fails = 3, prompt == "4:"
        return f"<{seed % 10}>"
    def step(self, said):
        self.left -= 1
        if self.fails: raise RuntimeError("no")
        return Turn("more", float(len(said.encode()) + said.count("a")), self.left == 0, counts={"own/steps": 1})
"""


@pytest.fixture(scope="module")
def lm() -> LM:
    return language_model()


class Judge:
    """Keeps what it is asked, and rewards nothing."""

    names, weights = ("own",), (1.0,)

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, prompts, completions, columns) -> Found:
        self.asked.append(list(completions))
        return Found(np.full((len(completions), 1), 10, np.float32), np.zeros(len(completions), bool), {})

    def close(self) -> None: ...


def rollouts(lm: LM, tmp_path, policy: Policy, judge: Any, data: Prompts, n: int = 2, code: str = CODE, **more: Any) -> RolloutBatches:
    rollout = Rollout(completions=n, tokens=LONGEST, **more)
    batches = reward_batches(data, prompts(lm, ["0:", "1:"]), policy, rollout, 8, PartShape(4, 40, LONGEST), judge, 7,
                    table=table(tmp_path, code, data, tokens=2))  # fmt: skip
    rng = np.random.default_rng(1)
    # What the models say of the environment's tokens is garbage here.
    garbage = lambda state, rows: rng.normal(-2, 1, rows["places"].shape).astype(np.float32)  # noqa: E731
    values = lambda state, rows: (garbage(state, rows), np.zeros(len(rows["ends"]), np.float32))  # noqa: E731
    batches.signal.trainer = PolicyTrainer(lambda state: state, lambda weights: lm, garbage, garbage, values)
    return batches


@pytest.mark.slow
@pytest.mark.parametrize("name", default("grpo", "reinforce_pp", of=NAMES))
def test_no_number_of_an_environment_becomes_part_of_an_update(name: str, lm: LM, tmp_path):
    """Of every policy: advantages and returns are finite where the policy spoke, 0 elsewhere; only log-probabilities may be NaN."""
    policy = OBJECTIVES[name]()
    alone = policy.advantages in ("batch", "greedy")
    batches = rollouts(lm, tmp_path, policy, NoRewards(), prompts(lm, ["0:", "1:", "2:", "3:"]), n=1 if alone else 2)
    try:
        batches.advance(None)
        (experience,) = batches.queue
    finally:
        batches.close()
    assert all(np.isfinite(value) for value in experience.numbers.values()), experience.numbers
    assert experience.numbers["turns"] == 3
    assert experience.numbers["answers/tokens"] == pytest.approx(6, abs=1)
    for part in experience.parts:
        live = part["live"] > 0
        assert live.any()
        assert (part["advantages"][~live] == 0).all()
        assert np.isfinite(part["advantages"]).all()
        assert np.isfinite(part["sampler"][live]).all()
        assert np.isnan(part["sampler"][~live]).any(), "of the environment's tokens it is not known"
        if "returns" in part:
            assert np.isfinite(part["returns"]).all()
    again = batches.signal.policy
    loss, gradient = loss_and_gradient(again, experience.parts)
    clean = [{k: np.where(part["live"] > 0, a, 0).astype(np.float32) if k in ("sampler", "values", "returns") else a
              for k, a in part.items()} for part in experience.parts]  # fmt: skip
    other, same = loss_and_gradient(again, clean)
    assert np.isfinite(loss)
    assert loss == other
    for address in gradient:
        assert np.isfinite(gradient[address]).all(), address
        assert np.array_equal(gradient[address], same[address]), address


def loss_and_gradient(policy: Policy, parts: Any) -> tuple[float, dict[str, Any]]:
    """The loss of the first part, and its gradient."""
    import jax.numpy as jnp

    from argosy.models.parts.weight import put, split
    from argosy.rl.policy.critic import attach_critic
    from argosy.train.state import split_trained
    from argosy.train.step import model_for

    model = noisy_model(CASE, Unroll())
    if policy.critic is not None:
        attach_critic(model, CASE, Unroll())
        rng = np.random.default_rng(9)
        put(model.critic, {a: jnp.asarray(rng.normal(0, 0.3, s.shape), jnp.float32) for a, s in split(model.critic)[1].items()})
    graph, params, rest = split_trained(model)
    batch = {name: jnp.asarray(parts[0][name]) for name in policy.reads()}
    loss = lambda p: policy({"model": model_for(graph, "float32", p, rest)}, batch, jax.random.key(0)).loss.total  # noqa: E731
    value, gradients = jax.value_and_grad(loss)(params)
    return float(value), {a: np.asarray(leaf) for a, leaf in gradients.items()}


@pytest.mark.slow
def test_an_environments_reward_is_one_of_several_and_a_failed_answer_has_none(lm: LM, tmp_path):
    judge, records = Judge(), []
    batches = rollouts(lm, tmp_path, OBJECTIVES["grpo"](), judge, prompts(lm, ["1:", "2:", "3:", "4:"]))
    batches.signal.keep = records.extend
    try:
        batches.advance(None)
        evaluated = batches.evaluated(None, 2)
    finally:
        batches.close()
    numbers = batches.queue[0].numbers
    assert batches.signal.sampler.names == ["environment", "own"]
    rewards = [record.rewards for record in records]
    assert [record["own"] for record in rewards] == [10] * 6 + [None] * 2
    assert [record["environment"] for record in rewards[6:]] == [None, None]
    assert all(record["environment"] >= 3 for record in rewards[:6])
    assert numbers["reward"] == pytest.approx(np.mean([10 + record["environment"] for record in rewards[:6]]))
    assert (numbers["environment/raised"], numbers["own/steps"]) == (2, 18)
    assert numbers["rewards/missing"] == 0.25
    completion = judge.asked[0][0]
    assert completion == records[0].completion == "".join(turn["content"] for turn in records[0].turns)
    assert completion.startswith("<")
    assert evaluated["eval_turns"] == 3
    assert evaluated["eval_rewards/own"] == 10


@pytest.mark.parametrize("by", ["to_go", "mixed"])
def test_tokens_of_an_update_have_the_advantage_of_their_turn(by: str, lm: LM, tmp_path):
    """Through packing, against what is kept of the answers. Each turn has two tokens, and the environment speaks between them."""
    records, code = (
        list[TrajectoryRecord](),
        CODE.replace('float(len(said.encode()) + said.count("a"))', "float(sum(said.encode()) % 7)"),
    )
    data = prompts(lm, [f"{i}:" for i in range(5, 9)])
    batches = rollouts(lm, tmp_path, GRPO(credit={"by": by}, scale="none"), NoRewards(), data, minibatches=2, code=code)
    batches.signal.keep = records.extend
    try:
        batches.advance(None)
    finally:
        batches.close()
    token_advantages = []
    parts = [part for update in batches.queue for part in update.parts]
    for live, advantages in (both for part in parts for both in zip(part["live"], part["advantages"])):
        if live.any():
            pairs = advantages[live > 0].reshape(3, 2)
            assert (pairs[:, 0] == pairs[:, 1]).all()
            assert (advantages[live == 0] == 0).all()
            token_advantages.append(pairs[:, 0].tolist())
    turn_advantages = [[turn["advantage"] for turn in record.turns if "advantage" in turn] for record in records]
    np.testing.assert_allclose(sorted(token_advantages), sorted(turn_advantages), rtol=1e-6)
    assert sum(len(set(advantages)) > 1 for advantages in turn_advantages) >= 4, "turns of one answer have advantages of their own"
    assert [advantages.advantage for advantages in records] == pytest.approx([np.mean(advantages) for advantages in turn_advantages])
    rewards = np.array([[turn["reward"] for turn in record.turns if "reward" in turn] for record in records]).reshape(4, 2, 3)
    numbers = batches.queue[0].numbers
    assert numbers["turns/reward_first"] == pytest.approx(rewards[..., 0].mean())
    assert numbers["turns/reward_last"] == pytest.approx(rewards[..., 2].mean())
    returns = rewards[..., ::-1].cumsum(-1)[..., ::-1]
    if by == "to_go":
        better = np.sign(returns[:, 0] - returns[:, 1])
        assert np.sign(np.array(turn_advantages).reshape(4, 2, 3)[:, 0]).tolist() == better.tolist()


def test_turns_cannot_be_credited_where_nothing_rewards_them(lm: LM, tmp_path):
    data = prompts(lm, ["1:", "2:"])
    rest = Rollout(completions=2, tokens=LONGEST), 4, PartShape(4, 40, LONGEST), Judge(), 7
    with pytest.raises(BadInput, match=r"credit.by=to_go credits turns, and an answer has one"):
        reward_batches(data, None, GRPO(credit={"by": "to_go"}), *rest)
    setup = table(tmp_path, CODE, data)
    try:
        with pytest.raises(BadInput, match=r"credit.by=mixed needs rewards of turns, and the environment `.*:Own` gives none"):
            reward_batches(data, None, GRPO(credit={"by": "mixed"}), *rest, table=dataclasses.replace(setup, gives=False))
    finally:
        setup.close()


def test_an_environment_that_never_rewards_a_turn_is_said(lm: LM, tmp_path):
    """Where functions reward the answer."""
    silent = CODE.replace('float(len(said.encode()) + said.count("a"))', "None")
    data, messages = prompts(lm, ["1:", "2:", "3:", "5:"]), list[str]()
    batches = rollouts(lm, tmp_path, GRPO(credit={"by": "to_go"}), Judge(), data, code=silent)
    batches.signal.say = messages.append
    try:
        batches.signal.sampler(lm, 0)
        batches.signal.sampler(lm, 0)
    finally:
        batches.close()
    assert sum("gave no turn of a rollout a reward" in message for message in messages) == 1


def test_rollouts_that_were_sampled_ahead_come_back_with_their_turns(lm: LM, tmp_path):
    """Through JSON and arrays, as in a checkpoint; the prompt ends with what the environment said first."""
    batches = rollouts(lm, tmp_path, OBJECTIVES["grpo"](), NoRewards(), data := prompts(lm, ["1:", "2:", "3:", "4:"]))
    try:
        sampled = batches.signal.sampler(lm, 0)
    finally:
        batches.close()
    arrays, metadata = stored_rollouts([sampled])
    (again,) = restored_rollouts(arrays, json.loads(json.dumps(metadata)), data)
    for mine, theirs in zip(sampled.trajectories.answers, again.trajectories.answers, strict=True):
        assert (mine.prompt, mine.tokens, mine.live, mine.said) == (theirs.prompt, theirs.tokens, theirs.live, theirs.said)
        for name in ("turns", "reward", "rewards", "starts", "said", "counts", "turn_count", "why", "failure"):
            assert getattr(mine.played, name) == getattr(theirs.played, name), name
    assert sampled.trajectories.answers[0].prompt.tokens != data(0, 1)[0].tokens


def test_the_greedy_answer_of_remax_is_played_too(lm: LM, tmp_path):
    judge, records = Judge(), list[TrajectoryRecord]()
    batches = rollouts(lm, tmp_path, OBJECTIVES["remax"](), judge, prompts(lm, [f"{i}:" for i in range(5, 13)]), n=1)
    batches.signal.keep = records.extend
    try:
        batches.advance(None)
    finally:
        batches.close()
    sampled, greedy = judge.asked
    assert [trajectory[:3] for trajectory in sampled] == [trajectory[:3] for trajectory in greedy], "in environments of the same seed"
    assert sampled != greedy


def test_numbers_of_answers():
    def trajectory_of(tokens: int, **kwargs: Any) -> Trajectory:
        return Trajectory(Prompt("a", [1], {}, ""), [1] * tokens, [True] * tokens, [0.0] * tokens, True, "", Episode(**kwargs))

    some = [trajectory_of(3, reward=1.5, rewards=[0.5, 1.0], turn_count=2, why="done", counts={"tools/calls": 2.0}),
            trajectory_of(0, failure=("timed out", "late"), why="failed"),
            trajectory_of(2, turn_count=1, why="room", observed=4, cut=1, counts={"tools/calls": 1.0})]  # fmt: skip
    numbers = episode_numbers(some)
    assert np.array_equal(environment_rewards(some), np.array([[1.5], [np.nan], [np.nan]], np.float32), equal_nan=True)
    assert failed_episodes(some).tolist() == [False, True, False]
    assert numbers == pytest.approx({
        "turns": 1, "turns/max": 2, "observations/tokens": 4 / 3, "observations/cut": 1, "environment/room": 1 / 3,
        "environment/turns": 0, "environment/timed_out": 1, "tools/calls": 3, "turns/reward_first": 0.5, "turns/reward_last": 1,
    })  # fmt: skip
    (part,) = pack_trajectories(some, [0, 1, 2], PartShape(2, 12, 4))
    assert part.filled({"live": per_token(some, 4, "live")})["live"].sum() == 5, "an answer without tokens is no trouble"
