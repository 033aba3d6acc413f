"""Attention over pages in blocks against all pages at once, in float64 where they must be equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.ops.attention import Score, See
from argosy.ops.paged import blocked as paged_blocked
from argosy.ops.paged import rows as paged_rows
from argosy.ops.paged.attention import paged_reference

SCORES = {
    "plain": {},
    "window": {"window": 9},
    "cap": {"cap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 20, "cap": 5.0, "sinks": True},
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("how_many", "block", "together"), [(2, 12, 1), (1, 12, 4), (1, 12, 8), (1, 64, 4)])
def test_blocks_give_what_all_pages_give(
    monkeypatch: pytest.MonkeyPatch, name: str, how_many: int, block: int, together: int
):
    """Of several queries a row in blocks; of one by rows, in groups of rows or all at once, in blocks and in one."""
    monkeypatch.setattr(paged_blocked, "BLOCK", block)
    monkeypatch.setattr(paged_rows, "rows_together", lambda *_: together)
    run = paged_blocked.blocked_attention if how_many > 1 else paged_rows.by_rows
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        pages, page, P, N, K, H = 40, 4, 11, 6, 2, 5
        pools = [rng.normal(size=(pages, page, K, size)) for size in (H, H + 2)]
        lengths, T = np.asarray([0, 3, 17, 44, 12, 30], np.int32), how_many
        table = np.full((len(lengths), P), -1, np.int32)
        free = iter(rng.permutation(pages)[:-4])
        for row, length in zip(table, lengths):
            row[: -(-length // page)] = [next(free) for _ in range(-(-length // page))]
        is_owned = np.zeros((pages, page), bool)
        for row, length in zip(table, lengths):
            for at in range(length):
                is_owned[row[at // page], at % page] = True
        for pool in pools:
            pool[~is_owned] = np.nan  # what nobody owns may be anything
        at = np.maximum(lengths[:, None] - T + np.arange(T), 0).astype(np.int32)
        q = rng.normal(size=(len(lengths), T, N, H))
        options = dict(SCORES[name])
        if options.pop("sinks", False):
            options["sinks"] = jnp.asarray(rng.normal(size=N))
        score = Score(H**-0.5, **options)
        arguments = (
            jnp.asarray(q),
            tuple(map(jnp.asarray, pools)),
            jnp.asarray(table),
            jnp.asarray(lengths),
            jnp.asarray(at),
            score,
        )
        y, lse = jax.jit(lambda: run(*arguments, lse=True))()
        expected, expected_lse = paged_reference(*arguments, lse=True)
        some = lengths > 0
        # Scores and their sums are float32 in both.
        np.testing.assert_allclose(y[some], expected[some], atol=1e-5)
        np.testing.assert_allclose(lse[some], expected_lse[some], atol=1e-5)
        assert np.isfinite(y).all()


def test_few_rows_at_a_time_where_they_are_large():
    """SmolLM2's rows of 256 tokens have 393 kB of keys and values, those of Llama 3.1 8B 2.1 MB; a short table has few tokens."""
    table = jnp.zeros((64, 128), jnp.int32)
    for heads, size, expected in ((3, 64, 4), (8, 128, 1), (1, 16, 64)):
        pools = (jnp.zeros((9, 16, heads, size)),) * 2
        assert paged_rows.rows_together(pools, table) == expected
    assert paged_rows.rows_together(pools, table[:, :2]) == 512


@pytest.mark.parametrize(
    ("length", "window", "blocks"),
    [(0, None, 0), (7, None, 1), (8, None, 1), (9, None, 2), (24, None, 3), (24, 8, 1), (24, 9, 2)],
)
def test_one_program_reads_the_blocks_in_use_only(
    monkeypatch: pytest.MonkeyPatch, length: int, window: int | None, blocks: int
):
    monkeypatch.setattr(paged_blocked, "BLOCK", 8)
    read: list[int] = []
    pools = {"k": jnp.ones((6, 4, 1, 3))}
    table, score = jnp.arange(6, dtype=jnp.int32)[None], Score(1.0, window=window)

    def mark_blocks(cached: dict, see: See):
        jax.debug.callback(lambda at: read.append(int(at[0, 0])), see.k_at)
        return jnp.ones((1, 1, 1, 3)), jnp.zeros((1, 1, 1))

    def program(lengths):
        return paged_blocked.attend_by_blocks(mark_blocks, pools, table, lengths, lengths[:, None] - 1, score)

    jax.block_until_ready(jax.jit(program)(jnp.asarray([length], jnp.int32)))
    jax.effects_barrier()
    assert len(read) == blocks
