"""How the share of a training step that waits for communication grows from 64 to 4,096 chips of a TPU v5p, by the analytic model.

    plan_scaling.py [svg=docs/images/plan-scaling.svg]

A dense model (Llama 2 70B, `mesh.fsdp`) and one with experts (Mixtral 8x7B, `mesh.fsdp` x `mesh.expert=8`), with two sequences of
4,096 tokens a chip, and with 1,024 sequences in all. The largest slices have more chips, which share a sequence by `mesh.tensor`.
"""

import math
import sys
from collections.abc import Sequence

from curves import picture, picture_of

from argosy.jobs.plan.training import PlanSettings, plan
from argosy.observe.report.charts import Series

CHIPS = (64, 128, 256, 512, 1024, 2048, 4096)
MODELS = {"Llama 2 70B": ("llama2-70b", ()), "Mixtral 8x7B": ("mixtral-8x7b", ("mesh.expert=8",))}
KINDS = dict(zip(MODELS, ("dense", "experts")))
# Sequences of a batch, where they do not grow with the chips, and those of a chip, where they do.
FIXED, EACH = 1024, 2


def exposed_share(model: str, more: Sequence[str], chips: int, fixed: bool) -> tuple[float, float]:
    """The share of a step that waits for collectives, and MFU."""
    rows = FIXED if fixed else EACH * chips
    tensor = max(1, chips // rows)
    parts = max(1, rows // (EACH * chips))
    words = [f"model={model}", "data.sequence=4096", f"data.batch={rows}", f"accumulate={parts}", f"mesh.tensor={tensor}", *more]
    settings = PlanSettings(device=f"v5p-{2 * chips}", compile=False)
    prediction = plan("pretrain", [*words, "execution.remat=full"], settings, lambda _: None)
    exposed = sum(collective["exposed_seconds"] for collective in prediction["collectives"])
    return exposed / prediction["step_seconds"], prediction["mfu"]


def main(words: list[str]) -> None:
    path, rest = picture_of(words)
    if rest:
        raise SystemExit(f"unknown words {' '.join(rest)}: {__doc__}")
    lines: dict[str, list[tuple[float, float]]] = {}
    print(f"{'model':14} {'sequences':>12} {'chips':>6} {'exposed':>8} {'MFU':>6}")
    for name, (model, more) in MODELS.items():
        for fixed in (False, True):
            batch = f"{FIXED:,} in all" if fixed else f"{EACH} a chip"
            for chips in CHIPS:
                share, mfu = exposed_share(model, more, chips, fixed)
                print(f"{name:14} {batch:>12} {chips:>6,} {share:>8.1%} {mfu:>6.1%}", flush=True)
                lines.setdefault(f"{KINDS[name]}, {batch}", []).append((math.log2(chips), 100 * share))
    if path is not None:
        series = [Series(name, points, color=color, is_exact=True) for color, (name, points) in enumerate(lines.items())]
        label = "Share of a step that waits for communication, by the number of chips"
        at = [(math.log2(n), str(n) if n < 1024 else f"{n // 1024}k") for n in CHIPS]
        picture(path, series, label, x="chips (TPU v5p)", y="% of a step", marks=at, zero=True)


if __name__ == "__main__":
    main(sys.argv[1:])
