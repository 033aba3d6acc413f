"""Folders of image files: classes, captions and metadata; sizes, turns and channels by Pillow; what is damaged, by name."""

import json

import numpy as np
import pytest
from PIL import Image

from argosy.core.errors import BadInput
from argosy.data.batch import Field
from argosy.data.images.folder import ImageFolder
from argosy.data.images.settings import ImageSettings
from argosy.data.pipeline import build
from argosy.data.settings import DataSettings
from argosy.data.sources.find import find_source, is_textless
from argosy.data.sources.kinds import reader_of
from argosy.data.tables import table_of
from argosy.models.diffusion.base import ImageSpace

RGB, GRAY = ImageSpace(3, 2, 0), ImageSpace(1, 2, 0)


def picture(seed, size=(6, 8)):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def save_image(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path, **options)
    return path


def images_of(folder, space=RGB, **image):
    rows = ImageFolder(str(folder), ImageSettings(**image)).rows(sequence=1, vocab=space, seed=0)
    batch = rows.gather(np.arange(len(rows)))
    return np.rint((batch["images"] + 1) * 127.5).astype(int), batch.get("labels")


def test_control_images_of_another_ratio_are_counted(tmp_path):
    lines = []
    (tmp_path / "edges").mkdir()
    for name, sides in (("a", (10, 20)), ("b", (20, 20)), ("c", (21, 41))):
        Image.fromarray(np.zeros((20, 40, 3), np.uint8)).save(tmp_path / f"{name}.png")
        Image.fromarray(np.zeros((*sides, 3), np.uint8)).save(tmp_path / "edges" / f"{name}.png")
        lines.append({"file_name": f"{name}.png", "text": "x", "conditioning_image": f"edges/{name}.png"})
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    settings = DataSettings(source=str(tmp_path), held_out=0, image={"size": 20})
    source = find_source(settings)
    assert source.stretched == []
    source.read_controls()
    assert source.stretched == ["b.png"]
    summary = table_of(source, "train", settings, None, ImageSpace(3, 1, 0), 0, None).summary.text
    assert "Stretched: 1 control image, whose sides have another ratio" in summary


def test_classes_are_folders_in_the_order_of_their_names(tmp_path):
    for i, name in enumerate(["cat", "ant", "cat", "bee"]):
        save_image(tmp_path / name / f"{i}.png", picture(i))
    folder = ImageFolder(str(tmp_path), ImageSettings())
    assert folder.class_names == ("ant", "bee", "cat")
    images, labels = images_of(tmp_path)
    assert labels.tolist() == [0, 1, 2, 2]
    for image, i in zip(images, (1, 3, 0, 2)):
        np.testing.assert_array_equal(image, picture(i))


def test_captions_stand_beside_images_or_in_metadata(tmp_path):
    for i in range(3):
        save_image(tmp_path / "beside" / f"{i}.png", picture(i))
        (tmp_path / "beside" / f"{i}.txt").write_text(f"picture {i}\n")
        save_image(tmp_path / "lines" / f"{i}.png", picture(i))
    lines = [{"file_name": f"{i}.png", "text": f"picture {i}", "label": f"kind {i % 2}"} for i in (2, 0, 1)]
    (tmp_path / "lines" / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name in ("beside", "lines"):
        folder = ImageFolder(str(tmp_path / name), ImageSettings())
        assert [file.caption for file in folder.files] == ["picture 0", "picture 1", "picture 2"]
    assert folder.class_names == ("kind 0", "kind 1")
    assert [file.label for file in folder.files] == [0, 1, 0]


def test_images_are_resized_cropped_and_turned(tmp_path):
    wide = picture(0, (40, 80))
    save_image(tmp_path / "a.png", wide)
    turned = save_image(tmp_path / "b.jpg", picture(1, (40, 80)), quality=100, subsampling=0)
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(turned) as opened:
        pixels = opened.copy()
    pixels.save(turned, exif=exif, quality=100, subsampling=0)
    images, labels = images_of(tmp_path, size=20)
    assert labels is None
    assert images.shape == (2, 20, 20, 3)
    expected = np.array(Image.fromarray(wide).resize((40, 20), Image.Resampling.LANCZOS))[:, 10:30]
    np.testing.assert_array_equal(images[0], expected)
    with Image.open(turned) as opened:
        upright = np.array(opened.convert("RGB").rotate(270, expand=True))
    expected = np.array(Image.fromarray(upright).resize((20, 40), Image.Resampling.LANCZOS))[10:30]
    np.testing.assert_array_equal(images[1], expected)


def test_channels_are_those_of_the_model(tmp_path):
    clear = np.concatenate([picture(0), np.full((6, 8, 1), 51, np.uint8)], -1)
    save_image(tmp_path / "a.png", clear)
    save_image(tmp_path / "b.png", picture(1)[..., 0])
    images, _ = images_of(tmp_path)
    background = Image.new("RGBA", (8, 6), (255, 255, 255, 255))
    background.alpha_composite(Image.fromarray(clear))
    assert np.abs(images[0] - np.array(background.convert("RGB"))).max() <= 1
    np.testing.assert_array_equal(images[1], np.repeat(picture(1)[..., :1], 3, -1))
    gray, _ = images_of(tmp_path, GRAY)
    assert gray.shape == (2, 6, 8, 1)
    assert np.abs(gray[0, ..., 0] - np.array(background.convert("L"))).max() <= 1
    np.testing.assert_array_equal(gray[1, ..., 0], picture(1)[..., 0])


def test_damaged_files_are_named_or_left_out_and_counted(tmp_path):
    save_image(tmp_path / "good.png", picture(0))
    whole = save_image(tmp_path / "cut.png", picture(1)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("no image")
    Image.new("1", (12_000, 9_000)).save(tmp_path / "huge.png")
    unread = "no image that can be read"
    for name, why in (("cut.png", unread), ("huge.png", "12000x9000|108000000 pixels"), ("text.jpg", unread)):
        with pytest.raises(BadInput, match=why) as caught:
            ImageFolder(str(tmp_path), ImageSettings())
        assert caught.value.where == str(tmp_path / name)
        (tmp_path / name).rename(tmp_path / f"{name}.bad")
    for name in ("cut.png", "huge.png", "text.jpg"):
        (tmp_path / f"{name}.bad").rename(tmp_path / name)
    folder = ImageFolder(str(tmp_path), ImageSettings(invalid="drop"))
    assert folder.unreadable == ["cut.png", "huge.png", "text.jpg"]
    settings = DataSettings(source=str(tmp_path), batch=1, sequence=1, held_out=0, image=ImageSettings(invalid="drop"))
    fields = {"images": Field("B h w c", np.float32, "row")}
    batches = build(settings, None, vocab=RGB, seed=0, fields=fields)
    assert "3 image files that cannot be read" in batches.summary().text
    batches.close()


@pytest.mark.parametrize("break_, problem", [
    (lambda root: (root / "c.txt").write_text("alone"), "1 caption without an image"),
    (lambda root: (root / "b.txt").unlink(), "1 image without a caption"),
    (lambda root: save_image(root / "b.png", picture(1, (6, 10))), "images are of 2 sizes"),
    (lambda root: (root / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a"}'), "1 image without a line"),
    (lambda root: (root / "metadata.jsonl").write_text('{"file": "a.png"}'), "not an object with `file_name`"),
    (lambda root: (root / "metadata.jsonl").write_text(
        "\n".join(json.dumps({"file_name": f"{n}.png", "text": n}) for n in "abc")),
        "1 line of metadata.jsonl without an image: c.png"),
])  # fmt: skip
def test_what_does_not_fit_together_is_named(tmp_path, break_, problem):
    for name in "ab":
        save_image(tmp_path / f"{name}.png", picture(0))
        (tmp_path / f"{name}.txt").write_text(name)
    break_(tmp_path)
    with pytest.raises(BadInput, match=problem):
        ImageFolder(str(tmp_path), ImageSettings())


def test_a_folder_of_images_is_found_as_one(tmp_path):
    save_image(tmp_path / "images" / "a" / "1.png", picture(0))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("words")
    assert reader_of(str(tmp_path / "images")) == "images"
    assert reader_of(str(tmp_path / "texts")) == "folder"
    assert is_textless(str(tmp_path / "images"))
    assert isinstance(find_source(DataSettings(source=str(tmp_path / "images"))), ImageFolder)


def test_a_large_set_is_decoded_when_it_is_needed(tmp_path, monkeypatch):
    for i in range(4):
        save_image(tmp_path / f"{i}.png", picture(i))
    whole, _ = images_of(tmp_path)
    monkeypatch.setattr("argosy.data.images.files.KEPT_BYTES", 150)
    folder = ImageFolder(str(tmp_path), ImageSettings())
    assert len(folder.decoded) == 1
    again, _ = images_of(tmp_path)
    np.testing.assert_array_equal(again, whole)
