"""Describes the plan of a run in one line, before its first step."""

from typing import Any

from argosy.core.counts import plural
from argosy.observe.readable import format_duration
from argosy.run.plan.figures import Figures
from argosy.run.plan.measured import prices_here
from argosy.run.plan.speed import model_flops, work_of


def plan_line(assembly: Any, steps: int) -> str:
    """Returns the predicted time of a step, what bounds it, and the time of `steps` steps, by the analytic model. Returns "" if the
    speed of the devices is not known, and for runs whose batches come from rollouts, because sampling takes most of their time.
    """
    prices = None if assembly.run.rollout is not None else prices_here(assembly.target.platform, again=False)
    if prices is None:
        return ""
    work = work_of(assembly, prices)
    figures = Figures("model", {}, None, True, sum(work.by_kind.values()), work.traffic, (), work.by_kind)
    step = figures.step_seconds or 0.0
    mfu = ""
    if not assembly.target.shares_memory and step:
        mfu = f", {model_flops(assembly) / step / prices.peak_flops_per_s / assembly.mesh.size:.0%} MFU"
    each = f"{1000 * step:.0f} ms" if step < 1 else format_duration(step)
    whole = f"{format_duration(steps * step)} for {plural(steps, 'step')}"
    return f"about {each} a step{mfu}, {whole}; bound by {figures.bound_by} (an estimate)"
