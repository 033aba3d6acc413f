"""Rollouts over a small model with a judge of the test's own: streams, groups, dynamic sampling, what is left out, positions."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
from laws.families import CASES, built

from argosy.core.errors import ArgosyError, BadInput
from argosy.data.encoding import Encoding
from argosy.data.order import Order
from argosy.data.rows.prompts import Prompts
from argosy.data.sources import SourceRecord
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.models.parts.stack import Unroll
from argosy.rl.algorithms.grpo import GRPO
from argosy.rl.algorithms.gspo import GSPO
from argosy.rl.algorithms.ppo import PPO
from argosy.rl.algorithms.remax import ReMax
from argosy.rl.policy.settings import Policy
from argosy.rl.rollouts.batches import RolloutBatches
from argosy.rl.rollouts.completions import Interrupted, sample_trajectories
from argosy.rl.rollouts.packing import PartShape
from argosy.rl.rollouts.records import PolicyTrainer, TrajectoryRecord
from argosy.rl.rollouts.settings import Rollout
from argosy.rl.rollouts.signals.rewards import reward_batches

CASE = CASES["llama-plain"].model_copy(update={"vocab": 258, "context": 64})
TOKENS = 5


class Found(NamedTuple):
    values: np.ndarray
    failed: np.ndarray
    counts: dict[str, dict[str, int]]


class OwnJudge:
    """One reward by a function of prompt, completion and column."""

    names, weights = ("own",), (2.0,)

    def __init__(self, score: Callable[[Any, Any, Any], float]):
        self.score, self.asked = score, []

    def __call__(self, prompts, completions, columns) -> Found:
        self.asked.append((list(prompts), list(completions), dict(columns)))
        values = [self.score(p, c, a) for p, c, a in zip(prompts, completions, columns["answer"], strict=True)]
        return Found(np.asarray(values, np.float32)[:, None], np.zeros(len(values), bool), {})

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM(CASE, built(CASE, Unroll()), load_tokenizer("byte"))


def prompts(lm: LM, count: int = 6, longest: int = 0) -> Prompts:
    records = [SourceRecord(where=f"line {i}", prompt="ab" * (i % 2) + f"{i}=" + "x" * (longest if i == 1 else 0), columns={"answer":
    str(i)})
               for i in range(count)]  # fmt: skip
    return Prompts(records, Encoding(lm.tokenizer), Order(count, None), {"source": "test"})


def rollouts(lm: LM, judge: Any, policy: Policy | None = None, held_out: Prompts | None = None, said: list[str] | None = None,
             kept: list[TrajectoryRecord] | None = None, asked: Prompts | None = None, **how: Any) -> RolloutBatches:  # fmt: skip
    rollout = Rollout(**{"completions": 2, "tokens": TOKENS, **how})
    shape = PartShape(2, 24, TOKENS)
    say = (lambda text: None) if said is None else said.append
    made = reward_batches(asked or prompts(lm), held_out, policy or GRPO(), rollout, 8, shape, judge, 7, say)
    zeros = lambda state, rows: np.zeros(rows["places"].shape, np.float32)  # noqa: E731
    values = lambda state, rows: (zeros(state, rows), np.zeros(len(rows["ends"]), np.float32))  # noqa: E731
    made.signal.trainer = PolicyTrainer(lambda state: state, lambda weights: lm, zeros, zeros, values)
    if kept is not None:
        made.signal.keep = kept.extend
    return made


def by_length(prompt: str, completion: str, answer: str) -> float:
    return len(completion) + ord(completion[:1] or " ") / 256


@pytest.mark.slow
def test_an_answer_keeps_its_end_and_its_log_probabilities(lm: LM):
    one = prompts(lm)(0, 1)
    plain = LM(CASE, lm.module, lm.tokenizer)
    # Whatever it says first becomes an end.
    first = sample_trajectories(plain, one, TOKENS, Sampling(temperature=0.0), (1,))[0].tokens[0]
    plain.generation = {"eos_token_id": [first]}
    (ended,) = sample_trajectories(plain, one, TOKENS, Sampling(temperature=0.0), (1,))
    assert (ended.tokens, ended.live, ended.ended, ended.text) == ([first], [True], True, "")
    (cut,) = sample_trajectories(lm, one, TOKENS, Sampling(temperature=1.0), (1,))
    assert (len(cut.tokens), cut.ended) == (TOKENS, False)
    ids = [*one[0].tokens, *cut.tokens]
    scores = lm.score([ids])[0][len(one[0].tokens) - 1 :]
    assert np.allclose(cut.logprobs, scores, atol=1e-5)


def test_every_rollout_and_every_round_has_random_streams_of_its_own(lm: LM):
    """The same prompts with the same weights: other answers in the next rollout, the same ones again from the same position."""
    kept: list[TrajectoryRecord] = []
    made = rollouts(lm, OwnJudge(by_length), kept=kept, asked=prompts(lm, 4))
    for _ in range(2):
        made.advance(None)
        next(made)
    first, second = ([one.completion for one in kept if one.rollout == number] for number in (1, 2))
    assert [one.prompt for one in kept[:8]] == [one.prompt for one in kept[8:]]
    assert sum(a == b for a, b in zip(first, second, strict=True)) <= 1
    again: list[TrajectoryRecord] = []
    other = rollouts(lm, OwnJudge(by_length), kept=again, asked=prompts(lm, 4))
    other.seek({"place": 4, "rollout": 1, "tokens": 0, "waiting": []})
    other.advance(None)
    assert [one.completion for one in again] == second
    rounds: list[TrajectoryRecord] = []
    flat = rollouts(lm, OwnJudge(lambda *_: 1.0), kept=rounds, asked=prompts(lm, 4), resample=1)
    judge = flat.signal.judge
    flat.advance(None)
    assert judge.asked[0][0] == judge.asked[1][0], "the same prompts in both rounds"
    assert sum(a == b for a, b in zip(judge.asked[0][1], judge.asked[1][1], strict=True)) <= 1


def test_rewards_that_teach_nothing_are_told_once(lm: LM):
    for score, lines in ((lambda *_: 1.0, 1), (by_length, 0)):
        said: list[str] = []
        made = rollouts(lm, OwnJudge(score), said=said)
        for _ in range(2):
            made.advance(None)
            next(made)
        told = [line for line in said if "teach nothing" in line]
        assert len(told) == lines, said
        assert all("of rollout 1 " in line for line in told)


def test_groups_are_answers_to_one_prompt_and_columns_belong_to_them(lm: LM):
    judge, kept = OwnJudge(by_length), []
    made = rollouts(lm, judge, kept=kept)
    made.advance(None)
    ((asked, said, columns),) = judge.asked
    assert asked == ["0=", "0=", "ab1=", "ab1=", "2=", "2=", "ab3=", "ab3="]
    given = {"finish_reasons": ["length"] * 8, "thinking_prompts": [False] * 8}
    assert columns == {"answer": ["0", "0", "1", "1", "2", "2", "3", "3"]} | given
    experience = next(made)
    rewards = np.array([2 * by_length("", one, "") for one in said]).reshape(-1, 2)
    advantages = np.array([one.advantage for one in kept]).reshape(-1, 2)
    assert np.allclose(advantages, np.sign(rewards - rewards.mean(1, keepdims=True)) / np.sqrt(2), atol=1e-3)
    assert experience.numbers["reward"] == pytest.approx(rewards.mean(), rel=1e-5)
    live = sum(part["live"].sum() for part in experience.parts)
    assert live == sum(one.tokens for one in kept)
    assert {one.rewards["own"] for one in kept} == set(np.float32(rewards.ravel() / 2).tolist())


def test_dynamic_sampling_replaces_groups_that_teach_nothing(lm: LM):
    """Prompts 0 and 1 give equal rewards: two others take their place, and those that taught are not asked again."""
    number = count()
    judge, kept = OwnJudge(lambda p, c, answer: 1.0 if answer in "01" else next(number)), []
    made = rollouts(lm, judge, kept=kept, resample=3)
    made.advance(None)
    assert [sorted(set(columns["answer"])) for _, _, columns in judge.asked] == [["0", "1", "2", "3"], ["4", "5"]]
    assert [one.prompt for one in kept] == ["2=", "2=", "ab3=", "ab3=", "4=", "4=", "ab5=", "ab5="]
    assert next(made).numbers["rollout_rounds"] == 2
    some = rollouts(lm, OwnJudge(lambda p, c, a: 1.0 if a != "2" else next(number)), resample=1)
    some.advance(None)
    assert next(some).numbers["groups"] == 1, "an update from the group that teaches"


def test_prompts_without_room_are_passed_over_and_told(lm: LM):
    said: list[str] = []
    judge = OwnJudge(by_length)
    made = rollouts(lm, judge, said=said, asked=prompts(lm, longest=30))
    made.advance(None)
    assert "ab1" not in "".join(judge.asked[0][0])
    (words,) = [line for line in said if "passed over" in line]
    assert "line 1" in words
    alone = Prompts([SourceRecord(where="line 9", prompt="x" * 30)], Encoding(lm.tokenizer), Order(1, None), {})
    with pytest.raises(BadInput, match="no prompt to learn from has at most 19 tokens"):
        rollouts(lm, judge, asked=alone).advance(None)


def test_answers_that_were_cut_can_be_left_out_or_punished(lm: LM):
    judge, heard = OwnJudge(by_length), list[str]()
    left = rollouts(lm, judge, said=heard, keep_cut=False)
    left.advance(None)
    assert sum(part["live"].sum() for part in next(left).parts) == 0
    (words,) = [line for line in heard if "learned from" in line]
    assert "no completion of rollout 1 is learned from: all were cut, and rollout.keep_cut=false" in words
    punished = rollouts(lm, OwnJudge(lambda *_: 1.0), overlong=2, held_out=None)
    punished.advance(None)
    numbers = next(punished).numbers
    assert (numbers["rewards/overlong"], numbers["reward"]) == (-1, 1)


def test_a_share_of_cut_completions_above_one_half_is_said_once(lm: LM):
    for cut, lines in ((True, 1), (False, 0)):
        heard = list[str]()
        made = rollouts(lm, OwnJudge(by_length), said=heard)
        found = made.signal.sampler.sampled
        made.signal.sampler.sampled = lambda *a, found=found, cut=cut: [replace(one, ended=not cut) for one in found(*a)]
        for _ in range(2):
            made.advance(None)
            assert next(made).numbers["answers/cut"] == float(cut)
        assert len([line for line in heard if "of the completions of rollout 1 were cut at rollout.tokens" in line]) == lines


def test_a_completion_whose_reward_fails_is_left_out_and_counted(lm: LM):
    """Beside a reward that has a number for it: taken for 0, a failure would punish the completion."""

    class Both(OwnJudge):
        names, weights = ("own", "other"), (1.0, 1.0)

        def __call__(self, prompts, completions, columns) -> Found:
            found = super().__call__(prompts, completions, columns)
            row = np.arange(len(completions))
            other = np.where(row < 2, np.nan, 1.0)[:, None].astype(np.float32)
            return Found(np.concatenate([found.values, other], 1), row == 0, {"other": {"timed out": 1}})

    kept: list[TrajectoryRecord] = []
    made = rollouts(lm, Both(by_length), kept=kept)
    made.advance(None)
    numbers = made.queue[0].numbers
    assert (numbers["rewards/failed"], numbers["rewards/other/timed_out"], numbers["answers/left_out"]) == (1, 1, 1 / 8)
    assert kept[0].rewards == {"own": None, "other": None}
    assert kept[1].rewards["own"] is not None, "None has no opinion: the other reward decides"
    assert kept[1].rewards["other"] is None


@pytest.mark.parametrize(("reward", "left_out"), [(1e30, 1), (-1e16, 1), (1e14, 0)])
def test_a_reward_too_large_to_square_is_left_out_with_a_word(lm: LM, reward: float, left_out: int):
    heard, first = list[str](), count()
    made = rollouts(lm, OwnJudge(lambda p, c, a: reward if next(first) == 0 else by_length(p, c, a)), said=heard)
    made.advance(None)
    assert made.queue[0].numbers["rewards/failed"] == left_out
    assert len([line for line in heard if "too large to compare in float32" in line]) == left_out


def test_an_interrupted_rollout_leaves_the_position_where_it_was(lm: LM):
    made = rollouts(lm, OwnJudge(by_length))
    made.signal.interrupted = lambda: True
    made.advance(None)
    with pytest.raises(StopIteration):
        next(made)
    assert made.position() == {"place": 0, "rollout": 0, "tokens": 0, "waiting": [], "ahead": []}
    with pytest.raises(Interrupted):
        sample_trajectories(lm, prompts(lm)(0, 1), TOKENS, Sampling(), (1,), lambda: True)


def test_updates_that_are_left_travel_with_the_position(lm: LM):
    made = rollouts(lm, OwnJudge(by_length), epochs=2, minibatches=2)
    made.advance(None)
    handed = [next(made)]
    position, arrays = made.position(), made.arrays()
    rest = [next(made) for _ in range(3)]
    other = rollouts(lm, OwnJudge(by_length), epochs=2, minibatches=2)
    other.restore({"position": position, "fingerprint": made.fingerprint}, arrays)
    other.advance(None)
    for mine, theirs in zip(rest, [next(other) for _ in range(3)], strict=True):
        assert mine.numbers == theirs.numbers
        for a, b in zip(mine.parts, theirs.parts, strict=True):
            assert all(np.array_equal(a[name], b[name], equal_nan=True) for name in a if a[name].dtype.kind == "f")
            assert np.array_equal(a["tokens"], b["tokens"])
    assert [one.numbers["tokens"] for one in (*handed, *rest)] == sorted(one.numbers["tokens"] for one in (*handed, *rest))


def ahead(lm: LM, depth: int, used: list[Any], **how: Any) -> RolloutBatches:
    """Rollouts whose weights are the state itself; notes those that each was sampled with."""
    made = rollouts(lm, OwnJudge(by_length), devices=1, ahead=depth, **how)
    made.signal.trainer = replace(made.trainer, weights=lambda state: state, engine=lambda weights: used.append(weights) or lm)
    return made


@pytest.mark.parametrize("depth", [1, 3])
def test_weights_are_as_old_as_the_settings_say(lm: LM, depth: int):
    """Rollout n is sampled with the weights of n - depth rollouts, whatever takes how long; and it is the n-th of a run in turns."""
    used: list[int] = []
    made, found = ahead(lm, depth, used), list[Any]()
    for version in range(6):
        made.advance(version)
        found.append(next(made))
        assert found[-1].numbers["rollout_age"] == min(version, depth)
    made.close()
    assert used[:6] == [max(0, version - depth) for version in range(6)]
    plain = rollouts(lm, OwnJudge(by_length))
    for version, mine in enumerate(found):
        plain.advance(version)
        theirs = next(plain)
        assert np.array_equal(mine.parts[0]["tokens"], theirs.parts[0]["tokens"]), "the weights are equal in this test"
        assert theirs.numbers["rollout_age"] == 0


def test_rollouts_that_were_sampled_ahead_travel_with_the_position(lm: LM):
    """They are not sampled again, since their weights are gone."""
    used: list[int] = []
    made, again, found = ahead(lm, 2, used), list[int](), list[Any]()
    made.advance(0)
    next(made)
    position, arrays = json.loads(json.dumps(made.position())), made.arrays()
    for version in (1, 2, 3):
        made.advance(version)
        found.append(next(made))
    made.close()
    other = ahead(lm, 2, again)
    other.restore({"position": position, "fingerprint": made.fingerprint}, arrays)
    for version, mine in enumerate(found, 1):
        other.advance(version)
        theirs = next(other)
        assert {k: v for k, v in mine.numbers.items() if not k.endswith("_s")} == {
            k: v for k, v in theirs.numbers.items() if not k.endswith("_s")
        }
        assert all(np.array_equal(a[name], b[name], equal_nan=True)
                   for a, b in zip(mine.parts, theirs.parts, strict=True) for name in a if a[name].dtype.kind == "f")  # fmt: skip
    other.close()
    assert again[:2] == [1, 2], "of the rollouts after the two that were kept"


def test_what_goes_wrong_ahead_is_raised_when_its_turn_comes(lm: LM):
    made = ahead(lm, 1, [])
    scores = iter([1.0] * 8 + [float("nan")] * 99)
    made.signal.judge.score = lambda *_: next(scores)
    made.advance(0)
    next(made)
    assert made.position()["ahead"] == []
    assert made.position()["place"] == 4
    with pytest.raises(ArgosyError, match="no answer of rollout 2 has a reward"):
        made.advance(1)
    made.close()


def test_the_greedy_answer_is_the_baseline_of_remax(lm: LM):
    judge = OwnJudge(by_length)
    made = rollouts(lm, judge, ReMax(), completions=1)
    kept: list[TrajectoryRecord] = []
    made.signal.keep = kept.extend
    made.advance(None)
    sampled_, greedy = (said for _, said, _ in judge.asked)
    expected = [2 * (by_length("", a, "") - by_length("", b, "")) for a, b in zip(sampled_, greedy, strict=True)]
    assert [one.advantage for one in kept] == pytest.approx(expected, rel=1e-4)


def test_held_out_prompts_are_answered_greedily_and_evaluated(lm: LM):
    judge = OwnJudge(lambda p, c, a: float(a))
    made = rollouts(lm, judge, held_out=prompts(lm, 4))
    first, second = made.evaluated(None, 3), made.evaluated(None, 3)
    assert first == second
    assert first["eval_reward"] == pytest.approx(2 * (0 + 1 + 2) / 3)
    assert first["eval_prompts"] == 3


def test_held_out_prompts_without_room_are_said_and_missing_rewards_are_no_zeros(lm: LM):
    said: list[str] = []
    judge = OwnJudge(lambda p, c, a: float("nan") if a == "0" else 3.0)
    made = rollouts(lm, judge, held_out=prompts(lm, 4, longest=30), said=said)
    found = made.evaluated(None, 4)
    assert len(said) == 1
    assert "no room for an answer" in said[0]
    assert (found["eval_prompts"], found["eval_reward"], found["eval_rewards/own"]) == (3, 6.0, 3.0)
    assert found["eval_rewards/own/missing"] == pytest.approx(1 / 3)
    made = rollouts(lm, OwnJudge(lambda *_: float("nan")), held_out=prompts(lm, 4))
    found = made.evaluated(None, 4)
    assert "eval_reward" not in found
    assert found["eval_rewards/own/missing"] == 1


def test_an_answer_without_a_reward_is_missing_beside_a_punishment_too(lm: LM):
    kept: list[TrajectoryRecord] = []
    made = rollouts(lm, OwnJudge(lambda p, c, a: float("nan") if a == "0" else 3.0), kept=kept, overlong=2)
    made.advance(None)
    missing = [one for one in kept if one.prompt == "0="]
    assert len(missing) == 2
    assert [one.rewards for one in missing] == [{"own": None, "overlong": None}] * 2
    assert all(one.rewards["overlong"] is not None for one in kept if one.prompt != "0=")
    assert made.queue[0].numbers["answers/left_out"] == pytest.approx(2 / 8)


def test_another_position_ends_what_is_sampled_ahead(lm: LM):
    made = rollouts(lm, OwnJudge(by_length), devices=1, ahead=1)
    made.begin(made.trainer, lambda _: None, lambda _: None, lambda: False)
    made.advance(None)
    made.ahead.settled()
    before = made.ahead._thread
    made.seek({"place": 0, "rollout": 0, "tokens": 0, "waiting": []})
    assert not before.is_alive()
    made.advance(None)
    assert next(made).numbers["rollout"] == 1, "and sampling goes on"
    made.close()


def test_a_signal_ends_an_evaluation_but_no_rollout_that_is_sampled_ahead(lm: LM):
    made = rollouts(lm, OwnJudge(by_length), held_out=prompts(lm, 2), devices=1, ahead=1)
    made.begin(made.trainer, lambda _: None, lambda _: None, lambda: True)
    made.advance(None)
    assert len(made.queue) == 1
    assert made.evaluated(None, 2) is None
    assert len(made.ahead.settled()) == 1
    made.close()


def test_the_engine_holds_no_cache_between_rollouts(lm: LM):
    made = rollouts(lm, OwnJudge(by_length), held_out=prompts(lm, 2))
    made.advance(None)
    assert lm._held._engine.runner._caches is None
    next(made)
    before = lm._held._engine.stats.compilations
    made.advance(None)
    assert lm._held._engine.stats.compilations == before
    made.evaluated(None, 2)
    assert lm._held._engine.runner._caches is None


def test_a_run_ends_with_the_epochs_of_its_prompts(lm: LM):
    asked = prompts(lm, 6)
    asked.most = 9
    made = rollouts(lm, OwnJudge(by_length), asked=asked, epochs=2)
    handed = []
    for _ in range(5):
        made.advance(None)
        handed += [one] if (one := next(made, None)) is not None else []
    assert len(handed) == 4 == made.summary().ends_after, "two rollouts of four prompts, two updates each; one prompt is left"
    assert "Left out: the last 1 prompt, too few for a batch (data.epochs)." in made.summary().text
    assert made.summary(3).tail_rows == 0
    assert made.summary(100).epochs == pytest.approx(8 / 6)


def test_no_reward_at_all_is_an_error(lm: LM):
    with pytest.raises(ArgosyError, match="no answer of rollout 1 has a reward"):
        rollouts(lm, OwnJudge(lambda *_: float("nan"))).advance(None)


@pytest.mark.parametrize(
    ("policy", "how", "said"),
    [
        (GRPO(), {"completions": 3}, "groups of 3"),
        (GRPO(), {"completions": 1}, "compares the answers to one prompt"),
        (PPO(), {"completions": 1, "resample": 1}, "teach too"),
        (GSPO(loss="reinforce"), {"epochs": 2}, "one update a rollout"),
        (GRPO(kl=0.1, kl_in="reward", normalize="each"), {}, "no reward to compare"),
        (GRPO(), {"tokens": 24}, "no room for a prompt"),
    ],
)
def test_settings_that_do_not_fit_each_other(lm: LM, policy: Policy, how: dict[str, Any], said: str):
    shape = PartShape(2, 24, how.get("tokens", TOKENS))
    rollout = Rollout(**{"completions": 2, "tokens": TOKENS, **how})
    with pytest.raises(BadInput, match=said):
        reward_batches(prompts(lm), None, policy, rollout, 8, shape, OwnJudge(by_length), 7)
