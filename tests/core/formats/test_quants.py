"""Block formats against the gguf library: its stored values, and itself on every byte a field can hold."""

import gguf
import ml_dtypes
import numpy as np
import pytest
from helpers import shared

from argosy.core.errors import Damaged, Unsupported
from argosy.core.formats import quants

DECODED = [kind.name for kind in quants.TYPES.values() if kind.decode]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype == np.float32 and a.tobytes() == b.tobytes()


def test_every_type_of_the_golden_file_is_bit_equal():
    golden = np.load(shared("gguf/dequant_golden.npz"))
    names = [key[:-4] for key in golden if key.endswith("_raw")]
    assert sorted(names) == sorted(DECODED)
    for name in names:
        assert same_bits(quants.dequantize(name, golden[f"{name}_raw"]), golden[f"{name}_f32"]), name


@pytest.mark.parametrize("name", DECODED)
def test_random_bytes_equal_the_library(name):
    """3,000 blocks of any bytes, over several chunks: infinite and not-a-number scales too."""
    kind = quants.BY_NAME[name]
    raw = np.random.default_rng(0).integers(0, 256, (5, 600 * kind.bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    got = quants.dequantize(name, raw)
    np.testing.assert_array_equal(got, expected)
    assert np.isfinite(got).mean() > 0.3
    assert got.shape == (5, 600 * kind.values)


def test_sizes_equal_the_library():
    for code, kind in quants.TYPES.items():
        theirs = gguf.GGMLQuantizationType(code)
        if kind.name == "Q8_1":  # 40 in the library, which counts float32 scales; ggml's block_q8_1 has two float16
            continue
        assert (kind.name, (kind.values, kind.bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])


def test_what_is_not_decoded_is_refused_by_name():
    with pytest.raises(Unsupported, match="IQ2_XXS"):
        quants.dequantize("IQ2_XXS", np.zeros((1, 66), np.uint8))
    with pytest.raises(ValueError, match="18"):
        quants.dequantize("Q4_0", np.zeros((1, 17), np.uint8))


def test_memory_stays_near_the_output():
    import tracemalloc

    raw = np.zeros((512, 256 * 144), np.uint8)  # 33 M values of Q4_K: 134 MB
    tracemalloc.start()
    out = quants.dequantize("Q4_K", raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < out.nbytes + 4_000_000


def test_fp8_blocks_tile_by_tile():
    rng = np.random.default_rng(1)
    values = rng.normal(0, 30, (200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    got = quants.SCALED["fp8_blocks"].read(values, scales)
    assert quants.SCALED["fp8_blocks"].shapes((200, 300)) == ((200, 300), (2, 3))
    for r, c in ((0, 0), (127, 127), (128, 127), (127, 128), (199, 299), (5, 256)):
        assert got[r, c] == np.float32(values[r, c]) * scales[r // 128, c // 128]
    with pytest.raises(Damaged, match="float32"):
        quants.SCALED["fp8_blocks"].read(values.astype(np.float32), scales)


def test_mxfp4_pairs_by_hand():
    """0x2B: the low nibble 0xB = -1.5 comes first, then 0x2 = 1.0; times 2^(130-127)."""
    blocks = np.zeros((2, 3, 1, 16), np.uint8)
    scales = np.full((2, 3, 1), 127, np.uint8)
    blocks[1, 2, 0, 5], scales[1, 2, 0] = 0x2B, 130
    got = quants.SCALED["mxfp4"].read(blocks, scales)
    assert quants.SCALED["mxfp4"].shapes((2, 3, 32)) == (blocks.shape, scales.shape)
    assert got.shape == (2, 3, 32)
    assert (got[1, 2, 10], got[1, 2, 11]) == (-12.0, 8.0)
    assert np.count_nonzero(got) == 2


def test_mxfp4_pairs_against_ml_dtypes():
    """Every nibble with every scale but 255, which stands for no number."""
    low = np.arange(256, dtype=np.uint8).reshape(16, 1, 16).repeat(255, 1)[None]
    scales = np.arange(255, dtype=np.uint8)[None, None].repeat(16, 1)
    got = quants.SCALED["mxfp4"].read(low, scales).reshape(1, 16, 255, 16, 2)
    nibbles = np.stack([low & 0xF, low >> 4], -1)
    factor = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None, None]
    with np.errstate(over="ignore"):
        expected = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * factor
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(Damaged, match="255"):
        quants.SCALED["mxfp4"].read(low[:, :, :1], np.full((1, 16, 1), 255, np.uint8))
