"""Step caching on digits: steps that were reused, seconds, the error against the full drawing, and how good the images are.

    ./run python bench/diffusion_step_cache.py DIGITS.npz [count=1000] [steps=50] [batch=8] [dir=FOLDER] [SETTING=VALUE ...]

DIGITS.npz: scikit-learn's 1,797 digits of 8 x 8 (`load_digits`), images 0 to 16, with labels. A run that is in `dir` already is not
trained again. Words with `=` are settings of the run (`argosy train diffusion`). Every drawing is made twice and the second one timed,
and once more for its error.
"""

import sys
import time
from pathlib import Path
from tempfile import mkdtemp

import argosy
from argosy.data.settings import DataSettings
from argosy.data.tables import find
from argosy.evals.images.evaluate import ImageJudges, draw_classes, images_of
from argosy.infer.denoise.step_cache import CacheReport
from argosy.observe.readable import columns

THRESHOLDS = (None, 0.02, 0.05, 0.1, 0.2, 0.4)
OWN = ("count=", "steps=", "batch=", "dir=")
SHOWN = ("accuracy", "fid", "diversity")


def main(path: str, words: list[str]) -> None:
    own = dict(word.split("=", 1) for word in words if word.startswith(OWN))
    folder = Path(own.get("dir", mkdtemp())) / "flow"
    argosy.fit("diffusion", f"data.source={path}", "data.image.white=16", f"dir={folder}", *(w for w in words if not w.startswith(OWN)))
    pipeline = argosy.load(folder)
    source, space = find(DataSettings(source=path, held_out=0.2, image={"white": 16})), pipeline.config.id_spaces
    judges = ImageJudges(*(images_of(source.rows(sequence=1, vocab=space, seed=0, held_out=held)) for held in (False, True)))
    count, steps, batch = (int(own.get(name, default)) for name, default in (("count", 1000), ("steps", 50), ("batch", 8)))
    rows = []
    for threshold in THRESHOLDS:
        how = {"steps": steps, "guidance": 1.0, "batch": batch, "step_cache": threshold}
        draw_classes(pipeline, batch, **how)
        begun = time.monotonic()
        drawn = draw_classes(pipeline, count, **how)
        seconds, reports = time.monotonic() - begun, list[CacheReport]()
        if threshold is not None:
            draw_classes(pipeline, count, **how, compare=True, report=reports.append)
        reused = 100 * sum(r.reused for r in reports) / (sum(r.evaluations for r in reports) or 1)
        errors = [e for r in reports for e in r.errors] or [0.0]
        figures = judges.figures(drawn)
        cells = [f"{reused:.0f} %", f"{seconds:.1f}", f"{sum(errors) / len(errors):.3f}", f"{max(errors):.3f}"]
        rows.append([f"{threshold or 'off'}", *cells, *(f"{figures[name]:.3f}" for name in SHOWN)])
    print(columns(("threshold", "reused", "seconds", "error", "largest", *SHOWN), rows, figures=tuple(range(1, len(SHOWN) + 5))))
    print(f"{count} images in {steps} steps, {batch} at a time")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
