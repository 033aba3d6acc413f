"""The fields of /v1/images/generations and /v1/images/edits: OpenAI's, and further ones for diffusion under diffusers' names."""

import base64

import numpy as np
from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.formats.image_files import read_image
from argosy.serve.images.settings import ImageLimits
from argosy.web.errors import ApiError, input_error
from argosy.web.images import ImageGenerationFields


class ImageFields(ImageGenerationFields):
    """A request for images.

    stream: whether to stream events.
    partial_images: number of previews that a stream sends.
    num_inference_steps: number of sampling steps; None: the model's default.
    step_cache: threshold of step caching; None: the server's.
    control_image: for a model with a ControlNet, the image that it follows: a file in base64, or a `data:` URL. It is resized to the
        size of the images. For several ControlNets it is a list, in the order of the ControlNets.
    control_scale, control_start, control_end, control_mode, guess_mode: as in `ImagePipeline.images`.
    progress: whether a stream also sends an event after each evaluation.
    """

    stream: bool = False
    partial_images: int = Field(0, ge=0, le=3)
    num_inference_steps: int | None = Field(None, ge=1)
    step_cache: float | None = Field(None, gt=0)
    control_image: str | list[str] | None = None
    control_scale: float | list[float] = 1.0
    control_start: float | list[float] = 0.0
    control_end: float | list[float] = 1.0
    control_mode: int | list[int | None] | None = None
    guess_mode: bool = False
    progress: bool = False

    @property
    def control_files(self) -> list[str]:
        """The files of the control images."""
        files = self.control_image or []
        return [files] if isinstance(files, str) else files

    def controls(self, limits: ImageLimits) -> list[np.ndarray]:
        """Decodes the control images to arrays [H W 3] of uint8.

        Raises:
            ApiError: a file is not base64, or no image within the limits.
        """
        images = []
        for text in self.control_files:
            try:
                data = base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
                images.append(read_image(data, 4 * limits.pixels)[..., :3])
            except BadInput as error:
                raise ApiError(f"`control_image`: {input_error(error).message}", param="control_image") from None
            except ValueError:
                raise ApiError("`control_image` is no base64", param="control_image") from None
        return images

    def check(self, limits: ImageLimits) -> None:
        """Checks the request against the limits.

        Raises:
            ApiError: the request is beyond a limit, or asks for previews or progress without a stream.
        """
        area = self.area() or (0, 0)
        limited = {
            "n": (self.n, limits.images, "images"),
            "num_inference_steps": (self.num_inference_steps or 0, limits.steps, "steps"),
            "size": (area[0] * area[1], limits.pixels, "pixels"),
            "prompt": (len(self.prompt), limits.prompt, "characters"),
            "negative_prompt": (len(self.negative_prompt or ""), limits.prompt, "characters"),
        }
        for name, (value, most, noun) in limited.items():
            if value > most:
                raise ApiError(f"`{name}`: {value} {noun}, this server allows {most}", param=name)
        if (self.partial_images or self.progress) and not self.stream:
            name = "partial_images" if self.partial_images else "progress"
            raise ApiError(f"`{name}` is for streams: set `stream`", param=name)


class EditFields(ImageFields):
    """A request for images that begin from a given image. Fields of a form are texts; numbers and booleans in them are read as JSON.

    strength: the share of the steps that are run on the image.
    """

    strength: float = Field(1.0, gt=0, le=1)
