"""The settings of images (`data.image`)."""

from typing import Annotated, Any, Literal

from pydantic import Field

from argosy.core.settings import Also, Settings


class ImageSettings(Settings):
    """How images are prepared. Everything random follows from the place of the image in the run and the seed, so a run that resumes
    sees the same images."""

    size: Annotated[int | None, Also("resolution", "image_size")] = Field(None, gt=0)
    """Height and width in pixels: the shorter side is resized to it, and the longer one is cropped. None: images stay as they are, and
    must all be of one size."""
    buckets: Annotated[
        int | None,
        Also("bucket_reso_steps", "enable_bucket", "aspect_ratio_buckets", note="it is the step between sides, in pixels"),
    ] = Field(None, gt=0)
    """Aspect-ratio buckets, for image files: each image is resized and cropped to the size whose ratio is nearest to its own. Sides
    are multiples of this many pixels, from half to twice `size`, and areas at most `size` squared; 64 is usual. A batch is of one
    bucket, and an image waits until its bucket has a batch. None: all images are cropped to squares."""
    crop: Literal["center", "random"] = "center"
    """Where an image is cropped. random: at a place that is drawn anew in each epoch; held-out images are cropped at the center."""
    flip: Annotated[bool, Also("random_flip", "horizontal_flip")] = False
    """Whether half of the images, drawn anew in each epoch, are mirrored left to right. Held-out images are not."""
    caption: Annotated[str | None, Also("instance_prompt")] = None
    """One caption for all images, in place of their own: a photo of sks dog. None: each has its own, if any."""
    invalid: Literal["error", "drop"] = "error"
    """What to do with an image file that is damaged or has too many pixels. error: the run ends before its first step, with the file's
    name; drop: it is left out and counted."""
    white: float | None = Field(None, gt=0)
    """The number that stands for white in an array; black is 0. None: 255 for whole numbers, 1 for others. In training, black is -1 and
    white is 1."""

    def fingerprint(self) -> dict[str, Any]:
        """The settings that decide the rows, by name. Newer settings are left out at their defaults, so that older runs resume."""
        later = ("buckets", "caption")
        return {f"image.{name}": value for name, value in self.model_dump().items() if name not in later or value is not None}
