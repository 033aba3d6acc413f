"""Weights one at a time: the same numbers as read at once, from every layout, and pages given back."""

import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from golden_weights import write_model
from orbax.checkpoint import v1

from argosy.checkpoint.open import open_model
from argosy.checkpoint.step.layout import META, WEIGHTS, array_by_array
from argosy.checkpoint.step.load import load_weights, read_meta, stored_shapes
from argosy.checkpoint.step.reader import read_array
from argosy.core.errors import Damaged
from argosy.core.formats import Arrays, TensorEntry
from argosy.core.formats.files import write_file
from argosy.core.formats.safetensors import SafeTensors, write_folder
from argosy.core.settings import dump
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import split
from argosy.weights import manifest
from argosy.weights.fill import read_into
from argosy.weights.stream import in_order, largest_tensor, releasing, streaming_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(GOLDENS / "llama-grouped", tmp_path_factory.mktemp("stream") / "hub")


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
def test_in_order_is_what_numpy_makes(axes, dtype):
    x = np.random.default_rng(0).integers(0, 250, (70, 30, 40)).astype(dtype).transpose(axes)
    for array in (x, x[3:5], x[:, 1:]):
        ordered = in_order(array)
        assert (ordered.dtype, ordered.shape, ordered.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert ordered.flags.c_contiguous
        assert not np.shares_memory(ordered, x), "a slab that waits to be written keeps no tensor"


@pytest.fixture(scope="module")
def layouts(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model as Orbax writes it, from either run, and as a conversion does."""
    folder = tmp_path_factory.mktemp("layouts")
    stored = open_model(hub)
    family = {"family": "llama"} | dump(stored.config)
    for run in (Unroll(), Scan()):
        model = stored.config.build(run)
        read_into(model, stored.weights)
        name = "scan" if run.stacked else "unroll"
        v1.save_checkpointables(folder / name, {WEIGHTS: {n: np.asarray(a) for n, a in split(model)[1].items()}})
        (folder / name / META).write_text(json.dumps({"model": family, "decided": {"layers": name}}))
    entries = [
        TensorEntry(n, stored.weights.shape(n), np.dtype(np.float32), lambda n=n: stored.weights.read(n))
        for n in stored.weights.names
    ]
    for file in array_by_array(entries):
        write_file(folder / "by_array" / file.name, file)
    (folder / "by_array" / META).write_text(json.dumps({"model": family, "decided": {"layers": "unroll"}}))
    for path in folder.iterdir():
        manifest.write_manifest(path)
    return {path.name: path for path in folder.iterdir()}


def test_every_layout_gives_the_same_weights_one_at_a_time(hub, layouts):
    expected = open_model(hub).weights
    for name, path in layouts.items():
        weights = streaming_model(open_model(path)).weights
        assert set(weights.names) == set(expected.names), name
        for tensor in weights.names:
            array = weights.read(tensor)
            assert (
                (weights.shape(tensor), weights.dtype(tensor))
                == (array.shape, array.dtype)
                == (expected.shape(tensor), np.float32)
            )
            assert array.tobytes() == expected.read(tensor).tobytes(), (name, tensor)


def test_orbax_reads_what_was_written_array_by_array(layouts):
    """Its metadata, and every array in one call: readers need not know who wrote a checkpoint."""
    by_orbax, by_array = load_weights(layouts["unroll"]), load_weights(layouts["by_array"])
    assert by_orbax.keys() == by_array.keys() == stored_shapes(layouts["by_array"]).keys()
    for name, array in by_orbax.items():
        assert np.asarray(array).tobytes() == np.asarray(by_array[name]).tobytes()
    assert read_meta(layouts["by_array"])["decided"] == {"layers": "unroll"}


def test_what_orbax_says_of_its_items_is_what_is_written_for_it(tmp_path):
    """If a later Orbax describes a checkpoint otherwise, this tells."""
    v1.save_checkpointables(tmp_path / "theirs", {WEIGHTS: {"layers.0.x": np.ones((3, 2), np.float32)}})
    for file in array_by_array(
        [TensorEntry("layers.0.x", (3, 2), np.dtype(np.float32), lambda: np.ones((3, 2), np.float32))]
    ):
        write_file(tmp_path / "ours" / file.name, file)
    for name in (f"{WEIGHTS}/_METADATA", "_CHECKPOINT_METADATA"):
        theirs, ours = (json.loads((tmp_path / side / name).read_text()) for side in ("theirs", "ours"))
        free = ("use_ocdbt", "init_timestamp_nsecs", "commit_timestamp_nsecs")
        assert {k: v for k, v in theirs.items() if k not in free} == {k: v for k, v in ours.items() if k not in free}


def test_an_array_that_cannot_be_read_is_damaged(tmp_path):
    with pytest.raises(Damaged, match="`x` cannot be read"):
        read_array(tmp_path, "x")


def test_a_checkpoint_is_read_by_a_path_with_two_dots(tmp_path, monkeypatch):
    step, here = tmp_path / "step", tmp_path / "here"
    here.mkdir()
    v1.save_checkpointables(step, {WEIGHTS: {"x": np.arange(3.0, dtype=np.float32)}})
    monkeypatch.chdir(here)
    np.testing.assert_array_equal(read_array(Path("../step"), "x"), [0, 1, 2])


def test_a_stack_is_read_once_for_all_its_layers(layouts, monkeypatch):
    weights = streaming_model(open_model(layouts["scan"])).weights
    read, reads = read_array, []
    monkeypatch.setattr(
        "argosy.checkpoint.step.reader.read_array", lambda folder, name: (reads.append(name), read(folder, name))[1]
    )
    for i in range(2):
        weights.read(f"layers.{i}.mlp.up.w")
    assert len(reads) == 1


def test_the_largest_tensor_is_that_of_either_side(hub, layouts):
    stored = streaming_model(open_model(hub))
    file = SafeTensors.open(hub / "model.safetensors")
    assert largest_tensor(stored)[1] == max(file.read(name).nbytes for name in file.names)
    scan = streaming_model(open_model(layouts["scan"]))
    name, size = largest_tensor(scan)
    assert size == max(np.asarray(a).nbytes for a in load_weights(layouts["scan"]).values()) > largest_tensor(stored)[1], name


def shared_bytes() -> int:
    """Pages of files that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts pages as Linux does")
def test_pages_of_tensors_that_were_read_are_given_back(tmp_path):
    kind = np.dtype(np.uint8)
    entries = [TensorEntry(f"t{i}", (1 << 23,), kind, lambda i=i: np.full(1 << 23, i, np.uint8)) for i in range(8)]
    write_folder(tmp_path, entries)
    grown = []
    for wrap in (lambda reader: reader, releasing):
        reader = wrap(SafeTensors.open(tmp_path / "model.safetensors"))
        before = most = shared_bytes()
        for i in range(8):
            assert reader.read(f"t{i}").sum() == i << 23
            most = max(most, shared_bytes())
        grown.append(most - before)
    assert grown[0] > 60e6
    assert grown[1] < 20e6


def test_what_is_no_file_is_read_as_it_is():
    reader = releasing(Arrays({"x": np.arange(3)}))
    assert reader.read("x").tolist() == reader.read("x").tolist() == [0, 1, 2]
