"""The rollouts of a student in on-policy distillation, with a frozen teacher in every update.

The teacher's weights are on the same devices as the student's, sharded by the rules for the teacher's axes. If the teacher samples
completions too (`objective.others=teacher`), its engine uses the same arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from argosy.core.counts import plural
from argosy.core.progress import Say
from argosy.data.batch import Batch
from argosy.data.rows.answered import answered_prompts
from argosy.infer.lm import LM
from argosy.infer.settings import EngineSettings
from argosy.models.parts.weight import merge
from argosy.ops.sorted_distance import FARTHEST
from argosy.rl.rollouts.records import StudentTrainer
from argosy.rl.rollouts.settings import Rollout
from argosy.rl.rollouts.signals.teacher import first_record, teacher_batches
from argosy.rl.rollouts.signals.teacher_tokens import TeacherTokens
from argosy.run.assembly.assembly import Assembly
from argosy.run.distillation.across import Both, asking, is_across
from argosy.run.distillation.teacher import ROLE, Teacher
from argosy.run.rl.parts import PartArrays, RolloutParts, part_shape
from argosy.run.settings.run import Run
from argosy.train.objectives.loss import WeightedMean
from argosy.train.state import training_graph
from argosy.train.step import model_for
from argosy.weights.build import stored_generation


def student_rollouts(run: Run, mesh: Any, tokenizer: Any) -> RolloutParts:
    """Builds the rollouts of a student. Everything is checked; nothing is sampled.

    Raises:
        UserError: there is a mistake in prompts or settings.
    """
    rollout, shape = run.rollout, part_shape(run, mesh)
    assert rollout is not None
    prompts, held_out = answered_prompts(run.data, tokenizer, run.seed)
    reread = None
    if is_across(run.objective):
        both = Both(run, tokenizer)
        shape = replace(shape, teacher_sequence=both.places)
        reread = TeacherTokens(both.across, both.places, asking(run, both.across.teacher, prompts))
    vocab = run.model.vocab
    batches = teacher_batches(prompts, held_out, run.objective, rollout, run.data.batch, shape, run.seed, vocab, reread)

    def selection(numbers: Mapping[str, float]) -> float:
        if is_across(run.objective):
            # The loss is 0 where nothing is compared, and a completion that no text can be made of is as far away as can be.
            return numbers["eval_uld"] + FARTHEST * (1 - numbers["eval_aligned"])
        return numbers["eval_loss"]

    return RolloutParts(batches, _trainer, lambda: first_record(batches.prompts).prompt, selection, _summary(run), (ROLE,))


def _summary(run: Run) -> dict[str, str]:
    """Describes the completions of a run for its header."""
    rollout, fraction = run.rollout, run.objective.student_fraction
    assert rollout is not None
    others = f"the student's in {fraction:.0%} of the batches, otherwise the {run.objective.others}'s"
    whose = "the student's" if fraction == 1 else others
    groups = f", {rollout.completions} to each prompt" if rollout.completions > 1 else ""
    updates = f"; {plural(rollout.updates, 'update')} from each rollout" if rollout.updates > 1 else ""
    sizes = f"{plural(run.data.batch, 'completion')} of at most {plural(rollout.tokens, 'token')}{groups}, {whose}"
    return {"rollout": f"{sizes}, at temperature {run.objective.sampling:g}{updates}"}


def _trainer(assembly: Assembly, engine: Any, say: Say) -> StudentTrainer:
    programs = StudentPrograms(assembly)
    return StudentTrainer(engine.weights, engine, lambda: programs.teacher, programs.compare)


class StudentPrograms:
    """The teacher as a language model, and the program that compares student and teacher. Both are built on first use."""

    def __init__(self, assembly: Assembly):
        self.assembly, self.arrays = assembly, PartArrays(assembly)

    @cached_property
    def teacher(self) -> LM:
        """Returns the teacher as a language model, with the same arrays that updates read."""
        a = self.assembly
        assert isinstance(a.teacher, Teacher)
        stored = a.teacher.stored
        module = merge(a.roles[ROLE].graph, a.frozen[ROLE])
        module.dtype = a.decided.dtype
        settings = EngineSettings(slots=(a.run.rollout or Rollout()).slots)
        more: Any = {"hub": stored.hub, "generation": stored_generation(stored), "engine_settings": settings}
        return LM(stored.config, module, a.tokenizer, **more)

    def compare(self, state: Any, parts: Sequence[Batch]) -> dict[str, float]:
        """Computes the `loss` and the metrics of the objective, as means over these micro-batches.

        Args:
            state: the training state.
        """
        sums: dict[str, WeightedMean] = {}
        for part in parts:
            means = self._compared(state.params, state.rest, self.assembly.frozen[ROLE], self.arrays.place(part))
            sums = {name: mean if not sums else sums[name] + mean for name, mean in means.items()}
        return {name: float(mean.value()) for name, mean in sums.items()}

    @cached_property
    def _compared(self) -> Any:
        a, graph, teacher = self.assembly, training_graph(self.assembly.model), self.assembly.roles[ROLE]

        def compared(params: Any, rest: Any, frozen: Any, part: Any) -> dict[str, WeightedMean]:
            precision = a.decided.precision
            models = {"model": model_for(graph, precision, params, rest), ROLE: model_for(teacher.graph, precision, frozen)}
            result = a.run.objective(models, part, jnp.zeros(()))
            return {**result.metrics, "loss": result.loss}

        with a.tracing():
            shapes = a.shapes.params, a.shapes.rest, teacher.shapes, self.arrays.shapes()
            return jax.jit(compared, out_shardings=a.places.step).lower(*shapes).compile()
