"""`argosy generate MODEL PROMPT image=FILE`: draws images and writes them to files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.settings import Settings
from argosy.jobs.image_models import parsed_size

KINDS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


class GenerateImages(Settings):
    """Images of a prompt."""

    elsewhere: ClassVar = {
        "max_tokens": "this model draws images",
        "temperature": "this model draws images",
        "num_inference_steps": "did you mean `steps`?",
        "guidance_scale": "did you mean `guidance`?",
        "negative_prompt": "did you mean `negative`?",
    }

    image: str
    """File to write: .png, or .jpg or .webp with the extra `images`. With several images, their numbers are put before the ending."""
    steps: int | None = Field(None, gt=0)
    """Steps of the sampler. None: the default of the model's kind."""
    guidance: float | None = Field(None, ge=0)
    """How strongly the prompt is followed; 1 for not at all beyond what the model learned. None: the default of the model's kind."""
    negative: str | None = None
    """What images are led away from."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Random seed of the noise. Image i depends on the seed and i alone."""
    size: int | str | None = None
    """Pixels as WIDTHxHEIGHT, such as 768x512, or one number for both. None: those that the model was made for."""
    n: int = Field(1, gt=0)
    """Number of images."""
    step_cache: float | None = Field(None, gt=0)
    """Reuses what the layers after the first changed, until the change of the first one has moved by more than this share of it; 0.05
    to 0.2 are usual. None: all layers run in every step."""
    compare: bool = False
    """Draws each image in full too, and tells the error of `step_cache`."""
    source: str | None = None
    """An image file to begin from (image to image), of any size. Needs the extra `images`."""
    strength: float = Field(0.6, gt=0, le=1)
    """Share of the steps that `source` goes through; at 1 nothing of it is left."""
    single_file: str | None = None
    """A .safetensors file in its authors' names, whose models take the place of those of the diffusers folder."""
    dtype: str | None = None
    """Type of weights and activations, float32 or bfloat16. None: float32 on CPUs, bfloat16 elsewhere."""


def generate_images(
    model: str, prompt: str, settings: GenerateImages, say: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Draws images and writes their files. Returns, for each, its file, seed and number.

    Raises:
        BadInput: the model draws no images, the file has an unknown ending or its folder is missing, or a number does not fit.
    """
    target = Path(settings.image)
    if target.suffix.lower() not in KINDS:
        raise BadInput(f"image={settings.image}: files end in {', '.join(KINDS)}", hint=f"image={target.with_suffix('.png')}")
    if not target.parent.is_dir():
        raise BadInput(f"image={settings.image}: there is no folder {target.parent}", hint=f"mkdir -p {target.parent}")
    size = parsed_size(settings.size)
    source = None if settings.source is None else _source(settings.source)
    from argosy.core.formats.files import of_bytes, write_file
    from argosy.core.formats.image_files import image_file, resized
    from argosy.infer.denoise.pipeline import ImagePipeline
    from argosy.infer.denoise.step_cache import CacheReport
    from argosy.jobs.api import load

    say(f"loading {model}")
    pipe = load(model, dtype=settings.dtype, single_file=settings.single_file)
    if not isinstance(pipe, ImagePipeline):
        raise BadInput(f"{model} draws no images", hint="leave out `image=`, which is for models that do")

    def progress(done: int, every: int) -> None:
        # Five lines at most, where lines do not replace each other.
        if done == every or done % -(-every // 4) == 0:
            say(f"step {done} of {every}")

    pipe.say = say
    more: dict[str, Any] = {}
    if source is not None:
        size = pipe.checked_size(size)
        more = {"image": resized(source, *size)[None], "strength": settings.strength}
    drawing: dict[str, Any] = settings.model_dump(include={"steps", "guidance", "negative", "seed", "n", "step_cache", "compare"})
    reports: list[CacheReport] = []
    images = pipe.images(prompt, size=size, **drawing, **more, progress=progress, report=reports.append)
    kind: Any = KINDS[target.suffix.lower()]
    written = []
    for i, image in enumerate(images):
        file = target if settings.n == 1 else target.with_stem(f"{target.stem}-{i}")
        write_file(file, of_bytes(file.name, image_file(image, kind)))
        written.append({"file": str(file), "seed": settings.seed, "number": i, "height": image.shape[0], "width": image.shape[1]})
        for report in reports:
            cached = {"evaluations": report.evaluations, "reused": report.reused}
            written[-1]["step_cache"] = cached | ({"error": report.errors[i]} if report.errors else {})
    return written


def _source(name: str) -> Any:
    """The image to begin from, [H W 3] uint8.

    Raises:
        BadInput: there is no such file, or it is no image.
    """
    from argosy.core.formats.image_files import read_image

    path = Path(name)
    if not path.is_file():
        raise BadInput(f"source={name}: no such file")
    return read_image(path.read_bytes())[..., :3]
