"""Safetensors against the library of that name, in both directions; hostile headers; folders."""

import json
import os
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from helpers import shared

from argosy.core.errors import ArgosyError, BadInput, Damaged, Unsupported
from argosy.core.formats import Arrays, TensorEntry
from argosy.core.formats.safetensors import DTYPES, SafeTensors, SafetensorsFolder, folder_files, write_folder


def some(seed: int = 0) -> dict[str, np.ndarray]:
    """One tensor of each type, with odd sizes, so that later ones are not aligned; a scalar, an empty one."""
    rng = np.random.default_rng(seed)
    tensors = {"scalar": np.array(3.5, np.float32), "empty": np.zeros((0, 4), np.float16)}
    for code, dtype in DTYPES.items():
        size = rng.integers(1, 6, 3)
        raw = rng.integers(0, 2 if code == "BOOL" else 200, (*size[:-1], size[-1] * dtype.itemsize), np.uint8)
        tensors[f"a.{code}"] = raw.view(dtype)
    return tensors


def entries(tensors: dict[str, np.ndarray]) -> list[TensorEntry]:
    return [TensorEntry(name, x.shape, x.dtype, lambda x=x: x) for name, x in tensors.items()]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def header_of(**changes: object) -> dict:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


# ---- one file


def test_reads_what_the_library_reads():
    path = shared("models/stories260k/model.safetensors")
    ours, theirs = SafeTensors.open(path), safetensors.numpy.load_file(path)
    assert set(ours.names) == set(theirs)
    assert ours.metadata == {"format": "pt"}
    for name, x in theirs.items():
        assert same(ours.read(name), x)
        assert (ours.shape(name), ours.dtype(name)) == (x.shape, x.dtype)


def test_reads_what_the_library_writes(tmp_path):
    tensors = {k: v for k, v in some().items() if k not in ("a.C64", "a.F8_E8M0")}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors", {"a": "b"})
    ours = SafeTensors.open(tmp_path / "x.safetensors")
    assert ours.metadata == {"a": "b"}
    assert all(same(ours.read(name), x) for name, x in tensors.items())


def test_the_library_reads_what_is_written(tmp_path):
    tensors = some()
    assert write_folder(tmp_path, entries(tensors)) == [tmp_path / "model.safetensors"]
    theirs = dict(safetensors.deserialize((tmp_path / "model.safetensors").read_bytes()))
    assert set(theirs) == set(tensors)
    for name, x in tensors.items():
        assert (tuple(theirs[name]["shape"]), bytes(theirs[name]["data"])) == (x.shape, x.tobytes())
        assert DTYPES[theirs[name]["dtype"]] == x.dtype


def test_tensors_are_views_of_the_file():
    file = SafeTensors.open(shared("models/stories260k/model.safetensors"))
    tracemalloc.start()
    view = file.read("model.embed_tokens.weight")
    assert tracemalloc.get_traced_memory()[1] < 10_000 < view.nbytes
    tracemalloc.stop()
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


HOSTILE = {
    "nothing": b"",
    "short": b"\x05\0\0",
    "header over the file": file_of(header_of(), b"\0" * 8, length=10_000),
    "header over the limit": file_of(header_of(), b"\0" * 8, length=100_000_001),
    "header of 2^64": file_of(header_of(), b"\0" * 8, length=2**64 - 1),
    "not JSON": file_of(b"{nonsense}"),
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "not an object": file_of([1]),
    "nested": file_of(b'{"a":' + b"[" * 200_000),
    "endless number": file_of(b'{"a":' + b"9" * 10_000 + b"}"),
    "not a number": file_of(b'{"a": NaN}'),
    "key twice": file_of(
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"\0",
    ),
    "field twice": file_of(b'{"x":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"\0"),
    "metadata": file_of(header_of() | {"__metadata__": {"a": 1}}, b"\0" * 8),
    "entry": file_of({"x": 3}),
    "field missing": file_of({"x": {"dtype": "F32", "shape": [0]}}),
    "field too many": file_of(header_of(more=1), b"\0" * 8),
    "dtype": file_of(header_of(dtype="F33"), b"\0" * 8),
    "dtype a list": file_of(header_of(dtype=["F32"]), b"\0" * 8),
    "negative size": file_of(header_of(shape=[-2]), b"\0" * 8),
    "size a float": file_of(header_of(shape=[2.0]), b"\0" * 8),
    "size a bool": file_of(header_of(shape=[True, 2]), b"\0" * 8),
    "size a text": file_of(header_of(shape="2"), b"\0" * 8),
    "33 axes": file_of(header_of(shape=[1] * 32 + [2]), b"\0" * 8),
    "overflow": file_of(header_of(shape=[2**33, 2**33, 0], data_offsets=[0, 0])),
    "overflow to right": file_of(header_of(shape=[2**62 + 2]), b"\0" * 8),
    "shape too large": file_of(header_of(shape=[3]), b"\0" * 8),
    "offsets reversed": file_of(header_of(data_offsets=[8, 0]), b"\0" * 8),
    "offsets three": file_of(header_of(data_offsets=[0, 4, 8]), b"\0" * 8),
    "offsets negative": file_of(header_of(data_offsets=[-8, 0]), b"\0" * 8),
    "out of bounds": file_of(header_of(), b"\0" * 7),
    "far out of bounds": file_of(header_of(data_offsets=[2**60, 2**60 + 8]), b"\0" * 8),
    "trailing bytes": file_of(header_of(), b"\0" * 9),
    "hole at the start": file_of(header_of(data_offsets=[4, 12]), b"\0" * 12),
    "hole": file_of(header_of() | {"y": {"dtype": "U8", "shape": [1], "data_offsets": [9, 10]}}, b"\0" * 10),
    "overlap": file_of(header_of() | {"y": {"dtype": "U8", "shape": [1], "data_offsets": [7, 8]}}, b"\0" * 8),
    "the same bytes": file_of(header_of() | {"y": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_damaged(name, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    with pytest.raises(Damaged) as error:
        SafeTensors.open(path)
    assert tracemalloc.get_traced_memory()[1] < 20 * len(HOSTILE[name]) + 100_000
    tracemalloc.stop()
    assert len(str(error.value).splitlines()) <= 5


def test_the_unchanged_header_is_accepted(tmp_path):
    """What the hostile ones were made from."""
    (tmp_path / "x").write_bytes(file_of(header_of(), b"\0" * 8))
    assert SafeTensors.open(tmp_path / "x").read("x").tolist() == [0, 0]


def test_as_many_axes_as_the_limit_are_read(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(file_of(header_of(shape=[1] * 31 + [2]), b"\0" * 8))
    assert SafeTensors.open(tmp_path / "a.safetensors").shape("x") == (1,) * 31 + (2,)


def test_errors_name_the_tensor_and_fit_a_line(tmp_path):
    name = "evil\n\x1b[31m" + "x" * 100_000
    (tmp_path / "x").write_bytes(file_of({name: header_of()["x"]}, b"\0" * 7))
    with pytest.raises(Damaged) as error:
        SafeTensors.open(tmp_path / "x")
    assert "evil\\n\\x1b[31mxxx" in error.value.what
    assert len(str(error.value)) < 500
    (tmp_path / "x").write_bytes(file_of(header_of(dtype="F4"), b"\0" * 8))
    with pytest.raises(Unsupported, match="F4"):
        SafeTensors.open(tmp_path / "x")


def test_missing_file_and_folder_are_bad_input(tmp_path):
    with pytest.raises(BadInput, match="no file"):
        SafeTensors.open(tmp_path / "none")
    with pytest.raises(BadInput, match="folder"):
        SafeTensors.open(tmp_path)


@pytest.mark.slow
def test_mutations_never_crash(tmp_path):
    """2,000 files with 1 to 4 wrong bytes, most of them in the header, or cut short."""
    rng = np.random.default_rng(0)
    write_folder(tmp_path, entries(some()))
    good = (tmp_path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    path, outcomes = tmp_path / "x", {"read": 0, "refused": 0}
    tracemalloc.start()
    for i in range(2000):
        bad = bytearray(good)
        for _ in range(rng.integers(1, 5)):
            bad[rng.integers(0, header if i % 10 else len(bad))] = rng.integers(0, 256)
        path.write_bytes(bad[: rng.integers(0, len(bad))] if i % 20 == 0 else bad)
        try:
            file = SafeTensors.open(path)
            for name in file.names:
                assert file.read(name).shape == file.shape(name)
            outcomes["read"] += 1
        except ArgosyError:
            outcomes["refused"] += 1
    assert tracemalloc.get_traced_memory()[1] < 20 * len(good) + 500_000
    tracemalloc.stop()
    assert outcomes["refused"] > 1000
    assert outcomes["read"] > 40


# ---- folders


def sharded(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors = {f"t{i}": rng.normal(size=(5, 7)).astype(ml_dtypes.bfloat16) for i in range(9)}
    write_folder(folder, entries(tensors), shard_bytes=3 * 70)
    return tensors


def test_shards_and_index(tmp_path):
    tensors = sharded(tmp_path)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, "model.safetensors.index.json"])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    folder = SafetensorsFolder.open(tmp_path)
    assert folder.metadata == {"format": "pt"}
    assert list(folder.names) == list(tensors)
    for name, x in tensors.items():
        assert same(folder.read(name), x)
        theirs = safetensors.numpy.load_file(tmp_path / index["weight_map"][name])
        assert same(theirs[name], x)


def test_order_is_as_given_and_large_tensors_stand_alone(tmp_path):
    tensors = {name: np.full(n, 1, np.uint8) for name, n in (("b", 3), ("a", 100), ("d", 4), ("c", 3))}
    files = write_folder(tmp_path, entries(tensors), shard_bytes=8)
    assert [list(SafeTensors.open(file).names) for file in files] == [["b"], ["a"], ["d", "c"]]


def test_the_index_is_as_transformers_writes_it(tmp_path):
    """Its two totals, sorted names, indented by two."""
    tensors = sharded(tmp_path)
    text = (tmp_path / "model.safetensors.index.json").read_text()
    total = {"total_parameters": sum(x.size for x in tensors.values()), "total_size": 9 * 70}
    names = {f"t{i}": f"model-0000{i // 3 + 1}-of-00003.safetensors" for i in range(9)}
    assert text == json.dumps({"metadata": total, "weight_map": names}, indent=2, sort_keys=True) + "\n"


def test_sizes_are_known_before_anything_is_made():
    def fails() -> np.ndarray:
        raise AssertionError("made")

    tensors = some()
    lazy_entries = [entry._replace(make=fails) for entry in entries(tensors)]
    for shard_bytes in (5e9, 50):
        files = folder_files(lazy_entries, shard_bytes)
        whole = folder_files(entries(tensors), shard_bytes)
        for file, same_file in zip(files, whole, strict=True):
            assert file.bytes == sum(len(slab) for slab in same_file.slabs(np.ascontiguousarray))
            assert file.name == same_file.name


def test_weights_that_are_there_are_not_overwritten(tmp_path):
    for shard_bytes in (5e9, 8):
        folder = tmp_path / str(shard_bytes)
        write_folder(folder, entries({"x": np.arange(3), "y": np.arange(2)}), shard_bytes)
        with pytest.raises(BadInput, match="already contains weights"):
            write_folder(folder, entries({"x": np.arange(3)}))
        assert set(SafetensorsFolder.open(folder).names) == {"x", "y"}


def test_everything_wrong_with_a_folder_at_once(tmp_path):
    sharded(tmp_path)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    first, second, third = (f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
    del index["weight_map"]["t0"]
    index["weight_map"] |= {"ghost": first, "t4": first}
    index_path.write_text(json.dumps(index))
    os.remove(tmp_path / third)
    with pytest.raises(BadInput) as error:
        SafetensorsFolder.open(tmp_path)
    for part in (
        "5 problems",
        f"no file `{tmp_path / third}`",
        f"`t0` of `{first}` is not in the index",
        f"`ghost` is not in `{first}`, where the index expects it",
        f"`t4` is not in `{first}`",
        f"`t4` is in `{second}` too, the index has it in `{first}`",
    ):
        assert part in error.value.what
    assert error.value.exit_code == 2
    assert len(str(error.value).splitlines()) <= 5


def test_a_damaged_shard_is_damaged(tmp_path):
    sharded(tmp_path)
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Damaged, match="model-00002"):
        SafetensorsFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", "", "a\\b", "c:x", "a\0b"])
def test_shard_names_stay_in_the_folder(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(Damaged, match="same folder"):
        SafetensorsFolder.open(tmp_path)


def test_folders_without_weights(tmp_path):
    with pytest.raises(BadInput, match="no folder"):
        SafetensorsFolder.open(tmp_path / "none")
    with pytest.raises(BadInput, match="no `model") as error:
        SafetensorsFolder.open(tmp_path)
    assert error.value.hint is None
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(BadInput) as error:
        SafetensorsFolder.open(tmp_path)
    assert "pickled" in (error.value.hint or "")


# ---- writing


def test_one_tensor_in_memory_at_a_time(tmp_path, monkeypatch):
    """Eight transposed tensors of 8 MB: the file has 64."""
    monkeypatch.setattr("argosy.core.formats.files.SLAB_BYTES", 1 << 20)
    kind = np.dtype(np.float32)
    lazy_entries = [TensorEntry(f"t{i}", (1000, 2000), kind, lambda: np.ones((2000, 1000), kind).T) for i in range(8)]
    tracemalloc.start()
    write_folder(tmp_path, lazy_entries)
    assert tracemalloc.get_traced_memory()[1] < 12e6
    tracemalloc.stop()
    assert SafetensorsFolder.open(tmp_path).read("t7").all()


def test_a_part_is_that_of_the_whole(tmp_path):
    """Where the file did not align the tensor, no more than the part is copied."""
    odd, x = np.ones(3, np.uint8), np.arange(8 << 17, dtype=np.float32).reshape(8, 1 << 10, 1 << 7)
    write_folder(tmp_path, entries({"odd": odd, "x": x}))
    folder = SafetensorsFolder.open(tmp_path)
    tracemalloc.start()
    for i in range(8):
        part = folder.read_part("x", i)
        assert part.flags.aligned
        assert same(part, x[i])
    assert tracemalloc.get_traced_memory()[1] < x.nbytes / 2, "of 4 MB"
    tracemalloc.stop()


def test_a_tensor_written_part_by_part(tmp_path):
    x = np.random.default_rng(0).normal(size=(5, 30, 40)).astype(np.float32)
    entry = entries({"x": x})[0]

    def never() -> np.ndarray:
        raise AssertionError("the whole is not asked for")

    write_folder(tmp_path, [entry._replace(make=never, parts=lambda: (part.T.copy().T for part in x))])
    assert same(safetensors.numpy.load_file(tmp_path / "model.safetensors")["x"], x)
    for parts in (lambda: iter(x[:4]), lambda: iter(x.swapaxes(1, 2)), lambda: iter(x.astype(np.float64))):
        with pytest.raises(ValueError, match="announced as"):
            write_folder(tmp_path / "other", [entry._replace(parts=parts)])


def test_transposed_tensors_in_slabs(tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.core.formats.files.SLAB_BYTES", 100)
    x = np.arange(3 * 41 * 5).reshape(5, 41, 3).T
    write_folder(tmp_path, entries({"x": x}))
    assert same(safetensors.numpy.load_file(tmp_path / "model.safetensors")["x"], np.ascontiguousarray(x))


def test_what_comes_otherwise_than_announced_is_refused(tmp_path):
    for make in (lambda: np.zeros(3, np.float32), lambda: np.zeros(2, np.float64)):
        with pytest.raises(ValueError, match="announced"):
            write_folder(tmp_path, [TensorEntry("x", (2,), np.dtype(np.float32), make)])
    with pytest.raises(ValueError, match="names"):
        write_folder(tmp_path, entries({"x": np.zeros(1)}) * 2)
    with pytest.raises(Unsupported, match="complex128"):
        write_folder(tmp_path, entries({"x": np.zeros(1, complex)}))
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_reported_before_anything_is_written(tmp_path):
    with pytest.raises(BadInput, match="GB free"):
        write_folder(tmp_path, [TensorEntry("x", (2**58,), np.dtype(np.float32), lambda: np.zeros(1))])
    assert list(tmp_path.iterdir()) == []


def test_arrays_are_a_reader():
    reader = Arrays({"x": np.zeros((2, 3), np.int8)})
    assert (list(reader.names), reader.shape("x"), reader.dtype("x")) == (["x"], (2, 3), np.dtype(np.int8))
    assert reader.read("x").shape == (2, 3)
