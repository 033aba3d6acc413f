"""Block encoders: bit for bit the gguf library's, the K-quants beside what ggml itself gives, and garbage."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "reference"))
from ggml_blocks import GOLDEN, inputs

from argosy.core.formats.encoders import ENCODERS, encode
from argosy.core.formats.quants import BY_NAME, dequantize

SIMPLE = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
SEARCHED = ["Q4_K", "Q5_K", "Q6_K"]


def random_rows(rows: int = 300) -> np.ndarray:
    """Rows of every size: halves too, which are rounded away from zero, and rows of few different numbers."""
    rng = np.random.default_rng(5)
    w = rng.normal(0, 1, (rows, 512)) * 10.0 ** rng.uniform(-4, 3, (rows, 1))
    w[:50] = np.round(w[:50])
    w[50:60] = 0
    w[60:70, :256] = rng.integers(0, 2, (10, 256)) * 127.5
    w[70:80, 3] = 1e4
    return w.astype(np.float32)


@pytest.mark.parametrize("name", SIMPLE)
def test_blocks_are_those_of_the_gguf_library(name):
    w = random_rows()
    np.testing.assert_array_equal(encode(name, w), gguf.quantize(w, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", SEARCHED)
def test_blocks_are_those_of_ggml_except_where_two_scales_are_as_good(name):
    """Codes under a scale of 0 do not count: blocks are compared by what they decode to."""
    w, blocks = inputs(), np.load(GOLDEN)[name]
    ours, theirs = dequantize(name, encode(name, w)), dequantize(name, blocks)
    assert (ours == theirs).all(1).mean() > 0.9
    errors = [np.square(a.astype(np.float64) - w).sum(1)[np.abs(w).max(1) < 1e3] for a in (ours, theirs)]
    np.testing.assert_allclose(errors[0], errors[1], rtol=0.05)
    np.testing.assert_allclose(errors[0].sum(), errors[1].sum(), rtol=1e-3)


@pytest.mark.parametrize("name", ENCODERS)
def test_garbage_is_defined_block_by_block(name):
    size = BY_NAME[name].values
    w = np.random.default_rng(0).normal(0, 1, (7, size)).astype(np.float32)
    w[1, 5], w[2, 7], w[3], w[4], w[5, 0] = np.nan, -np.inf, 0, 3e38, 1e4
    got = dequantize(name, encode(name, w))
    assert np.isnan(got[[1, 2, 4]]).all()
    assert np.isfinite(got[[0, 3, 5, 6]]).all()
    assert (got[3] == 0).all()
    assert abs(got[5, 0] - 1e4) < 50
    alone = dequantize(name, encode(name, w[[0, 6]]))
    np.testing.assert_array_equal(got[[0, 6]], alone)


@pytest.mark.parametrize("name", ENCODERS)
def test_numbers_of_the_type_come_back(name):
    """What a type holds exactly is left alone: codes times a scale."""
    size = BY_NAME[name].values
    codes = np.arange(size) % 16 - 8
    w = (codes * np.float32(0.25)).astype(np.float32)[None]
    change = dequantize(name, encode(name, w)) - w
    assert np.abs(change).max() < {"Q6_K": 0.03, "Q8_0": 0.01, "Q5_K": 0.07, "Q4_K": 0.07}.get(name, 0.13)


def test_memory_stays_near_the_output():
    import tracemalloc

    w = np.zeros((512, 8192), np.float32)
    tracemalloc.start()
    out = encode("Q4_0", w)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < out.nbytes + 24_000_000


def test_rows_are_whole_numbers_of_blocks():
    with pytest.raises(ValueError, match="255 numbers"):
        encode("Q4_K", np.zeros((2, 255), np.float32))
