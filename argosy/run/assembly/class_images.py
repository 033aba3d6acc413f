"""Images of a subject's class for DreamBooth, which the initial model generates before the first step."""

import os
from pathlib import Path
from typing import Any

from argosy.checkpoint.open import open_model
from argosy.checkpoint.run_directory import CLASS_IMAGES
from argosy.core.addresses import is_address
from argosy.core.errors import BadInput
from argosy.core.formats.png import png_bytes
from argosy.core.progress import Say
from argosy.data.images.folder import image_paths
from argosy.infer.denoise.runs import pipeline_of
from argosy.run.settings.run import Run
from argosy.train.objectives.images.dreambooth import DreamBooth
from argosy.weights.build import load_model

# Images drawn at once.
BATCH = 4


def class_images(run: Run, objective: DreamBooth, dtype: Any, say: Say) -> Path:
    """Generates the class images that are missing, and returns their folder. Image i depends only on the run's seed and on i, so a run
    that was killed while it generated images continues with the missing ones.

    Args:
        dtype: the compute type.
        say: called with messages.

    Raises:
        BadInput: the run directory is not local, or there is no model to generate images with.
    """
    folder = Path(objective.class_data_dir or f"{run.dir}/{CLASS_IMAGES}").expanduser()
    if is_address(str(objective.class_data_dir or run.dir)):
        problem = "images of the class are drawn into a local folder"
        raise BadInput(problem, where=str(folder), hint="objective.class_data_dir=FOLDER names one")
    there = len(image_paths(folder)) if folder.is_dir() else 0
    missing = range(there, objective.num_class_images)
    if not missing:
        return folder
    if run.init.weights is None:
        hint = "model=FOLDER of diffusers, or init.weights=RUN"
        raise BadInput("a model that is not trained yet draws no images of a class", hint=hint)
    folder.mkdir(parents=True, exist_ok=True)
    side = run.data.image.size
    size = None if side is None else (side, side)
    module = load_model(open_model(run.init.weights), dtype=dtype).module
    pipe = pipeline_of(module, objective, vars(run.sample), run.encoders, size, dtype=dtype, say=say)
    for at in range(missing.start, missing.stop, BATCH):
        some = range(at, min(at + BATCH, missing.stop))
        say(f"drawing images of the class into {folder}: {at - missing.start:,} of {len(missing):,}")
        for i, image in zip(some, pipe.images([objective.class_prompt] * len(some), seed=[run.seed + i for i in some], batch=BATCH)):
            path = folder / f"{i:05}.png"
            path.with_suffix(".part").write_bytes(png_bytes(image))
            os.replace(path.with_suffix(".part"), path)
    return folder
