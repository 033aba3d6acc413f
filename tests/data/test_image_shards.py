"""Shards of images: tar files as WebDataset writes them, and Parquet files as `datasets` writes them, equal to a folder of the same."""

import gzip
import io
import json
import tarfile

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import shared
from PIL import Image

from argosy.core.errors import BadInput, Damaged
from argosy.core.input_files import has_wildcards, matching_files
from argosy.data.images.arrays import ImageArrays
from argosy.data.images.folder import ImageFolder
from argosy.data.images.settings import ImageSettings
from argosy.data.images.shards import ImageShards, image_data
from argosy.data.settings import DataSettings
from argosy.data.sources.find import find_source, is_textless
from argosy.models.diffusion.base import ImageSpace

RGB = ImageSpace(3, 2, 0)
NAMES = ("ant", "bee", "cat")


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    """Six parts of a photo, as PNG, JPEG and WebP."""
    with Image.open(shared("images/china_256.png")) as photo:
        parts = [photo.convert("RGB").crop((i * 20, 40, i * 20 + 24, 72)) for i in range(6)]
    files = []
    for part, kind in zip(parts, ("PNG", "JPEG", "WEBP") * 2):
        part.save(file := io.BytesIO(), kind)
        files.append(file.getvalue())
    return files


def write_tar(path, members: dict[str, bytes]):
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def members_of(pictures, numbers, **texts) -> dict[str, bytes]:
    members = {}
    for i in numbers:
        members[f"a/{i:04}.{('png', 'jpg', 'webp')[i % 3]}"] = pictures[i]
        members |= {f"a/{i:04}.{ending}": text(i).encode() for ending, text in texts.items()}
    return members


def gather_all(source, size=24):
    rows = source.rows(sequence=1, vocab=RGB, seed=0)
    return rows.gather(np.arange(len(rows))), rows


def with_controls(source):
    """The same source, once its control images are read."""
    source.read_controls()
    return source


def test_a_range_of_tar_files_is_the_folder_of_their_images(pictures, tmp_path):
    (tmp_path / "folder").mkdir()
    for i, data in enumerate(pictures):
        (tmp_path / "folder" / f"{i}.{('png', 'jpg', 'webp')[i % 3]}").write_bytes(data)
        (tmp_path / "folder" / f"{i}.txt").write_text(f"picture {i}\n")
    text = {"txt": lambda i: f"picture {i}\n", "cls": lambda i: str(i % 3), "json": lambda i: json.dumps({"width": i})}
    for shard in range(3):
        write_tar(tmp_path / f"shard-{shard:03}.tar", members_of(pictures, (2 * shard, 2 * shard + 1), **text))
    settings = DataSettings(source=f"{tmp_path}/shard-{{000..002}}.tar", held_out=0, image=ImageSettings(size=16))
    source = find_source(image_data(settings))
    batch, rows = gather_all(source)
    same, _ = gather_all(ImageFolder(str(tmp_path / "folder"), ImageSettings(size=16)))
    np.testing.assert_array_equal(batch["images"], same["images"])
    assert rows.table.captions == [f"picture {i}" for i in range(6)]
    assert batch["labels"].tolist() == [0, 1, 2, 0, 1, 2]
    # What does not stay in memory is read again where it is.
    source.decoded.clear()
    np.testing.assert_array_equal(gather_all(source)[0]["images"], batch["images"])
    assert is_textless(image_data(settings).source)


@pytest.fixture(scope="module")
def edges(pictures) -> list[bytes]:
    """A control image of each picture: half as high and wide, and of one channel."""
    files = []
    for picture in pictures:
        with Image.open(io.BytesIO(picture)) as image:
            image.convert("L").resize((12, 16)).save(file := io.BytesIO(), "PNG")
        files.append(file.getvalue())
    return files


def test_control_images_are_those_of_the_folder(pictures, edges, tmp_path):
    """diffusers' columns in Parquet; in a tar file, `conditioning_image` before the ending, or the ending that the settings name."""
    (tmp_path / "folder" / "edges").mkdir(parents=True)
    lines, ends = [], ("png", "jpg", "webp")
    for i in range(6):
        name = f"{i:04}.{ends[i % 3]}"
        (tmp_path / "folder" / name).write_bytes(pictures[i])
        (tmp_path / "folder" / "edges" / f"{i}.png").write_bytes(edges[i])
        lines.append({"file_name": name, "text": f"picture {i}", "conditioning_image": f"edges/{i}.png"})
    (tmp_path / "folder" / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    settings = ImageSettings(size=16, crop="random", flip=True)
    expected, rows = gather_all(with_controls(ImageFolder(str(tmp_path / "folder"), settings)))
    members = members_of(pictures, range(6), txt=lambda i: f"picture {i}")
    for kind, columns in (("conditioning_image.png", {}), ("seg.png", {"controls": "seg.png"})):
        both = members | {f"a/{i:04}.{kind}": edges[i] for i in range(6)}
        write_tar(tmp_path / "a.tar", {name: both[name] for name in sorted(both)})
        batch, rows_of_shards = gather_all(with_controls(ImageShards(str(tmp_path / "a.tar"), settings, columns=columns)))
        assert rows_of_shards.table.captions == rows.table.captions
        assert all((batch[name] == expected[name]).all() for name in ("images", "control"))
    assert expected["control"].shape == (6, 16, 16, 3)
    for image, control, columns in (("image", "conditioning_image", {}), ("shot", "hint", {"images": "shot", "controls": "hint"})):
        table = {image: [{"bytes": picture} for picture in pictures], control: edges, "text": [f"picture {i}" for i in range(6)]}
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet", row_group_size=1)
        batch, _ = gather_all(with_controls(ImageShards(str(tmp_path / "a.parquet"), settings, columns=columns)))
        assert all((batch[name] == expected[name]).all() for name in ("images", "control"))
    # Control images belong to what the data is.
    plain = write_tar(tmp_path / "plain.tar", {name: members[name] for name in sorted(members)})
    steered = with_controls(ImageShards(str(tmp_path / "a.tar"), settings, columns={"controls": "seg.png"}))
    assert ImageShards(str(plain), settings).fingerprint() != steered.fingerprint()


def test_control_images_that_are_missing_or_several_are_named(pictures, edges, tmp_path):
    members = members_of(pictures, range(3)) | {f"a/{i:04}.conditioning_image.png": edges[i] for i in range(3)}
    control_name = "a/0001.conditioning_image.png"
    cases = (
        (
            {name: data for name, data in members.items() if name != control_name},
            "without a control image, which others have: a.tar/a/0001",
        ),
        (members | {"a/0001.control.png": edges[0]}, "a record with several control images: conditioning_image.png, control.png"),
        (members | {control_name: b"none"}, "a/0001, its control image"),
    )
    for changed, problem in cases:
        write_tar(tmp_path / "a.tar", {name: changed[name] for name in sorted(changed)})
        with pytest.raises(BadInput, match=problem):
            with_controls(ImageShards(str(tmp_path / "a.tar"), ImageSettings(size=16)))
    # The last one is left out with its image.
    source = with_controls(ImageShards(str(tmp_path / "a.tar"), ImageSettings(size=16, invalid="drop")))
    assert source.unreadable == ["a.tar/a/0001"]
    source.decoded.clear()
    batch, _ = gather_all(source)
    del members[control_name], members["a/0001.jpg"]
    write_tar(tmp_path / "b.tar", {name: members[name] for name in sorted(members)})
    rest, _ = gather_all(with_controls(ImageShards(str(tmp_path / "b.tar"), ImageSettings(size=16))))
    assert all((batch[name] == rest[name]).all() for name in ("images", "control"))
    pyarrow.parquet.write_table(pyarrow.table({"image": pictures}), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"no column `edges`, which data\.columns\.controls names"):
        ImageShards(str(tmp_path / "a.parquet"), ImageSettings(size=16), columns={"controls": "edges"})


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet", "arrays"])
def test_control_images_are_left_alone_unless_an_objective_asks_for_them(kind, pictures, tmp_path):
    """Damaged ones, and columns that only have such a name, stop no other run, and the data is that without them."""
    settings, runs = ImageSettings(size=16), []
    for name, controls in (("with", b"no image"), ("without", None)):
        (root := tmp_path / name).mkdir()
        if kind == "folder":
            more = {} if controls is None else {"conditioning_image": "edges/missing.png"}
            for i in range(3):
                (root / f"{i}.png").write_bytes(pictures[i])
            lines = [json.dumps({"file_name": f"{i}.png", "text": "x"} | (more if i else {})) for i in range(3)]
            (root / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
            source = ImageFolder(str(root), settings)
        elif kind == "arrays":
            more = {} if controls is None else {"conditioning_images": np.zeros(2)}
            np.savez(root / "a.npz", images=np.full((3, 16, 16, 3), 255, np.uint8), **more)
            source = ImageArrays(str(root / "a.npz"), settings)
        elif kind == "tar":
            members = members_of(pictures, range(3))
            members |= {} if controls is None else {f"a/0001.{name}.png": controls for name in ("control", "conditioning_image")}
            write_tar(root / "a.tar", {name: members[name] for name in sorted(members)})
            source = ImageShards(str(root / "a.tar"), settings)
        else:
            more = {} if controls is None else {"control": ["canny"] * 3, "conditioning": [0.5] * 3, "control_image": [controls] * 3}
            pyarrow.parquet.write_table(pyarrow.table({"image": pictures[:3]} | more), root / "a.parquet")
            source = ImageShards(str(root / "a.parquet"), settings)
        batch, rows = gather_all(source)
        assert set(batch) == {"images"} == set(rows.fields)
        runs.append((batch["images"], source.fingerprint()))
        if controls is not None:
            with pytest.raises(BadInput):
                with_controls(source)
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    if kind != "arrays":
        # The fingerprint of a file of arrays is that of the file.
        assert runs[0][1] == runs[1][1]


def test_a_column_of_control_images_by_its_usual_name_holds_files(pictures, edges, tmp_path):
    """A column of texts or numbers is none, whatever its name; one that the settings name is meant."""
    table = {"image": pictures, "conditioning_image": ["canny"] * 6, "control": [{"bytes": edge} for edge in edges]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    source = with_controls(ImageShards(str(tmp_path / "a.parquet"), ImageSettings(size=16)))
    assert gather_all(source)[0]["control"].shape == (6, 16, 16, 3)
    with pytest.raises(BadInput, match="`conditioning_image` holds no bytes of an image"):
        with_controls(ImageShards(str(tmp_path / "a.parquet"), ImageSettings(size=16), columns={"controls": "conditioning_image"}))
    pyarrow.parquet.write_table(pyarrow.table({"image": ["a.png"] * 6, "png": pictures}), tmp_path / "b.parquet")
    assert len(ImageShards(str(tmp_path / "b.parquet"), ImageSettings(size=16))) == 6


def test_parquet_of_datasets_has_its_classes(pictures, tmp_path):
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES)), "text": datasets.Value("string")}
    images = [{"bytes": data, "path": None} for data in pictures]
    rows = {"image": images, "label": [2, 1, 0, 0, 1, 2], "text": [f"a {i}" for i in range(6)]}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).to_parquet(str(tmp_path / "a.parquet"), batch_size=4)
    source = find_source(image_data(DataSettings(source=f"{tmp_path}/*.parquet", held_out=0, image=ImageSettings(size=16))))
    batch, image_rows = gather_all(source)
    assert (source.class_names, batch["labels"].tolist()) == (NAMES, [2, 1, 0, 0, 1, 2])
    assert image_rows.table.captions == [f"a {i}" for i in range(6)]
    write_tar(tmp_path / "a.tar", members_of(pictures, range(6)))
    same, _ = gather_all(ImageShards(str(tmp_path / "a.tar"), ImageSettings(size=16)))
    np.testing.assert_array_equal(batch["images"], same["images"])
    source.decoded.clear()
    np.testing.assert_array_equal(gather_all(source)[0]["images"], batch["images"])


def test_columns_name_images_captions_and_classes(pictures, tmp_path):
    table = pyarrow.table({"shot": pictures, "said": ["a", "b", "c"] * 2, "kind": ["x", "y"] * 3, "text": ["no"] * 6})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    members = members_of(pictures, range(6), json=lambda i: json.dumps({"said": "abc"[i % 3], "kind": "xy"[i % 2], "text": "no"}))
    members |= {f"a/{i:04}.mask.png": pictures[0] for i in range(6)}
    write_tar(tmp_path / "a.tar", {name: members[name] for name in sorted(members)})
    for file, images in (("a.parquet", "shot"), ("a.tar", "mask.png")):
        columns = {"images": images, "captions": "said", "labels": "kind"}
        source = ImageShards(str(tmp_path / file), ImageSettings(size=16), columns=columns)
        assert [file.caption for file in source.files] == ["a", "b", "c"] * 2
        assert (source.class_names, [file.label for file in source.files]) == (("x", "y"), [0, 1] * 3)


@pytest.mark.parametrize("change, problem", [
    (lambda m: {**m, "a/0001.png": m["a/0000.png"]}, "a record with several images: jpg, png"),
    (lambda m: {k: v for k, v in m.items() if k != "a/0001.jpg"}, "a record with no image"),
    (lambda m: {k: v for k, v in m.items() if k != "a/0001.txt"}, "an image without a caption, which others have: a.tar/a/0001"),
    (lambda m: {**m, "a/0001.jpg": b"no image"}, "no image that can be read"),
])  # fmt: skip
def test_mistakes_are_named_by_record(pictures, tmp_path, change, problem):
    members = change(members_of(pictures, range(2), txt=str))
    write_tar(tmp_path / "a.tar", {name: members[name] for name in sorted(members)})
    with pytest.raises(BadInput, match=problem) as caught:
        ImageShards(str(tmp_path / "a.tar"), ImageSettings(size=16))
    assert "0001" in f"{caught.value.where} {caught.value.what}"


def test_damaged_shards_are_named(pictures, tmp_path):
    whole = write_tar(tmp_path / "a.tar", members_of(pictures, range(6))).read_bytes()
    endless = whole[: len(whole.rstrip(b"\0")) // 512 * 512]
    for name, data in (("cut", whole[:3000]), ("endless", endless), ("packed", gzip.compress(whole))):
        (tmp_path / f"{name}.tar").write_bytes(data)
        with pytest.raises(Damaged, match="a damaged tar file") as caught:
            ImageShards(str(tmp_path / f"{name}.tar"), ImageSettings(size=16))
        assert f"{name}.tar" in str(caught.value.where)
    assert "unpacked first" in str(caught.value.hint)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match="no column of images"):
        ImageShards(str(tmp_path / "a.parquet"), ImageSettings(size=16))


def test_images_that_are_left_out_leave_the_others_where_they_are(pictures, tmp_path):
    members = members_of(pictures, range(6), cls=lambda i: str(i)) | {"a/0002.webp": b"no image"}
    write_tar(tmp_path / "a.tar", {name: members[name] for name in sorted(members)})
    source = ImageShards(str(tmp_path / "a.tar"), ImageSettings(size=16, invalid="drop"))
    assert source.unreadable == ["a.tar/a/0002"]
    batch, _ = gather_all(source)
    assert batch["labels"].tolist() == [0, 1, 3, 4, 5]
    source.decoded.clear()
    np.testing.assert_array_equal(gather_all(source)[0]["images"], batch["images"])


def test_a_range_names_files_that_are_all_there(tmp_path):
    for i in (8, 9, 10):
        (tmp_path / f"a-{i:02}.txt").write_text("a")
    place = f"{tmp_path}/a-{{08..10}}.txt"
    assert has_wildcards(place)
    assert [file.name for file in matching_files(place)] == ["a-08.txt", "a-09.txt", "a-10.txt"]
    with pytest.raises(BadInput, match=r"no such file: `.*a-11\.txt`"):
        matching_files(f"{tmp_path}/a-{{08..11}}.txt")
