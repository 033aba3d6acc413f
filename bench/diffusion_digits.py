"""A diffusion transformer of digits, trained on a CPU in about a minute: how good are its images, by steps and guidance?

    ./run python bench/diffusion_digits.py DIGITS.npz [count=1000] [dir=FOLDER] [SETTING=VALUE ...]

DIGITS.npz: scikit-learn's 1,797 digits of 8 x 8 (`load_digits`), images 0 to 16, with labels. One table: each figure beside what real
images reach (`floor`, `real`) and what noise does. Words with `=` are settings of the run (`argosy train diffusion`).
"""

import sys
import time
from pathlib import Path
from tempfile import mkdtemp

import argosy
from argosy.data.settings import DataSettings
from argosy.data.tables import find
from argosy.evals.images.evaluate import ImageJudges, draw_classes, images_of
from argosy.observe.readable import columns

# Steps and guidance of each row.
DRAWINGS = ((4, 1.0), (8, 1.0), (20, 1.0), (50, 1.0), (8, 1.5), (20, 1.5), (20, 2.0))
SHOWN = ("accuracy", "fid", "kid", "cas", "nearest", "copies", "diversity")


def main(path: str, words: list[str]) -> None:
    options = dict(word.split("=", 1) for word in words if word.startswith(("count=", "dir=")))
    folder = Path(options.get("dir", mkdtemp())) / "run"
    more = [word for word in words if not word.startswith(("count=", "dir="))]
    start = time.monotonic()
    argosy.fit("diffusion", f"data.source={path}", "data.image.white=16", f"dir={folder}", *more)
    trained_s = time.monotonic() - start
    pipeline = argosy.load(folder)
    source = find(DataSettings(source=path, held_out=0.2, image={"white": 16}))
    train, held_out = (
        images_of(source.rows(sequence=1, vocab=pipeline.config.id_spaces, seed=0, held_out=held_out)) for held_out in (False, True)
    )
    judges, rows = ImageJudges(train, held_out), []
    for steps, guidance in DRAWINGS:
        begun = time.monotonic()
        images = draw_classes(pipeline, int(options.get("count", 1000)), steps=steps, guidance=guidance)
        seconds = time.monotonic() - begun
        figures = judges.figures(images)
        rows.append([str(steps), f"{guidance:g}", *(f"{figures[name]:.3f}" for name in SHOWN), f"{seconds:.1f}"])
    bounds = judges.bounds
    real = [bounds["accuracy_real"], bounds["fid_floor"], bounds["kid_floor"], None, bounds["nearest_real"], None, 1.0]
    noise = [None, bounds["fid_noise"], bounds["kid_noise"], *[None] * 4]
    rows += [[name, "", *("" if v is None else f"{v:.3f}" for v in some), ""] for name, some in (("real", real), ("noise", noise))]
    print(columns(("steps", "guidance", *SHOWN, "seconds"), rows, figures=tuple(range(1, len(SHOWN) + 3))))
    print(f"trained in {trained_s:.0f} s, compiling included, on {len(train.images)} images; {len(held_out.images)} held out")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
