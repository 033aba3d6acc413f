"""The batches of a run: rows of stored data, or rollouts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from argosy.data import pipeline
from argosy.data.batch import Batches
from argosy.data.distillation.across import FIELDS as TEACHER_FIELDS
from argosy.data.tokenizers.load import Tokenizer
from argosy.parallel.place import rows_here
from argosy.run.assembly.assembly import Updates
from argosy.run.assembly.decided import Decided
from argosy.run.assembly.updates import BatchUpdates
from argosy.run.distillation import teacher_cache
from argosy.run.distillation.across import Both, is_across
from argosy.run.distillation.teacher import ROLE as TEACHER
from argosy.run.frozen import reference
from argosy.run.settings.run import Run

if TYPE_CHECKING:
    from argosy.run.rl.parts import RolloutParts


@dataclass(frozen=True)
class DataParts:
    """The parts of a run that its data decides; `Assembly` says what each is."""

    batches: Batches
    evals: Batches | None
    updates: Updates
    rollouts: "RolloutParts | None" = None


def stored_data(run: Run, mesh: Mesh, source: Any, tokenizer: Tokenizer | None, progress: Callable[..., Any] | None) -> DataParts:
    """Rows of stored data, with what their objective reads beside them.

    Raises:
        UserError: a mistake in data or settings.
    """
    share, shares = rows_here(mesh, run.data.batch)
    cached_teacher = run.objective.roles.get(TEACHER) == "cached"
    both = Both(run, tokenizer) if is_across(run.objective) else None
    fields = (teacher_cache if cached_teacher else reference).asked_of_data(run.objective)
    fields = {name: field for name, field in fields.items() if both is None or name not in TEACHER_FIELDS}
    common: dict[str, Any] = {
        "vocab": run.model.vocab,
        "seed": run.seed,
        "progress": progress,
        "process": share,
        "processes": shares,
        "source": source,
        "fields": fields,
        "rows_per_group": run.objective.needs.rows_per_group,
    }

    def completed(batches: Any) -> Any:
        if run.objective.roles.get(reference.ROLE) == "cached":
            batches = reference.WithReference(batches)
        if cached_teacher:
            batches = teacher_cache.WithTeacher(batches, run.objective.top)
        return batches if both is None else both(batches)

    batches = completed(pipeline.build(run.data, tokenizer, **common))
    evals = None
    if run.eval.batches and pipeline.holds_out(run.data, source):
        evals = completed(pipeline.eval_batches(run.data, tokenizer, limit=run.eval.batches, **common))
    return DataParts(batches, evals, BatchUpdates())


def sampled_data(run: Run, decided: Decided, mesh: Mesh, tokenizer: Tokenizer) -> DataParts:
    """Rollouts, which rewards or a teacher turn into batches.

    Raises:
        UserError: a mistake in prompts, rewards or settings.
    """
    from argosy.run.rl.updates import RolloutUpdates

    if run.objective.roles.get(TEACHER):
        from argosy.run.distillation.student import student_rollouts

        rollouts = student_rollouts(run, mesh, tokenizer)
    else:
        from argosy.run.rl.policy import policy_rollouts

        rollouts = policy_rollouts(run, decided, mesh, tokenizer)
    return DataParts(rollouts.batches, None, RolloutUpdates(rollouts.roles), rollouts)
