"""Rollouts as batches: the policy answers prompts, rewards score the answers, and updates learn from them.

    prompts -> sampled answers -> rewards -> advantages -> packed parts -> `epochs` times `minibatches` updates

The answers depend on the weights of the moment, so `advance` reads the training state before each batch; where updates of the last
rollout are left, nothing is sampled. A position is the place in the prompts and the number of the rollout; updates that are left are
arrays beside it, since the weights that sampled them are gone. So a run that was killed goes on bit for bit, wherever it was.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.core.errors import ArgosyError, BadInput
from argosy.core.progress import Say
from argosy.data.batch import Batches
from argosy.data.order import picked, whole_numbers
from argosy.data.prompts import Prompt, Prompts
from argosy.data.summary import CorpusSummary
from argosy.infer.lm import LM
from argosy.infer.sample import Sampling
from argosy.rl.advantages import groups
from argosy.rl.answers import EVALUATION, ROLLOUT, Answer, Interrupted, sampled
from argosy.rl.compare import Compared, Judgment, compared
from argosy.rl.experience import Experience, Part, Shape, density, packed, per_token, restored, stored
from argosy.rl.kl import in_reward
from argosy.rl.metrics import Metrics, mean_where, numbers
from argosy.rl.played import ENVIRONMENT, environment_rewards, failed, failures, played_numbers
from argosy.rl.policies import Policy, Rollout
from argosy.rl.rewards import overlong, reward_metrics, total
from argosy.rl.rolled import Ended, Judge, Rolled, Told, Trainer
from argosy.rl.trajectories import Conversed, How, Table

# Prompts that are looked at for one that fits before it is an error, as a multiple of all.
LOOKED_AT = 2
OVERLONG = "overlong"


class Rollouts(Batches):
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
        self.table = table
        self.prompts, self.held_out, self.policy, self.rollout = prompts, held_out, policy, rollout
        self.shape, self.judge, self.seed, self.say = shape, judge, seed, say
        self.groups = groups_of(batch, policy, rollout)
        self.longest_prompt = shape.sequence - rollout.tokens
        if self.longest_prompt < 1:
            what = f"data.sequence = {shape.sequence} has no room for a prompt before an answer of {rollout.tokens} tokens"
            raise BadInput(what, where="rollout.tokens", hint="raise data.sequence, or lower rollout.tokens")
        if prompts.most is not None and prompts.most < self.groups:
            what = f"data.epochs: {prompts.most} prompts are fewer than the {self.groups} of a rollout"
            raise BadInput(what, hint="raise data.epochs, or lower data.batch")
        self.trainer: Trainer | None = None
        self.interrupted: Callable[[], bool] = lambda: False
        self.keep: Callable[[Sequence[Told]], None] = lambda _: None
        how = {name: value for name, value in dict(rollout).items() if name != "workers"}
        made = {"rewards": list(judge.names), "weights": list(judge.weights), "rollout": how}
        made |= {} if table is None else {"environment": table.identity}
        self.fingerprint = prompts.fingerprint | {"prompts": len(prompts), "batch": batch, "made": repr(made)}
        # Nominal: what is computed depends on the lengths of the answers.
        self.tokens_per_batch = shape.sequence * batch // rollout.minibatches
        self.bytes_per_token, self.sizes = None, shape.sizes
        self.queue: list[Experience] = []
        # Of a position that was sought: what belongs to the arrays that follow.
        self.waiting: list[dict[str, Any]] = []
        self.place = self.number = self.tokens = 0
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, float] = {}
        self.complained: set[str] = set()

    # ---------------------------------------------------------------- as batches

    def advance(self, state: Any) -> None:
        """Samples a rollout with the weights of a state, unless updates of the last one are left.

        Raises:
            ArgosyError: no answer has a reward, or no prompt fits.
        """
        if not self.queue:
            before = self.position()
            try:
                self.queue = self.played(state)
            except (Interrupted, Ended):
                self.seek(before)

    def __next__(self) -> Any:
        if not self.queue:
            raise StopIteration
        made = self.queue.pop(0)
        self.tokens += sum(int(np.sum(part["segments"] > 0)) for part in made.parts)
        return Experience(made.parts, made.numbers | {"tokens": self.tokens})

    def position(self) -> dict[str, Any]:
        return {
            "place": self.place, "rollout": self.number, "tokens": self.tokens, "waiting": stored(self.queue)[1],
        }  # fmt: skip

    def seek(self, position: dict[str, Any]) -> None:
        found = whole_numbers({k: v for k, v in position.items() if k != "waiting"}, ("place", "rollout", "tokens"))
        self.place, self.number, self.tokens = found.values()
        self.queue, self.waiting = [], list(position.get("waiting", ()))

    def arrays(self) -> dict[str, np.ndarray]:
        return stored(self.queue)[0]

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        self.queue, self.waiting = restored(arrays, self.waiting), []

    def close(self) -> None:
        self.judge.close()
        if self.table is not None:
            self.table.close()

    def summary(self, steps: int | None = None) -> CorpusSummary:
        held = len(self.held_out) if self.held_out is not None else 0
        ends = None if self.prompts.most is None else self.prompts.most // self.groups * self.rollout.updates
        made = steps if steps is None or ends is None else min(steps, ends)
        drawn = None if made is None else -(-made // self.rollout.updates) * self.groups / len(self.prompts)
        known = {"documents": len(self.prompts), "epochs": drawn, "held_out_documents": held, "ends_after": ends}
        return CorpusSummary(self.prompts.source, format="prompt", **known)

    # ---------------------------------------------------------------- a rollout

    def played(self, state: Any) -> list[Experience]:
        """The updates of the next rollout."""
        assert self.trainer is not None, "rollouts before a trainer"
        self.seconds, self.failed = dict.fromkeys(("generate_s", "reward_s", "logps_s"), 0.0), {}
        with self.timed("generate_s"):
            lm = self.trainer.engine(state)
        found, rounds = Rolled(), 0
        while True:
            found = found.plus(*self.round(lm, self.groups - len(found.answers) // self.rollout.completions, rounds))
            useful = self.useful(found.rewards)
            rounds += 1
            if rounds > self.rollout.resample or len(useful) == self.groups:
                break
            # A useless group makes room, except in the last round.
            found = found.groups(useful, self.rollout.completions)
        if self.rollout.resample and useful:
            found = found.groups(useful, self.rollout.completions)
        # The update needs the memory of its cache.
        lm.sleep()
        self.check_rewarded(found.rewards)
        self.number += 1
        return self.experiences(state, found, rounds)

    def round(self, lm: LM, count: int, round_: int) -> tuple[list[Answer], np.ndarray, np.ndarray | None]:
        """Answers to the next `count` prompts, their rewards, and those of the greedy answers where they are compared with those."""
        each, how = self.rollout, self.policy
        prompts = self.next_prompts(count)
        with self.timed("generate_s"):
            answers = self.answered(lm, [one for one in prompts for _ in range(each.completions)], how.temperature, round_)
            plain = self.answered(lm, prompts, 0.0, round_) if how.advantages == "greedy" else None
        return answers, self.judged(answers), None if plain is None else self.judged(plain)

    def answered(self, lm: LM, prompts: list[Prompt], temperature: float, round_: int) -> list[Answer]:
        how = self.rollout
        filters: dict[str, Any] = {"top_k": how.top_k, "top_p": how.top_p, "min_p": how.min_p} if temperature else {}
        seed = (self.seed, ROLLOUT, self.number, round_)
        sampling = Sampling(temperature=temperature, **filters)
        return self.sampled(lm, prompts, sampling, seed, how.ignore_eos)

    def sampled(
        self, lm: LM, prompts: list[Prompt], sampling: Sampling, seed: tuple[int, ...], ignore_eos: bool = False
    ) -> list[Answer]:
        """One answer to each prompt, of one turn or of as many as its environment has."""
        tokens = self.rollout.tokens
        if self.table is None:
            return sampled(lm, prompts, tokens, sampling, seed, self.interrupted, ignore_eos)
        how = How(sampling, tokens, self.shape.sequence, ignore_eos)
        playing = Conversed(lm, prompts, how, seed, self.table, self.interrupted)
        answers = playing.run()
        self.seconds["environment_s"] = self.seconds.get("environment_s", 0.0) + playing.waited_s
        for kind, message in failures(answers):
            self.complain(f"environment {kind}, its answers have no reward:\n{message.rstrip()}", f"environment {kind}")
        return answers

    def next_prompts(self, count: int) -> list[Prompt]:
        """The next prompts that leave room for an answer; longer ones are passed over and reported."""
        out: list[Prompt] = []
        looked = 0
        while len(out) < count:
            found = self.prompts(self.place, count - len(out))
            if not found:
                raise Ended("the epochs of the prompts are over")
            self.place += len(found)
            looked += len(found)
            out += self.fitting(found)
            if looked - len(out) > LOOKED_AT * len(self.prompts):
                what = f"no prompt has at most {self.longest_prompt} tokens, data.sequence - rollout.tokens"
                raise BadInput(what, hint="raise data.sequence, or lower rollout.tokens")
        return out

    def fitting(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts that leave room for an answer. The first one that does not is said."""
        for prompt in prompts:
            if len(prompt.tokens) > self.longest_prompt:
                self.complain(
                    f"{prompt.where}: a prompt of {len(prompt.tokens)} tokens leaves no room for an answer and is passed over, as are "
                    f"others of more than {self.longest_prompt} (data.sequence - rollout.tokens)",
                    "long",
                )
        return [prompt for prompt in prompts if len(prompt.tokens) <= self.longest_prompt]

    def judged(self, answers: list[Answer]) -> np.ndarray:
        """The rewards of answers [B k], the punishment of overlong ones last, if there is one."""
        columns = {name: [one.prompt.columns[name] for one in answers] for name in self.prompts.names}
        with self.timed("reward_s"):
            found = self.judge([one.prompt.asked for one in answers], [one.said for one in answers], columns)
        for name, kinds in found.counts.items():
            for kind, count in kinds.items():
                key = f"rewards/{name}/{kind.replace(' ', '_')}"
                self.failed[key] = self.failed.get(key, 0.0) + count
        values = found.values
        if self.gives:
            values = np.concatenate([environment_rewards(answers), values], 1)
        values[failed(answers)] = np.nan
        if not self.rollout.overlong:
            return values
        lengths = np.array([len(one.tokens) for one in answers], np.float32)
        punished = np.asarray(overlong(jnp.asarray(lengths), self.rollout.tokens, self.rollout.overlong))
        return np.concatenate([values, np.where(failed(answers), np.nan, punished)[:, None]], 1)

    def useful(self, rewards: np.ndarray) -> list[int]:
        """The groups that can be learned from."""
        summed = total(jnp.asarray(self.by_group(rewards)), self.weights)
        return np.flatnonzero(np.asarray(groups(summed).useful)).tolist()

    def by_group(self, rewards: np.ndarray) -> np.ndarray:
        return rewards.reshape(-1, self.rollout.completions, rewards.shape[1])

    @property
    def gives(self) -> bool:
        """Whether the environment gives rewards."""
        return self.table is not None and self.table.gives

    @property
    def scored(self) -> list[str]:
        """The rewards that are given for what an answer says."""
        return [*([ENVIRONMENT] if self.gives else []), *self.judge.names]

    @property
    def names(self) -> list[str]:
        return [*self.scored, *([OVERLONG] if self.rollout.overlong else [])]

    @property
    def weights(self) -> list[float]:
        own = [self.table.weight] if self.table is not None and self.gives else []
        return [*own, *self.judge.weights, *([1.0] if self.rollout.overlong else [])]

    def check_rewarded(self, rewards: np.ndarray) -> None:
        """Checks that some answer has a reward.

        Raises:
            ArgosyError: none has.
        """
        if not np.isfinite(rewards[:, : len(self.scored)]).any():
            hint = "what they said is above; nothing was learned from this rollout, and earlier checkpoints are good"
            raise ArgosyError(f"no answer of rollout {self.number} has a reward ({', '.join(self.scored)})", hint=hint)

    # ---------------------------------------------------------------- its updates

    def experiences(self, state: Any, found: Rolled, rounds: int) -> list[Experience]:
        """The updates of a rollout: its groups in shares, as often as there are epochs."""
        how, answers = self.rollout, found.answers
        shares = np.array_split(np.arange(len(answers)).reshape(-1, how.completions), how.minibatches)
        parts = [packed(answers, share.reshape(-1).tolist(), self.shape) for share in shares if share.size]
        live = per_token(answers, how.tokens, "live")
        with self.timed("logps_s"):
            known = self.known(state, [part for own in parts for part in own], len(answers))
        ended = np.array([one.ended for one in answers])
        judgment = Judgment(self.by_group(found.rewards), self.weights, live, found.greedy)
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
        filled = [[picked(part.filled(columns), self.policy.reads()) for part in own] for own in parts]
        self.keep(self.told(found, by))
        made = self.numbers(found, by._replace(metrics=by.metrics | metrics), counted, rounds)
        made |= {"part_density": density([part for own in filled for part in own])}
        return [Experience(own, made) for _ in range(how.epochs) for own in filled]

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

    def numbers(self, found: Rolled, by: Compared, counted: np.ndarray, rounds: int) -> dict[str, float]:
        """The metrics of a rollout."""
        answers, n = found.answers, self.rollout.completions
        lengths = np.array([sum(one.live) for one in answers], np.float32)
        distinct = [len({tuple(one.tokens) for one in answers[i : i + n]}) / n for i in range(0, len(answers), n)]
        metrics: Metrics = by.metrics | dict(reward_metrics(jnp.asarray(self.by_group(found.rewards)), self.names))
        return numbers(metrics) | {
            "rollout": float(self.number),
            "rollout_rounds": float(rounds),
            "groups": float(len(answers) // n),
            "answers/tokens": float(lengths.mean()),
            "answers/tokens_max": float(lengths.max()),
            "answers/cut": float(np.mean([not one.ended for one in answers])),
            "answers/distinct": float(np.mean(distinct)),
            "answers/left_out": float(np.mean(~counted)),
            **played_numbers(answers),
            **self.seconds,
            **self.failed,
        }

    def told(self, found: Rolled, by: Compared) -> list[Told]:
        """The answers of a rollout as they are kept."""
        # That of the first token; a token of the environment has none.
        own = [one.live.index(True) if True in one.live else 0 for one in found.answers]
        first = by.values[np.arange(len(own)), own].tolist()
        return [
            Told(
                self.number, one.prompt.asked, one.text, by_name(self.names, rewards), advantage, sum(one.live), one.ended,
                None if one.played is None else one.played.turns,
            )
            for one, rewards, advantage in zip(found.answers, found.rewards, first, strict=True)
        ]  # fmt: skip

    # ---------------------------------------------------------------- evaluation

    def evaluated(self, state: Any, most: int) -> dict[str, float] | None:
        """Rewards of the greedy answers to held-out prompts, at most so many; None if it was interrupted."""
        assert self.trainer is not None
        if self.held_out is None:
            return {}
        fitting = self.fitting(self.held_out(0, most))
        if not fitting:
            return {}
        lm = self.trainer.engine(state)
        try:
            how = Sampling(temperature=0.0)
            answers = self.sampled(lm, fitting, how, (self.seed, EVALUATION))
        except Interrupted:
            return None
        lm.sleep()
        values = self.judged(answers)[:, None]
        summed = total(jnp.asarray(values), self.weights)
        metrics: Metrics = {"reward": mean_where(summed, jnp.isfinite(summed).astype(summed.dtype))}
        metrics |= reward_metrics(jnp.asarray(values), self.names)
        return {f"eval_{name}": value for name, value in numbers(metrics).items()} | {
            "eval_answers/cut": float(np.mean([not one.ended for one in answers])),
            "eval_prompts": float(len(answers)),
            **{f"eval_{name}": value for name, value in played_numbers(answers).items()},
        }

    # ---------------------------------------------------------------- helpers

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin

    def complain(self, sentence: str, kind: str) -> None:
        """Says each kind of trouble once; the metrics count it."""
        if kind not in self.complained:
            self.complained.add(kind)
            self.say(sentence)


def by_name(names: Sequence[str], rewards: np.ndarray) -> dict[str, float | None]:
    """Rewards as JSON has them: null where missing."""
    return {name: float(value) if np.isfinite(value) else None for name, value in zip(names, rewards, strict=True)}


def groups_of(batch: int, policy: Policy, rollout: Rollout) -> int:
    """The groups of a rollout.

    Raises:
        BadInput: the answers do not divide into groups or updates, or the policy learns nothing from such groups.
    """
    n = rollout.completions
    if batch % (n * rollout.minibatches):
        by = f" and {rollout.minibatches} updates" if rollout.minibatches > 1 else ""
        what = f"data.batch = {batch} answers do not divide into groups of {n}{by}"
        raise BadInput(what, hint=f"make it a multiple of {n * rollout.minibatches}")
    if n < 2 and policy.critic is None and policy.advantages not in ("batch", "greedy"):
        what = f"objective.advantages={policy.advantages} compares the answers to one prompt, and rollout.completions = {n}"
        raise BadInput(what, hint="sample at least 2 answers, or compare with the whole batch: objective.advantages=batch")
    if rollout.resample and (policy.advantages in ("batch", "greedy") or policy.critic is not None):
        raise BadInput("rollout.resample: groups of equal rewards teach too, where they are compared with more", hint="leave it out")
    if policy.kl and policy.kl_in == "reward" and policy.normalize == "each":
        raise BadInput("objective.kl_in=reward and objective.normalize=each: the penalty is no reward to compare", hint="kl_in=loss")
    if policy.loss == "reinforce" and rollout.updates > 1:
        what = f"objective.loss=reinforce is for one update a rollout, and there are {rollout.updates}"
        raise BadInput(what, hint="objective.loss=ppo weighs answers of older weights; or rollout.epochs=1 rollout.minibatches=1")
    return batch // n
