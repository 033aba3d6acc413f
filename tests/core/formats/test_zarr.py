"""Arrays as Zarr 3, read back by TensorStore, which wrote none of them."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore

from argosy.core.errors import Damaged, Unsupported
from argosy.core.formats import TensorEntry
from argosy.core.formats.files import write_file
from argosy.core.formats.zarr import DTYPES, array_files, map_array

SHAPES = [(), (1,), (7,), (5, 3), (1, 9), (4, 3, 2), (2, 1, 3, 2)]


def write_zarr(folder: Path, array: np.ndarray) -> Path:
    for file in array_files(TensorEntry("layers.0.x", array.shape, array.dtype, lambda: array)):
        write_file(folder / file.name, file)
        assert (folder / file.name).stat().st_size == file.bytes
    return folder / "layers.0.x"


def theirs(folder: Path) -> tensorstore.TensorStore:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    return tensorstore.open(spec, open=True, read=True).result()


def noise(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    raw = np.random.default_rng(0).integers(0, 2 if dtype.kind == "b" else 100, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("chunk_bytes", [1, 20, 1 << 24])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tensorstore_reads_what_is_written(tmp_path, monkeypatch, shape, chunk_bytes):
    monkeypatch.setattr("argosy.core.formats.zarr.CHUNK_BYTES", chunk_bytes)
    x = noise(shape, np.dtype(ml_dtypes.bfloat16))
    stored = theirs(write_zarr(tmp_path, x))
    assert (stored.shape, stored.read().result().tobytes()) == (x.shape, x.tobytes())
    if len(shape) > 1:
        assert stored[shape[0] - 1].read().result().tobytes() == x[-1].tobytes(), "a part alone"


@pytest.mark.parametrize("name", sorted(DTYPES - {"int4"}))
def test_every_type(tmp_path, name):
    x = noise((3, 5), np.dtype(name))
    stored = theirs(write_zarr(tmp_path, x)).read().result()
    assert (stored.dtype, stored.tobytes()) == (x.dtype, x.tobytes())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_written_is_mapped(tmp_path, monkeypatch, shape):
    monkeypatch.setattr("argosy.core.formats.zarr.CHUNK_BYTES", 20)
    x = noise(shape, np.dtype(np.float32))
    mapped = map_array(write_zarr(tmp_path, x))
    assert mapped is not None
    assert (mapped.shape, mapped.dtype, mapped.tobytes()) == (x.shape, x.dtype, x.tobytes())
    assert not mapped.flags.writeable


def test_a_transposed_array_is_put_in_order(tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert theirs(write_zarr(tmp_path, x)).read().result().tolist() == x.tolist()


def test_another_layout_is_not_mapped(tmp_path):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/x/"}}
    metadata = {"shape": [4, 3], "data_type": "float32", "codecs": [{"name": "zstd", "configuration": {"level": 1}}]}
    tensorstore.open(spec | {"metadata": metadata}, create=True).result()[...] = np.ones((4, 3), np.float32)
    assert map_array(tmp_path / "x") is None
    assert map_array(tmp_path / "nowhere") is None


def test_a_file_cut_short_is_damaged(tmp_path):
    folder = write_zarr(tmp_path, np.ones((4, 3), np.float32))
    file = folder / "c" / "0" / "0"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Damaged, match="which is not the size of"):
        map_array(folder)


def test_a_type_without_a_name_is_refused():
    with pytest.raises(Unsupported, match="complex128"):
        array_files(TensorEntry("x", (2,), np.dtype(complex), lambda: np.zeros(2, complex)))
