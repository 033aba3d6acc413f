"""GGUF files as they are written, read by the gguf library and by ours."""

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.core.formats import TensorEntry
from argosy.core.formats.files import write_file
from argosy.core.formats.gguf import GGUF
from argosy.core.formats.gguf_writer import EncodedTensor, gguf_file

RNG = np.random.default_rng(2)
ARRAYS = {
    "a": ("F32", RNG.normal(size=(3,)).astype(np.float32)),
    "b.weight": ("Q8_0", RNG.normal(size=(5, 64)).astype(np.float32)),
    "c": ("F16", RNG.normal(size=(2, 7)).astype(np.float32)),
    "d": ("BF16", RNG.normal(size=(3, 5)).astype(ml_dtypes.bfloat16)),
    "e": ("Q4_0", RNG.normal(size=(2, 3, 32)).astype(ml_dtypes.bfloat16)),
}
META = {
    "general.architecture": "llama", "text": "dé", "yes": True, "no": False, "count": 7, "ratio": 0.5, "long": np.uint64(2**40),
    "numbers": np.array([1, -2], np.int32), "texts": ["a", "", "é b"], "floats": np.array([0.5], np.float32),
}  # fmt: skip


def tensors(arrays=ARRAYS) -> list[EncodedTensor]:
    return [EncodedTensor(TensorEntry(name, a.shape, a.dtype, lambda a=a: a), kind) for name, (kind, a) in arrays.items()]


def write_tensors(path: Path, arrays=ARRAYS, meta=META) -> list[EncodedTensor]:
    entries = tensors(arrays)
    file = gguf_file(path.name, meta, entries)
    write_file(path, file)
    assert path.stat().st_size == file.bytes
    return entries


def test_the_gguf_library_reads_every_value_and_block(tmp_path):
    rows = write_tensors(tmp_path / "x.gguf")
    read = gguf.GGUFReader(tmp_path / "x.gguf")
    assert {name: read.fields[name].contents() for name in META} == {
        name: value.tolist() if isinstance(value, np.ndarray | np.generic) else value for name, value in META.items()
    }
    assert [tensor.name for tensor in read.tensors] == list(ARRAYS)
    for tensor, (kind, a), row in zip(read.tensors, ARRAYS.values(), rows, strict=True):
        assert (tensor.tensor_type.name, tuple(tensor.shape)[::-1], tensor.data_offset % 32) == (kind, a.shape, 0)
        got = gguf.dequantize(tensor.data, tensor.tensor_type) if kind != "F32" else tensor.data
        exact = np.asarray(a, np.float32)
        change = np.linalg.norm(got.reshape(a.shape) - exact) / np.linalg.norm(exact)
        assert row.errors.relative == pytest.approx(change, abs=1e-9)
        assert (change == 0) == (kind in ("F32", "BF16"))


def test_experts_are_encoded_one_by_one(tmp_path):
    whole = RNG.normal(size=(3, 4, 32)).astype(np.float32)
    parts = EncodedTensor(TensorEntry("x", whole.shape, whole.dtype, lambda: 1 / 0, lambda: iter(whole)), "Q5_1")
    write_file(tmp_path / "x.gguf", gguf_file("x.gguf", {}, [parts]))
    write_tensors(tmp_path / "y.gguf", {"x": ("Q5_1", whole)}, {})
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "y.gguf").read_bytes()
    assert GGUF.open(tmp_path / "x.gguf").read("x").shape == whole.shape


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [("Q4_0", np.nan, "not finite"), ("F32", np.inf, "not finite"), ("F16", 1e6, "beyond F16"), ("Q4_1", 1e7, "beyond Q4_1")],
)
def test_numbers_that_no_file_may_hold_are_refused_by_name(tmp_path, kind, value, problem):
    w = np.ones((2, 32), np.float32)
    w[1, 3] = value
    with pytest.raises(BadInput, match=f"`blk.0.x` has numbers that are {problem}"):
        write_tensors(tmp_path / "x.gguf", {"blk.0.x": (kind, w)})
    assert not list(tmp_path.iterdir())


def test_what_has_no_place_is_an_error():
    with pytest.raises(ValueError, match="cannot be stored as Q8_0"):
        gguf_file("x", {}, tensors({"x": ("Q8_0", np.zeros((2, 33), np.float32))}))
    with pytest.raises(ValueError, match="dict cannot be stored"):
        gguf_file("x", {"x": {}}, [])
