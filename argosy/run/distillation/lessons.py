"""On-policy distillation as a training run: reinforcement learning's engine and parts, with a frozen teacher in every update.

The teacher lies beside the student, sharded by the rules for its own axes. Where it answers itself (`objective.others=teacher`), an
engine reads the same arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from argosy.core.counts import plural
from argosy.data.batch import Batch
from argosy.data.rows.answered import answered_prompts
from argosy.data.rows.prompts import Prompt
from argosy.infer.lm import LM
from argosy.infer.settings import EngineSettings
from argosy.models.parts.weight import merge
from argosy.ops.sorted_distance import FARTHEST
from argosy.rl.rollouts.batches import RolloutBatches
from argosy.rl.rollouts.records import StudentTrainer, TrajectoryRecord
from argosy.rl.rollouts.settings import Rollout
from argosy.rl.rollouts.teacher_signal import first_record, teacher_batches
from argosy.rl.rollouts.teacher_tokens import TeacherTokens
from argosy.run.distillation.across import Both, asking, is_across
from argosy.run.distillation.teacher import ROLE, Teacher
from argosy.run.rl.reinforce import Reinforced, part_shape
from argosy.run.settings import Run
from argosy.train.objectives import WeightedMean
from argosy.train.state import training_graph
from argosy.train.step import model_for
from argosy.weights.build import stored_generation


@dataclass
class Tutored(Reinforced):
    """The assembly of a run whose student answers, and whose teacher is in every update."""

    in_update: ClassVar[tuple[str, ...]] = (ROLE,)
    _teacher: LM | None = field(default=None, init=False, repr=False)

    def begin_rollouts(
        self, say: Callable[[str], None], keep: Callable[[Sequence[TrajectoryRecord]], None], stop: Callable[[], bool]
    ) -> None:
        engine: Any = self.engine(say)
        self.rollouts.begin(StudentTrainer(engine.weights, engine, self.teaching, self.compare), say, keep, stop)

    def teaching(self) -> LM:
        """The teacher as a language model, on the arrays that updates read."""
        if self._teacher is None:
            assert isinstance(self.teacher, Teacher)
            stored = self.teacher.stored
            module = merge(self.roles[ROLE].graph, self.frozen[ROLE])
            module.dtype = self.decided.dtype
            settings = EngineSettings(slots=(self.run.rollout or Rollout()).slots)
            how: Any = {"hub": stored.hub, "generation": stored_generation(stored), "engine_settings": settings}
            self._teacher = LM(stored.config, module, self.tokenizer, **how)
        return self._teacher

    # ---------------------------------------------------------------- evaluation

    def compare(self, state: Any, parts: Sequence[Batch]) -> dict[str, float]:
        """The means over these parts of the objective's metrics and of its `loss`."""
        sums: dict[str, WeightedMean] = {}
        for part in parts:
            found = self._compared(state.params, state.rest, self.frozen[ROLE], self._placed(part))
            sums = {name: mean if not sums else sums[name] + mean for name, mean in found.items()}
        return {name: float(mean.value()) for name, mean in sums.items()}

    @cached_property
    def _compared(self) -> Any:
        graph, teacher, precision = training_graph(self.model), self.roles[ROLE], self.decided.precision

        def compared(params: Any, rest: Any, frozen: Any, part: Any) -> dict[str, WeightedMean]:
            models = {"model": model_for(graph, precision, params, rest), ROLE: model_for(teacher.graph, precision, frozen)}
            made = self.run.objective(models, part, jnp.zeros(()))
            return {**made.metrics, "loss": made.loss}

        with self.tracing():
            shapes = self.shapes.params, self.shapes.rest, teacher.shapes, self.part_shapes()
            return jax.jit(compared, out_shardings=self.places.step).lower(*shapes).compile()

    def first_prompt(self) -> Prompt:
        return first_record(self.rollouts.prompts).prompt

    def badness(self, numbers: Mapping[str, float]) -> float | None:
        if is_across(self.run.objective):
            # The loss is 0 where nothing is compared, and an answer that no text can be made of is as far away as can be.
            return numbers["eval_uld"] + FARTHEST * (1 - numbers["eval_aligned"])
        return numbers["eval_loss"]

    def told(self) -> dict[str, str]:
        """The answers of the run, for its header."""
        run, how = self.run, self.run.rollout
        assert how is not None
        own = run.objective.own
        whose = "the student's" if own == 1 else f"the student's in {own:.0%} of the batches, otherwise the {run.objective.others}'s"
        groups = f", {how.completions} to each prompt" if how.completions > 1 else ""
        updates = f"; {plural(how.updates, 'update')} from each rollout" if how.updates > 1 else ""
        each = f"{plural(run.data.batch, 'answer')} of at most {plural(how.tokens, 'token')}{groups}, {whose}"
        return {"rollout": f"{each}, at temperature {run.objective.sampling:g}{updates}"} | self.processes()


def lessons_of(run: Run, mesh: Any, tokenizer: Any) -> RolloutBatches:
    """The batches of a run. Everything is checked, nothing is sampled.

    Raises:
        UserError: a mistake in prompts or settings.
    """
    how, shape = run.rollout, part_shape(run, mesh)
    assert how is not None
    prompts, held_out = answered_prompts(run.data, tokenizer, run.seed)
    reread = None
    if is_across(run.objective):
        both = Both(run, tokenizer)
        shape = replace(shape, beside=both.places)
        reread = TeacherTokens(both.across, both.places, asking(run, both.across.teacher, prompts))
    return teacher_batches(prompts, held_out, run.objective, how, run.data.batch, shape, run.seed, run.model.vocab, reread)
