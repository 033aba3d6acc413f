"""Images as positions: patches, and fixed sines and cosines of their rows and columns.

A patch of p x p pixels with c channels is a vector in the order (p p c), so that its weight is that of a convolution with stride p.
"""

import numpy as np
from jaxtyping import Array, Float


def patchify(images: Float[Array, "B H W C"], size: int) -> Float[Array, "B T I"]:
    """The patches of images, by rows."""
    b, h, w, c = images.shape
    x = images.reshape(b, h // size, size, w // size, size, c).swapaxes(2, 3)
    return x.reshape(b, (h // size) * (w // size), size * size * c)


def unpatchify(x: Float[Array, "B T I"], height: int, width: int, size: int) -> Float[Array, "B H W C"]:
    """The images of this size that have these patches."""
    rows, columns = height // size, width // size
    return x.reshape(x.shape[0], rows, columns, size, size, -1).swapaxes(2, 3).reshape(x.shape[0], height, width, -1)


def sincos_2d(rows: np.ndarray, columns: np.ndarray, width: int) -> np.ndarray:
    """Sines and cosines of columns, then of rows, [rows columns, width], in float64: the table of DiT and Stable Diffusion 3, whose
    first half is of columns."""
    at = np.meshgrid(np.asarray(columns, np.float64), np.asarray(rows, np.float64))
    return np.concatenate([_sincos(axis.ravel(), width // 2) for axis in at], 1)


def _sincos(at: np.ndarray, width: int) -> np.ndarray:
    angle = at[:, None] * 1e4 ** -(np.arange(width // 2) / (width / 2))
    return np.concatenate([np.sin(angle), np.cos(angle)], 1)
