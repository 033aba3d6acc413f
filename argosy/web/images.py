"""Requests for images and their answers, as two servers take them: OpenAI's fields, and what diffusion adds under diffusers' names."""

import base64
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.formats.image_files import ImageFormat, image_file, pillow
from argosy.web.errors import ApiError
from argosy.web.fields import IGNORED, Fields

SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


class ImageGenerationFields(Fields):
    """A request for images of a prompt.

    size: "WIDTHxHEIGHT" in pixels, or "auto".
    output_compression: quality of JPEG and WebP in percent; PNG loses nothing.
    negative_prompt, guidance_scale, seed: as diffusers names them. Image i depends on seed and i alone.
    """

    ignored: ClassVar = (*IGNORED, "moderation")
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "quality": ("auto", "standard"),
        "style": ("vivid",),
        "background": ("auto", "opaque"),
        "input_fidelity": ("low",),
        "stream": (False,),
        "partial_images": (0,),
    }

    prompt: str = Field(min_length=1)
    model: str | None = None
    n: int = Field(1, ge=1)
    size: str = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    output_format: ImageFormat = "png"
    output_compression: int = Field(100, ge=0, le=100)
    negative_prompt: str | None = None
    guidance_scale: float | None = Field(None, ge=0, le=100)
    seed: int | None = Field(None, ge=0, lt=2**32)

    def area(self) -> tuple[int, int] | None:
        """Height and width; None for the model's own.

        Raises:
            ApiError: the size is not written as one.
        """
        if self.size == "auto":
            return None
        match = SIZE.fullmatch(self.size)
        if match is None:
            raise ApiError("`size` is WIDTHxHEIGHT in pixels, or auto", param="size")
        return int(match[2]), int(match[1])

    def check_format(self) -> None:
        """Raises:
        ApiError: this server cannot write files of the format.
        """
        if self.output_format == "png":
            return
        try:
            pillow()
        except BadInput:
            problem = f"`output_format`: this server writes png; {self.output_format} needs the package `pillow`"
            raise ApiError(problem, param="output_format", code="unsupported_parameter") from None

    def file(self, image: np.ndarray) -> str:
        """An image [H W 3] uint8 as a file in base64."""
        return base64.b64encode(image_file(image, self.output_format, self.output_compression)).decode()

    def about(self, image: Any) -> dict[str, Any]:
        """What an answer says of an image [H W 3]."""
        about = {"size": f"{image.shape[1]}x{image.shape[0]}", "output_format": self.output_format}
        return about | {"background": "opaque", "quality": "auto"}
