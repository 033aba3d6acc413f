"""MDS shards: those that MosaicML's library wrote, and damage to them. `tests/reference/mosaic.py` makes the goldens."""

import json
import random
import shutil
from pathlib import Path

import data_files
import fsspec
import pytest
from test_file_kinds import expected, rows_of, source_of, texts, tokens_of

from argosy.core.errors import ArgosyError, BadInput, Damaged

__all__ = ["expected"]
GOLDENS = Path(__file__).parents[1] / "goldens" / "mosaic"


def columns_in(folder, **fields) -> list[dict]:
    source = source_of(folder, format="prompt", columns={"prompt": "text"}, **fields)
    return [{"text": document.record.prompt} | dict(document.record.columns) for document in source.documents() if document.record]


@pytest.mark.parametrize("name", ["plain", "zstd", "gz"])
def test_every_encoding_is_what_the_library_wrote(name):
    """The rows that the golden's maker gave to the library's writer."""
    expected_rows = [
        {"text": f"Zeile {i} äöü 漢字 " * (i % 5 + 1), "id": i, "words": f"bytes {i}", "meta": {"a": [i, None], "b": "x"},
         "dyn": [n * i for n in range(i % 3 + 1)], "row": [i, i + 0.5], "some": [[i] * (i % 2 + 1)] * 2, "u": i, "f": i / 7,
         "big": 10**30 + i}
        for i in range(40)
    ]  # fmt: skip
    assert columns_in(GOLDENS / name) == expected_rows
    source = source_of(GOLDENS / name)
    assert [document.text for document in source.documents()] == [row["text"] for row in expected_rows]
    assert "raw" in source.ignored  # bytes that are no text
    assert source_of(GOLDENS / name / "index.json").fingerprint() == source.fingerprint()


@pytest.mark.parametrize("packed", [False, True])
def test_shards_give_the_tokens_of_other_files(tmp_path, expected, packed):
    data_files.mds(tmp_path / "set", rows_of(), packed=packed)
    assert tokens_of(source_of(tmp_path / "set"), tmp_path / "made") == expected


def test_at_an_address():
    files = fsspec.filesystem("memory")
    for path in (GOLDENS / "zstd").iterdir():
        files.pipe_file(f"/mosaic/{path.name}", path.read_bytes())
    assert texts("memory://mosaic") == texts(GOLDENS / "zstd")
    files.rm("/mosaic", recursive=True)


def damage_copy(tmp_path, name: str, change) -> Path:
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(GOLDENS / name, folder)
    change(folder)
    return folder


@pytest.mark.parametrize("name", ["plain", "zstd", "gz"])
def test_damage_is_named_with_the_file(tmp_path, name):
    """`plain` has hashes of its shards, gzip a checksum of its own. Other bytes of texts cannot be told from right ones."""
    draw = random.Random(5)
    whole = texts(GOLDENS / name)
    shard = sorted(path.name for path in (GOLDENS / name).glob("shard.00001*"))[0]
    size = (GOLDENS / name / shard).stat().st_size

    def flip(folder):
        data = bytearray((folder / shard).read_bytes())
        data[draw.randrange(size)] ^= 1 << draw.randrange(8)
        (folder / shard).write_bytes(data)

    for change in [flip] * 20 + [lambda folder: (folder / shard).write_bytes((GOLDENS / name / shard).read_bytes()[: size // 2])]:
        folder = damage_copy(tmp_path, name, change)
        try:
            contents = texts(folder)
        except ArgosyError as error:
            contents = str(error.where)
        if isinstance(contents, str):
            assert shard in contents
        else:
            assert contents == whole or (name == "zstd" and change is flip)
    with pytest.raises(Damaged, match="bytes that has"):
        texts(damage_copy(tmp_path, name, lambda folder: (folder / shard).write_bytes(b"")))
    with pytest.raises(BadInput, match="a shard that the index names is missing") as missing:
        texts(damage_copy(tmp_path, name, lambda folder: (folder / shard).unlink()))
    assert str(missing.value.where).endswith(json.loads((GOLDENS / name / "index.json").read_text())["shards"][1][
        "raw_data" if name == "plain" else "zip_data"
    ]["basename"])  # fmt: skip


def test_a_sample_is_named(tmp_path):
    data_files.mds(tmp_path / "set", rows_of(30), per_shard=10)
    path = tmp_path / "set" / "shard.00001.mds"
    data = bytearray(path.read_bytes())
    fourth = int.from_bytes(data[4 * 4 : 4 * 5], "little")
    data[fourth] ^= 1  # the length of its text
    path.write_bytes(data)
    with pytest.raises(Damaged, match="the sizes of its columns") as caught:
        texts(tmp_path / "set")
    assert str(caught.value.where) == f"{path}, sample 3"


def test_what_is_not_read_is_refused_by_name(tmp_path):
    def other(**fields):
        def change(folder):
            index = json.loads((folder / "index.json").read_text())
            index["shards"][0] |= fields
            (folder / "index.json").write_text(json.dumps(index))

        return change

    with pytest.raises(BadInput, match="shards of format jsonl"):
        texts(damage_copy(tmp_path, "plain", other(format="jsonl")))
    with pytest.raises(BadInput, match="a shard compressed by `br`"):
        texts(damage_copy(tmp_path, "zstd", other(compression="br:11")))
    with pytest.raises(Damaged, match="cannot be understood"):
        texts(damage_copy(tmp_path, "zstd", other(column_names=["a"])))
    with pytest.raises(BadInput, match="an MDS shard alone"):
        texts(GOLDENS / "plain" / "shard.00000.mds")
    with pytest.raises(BadInput, match="no files to read") as caught:
        texts(GOLDENS)
    assert f"data.source={GOLDENS}/gz" in str(caught.value.hint)
