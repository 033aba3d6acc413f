"""Rollouts as batches: the policy answers prompts, rewards score the answers, and updates learn from them.

    prompts -> sampled answers -> rewards -> advantages -> packed parts -> `epochs` times `minibatches` updates

The answers depend on the weights of the moment, so `advance` reads the training state before each batch; where updates of the last
rollout are left, nothing is sampled. A position is the place in the prompts and the number of the rollout; updates that are left are
arrays beside it, since the weights that sampled them are gone, and so are rollouts that were sampled ahead. So a run that was killed
goes on bit for bit, wherever it was.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput, UserError, mistakes_of, refuse
from argosy.core.progress import Say
from argosy.data.encode import NAMES_SHOWN
from argosy.data.order import picked
from argosy.data.rows.prompts import Prompts
from argosy.data.summary import CorpusSummary
from argosy.rl.policy.credit import Compared, compared
from argosy.rl.policy.kl import in_reward
from argosy.rl.policy.metrics import Metrics, mean_where, numbers
from argosy.rl.policy.objective import shared_of
from argosy.rl.policy.parts import compares_groups
from argosy.rl.policy.settings import Policy
from argosy.rl.policy.totals import reward_metrics, total
from argosy.rl.rollouts.completions import Answer, Interrupted, SamplersLost
from argosy.rl.rollouts.packing import Experience, Part, Shape, density, packed, per_token, spared
from argosy.rl.rollouts.prefetch import Ahead
from argosy.rl.rollouts.queue import Queued, check_sizes
from argosy.rl.rollouts.records import Judge, Told, Trainer, said_of_cut
from argosy.rl.rollouts.sampler import Collected, Collector, given_back, kept
from argosy.rl.rollouts.settings import PLACEMENT, Rollout
from argosy.rl.rollouts.trajectories import Table
from argosy.rl.rollouts.turn_rewards import played_numbers

# Of the arrays of a position, those of rollouts that were sampled ahead.
AHEAD = "ahead."


class Rollouts(Queued):
    """Updates from rollouts. Nothing is sampled before the first `advance`.

    Args:
        prompts, held_out: to train on, and to evaluate.
        batch: answers of a rollout.
        shape: of the parts that they are packed into.
        seed: of the run.
        say: called with what went wrong.
        table: where answers of several turns are played; None: an answer is one turn.

    Raises:
        BadInput: settings that do not fit each other.
    """

    def __init__(
        self,
        prompts: Prompts,
        held_out: Prompts | None,
        policy: Policy,
        rollout: Rollout,
        batch: int,
        shape: Shape,
        judge: Judge,
        seed: int,
        say: Say = lambda _: None,
        table: Table | None = None,
    ):
        super().__init__()
        self.table = table
        self.prompts, self.held_out, self.policy, self.rollout = prompts, held_out, policy, rollout
        self.shape, self.judge = shape, judge
        self.groups, longest_prompt = batch // rollout.completions, shape.sequence - rollout.tokens
        sizes = batch, rollout, shape, prompts.most, self.groups
        checks = lambda: check_sizes(*sizes), lambda: check_groups(policy, rollout), lambda: check_credit(policy, table)
        refuse(mistakes_of(*checks))
        self.collector = Collector(prompts, policy, rollout, self.groups, longest_prompt, judge, seed, say, table)
        self.trainer: Trainer | None = None
        self.keep: Callable[[Sequence[Told]], None] = lambda _: None
        how = {name: value for name, value in dict(rollout).items() if name not in PLACEMENT}
        made = {"rewards": list(judge.names), "weights": list(judge.weights), "rollout": how}
        made |= {} if table is None else {"environment": table.identity}
        self.fingerprint = prompts.fingerprint | {"prompts": len(prompts), "batch": batch, "made": repr(made)}
        # Nominal: what is computed depends on the lengths of the answers.
        self.tokens_per_batch = shape.sequence * batch // rollout.minibatches
        self.sizes = shape.sizes
        self.ahead: Ahead[tuple[Any, int], Collected] = Ahead(self.collected)
        # Of a position that was sought: the rollouts that belong to the arrays that follow.
        self.sampled: Sequence[Any] = ()
        self.interrupted: Callable[[], bool] = lambda: False
        self.closing = self.evaluating = False

    def begin(self, trainer: Trainer, say: Say, keep: Callable[[Sequence[Told]], None], interrupted: Callable[[], bool]) -> None:
        """Takes what a run lends, before the first `advance`.

        Args:
            keep: called with the answers of each rollout.
            interrupted: whether to stop. Then a rollout is given up, which is sampled again later; except one that is sampled ahead,
                whose weights will be gone.
        """
        self.trainer, self.keep, self.collector.say, self.interrupted = trainer, keep, say, interrupted
        self.collector.interrupted = self.gives_up

    def gives_up(self) -> bool:
        """Whether what is being sampled is given up."""
        return self.closing or (self.interrupted() and (self.evaluating or not self.rollout.ahead))

    # ---------------------------------------------------------------- as batches

    def position(self) -> dict[str, Any]:
        """Waits for what is sampled ahead."""
        return super().position() | {"ahead": kept(self.ahead.settled())[1]}

    def seek(self, position: dict[str, Any]) -> None:
        super().seek(position)
        # What is being sampled for another position is given up, and its thread ends.
        self.closing = True
        self.ahead.close()
        self.closing = False
        self.ahead, self.sampled = Ahead(self.collected), list(position.get("ahead", ()))
        self.collector.place, self.collector.number = self.place, self.number

    def arrays(self) -> dict[str, np.ndarray]:
        return super().arrays() | {AHEAD + name: a for name, a in kept(self.ahead.settled())[0].items()}

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        super().take({name: a for name, a in arrays.items() if not name.startswith(AHEAD)})
        sampled = {name.removeprefix(AHEAD): a for name, a in arrays.items() if name.startswith(AHEAD)}
        done = given_back(sampled, self.sampled, self.prompts)
        self.ahead.put_back(done)
        if done:
            self.collector.place, self.collector.number = done[-1].place, done[-1].number + 1

    def close(self) -> None:
        self.closing = True
        self.ahead.close()
        self.judge.close()
        if self.table is not None:
            self.table.close()

    def summary(self, steps: int | None = None) -> CorpusSummary:
        held = len(self.held_out) if self.held_out is not None else 0
        ends = None if self.prompts.most is None else self.prompts.most // self.groups * self.rollout.updates
        made = steps if steps is None or ends is None else min(steps, ends)
        reached = ends is not None and (steps is None or steps >= ends)
        tail = (self.prompts.most or 0) % self.groups if reached else 0
        drawn = None if made is None else -(-made // self.rollout.updates) * self.groups / len(self.prompts)
        known: dict[str, Any] = {"documents": len(self.prompts), "epochs": drawn, "held_out_documents": held, "ends_after": ends}
        names = self.prompts.special_names
        known |= {"special_documents": sum(names.values()), "special_names": tuple(names)[:NAMES_SHOWN], "tail_rows": tail}
        return CorpusSummary(self.prompts.source, format="prompt", **known)

    # ---------------------------------------------------------------- a rollout

    def played(self, state: Any) -> list[Experience]:
        """The updates of the next rollout."""
        assert self.trainer is not None, "rollouts before a trainer"
        if not self.rollout.ahead:
            lm = self.trainer.engine(self.trainer.weights(state))
            made = self.collector(lm, self.number)
            # The update needs the memory of its cache.
            lm.sleep()
        else:
            if not len(self.ahead):
                self.ahead.submit((self.trainer.weights(state), self.number))
            made = self.ahead.take()
            # While the update runs, the next ones are sampled with the weights from before it.
            while len(self.ahead) < self.rollout.ahead:
                self.ahead.submit((self.trainer.weights(state), self.number))
        self.number, self.place = made.number + 1, made.place
        return self.experiences(state, made)

    def collected(self, given: tuple[Any, int]) -> Collected:
        """A rollout that is sampled ahead, in the thread of these."""
        assert self.trainer is not None
        weights, seen = given
        return self.collector(self.trainer.engine(weights), seen)

    # ---------------------------------------------------------------- its updates

    def experiences(self, state: Any, made: Collected) -> list[Experience]:
        """The updates of a rollout: its groups in shares, as often as there are epochs."""
        how, found, answers = self.rollout, made.found, made.found.answers
        shares = np.array_split(np.arange(len(answers)).reshape(-1, how.completions), how.minibatches)
        parts = [packed(answers, share.reshape(-1).tolist(), self.shape) for share in shares if share.size]
        judgment = self.collector.judgment(found)
        live = judgment.live
        with made.clock("logps_s"):
            known = self.known(state, [part for own in parts for part in own], len(answers))
        ended = np.array([one.ended for one in answers])
        metrics: Metrics = {}
        if self.policy.kl and self.policy.kl_in == "reward":
            arrays = (jnp.asarray(a) for a in (np.zeros_like(live), known["old"], known["reference"], live))
            less, metrics = in_reward(*arrays, coefficient=self.policy.kl)
            judgment = judgment._replace(penalty=-np.asarray(less))
        if "values" in known:
            judgment = judgment._replace(values=known["values"], after=np.where(ended, 0.0, known["after"]))
        by = compared(self.policy, judgment)
        counted = by.counted & (ended | how.keep_cut)
        columns = {"live": live * counted[:, None], "advantages": by.values * counted[:, None]}
        columns |= {"sampler": per_token(answers, how.tokens, "logprobs")}
        columns |= {"old": known["old"] if how.updates > 1 else np.full(live.shape, np.nan, np.float32)}
        columns |= {name: known[name] for name in ("reference", "values") if name in known}
        columns |= {} if by.returns is None else {"returns": by.returns}
        fields = {**self.policy.reads(), **shared_of(self.shape)}
        filled = [[picked(part.filled(columns), fields) for part in own] for own in parts]
        self.keep(self.told(made, by))
        told = self.numbers(made, by._replace(metrics=by.metrics | metrics), counted)
        if told.get("groups/useless") == 1:
            what = f"all answers to each prompt of rollout {made.number + 1} have the same reward, so the rewards teach nothing"
            self.collector.complain(f"{what}: groups/useless tells how many groups are so", "equal")
        self.say_cut(told["answers/cut"], made.number + 1, bool(counted.any()))
        told |= {"part_density": density([part for own in filled for part in own])}
        if self.shape.shared:
            told |= {"tokens_spared": self.spared([part for own in parts for part in own], answers)}
        return [Experience(own, told) for _ in range(how.epochs) for own in filled]

    def say_cut(self, cut: float, number: int, learned: bool) -> None:
        """Says once where most completions were cut, and where none of a rollout is learned from."""
        if not learned:
            why = "all were cut, and rollout.keep_cut=false leaves those out" if cut == 1 else "each was cut or has no reward"
            what = f"no completion of rollout {number} is learned from: {why}"
            self.collector.complain(f"{what}; raise rollout.tokens, or set rollout.keep_cut=true", "none counted")
        elif cut > 0.5:
            self.collector.complain(f"{said_of_cut(cut, number)}; raise rollout.tokens", "cut")

    def spared(self, parts: Sequence[Part], answers: Sequence[Answer]) -> float:
        """The share of tokens that shared prompts spare. Says once where they were asked for and spare none."""
        found = spared(parts, answers)
        several = any(len(one.prompt.tokens) > 1 for one in answers) and self.rollout.completions > 1
        if self.rollout.share_prompts and several and not found:
            what = f"no two answers to a prompt fit into a row of {plural(self.shape.sequence, 'token')}, so that none share it"
            self.collector.complain(f"{what}: raise data.sequence, or leave out rollout.share_prompts", "apart")
        return found

    def known(self, state: Any, parts: Sequence[Part], count: int) -> dict[str, np.ndarray]:
        """What the models of the run say of the answers before the first update, [B L] each; `after` [B]."""
        assert self.trainer is not None
        in_reward = self.policy.kl and self.policy.kl_in == "reward"
        asked: dict[str, Any] = {"old": self.trainer.old} if self.rollout.updates > 1 or in_reward else {}
        asked |= {"reference": self.trainer.reference} if self.policy.kl else {}
        out = {name: np.zeros((count, self.rollout.tokens), np.float32) for name in asked}
        if self.policy.critic is not None:
            out |= {"values": np.zeros((count, self.rollout.tokens), np.float32), "after": np.zeros(count, np.float32)}
        for part in parts:
            for name, ask in asked.items():
                part.spread(ask(state, part.rows), out[name])
            if self.policy.critic is not None:
                values, after = self.trainer.values(state, part.rows)
                part.spread(values, out["values"])
                part.spread(after, out["after"])
        return out

    def numbers(self, made: Collected, by: Compared, counted: np.ndarray) -> dict[str, float]:
        """The metrics of a rollout."""
        answers, n, names = made.found.answers, self.rollout.completions, self.collector.names
        lengths = np.array([sum(one.live) for one in answers], np.float32)
        distinct = [len({tuple(one.tokens) for one in answers[i : i + n]}) / n for i in range(0, len(answers), n)]
        metrics: Metrics = by.metrics | dict(reward_metrics(jnp.asarray(self.collector.by_group(made.found.rewards)), names))
        return numbers(metrics) | {
            "rollout": float(made.number + 1),
            "rollout_age": float(made.number - made.seen),
            "rollout_rounds": float(made.rounds),
            "groups": float(len(answers) // n),
            "answers/tokens": float(lengths.mean()),
            "answers/tokens_max": float(lengths.max()),
            "answers/cut": float(np.mean([not one.ended for one in answers])),
            "answers/distinct": float(np.mean(distinct)),
            "answers/left_out": float(np.mean(~counted)),
            **played_numbers(answers),
            **made.clock.seconds,
            **made.failed,
        }

    def told(self, made: Collected, by: Compared) -> list[Told]:
        """The answers of a rollout as they are kept."""
        answers, names, number = made.found.answers, self.collector.names, made.number + 1
        # That of the first token of the policy: an environment may have spoken before it.
        first = by.values[np.arange(len(answers)), [one.live.index(True) if any(one.live) else 0 for one in answers]].tolist()
        if by.turns is not None:
            first = [float(its[: max(len(one.played.said), 1)].mean()) for one, its in zip(answers, by.turns) if one.played]
        turns = [told_turns(one, None if by.turns is None else by.turns[row].tolist()) for row, one in enumerate(answers)]
        return [
            Told(number, one.prompt.asked, one.text, by_name(names, rewards), advantage, sum(one.live), one.ended, its)
            for one, rewards, advantage, its in zip(answers, made.found.rewards, first, turns, strict=True)
        ]

    # ---------------------------------------------------------------- evaluation

    def evaluated(self, state: Any, most: int) -> dict[str, float] | None:
        """Rewards of the greedy answers to held-out prompts, at most so many; None if it was interrupted."""
        assert self.trainer is not None
        if self.held_out is None:
            return {}
        # The engine does one thing at a time.
        self.ahead.settled()
        lm = self.trainer.engine(self.trainer.weights(state))
        self.evaluating = True
        try:
            answers, rewards = self.collector.greedy(lm, self.held_out(0, most))
        except Interrupted:
            return None
        except SamplersLost as error:
            self.failed = error
            return None
        finally:
            self.evaluating = False
        if not answers:
            return {}
        lm.sleep()
        values, names = rewards[:, None], self.collector.names
        summed = total(jnp.asarray(values), self.collector.weights)
        metrics: Metrics = {"reward": mean_where(summed, jnp.isfinite(summed).astype(summed.dtype))}
        metrics |= reward_metrics(jnp.asarray(values), names)
        return {f"eval_{name}": value for name, value in numbers(metrics).items()} | {
            "eval_answers/cut": float(np.mean([not one.ended for one in answers])),
            "eval_prompts": float(len(answers)),
            **{f"eval_{name}": value for name, value in played_numbers(answers).items()},
        }


def by_name(names: Sequence[str], rewards: np.ndarray) -> dict[str, float | None]:
    """Rewards as JSON has them: null where missing."""
    return {name: float(value) if np.isfinite(value) else None for name, value in zip(names, rewards, strict=True)}


def told_turns(answer: Answer, advantages: Sequence[float] | None) -> list[dict[str, Any]] | None:
    """The turns of an answer as they are kept: those of the policy with their advantages, where they have some of their own."""
    if answer.played is None or advantages is None:
        return None if answer.played is None else answer.played.turns
    turns = list(answer.played.turns)
    for place, advantage in zip(answer.played.said, advantages):
        turns[place] = turns[place] | {"advantage": advantage}
    return turns


def check_credit(policy: Policy, table: Table | None) -> None:
    """Checks that there are rewards of turns, where a policy credits turns.

    Raises:
        BadInput: there is no environment, or one that gives no rewards.
    """
    by = policy.credit.by
    if by == "answer":
        return
    hint = "an environment of your own rewards turns: its `step` returns Turn(observation, reward); or objective.credit.by=answer"
    if table is None:
        raise BadInput(f"objective.credit.by={by} credits turns, and an answer has one: environment=none", hint=hint)
    if not table.gives:
        name = table.environments.source["of"]
        raise BadInput(f"objective.credit.by={by} needs rewards of turns, and the environment `{name}` gives none", hint=hint)
    if table.most == 1:
        what = f"objective.credit.by={by} credits turns, and environment.turns=1 lets an answer have one"
        raise BadInput(what, hint="environment.turns=N, or objective.credit.by=answer")


def check_groups(policy: Policy, rollout: Rollout) -> None:
    """Checks that a policy learns from groups of this kind.

    Raises:
        UserError: it does not.
    """
    mistakes: list[UserError] = []
    n = rollout.completions
    if n < 2 and compares_groups(policy):
        what = f"objective.advantages={policy.advantages} compares the answers to one prompt, and rollout.completions = {n}"
        hint = "sample at least 2 answers, or compare with the whole batch: objective.advantages=reinforce_pp"
        mistakes.append(BadInput(what, hint=hint))
    if rollout.resample and not compares_groups(policy):
        what = "rollout.resample: groups of equal rewards teach too, where they are compared with more"
        mistakes.append(BadInput(what, hint="leave it out"))
    if policy.kl and policy.kl_in == "reward" and policy.normalize == "each":
        what = "objective.kl_in=reward and objective.normalize=each: the penalty is no reward to compare"
        mistakes.append(BadInput(what, hint="kl_in=loss"))
    if policy.loss == "reinforce" and rollout.updates > 1:
        what = f"objective.loss=reinforce is for one update a rollout, and there are {rollout.updates}"
        hint = "objective.loss=ppo weighs answers of older weights; or rollout.epochs=1 rollout.minibatches=1"
        mistakes.append(BadInput(what, hint=hint))
    refuse(mistakes)
