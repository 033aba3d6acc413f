"""Builds the rollouts of a policy, and the programs that compute log-probabilities and values of completions by the trainer's
models."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.core.counts import plural
from argosy.core.process.cores import core_count
from argosy.core.progress import Say
from argosy.data.batch import Batch
from argosy.data.rows.prompts import Prompt, lengths_of, prompts_of
from argosy.rl.environments.settings import environment_summary, open_table
from argosy.rl.policy.objective import critic_values, logps_of, values_at
from argosy.rl.rewards.functions import open_rewards
from argosy.rl.rollouts.batches import RolloutBatches
from argosy.rl.rollouts.records import NoRewards, PolicyTrainer
from argosy.rl.rollouts.settings import Rollout
from argosy.rl.rollouts.signals.rewards import reward_batches
from argosy.run.assembly.assembly import Assembly
from argosy.run.assembly.decided import Decided
from argosy.run.frozen import reference
from argosy.run.rl.parts import PartArrays, RolloutParts, part_shape, rollouts_of
from argosy.run.settings.run import Run
from argosy.train.state import TrainState, training_graph
from argosy.train.step import model_for

# Seconds for looking at the lengths of prompts before the first step.
LOOKING_S = 2.0
# Processes for reward functions, unless the settings say otherwise.
MOST_WORKERS = 8


def policy_rollouts(run: Run, decided: Decided, mesh: Any, tokenizer: Any) -> RolloutParts:
    """Builds the rollouts of a policy. Everything is checked; nothing is sampled.

    Raises:
        UserError: there is a mistake in prompts, rewards or settings.
    """
    batches = _reward_batches(run, decided, mesh, tokenizer)
    summary = _summary(run)
    summary["rollout"] += "; completions in one row share their prompt" if batches.shape.shared else ""

    def first_prompt() -> Prompt:
        (prompt,) = batches.prompts(0, 1)
        return prompt

    return RolloutParts(batches, _trainer, first_prompt, _selection, summary)


def _reward_batches(run: Run, decided: Decided, mesh: Any, tokenizer: Any) -> RolloutBatches:
    rollout, shape = run.rollout, part_shape(run, mesh, decided.shared_prompts)
    assert rollout is not None
    prompts, held_out = prompts_of(run.data, tokenizer, run.seed)
    workers = rollout.workers or min(core_count(), MOST_WORKERS)
    table = open_table(run.environment, prompts, held_out) if run.environment.played else None
    judge: Any = NoRewards()
    try:
        if run.reward:
            judge = open_rewards(run.reward, workers, columns=prompts.names, say=lambda text: batches.signal.say(text))
        batches = reward_batches(prompts, held_out, run.objective, rollout, run.data.batch, shape, judge, run.seed, table=table)
    except BaseException:
        judge.close()
        if table is not None:
            table.close()
        raise
    return batches


def _selection(numbers: Mapping[str, float]) -> float | None:
    return -numbers["eval_reward"] if "eval_reward" in numbers else None


def _summary(run: Run) -> dict[str, str]:
    """Describes the rollouts and rewards of a run for its header."""
    rollout, completions = run.rollout, run.data.batch
    assert rollout is not None
    n, prompts = rollout.completions, plural(completions // rollout.completions, "prompt")
    sizes = f"{plural(completions, 'completion')} of at most {plural(rollout.tokens, 'token')}: {n} to each of {prompts}"
    updates = plural(rollout.updates, "update") if rollout.updates > 1 else "an update"
    rewards = ", ".join(f"{each.of}{'' if each.weight == 1 else f' x {each.weight:g}'}" for each in run.reward)
    where = "" if rollout.devices is None else f"; sampled on {plural(rollout.devices, 'device')} of their own"
    where += f", {plural(rollout.ahead, 'rollout')} ahead" if rollout.ahead else ""
    rounded = ", weights in int8" if rollout.weights == "int8" else ""
    line = f"{sizes}, at temperature {run.objective.temperature:g}{rounded}; {updates} from each rollout{where}"
    environment = {"environment": environment_summary(run.environment)} if run.environment.played else {}
    return {"rollout": line, **environment, "rewards": rewards or "the environment's"}


# ---------------------------------------------------------------- what the trainer computes


def _trainer(assembly: Assembly, engine: Any, say: Say) -> PolicyTrainer:
    if (table := getattr(rollouts_of(assembly).batches.signal, "table", None)) is not None:
        table.environments.say = say
    _say_lengths(assembly, say)
    programs = PolicyPrograms(assembly)
    return PolicyTrainer(engine.weights, engine, programs.trained_logps, programs.reference_logps, programs.values)


def _say_lengths(assembly: Assembly, say: Say) -> None:
    """Reports the prompts that leave no room for a completion, before training reaches the first of them."""
    run, batches = assembly.run, rollouts_of(assembly).batches
    longest = run.data.sequence - (run.rollout or Rollout()).tokens
    held_out = batches.held_out if run.eval.batches else None
    for label, prompts in (("", batches.prompts), ("held out: ", held_out)):
        if prompts is not None:
            count = len(prompts) if prompts.most is None else min(len(prompts), prompts.most)
            if words := str(lengths_of(prompts, count, longest, LOOKING_S)):
                say(f"{label}{words}")


class PolicyPrograms:
    """Computes log-probabilities and values of the completion tokens of a micro-batch. Programs are compiled on first use."""

    def __init__(self, assembly: Assembly):
        self.assembly, self.arrays = assembly, PartArrays(assembly)

    def trained_logps(self, state: TrainState, part: Batch) -> np.ndarray:
        """Returns log-probabilities under the trained model, [S L]."""
        return self._logps(state.params, state.rest, part)

    def reference_logps(self, state: TrainState, part: Batch) -> np.ndarray:
        """Returns log-probabilities under the initial weights, [S L]. The frozen base is shared with the trained model."""
        first = self.assembly.frozen[reference.ROLE]
        params, rest = ({a: first.get(a, leaf) for a, leaf in leaves.items()} for leaves in (state.params, state.rest))
        return self._logps(params, rest, part)

    def values(self, state: TrainState, part: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Returns the critic's values before the tokens, [S L], and after the last token of each completion, [S]."""
        tokens, ends = self._critic(state.params, state.rest, self.arrays.place_scored(part, "ends"))
        return np.asarray(tokens), np.asarray(ends)

    def _logps(self, params: Any, rest: Any, part: Batch) -> np.ndarray:
        return np.asarray(self._scorer(params, rest, self.arrays.place_scored(part)))

    @cached_property
    def _scorer(self) -> Any:
        a, graph = self.assembly, training_graph(self.assembly.model)

        def logps(params: Any, rest: Any, part: Any) -> Any:
            return logps_of(a.run.objective, model_for(graph, a.decided.precision, params, rest), part)[0]

        with a.tracing():
            shapes = a.shapes.params, a.shapes.rest, self.arrays.shapes(self.arrays.scored)
            return jax.jit(logps, out_shardings=a.places.step).lower(*shapes).compile()

    @cached_property
    def _critic(self) -> Any:
        a, graph, place = self.assembly, training_graph(self.assembly.model), self.assembly.places.step

        def values(params: Any, rest: Any, part: Any) -> Any:
            every, _ = critic_values(model_for(graph, a.decided.precision, params, rest), part)
            return values_at(every, part["places"]), every.reshape(-1)[part["ends"]]

        with a.tracing():
            ends = jax.ShapeDtypeStruct((self.arrays.shape.answers,), jnp.int32, sharding=place)
            shapes = a.shapes.params, a.shapes.rest, self.arrays.shapes(self.arrays.scored) | {"ends": ends}
            return jax.jit(values, out_shardings=(place, place)).lower(*shapes).compile()
