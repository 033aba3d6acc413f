"""The fields of /v1/images/generations and /v1/images/edits: OpenAI's, and what diffusion adds under diffusers' names."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from argosy.core.formats.image_files import ImageFormat
from argosy.serve.images.settings import ImageLimits
from argosy.web.errors import ApiError
from argosy.web.fields import IGNORED, Fields

SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


class ImageFields(Fields):
    """A request for images.

    size: "WIDTHxHEIGHT" in pixels, or "auto".
    output_compression: quality of JPEG and WebP in percent; PNG loses nothing.
    partial_images: how many images on the way a stream sends.
    negative_prompt, num_inference_steps, guidance_scale, seed, strength: as diffusers names them. Image i depends on seed and i alone.
    step_cache: threshold of step caching, in place of the server's.
    progress: adds an event after each evaluation to a stream.
    """

    ignored: ClassVar = (*IGNORED, "moderation")
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "quality": ("auto", "standard"),
        "style": ("vivid",),
        "background": ("auto", "opaque"),
        "input_fidelity": ("low",),
    }

    prompt: str = Field(min_length=1)
    model: str | None = None
    n: int = Field(1, ge=1)
    size: str = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    output_format: ImageFormat = "png"
    output_compression: int = Field(100, ge=0, le=100)
    stream: bool = False
    partial_images: int = Field(0, ge=0, le=3)
    negative_prompt: str | None = None
    num_inference_steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(None, ge=0, lt=2**32)
    step_cache: float | None = Field(None, gt=0)
    progress: bool = False

    def area(self) -> tuple[int, int] | None:
        """Height and width; None for the model's own.

        Raises:
            ApiError: the size is not written as one.
        """
        if self.size == "auto":
            return None
        found = SIZE.fullmatch(self.size)
        if found is None:
            raise ApiError("`size` is WIDTHxHEIGHT in pixels, or auto", param="size")
        return int(found[2]), int(found[1])

    def check(self, limits: ImageLimits) -> None:
        """Raises:
        ApiError: the request is beyond a limit, or previews are wanted without a stream.
        """
        area = self.area() or (0, 0)
        asked = {
            "n": (self.n, limits.images, "images"),
            "num_inference_steps": (self.num_inference_steps or 0, limits.steps, "steps"),
            "size": (area[0] * area[1], limits.pixels, "pixels"),
            "prompt": (len(self.prompt), limits.prompt, "characters"),
            "negative_prompt": (len(self.negative_prompt or ""), limits.prompt, "characters"),
        }
        for name, (value, most, noun) in asked.items():
            if value > most:
                raise ApiError(f"`{name}`: {value} {noun}, this server allows {most}", param=name)
        if (self.partial_images or self.progress) and not self.stream:
            name = "partial_images" if self.partial_images else "progress"
            raise ApiError(f"`{name}` is for streams: set `stream`", param=name)


class EditFields(ImageFields):
    """A request for images that begin from one. Fields of a form are texts, and read as JSON's numbers and booleans.

    strength: the share of the steps that the image goes through.
    """

    strength: float = Field(1.0, gt=0, le=1)
