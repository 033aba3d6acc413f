"""Drawing by blocks, against probabilities in float64 and NumPy's argmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.infer.sampling.draw import BLOCK, draw_token, largest_token
from argosy.infer.sampling.sample import Sampling, next_tokens, random_streams, sampling_columns

DRAWS = 40_000


def probabilities(logits):
    p = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def logits():
    """Several blocks and a part of one, unequal."""
    rng = np.random.default_rng(0)
    return (2 * rng.standard_normal(3 * BLOCK + 17) + np.linspace(0, 3, 3 * BLOCK + 17)).astype(np.float32)


def test_draws_follow_the_distribution_within_and_between_blocks(logits):
    """Pearson's chi-squared over tokens and over blocks, within 5 standard deviations of its mean."""
    draw = jax.jit(lambda keys: draw_token(jnp.broadcast_to(logits, (len(keys), len(logits))), keys)[0])
    tokens = np.concatenate([draw(jax.random.split(jax.random.key(i), 2000)) for i in range(DRAWS // 2000)])
    p = probabilities(logits)
    counts, expected = np.bincount(tokens, minlength=len(p)), DRAWS * p
    often = expected >= 5
    pairs = [(counts[often], expected[often])]
    pairs += [tuple(np.add.reduceat(a, range(0, len(p), BLOCK)) for a in (counts, expected))]
    for observed, expected_counts in pairs:
        degrees = len(observed) - 1
        assert ((observed - expected_counts) ** 2 / expected_counts).sum() < degrees + 5 * np.sqrt(2 * degrees)
    rare, chance = counts[~often].sum(), p[~often].sum()
    assert abs(rare - DRAWS * chance) < 5 * np.sqrt(DRAWS * chance)


@pytest.mark.slow
def test_a_block_and_a_token_of_the_same_number_share_no_randomness():
    logits_left = np.full(2 * BLOCK, -np.inf, np.float32)
    logits_left[[0, 1, BLOCK]] = 0.0
    tokens = np.asarray(draw_token(jnp.asarray(np.stack([logits_left] * 3000)), random_streams(0, range(3000)))[0])
    assert all(abs(count - 1000) < 5 * np.sqrt(2000 / 3) for count in np.bincount(tokens)[[0, 1, BLOCK]])


@pytest.mark.slow
def test_the_log_probability_of_a_draw(logits):
    tokens, logprobs = draw_token(jnp.asarray(np.stack([logits] * 9)), random_streams(0, range(9)))
    assert np.abs(np.asarray(logprobs) - np.log(probabilities(logits))[np.asarray(tokens)]).max() < 1e-5


def test_what_is_excluded_is_never_drawn(logits):
    """Blocks without a token that is left, too."""
    logits_left = np.full(len(logits), -np.inf, np.float32)
    logits_left[[5, 2 * BLOCK + 1, len(logits_left) - 1]] = 0.0
    tokens, logprobs = draw_token(jnp.asarray(np.stack([logits_left] * 200)), random_streams(0, range(200)))
    assert set(np.asarray(tokens).tolist()) == {5, 2 * BLOCK + 1, len(logits_left) - 1}
    assert np.abs(np.asarray(logprobs) + np.log(3)).max() < 1e-6


@pytest.mark.slow
def test_a_row_draws_the_same_bit_for_bit_in_any_batch():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((32, 3000)), jnp.float32)
    keys, draw = random_streams(0, range(32)), jax.jit(draw_token)
    for rows in (1, 8, 32):
        parts = [draw(x[i : i + rows], keys[i : i + rows]) for i in range(0, 32, rows)]
        for drawn_parts, whole in zip(zip(*parts), draw_token(x, keys)):
            assert (np.concatenate(drawn_parts) == np.asarray(whole)).all()


def test_a_row_without_filters_draws_the_same_where_others_might_have_some(logits):
    x, rows = jnp.asarray(np.stack([logits] * 20)), [Sampling(temperature=0.8)] * 19 + [Sampling()]
    settings, keys = {name: jnp.asarray(a) for name, a in sampling_columns(rows).items()}, random_streams(0, range(20))
    with_, without = (next_tokens(x, x, settings, keys, filtered=filtered) for filtered in (True, False))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(with_, without))
    assert len(set(with_.tokens.tolist())) > 2


@pytest.mark.parametrize("size", [1, 7, BLOCK, BLOCK + 1, 1000])
def test_the_largest_is_that_of_numpy_and_the_first_of_equals(size):
    rng = np.random.default_rng(size)
    plain, tied = rng.standard_normal((50, size)).astype(np.float32), rng.integers(0, 4, (50, size)).astype(np.float32)
    excluded = np.where(rng.random((50, size)) < 0.9, -np.inf, plain).astype(np.float32)
    for values in (plain, tied, excluded, np.full((2, size), -np.inf, np.float32)):
        assert np.asarray(largest_token(jnp.asarray(values))).tolist() == values.argmax(-1).tolist()
