"""`ImageTextEncoder`: CLIP embeddings of images and texts in one space. `argosy.load(FOLDER)` of a CLIPModel returns it."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from argosy.core.errors import BadInput
from argosy.infer.denoise.finite import check_finite
from argosy.infer.denoise.prompts import PromptReader
from argosy.infer.embed import unit_vectors
from argosy.models.clip_towers import ClipTowersConfig
from argosy.models.parts.weight import merge, split
from argosy.weights.build import LoadedModel
from argosy.weights.hub.image_steps import read_image_steps

# Number of texts or images in one forward pass.
BATCH = 16


class ImageTextEncoder:
    """CLIP: `embed(texts)`, `embed_images(images)` and `scores(images, texts)`.

    Args:
        loaded: the model, with the small files of its folder.

    Raises:
        BadInput: the folder asks for a preparation of images that is not built.
    """

    def __init__(self, loaded: LoadedModel):
        self.loaded, self.module, self.tokenizer = loaded, loaded.module, loaded.tokenizer
        self.steps = read_image_steps(loaded.companions, self.config.vision.size)
        # transformers has no conversion of colors to gray.
        if self.config.vision.channels != 3:
            raise BadInput(f"images of {self.config.vision.channels} channels: a CLIP that reads colors, 3, is built")
        graph, self._leaves = split(self.module)
        self._images = _image_program(graph, self.module.dtype)
        self._reader: PromptReader | None = None

    @property
    def config(self) -> ClipTowersConfig:
        """The settings of the model."""
        config: Any = self.loaded.config
        return config

    @property
    def scale(self) -> float:
        """The factor exp(logit_scale) that cosines are multiplied by in `scores`."""
        return float(np.exp(np.asarray(self.module.scale[...], np.float64)))

    def embed(self, texts: Sequence[str], normalize: bool = False) -> Float[np.ndarray, "N O"]:
        """Returns the embedding of each text. Texts longer than the context are truncated at the end.

        Args:
            normalize: whether to scale embeddings to length 1.

        Raises:
            BadInput: one text is given in place of a list, or the model has no tokenizer.
        """
        if isinstance(texts, str):
            raise BadInput("embed takes a list of texts, not one text", hint="embed([text])")
        reader = self._text_reader()
        parts = [np.asarray(reader.states(some)["pooled"], np.float32) for some in _in_parts(list(texts))]
        return self._joined(parts, normalize)

    def cut(self, texts: Sequence[str]) -> int:
        """The number of texts that are longer than the context, which `embed` truncates."""
        return self._text_reader().cut(texts)

    def embed_images(self, images: Sequence[Any], normalize: bool = False) -> Float[np.ndarray, "N O"]:
        """Returns the embedding of each image.

        Args:
            images: arrays [H W 3] of uint8, or of floats in 0..1. Sizes may differ.
            normalize: whether to scale embeddings to length 1.

        Raises:
            BadInput: an image has another shape or other numbers, or Pillow, which resizes images, is not installed.
        """
        parts = []
        for some in _in_parts(images):
            ready = np.stack([self.steps(as_pixels(image)) for image in some])
            rows = 1 << (len(ready) - 1).bit_length()
            padded = np.concatenate([ready, np.zeros((rows - len(ready), *ready.shape[1:]), np.float32)])
            parts.append(np.asarray(self._images(self._leaves, padded), np.float32)[: len(ready)])
        return self._joined(parts, normalize)

    def scores(self, images: Sequence[Any], texts: Sequence[str]) -> Float[np.ndarray, "N M"]:
        """The similarity of each image with each text: exp(logit_scale) times the cosine, as `logits_per_image` of transformers'
        CLIPModel. Arguments and errors are those of `embed_images` and `embed`."""
        return self.scale * self.embed_images(images, normalize=True) @ self.embed(texts, normalize=True).T

    def save(self, folder: str | Path, format: Literal["hub", "argosy"] = "hub", dtype: Any = None) -> None:
        """Writes model and tokenizer as a Hub folder, which transformers reads, or as an Argosy checkpoint."""
        from argosy.checkpoint.save import save_model

        save_model(self.loaded, Path(folder), format, dtype)

    def check_predicts(self) -> None:
        """Raises an error, because CLIP predicts no tokens.

        Raises:
            BadInput: always.
        """
        hint = "argosy eval MODEL tasks=images clip=FOLDER scores drawn images; in Python, `embed` and `embed_images` return vectors"
        raise BadInput("this model is CLIP: it predicts no tokens and draws no images", hint=hint)

    def _text_reader(self) -> PromptReader:
        if self.tokenizer is None:
            raise BadInput("this model came without a tokenizer", hint="copy tokenizer.json beside its weights")
        if self._reader is None:
            self._reader = PromptReader(self.module.text, self.tokenizer, self.config.context, "CLIP")
        return self._reader

    def _joined(self, parts: list[np.ndarray], normalize: bool) -> np.ndarray:
        vectors = np.concatenate(parts) if parts else np.zeros((0, self.config.embedding_width), np.float32)
        check_finite("CLIP", vectors)
        return unit_vectors(vectors) if normalize else vectors


def as_pixels(image: Any) -> np.ndarray:
    """Converts an image to an array [H W 3] of uint8, from uint8 or floats in 0..1.

    Raises:
        BadInput: the image has another shape or other numbers.
    """
    pixels = np.asarray(image)
    if pixels.ndim != 3 or pixels.shape[-1] != 3 or not pixels.size:
        raise BadInput(f"an image of {list(pixels.shape)}: [H W 3] is read")
    if pixels.dtype == np.uint8:
        return pixels
    if not np.issubdtype(pixels.dtype, np.floating) or not (pixels.min() >= 0 and pixels.max() <= 1):
        raise BadInput(f"an image of {pixels.dtype.name} from {pixels.min()} to {pixels.max()}", hint="uint8, or floats in 0..1")
    return np.rint(pixels * 255).astype(np.uint8)


def _in_parts(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for at in range(0, len(values), BATCH):
        yield values[at : at + BATCH]


@lru_cache(maxsize=4)
def _image_program(graph: Any, dtype: Any) -> Any:
    def images(leaves: Any, pixels: Any) -> Any:
        model = merge(graph, leaves)
        model.dtype = dtype
        return model.images(pixels).astype(jnp.float32)

    return jax.jit(images)
