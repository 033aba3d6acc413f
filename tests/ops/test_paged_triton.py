"""The kernel for NVIDIA GPUs, interpreted on a CPU, against the reference; and that it lowers for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.ops.attention import Score
from argosy.ops.paged import triton as paged_triton
from argosy.ops.paged.attention import paged_reference
from argosy.ops.paged.triton import triton, triton_refusal

SCORES = {
    "plain": {},
    "window": {"window": 9},
    "cap": {"cap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 40, "cap": 5.0, "sinks": True},
}


def inputs_of(score: str = "plain", T: int = 1, N: int = 4, K: int = 2, H: int = 16, U: int = 32, page: int = 8, dtype=jnp.float32):
    """Rows of 0 to 150 tokens; what nobody owns is NaN, and one page of the longest row is out of range."""
    rng = np.random.default_rng(0)
    lengths = np.asarray([0, 3, 150, 64, 129, 17], np.int32)
    pages, P = 80, 20
    pools = [rng.normal(size=(pages, page, K, size)).astype(np.float32) for size in (H, U)]
    table = np.full((len(lengths), P), -1, np.int32)
    free = iter(rng.permutation(pages))
    is_owned = np.zeros((pages, page), bool)
    for row, length in zip(table, lengths):
        for place in range(-(-length // page)):
            row[place] = next(free)
            is_owned[row[place], : min(page, length - place * page)] = True
    table[2, 5] = -1
    for pool in pools:
        pool[~is_owned] = np.nan
    at = np.maximum(lengths[:, None] - T + np.arange(T), 0).astype(np.int32)
    options = dict(SCORES[score])
    if options.pop("sinks", False):
        options["sinks"] = jnp.asarray(rng.normal(size=N), jnp.float32)
    q = jnp.asarray(rng.normal(size=(len(lengths), T, N, H)), dtype)
    pools_of_type = tuple(jnp.asarray(pool, dtype) for pool in pools)
    return q, pools_of_type, jnp.asarray(table), jnp.asarray(lengths), jnp.asarray(at), Score(H**-0.5, **options)


@pytest.mark.parametrize("share", [64, 512])
@pytest.mark.parametrize(("score", "T"), [*((name, 1) for name in SCORES), ("all", 5)])
def test_it_gives_what_the_reference_gives(monkeypatch: pytest.MonkeyPatch, score: str, T: int, share: int):
    """In shares that are merged and in one, with windows, caps and sinks, for one query a row and for several."""
    monkeypatch.setattr(paged_triton, "SHARE", share)
    args = inputs_of(score, T)
    y, lse = jax.jit(lambda *a: triton(*a, args[-1], lse=True, interpret=True))(*args[:-1])
    expected, expected_lse = jax.jit(lambda *a: paged_reference(*a, args[-1], lse=True))(*args[:-1])
    some = np.asarray(args[3]) > 0
    np.testing.assert_allclose(y[some], expected[some], atol=2e-6)
    np.testing.assert_allclose(lse[some], expected_lse[some], atol=2e-6)
    assert np.isfinite(y).all()


def test_in_bfloat16_it_differs_by_rounding():
    args = inputs_of("all", dtype=jnp.bfloat16)
    y = triton(*args, interpret=True)
    widened = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, args[:-1])
    expected = paged_reference(*widened, args[-1])
    some = np.asarray(args[3]) > 0
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y[some].astype(jnp.float32), expected[some], atol=3e-2)


def test_a_row_of_any_length_costs_its_own_blocks(monkeypatch: pytest.MonkeyPatch):
    """Garbage in blocks behind the end or before the window is not even read: an infinite score there changes nothing."""
    q, pools, table, lengths, at, _ = inputs_of()
    score = Score(0.25, window=8)
    changed = tuple(pool.at[table[2, 0]].set(jnp.inf) for pool in pools)
    y, again = (triton(q, content, table, lengths, at, score, interpret=True) for content in (pools, changed))
    np.testing.assert_array_equal(y[2], again[2])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_it_lowers_for_cuda(dtype):
    """The program of Triton is made where there is no GPU; a change of JAX that breaks it turns this red."""
    q, pools, table, lengths, at, score = inputs_of("all", H=64, U=64, page=16, dtype=dtype)
    traced = jax.jit(lambda *a: triton(*a, score)).trace(q, pools, table, lengths, at)
    assert "@__gpu$xla.gpu.triton(" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("sizes", "why"),
    [({}, None), ({"H": 48}, "heads of 48"), ({"page": 12}, "pages of 12"), ({"T": 40}, "80 queries"), ({"page": 128}, "pages of 128")],
)
def test_what_it_cannot_do_is_refused_by_name(sizes: dict[str, int], why: str | None):
    q = jnp.zeros((2, sizes.get("T", 1), 4, sizes.get("H", 64)), jnp.bfloat16)
    pools = (jnp.zeros((9, sizes.get("page", 16), 2, sizes.get("H", 64)), jnp.bfloat16),) * 2
    assert "float32" in str(triton_refusal(q, tuple(pool.astype(jnp.float32) for pool in pools), Score(1.0))) or why
    refusal = triton_refusal(q, pools, Score(1.0))
    assert refusal is None if why is None else why in str(refusal)
