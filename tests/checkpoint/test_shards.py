"""Arrays read straight into memory, against TensorStore, for what conversions, one process and several write."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from argosy.checkpoint.saving.memory import HostMemory
from argosy.checkpoint.step import shards
from argosy.checkpoint.step.files import write_files
from argosy.checkpoint.step.layout import WEIGHTS, catalog
from argosy.core.errors import Damaged
from argosy.core.formats import zarr, zarr_parts

ARRAYS = {
    "odd": np.arange(7 * 6 * 4, dtype=np.int32).reshape(7, 6, 4),
    "rows": np.arange(8 * 6, dtype=np.float32).reshape(8, 6),
    "half": np.arange(16).astype("bfloat16").reshape(4, 4),
    "scalar": np.asarray(3.5, np.float32),
    "none": np.zeros((0, 4), np.float32),
}
MESH = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"))


@pytest.fixture(params=["one", "chunks", "shards", "columns"])
def step(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Several chunks a file, the last padded, and several pieces a read.
    if request.param == "chunks":
        monkeypatch.setattr(zarr, "CHUNK_BYTES", 50)
    monkeypatch.setattr(zarr_parts, "PIECE_BYTES", 100)
    monkeypatch.setattr(shards, "GROUP_BYTES", 200)
    if request.param in ("one", "chunks"):
        items = shards.copy_shards({WEIGHTS: ARRAYS}, HostMemory().copies(), True)
    else:
        both = {"rows": P("a", "b"), "half": P("b"), "odd": P(None, "a")}
        axes = both if request.param == "shards" else {"rows": P(None, "b"), "half": P(None, "a")}
        place = {n: NamedSharding(MESH, axes.get(n, P())) for n in ARRAYS}
        placed = {n: jax.device_put(a, place[n]) for n, a in ARRAYS.items()}
        items = shards.copy_shards({WEIGHTS: placed}, HostMemory().copies(), True)
    write_files(tmp_path / "1", [*shards.shard_files(items), *shards.description_files(items, "{}")])
    return tmp_path / "1"


def shapes_on(**axes: P) -> dict[str, jax.ShapeDtypeStruct]:
    places = {n: NamedSharding(MESH, axes.get(n, P())) for n in ARRAYS}
    return {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=places[n]) for n, a in ARRAYS.items()}


@pytest.mark.parametrize(
    "axes",
    [{}, {"rows": P("a"), "odd": P(None, "b")}, {"rows": P("b", "a"), "odd": P(None, "a", "b"), "half": P(None, ("a", "b"))}],
    ids=["whole", "rows", "both"],
)
def test_every_part_is_what_tensorstore_reads(step: Path, axes: dict[str, P]):
    likes = shapes_on(**axes)
    back = shards.read_arrays(step, WEIGHTS, likes)
    for name, array in ARRAYS.items():
        assert zarr_parts.zarr_layout(step / WEIGHTS / name) is not None, "TensorStore read it both times"
        theirs = shards._by_tensorstore(step, WEIGHTS, name, likes[name])
        assert back[name].sharding == theirs.sharding == likes[name].sharding
        assert back[name].dtype == array.dtype
        for ours, its in zip(back[name].addressable_shards, theirs.addressable_shards, strict=True):
            assert np.asarray(ours.data).tobytes() == np.asarray(its.data).tobytes() == array[ours.index].tobytes()


def test_only_the_files_of_what_is_held_are_needed(step: Path):
    places = {n: NamedSharding(MESH, P()) for n in ARRAYS}
    needed = set(shards.needed_files(step, {WEIGHTS: places}, []))
    assert needed == {str(f.relative_to(step)) for f in step.rglob("*") if f.is_file() and "/c/" in f"{f}/"}


def test_a_file_that_is_cut_or_whose_chunks_moved_is_damage(step: Path):
    file = next(f for f in sorted((step / WEIGHTS / "rows" / "c").rglob("*")) if f.is_file())
    data = file.read_bytes()
    for bad in (data[:-1], data[:-16] + bytes(16), data + b"x"):
        file.write_bytes(bad)
        with pytest.raises(Damaged, match="is damaged"):
            shards.read_arrays(step, WEIGHTS, shapes_on())


def test_other_metadata_are_left_to_tensorstore(tmp_path: Path):
    """As Orbax writes a folder an array: chunks without an index, compressed."""
    import tensorstore

    folder = tmp_path / WEIGHTS / "rows"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    chunks: dict[str, Any] = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 6]}}, "codecs": [{"name": "gzip"}]}
    tensorstore.open({**spec, "metadata": chunks}, create=True, dtype="float32", shape=(8, 6)).result()[...] = ARRAYS["rows"]
    for file in catalog({WEIGHTS: ["rows"]}):
        write_files(tmp_path, [file])
    assert json.loads((folder / "zarr.json").read_text())["codecs"][-1]["name"] == "gzip"
    assert zarr_parts.zarr_layout(folder) is None
    like = {"rows": shapes_on(rows=P("a", "b"))["rows"]}
    np.testing.assert_array_equal(shards.read_arrays(tmp_path, WEIGHTS, like)["rows"], ARRAYS["rows"])


def test_what_is_read_may_be_donated(step: Path):
    """On a CPU the arrays are the memory that was read into, copies of one array the same: a step must not write into it twice."""
    back = shards.read_arrays(step, WEIGHTS, shapes_on())["rows"]
    copies = [np.array(s.data) for s in back.addressable_shards]
    again = jax.jit(lambda x: x + 1, donate_argnums=0)(back)
    for _ in range(3):
        again = jax.jit(lambda x: x + 1, donate_argnums=0)(again)
    for before, shard in zip(copies, again.addressable_shards, strict=True):
        np.testing.assert_array_equal(np.asarray(shard.data), before + 4)


def test_memory_that_is_read_into_is_taken_as_it_is():
    room = zarr_parts.aligned_memory((1000, 16), np.dtype(np.float32))
    room[...] = 1
    array = jax.device_put(room, SingleDeviceSharding(jax.devices()[0]))
    assert array.unsafe_buffer_pointer() == room.ctypes.data
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(array))
    assert (room == 1).all(), "a donated step wrote into memory of the host"
