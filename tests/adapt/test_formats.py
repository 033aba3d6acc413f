"""Number formats against ml_dtypes, rules worked by hand, and the errors that another project states."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from argosy.adapt.formats.blocks import along, granularity_of
from argosy.adapt.formats.format import Limits, in_blocks
from argosy.adapt.formats.table import E2M1, E2M3, E3M2, FORMATS
from argosy.ops.quantized import spread

RNG = np.random.default_rng(0)
BLOCKED = [name for name, format_of in FORMATS.items() if format_of.block]


def weight(*shape):
    return np.asarray(RNG.standard_normal(shape), np.float32)


def codes(w):
    """Codes of a quantized array that nothing packs."""
    assert not w.packed
    return np.asarray(w.values)


@pytest.mark.parametrize(
    ("table", "kind"), [(E2M1, "float4_e2m1fn"), (E2M3, "float6_e2m3fn"), (E3M2, "float6_e3m2fn")]
)
def test_tables_of_small_floats_are_those_of_ml_dtypes(table, kind):
    bits = np.arange(len(table), dtype=np.uint8)
    assert table == tuple(bits.view(getattr(ml_dtypes, kind)).astype(np.float32).tolist())


# ---- elements


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mxfp4", "float4_e2m1fn"), ("nvfp4", "float4_e2m1fn"), ("mxfp6_e2m3", "float6_e2m3fn"), ("mxfp6_e3m2", "float6_e3m2fn"),
        ("mxfp8", "float8_e4m3fn"), ("mxfp8_e5m2", "float8_e5m2"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2"),
    ],
)  # fmt: skip
def test_elements_round_as_ml_dtypes_rounds(name, kind):
    """Ties too: every multiple of a quarter of the smallest step is among the inputs."""
    format, kind = FORMATS[name], getattr(ml_dtypes, kind)
    most = format.largest
    steps = np.arange(-64, 65) * most / 64
    values = np.concatenate([steps, np.arange(-32, 33) / 16, RNG.uniform(-most, most, 400)]).astype(np.float32)
    # A block with the largest element has the scale 1, so that elements are what is rounded.
    size = format.block or len(values) + 1
    values = np.pad(values, (0, -len(values) % (size - 1))).reshape(-1, size - 1)
    w = np.concatenate([values, np.full((len(values), 1), most, np.float32)], 1)
    got = format.quantize(w, (1, size))
    expected = np.clip(w, -most, most).astype(kind)
    assert np.array_equal(np.asarray(got.scales), np.ones((len(w), 1), np.float32))
    assert np.array_equal(codes(got).view(np.uint8), expected.view(np.uint8))
    assert np.array_equal(np.asarray(got.dequantized()), expected.astype(np.float32))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_whole_numbers_use_their_whole_range(bits):
    """Nothing is off by more than half a step. The largest magnitude is a tie between the two most negative numbers, which rounding of
    the scale decides."""
    w = weight(16, 64)
    w[:, 0] = -np.abs(w).max(1)
    got = FORMATS[f"int{bits}"].quantize(w, (1, 64))
    scale = np.asarray(got.scales)
    assert np.allclose(scale[:, 0], np.abs(w).max(1) / ((2**bits - 1) / 2), rtol=1e-6)
    numbers = codes(got).astype(int) - got.zero
    half = 2 ** (bits - 1)
    assert set(numbers[:, 0]) <= {-half, 1 - half}
    assert numbers.max() == half - 1
    assert (np.abs(numbers * scale - w) <= 0.501 * scale).all()


def test_a_minimum_keeps_zero_and_both_ends():
    w = weight(8, 32) + 1
    w[0], w[1, 3] = np.abs(w[0]), 0
    got = FORMATS["int4"].quantize(w, (1, 32), "minmax")
    high, low = np.maximum(w.max(1), 0), np.minimum(w.min(1), 0)
    assert np.allclose(np.asarray(got.scales)[:, 0], (high - low) / 15, rtol=1e-6)
    dense = np.asarray(got.dequantized())
    assert dense[1, 3] == 0
    assert np.abs(dense - w).max() <= 1.001 * np.asarray(got.scales).max()
    assert set(codes(got).ravel()) <= set(range(16))


# ---- scales


@pytest.mark.parametrize("name", ["mxint8", "mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"])
def test_microscaling_by_the_rule_of_the_specification(name):
    """Section 6.3: X = 2^(floor(log2(max |V|)) - emax), P = V / X, saturated."""
    # The element of MXINT8 is its whole number times 2^-6.
    emax = {"mxint8": 6, "mxfp8": 8, "mxfp8_e5m2": 15, "mxfp6_e2m3": 2, "mxfp6_e3m2": 4, "mxfp4": 2}[name]
    w = weight(6, 64) * np.asarray([1, 1e-20, 1e20, 4, 3.999, 2**-100], np.float32)[:, None]
    got = FORMATS[name].quantize(w, (1, 32))
    top = np.abs(w.reshape(6, 2, 32)).max(-1).astype(np.float64)
    expected = 2.0 ** (np.floor(np.log2(top)) - emax)
    assert np.array_equal(np.asarray(got.scale), np.asarray(got.scales).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))
    assert np.array_equal(np.asarray(got.scales, np.float64), np.maximum(expected, 2.0**-126))


def test_nvfp4_by_hand():
    """Equations 1 and 2 of arXiv:2509.25149, appendix: s_global = max / (6 * 448), s_block = e4m3(max_block / 6 / s_global)."""
    w = weight(4, 64)
    got = FORMATS["nvfp4"].quantize(w, (1, 16))
    outer = np.float32(np.abs(w).max() / np.float32(6 * 448))
    block = (np.abs(w.reshape(4, 4, 16)).max(-1) / 6 / outer).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.allclose(np.asarray(got.outer).item(), outer, rtol=1e-6)
    assert np.array_equal(np.asarray(got.scale, np.float32), block)
    x = w.reshape(4, 4, 16) / (block * outer)[..., None]
    assert np.array_equal(codes(got).reshape(x.shape), np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def test_layers_and_experts_have_second_scales_of_their_own():
    w = weight(2, 3, 4, 32) * np.asarray([1, 100, 1e-3], np.float32)[:, None, None]
    got = FORMATS["nvfp4"].quantize(w, (1, 1, 1, 16), lead=2)
    assert got.outer.shape == (2, 3, 1, 1)
    for i in range(2):
        for e in range(3):
            alone = FORMATS["nvfp4"].quantize(w[i, e], (1, 16))
            assert np.array_equal(np.asarray(alone.dequantized()), np.asarray(got.dequantized())[i, e])


def test_codes_lie_in_bytes_together():
    for name, count in (("int4", 2), ("nf4", 2), ("mxfp4", 2), ("int2", 4)):
        w = weight(8, 6, 64)
        plain = FORMATS[name].quantize(w, (1, 1, 32))
        packed = FORMATS[name].quantize(w, (1, 1, 32), pack=-1)
        assert packed.values.shape == (8, 6, 64 // count)
        assert packed.shape == (8, 6, 64)
        assert np.array_equal(np.asarray(packed.dequantized()), np.asarray(plain.dequantized()))
        across = FORMATS[name].quantize(w, (1, 1, 32), pack=-3)
        assert across.values.shape == (8 // count, 6, 64)
        assert np.array_equal(np.asarray(across.dequantized()), np.asarray(plain.dequantized()))
        ids = jnp.asarray([5, 0, 7])
        for codes in (plain, packed, across):
            assert np.array_equal(np.asarray(codes.rows(ids)), np.asarray(plain.dequantized())[ids])


# ---- garbage


@pytest.mark.parametrize("name", FORMATS)
def test_garbage_is_defined(name):
    """A block with NaN or an infinity becomes NaN, zeros and what is too small become zeros, and neighbors are untouched."""
    format = FORMATS[name]
    size = format.block or 64
    w = np.stack([weight(size) for _ in range(8)])
    w[1, 3], w[2, 5], w[3, 0] = np.nan, np.inf, -np.inf
    w[4], w[5] = 0, 1e-41
    w[6] = -2.0
    w[7, 9] = 1e4
    got = np.asarray(format.quantize(w, (1, size)).dequantized())
    assert np.isnan(got[1:4]).all()
    assert (got[4:6] == 0).all()
    # A block of one value is that value, to a step.
    assert np.unique(got[6]).size == 1
    assert abs(got[6, 0] + 2) <= 2 * 0.34
    # The outlier is kept to a step, and what is below half of one is lost.
    assert abs(got[7, 9] - 1e4) <= 1e4 * 0.34
    assert np.isfinite(got[[0, 6, 7]]).all()
    clean = np.where(np.isfinite(w), w, 0)
    if format.scales != "e4m3":
        alone = np.asarray(format.quantize(clean, (1, size)).dequantized())
        assert np.array_equal(got[[0, 4, 5, 6, 7]], alone[[0, 4, 5, 6, 7]])


# ---- errors that Qwix states


def relative_error(name, shape, block, calibration):
    """As `tests/_src/core/qarray_test.py` of Qwix computes it, in bfloat16."""
    with jax.threefry_partitionable(False):
        w = jax.random.normal(jax.random.key(42), shape, jnp.bfloat16) + (1 if calibration == "minmax" else 0)
    got = FORMATS[name].quantize(w, block, calibration).dequantized(jnp.bfloat16)
    return float(jnp.abs(w - got).mean() / jnp.abs(w).mean())


BLOCKS = (10, 256, 16)


@pytest.mark.parametrize(
    ("name", "shape", "block", "calibration", "stated"),
    [
        ("int4", BLOCKS, (1, 256, 16), "absmax", 0.122559),
        ("int4", BLOCKS, (1, 32, 16), "absmax", 0.122559),
        ("nf4", BLOCKS, (1, 32, 16), "absmax", 0.0986328),
        ("mxfp4", (10, 128, 64), (1, 1, 32), "absmax", 0.106445),
    ],
)
def test_errors_are_those_that_qwix_states(name, shape, block, calibration, stated):
    assert relative_error(name, shape, block, calibration) == pytest.approx(stated, abs=1e-5)


OTHERS = [
    ("int8", BLOCKS, (1, 256, 16), "absmax", 0.00765991),
    ("int8", BLOCKS, (1, 256, 16), "minmax", 0.00521851),
    ("int8", BLOCKS, (1, 32, 16), "minmax", 0.00521851),
    ("int8", BLOCKS, (1, 32, 16), "rms:7", 0.017334),
    ("int8", BLOCKS, (1, 256, 16), "fixed:3", 0.00765991),
    ("nvfp4", (10, 128, 64), (1, 1, 16), "absmax", 0.0893555),
]


def error_with_scales_in_bfloat16(name, shape, block, calibration):
    """The same where scales, quotients and products are bfloat16, as in Qwix; the elements are ours."""
    with jax.threefry_partitionable(False):
        w = jax.random.normal(jax.random.key(42), shape, jnp.bfloat16) + (1 if calibration == "minmax" else 0)
    format, (tiles, axes), zero = FORMATS[name], in_blocks(w, block), None
    kind, _, number = calibration.partition(":")
    if kind == "minmax":
        high, low = jnp.maximum(jnp.max(tiles, axes), 0), jnp.minimum(jnp.min(tiles, axes), 0)
        scale = (high - low) / 255
        zero = spread(jnp.round(-128 - low / scale), shape)
    else:
        largest = {
            "absmax": lambda: jnp.max(jnp.abs(tiles), axes),
            "rms": lambda: jnp.sqrt(jnp.mean(jnp.square(tiles), axes)) * float(number),
            "fixed": lambda: jnp.full_like(jnp.max(tiles, axes), float(number)),
        }[kind]()
        scale = largest / format.largest
        scale = scale.astype(jnp.float8_e4m3fn).astype(w.dtype) if name == "nvfp4" else scale
    quotients = w / spread(scale, shape) + (0 if zero is None else zero)
    # One block, whose scale is 1.
    ones = format.rounded(quotients.astype(jnp.float32), shape, Limits(jnp.full((1, 1, 1), format.largest)))
    elements = (ones.dequantized() / ones.scales).astype(w.dtype) - (0 if zero is None else zero)
    return float(jnp.abs(w - elements * spread(scale, shape)).mean() / jnp.abs(w).mean())


@pytest.mark.parametrize(("name", "shape", "block", "calibration", "stated"), OTHERS)
def test_errors_of_scales_in_bfloat16_are_those_that_qwix_states(name, shape, block, calibration, stated):
    """Scales in the type of the weight, bfloat16 here, cost up to a fifth of the error: ours are float32."""
    assert error_with_scales_in_bfloat16(name, shape, block, calibration) == pytest.approx(stated, rel=1e-5)
    assert 0.8 * stated < relative_error(name, shape, block, calibration) < stated


# ---- blocks


def test_blocks_over_several_axes():
    assert along([4, 64], 32) == [1, 32]
    assert along([4, 64], 128) == [2, 64]
    assert along([4, 64], None) == [4, 64]
    assert along([6, 64], 256) == [3, 64]
    assert along([9, 48], 32) == [1, 24]
    assert along([8], 3) == [2]
    assert granularity_of(None, 32) == (32, 1)
    assert granularity_of("tensor") == (None, None)
    assert granularity_of("128x128") == (128, 128)
    for wrong in ("rows", "0", "1x2x3", "-4", "x"):
        with pytest.raises(ValueError, match="granularity"):
            granularity_of(wrong)
