"""`argosy eval MODEL tasks=images`: compares the images of a denoiser with those of its data, and with `clip=` also with captions."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint.open import open_model
from argosy.checkpoint.step.load import read_meta
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.hub.download import local_model
from argosy.data.images.shards import image_data
from argosy.data.settings import DataSettings
from argosy.data.sources import RowSource
from argosy.data.tables import find
from argosy.evals.images.captions import CaptionJudge, figures_with_real
from argosy.evals.images.evaluate import ImageJudges, LabeledImages, draw_prompts, images_of
from argosy.evals.settings import IMAGES, EvalSettings
from argosy.infer.clip import ImageTextEncoder
from argosy.infer.denoise.folder import load_diffusers
from argosy.infer.denoise.pictures import in_color
from argosy.infer.denoise.pipeline import ImagePipeline
from argosy.infer.denoise.runs import load_pipeline
from argosy.jobs.image_models import draws_images

# The default number of drawn images, enough for a standard error of the accuracy below 0.016.
COUNT = 1000
# The most real images to compare with, and their most bytes in float32.
MOST, MOST_BYTES = 10_000, 1_000_000_000
# The number of images that are drawn and compared at once, with captions and with classes.
FEW, MANY = 8, 256
# The caption of a class, as CLIP's authors write it.
OF_CLASS = "a photo of a {}."


def evaluate_images(model: str, settings: EvalSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """Evaluates the images of a model. Returns the results as a JSON object.

    Raises:
        BadInput: the model draws no images, its data is missing or has no captions to compare with, or `clip` is not a CLIP.
    """
    model = local_model(model, say)
    if not draws_images(model):
        hint = "tasks=images is for runs of `argosy train diffusion`, and folders of diffusers"
        raise BadInput(f"{model} draws no images", hint=hint)
    start = time.monotonic()
    is_folder = (Path(model) / "model_index.json").is_file()
    encoder = None if settings.clip is None else opened_clip(settings.clip, settings.dtype)
    figures, count, cut = (_figures_of_folder if is_folder else _figures_of_run)(model, settings, encoder, say)
    if cut:
        say(f"CLIP reads the beginning of {plural(cut, 'caption')} alone: they are longer than its context")
    return {"tasks": {IMAGES: figures | {"n": count, "truncated": cut, "shots": 0, "seconds": round(time.monotonic() - start, 3)}}}


def opened_clip(folder: str, dtype: Any = None) -> ImageTextEncoder:
    """Loads the CLIP that `clip` names.

    Raises:
        BadInput, Damaged: there is no model, it is not a CLIP with both towers, or it has no tokenizer.
    """
    from argosy.jobs.api import load

    encoder = load(folder, dtype=dtype)
    if not isinstance(encoder, ImageTextEncoder):
        hint = "a folder of transformers' CLIPModel, such as hf:openai/clip-vit-base-patch32"
        raise BadInput(f"clip={folder} is no CLIP with both towers", hint=hint)
    if encoder.tokenizer is None:
        raise BadInput(f"clip={folder} has no tokenizer", hint="copy tokenizer.json beside its weights")
    return encoder


def _figures_of_run(
    model: str, settings: EvalSettings, encoder: ImageTextEncoder | None, say: Callable[[str], None]
) -> tuple[dict[str, float], int, int]:
    """The figures of a run, how many images were drawn, and how many captions CLIP cuts."""
    stored = (read_meta(open_model(model).path).get("settings") or {}).get("data")
    if stored is None:
        raise BadInput(f"{model} does not say what it was trained on", hint="give the run itself")
    data = DataSettings(**stored | ({} if settings.data is None else {"source": settings.data}))
    # Images of all buckets are compared at one size.
    data = data.model_copy(update={"image": data.image.model_copy(update={"buckets": None})})
    pipeline = load_pipeline(model, settings.dtype, say)
    tables = [_rows(data, pipeline, held_out) for held_out in (False, True)]
    most = max(2, min(MOST, MOST_BYTES // (12 * math.prod(tables[0].table.size))))
    if any(len(table) > most for table in tables):
        say(f"images are compared with the first {most:,} of each split")
    train, held_out = (images_of(table, most) for table in tables)
    reads_text, count, cut = "text" in pipeline.config.conditions, settings.limit or COUNT, 0
    captions = _captions(tables[1], held_out.labels, reads_text)
    if reads_text and captions is None:
        raise BadInput("this run draws from captions, and its data has none", where=f"data.source={data.source}")
    if encoder is not None and captions is None:
        problem = "clip compares images with captions, and this data has neither captions nor names of classes"
        raise BadInput(problem, where=f"data.source={data.source}", hint="leave out `clip`")
    say("training the judges")
    judges = ImageJudges(train, held_out, settings.seed)
    # Captions of held-out images in turn, or all classes.
    classes, names = pipeline.config.classes_known, tables[1].table.class_names
    if encoder is not None and not reads_text and len(names) < classes:
        problem = f"the model draws {classes} classes, and this data names {len(names)}"
        raise BadInput(problem, where=f"data.source={data.source}", hint="leave out `clip`")
    rows = np.arange(count) % (len(held_out.images) if reads_text else max(classes, 1))
    labels = held_out.labels[rows] if reads_text else rows.astype(np.int32)
    prompts = [captions[row] for row in rows] if reads_text and captions else [str(label) if classes else "" for label in labels]
    size = train.images.shape[1:3]
    at_once = FEW if reads_text else MANY
    samples = np.concatenate(list(draw_prompts(pipeline, prompts, settings.seed, size, _progress(say), at_once, **_sampling(settings))))
    figures = judges.figures(LabeledImages(samples[..., : train.images.shape[-1]] * 2 - 1, labels))
    if tables[1].table.labels is None:
        # The judge knows one class.
        figures = {name: value for name, value in figures.items() if not name.startswith("accuracy")}
    if encoder is not None and captions is not None:
        say("comparing with captions")
        sample_captions = prompts if reads_text else _class_captions(names, labels)
        own_captions = captions[: min(count, len(held_out.images))]
        judge, real = CaptionJudge(encoder, [*sample_captions, *own_captions]), in_color(held_out.images[:count] / 2 + 0.5)
        both = [judge.figures(judge.cosines(images), texts) for images, texts in ((samples, sample_captions), (real, own_captions))]
        figures, cut = figures | figures_with_real(*both), judge.cut
    return figures, count, cut


def _figures_of_folder(
    folder: str, settings: EvalSettings, encoder: ImageTextEncoder | None, say: Callable[[str], None]
) -> tuple[dict[str, float], int, int]:
    """The CLIP score of a folder of diffusers on the captions of `data`, how many images were drawn, and how many captions CLIP cuts. A
    batch of images is in memory at a time."""
    if encoder is None or settings.data is None:
        problem = "the images of a diffusers folder are compared with captions of data, by CLIP"
        raise BadInput(problem, hint="argosy eval FOLDER tasks=images data=images/ clip=CLIP_FOLDER limit=100")
    pipeline = load_diffusers(folder, dtype=settings.dtype, say=say)
    data = DataSettings(source=settings.data, held_out=0)
    if Path(settings.data).suffix != ".npz":
        data = data.model_copy(update={"image": data.image.model_copy(update={"size": min(pipeline.defaults.size)})})
    table = _rows(data, pipeline, False)
    captions = _captions(table, np.zeros(0, np.int32), True)
    if captions is None:
        hint = "NAME.txt beside NAME.png, or `text` in metadata.jsonl"
        raise BadInput("this data has no captions", where=f"data={settings.data}", hint=hint)
    count = min(settings.limit or COUNT, len(captions))
    judge = CaptionJudge(encoder, captions[:count])
    cosines = []
    for images in draw_prompts(pipeline, captions[:count], settings.seed, table.table.size, _progress(say), FEW, **_sampling(settings)):
        cosines.append(judge.cosines(images))
    say("comparing real images with their captions")
    real = [judge.cosines(in_color(images / 2 + 0.5)) for images in _parts(table, count)]
    return figures_with_real(*(judge.figures(np.concatenate(each), captions[:count]) for each in (cosines, real))), count, judge.cut


def _rows(data: DataSettings, pipeline: ImagePipeline, held_out: bool) -> Any:
    """The rows of a split, as images: the pipeline's autoencoder, if it has one, reads them."""
    source = find(image_data(data))
    if not isinstance(source, RowSource):
        raise BadInput("this data has no images", where=f"data.source={data.source}")
    space: Any = pipeline.config.id_spaces
    if pipeline.autoencoder is not None:
        space = space._replace(channels=pipeline.autoencoder.config.channels, multiple=space.multiple * pipeline.factor)
    return source.rows(sequence=1, vocab=space, seed=data.seed or 0, held_out=held_out)


def _captions(rows: Any, labels: np.ndarray, per_image: bool) -> list[str] | None:
    """Returns the caption of each row; None if there are none.

    Args:
        labels: the class of each row.
        per_image: whether each image has its own caption. Otherwise captions are made from the names of classes.
    """
    table = rows.table
    if per_image:
        return None if table.captions is None else [table.captions[int(i)] for i in rows.chosen]
    return _class_captions(table.class_names, labels) if table.class_names and table.labels is not None else None


def _class_captions(names: Sequence[str], labels: np.ndarray) -> list[str]:
    return [OF_CLASS.format(names[int(label)]) for label in labels]


def _parts(rows: Any, count: int) -> Iterator[np.ndarray]:
    for at in range(0, count, FEW):
        yield rows.gather(np.arange(at, min(at + FEW, count)))["images"]


def _sampling(settings: EvalSettings) -> dict[str, Any]:
    return {name: value for name in ("steps", "guidance") if (value := getattr(settings, name)) is not None}


def _progress(say: Callable[[str], None]) -> Callable[[int, int], None]:
    return lambda done, of: say(f"{done} of {of} images")
