"""The fields of /v1/images/generations and /v1/images/edits: OpenAI's, and what diffusion adds under diffusers' names."""

from pydantic import Field

from argosy.serve.images.settings import ImageLimits
from argosy.web.errors import ApiError
from argosy.web.images import ImageGenerationFields


class ImageFields(ImageGenerationFields):
    """A request for images.

    partial_images: how many images on the way a stream sends.
    num_inference_steps, strength: as diffusers names them.
    step_cache: threshold of step caching, in place of the server's.
    progress: adds an event after each evaluation to a stream.
    """

    stream: bool = False
    partial_images: int = Field(0, ge=0, le=3)
    num_inference_steps: int | None = Field(None, ge=1)
    step_cache: float | None = Field(None, gt=0)
    progress: bool = False

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
