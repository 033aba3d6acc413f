"""`argosy autotune`: measures the implementations of ops on the shapes of a run, and stores the fastest for new runs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from pydantic import Field

from argosy.core.errors import BadInput, Unsupported
from argosy.core.settings import Settings
from argosy.ops.attention import ATTENTION
from argosy.ops.attention.case import AttentionCase
from argosy.ops.grouped import GROUPED_MATMUL
from argosy.ops.grouped.case import GroupedCase
from argosy.ops.op import Case, Op, recorded_cases
from argosy.ops.tuning import Measurement, measure, winner

Say = Callable[[str], None]
OPS: dict[str, Op] = {op.key: op for op in (ATTENTION, GROUPED_MATMUL)}
# (rows, tokens, query heads, key heads, size of a head), and (rows, experts, width, width within an expert).
USUAL_ATTENTION = ((16, 256, 8, 4, 64), (4, 1024, 16, 8, 64), (1, 4096, 8, 2, 128))
USUAL_EXPERTS = ((1024, 8, 512, 1024), (2048, 64, 256, 512))


class AutotuneSettings(Settings):
    """What is measured."""

    ops: str = "attention,experts"
    """The ops, with commas between: attention, experts."""
    out: str | None = None
    """A file for a copy of all winners, to be read elsewhere as $ARGOSY_TUNED."""
    seconds: float = Field(1.0, gt=0)
    """Time for the pairs of each implementation, beside compilation. At least five pairs run."""


def tuned_document(recipe: str | None, words: Sequence[str], settings: AutotuneSettings, say: Say) -> dict[str, Any]:
    """Measures implementations, stores the fastest, and returns all measurements as a JSON object.

    Raises:
        UserError: there is a mistake in the settings, or the run cannot be tuned.
    """
    from argosy.parallel.target import Target
    from argosy.run.assembly.winners import stored_winners, tuned_device, winners_file, write_winners

    ops = settings.ops.split(",")
    if unknown := [op for op in ops if op not in OPS]:
        raise BadInput(f"there is no op `{unknown[0]}` to tune", where="set by ops", hint=f"ops={','.join(OPS)}")
    cases = [case for case in (run_cases(recipe, words) if recipe else usual_cases()) if case.op in ops]
    if not cases:
        raise BadInput(f"{recipe} has none of the ops {settings.ops}", hint="`argosy autotune` alone measures usual shapes")
    device, memory, file = tuned_device(), Target.here().memory_bytes, winners_file()
    winners = stored_winners(file)
    mine = winners.setdefault(device, {})
    rows = []
    for case in cases:
        say(f"measuring {case.name} ...")
        timings = measure(OPS[case.op], case, settings.seconds, memory)
        best = winner(timings)
        mine.pop(case.name, None)
        if best is not None:
            mine[case.name] = _entry(best, timings[0])
        winner_name = best and best.implementation
        rows.append({"case": case.name, "op": case.op, "winner": winner_name, "implementations": [*map(asdict, timings)]})
    places = [path for path in (file, settings.out and Path(settings.out)) if path]
    for path in places:
        write_winners(path, winners)
    return {"device": device, "cases": rows, "written": [str(path) for path in places]}


def run_cases(recipe: str, words: Sequence[str]) -> list[Case]:
    """Returns the cases (ops and shapes) of the update of a run on this device.

    Raises:
        Unsupported: the run has several devices, or rollouts.
    """
    from argosy.jobs.plan.training import plan_reading
    from argosy.run.assembly.assemble import assemble
    from argosy.run.assembly.decided import Decided

    run = plan_reading(recipe, words).value
    if run.rollout is not None:
        raise Unsupported("runs with rollouts are not tuned: their updates are several programs")
    assembly = assemble(run, Decided.here(run), reads=False)
    if assembly.mesh.size > 1:
        raise Unsupported(f"autotune measures one device, and this run has {assembly.mesh.size}", hint="mesh.data=1 mesh.fsdp=1")
    with recorded_cases() as cases:
        assembly.lower()
    return list(cases.values())


def usual_cases() -> list[Case]:
    """Returns cases with the shapes of small language models and mixtures of experts, in the type in which runs compute here."""
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    attention = [
        AttentionCase((B, T, N, H), (B, T, K, H), (B, T, K, H), dtype, segments=True) for B, T, N, K, H in USUAL_ATTENTION
    ]
    return [*attention, *(GroupedCase(rows, (E, D, M), dtype, dtype) for rows, E, D, M in USUAL_EXPERTS)]


def _entry(best: Measurement, default: Measurement) -> dict[str, Any]:
    return {
        "implementation": best.implementation,
        "default": default.implementation,
        "ratio": round(best.ratio or 0.0, 3),
        "error": best.error,
        "jax": jax.__version__,
    }
