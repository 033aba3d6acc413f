"""Arrays of images: values, crops and mirrors, held-out images, and what is refused."""

import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.data.images.arrays import ImageArrays
from argosy.data.images.settings import ImageSettings
from argosy.data.images.table import held_out_mask
from argosy.models.diffusion.base import ImageSpace

GRAY = ImageSpace(1, 2, 10)


def write_arrays(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return str(folder / "a.npz")


def digits(count=40, size=(6, 8)):
    draw = np.random.default_rng(1)
    return {"images": draw.integers(0, 17, (count, *size), np.uint8), "labels": draw.integers(0, 10, count)}


def rows_of(path, space=GRAY, held_out=False, share=0.25, seed=0, **image):
    return ImageArrays(path, ImageSettings(**image), share).rows(sequence=1, vocab=space, seed=seed, held_out=held_out)


def test_black_is_minus_one_and_white_is_one(tmp_path):
    arrays = digits()
    arrays["images"][3] = np.array([[0, 4, 8, 12, 16, 0, 0, 0]] * 6)
    rows = rows_of(write_arrays(tmp_path, **arrays), share=0.0, white=16)
    batch = rows.gather(np.array([3, 0]))
    assert batch["images"].shape == (2, 6, 8, 1)
    assert batch["images"][0, 0, :5, 0].tolist() == [-1, -0.5, 0, 0.5, 1]
    assert batch["labels"].tolist() == arrays["labels"][[3, 0]].tolist()
    floats = {"images": arrays["images"] / np.float32(16), "labels": arrays["labels"]}
    same = rows_of(write_arrays(tmp_path, **floats), share=0.0).gather(np.array([3, 0]))
    np.testing.assert_allclose(same["images"], batch["images"], atol=1e-6)


def test_crops_and_mirrors_follow_from_the_place_in_the_run(tmp_path):
    arrays = digits()
    path = write_arrays(tmp_path, **arrays)
    rows = rows_of(path, share=0.0, white=16, size=4, crop="random", flip=True)
    row = np.full(64, 7)
    crops = rows.gather(row, np.arange(64))["images"]
    assert crops.shape == (64, 4, 4, 1)
    whole = arrays["images"][7] / 8.0 - 1
    windows = {}
    for top in range(3):
        for left_edge in range(5):
            window = whole[top : top + 4, left_edge : left_edge + 4]
            for mirrored, seen in enumerate((window, window[:, ::-1])):
                windows[seen.astype(np.float32).tobytes()] = (top, left_edge, mirrored)
    seen = [windows[np.ascontiguousarray(image[..., 0]).tobytes()] for image in crops]
    assert {top for top, _, _ in seen} == {0, 1, 2}
    assert {left_of_crop for _, left_of_crop, _ in seen} == {0, 1, 2, 3, 4}
    assert 16 < sum(mirrored for *_, mirrored in seen) < 48
    # The same in any batch, another with another seed.
    np.testing.assert_array_equal(rows.gather(row[:3], np.array([9, 60, 2]))["images"], crops[[9, 60, 2]])
    other = rows_of(path, share=0.0, white=16, size=4, crop="random", flip=True, seed=1).gather(row, np.arange(64))["images"]
    assert not np.array_equal(other, crops)
    # Held-out images are cropped at the center and not mirrored.
    held_out = rows_of(path, held_out=True, white=16, size=4, crop="random", flip=True)
    center = held_out.gather(np.array([0]), np.array([5]))["images"][0, ..., 0]
    np.testing.assert_allclose(center, arrays["images"][held_out.chosen[0]][1:5, 2:6] / 8.0 - 1)


def test_equal_images_are_held_out_together_and_a_small_set_gives_its_last():
    identities = np.random.default_rng(0).integers(0, 2**64, 4000, np.uint64)
    identities[2000:] = identities[:2000]
    is_held_out = held_out_mask(identities, 0.2)
    assert 600 < is_held_out.sum() < 1000
    assert (is_held_out[:2000] == is_held_out[2000:]).all()
    assert held_out_mask(np.full(10, 2**63, np.uint64), 0.2).tolist() == [False] * 8 + [True] * 2
    assert not held_out_mask(identities, 0.0).any()


def test_test_images_of_a_file_are_the_held_out_ones(tmp_path):
    train, test = digits(20), digits(6)
    path = write_arrays(
        tmp_path, train_images=train["images"], train_labels=train["labels"], test_images=test["images"], test_labels=test["labels"]
    )
    assert len(rows_of(path, white=16)) == 20
    assert len(rows_of(path, white=16, held_out=True)) == 6


REFUSED = {
    "other channels": (digits(), ImageSpace(3, 2, 10), {}, "images have 1 channel, and the model reads 3"),
    "patches": (digits(), ImageSpace(1, 4, 10), {}, "images of 6 x 8 do not divide into the model's patches of 4"),
    "classes": (digits() | {"labels": np.full(40, 11)}, GRAY, {}, "the data has 12 classes, and the model knows 10"),
    "no classes": ({"images": digits()["images"]}, GRAY, {}, "the model reads classes, and this data has none"),
    "nearly black": (digits(), GRAY, {"white": None}, "numbers up to 16, and white is 255: all of them would be nearly black"),
    "above white": (digits(), GRAY, {"white": 8}, "numbers from 0 to 16, and black is 0, white 8"),
    "NaN": ({"images": np.full((3, 4, 4), np.nan), "labels": np.zeros(3, int)}, GRAY, {}, "image 0 has numbers that are not finite"),
    "counts": (digits() | {"labels": np.zeros(39, int)}, GRAY, {}, "40 images and 39 labels"),
    "no images": ({"x": digits()["images"]}, GRAY, {}, "no array `images`"),
    "channels first": ({"images": np.zeros((5, 3, 16, 16), np.uint8)}, GRAY, {}, "3 channels first"),
    "too large": (digits(), GRAY, {"size": 7}, "data.image.size = 7, and the images are 6 x 8"),
}


@pytest.mark.parametrize("arrays, space, image, problem", REFUSED.values(), ids=REFUSED)
def test_mistakes_are_named(tmp_path, arrays, space, image, problem):
    with pytest.raises(BadInput, match=problem):
        rows_of(write_arrays(tmp_path, **arrays), space, **{"white": 16} | image)


def test_a_file_that_is_no_numpy_file_is_refused(tmp_path):
    (tmp_path / "b.npz").write_bytes(b"not a zip file")
    with pytest.raises(BadInput, match="not a NumPy file"):
        rows_of(str(tmp_path / "b.npz"))
