"""Weights in blocks of few bits: the product of the float32 weight bit for bit, which the gguf library makes of the same bytes."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.core.formats.quants import BY_NAME, CODES, blocks
from argosy.ops.native import library
from argosy.ops.native.blocks import packed_blocks, packed_bytes
from argosy.ops.native.products import Panels, pack_panels, product

# Where the float16 numbers of a block begin: scales first, then what multiplies the minima.
HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "Q8_0": (0,),
}  # fmt: skip


@pytest.fixture
def kernels() -> None:
    if why := library.load():
        pytest.skip(f"no kernels here: {why}")


def raw_blocks(kind: str, columns: int, summed: int, seed: int = 0) -> np.ndarray:
    """Random bytes with finite scales, [columns bytes]: of all sizes, below zero too, every seventh zero."""
    rng, form = np.random.default_rng(seed), BY_NAME[kind]
    raw = rng.integers(0, 256, (columns * summed // form.values, form.bytes), np.uint8)
    for at in HALVES[kind]:
        scales = (rng.normal(size=len(raw)) * 2.0 ** rng.integers(-24, 4, len(raw))).astype("<f2")
        scales[::7] = 0
        raw[:, at : at + 2] = scales[:, None].view(np.uint8)
    return raw.reshape(columns, -1)


def weight_of(kind: str, columns: int, summed: int) -> tuple[np.ndarray, Panels]:
    """A weight [columns summed] as the gguf library reads it, and packed from its blocks."""
    raw = raw_blocks(kind, columns, summed)
    floats = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return floats, packed_blocks(lambda some: blocks(kind, raw[some]), CODES[kind], (columns, summed), 1, False)


def bits(a: object) -> np.ndarray:
    return np.asarray(a, np.float32).view(np.uint32)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("columns", [1, 31, 70])
@pytest.mark.usefixtures("kernels")
def test_a_product_has_the_bits_of_that_with_the_float32_weight(kind: str, columns: int):
    summed = 768 if BY_NAME[kind].values == 256 else 352
    floats, w = weight_of(kind, columns, summed)
    wide, rng = pack_panels(jnp.asarray(floats), 1, False), np.random.default_rng(1)
    call = jax.jit(product)
    for rows in (*range(1, 14), 24, 25, 40):
        x = jnp.asarray(rng.normal(size=(rows, summed)).astype(np.float32))
        np.testing.assert_array_equal(bits(call(x, w)), bits(call(x, wide)), err_msg=f"{rows} rows")


@pytest.mark.parametrize("kind", CODES)
def test_the_weight_and_its_rows_are_those_of_the_library(kind: str):
    floats, w = weight_of(kind, 70, 512)
    np.testing.assert_array_equal(np.asarray(w.dense()), floats)
    ids = jnp.asarray([[0, 15, 16], [31, 32, 69]])
    np.testing.assert_array_equal(np.asarray(w.rows(ids)), floats[np.asarray(ids)])
    assert w.rows(ids).dtype == w.dtype == np.float32


@pytest.mark.parametrize(("kind", "bytes_"), [("Q4_0", 5 / 8), ("Q4_1", 6 / 8), ("Q4_K", 6 / 8), ("Q8_0", 9 / 8), ("Q6_K", 10 / 8)])
def test_a_packed_weight_has_few_bytes(kind: str, bytes_: float):
    """A float32 scale for 16 or 32 codes."""
    _, w = weight_of(kind, 64, 512)
    assert w.nbytes == 64 * 512 * bytes_
    assert w.nbytes == packed_bytes(64, blocks(kind, raw_blocks(kind, 1, 512)), CODES[kind])


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_parts_that_are_decoded_at_a_time_do_not_matter(kind: str, monkeypatch: pytest.MonkeyPatch):
    _, whole = weight_of(kind, 131, 256)
    monkeypatch.setattr("argosy.ops.native.blocks.AT_ONCE", 2 * 32 * 256)
    _, parts = weight_of(kind, 131, 256)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("kernels")
def test_what_is_not_finite_in_one_row_stays_there():
    _, w = weight_of("Q4_K", 40, 256)
    x = np.random.default_rng(1).normal(size=(20, 256)).astype(np.float32)
    alone = bits(product(jnp.asarray(x), w))
    x[3, 5] = np.nan
    spoiled = bits(product(jnp.asarray(x), w))
    assert (np.delete(spoiled, 3, 0) == np.delete(alone, 3, 0)).all()
    assert np.isnan(np.asarray(product(jnp.asarray(x), w))[3]).all()


@pytest.mark.usefixtures("kernels")
def test_shapes_that_do_not_fit_are_refused():
    _, w = weight_of("Q4_1", 64, 64)
    wrong = Panels(w.values, w.shape, 1, False, w.dtype, w.scale[:, :, :16], w.minimum)
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit"):
        product(jnp.ones((1, 64)), wrong).block_until_ready()
