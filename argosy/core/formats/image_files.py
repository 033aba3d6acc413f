"""Image files to arrays and back, and videos to animated files, by Pillow (the extra `images`); PNG images are written without it."""

import io
from typing import TYPE_CHECKING, Any, Literal

from argosy.core.command import install_extra
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.formats.png import png_bytes
from argosy.core.formats.recognize import HEAD_BYTES, binary_kind, is_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

ImageFormat = Literal["png", "jpeg", "webp"]
AnimationFormat = Literal["png", "webp", "gif"]
Resampling = Literal["lanczos", "bilinear", "bicubic"]
# Pillow's own bound against files that are small and decode to gigabytes.
MOST_PIXELS = 89_478_485


def pillow() -> Any:
    """Pillow's `Image` module.

    Raises:
        BadInput: it is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise BadInput("reading image files needs the package `pillow`", hint=install_extra("images")) from None
    return Image


def read_image(data: bytes, most_pixels: int = MOST_PIXELS) -> "np.ndarray":
    """An image file as [H W 3] uint8, or [H W 4] if it has transparency, turned as its camera says (EXIF).

    Raises:
        BadInput: it is no image, is cut off, has more than `most_pixels` pixels, or pixels of 32 bits.
    """
    import numpy as np

    image_module = pillow()
    from PIL import ImageOps

    try:
        with image_module.open(io.BytesIO(data)) as opened:
            width, height = opened.size
            if width * height > most_pixels:
                raise BadInput(f"an image of {width}x{height} pixels: at most {most_pixels:,} pixels are read")
            turned = ImageOps.exif_transpose(opened)
            if turned.mode in ("I", "F"):
                raise BadInput("pixels of 32 bits, which have no white that is known", hint="8 or 16 bits a channel")
            if turned.mode.startswith("I;16"):
                # Pillow would cut them to 8 bits, and all but the darkest would be white.
                turned = image_module.fromarray((np.array(turned) // 257).astype(np.uint8))
            clear = turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info
            return np.array(turned.convert("RGBA" if clear else "RGB"))
    except BadInput:
        raise
    except Exception as error:
        raise _unreadable(data, error) from None


def image_size(data: bytes) -> tuple[int, int]:
    """Height and width of an image file, by its head: no pixel is decoded.

    Raises:
        BadInput: it is no image.
    """
    image_module = pillow()
    try:
        with image_module.open(io.BytesIO(data)) as opened:
            return opened.height, opened.width
    except Exception as error:
        raise _unreadable(data, error) from None


def _unreadable(data: bytes, error: Exception) -> BadInput:
    """What is said of an error of Pillow's readers, which raise many kinds on damaged files."""
    message = " ".join(str(error).split())[:200]
    # That of a file of no known kind names a Python object.
    reason = "" if "cannot identify" in message else f", {message or type(error).__name__}"
    return BadInput(f"no image that can be read: {described_bytes(data)}{reason}")


def described_bytes(data: bytes) -> str:
    """What bytes are, by their first ones, and how many there are."""
    if not data:
        return "no bytes"
    head = data[:HEAD_BYTES]
    kind = binary_kind(head)
    return f"{plural(len(data), 'byte')} of {kind[0] if kind is not None else 'text' if is_text(head) else 'an unknown kind'}"


def resize_image(image: "np.ndarray", height: int, width: int, resampling: Resampling = "lanczos") -> "np.ndarray":
    """The image [H W C] uint8 at another size, by a filter of Pillow."""
    import numpy as np

    if image.shape[:2] == (height, width):
        return image
    module = pillow()
    return np.array(module.fromarray(image).resize((width, height), module.Resampling[resampling.upper()]))


def is_stretched(shape: "Sequence[int]", size: "Sequence[int]") -> bool:
    """Whether an image of this height and width gets another ratio of its sides at another size. A pixel more or less is rounding."""
    (height, width), (rows, columns) = shape[:2], size[:2]
    return abs(width * rows / height - columns) >= 1 and abs(height * columns / width - rows) >= 1


def image_file(image: "np.ndarray", kind: ImageFormat = "png", quality: int = 95) -> bytes:
    """The file of an image [H W C] uint8.

    Args:
        quality: of JPEG and WebP, in percent.

    Raises:
        BadInput: the format needs Pillow, and it is not installed.
    """
    if kind == "png":
        return png_bytes(image)
    file = io.BytesIO()
    pillow().fromarray(image).save(file, kind.upper(), quality=quality)
    return file.getvalue()


def animation_file(frames: "np.ndarray", kind: AnimationFormat, rate: float, quality: int = 95) -> bytes:
    """The file of a video [F H W 3] uint8, which is shown again and again. Frames that are equal are stored as one that is shown for
    longer. Times are whole milliseconds; in GIF files, of 256 colors, hundredths of a second.

    Args:
        rate: frames of a second.
        quality: of WebP, in percent.

    Raises:
        BadInput: Pillow is not installed.
    """
    first, *others = [pillow().fromarray(frame) for frame in frames]
    file = io.BytesIO()
    more = {"quality": quality} if kind == "webp" else {}
    first.save(file, kind.upper(), save_all=True, append_images=others, duration=round(1000 / rate), loop=0, **more)
    return file.getvalue()
