"""Writes PNG files (ISO/IEC 15948) without a library: 8 bits per channel, gray, RGB or RGBA, without interlacing."""

import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# Color types by number of channels.
COLORS = {1: 0, 3: 2, 4: 6}


def png_bytes(image: "np.ndarray", level: int = 6) -> bytes:
    """Encodes an image, uint8 [H W C], as a PNG file.

    Args:
        level: the compression level of zlib, from 0 to 9.
    """
    import numpy as np

    height, width, channels = image.shape
    if image.dtype != np.uint8 or channels not in COLORS:
        raise ValueError(f"{image.dtype} {list(image.shape)} is no image of 8 bits with 1, 3 or 4 channels")
    # Each line begins with the number of its filter. 0 is no filter.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, width * channels)], 1)
    header = struct.pack(">IIBBBBB", width, height, 8, COLORS[channels], 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), level)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def image_grid(images: "np.ndarray", columns: int, gap: int = 1) -> "np.ndarray":
    """Arranges images, uint8 [N H W C], in rows of `columns` images to one image, with white lines of `gap` pixels between them."""
    import numpy as np

    n, height, width, channels = images.shape
    rows = -(-n // columns)
    out = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, channels), 255, np.uint8)
    for i, image in enumerate(images):
        y, x = (i // columns) * (height + gap), (i % columns) * (width + gap)
        out[y : y + height, x : x + width] = image
    return out


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
