"""Digits in few steps: mean velocities (MeanFlow) and EDM beside a flow model, trained by the same recipe.

    ./run python bench/diffusion_few_steps.py DIGITS.npz [count=1000] [dir=FOLDER] [SETTING=VALUE ...]

DIGITS.npz: scikit-learn's 1,797 digits of 8 x 8 (`load_digits`), images 0 to 16, with labels. All make as many updates; one of
MeanFlow takes about twice as long. A run that is in `dir` already is not trained again. Words with `=` are settings of all runs. EDM
is drawn by Heun's method, which evaluates the network twice a step but for the last one, and by DPM-Solver++.
"""

import sys
import time
from pathlib import Path
from tempfile import mkdtemp

import argosy
from argosy.data.settings import DataSettings
from argosy.data.tables import find
from argosy.evals.images.evaluate import ImageJudges, draw_classes, images_of
from argosy.infer.denoise.settings import SamplerSettings
from argosy.observe.readable import columns

STEPS = (1, 2, 4, 8, 20)
RUNS = {
    "flow": ["objective=diffusion"],
    "mean_flow": ["objective=mean_flow", "model.intervals=true"],
    "edm": ["objective=edm", "model.prediction=edm"],
}
# Steps of equal length for flows.
EULER = SamplerSettings(name="euler", prediction="velocity", spacing="trailing")
SHOWN = ("accuracy", "fid", "kid", "cas", "diversity")


def main(path: str, words: list[str]) -> None:
    options = dict(word.split("=", 1) for word in words if word.startswith(("count=", "dir=")))
    folder, rows, judges = Path(options.get("dir", mkdtemp())), [], None
    more = [word for word in words if not word.startswith(("count=", "dir="))]
    for name, objective in RUNS.items():
        start = time.monotonic()
        argosy.fit("diffusion", *objective, f"data.source={path}", "data.image.white=16", f"dir={folder / name}", *more)
        print(f"{name}: trained in {time.monotonic() - start:.0f} s, compiling included", file=sys.stderr)
        pipeline = argosy.load(folder / name)
        if judges is None:
            source = find(DataSettings(source=path, held_out=0.2, image={"white": 16}))
            space = pipeline.config.id_spaces
            splits = (source.rows(sequence=1, vocab=space, seed=0, held_out=held_out) for held_out in (False, True))
            judges = ImageJudges(*map(images_of, splits))
        samplers = [EULER]
        if name == "edm":
            samplers = [pipeline.sampler, pipeline.sampler.model_copy(update={"name": "dpmpp_2m"})]
        for sampler in samplers:
            for steps in STEPS:
                images = draw_classes(pipeline, int(options.get("count", 1000)), steps=steps, guidance=1.0, sampler=sampler)
                figures, evaluations = judges.figures(images), pipeline.plan(sampler, steps, pipeline.defaults.size).evaluations
                rows.append([name, sampler.name, str(steps), str(evaluations), *(f"{figures[figure]:.3f}" for figure in SHOWN)])
    assert judges is not None
    bounds = judges.bounds
    real = [bounds["accuracy_real"], bounds["fid_floor"], bounds["kid_floor"], None, 1.0]
    noise = [None, bounds["fid_noise"], bounds["kid_noise"], None, None]
    rows += [[name, "", "", "", *("" if v is None else f"{v:.3f}" for v in some)] for name, some in (("real", real), ("noise", noise))]
    print(columns(("objective", "sampler", "steps", "evaluations", *SHOWN), rows, figures=tuple(range(2, len(SHOWN) + 4))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
