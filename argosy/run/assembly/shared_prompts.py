"""Decides whether completions of one prompt share one copy of it in updates. The choice is stored with the run, because both ways agree
only to rounding.
"""

from typing import Any

from argosy.core.errors import BadInput, Unsupported
from argosy.run.settings.run import Run
from argosy.train.objectives.distillation.teacher import ROLE as TEACHER


def decided_sharing(run: Run, platform: str) -> bool:
    """Returns the setting `rollout.share_prompts` if it is set. The default is whether sharing is faster here.

    Raises:
        BadInput, Unsupported: the settings ask for sharing that is not possible.
    """
    rollout = run.rollout
    if rollout is None:
        return False
    reason = _why_not(run)
    if rollout.share_prompts and reason is not None:
        raise reason
    if rollout.share_prompts is not None:
        return rollout.share_prompts
    # The kernel for TPUs has no such masks, and attention with windows would keep all scores.
    window, T = getattr(run.model, "window", None), run.data.sequence
    near = window is not None and window < T and "L" in getattr(run.model, "spans", "L")
    return reason is None and platform in ("cpu", "gpu") and not near


def resumed_on(shared: bool, platform: str) -> str:
    """Returns a note for a run that shares prompts and resumes on this platform; "" if none is needed."""
    if not shared or platform != "tpu":
        return ""
    return "answers share their prompts, as the run began; no kernel for TPUs has these masks, so all scores of a row are in memory"


def _why_not(run: Run) -> Unsupported | BadInput | None:
    """Returns the error that explains why a run cannot share prompts; None if it can."""
    why: dict[str, Any] = {"where": "set by rollout.share_prompts", "hint": "leave rollout.share_prompts out"}
    if TEACHER in run.objective.roles:
        return BadInput("answers that a teacher is compared on cannot share prompts", **why)
    if run.model.recurrent:
        return Unsupported("answers cannot share prompts in a model with recurrent layers: a state is that of one sequence", **why)
    if run.rollout is not None and run.rollout.completions == 1:
        return BadInput("each prompt has one answer (rollout.completions), which shares it with none", **why)
    return None
