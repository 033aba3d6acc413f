"""Rollouts over a small model with a judge of the test's own: streams, groups, dynamic sampling, what is left out, positions."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
from laws.families import CASES, noisy_model

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
    return LM(CASE, noisy_model(CASE, Unroll()), load_tokenizer("byte"))


def prompts(lm: LM, count: int = 6, longest: int = 0) -> Prompts:
    records = [SourceRecord(where=f"line {i}", prompt="ab" * (i % 2) + f"{i}=" + "x" * (longest if i == 1 else 0), columns={"answer":
    str(i)})
               for i in range(count)]  # fmt: skip
    return Prompts(records, Encoding(lm.tokenizer), Order(count, None), {"source": "test"})


def rollouts(lm: LM, judge: Any, policy: Policy | None = None, held_out: Prompts | None = None, lines: list[str] | None = None,
             records: list[TrajectoryRecord] | None = None, data: Prompts | None = None, **more: Any) -> RolloutBatches:  # fmt: skip
    rollout = Rollout(**{"completions": 2, "tokens": TOKENS, **more})
    shape = PartShape(2, 24, TOKENS)
    say = (lambda text: None) if lines is None else lines.append
    batches = reward_batches(data or prompts(lm), held_out, policy or GRPO(), rollout, 8, shape, judge, 7, say)
    zeros = lambda state, rows: np.zeros(rows["places"].shape, np.float32)  # noqa: E731
    values = lambda state, rows: (zeros(state, rows), np.zeros(len(rows["ends"]), np.float32))  # noqa: E731
    batches.signal.trainer = PolicyTrainer(lambda state: state, lambda weights: lm, zeros, zeros, values)
    if records is not None:
        batches.signal.keep = records.extend
    return batches


def by_length(prompt: str, completion: str, answer: str) -> float:
    return len(completion) + ord(completion[:1] or " ") / 256


@pytest.mark.slow
def test_an_answer_keeps_its_end_and_its_log_probabilities(lm: LM):
    prompt = prompts(lm)(0, 1)
    plain = LM(CASE, lm.module, lm.tokenizer)
    # Whatever it says first becomes an end.
    first = sample_trajectories(plain, prompt, TOKENS, Sampling(temperature=0.0), (1,))[0].tokens[0]
    plain.generation = {"eos_token_id": [first]}
    (ended,) = sample_trajectories(plain, prompt, TOKENS, Sampling(temperature=0.0), (1,))
    assert (ended.tokens, ended.live, ended.ended, ended.text) == ([first], [True], True, "")
    (cut,) = sample_trajectories(lm, prompt, TOKENS, Sampling(temperature=1.0), (1,))
    assert (len(cut.tokens), cut.ended) == (TOKENS, False)
    ids = [*prompt[0].tokens, *cut.tokens]
    scores = lm.score([ids])[0][len(prompt[0].tokens) - 1 :]
    assert np.allclose(cut.logprobs, scores, atol=1e-5)


def test_every_rollout_and_every_round_has_random_streams_of_its_own(lm: LM):
    """The same prompts with the same weights: other answers in the next rollout, the same ones again from the same position."""
    records: list[TrajectoryRecord] = []
    batches = rollouts(lm, OwnJudge(by_length), records=records, data=prompts(lm, 4))
    for _ in range(2):
        batches.advance(None)
        next(batches)
    first, second = ([record.completion for record in records if record.rollout == number] for number in (1, 2))
    assert [record.prompt for record in records[:8]] == [record.prompt for record in records[8:]]
    assert sum(a == b for a, b in zip(first, second, strict=True)) <= 1
    again: list[TrajectoryRecord] = []
    other = rollouts(lm, OwnJudge(by_length), records=again, data=prompts(lm, 4))
    other.seek({"place": 4, "rollout": 1, "tokens": 0, "waiting": []})
    other.advance(None)
    assert [record.completion for record in again] == second
    rounds: list[TrajectoryRecord] = []
    flat = rollouts(lm, OwnJudge(lambda *_: 1.0), records=rounds, data=prompts(lm, 4), resample=1)
    judge = flat.signal.judge
    flat.advance(None)
    assert judge.asked[0][0] == judge.asked[1][0], "the same prompts in both rounds"
    assert sum(a == b for a, b in zip(judge.asked[0][1], judge.asked[1][1], strict=True)) <= 1


def test_rewards_that_teach_nothing_are_told_once(lm: LM):
    for score, lines in ((lambda *_: 1.0, 1), (by_length, 0)):
        messages: list[str] = []
        batches = rollouts(lm, OwnJudge(score), lines=messages)
        for _ in range(2):
            batches.advance(None)
            next(batches)
        warnings = [line for line in messages if "teach nothing" in line]
        assert len(warnings) == lines, messages
        assert all("of rollout 1 " in line for line in warnings)


def test_groups_are_answers_to_one_prompt_and_columns_belong_to_them(lm: LM):
    judge, records = OwnJudge(by_length), []
    batches = rollouts(lm, judge, records=records)
    batches.advance(None)
    ((asked_prompts, completions, columns),) = judge.asked
    assert asked_prompts == ["0=", "0=", "ab1=", "ab1=", "2=", "2=", "ab3=", "ab3="]
    run_columns = {"finish_reasons": ["length"] * 8, "thinking_prompts": [False] * 8}
    assert columns == {"answer": ["0", "0", "1", "1", "2", "2", "3", "3"]} | run_columns
    experience = next(batches)
    rewards = np.array([2 * by_length("", completion, "") for completion in completions]).reshape(-1, 2)
    advantages = np.array([record.advantage for record in records]).reshape(-1, 2)
    assert np.allclose(advantages, np.sign(rewards - rewards.mean(1, keepdims=True)) / np.sqrt(2), atol=1e-3)
    assert experience.numbers["reward"] == pytest.approx(rewards.mean(), rel=1e-5)
    live = sum(part["live"].sum() for part in experience.parts)
    assert live == sum(record.tokens for record in records)
    assert {record.rewards["own"] for record in records} == set(np.float32(rewards.ravel() / 2).tolist())


def test_dynamic_sampling_replaces_groups_that_teach_nothing(lm: LM):
    """Prompts 0 and 1 give equal rewards: two others take their place, and those that taught are not asked again."""
    number = count()
    judge, records = OwnJudge(lambda p, c, answer: 1.0 if answer in "01" else next(number)), []
    batches = rollouts(lm, judge, records=records, resample=3)
    batches.advance(None)
    assert [sorted(set(columns["answer"])) for _, _, columns in judge.asked] == [["0", "1", "2", "3"], ["4", "5"]]
    assert [record.prompt for record in records] == ["2=", "2=", "ab3=", "ab3=", "4=", "4=", "ab5=", "ab5="]
    assert next(batches).numbers["rollout_rounds"] == 2
    some = rollouts(lm, OwnJudge(lambda p, c, a: 1.0 if a != "2" else next(number)), resample=1)
    some.advance(None)
    assert next(some).numbers["groups"] == 1, "an update from the group that teaches"


def test_prompts_without_room_are_passed_over_and_told(lm: LM):
    messages: list[str] = []
    judge = OwnJudge(by_length)
    batches = rollouts(lm, judge, lines=messages, data=prompts(lm, longest=30))
    batches.advance(None)
    assert "ab1" not in "".join(judge.asked[0][0])
    (words,) = [line for line in messages if "passed over" in line]
    assert "line 1" in words
    alone = Prompts([SourceRecord(where="line 9", prompt="x" * 30)], Encoding(lm.tokenizer), Order(1, None), {})
    with pytest.raises(BadInput, match="no prompt to learn from has at most 19 tokens"):
        rollouts(lm, judge, data=alone).advance(None)


def test_answers_that_were_cut_can_be_left_out_or_punished(lm: LM):
    judge, heard = OwnJudge(by_length), list[str]()
    batches = rollouts(lm, judge, lines=heard, keep_cut=False)
    batches.advance(None)
    assert sum(part["live"].sum() for part in next(batches).parts) == 0
    (words,) = [line for line in heard if "learned from" in line]
    assert "no completion of rollout 1 is learned from: all were cut, and rollout.keep_cut=false" in words
    punished = rollouts(lm, OwnJudge(lambda *_: 1.0), overlong=2, held_out=None)
    punished.advance(None)
    numbers = next(punished).numbers
    assert (numbers["rewards/overlong"], numbers["reward"]) == (-1, 1)


def test_a_share_of_cut_completions_above_one_half_is_said_once(lm: LM):
    for cut, lines in ((True, 1), (False, 0)):
        heard = list[str]()
        batches = rollouts(lm, OwnJudge(by_length), lines=heard)
        sample = batches.signal.sampler.sampled
        batches.signal.sampler.sampled = lambda *a, sample=sample, cut=cut: [replace(answer, ended=not cut) for answer in sample(*a)]
        for _ in range(2):
            batches.advance(None)
            assert next(batches).numbers["answers/cut"] == float(cut)
        assert len([line for line in heard if "of the completions of rollout 1 were cut at rollout.tokens" in line]) == lines


def test_a_completion_whose_reward_fails_is_left_out_and_counted(lm: LM):
    """Beside a reward that has a number for it: taken for 0, a failure would punish the completion."""

    class Both(OwnJudge):
        names, weights = ("own", "other"), (1.0, 1.0)

        def __call__(self, prompts, completions, columns) -> Found:
            scored = super().__call__(prompts, completions, columns)
            row = np.arange(len(completions))
            other = np.where(row < 2, np.nan, 1.0)[:, None].astype(np.float32)
            return Found(np.concatenate([scored.values, other], 1), row == 0, {"other": {"timed out": 1}})

    records: list[TrajectoryRecord] = []
    batches = rollouts(lm, Both(by_length), records=records)
    batches.advance(None)
    numbers = batches.queue[0].numbers
    assert (numbers["rewards/failed"], numbers["rewards/other/timed_out"], numbers["answers/left_out"]) == (1, 1, 1 / 8)
    assert records[0].rewards == {"own": None, "other": None}
    assert records[1].rewards["own"] is not None, "None has no opinion: the other reward decides"
    assert records[1].rewards["other"] is None


@pytest.mark.parametrize(("reward", "left_out"), [(1e30, 1), (-1e16, 1), (1e14, 0)])
def test_a_reward_too_large_to_square_is_left_out_with_a_word(lm: LM, reward: float, left_out: int):
    heard, first = list[str](), count()
    batches = rollouts(lm, OwnJudge(lambda p, c, a: reward if next(first) == 0 else by_length(p, c, a)), lines=heard)
    batches.advance(None)
    assert batches.queue[0].numbers["rewards/failed"] == left_out
    assert len([line for line in heard if "too large to compare in float32" in line]) == left_out


def test_an_interrupted_rollout_leaves_the_position_where_it_was(lm: LM):
    batches = rollouts(lm, OwnJudge(by_length))
    batches.signal.interrupted = lambda: True
    batches.advance(None)
    with pytest.raises(StopIteration):
        next(batches)
    assert batches.position() == {"place": 0, "rollout": 0, "tokens": 0, "waiting": [], "ahead": []}
    with pytest.raises(Interrupted):
        sample_trajectories(lm, prompts(lm)(0, 1), TOKENS, Sampling(), (1,), lambda: True)


def test_updates_that_are_left_travel_with_the_position(lm: LM):
    batches = rollouts(lm, OwnJudge(by_length), epochs=2, minibatches=2)
    batches.advance(None)
    handed = [next(batches)]
    position, arrays = batches.position(), batches.arrays()
    rest = [next(batches) for _ in range(3)]
    other = rollouts(lm, OwnJudge(by_length), epochs=2, minibatches=2)
    other.restore({"position": position, "fingerprint": batches.fingerprint}, arrays)
    other.advance(None)
    for mine, theirs in zip(rest, [next(other) for _ in range(3)], strict=True):
        assert mine.numbers == theirs.numbers
        for a, b in zip(mine.parts, theirs.parts, strict=True):
            assert all(np.array_equal(a[name], b[name], equal_nan=True) for name in a if a[name].dtype.kind == "f")
            assert np.array_equal(a["tokens"], b["tokens"])
    assert [update.numbers["tokens"] for update in (*handed, *rest)] == sorted(update.numbers["tokens"] for update in (*handed, *rest))


def ahead(lm: LM, depth: int, used: list[Any], **settings: Any) -> RolloutBatches:
    """Rollouts whose weights are the state itself; notes those that each was sampled with."""
    batches = rollouts(lm, OwnJudge(by_length), devices=1, ahead=depth, **settings)
    batches.signal.trainer = replace(batches.trainer, weights=lambda state: state, engine=lambda weights: used.append(weights) or lm)
    return batches


@pytest.mark.parametrize("depth", [1, 3])
def test_weights_are_as_old_as_the_settings_say(lm: LM, depth: int):
    """Rollout n is sampled with the weights of n - depth rollouts, whatever takes how long; and it is the n-th of a run in turns."""
    used: list[int] = []
    batches, updates = ahead(lm, depth, used), list[Any]()
    for version in range(6):
        batches.advance(version)
        updates.append(next(batches))
        assert updates[-1].numbers["rollout_age"] == min(version, depth)
    batches.close()
    assert used[:6] == [max(0, version - depth) for version in range(6)]
    plain = rollouts(lm, OwnJudge(by_length))
    for version, mine in enumerate(updates):
        plain.advance(version)
        theirs = next(plain)
        assert np.array_equal(mine.parts[0]["tokens"], theirs.parts[0]["tokens"]), "the weights are equal in this test"
        assert theirs.numbers["rollout_age"] == 0


def test_rollouts_that_were_sampled_ahead_travel_with_the_position(lm: LM):
    """They are not sampled again, since their weights are gone."""
    used: list[int] = []
    batches, again, updates = ahead(lm, 2, used), list[int](), list[Any]()
    batches.advance(0)
    next(batches)
    position, arrays = json.loads(json.dumps(batches.position())), batches.arrays()
    for version in (1, 2, 3):
        batches.advance(version)
        updates.append(next(batches))
    batches.close()
    other = ahead(lm, 2, again)
    other.restore({"position": position, "fingerprint": batches.fingerprint}, arrays)
    for version, mine in enumerate(updates, 1):
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
    batches = ahead(lm, 1, [])
    scores = iter([1.0] * 8 + [float("nan")] * 99)
    batches.signal.judge.score = lambda *_: next(scores)
    batches.advance(0)
    next(batches)
    assert batches.position()["ahead"] == []
    assert batches.position()["place"] == 4
    with pytest.raises(ArgosyError, match="no answer of rollout 2 has a reward"):
        batches.advance(1)
    batches.close()


def test_the_greedy_answer_is_the_baseline_of_remax(lm: LM):
    judge = OwnJudge(by_length)
    batches = rollouts(lm, judge, ReMax(), completions=1)
    records: list[TrajectoryRecord] = []
    batches.signal.keep = records.extend
    batches.advance(None)
    sampled_, greedy = (completions for _, completions, _ in judge.asked)
    expected = [2 * (by_length("", a, "") - by_length("", b, "")) for a, b in zip(sampled_, greedy, strict=True)]
    assert [record.advantage for record in records] == pytest.approx(expected, rel=1e-4)


def test_held_out_prompts_are_answered_greedily_and_evaluated(lm: LM):
    judge = OwnJudge(lambda p, c, a: float(a))
    batches = rollouts(lm, judge, held_out=prompts(lm, 4))
    first, second = batches.evaluated(None, 3), batches.evaluated(None, 3)
    assert first == second
    assert first["eval_reward"] == pytest.approx(2 * (0 + 1 + 2) / 3)
    assert first["eval_prompts"] == 3


def test_held_out_prompts_without_room_are_said_and_missing_rewards_are_no_zeros(lm: LM):
    messages: list[str] = []
    judge = OwnJudge(lambda p, c, a: float("nan") if a == "0" else 3.0)
    batches = rollouts(lm, judge, held_out=prompts(lm, 4, longest=30), lines=messages)
    numbers = batches.evaluated(None, 4)
    assert len(messages) == 1
    assert "no room for an answer" in messages[0]
    assert (numbers["eval_prompts"], numbers["eval_reward"], numbers["eval_rewards/own"]) == (3, 6.0, 3.0)
    assert numbers["eval_rewards/own/missing"] == pytest.approx(1 / 3)
    batches = rollouts(lm, OwnJudge(lambda *_: float("nan")), held_out=prompts(lm, 4))
    numbers = batches.evaluated(None, 4)
    assert "eval_reward" not in numbers
    assert numbers["eval_rewards/own/missing"] == 1


def test_an_answer_without_a_reward_is_missing_beside_a_punishment_too(lm: LM):
    records: list[TrajectoryRecord] = []
    batches = rollouts(lm, OwnJudge(lambda p, c, a: float("nan") if a == "0" else 3.0), records=records, overlong=2)
    batches.advance(None)
    missing = [record for record in records if record.prompt == "0="]
    assert len(missing) == 2
    assert [record.rewards for record in missing] == [{"own": None, "overlong": None}] * 2
    assert all(record.rewards["overlong"] is not None for record in records if record.prompt != "0=")
    assert batches.queue[0].numbers["answers/left_out"] == pytest.approx(2 / 8)


def test_another_position_ends_what_is_sampled_ahead(lm: LM):
    batches = rollouts(lm, OwnJudge(by_length), devices=1, ahead=1)
    batches.begin(batches.trainer, lambda _: None, lambda _: None, lambda: False)
    batches.advance(None)
    batches.ahead.settled()
    before = batches.ahead._thread
    batches.seek({"place": 0, "rollout": 0, "tokens": 0, "waiting": []})
    assert not before.is_alive()
    batches.advance(None)
    assert next(batches).numbers["rollout"] == 1, "and sampling goes on"
    batches.close()


def test_a_signal_ends_an_evaluation_but_no_rollout_that_is_sampled_ahead(lm: LM):
    batches = rollouts(lm, OwnJudge(by_length), held_out=prompts(lm, 2), devices=1, ahead=1)
    batches.begin(batches.trainer, lambda _: None, lambda _: None, lambda: True)
    batches.advance(None)
    assert len(batches.queue) == 1
    assert batches.evaluated(None, 2) is None
    assert len(batches.ahead.settled()) == 1
    batches.close()


def test_the_engine_holds_no_cache_between_rollouts(lm: LM):
    batches = rollouts(lm, OwnJudge(by_length), held_out=prompts(lm, 2))
    batches.advance(None)
    assert lm._held._engine.runner._caches is None
    next(batches)
    before = lm._held._engine.stats.compilations
    batches.advance(None)
    assert lm._held._engine.stats.compilations == before
    batches.evaluated(None, 2)
    assert lm._held._engine.runner._caches is None


def test_a_run_ends_with_the_epochs_of_its_prompts(lm: LM):
    data = prompts(lm, 6)
    data.most = 9
    batches = rollouts(lm, OwnJudge(by_length), data=data, epochs=2)
    handed = []
    for _ in range(5):
        batches.advance(None)
        handed += [batch] if (batch := next(batches, None)) is not None else []
    assert len(handed) == 4 == batches.summary().ends_after, "two rollouts of four prompts, two updates each; one prompt is left"
    assert "Left out: the last 1 prompt, too few for a batch (data.epochs)." in batches.summary().text
    assert batches.summary(3).tail_rows == 0
    assert batches.summary(100).epochs == pytest.approx(8 / 6)


def test_no_reward_at_all_is_an_error(lm: LM):
    with pytest.raises(ArgosyError, match="no answer of rollout 1 has a reward"):
        rollouts(lm, OwnJudge(lambda *_: float("nan"))).advance(None)


@pytest.mark.parametrize(
    ("policy", "settings", "problem"),
    [
        (GRPO(), {"completions": 3}, "groups of 3"),
        (GRPO(), {"completions": 1}, "compares the answers to one prompt"),
        (PPO(), {"completions": 1, "resample": 1}, "teach too"),
        (GSPO(loss="reinforce"), {"epochs": 2}, "one update a rollout"),
        (GRPO(kl=0.1, kl_in="reward", normalize="each"), {}, "no reward to compare"),
        (GRPO(), {"tokens": 24}, "no room for a prompt"),
    ],
)
def test_settings_that_do_not_fit_each_other(lm: LM, policy: Policy, settings: dict[str, Any], problem: str):
    shape = PartShape(2, 24, settings.get("tokens", TOKENS))
    rollout = Rollout(**{"completions": 2, "tokens": TOKENS, **settings})
    with pytest.raises(BadInput, match=problem):
        reward_batches(prompts(lm), None, policy, rollout, 8, shape, OwnJudge(by_length), 7)
