"""`argosy eval RUN tasks=images`: the images of a denoiser beside those of its data."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argosy.checkpoint.open import open_model
from argosy.checkpoint.step.load import read_meta
from argosy.core.errors import BadInput
from argosy.core.hub.download import local_model
from argosy.data.images.shards import image_data
from argosy.data.settings import DataSettings
from argosy.data.sources import RowSource
from argosy.data.tables import find
from argosy.evals.images.evaluate import ImageJudges, draw_classes, images_of
from argosy.evals.settings import IMAGES, EvalSettings
from argosy.infer.denoise.runs import load_pipeline
from argosy.jobs.image_models import draws_images

# Images that are drawn: enough for a standard error of the accuracy below 0.016.
COUNT = 1000
# Real images that are compared with.
MOST = 10_000


def evaluate_images(model: str, settings: EvalSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """The results as one document.

    Raises:
        BadInput: the model draws no images, or its data is not there.
    """
    model = local_model(model, say)
    if not draws_images(model) or (Path(model) / "model_index.json").is_file():
        raise BadInput(f"{model} is no run that draws images", hint="tasks=images is for runs of `argosy train diffusion`")
    start = time.monotonic()
    stored = (read_meta(open_model(model).path).get("settings") or {}).get("data")
    if stored is None:
        raise BadInput(f"{model} does not say what it was trained on", hint="give the run itself")
    data = DataSettings(**stored | ({} if settings.data is None else {"source": settings.data}))
    # Images of all buckets are compared at one size.
    data = data.model_copy(update={"image": data.image.model_copy(update={"buckets": None})})
    source = find(image_data(data))
    pipeline = load_pipeline(model, settings.dtype, say)
    if not isinstance(source, RowSource):
        raise BadInput("this data has no images", where=f"data.source={data.source}")
    space: Any = pipeline.config.id_spaces
    tables = [source.rows(sequence=1, vocab=space, seed=data.seed or 0, held_out=held_out) for held_out in (False, True)]
    train, held_out = (images_of(table, MOST) for table in tables)
    say("training the judges")
    judges = ImageJudges(train, held_out, settings.seed)
    how = {name: value for name in ("steps", "guidance") if (value := getattr(settings, name)) is not None}
    count = settings.limit or COUNT
    tell = lambda done, of: say(f"{done} of {of} images")  # noqa: E731
    drawn = draw_classes(pipeline, count, settings.seed, train.images.shape[1:3], tell, **how)
    figures = judges.figures(drawn)
    return {"tasks": {IMAGES: figures | {"n": count, "truncated": 0, "shots": 0, "seconds": round(time.monotonic() - start, 3)}}}
