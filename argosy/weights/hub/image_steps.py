"""Prepares images for a vision model, as preprocessor_config.json of transformers' CLIPImageProcessor says.

    resize the shorter side     crop the center     times 1/255     minus the mean, over the deviation of each channel

A step that is not implemented is an error. Resampling is that of Pillow, as in transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from argosy.core.errors import BadInput, Damaged
from argosy.core.formats.image_files import Resampling, resize_image
from argosy.data.tokenizers.config import read_object

FILE = "preprocessor_config.json"
# transformers 5 writes the settings for texts and images into this one file.
WHOLE = "processor_config.json"
# The mean and the deviation of each channel for OpenAI's CLIP.
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Pillow's numbers of its filters.
FILTERS: dict[int, Resampling] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}


@dataclass(frozen=True)
class ImageSteps:
    """The steps from an image to the input of a model.

    shorter: the size of the shorter side after resizing, in pixels. None leaves the size as it is.
    crop: the height and width of the center crop, in pixels. None keeps the whole image.
    resampling: the filter of Pillow for resizing.
    factor: the number that pixels are multiplied with.
    mean, deviation: the numbers that each channel is normalized with, after `factor`.
    """

    shorter: int | None
    crop: tuple[int, int] | None
    resampling: Resampling = "bicubic"
    factor: float = 1 / 255
    mean: tuple[float, ...] = MEAN
    deviation: tuple[float, ...] = DEVIATION

    def __call__(self, image: np.ndarray) -> Float[np.ndarray, "H W 3"]:
        """Returns the input of the model for an image [H W 3] uint8.

        Raises:
            BadInput: the crop is larger than the image.
        """
        height, width = image.shape[:2]
        if self.shorter is not None:
            short, long = sorted((height, width))
            longer = int(self.shorter * long / short)
            height, width = (self.shorter, longer) if height <= width else (longer, self.shorter)
            image = resize_image(image, height, width, self.resampling)
        if self.crop is not None:
            rows, columns = self.crop
            if rows > height or columns > width:
                problem = f"{FILE}: a part of {columns}x{rows} pixels of an image of {width}x{height}"
                raise BadInput(problem, hint="a larger size, or no crop")
            top, left = (height - rows) // 2, (width - columns) // 2
            image = image[top : top + rows, left : left + columns]
        return ((image * self.factor - np.array(self.mean)) / np.array(self.deviation)).astype(np.float32)


def read_image_steps(folder: Path | None, size: int) -> ImageSteps:
    """Reads the steps from a model's folder. Without the file they are those of OpenAI's CLIP.

    Args:
        size: the height and width of the images that the model takes, in pixels.

    Raises:
        BadInput: a step is not implemented, or its result does not have the size that the model takes.
        Damaged: the file has invalid contents.
    """
    settings = None if folder is None else next((file for name in (FILE, WHOLE) if (file := _read(folder / name)) is not None), None)
    if folder is None or settings is None:
        return ImageSteps(size, (size, size))
    try:
        steps = _steps(settings)
    except (TypeError, ValueError, LookupError) as error:
        raise Damaged(f"{FILE} has invalid contents: {error}", where=str(folder)) from None
    if steps.crop != (size, size):
        input_size = "any size" if steps.crop is None else "{1}x{0} pixels".format(*steps.crop)
        problem = f"{FILE}: images of {input_size}, and the model reads {size}x{size}"
        raise BadInput(problem, where=str(folder / FILE), hint="do_center_crop with that crop_size")
    return steps


def _read(path: Path) -> Mapping[str, Any] | None:
    """Reads the settings for images from a file; None if there are none."""
    if not path.is_file():
        return None
    settings = read_object(path)
    return settings if path.name == FILE else settings.get("image_processor")


def _steps(settings: Mapping[str, Any]) -> ImageSteps:
    shorter = None
    if settings.get("do_resize", True):
        size = settings.get("size", {"shortest_edge": 224})
        if isinstance(size, Mapping) and set(size) != {"shortest_edge"}:
            raise BadInput(f"{FILE}: `size` = {dict(size)} is not built", hint="shortest_edge is")
        shorter = int(size["shortest_edge"] if isinstance(size, Mapping) else size)
    crop = None
    if settings.get("do_center_crop", True):
        crop_size = settings.get("crop_size", 224)
        sides = (crop_size["height"], crop_size["width"]) if isinstance(crop_size, Mapping) else (crop_size, crop_size)
        crop = int(sides[0]), int(sides[1])
    number = settings.get("resample", 3)
    if number not in FILTERS:
        hint = f"one of {', '.join(f'{n} ({name})' for n, name in FILTERS.items())}"
        raise BadInput(f"{FILE}: `resample` = {number} is not built", hint=hint)
    factor = float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else 1.0
    normal = settings.get("do_normalize", True)
    mean, deviation = (_colors(settings.get(key, default)) for key, default in (("image_mean", MEAN), ("image_std", DEVIATION)))
    if not all(np.isfinite(value) and value > 0 for value in deviation):
        raise ValueError(f"image_std = {list(deviation)}")
    return ImageSteps(shorter, crop, FILTERS[number], factor, mean if normal else (0.0,) * 3, deviation if normal else (1.0,) * 3)


def _colors(values: Sequence[float]) -> tuple[float, ...]:
    if len(values) != 3:
        raise ValueError(f"{len(values)} numbers for three channels")
    return tuple(map(float, values))
