"""Whether answers of a rollout that have one prompt share it in gradients. It is decided once and stored with the run, because parts
that are packed either way agree only to rounding."""

from argosy.core.errors import BadInput, Unsupported
from argosy.jobs.run import Run
from argosy.jobs.teacher import kind_of as taught


def decided_sharing(run: Run, platform: str) -> bool:
    """What `rollout.share_prompts` says; otherwise whether it is faster here.

    Raises:
        BadInput, Unsupported: the settings ask for what cannot be.
    """
    how = run.rollout
    if how is None:
        return False
    reason = why_not(run)
    if how.share_prompts and reason is not None:
        raise reason
    if how.share_prompts is not None:
        return how.share_prompts
    # The kernel for TPUs has no such masks, and attention with windows would keep all scores.
    window, T = getattr(run.model, "window", None), run.data.sequence
    near = window is not None and window < T and "L" in getattr(run.model, "spans", "L")
    return reason is None and platform in ("cpu", "gpu") and not near and how.completions > 1


def why_not(run: Run) -> Unsupported | BadInput | None:
    """Why prompts cannot be shared; None if they can."""
    where = "set by rollout.share_prompts"
    if taught(run.objective):
        return BadInput("answers that a teacher is compared on do not share prompts", where=where)
    if run.model.recurrent:
        return Unsupported("a model with recurrent layers, whose states are those of one sequence", where=where)
    if run.mesh.splits("context"):
        return Unsupported("sequences that are split over devices (mesh.context)", where=where)
    return None
