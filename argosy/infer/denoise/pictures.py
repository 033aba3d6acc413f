"""Converts images that are given as arguments, and images that are returned."""

from typing import Any

import numpy as np

from argosy.core.errors import BadInput


def given_images(images: Any, name: str, count: int, size: tuple[int, int]) -> np.ndarray:
    """Converts images given as an argument, uint8 or floats, to floats [N H W 3] in 0..1.

    Args:
        name: the name of the argument, for error messages.
        count: number of images to draw, which must be a multiple of N.
        size: the height and width that images must have.

    Raises:
        BadInput: a shape does not fit, or the values are neither uint8 nor floats in 0..1.
    """
    array = np.asarray(images)
    array = array[None] if array.ndim == 3 else array
    if array.size == 0 or (array.dtype != np.uint8 and not np.issubdtype(array.dtype, np.floating)):
        raise BadInput(f"{name} of {array.dtype.name} {list(array.shape)}", hint="uint8, or floats in 0..1")
    if array.dtype != np.uint8 and not (array.min() >= 0 and array.max() <= 1):
        raise BadInput(f"{name} has numbers outside 0..1", hint="uint8, or floats in 0..1")
    array = array.astype(np.float32) / 255 if array.dtype == np.uint8 else array.astype(np.float32)
    if array.shape[1:] != (*size, 3) or count % len(array):
        raise BadInput(f"{name} of {list(array.shape)}: [N H W 3] is {[count, *size, 3]} here")
    return array


def in_color(images: np.ndarray) -> np.ndarray:
    """Repeats the channel of gray images, so that the result has three channels."""
    return np.repeat(images, 3, -1) if images.shape[-1] == 1 else images


def as_uint8(images: np.ndarray) -> np.ndarray:
    """Converts images in 0..1 to uint8."""
    return np.rint(images * 255).astype(np.uint8)
