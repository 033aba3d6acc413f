"""Images as sequences of patches, and fixed sine-cosine position embeddings of the patches' rows and columns.

A patch of p x p pixels with c channels is a vector in the order (p p c). The weight that reads it is therefore that of a convolution
with stride p.
"""

import numpy as np
from jaxtyping import Array, Float


def patchify(images: Float[Array, "B H W C"], size: int) -> Float[Array, "B T I"]:
    """Cuts images into patches of size x size pixels, row by row: T = (H / size) (W / size), I = size size C."""
    b, h, w, c = images.shape
    x = images.reshape(b, h // size, size, w // size, size, c).swapaxes(2, 3)
    return x.reshape(b, (h // size) * (w // size), size * size * c)


def unpatchify(x: Float[Array, "B T I"], height: int, width: int, size: int) -> Float[Array, "B H W C"]:
    """The inverse of `patchify`: images [B height width C] from patches of size x size pixels."""
    rows, columns = height // size, width // size
    return x.reshape(x.shape[0], rows, columns, size, size, -1).swapaxes(2, 3).reshape(x.shape[0], height, width, -1)


def sincos_2d(rows: np.ndarray, columns: np.ndarray, width: int) -> np.ndarray:
    """The fixed position embedding of DiT and Stable Diffusion 3, [rows * columns, width], float64. The first half of the features
    are sines and cosines of the column, the second half of the row."""
    at = np.meshgrid(np.asarray(columns, np.float64), np.asarray(rows, np.float64))
    return np.concatenate([_sincos(axis.ravel(), width // 2) for axis in at], 1)


def _sincos(at: np.ndarray, width: int) -> np.ndarray:
    angle = at[:, None] * 1e4 ** -(np.arange(width // 2) / (width / 2))
    return np.concatenate([np.sin(angle), np.cos(angle)], 1)
