"""Step caching: on digits, steps that were reused, their error and how good the images are; on a small Flux, what a reused step costs.

    ./run python bench/diffusion_step_cache.py DIGITS.npz [count=1000] [steps=50] [batch=8] [dir=FOLDER] [SETTING=VALUE ...]

DIGITS.npz: scikit-learn's 1,797 digits of 8 x 8 (`load_digits`), images 0 to 16, with labels. A run that is in `dir` already is not
trained again. Words with `=` are settings of the run (`argosy train diffusion`). The Flux has random weights and 7.6 million
parameters, as in diffusion_torch.py.
"""

import statistics
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jax
import numpy as np

import argosy
from argosy.data.settings import DataSettings
from argosy.data.tables import find
from argosy.evals.images.evaluate import ImageJudges, draw_classes, images_of
from argosy.infer.denoise.guidance import Guidance
from argosy.infer.denoise.sampling import Drawing, SamplingRun
from argosy.infer.denoise.settings import SAMPLERS, SamplerSettings
from argosy.infer.denoise.step_cache import CacheReport
from argosy.models.diffusion.base import Conditions
from argosy.models.diffusion.flux import FluxConfig
from argosy.models.parts.stack import Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, split
from argosy.observe.readable import columns

THRESHOLDS = (None, 0.02, 0.05, 0.1, 0.2, 0.4)
OWN = ("count=", "steps=", "batch=", "dir=")
SHOWN = ("accuracy", "fid", "diversity")


def main(path: str, words: list[str]) -> None:
    options = dict(word.split("=", 1) for word in words if word.startswith(OWN))
    folder = Path(options.get("dir", mkdtemp())) / "flow"
    argosy.fit("diffusion", f"data.source={path}", "data.image.white=16", f"dir={folder}", *(w for w in words if not w.startswith(OWN)))
    pipeline = argosy.load(folder)
    source, space = find(DataSettings(source=path, held_out=0.2, image={"white": 16})), pipeline.config.id_spaces
    judges = ImageJudges(*(images_of(source.rows(sequence=1, vocab=space, seed=0, held_out=held_out)) for held_out in (False, True)))
    count, steps, batch = (int(options.get(name, default)) for name, default in (("count", 1000), ("steps", 50), ("batch", 8)))
    rows = []
    for threshold in THRESHOLDS:
        sampling = {"steps": steps, "guidance": 1.0, "batch": batch, "step_cache": threshold}
        reports: list[CacheReport] = []
        images = draw_classes(pipeline, count, **sampling, compare=threshold is not None, report=reports.append)
        reused = 100 * sum(r.reused for r in reports) / (sum(r.evaluations for r in reports) or 1)
        errors = [e for r in reports for e in r.errors] or [0.0]
        figures = judges.figures(images)
        cells = [f"{reused:.0f} %", f"{sum(errors) / len(errors):.3f}", f"{max(errors):.3f}"]
        rows.append([f"{threshold or 'off'}", *cells, *(f"{figures[name]:.3f}" for name in SHOWN)])
    print(columns(("threshold", "reused", "error", "largest", *SHOWN), rows, figures=tuple(range(1, len(SHOWN) + 4))))
    print(f"{count} images in {steps} steps, {batch} at a time")
    full, reused = (flux_seconds(threshold) for threshold in (None, 1e9))
    print(f"a small Flux, two images in 8 steps: {1000 * full:.0f} ms of CPU in full, {1000 * reused:.0f} ms where 7 steps are reused")


def flux_seconds(threshold: float | None, steps: int = 8, rows: int = 2, runs: int = 5) -> float:
    """Median CPU seconds of drawing with a Flux of nine layers, after two runs: other programs disturb them less than the clock."""
    more: dict[str, Any] = {"axes": (8, 12, 12), "text_width": 256, "pooled_width": 128, "text_tokens": 64}
    config = FluxConfig(channels=16, layers=3, single_layers=6, heads=6, head_size=32, **more)
    model = config.build(Unroll())
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    # Gates start at zero, where the first layer changes nothing and so decides nothing.
    graph, leaves = split(model)
    leaves = jax.tree.map(lambda a: a + 0.01, leaves)
    plan = SAMPLERS["euler"](SamplerSettings(spacing="trailing"), steps)
    draw = np.random.default_rng(0).standard_normal
    conditions = Conditions(text=draw((rows, 64, 256), np.float32), pooled=draw((rows, 128), np.float32))
    seeds, scale = [(0, i) for i in range(rows)], np.ones(rows, np.float32)
    drawing = Drawing(plan, seeds, scale, conditions, None, (32, 32, 16), cache_threshold=threshold)
    seconds = []
    for _ in range(runs + 2):
        run = SamplingRun(graph, leaves, drawing, Guidance())
        begun = time.process_time()
        jax.block_until_ready(run.at_once())
        seconds.append(time.process_time() - begun)
    return statistics.median(seconds[2:])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
