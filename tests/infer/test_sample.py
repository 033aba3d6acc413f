"""Sampling against NumPy oracles, setting by setting, rows mixed in one batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.infer.sample import Need, Sampling, choose, filtered, penalised, table

V = 37


def logits_of(rows=4, seed=0):
    return (3 * np.random.default_rng(seed).standard_normal((rows, V))).astype(np.float32)


def settings(rows):
    return {name: jnp.asarray(a) for name, a in table(rows).items()}


def oracle(logits, s):
    """The tokens that one row's settings leave, by the definitions."""
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    order = np.argsort(-logits, kind="stable")
    left = list(order[: s.top_k or V])
    share = {t: p[t] / p[left].sum() for t in left}
    kept, total = [], 0.0
    for t in left:
        if total >= s.top_p:
            break
        kept.append(t)
        total += share[t]
    return {int(t) for t in kept if share[t] >= s.min_p * share[left[0]]}


ROWS = [
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=1.0, top_k=12, top_p=0.8, min_p=0.05),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.0),
]


@pytest.mark.parametrize("seed", range(5))
def test_filters_leave_what_their_definitions_leave(seed):
    logits = logits_of(len(ROWS), seed)
    got = np.asarray(filtered(jnp.asarray(logits), settings(ROWS)))
    for row, wanted, kept in zip(logits, ROWS, got):
        assert set(np.flatnonzero(np.isfinite(kept)).tolist()) == oracle(row, wanted), wanted


def test_penalties_by_hand():
    logits = logits_of(3)
    rows = [
        Sampling(repetition_penalty=1.7),
        Sampling(presence_penalty=0.9),
        Sampling(frequency_penalty=-0.4, presence_penalty=0.3, repetition_penalty=0.8),
    ]
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 3, (3, V))
    seen = (counts > 0) | (rng.random((3, V)) < 0.2)
    got = penalised(jnp.asarray(logits), settings(rows), jnp.asarray(seen), jnp.asarray(counts, jnp.int32))
    for i, s in enumerate(rows):
        expected = logits[i].astype(np.float64)
        expected = np.where(seen[i], np.where(expected > 0, expected / s.repetition_penalty, expected * s.repetition_penalty), expected)
        expected = expected - s.frequency_penalty * counts[i] - s.presence_penalty * (counts[i] > 0)
        assert relative(got[i], expected) < 1e-6


def drawn(rows, logits, n=4000):
    """How often each row chose each token, over many keys."""
    need = Need.of(rows)
    one = jax.jit(jax.vmap(lambda keys: choose(jnp.asarray(logits), settings(rows), keys, need)[0]))
    keys = jax.random.split(jax.random.key(5), (n, len(rows)))
    tokens = np.asarray(one(keys))
    return np.stack([np.bincount(tokens[:, i], minlength=V) / n for i in range(len(rows))])


def test_draws_follow_the_distribution_and_greedy_rows_beside_them_do_not_draw():
    rows = [Sampling(temperature=0.7), Sampling(temperature=2.0, top_k=6), Sampling()]
    logits = logits_of(3)
    found = drawn(rows, logits)
    for i, (s, allowed) in enumerate([(0.7, set(range(V))), (2.0, oracle(logits[1], rows[1]))]):
        warm = np.where([t in allowed for t in range(V)], logits[i] / s, -np.inf)
        p = np.exp(warm - warm.max())
        p /= p.sum()
        assert np.abs(found[i] - p).max() < 5 * np.sqrt(0.25 / 4000)
        assert found[i][p == 0].sum() == 0
    assert found[2][np.argmax(logits[2])] == 1.0


def test_logprobs_are_the_models_own():
    rows = [Sampling(temperature=0.3, top_k=3), Sampling(repetition_penalty=3.0)]
    logits = logits_of(2)
    seen = jnp.ones((2, V), bool)
    keys = jax.random.split(jax.random.key(0), 2)
    tokens, logprobs = choose(jnp.asarray(logits), settings(rows), keys, Need.of(rows), seen, jnp.zeros((2, V), jnp.int32))
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for i in range(2):
        assert abs(float(logprobs[i]) - expected[i, int(tokens[i])]) < 1e-5


def test_what_nobody_asks_for_is_not_in_the_program():
    assert Need.of([Sampling()]) == Need(False, False, False)
    assert Need.of([Sampling(top_k=5)]) == Need(False, False, False)        # greedy: filters change nothing
    assert Need.of([Sampling(temperature=1.0), Sampling(presence_penalty=1)]) == Need(True, False, True)
