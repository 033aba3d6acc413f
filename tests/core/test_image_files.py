"""Image files, written and read with Pillow as the judge."""

import io

import numpy as np
import pytest
from PIL import Image

from argosy.core.errors import BadInput
from argosy.core.formats.image_files import image_file, read_image, resize_image
from argosy.core.formats.png import png_bytes

SLOPE = np.stack([*np.meshgrid(np.arange(0, 240, 8), np.arange(0, 160, 8)), np.full((20, 30), 90)], -1).astype(np.uint8)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_png_files_hold_every_bit(channels: int):
    image = np.random.default_rng(0).integers(0, 256, (7, 5, channels)).astype(np.uint8)
    with Image.open(io.BytesIO(png_bytes(image))) as opened:
        np.testing.assert_array_equal(np.array(opened).reshape(image.shape), image)


@pytest.mark.parametrize(("kind", "worst"), [("png", 0), ("jpeg", 6), ("webp", 8)])
def test_files_read_back(kind: str, worst: int):
    pixels = read_image(image_file(SLOPE, kind))  # type: ignore[arg-type]
    assert pixels.shape == SLOPE.shape
    assert np.abs(pixels.astype(int) - SLOPE).max() <= worst


def test_quality_is_size():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    assert len(image_file(noise, "jpeg", 10)) < len(image_file(noise, "jpeg", 95)) / 3


def image_bytes(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_cameras_say_which_way_is_up():
    image = Image.fromarray(SLOPE)
    exif = image.getexif()
    # Turned by a quarter.
    exif[0x0112] = 6
    pixels = read_image(image_bytes(image, exif=exif))
    np.testing.assert_array_equal(pixels, np.rot90(SLOPE, -1))


@pytest.mark.parametrize(("mode", "channels"), [("L", 3), ("P", 3), ("1", 3), ("RGBA", 4), ("LA", 4), ("I;16", 3)])
def test_every_kind_of_pixel_becomes_rgb(mode: str, channels: int):
    pixels = read_image(image_bytes(Image.new(mode, (4, 3))))
    assert pixels.shape == (3, 4, channels)
    assert pixels.dtype == np.uint8


def test_sixteen_bits_are_scaled_and_thirty_two_refused():
    deep = Image.fromarray(np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4))
    pixels = read_image(image_bytes(deep))
    np.testing.assert_array_equal(pixels[..., 0].ravel(), np.arange(0, 65536, 4096) // 257)
    with pytest.raises(BadInput, match="32 bits"):
        read_image(image_bytes(Image.new("F", (4, 3)), "TIFF"))


def test_a_file_that_is_no_image_or_too_large_is_refused():
    with pytest.raises(BadInput, match=r"^error: no image that can be read: 21 bytes of text$"):
        read_image(b"GIF89a but not really")
    with pytest.raises(BadInput, match=r"^error: no image that can be read: no bytes$"):
        read_image(b"")
    with pytest.raises(BadInput, match=r"^error: no image that can be read: 8 bytes of a PDF document$"):
        read_image(b"%PDF-1.7")
    with pytest.raises(BadInput, match="no image that can be read: 2,000 bytes of a PNG image, "):
        read_image(png_bytes(np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8))[:2000])
    with pytest.raises(BadInput, match="30x20 pixels: at most 500"):
        read_image(png_bytes(SLOPE), 500)


def test_a_resized_image_keeps_its_mean():
    assert abs(resize_image(SLOPE, 40, 60).mean() - SLOPE.mean()) < 1
    assert resize_image(SLOPE, 20, 30) is SLOPE
