"""Reinforcement learning as a training run: what its assembly does otherwise than that of other objectives.

The engine and the trainer are one model on the same devices, unless `rollout.devices` says otherwise: before a rollout the engine's
module is given the state's own arrays, without a copy; after it the engine frees its cache, and the arrays that it still names are
given away by the update. With `rollout.processes` the engines are in other processes (`run.rl.rollout_workers`). An update computes as
many parts as a rollout's answers fill, by one program.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.process.cores import core_count
from argosy.data.batch import Batch, Fields
from argosy.data.rows.prompts import Prompt, lengths_of, prompts_of
from argosy.observe.goodput import Clock
from argosy.observe.metrics import Metrics, conversation
from argosy.observe.readable import one_line
from argosy.parallel.place import batch_sharding, row_shares
from argosy.rl.environments.settings import environment_summary, open_table
from argosy.rl.policy.objective import ROWS, critic_values, logps_of, shared_of, values_at
from argosy.rl.rewards.functions import open_rewards
from argosy.rl.rollouts.batches import RolloutBatches
from argosy.rl.rollouts.packing import PartShape, RolloutBatch
from argosy.rl.rollouts.records import NoRewards, PolicyTrainer, TrajectoryRecord
from argosy.rl.rollouts.reward_signal import reward_batches
from argosy.rl.rollouts.settings import Rollout
from argosy.run.assembly import Assembly
from argosy.run.decided import Decided
from argosy.run.frozen import reference
from argosy.run.hooks import Saver, is_stopping
from argosy.run.memory import shapes_of
from argosy.run.rl.rollout_engine import RolloutEngine
from argosy.run.rl.rollout_workers import RolloutWorkers
from argosy.run.rl.rollout_workers import samplers_summary as processes_of
from argosy.run.settings import Run
from argosy.run.view import View
from argosy.train.guard import guarded
from argosy.train.state import TrainState, training_graph
from argosy.train.step import make_parts, model_for

# Answers of a rollout that are kept in the run directory and shown.
KEPT = 16
# Of so many rollouts an answer of one is shown.
SHOWN = 10
# Seconds for looking at the lengths of prompts before the first step.
LOOKING_S = 2.0
# Processes for reward functions, unless the settings say otherwise.
MOST_WORKERS = 8
SIZES = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "alias_size_in_bytes")


@dataclass(frozen=True)
class PlacedBatch:
    """An update's parts on the devices, and the numbers that are logged with it."""

    parts: Sequence[Any]
    numbers: Mapping[str, float]


@dataclass
class Reinforced(Assembly):
    """The assembly of a run whose batches are rollouts."""

    # Which tokens end an answer: config.json and generation_config.json of the model that the weights came from.
    hub: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    # The frozen models that an update reads. A policy's reference is read once a rollout instead.
    in_update: ClassVar[tuple[str, ...]] = ()
    _workers: RolloutWorkers | None = field(default=None, init=False, repr=False)

    def close(self) -> None:
        super().close()
        if self._workers is not None:
            self._workers.close()

    @property
    def rollouts(self) -> RolloutBatches:
        assert isinstance(self.batches, RolloutBatches)
        return self.batches

    # ---------------------------------------------------------------- shapes

    @property
    def fields(self) -> Fields:
        """The arrays of a part."""
        return {**self.run.objective.reads(), **shared_of(self.rollouts.shape)}

    @property
    def scored(self) -> tuple[str, ...]:
        """Those that a part's log-probabilities are computed from."""
        return (*ROWS, *shared_of(self.rollouts.shape), "places")

    def part_shapes(self, only: Sequence[str] | None = None) -> dict[str, Any]:
        """The arrays of a part: rows are split over devices, numbers of answers are everywhere."""
        shape = self.rollouts.shape
        chosen = {name: self.fields[name] for name in only or self.fields}
        made = shapes_of(chosen, shape.rows, shape.sequence, 1, shape.sizes, None)
        return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._place_of(name)) for name, a in made.items()}

    def _place_of(self, name: str) -> Any:
        field = self.fields.get(name)
        return batch_sharding(self.mesh) if field is not None and field.axes.startswith("B") else self.places.step

    def _placed(self, part: Batch) -> dict[str, Any]:
        return {name: jax.device_put(a, self._place_of(name)) for name, a in part.items()}

    def place(self, batch: RolloutBatch) -> PlacedBatch:
        return PlacedBatch([self._placed(part) for part in batch.parts], batch.numbers)

    # ---------------------------------------------------------------- programs

    def compile(self) -> "RolloutUpdate":
        """Compiles the programs of an update for the shape of a part."""
        graph, read = training_graph(self.model), {name: self.roles[name] for name in self.in_update}
        how: Any = {"precision": self.decided.precision, "roles": {name: role.graph for name, role in read.items()}}
        add, finish = make_parts(graph, self.run.objective, self.optimizer, self.rate, **how)
        finish = guarded(finish, self.run.guard)
        shapes, part, key = self.shapes, self.part_shapes(), jax.eval_shape(lambda: jax.random.key(0))
        frozen = {name: role.shapes for name, role in read.items()}
        with self.tracing():
            sums = jax.eval_shape(add, shapes.params, shapes.rest, frozen, part, key)
            places = (self.places.params, jax.tree.map(lambda _: self.places.step, sums[1]))
            sums = jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), sums, places)
            first = jax.jit(add, out_shardings=places).lower(shapes.params, shapes.rest, frozen, part, key).compile()
            further = jax.jit(add, donate_argnums=5, out_shardings=places)
            further = further.lower(shapes.params, shapes.rest, frozen, part, key, sums).compile()
            moved = frozenset(sums[1].updates)
            small = replace(shapes, rest={a: shapes.rest[a] for a in moved})
            out = replace(self.places, rest={a: self.places.rest[a] for a in moved}), None
            last = jax.jit(finish, donate_argnums=0, out_shardings=out).lower(small, sums).compile()
        waiting = sum(
            math.prod(place.shard_shape(a.shape)) * a.dtype.itemsize
            for a, place in zip(jax.tree.leaves(shapes.optimizer), jax.tree.leaves(self.places.optimizer), strict=True)
        )
        return RolloutUpdate(first, further, last, moved, waiting)

    def with_frozen(self, program: Any) -> Any:
        read = {name: self.frozen[name] for name in self.in_update}
        return lambda state, batch: program(state, batch, read)

    def begin_rollouts(
        self, say: Callable[[str], None], keep: Callable[[Sequence[TrajectoryRecord]], None], stop: Callable[[], bool]
    ) -> None:
        """Lends the rollouts what they need of this run, before its first step."""
        engine = self.engine(say)
        trainer = PolicyTrainer(
            engine.weights,
            engine,
            lambda state, rows: self.logps(state.params, state.rest, rows),
            lambda state, rows: self.logps(*self.reference_of(state), rows),
            self.values,
        )
        if (table := getattr(self.rollouts.signal, "table", None)) is not None:
            table.environments.say = say
        self.say_lengths(say)
        self.rollouts.begin(trainer, say, keep, stop)

    def engine(self, say: Callable[[str], None]) -> RolloutEngine | RolloutWorkers:
        """What answers, in this process or in others, which it starts."""
        how, shapes = self.run.rollout or Rollout(), self.shapes.params | self.shapes.rest
        made = RolloutEngine(
            self.run.model, self.graph, shapes, self.decided.dtype, self.tokenizer, how, self.hub, self.generation
        )
        if how.processes is None:
            return made
        self._workers = RolloutWorkers(made, say)
        return self._workers

    def processes(self) -> dict[str, str]:
        """The processes that sample, for the header."""
        how, shapes = self.run.rollout or Rollout(), self.shapes.params | self.shapes.rest
        return {} if how.processes is None else {"samplers": processes_of(how, shapes)}

    def say_lengths(self, say: Callable[[str], None]) -> None:
        """Reports prompts without room for an answer before the first of them is reached."""
        longest = self.run.data.sequence - (self.run.rollout or Rollout()).tokens
        held_out = self.rollouts.held_out if self.run.eval.batches else None
        for whose, prompts in (("", self.rollouts.prompts), ("held out: ", held_out)):
            if prompts is not None:
                count = len(prompts) if prompts.most is None else min(len(prompts), prompts.most)
                if words := str(lengths_of(prompts, count, longest, LOOKING_S)):
                    say(f"{whose}{words}")

    def logps(self, params: Any, rest: Any, part: Batch) -> np.ndarray:
        """The log-probabilities of the tokens of a part's answers by these weights, [S L]."""
        return np.asarray(self._scorer(params, rest, self._placed({name: part[name] for name in self.scored})))

    @cached_property
    def _scorer(self) -> Any:
        how, graph = self.run.objective, training_graph(self.model)

        def logps(params: Any, rest: Any, part: Any) -> Any:
            return logps_of(how, model_for(graph, self.decided.precision, params, rest), part)[0]

        with self.tracing():
            shapes = self.shapes.params, self.shapes.rest, self.part_shapes(self.scored)
            return jax.jit(logps, out_shardings=self.places.step).lower(*shapes).compile()

    def reference_of(self, state: TrainState) -> tuple[Any, Any]:
        """The reference's weights: those of the first step, over the base that all share."""
        first = self.frozen[reference.ROLE]
        return {a: first.get(a, own) for a, own in state.params.items()}, {a: first.get(a, own) for a, own in state.rest.items()}

    def values(self, state: TrainState, rows: Batch) -> tuple[np.ndarray, np.ndarray]:
        """The critic's values of the tokens of a part's answers [S L], and after their last token [S]."""
        found = self._values(state.params, state.rest, self._placed({name: rows[name] for name in (*self.scored, "ends")}))
        return np.asarray(found[0]), np.asarray(found[1])

    @cached_property
    def _values(self) -> Any:
        graph, place = training_graph(self.model), self.places.step

        def values(params: Any, rest: Any, part: Any) -> Any:
            found, _ = critic_values(model_for(graph, self.decided.precision, params, rest), part)
            return values_at(found, part["places"]), found.reshape(-1)[part["ends"]]

        with self.tracing():
            ends = jax.ShapeDtypeStruct((self.rollouts.shape.answers,), jnp.int32, sharding=place)
            shapes = self.shapes.params, self.shapes.rest, self.part_shapes(self.scored) | {"ends": ends}
            return jax.jit(values, out_shardings=(place, place)).lower(*shapes).compile()

    # ---------------------------------------------------------------- evaluation

    def badness(self, numbers: Mapping[str, float]) -> float | None:
        """By which evaluations are compared: less is better. None: every reward was missing, which has been said."""
        return -numbers["eval_reward"] if "eval_reward" in numbers else None

    def first_prompt(self) -> Prompt:
        """What the run asks first, to be shown."""
        (first,) = self.rollouts.prompts(0, 1)
        return first

    def told(self) -> dict[str, str]:
        """The rollouts and rewards of the run, for its header."""
        assert self.run.rollout is not None
        made = rollout_summary(self.run, self.run.rollout)
        made["rollout"] += "; answers in one row share their prompt" if self.rollouts.shape.shared else ""
        return made | self.processes()


@dataclass(frozen=True)
class RolloutUpdate:
    """The compiled update of a state by a rollout's parts.

    moved: frozen weights that change by a rule. waiting: bytes of the optimizer's state on a device.
    """

    first: Any
    further: Any
    last: Any
    moved: frozenset[str]
    waiting: int

    def __call__(self, state: TrainState, batch: PlacedBatch, frozen: Mapping[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        sums: Any = None
        key = jax.random.fold_in(state.key, state.step)
        for i, part in enumerate(batch.parts):
            own = jax.random.fold_in(key, i)
            args = (state.params, state.rest, frozen, part, own)
            sums = self.first(*args) if sums is None else self.further(*args, sums)
        small = replace(state, rest={a: state.rest[a] for a in self.moved})
        new, metrics = self.last(small, sums)
        return replace(new, rest=state.rest | new.rest), dict(metrics) | dict(batch.numbers)

    def memory_analysis(self) -> Any:
        """That of the program of a part. The optimizer's state waits beside it."""
        own = self.further.memory_analysis()
        sizes = {name: int(getattr(own, name, 0) or 0) for name in SIZES}
        sizes["argument_size_in_bytes"] += self.waiting
        return SimpleNamespace(**sizes)


def part_shape(run: Run, mesh: Any, shared: bool = False) -> PartShape:
    """The shape of the parts that answers are packed into. shared: answers to one prompt share it.

    Raises:
        BadInput: their rows do not divide over the devices.
    """
    how, shares = run.rollout, row_shares(mesh)
    assert how is not None
    rows = how.rows_over(shares)
    if rows % shares:
        what = f"rollout.rows = {rows} does not divide over {plural(shares, 'device')}"
        raise BadInput(what, hint=f"make it a multiple of {shares}")
    return PartShape(rows, run.data.sequence, how.tokens, shared=shared)


def rollouts_of(run: Run, decided: Decided, mesh: Any, tokenizer: Any) -> RolloutBatches:
    """The rollouts of a run. Everything is checked, nothing is sampled.

    Raises:
        UserError: a mistake in prompts, rewards or settings.
    """
    how, shape = run.rollout, part_shape(run, mesh, decided.shared_prompts)
    assert how is not None
    prompts, held_out = prompts_of(run.data, tokenizer, run.seed)
    workers = how.workers or min(core_count(), MOST_WORKERS)
    table = open_table(run.environment, prompts, held_out) if run.environment.played else None
    judge: Any = NoRewards()
    try:
        if run.reward:
            judge = open_rewards(run.reward, workers, columns=prompts.names, say=lambda text: made.signal.say(text))
        made = reward_batches(prompts, held_out, run.objective, how, run.data.batch, shape, judge, run.seed, table=table)
    except BaseException:
        judge.close()
        if table is not None:
            table.close()
        raise
    return made


def rollout_summary(run: Run, how: Rollout) -> dict[str, str]:
    """The rollouts and rewards of a run, for its header."""
    n, answers = how.completions, run.data.batch
    each = f"{plural(answers, 'answer')} of at most {plural(how.tokens, 'token')}: {n} to each of {plural(answers // n, 'prompt')}"
    updates = plural(how.updates, "update") if how.updates > 1 else "an update"
    rewards = ", ".join(f"{one.of}{'' if one.weight == 1 else f' x {one.weight:g}'}" for one in run.reward)
    where = "" if how.devices is None else f"; sampled on {plural(how.devices, 'device')} of their own"
    where += f", {plural(how.ahead, 'rollout')} ahead" if how.ahead else ""
    rounded = ", weights in int8" if how.weights == "int8" else ""
    made = f"{each}, at temperature {run.objective.temperature:g}{rounded}; {updates} from each rollout{where}"
    played = {"environment": environment_summary(run.environment)} if run.environment.played else {}
    return {"rollout": made, **played, "rewards": rewards or "the environment's"}


class AnswersEvaluation:
    """Evaluates greedy answers to held-out prompts. The best checkpoints are those of the highest reward, or of what else
    `badness` says."""

    def __init__(self, assembly: Reinforced, run: Run, saver: Saver, metrics: Metrics, view: View, clock: Clock):
        self.assembly, self.run, self.saver = assembly, run, saver
        self.metrics, self.view, self.clock = metrics, view, clock

    def __call__(self, now: Any) -> None:
        if is_stopping(now, self.assembly.steps):
            return
        most = self.run.eval.batches * self.run.data.batch
        numbers = self.assembly.rollouts.evaluated(now.state, most)
        if not numbers:
            return
        self.metrics.write({"step": now.step} | numbers)
        self.view.evaluation(now.step, numbers)
        badness = self.assembly.badness(numbers)
        if badness is not None:
            with self.clock("checkpoint"):
                self.saver.evaluated(now, badness)


def keeper(lines: Metrics, view: View) -> Callable[[Sequence[TrajectoryRecord]], None]:
    """Writes some answers of each rollout into a file of the run directory, a line each, and shows the best of those now and then."""

    def keep(told: Sequence[TrajectoryRecord]) -> None:
        for one in told[:KEPT]:
            lines.write({name: item for name, item in asdict(one).items() if name != "turns" or item is not None})
        best = max(told[:KEPT], key=lambda one: one.advantage)
        if best.rollout % SHOWN == 1:
            asked = best.prompt if isinstance(best.prompt, str) else str(best.prompt[-1].get("content", ""))
            rewards, answer = f", rewards {rewards_text(best.rewards)}" if best.rewards else "", one_line(conversation(asdict(best)))
            view.say(f"rollout {best.rollout}{rewards}: {one_line(asked)} -> {answer}")

    return keep


def rewards_text(rewards: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'none' if value is None else f'{value:.3g}'}" for name, value in rewards.items())
