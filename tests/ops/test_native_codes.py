"""Quantized weights of every format in panels: the product of `Quantized.dequantized()`, and of int8 data that of whole numbers."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.adapt.formats.activations import Activations
from argosy.adapt.formats.table import FORMATS
from argosy.infer.cpu.panels import rounding_data
from argosy.models.parts import einsum
from argosy.models.parts.einsum import Route, contract
from argosy.ops.native import library
from argosy.ops.native.blocks import packed_experts, packed_quantized
from argosy.ops.native.products import LONGEST, Panels, block_counts, integer_product, multiplies_integers, product
from argosy.ops.quantized import Quantized

ROWS = (1, 2, 6, 7, 9, 13, 40)


@pytest.fixture
def kernels() -> None:
    if why := library.load():
        pytest.skip(f"no kernels here: {why}")


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def peaked(x: np.ndarray, block: int) -> np.ndarray:
    """Data whose largest magnitudes are positive: negative ones are ties, which XLA rounds either way."""
    parts = x.reshape(*x.shape[:-1], -1, block)
    return np.where(np.abs(parts) == np.abs(parts).max(-1, keepdims=True), np.abs(parts), parts).reshape(x.shape)


def quantized(name: str, summed: int, columns: int, block: int, first: bool, calibration: str = "absmax") -> tuple[Quantized, Panels]:
    """A weight of this format, and the same in panels."""
    w = numbers(3, *((summed, columns) if first else (columns, summed)))
    shared = (block, 1) if first else (1, block)
    codes = FORMATS[name].quantize(w, shared, calibration, pack=-1)
    panels = packed_quantized(codes, 1, first)
    assert panels is not None
    return codes, panels


# Blocks of whole groups, of parts of groups, one code, and a channel.
SHAPES = [(64, 33, 32, True), (70, 31, 7, False), (96, 64, 1, True), (530, 70, 530, False), (36, 5, 12, True), (64, 2, 2, False)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("summed", "columns", "block", "first"), SHAPES)
@pytest.mark.usefixtures("kernels")
def test_a_product_is_that_of_the_floats(name: str, summed: int, columns: int, block: int, first: bool):
    w, panels = quantized(name, summed, columns, block, first)
    dense = np.asarray(w.dequantized())
    np.testing.assert_array_equal(np.asarray(panels.dense()), dense)
    flat = (dense if first else dense.T).astype(np.float64)
    for rows in ROWS:
        x = numbers(rows, rows, summed)
        y = np.asarray(jax.jit(product)(jnp.asarray(x), panels), np.float64)
        assert (np.abs(y - x.astype(np.float64) @ flat) <= 1e-6 * (np.abs(x) @ np.abs(flat)) + 1e-30).all(), f"{rows} rows"


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize(("summed", "columns", "block", "first"), SHAPES)
@pytest.mark.usefixtures("kernels")
def test_a_product_with_minima(name: str, summed: int, columns: int, block: int, first: bool):
    w, panels = quantized(name, summed, columns, block, first, "minmax")
    assert panels.minimum is not None
    dense = np.asarray(w.dequantized())
    np.testing.assert_allclose(np.asarray(panels.dense()), dense, atol=1e-6)
    flat = (dense if first else dense.T).astype(np.float64)
    # What is subtracted may be as large as the product.
    for rows in ROWS:
        x = numbers(rows, rows, summed)
        y = np.asarray(product(jnp.asarray(x), panels), np.float64)
        assert (np.abs(y - x.astype(np.float64) @ flat) <= 3e-6 * np.abs(x).sum(1, keepdims=True)).all(), f"{rows} rows"


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize("calibration", ["absmax", "minmax"])
@pytest.mark.parametrize(("summed", "columns", "block", "first"), SHAPES)
@pytest.mark.usefixtures("kernels")
def test_whole_numbers_are_multiplied_exactly(name: str, calibration: str, summed: int, columns: int, block: int, first: bool):
    """With scales of one, the product is that of the integers, without any rounding."""
    _, panels = quantized(name, summed, columns, block, first, calibration)
    ones = Panels(**vars(panels) | {"scale": jnp.ones_like(panels.scale), "minimum": None})
    codes = np.asarray(ones.dense(), np.int64)
    for rows in ROWS:
        x = np.random.default_rng(rows).integers(-128, 128, (rows, summed))
        y = np.asarray(jax.jit(integer_product, static_argnums=(2, 3))(jnp.asarray(x, jnp.float32), ones, 8, 1, jnp.ones(1)))
        np.testing.assert_array_equal(y, x @ (codes if first else codes.T), err_msg=f"{rows} rows")


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize("calibration", ["absmax", "minmax"])
@pytest.mark.parametrize(("data", "block"), [("int8", None), ("int8", 32), ("int4", 32)])
@pytest.mark.usefixtures("kernels")
def test_rounded_data_is_multiplied_as_its_floats(name: str, calibration: str, data: str, block: int, monkeypatch: pytest.MonkeyPatch):
    """By the contraction, with a scale for each token or for each 32 numbers, beside the same numbers as floats."""
    w, panels = quantized(name, 96, 40, 32, True, calibration)
    rounded = Activations(data, block)
    calls = []
    monkeypatch.setattr(einsum, "integer_product", lambda *arguments: calls.append(arguments) or integer_product(*arguments))
    whole = Quantized(panels, w.scale, w.minimum, activations=rounded)
    assert multiplies_integers(panels, 3)
    x = jnp.asarray(peaked(numbers(1, 2, 3, 96), block or 96))
    y = np.asarray(contract("BTD,DF->BTF", x, whole))
    floats = np.asarray(rounded.quantize(x, (2,)).dequantized(), np.float64)
    dense = np.asarray(w.dequantized(), np.float64)
    assert (np.abs(y - floats @ dense) <= 2e-6 * (np.abs(floats) @ np.abs(dense) + np.abs(floats).sum(-1, keepdims=True))).all()
    assert np.abs(y - np.asarray(x, np.float64) @ dense).max() > 1e-4, "data was not rounded"
    assert len(calls) == 1


@pytest.mark.usefixtures("kernels")
def test_the_largest_sums_fit():
    """A block of the longest kind, with every code and every number at its end."""
    panels = packed_quantized(Quantized(jnp.full((LONGEST, 1), 127, jnp.int8), jnp.ones((1, 1))), 1, True)
    assert panels is not None
    assert multiplies_integers(panels, 1)
    for number in (-128, 127):
        y = integer_product(jnp.full((1, LONGEST), float(number)), panels, 8, 1, jnp.ones(1))
        assert float(y[0, 0]) == np.float32(127 * number * LONGEST)
    longer = packed_quantized(Quantized(jnp.ones((2 * LONGEST, 1), jnp.int8), jnp.ones((1, 1))), 1, True)
    assert longer is not None
    assert not multiplies_integers(longer, 1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("kernels")
def test_a_scale_that_is_not_finite_stays_visible_in_its_column(name: str):
    w = numbers(0, 64, 40)
    w[3, 7] = np.nan
    w[40, 9] = np.inf
    panels = packed_quantized(FORMATS[name].quantize(w, (32, 1)), 1, True)
    assert panels is not None
    for rows in (1, 20):
        y = np.asarray(product(jnp.ones((rows, 64)), panels))
        assert np.isnan(y[:, [7, 9]]).all()
        assert np.isfinite(np.delete(y, [7, 9], 1)).all()
        if multiplies_integers(panels, 1):
            y = np.asarray(integer_product(jnp.ones((rows, 64)), panels, 8))
            assert np.isnan(y[:, [7, 9]]).all()
            assert np.isfinite(np.delete(y, [7, 9], 1)).all()


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.usefixtures("kernels")
def test_every_float_of_eight_bits(name: str):
    """Infinities and NaN too."""
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(np.dtype(jnp.float8_e4m3fn if name == "fp8_e4m3" else jnp.float8_e5m2))
    panels = packed_quantized(Quantized(jnp.asarray(values[None]), jnp.ones((1, 1))), 1, True)
    assert panels is not None
    y = np.asarray(product(jnp.ones((1, 1)), panels))[0]
    np.testing.assert_array_equal(y, values.astype(np.float32))


@pytest.mark.parametrize("name", ["int4", "nf4", "mxfp8", "mxfp6_e2m3", "int2", "int8"])
def test_rows_of_an_embedding(name: str):
    w, panels = quantized(name, 64, 70, 32, False)
    ids = np.asarray([[0, 15, 16], [31, 32, 69]])
    np.testing.assert_array_equal(np.asarray(panels.rows(jnp.asarray(ids))), np.asarray(w.dequantized())[ids])


def test_scales_of_several_axes():
    """Weights whose blocks do not lie side by side when their axes are read as one take more scales, and the same numbers."""
    w = numbers(5, 4, 6, 10)
    for block in ((1, 3, 1), (2, 3, 1), (2, 6, 5), (4, 6, 10), (4, 2, 1)):
        codes = FORMATS["int8"].quantize(w, block)
        panels = packed_quantized(codes, 2, True)
        assert panels is not None
        np.testing.assert_array_equal(np.asarray(panels.dense()), np.asarray(codes.dequantized()))
    assert block_counts((4, 6), (4, 2)) == [4, 2]
    assert block_counts((4, 6), (2, 1)) == [2, 1]
    assert block_counts((4, 6), (2, 2)) == [4, 2]


def test_codes_without_a_kernel_stay_as_they_are():
    levels = tuple(float(i) / 3 for i in range(17))
    w = Quantized(jnp.zeros((32, 32), jnp.uint8), jnp.ones((1, 32)), levels=levels)
    assert packed_quantized(w, 1, True) is None


@pytest.mark.parametrize(("data", "block"), [("int8", None), ("int8", 32), ("int8", 24), ("int4", 32)])
@pytest.mark.usefixtures("kernels")
def test_data_is_rounded_as_its_format_rounds(data: str, block: int | None):
    """A weight that is the identity gives the rounded data: with zeros, tiny and large numbers, ties, and what is not finite."""
    panels = packed_quantized(Quantized(jnp.eye(96, dtype=jnp.int8), jnp.ones((96 // (block or 96), 96))), 1, True)
    assert panels is not None
    x = numbers(4, 12, 96) * np.float32(10.0) ** np.arange(-20, 4, 2, dtype=np.float32)[:, None]
    x[0], x[1, :32], x[2, ::2] = 0, 1e-39, 0
    x[3] = np.linspace(-127, 127.5, 96)
    x = peaked(x, block or 96)
    x[4, 5], x[5, 70], x[6, 0] = np.nan, np.inf, 1e4
    rounding = Activations(data, block)
    scales = rounding.whole_numbers((96,), is_static=False)
    assert scales is not None
    y = np.asarray(integer_product(jnp.asarray(x), panels, *scales))
    expected = np.asarray(rounding.quantize(jnp.asarray(x), (1,)).dequantized())
    # A column's other blocks are zeros of the weight, which NaN spoils too.
    finite = np.isfinite(x).all(1)
    np.testing.assert_array_equal(y[finite], expected[finite])
    assert np.isnan(y[~finite]).all()
    assert np.isnan(expected[~finite]).any(1).all()


@pytest.mark.usefixtures("kernels")
def test_a_calibrated_scale():
    w, panels = quantized("int8", 96, 40, 96, True)
    rounding, x, scale = Activations("int8"), jnp.asarray(numbers(1, 5, 96)), jnp.asarray(0.01)
    y = np.asarray(contract("BD,DF->BF", x, Quantized(panels, w.scale, x_scale=scale, activations=rounding)))
    data = np.clip(np.round(np.asarray(x) / np.float32(0.01)), -128, 127) * np.float32(0.01)
    np.testing.assert_allclose(y, data @ np.asarray(w.dequantized()), rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(x)).max() > 1.28, "some are beyond"


# Of a power of two, ties are exact.
@pytest.mark.parametrize("step", [2.0**-6, 0.0137])
@pytest.mark.parametrize("data", ["int8", "int4"])
@pytest.mark.usefixtures("kernels")
def test_data_is_rounded_by_a_calibrated_scale_as_its_format_rounds(data: str, step: float):
    """A weight that is the identity gives the rounded data: ties, what saturates, and what is not finite."""
    panels = packed_quantized(Quantized(jnp.eye(96, dtype=jnp.int8), jnp.ones((1, 96))), 1, True)
    assert panels is not None
    rounding, scale = Activations(data), jnp.asarray(step, jnp.float32)
    x = numbers(4, 8, 96)
    x[0], x[1], x[2] = 0, np.linspace(-140, 140, 96) * np.float32(step), (np.arange(96) - 48 + 0.5) * 2.0**-6
    x[3, 5], x[4, 70], x[5] = np.nan, -np.inf, 1e-39
    got = np.asarray(contract("BD,DF->BF", jnp.asarray(x), Quantized(panels, jnp.ones((1, 96)), x_scale=scale, activations=rounding)))
    expected = np.asarray(rounding.quantize(jnp.asarray(x), (1,), scale).dequantized())
    np.testing.assert_array_equal(got, expected)
    assert np.isnan(got[[3, 4]]).all()
    assert np.isfinite(np.delete(got, [3, 4], 0)).all()
    assert got[1].max() == np.float32(step) * (127 if data == "int8" else 7)


@pytest.mark.usefixtures("kernels")
def test_a_packed_weight_that_rounds_data():
    """Of a file's blocks: the product of the rounded data with the floats, near that with the data."""
    w, panels = quantized("int4", 96, 40, 32, True)
    x = jnp.asarray(peaked(numbers(1, 5, 96), 32))
    y = np.asarray(contract("BD,DF->BF", x, rounding_data(panels, "int8")))
    dense = np.asarray(w.dequantized(), np.float64)
    data = np.asarray(Activations("int8", 32).quantize(x, (1,)).dequantized(), np.float64)
    assert (np.abs(y - data @ dense) <= 2e-6 * (np.abs(data) @ np.abs(dense))).all()
    difference = np.abs(y - np.asarray(contract("BD,DF->BF", x, panels)))
    assert 1e-4 < difference.max() < 0.2
    levels = quantized("nf4", 96, 40, 32, True)[1]
    assert rounding_data(levels, "int8") is levels


# ---- experts

# Whole groups of rows, one row, no row, more rows than a tile has, and rows that are left over.
SIZES = (5, 1, 0, 40)
REST = 3


def experts_of(name: str, eq: str, block: int = 32, minimum: bool = False) -> tuple[Quantized, Panels]:
    """Four matrices [96 40] in a format, along the first axis, and the same in panels."""
    first = eq == "XD,EDM->XM"
    w = numbers(5, 4, *((96, 40) if first else (40, 96))) * np.asarray([1, 3, 0.1, 30], np.float32)[:, None, None]
    shared = (1, block, 1) if first else (1, 1, block)
    codes = FORMATS[name].quantize(w, shared, "minmax" if minimum else "absmax", lead=1, pack=-2 if first else -1)
    panels = packed_experts(codes, 1, first)
    assert panels is not None
    np.testing.assert_array_equal(np.asarray(panels.dense()), np.asarray(codes.dequantized()))
    return codes, panels


def route_of(sizes: tuple[int, ...]) -> Route:
    expert = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(REST, len(sizes) - 1)])
    return Route(jnp.asarray(sizes, jnp.int32), jnp.asarray(expert, jnp.int32))


@pytest.mark.parametrize("eq", ["XD,EDM->XM", "XD,EMD->XM"])
@pytest.mark.parametrize("name", ["int8", "int4", "int2", "nf4", "mxfp6_e2m3", "mxfp8_e5m2", "nvfp4"])
@pytest.mark.usefixtures("kernels")
def test_experts_have_the_products_of_their_floats(name: str, eq: str, monkeypatch: pytest.MonkeyPatch):
    """And each row that of its expert alone, bit for bit, whatever rows others have."""
    w, panels = experts_of(name, eq)
    monkeypatch.setattr(einsum, "grouped_matmul", None)
    for sizes in (SIZES, (1, 0, 0, 1), (0, 0, 0, 0)):
        x, route = jnp.asarray(numbers(1, sum(sizes) + REST, 96)), route_of(sizes)
        y = np.asarray(jax.jit(contract, static_argnums=0)(eq, x, Quantized(panels, w.scale), route))
        assert y.shape == (sum(sizes) + REST, 40)
        assert (y[sum(sizes) :] == 0).all()
        for e, size in enumerate(sizes):
            rows = slice(sum(sizes[:e]), sum(sizes[: e + 1]))
            parts: dict[str, Any] = {part: a[e] for part in ("values", "scale", "outer") if (a := getattr(w, part)) is not None}
            alone = packed_quantized(replace(w, **parts), 1, panels.first)
            np.testing.assert_array_equal(y[rows], np.asarray(product(x[rows], alone)) if size else y[rows])
            dense = np.asarray(w.dequantized())[e]
            flat = (dense if panels.first else dense.T).astype(np.float64)
            exact, most = np.asarray(x, np.float64)[rows] @ flat, np.abs(np.asarray(x))[rows] @ np.abs(flat)
            assert (np.abs(y[rows] - exact) <= 1e-6 * most).all()


@pytest.mark.parametrize("minimum", [False, True])
@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
@pytest.mark.parametrize(("data", "block"), [("int8", None), ("int8", 32), ("int4", 32), ("mxint8", None)])
@pytest.mark.usefixtures("kernels")
def test_experts_multiply_rounded_data(
    name: str, data: str, block: int | None, minimum: bool, monkeypatch: pytest.MonkeyPatch
):
    """As whole numbers, or as floats where scales of data are powers of two."""
    calls = []
    monkeypatch.setattr(einsum, "grouped_matmul", None)
    monkeypatch.setattr(einsum, "integer_product", lambda *arguments: calls.append(arguments) or integer_product(*arguments))
    w, panels = experts_of(name, "XD,EDM->XM", minimum=minimum)
    rounded = Activations(data, block)
    x, route = jnp.asarray(peaked(numbers(1, sum(SIZES) + REST, 96), block or 96)), route_of(SIZES)
    y = np.asarray(contract("XD,EDM->XM", x, Quantized(panels, w.scale, w.minimum, activations=rounded), route))
    floats, dense = np.asarray(rounded.quantize(x, (1,)).dequantized(), np.float64), np.asarray(w.dequantized(), np.float64)
    for row, e in enumerate(np.repeat(np.arange(4), SIZES)):
        allowed = 2e-6 * (np.abs(floats[row]) @ np.abs(dense[e]) + np.abs(floats[row]).sum() * np.abs(dense[e]).max())
        assert (np.abs(y[row] - floats[row] @ dense[e]) <= allowed).all()
    assert (y[sum(SIZES) :] == 0).all()
    assert len(calls) == (data != "mxint8")


@pytest.mark.usefixtures("kernels")
def test_sizes_that_do_not_fit_are_cut():
    """More rows than there are belong to nobody; the products of those that are there stay."""
    w, panels = experts_of("int8", "XD,EDM->XM")
    x = jnp.asarray(numbers(1, 6, 96))
    y = np.asarray(product(x, panels, jnp.asarray([4, -2, 9, 3])))
    np.testing.assert_array_equal(y, product(x, panels, jnp.asarray([4, 0, 2, 0])))
    assert np.isfinite(y).all()
    assert w.shape[0] == panels.experts
