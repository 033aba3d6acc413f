"""`argosy generate MODEL PROMPT image=FILE`: draws images, or with `frames` videos, and writes them to files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.settings import Settings
from argosy.jobs.image_models import parsed_size

KINDS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
ANIMATIONS = {".webp": "webp", ".gif": "gif", ".png": "png"}
# Settings of ControlNets, and those that are arguments of `ImagePipeline.images` as they are.
CONTROL = {"control_image", "control_scale", "control_start", "control_end", "control_mode", "guess_mode"}
DRAWING = {"steps", "guidance", "negative", "seed", "n", "step_cache", "compare"} | (CONTROL - {"control_image"})
# Frames of a second that Wan was trained on.
RATE = 16.0


class GenerateImages(Settings):
    """Images of a prompt, or videos."""

    elsewhere: ClassVar = {
        "max_tokens": "this model draws images",
        "temperature": "this model draws images",
        "num_inference_steps": "did you mean `steps`?",
        "guidance_scale": "did you mean `guidance`?",
        "negative_prompt": "did you mean `negative`?",
        "num_frames": "did you mean `frames`?",
        "textual_inversion": "did you mean `embeddings`?",
        "learned_embeds": "did you mean `embeddings`?",
        "controlnet_conditioning_scale": "did you mean `control_scale`?",
        "control_guidance_start": "did you mean `control_start`?",
        "control_guidance_end": "did you mean `control_end`?",
        "controlnet_mode": "did you mean `control_mode`?",
        "controlnet_conditioning_image": "did you mean `control_image`?",
    }

    image: str
    """File to write: .png, or .jpg or .webp with the extra `images`. With several images, their numbers are put before the ending. With
    `frames` an animated .webp, .gif or .png, with that extra, or a folder for a PNG file of each frame."""
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
    frames: int | None = Field(None, gt=0)
    """Frames of a video, for models that draw videos: of Wan a multiple of 4, and one more. None: an image."""
    fps: float | None = Field(None, gt=0, le=100)
    """Frames that an animated file shows in a second. None: 16."""
    n: int = Field(1, gt=0)
    """Number of images, or of videos."""
    step_cache: float | None = Field(None, gt=0)
    """Reuses what the layers after the first changed, until the change of the first one has moved by more than this share of it; 0.05
    to 0.2 are usual. None: all layers run in every step."""
    compare: bool = False
    """Draws each image in full too, and tells the error of `step_cache`."""
    source: str | None = None
    """An image file to begin from (image to image), of any size. Needs the extra `images`."""
    strength: float = Field(0.6, gt=0, le=1)
    """Share of the steps that `source` goes through; at 1 nothing of it is left."""
    controlnet: str | tuple[str, ...] | None = None
    """A ControlNet that steers the denoiser of a diffusers folder (Stable Diffusion 1 to 3.5 and XL, Flux.1): a folder, a run of
    `argosy train controlnet`, or hf:OWNER/NAME. Several, [canny, depth], act together."""
    control_image: str | tuple[str, ...] | None = None
    """The image file that a ControlNet follows: edges, depths, poses, as it was trained on. Of any size, and resized to that of the
    image; of several ControlNets a list, in their order. Needs the extra `images`."""
    control_scale: float | tuple[float, ...] = 1.0
    """How strongly the ControlNet acts, 0 to 100; 1 is what it was trained for. For several: one for all, or a list."""
    control_start: float | tuple[float, ...] = 0.0
    """Share of the steps after which the ControlNet begins to act. For several: one for all, or a list."""
    control_end: float | tuple[float, ...] = 1.0
    """Share of the steps after which the ControlNet does not act any more. For several: one for all, or a list."""
    control_mode: int | tuple[int | None, ...] | None = None
    """The number of the kind of control, for a ControlNet of Flux.1 that knows several (a union). For several ControlNets: a list, with
    null for those that know one."""
    guess_mode: bool = False
    """The ControlNet acts on predictions with the prompt alone, and more weakly on fine details, as for an empty prompt; of UNets."""
    embeddings: str | tuple[str, ...] | None = None
    """Learned embeddings of Stable Diffusion 1, 2 or XL (textual inversion), whose tokens the prompt names: a run of `argosy train
    textual_inversion`, a .safetensors file, a folder with `learned_embeds.safetensors`, or hf:OWNER/NAME; or several, [a, b]."""
    single_file: str | None = None
    """A .safetensors file in its authors' names, whose models take the place of those of the diffusers folder."""
    dtype: str | None = None
    """Type of weights and activations, float32 or bfloat16. None: float32 on CPUs, bfloat16 elsewhere."""


def generate_images(
    model: str, prompt: str, settings: GenerateImages, say: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Draws images or videos and writes their files. Returns the file or folder, seed, number and size of each.

    Raises:
        BadInput: the model draws no images or videos, the file has an unknown suffix, its folder is missing, or a number does not fit.
    """
    target = _target(settings)
    if settings.compare and settings.step_cache is None:
        raise BadInput("compare without step_cache: nothing differs from the full drawing", hint="step_cache=0.1")
    size = parsed_size(settings.size)
    source = None if settings.source is None else _image(f"source={settings.source}", settings.source)
    names = settings.control_image or ()
    controls = [_image(f"control_image={name}", name) for name in ([names] if isinstance(names, str) else names)]
    from argosy.core.formats.image_files import is_stretched, resize_image
    from argosy.infer.denoise.pipeline import ImagePipeline
    from argosy.infer.denoise.step_cache import CacheReport
    from argosy.jobs.api import load

    say(f"loading {model}")
    options: Any = {"single_file": settings.single_file, "controlnet": settings.controlnet, "embeddings": settings.embeddings}
    pipe = load(model, dtype=settings.dtype, **options)
    if not isinstance(pipe, ImagePipeline):
        raise BadInput(f"{model} draws no images", hint="leave out `image=`, which is for models that do")

    def progress(done: int, every: int) -> None:
        # Five lines at most, where lines do not replace each other.
        if done == every or done % -(-every // 4) == 0:
            say(f"evaluation {done} of {every}")

    pipe.say = say
    more: dict[str, Any] = {}
    if settings.frames is not None:
        pipe.checked_frames(settings.frames)
        more = {"frames": settings.frames, "batch": 1}
    elif pipe.defaults.frames is not None:
        say(f"an image: this model draws videos too, frames={pipe.defaults.frames}")
    if source is not None or controls:
        height, width = size = pipe.checked_size(size)
        more |= {} if source is None else {"image": resize_image(source, height, width)[None], "strength": settings.strength}
        for image in controls:
            if is_stretched(image.shape, size):
                rows, columns = image.shape[:2]
                remark = "as in diffusers; size= of its ratio keeps it"
                say(f"control_image: {columns}x{rows} pixels are stretched to {width}x{height}, {remark}")
        fitted = [resize_image(image, height, width)[None] for image in controls]
        if fitted:
            more["control_image"] = fitted[0] if len(pipe.controlnets) == len(fitted) == 1 else fitted
    if not pipe.controlnets and (control_settings := sorted(CONTROL & settings.model_fields_set)):
        raise BadInput(f"{', '.join(control_settings)}: this model has no ControlNet", hint="controlnet=FOLDER")
    if pipe.controlnets and not controls:
        raise BadInput("a ControlNet without the image that it follows", hint="control_image=edges.png")
    drawing: dict[str, Any] = settings.model_dump(include=DRAWING)
    reports: list[CacheReport] = []
    images = pipe.images(prompt, size=size, **drawing, **more, progress=progress, report=reports.append)
    records = []
    for i, (file, image) in enumerate(zip(_files(target, settings), images, strict=True)):
        (_write_image if settings.frames is None else _write_video)(file, image, settings)
        about = {"file": str(file), "seed": settings.seed, "number": i, "height": image.shape[-3], "width": image.shape[-2]}
        records.append(about if settings.frames is None else about | {"frames": settings.frames})
        for report in reports:
            cached = {"evaluations": report.evaluations, "reused": report.reused}
            records[-1]["step_cache"] = cached | ({"error": report.errors[i]} if report.errors else {})
    return records


def _target(settings: GenerateImages) -> Path:
    """Returns the file or folder to write.

    Raises:
        BadInput: an error of `generate_images`, the folder is not empty, or a package is missing.
    """
    target, kinds = Path(settings.image), KINDS if settings.frames is None else ANIMATIONS
    is_folder = settings.frames is not None and (not target.suffix or settings.image.endswith(("/", "\\")))
    if not is_folder and target.suffix.lower() not in kinds:
        problem = f"image={settings.image}: files {'' if settings.frames is None else 'of videos '}end in {', '.join(kinds)}"
        raise BadInput(problem, hint=f"image={target.with_suffix(next(iter(kinds)))}")
    if not target.parent.is_dir():
        raise BadInput(f"image={settings.image}: there is no folder {target.parent}", hint=f"mkdir -p {target.parent}")
    if settings.fps is not None and (settings.frames is None or is_folder):
        raise BadInput(f"fps={settings.fps:g}: only animated files have a rate", hint="frames=17 image=out.webp, or leave out `fps`")
    if settings.frames is not None and settings.source is not None:
        raise BadInput("source=: a video begins from noise alone", hint="leave out `source` or `frames`")
    for file in _files(target, settings) if is_folder else ():
        if file.exists() and (not file.is_dir() or any(file.iterdir())):
            raise BadInput(f"{file} is there already", hint="name a new folder")
    if settings.frames is not None and not is_folder:
        from argosy.core.formats.image_files import pillow

        pillow()
    return target


def _files(target: Path, settings: GenerateImages) -> list[Path]:
    """Returns the file or the folder of each image or video."""
    return [target] if settings.n == 1 else [target.with_stem(f"{target.stem}-{i}") for i in range(settings.n)]


def _write_image(file: Path, image: Any, settings: GenerateImages) -> None:
    from argosy.core.formats.files import of_bytes, write_file
    from argosy.core.formats.image_files import image_file

    kind: Any = KINDS[file.suffix.lower()]
    write_file(file, of_bytes(file.name, image_file(image, kind)))


def _write_video(file: Path, video: Any, settings: GenerateImages) -> None:
    """Writes a video as an animated file or a folder of frames."""
    from argosy.core.formats.files import of_bytes, write_file
    from argosy.core.formats.image_files import animation_file, image_file

    if file.suffix and not settings.image.endswith(("/", "\\")):
        kind: Any = ANIMATIONS[file.suffix.lower()]
        write_file(file, of_bytes(file.name, animation_file(video, kind, settings.fps or RATE)))
        return
    file.mkdir(exist_ok=True)
    for i, frame in enumerate(video):
        write_file(file / f"{i:04}.png", of_bytes(f"{i:04}.png", image_file(frame)))


def _image(where: str, name: str) -> Any:
    """Reads an image file, [H W 3] uint8.

    Raises:
        BadInput: there is no such file, or it is not an image.
    """
    from argosy.core.formats.image_files import read_image

    path = Path(name)
    if not path.is_file():
        raise BadInput(f"{where}: no such file")
    return read_image(path.read_bytes())[..., :3]
