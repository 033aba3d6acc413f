"""Settings of a server of images. No jax here: mistakes are answered before it is imported."""

from typing import ClassVar

from pydantic import Field

from argosy.web.settings import WebLimits, WebSettings


class ImageLimits(WebLimits):
    """Limits of a server of images."""

    body: int = Field(33_554_432, gt=0)
    """Bytes of a request body, which may hold images. Multiplied by `connections`, it bounds the memory of all bodies."""
    images: int = Field(10, gt=0)
    """Most images of one request."""
    steps: int = Field(150, gt=0)
    """Most steps of one request."""
    pixels: int = Field(2_097_152, gt=0)
    """Most pixels of an image."""
    waiting: int = Field(64, gt=0)
    """Most images that wait; further requests are refused with 503."""
    prompt: int = Field(32_768, gt=0)
    """Most characters of a prompt."""


class ImageServeSettings(WebSettings):
    """Settings of a server of images."""

    elsewhere: ClassVar = {
        "engine": "a server of images has `batch` and `limits`",
        "max_num_seqs": "did you mean `batch`?",
    }

    name: str | None = None
    """Name of the model in requests. None: the folder's name."""
    dtype: str | None = None
    """Type of weights and activations, float32 or bfloat16. None: float32 on CPUs, bfloat16 elsewhere."""
    batch: int = Field(4, gt=0)
    """Most images drawn together. Those of one batch have the same size and number of steps."""
    step_cache: float | None = Field(None, gt=0)
    """Threshold of step caching for requests that name none: an evaluation reuses what the layers after the first changed, until the
    change of the first one has moved by more than this share of it. None: all layers run in every step."""
    warm_up: bool = True
    """Compiles the programs of the default size before the server is ready, for every batch size."""
    page: bool = True
    """Serves a page at `/` to draw with. The page needs no key; its requests do."""
    limits: ImageLimits = ImageLimits()
