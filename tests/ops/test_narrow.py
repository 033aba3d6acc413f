"""Eight bits and a scale against NumPy and ml_dtypes: nearest values, and nothing but a token's own vector in what it stores."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from argosy.core.errors import Unsupported
from argosy.ops.attention import Score
from argosy.ops.narrow import FORMS, blocks_of, empty, largest_magnitude, round_to_narrow, write_entries
from argosy.ops.op import implementations
from argosy.ops.paged.attention import gather_pages, paged_attention
from argosy.ops.paged.blocked import BLOCK, blocked_attention
from argosy.ops.paged.ragged import joined_size

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
NUMPY = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
# The most that rounding moves a value: steps of int8 are 1 / 127 of the largest; 8-bit floats have 3 and 2 bits behind the point.
SHARE = {"int8": 0.5 / 127, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}


def rounded(x: Any, form: str, blocks: int = 1, xp: Any = np) -> tuple[Any, Any]:
    """The values in eight bits, and what they stand for; by NumPy and ml_dtypes, unless another module with their names is given."""
    parts = x.reshape(*x.shape[:-1], blocks, -1)
    scale = (xp.abs(parts).max(-1, keepdims=True) * xp.asarray(1 / LARGEST[form], x.dtype)).astype(np.float32)
    scale = xp.where(scale == 0, np.float32(1), scale)
    ratio = parts / scale
    eight = xp.rint(ratio).astype(np.int8) if form == "int8" else ratio.astype(np.float32).astype(NUMPY[form])
    return eight.reshape(x.shape), (eight.astype(np.float32) * scale).reshape(x.shape)


def vectors(*shape: int) -> np.ndarray:
    """Of sizes from 1e-20 to 1e20, some of them zero."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-20, 20, (*shape[:-1], 1))
    x[0] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_values_are_the_nearest_in_eight_bits(form: str, blocks: int):
    x = vectors(40, 2, 24)
    packed = jax.jit(round_to_narrow, static_argnums=(1, 2))(x, blocks, form)
    eight, expected = rounded(x, form, blocks)
    np.testing.assert_array_equal(np.asarray(packed.bits), eight.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(packed.widened()), expected)
    most = np.abs(x.reshape(40, 2, blocks, -1)).max(-1, keepdims=True)
    error = np.abs(np.asarray(packed.widened()) - x).reshape(40, 2, blocks, -1)
    assert (error <= 1.0001 * SHARE[form] * most).all()
    assert error.max() > 0
    if form != "int8":
        # Each value to its own precision, down to where 8-bit floats have fewer bits.
        normal = np.abs(x).reshape(error.shape) > most / LARGEST[form] * float(jnp.finfo(FORMS[form]).tiny)
        assert (error <= 1.0001 * SHARE[form] * np.abs(x).reshape(error.shape))[normal].all()


@pytest.mark.parametrize("form", FORMS)
def test_zeros_and_the_smallest_numbers_divide_nothing_by_zero(form: str):
    for x in (0.0, -0.0, 1e-45, 3e-39, -1.2e-38):
        widened = np.asarray(round_to_narrow(jnp.full((2, 8), x, jnp.float32), 1, form).widened())
        assert np.isfinite(widened).all(), x
        assert np.abs(widened).max() <= abs(x), x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_fault_stays_visible_in_its_own_vector_only(form: str, fault: float):
    x = vectors(6, 2, 8)
    x[3, 1, 5] = fault
    widened = np.asarray(round_to_narrow(jnp.asarray(x), 1, form).widened())
    assert not np.isfinite(widened[3, 1, 5])
    x[3, 1], widened = 0, np.where(np.isfinite(widened), widened, 0)
    np.testing.assert_array_equal(np.delete(widened.reshape(12, 8), 7, 0), np.delete(rounded(x, form)[1].reshape(12, 8), 7, 0))


@pytest.mark.parametrize("form", FORMS)
def test_pages_are_written_in_place_and_read_without_what_a_former_owner_left(form: str):
    pool = jax.tree.map(lambda a: jnp.full_like(a, 0xFF if a.dtype == jnp.uint8 else jnp.nan), empty((5, 4, 2, 8), 1, form))
    assert np.isnan(np.asarray(pool.widened())).all()
    x = vectors(6, 2, 8)
    places = jnp.asarray([3, 3, 3, 3, 1, 5]), jnp.asarray([0, 1, 2, 3, 0, 0])  # the last one is nobody's
    pool = write_entries(pool, places, jnp.asarray(x))
    assert np.isnan(np.asarray(pool.widened()[jnp.asarray([0, 2, 4])])).all()
    widened = np.asarray(gather_pages(pool, jnp.asarray([[3, 1], [-1, 7]]), jnp.asarray([5, 2])))
    np.testing.assert_array_equal(widened[0, :5], rounded(x, form)[1][:5])
    assert not widened[0, 5:].any()
    assert not widened[1].any()


def test_no_block_reaches_into_two_parts_of_a_vector():
    assert blocks_of(512, 64) == 9
    assert blocks_of(10, 4) == 7
    assert blocks_of(64) == 1
    assert [largest_magnitude(form) for form in FORMS] == list(LARGEST.values())


@pytest.mark.parametrize("form", FORMS)
def test_attention_in_blocks_is_that_over_rounded_keys_and_values(form: str):
    rng = np.random.default_rng(1)
    pages, page, P, lengths = 40, 16, 20, np.asarray([300, 7, 0])
    q = jnp.asarray(rng.standard_normal((3, 1, 4, 8)), jnp.float32)
    plain = [rng.standard_normal((pages, page, 2, 8)).astype(np.float32) for _ in "kv"]
    table = jnp.asarray(np.stack([rng.permutation(pages)[:P] for _ in lengths]), jnp.int32)
    at, lengths = jnp.asarray(lengths - 1, jnp.int32)[:, None], jnp.asarray(lengths, jnp.int32)
    pools = tuple(round_to_narrow(jnp.asarray(a), 1, form) for a in plain)
    expected = tuple(jnp.asarray(rounded(a, form)[1]) for a in plain)
    attend = jax.jit(lambda pools: blocked_attention(q, pools, table, lengths, at, Score(8**-0.5)))
    output, expected = np.asarray(attend(pools)), np.asarray(attend(expected))
    np.testing.assert_allclose(output[:2], expected[:2], rtol=1e-5, atol=1e-6)
    with implementations(paged_attention="ragged"), pytest.raises(Unsupported, match="no scales of a quantized cache"):
        paged_attention(q, pools, table, lengths, at, Score(8**-0.5))
    assert joined_size(8, 128, jnp.uint8) is None


@pytest.mark.parametrize("form", FORMS)
def test_no_program_widens_a_whole_pool(form: str):
    """Of a pool of 8 MB, a step writes a token in place and widens a block of each row."""
    pools = tuple(jax.eval_shape(lambda: empty((4096, 16, 2, 64), 1, form)) for _ in "kv")

    def step(pools, q, new, table, lengths):
        at = lengths[:, None] - 1
        where = (jnp.take_along_axis(table, at // 16, 1)[:, 0], at[:, 0] % 16)
        pools = tuple(write_entries(pool, where, new) for pool in pools)
        return pools, paged_attention(q, pools, table, lengths, at, Score(0.125))

    inputs = [((2, 1, 4, 64), jnp.float32), ((2, 2, 64), jnp.float32), ((2, 64), jnp.int32), ((2,), jnp.int32)]
    program = jax.jit(step, donate_argnums=0).lower(pools, *(jax.ShapeDtypeStruct(*a) for a in inputs)).compile()
    memory, whole = program.memory_analysis(), sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pools))
    assert memory.alias_size_in_bytes >= whole > 16e6
    # Keys and values of a block in float32, what they are made from, and the scores.
    assert memory.temp_size_in_bytes < 8 * 2 * BLOCK * 2 * 64 * 4 < 0.25 * whole
