"""Sampling against NumPy oracles, setting by setting, rows mixed in one batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative, shared

from argosy.core.errors import BadInput
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Event, Request
from argosy.infer.load import load_lm
from argosy.infer.sampling import sampler
from argosy.infer.sampling.restrictions import MAX_BIASES, Restrictions
from argosy.infer.sampling.sample import (
    COLUMNS,
    Sampling,
    apply_penalties,
    draw_filtered,
    has_filter,
    has_penalty,
    likeliest,
    lowest_by_bits,
    next_tokens,
    random_streams,
    sampling_columns,
    seed_words,
    threshold,
    typical_tokens,
)  # fmt: skip
from argosy.infer.settings import EngineSettings

V = 37


def logits_of(rows=4, seed=0):
    return (3 * np.random.default_rng(seed).standard_normal((rows, V))).astype(np.float32)


def settings(rows):
    return {name: jnp.asarray(a) for name, a in sampling_columns(rows).items()}


def oracle(logits, s):
    """The tokens that one row's settings leave, by the definitions."""
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    order = np.argsort(-logits, kind="stable")
    tokens_left = list(order[: s.top_k or V])
    share = {t: p[t] / p[tokens_left].sum() for t in tokens_left}
    nucleus, total = [], 0.0
    for t in tokens_left:
        if total >= s.top_p:
            break
        nucleus.append(t)
        total += share[t]
    return {int(t) for t in nucleus if share[t] >= s.min_p * share[tokens_left[0]]}


ROWS = [
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, top_p=0.6),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=1.0, top_k=12, top_p=0.8, min_p=0.05),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.0),
]


@jax.jit
def keeps(logits, settings):
    return logits >= threshold(logits, likeliest(logits)[0], settings)[:, None]


@pytest.mark.parametrize("seed", range(5))
def test_filters_leave_what_their_definitions_leave(seed):
    logits = logits_of(len(ROWS), seed)
    for row, row_settings, is_left in zip(logits, ROWS, np.asarray(keeps(jnp.asarray(logits), settings(ROWS)))):
        assert set(np.flatnonzero(is_left).tolist()) == oracle(row, row_settings), row_settings


LARGE = 131_072


@pytest.fixture(scope="module")
def large():
    """Peaked, as a model's are, and flat: of the flat row's, the 256 likeliest have 0.3 % of the mass."""
    rng = np.random.default_rng(0)
    return np.stack([6 * rng.standard_normal(LARGE), rng.uniform(0, 1, LARGE)]).astype(np.float32)


def left_of(logits, s):
    """How many of the likeliest tokens stay by the definitions, in float64."""
    p = np.exp(logits.astype(np.float64) - logits.max())
    p = np.sort(p / p.sum())[::-1]
    count = np.searchsorted(-p, -s.min_p * p[0], side="right") if s.min_p else len(p)
    p = p[: s.top_k or None]
    before = np.concatenate([[0], np.cumsum(p / p.sum())[:-1]])
    if s.top_p < 1:
        count = min(count, int((before < s.top_p).sum()))
    return min(count, len(p))


COMBINED = [
    Sampling(temperature=1.0, top_k=k, top_p=p, min_p=m)
    for k in (0, 40, 256, 257, 5000)
    for p in (1.0, 0.02, 0.6, 0.95, 0.9999)
    for m in (0.0, 0.001)
]


@pytest.mark.parametrize("row", [0, 1], ids=["peaked", "flat"])
def test_every_combination_leaves_what_float64_leaves(large, row):
    """By candidates and by bisection, whichever each needs, all rows in one batch. A sum in float32 can differ by the few tokens
    whose shares are its rounding."""
    logits = large[row, :: LARGE // 16_384]
    counts = np.asarray(keeps(jnp.asarray(np.broadcast_to(logits, (len(COMBINED), len(logits)))), settings(COMBINED))).sum(-1)
    for s, n in zip(COMBINED, counts):
        expected = left_of(logits, s)
        assert abs(n - expected) <= (0 if s.top_p == 1 else 2e-5 * expected + 1), (s, n, expected)


@pytest.mark.parametrize("p", [1 - 1e-4, 1 - 1e-6, 1 - 1e-7])
def test_top_p_near_one_cuts_the_tail_that_float64_cuts(large, p):
    rows = [Sampling(temperature=1.0, top_p=p)]
    count = int(np.asarray(keeps(jnp.asarray(large[:1]), settings(rows))).sum())
    expected = left_of(large[0], rows[0])
    assert expected < LARGE - 1000
    assert abs(count - expected) <= 1e-3 * (LARGE - expected) + 1


def test_a_row_without_filters_loses_no_token_to_a_row_with_them(large):
    """Float32 sums reach 1 thousands of tokens before the last."""
    rows = [Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=5), Sampling(temperature=1.0, top_k=300, top_p=0.9)]
    counts = np.asarray(keeps(jnp.asarray(large[[0, 0, 0]]), settings(rows))).sum(-1)
    assert counts[0] == LARGE
    assert counts[1] == 5


def test_a_row_draws_the_same_whatever_the_rows_beside_it_ask_for(large):
    """Alone it is decided by its candidates; beside a row that needs bisection, or every token, by the whole vocabulary."""
    mine = Sampling(temperature=1.0, top_k=50, top_p=0.9)
    others = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=999)]
    keys = random_streams(0, range(8))
    draw = jax.jit(lambda *arguments: draw_filtered(*arguments)[0])
    for other in others:
        rows = [mine] * 4 + [other] * 4
        together = draw(jnp.asarray(large[[0] * 8, :16_384] / 3), settings(rows), keys)[:4]
        alone = draw(jnp.asarray(large[[0] * 8, :16_384] / 3), settings([mine] * 8), keys)[:4]
        assert together.tolist() == alone.tolist()
    assert len(set(alone.tolist())) > 1


@pytest.mark.slow
def test_tokens_tied_beyond_the_candidates_are_all_drawn_from():
    """1,000 equal logits at the threshold of top-k 5: the draw is among all of them."""
    logits = np.zeros((64, 1000), np.float32)
    rows_settings = settings([Sampling(temperature=1.0, top_k=5)] * 64)
    tokens = np.asarray(draw_filtered(jnp.asarray(logits), rows_settings, random_streams(0, range(64)))[0])
    assert (tokens >= 256).any()


def test_no_program_sorts_the_vocabulary():
    """XLA makes a sort of a top-k of which one output is used; sorting takes a hundred times as long."""
    rows = [Sampling(temperature=1.0, top_k=5)]
    step = jax.jit(lambda x, s, k: next_tokens(x, x, s, k))
    program = step.lower(jnp.zeros((1, 1000)), settings(rows), random_streams(0, [0])).compile().as_text()
    assert "TopK" in program
    assert " sort(" not in program


@pytest.mark.parametrize("values", [[3.0, -1.0, 0.0, -0.0, 2.5], [-1e-30, -5.0, -7.0], [1.0] * 4, [-np.inf, 2.0, -3.0]])
def test_bisection_finds_the_value_that_a_sort_finds(values):
    row = np.asarray([values], np.float32)
    for k in range(1, len(values) + 1):
        bound = lowest_by_bits(jnp.asarray(row), lambda above, k=k: above.sum(-1) < k)
        assert float(bound[0]) == np.sort(row[0])[::-1][k - 1]


SEEDS = [*range(20), 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 2, -(2**63) + 1, (0, 0), (0, 1), (1, 0), (0, 2**32)]


def test_streams_of_seeds_and_rows_are_all_distinct():
    keys = [np.asarray(jax.random.key_data(random_streams(seed, range(20)))) for seed in SEEDS]
    assert len({tuple(key) for key in np.concatenate(keys).tolist()}) == len(SEEDS) * 20


def test_a_stream_is_the_same_in_any_batch():
    several = jax.random.key_data(random_streams(3, range(10)))
    assert np.array_equal(jax.random.key_data(random_streams(3, [7])), several[7:8])


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**21, (0, 2**64), 1.5, "0", ()])
def test_seeds_that_are_no_64_bits_are_refused(seed):
    with pytest.raises(BadInput, match="seed"):
        seed_words(seed)


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
    got = apply_penalties(jnp.asarray(logits), settings(rows), jnp.asarray(seen), jnp.asarray(counts, jnp.int32))
    for i, s in enumerate(rows):
        expected = logits[i].astype(np.float64)
        expected = np.where(seen[i], np.where(expected > 0, expected / s.repetition_penalty, expected * s.repetition_penalty), expected)
        expected = expected - s.frequency_penalty * counts[i] - s.presence_penalty * (counts[i] > 0)
        assert relative(got[i], expected) < 1e-6


def frequencies(rows, logits, n=4000):
    """How often each row chose each token, over many keys."""
    x = jnp.asarray(logits)
    draw = jax.jit(lambda keys: jax.lax.map(lambda k: next_tokens(x, x, settings(rows), k).tokens, keys))
    keys = jax.random.split(jax.random.key(5), (n, len(rows)))
    tokens = np.asarray(draw(keys))
    return np.stack([np.bincount(tokens[:, i], minlength=V) / n for i in range(len(rows))])


def test_draws_follow_the_distribution_and_greedy_rows_beside_them_do_not_draw():
    rows = [Sampling(temperature=0.7), Sampling(temperature=2.0, top_k=6), Sampling()]
    logits = logits_of(3)
    shares = frequencies(rows, logits)
    for i, (s, allowed) in enumerate([(0.7, set(range(V))), (2.0, oracle(logits[1], rows[1]))]):
        warm = np.where([t in allowed for t in range(V)], logits[i] / s, -np.inf)
        p = np.exp(warm - warm.max())
        p /= p.sum()
        assert np.abs(shares[i] - p).max() < 5 * np.sqrt(0.25 / 4000)
        assert shares[i][p == 0].sum() == 0
    assert shares[2][np.argmax(logits[2])] == 1.0


def test_logprobs_are_the_models_own():
    rows = [Sampling(temperature=0.3, top_k=3), Sampling(repetition_penalty=3.0)]
    logits = logits_of(2)
    keys = jax.random.split(jax.random.key(0), 2)
    x = jnp.asarray(logits)
    scored = apply_penalties(x, settings(rows), jnp.ones((2, V), bool), jnp.zeros((2, V), jnp.int32))
    tokens, logprobs, _ = next_tokens(x, scored, settings(rows), keys)
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for i in range(2):
        assert abs(float(logprobs[i]) - expected[i, int(tokens[i])]) < 1e-5


def test_draws_follow_the_distribution_under_every_kind_of_filter():
    logits = logits_of(len(ROWS), 3)
    shares = frequencies(ROWS, logits)
    for row, s, f in zip(logits, ROWS, shares):
        warm = np.where([t in oracle(row, s) for t in range(V)], row.astype(np.float64), -np.inf)
        p = np.exp(warm - warm.max())
        p /= p.sum()
        assert np.abs(f - p).max() < 5 * np.sqrt(0.25 / 4000)
        assert f[p == 0].sum() == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_probability_of_a_draw_is_that_of_what_the_filters_leave(seed):
    rows = [*ROWS, Sampling(temperature=0.6, top_p=0.7), Sampling()]
    logits = logits_of(len(rows), seed)
    x = jnp.asarray(logits)
    tokens, _, chances = next_tokens(x, x, settings(rows), random_streams(seed, range(len(rows))))
    for row, s, token, chance in zip(logits, rows, np.asarray(tokens), np.asarray(chances)):
        if not s.temperature:
            assert chance == 0
            continue
        warm = row.astype(np.float64) / s.temperature
        tokens_left = oracle(warm, s)
        assert int(token) in tokens_left
        expected = warm[token] - np.log(sum(np.exp(warm[t]) for t in tokens_left))
        assert abs(chance - expected) < 1e-5


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8, 0.999, 1.0])
def test_typical_sampling_leaves_what_its_paper_leaves(p):
    logits = logits_of(5, 7)
    is_typical = np.asarray(typical_tokens(jnp.asarray(logits), jnp.full(5, p)))
    for row, is_kept in zip(logits.astype(np.float64), is_typical):
        share = np.exp(row - row.max())
        share /= share.sum()
        entropy = -(share * np.log(share)).sum()
        order = np.argsort(np.abs(-np.log(share) - entropy), kind="stable")
        count = 1 + int((np.cumsum(share[order])[:-1] < p).sum())
        assert set(np.flatnonzero(is_kept)) == set(order[:count]) or p == 1
        assert is_kept.all() or p < 1


def test_typical_rows_beside_others_draw_from_their_own_tokens():
    logits = logits_of(1, 7)
    rows = [Sampling(temperature=1.0, typical_p=0.3), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2)]
    allowed = np.asarray(typical_tokens(jnp.asarray(logits), jnp.asarray([0.3])))[0]
    shares = frequencies(rows, np.concatenate([logits] * 3), 2000)
    assert set(np.flatnonzero(shares[0])) == set(np.flatnonzero(allowed))
    assert set(np.flatnonzero(shares[1])) - set(np.flatnonzero(allowed))
    assert np.count_nonzero(shares[2]) == 2


def test_a_row_that_does_not_count_makes_the_others_do_no_more():
    """A slot keeps the settings of its last owner."""
    logits = jnp.asarray(logits_of(2))
    rows = [Sampling(), Sampling(temperature=1.0, top_k=3)]
    tokens, _, chances = next_tokens(logits, logits, settings(rows), random_streams(0, range(2)), jnp.asarray([True, False]))
    assert tokens.tolist() == np.asarray(logits).argmax(-1).tolist()
    assert chances.tolist() == [0, 0]


def test_every_number_among_the_settings_is_a_column():
    """A setting that is forgotten there would be accepted and ignored."""
    numbers = {name for name, f in Sampling.model_fields.items() if f.annotation in (int, float)}
    assert numbers - {"min_tokens"} == set(COLUMNS)
    rows = [Sampling(), *[Sampling(**{name: 0.5}) for name in COLUMNS if "penalty" in name]]
    assert has_penalty(settings(rows)).tolist() == [False, True, True, True]


FILTERS: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}, {"typical_p": 0.9}]


def test_a_small_temperature_draws_the_greedy_text_with_a_probability_near_1():
    """Divided before they are shifted, logits have no digits left: at 1e-10 another token is drawn, with a log-probability of
    infinity."""
    lm = load_lm(shared("models/stories260k"))
    engine = Engine(lm.module, EngineSettings(slots=4, context=64, pages=64, page=8))

    def answer(sampling: Sampling) -> list[Event]:
        engine.add(Request(lm.encode("Once upon a time"), 8, sampling, frozenset(), 1))
        return list(engine.run())

    greedy = [event.token for event in answer(Sampling())]
    for temperature in (1e-4, 1e-6, 1e-8, 1e-9, 1e-10, 1e-12, 1e-30, 1e-38, 1e-40, 1e-300):
        for filters in FILTERS:
            events = answer(Sampling(temperature=temperature, **filters))
            assert [event.token for event in events] == greedy
            assert all(-1e-6 < event.drawn <= 0 for event in events), (temperature, filters)
            assert all(event.logprob <= 0 for event in events)


def test_tied_tokens_are_drawn_at_any_temperature():
    """Which is why a small temperature is not the same as 0."""
    logits = np.full((400, V), -1.0, np.float32)
    logits[:, [3, 30]] = 4.0
    for temperature in (1e-6, 1e-12):
        rows = settings([Sampling(temperature=temperature)] * len(logits))
        draws = jax.jit(next_tokens)(jnp.asarray(logits), jnp.asarray(logits), rows, random_streams(7, range(len(logits))))
        tokens, count = np.unique(np.asarray(draws.tokens), return_counts=True)
        assert tokens.tolist() == [3, 30]
        # Five standard deviations of a fair coin.
        assert abs(int(count[0]) - 200) < 50
        np.testing.assert_allclose(np.asarray(draws.drawn), np.log(0.5), atol=1e-6)


def test_a_slot_keeps_two_bytes_a_token():
    """Half a GB for 256 slots of 152k tokens would be there for penalties and biases that hardly any request has."""
    slots = sampler.empty_slots(1, 49_152)
    assert sum(np.asarray(a).nbytes for a in jax.tree.leaves(slots)) < 2.2 * 49_152 + 8 * MAX_BIASES


def test_more_biases_than_a_slot_has_places_are_refused():
    allowed = dict.fromkeys(range(MAX_BIASES), 1.0)
    Restrictions(Sampling(logit_bias=allowed), frozenset(), 2 * MAX_BIASES)
    with pytest.raises(BadInput, match="logit_bias has 1025 tokens"):
        Restrictions(Sampling(logit_bias=allowed | {MAX_BIASES: 1.0}), frozenset(), 2 * MAX_BIASES)


def test_occurrences_are_counted_up_to_what_two_bytes_hold_and_never_from_0_again():
    key, vocab = np.zeros(2, np.uint32), 40
    row = sampler.slot_row(vocab, Sampling(), key, 0, [3, 5], [7] * 40_000 + [3])
    assert (row.history[[3, 5, 7, 9]] == (3, 1, 65_534, 0)).all()
    slots = jax.tree.map(jnp.asarray, sampler.write_slot(sampler.empty_slots(1, vocab), np.int32(0), row))
    logits = jnp.zeros((1, vocab)).at[0, 7].set(9.0)
    for _ in range(2):
        slots, out = sampler.sample(slots, logits, jnp.zeros(1, jnp.int32))
        assert out.tokens.tolist() == [7]
    assert int(slots.history[0, 7]) == 65_534
    slots, _ = sampler.sample(slots, jnp.zeros((1, vocab)).at[0, 3].set(9.0), jnp.zeros(1, jnp.int32))
    assert int(slots.history[0, 3]) == 5


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.5}])
def test_each_filter_alone_is_a_filter(filters: dict[str, float]):
    none = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    rows = {name: jnp.asarray([filters.get(name, value), value]) for name, value in none.items()}
    assert np.asarray(has_filter(rows)).tolist() == [True, False]
