"""Every implementation equals the reference, in value and gradient; the reference equals plain NumPy."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.core.errors import Unsupported
from argosy.ops.attention import ATTENTION, Score, See, attention, bidirectional, blocked
from argosy.ops.attention.splash import splash_refusal
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope

B, T, N, K, H = 2, 150, 6, 2, 10
# Kernels for other devices, which have tests of their own: test_attention_NAME.py.
ELSEWHERE = ("splash", "cudnn", "ring")


def inputs(seed=0, T=T):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, T, n, H)).astype(np.float32) for n in (N, K, K))
    segments = np.sort(rng.integers(1, 4, (B, T)), 1).astype(np.int32)
    at = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    return q, k, v, segments, at


def oracle(q, k, v, see, score):
    """Row by row, in float64."""
    out = np.zeros(q.shape)
    for b in range(q.shape[0]):
        for n in range(q.shape[2]):
            s = q[b, :, n].astype(np.float64) @ k[b, :, n // (N // K)].astype(np.float64).T * score.scale
            if score.cap is not None:
                s = score.cap * np.tanh(s / score.cap)
            s[~see[b]] = -np.inf
            sink = np.exp(float(score.sinks[n])) if score.sinks is not None else 0.0
            p = np.exp(s)
            out[b, :, n] = p / (p.sum(-1, keepdims=True) + sink) @ v[b, :, n // (N // K)]
    return out


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize(
    "score", [{}, {"cap": 2.0}, {"sinks": np.linspace(-1, 3, N, dtype=np.float32)}], ids=["plain", "cap", "sinks"]
)
def test_reference_equals_numpy(window, score):
    q, k, v, segments, at = inputs(T=40)
    see = See(*map(jnp.asarray, (at, at, segments, segments)), aligned=True)
    score = {name: jnp.asarray(value) if name == "sinks" else value for name, value in score.items()}
    rule = Score(0.3, window, **score)
    got = attention(*map(jnp.asarray, (q, k, v)), see, rule, "reference")
    ahead = at[:, :, None] - at[:, None, :]
    mask = (ahead >= 0) & (segments[:, :, None] == segments[:, None, :])
    if window is not None:
        mask &= ahead < window
    assert relative(got, oracle(q, k, v, mask, rule)) < 1e-6


@pytest.mark.parametrize("name", [n for n in ATTENTION if n not in ("reference", *ELSEWHERE)])
@pytest.mark.parametrize("window", [None, 1, 7, 64, 100])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [5, 64, 150])
def test_implementations_equal_the_reference(name, window, packed, length):
    q, k, v, segments, at = inputs(1, length)
    segment = jnp.asarray(segments) if packed else None
    see = See(jnp.asarray(at), jnp.asarray(at), segment, segment, aligned=True)
    score = Score(H**-0.5, window)

    def of(implementation):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attention(q, k, v, see, score, implementation)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*map(jnp.asarray, (q, k, v)))

    value, grads = of(name)
    expected, expected_grads = of("reference")
    assert abs(float(value - expected)) < 1e-4 * max(1, abs(float(expected)))
    for got, expected_grad in zip(grads, expected_grads):
        assert np.abs(got - expected_grad).max() < 5e-6 * max(1, np.abs(expected_grad).max())     # all zero where only itself is seen


def branches(T=150):
    """Rows with two prefixes, branches of them, a segment without one, and padding."""
    segments, prefixes = np.zeros((2, B, T), np.int32)
    for b in range(B):
        ends = np.linspace(0, T - 3 - b, 8).astype(int)
        for segment, prefix in enumerate((0, 1, 1, 0, 4, 4, 0), 1):
            here = slice(ends[segment - 1], ends[segment])
            segments[b, here], prefixes[b, here] = segment, prefix
    return segments, prefixes


def test_a_query_sees_its_segment_and_the_prefix_of_it():
    q, k, v, _, at = inputs(T=40)
    segments, prefixes = branches(40)
    see = See(*map(jnp.asarray, (at, at, segments, segments)), aligned=True, q_prefix=jnp.asarray(prefixes))
    got = attention(*map(jnp.asarray, (q, k, v)), see, Score(0.3), "reference")
    mask = np.zeros((B, 40, 40), bool)
    for b, t, s in np.ndindex(mask.shape):
        visible = segments[b, t] == segments[b, s] or (prefixes[b, t] > 0 and segments[b, s] == prefixes[b, t])
        mask[b, t, s] = s <= t and visible
    assert mask.sum() > (segments[:, :, None] == segments[:, None, :]).sum() / 2
    assert relative(got, oracle(q, k, v, mask, Score(0.3))) < 1e-6


@pytest.mark.parametrize("length", [40, 150])
def test_blocks_of_rows_see_prefixes(length):
    q, k, v, _, at = inputs(1, length)
    segments, prefixes = branches(length)
    see = See(*map(jnp.asarray, (at, at, segments, segments)), aligned=True, q_prefix=jnp.asarray(prefixes))

    def of(implementation):
        loss = lambda *a: jnp.sum(jnp.sin(attention(*a, see, Score(0.3), implementation)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*map(jnp.asarray, (q, k, v)))

    value, grads = of("blocked")
    expected, expected_grads = of("reference")
    assert abs(float(value - expected)) < 1e-4 * abs(float(expected))
    for got, expected_grad in zip(grads, expected_grads):
        assert np.abs(got - expected_grad).max() < 5e-6 * max(1, np.abs(expected_grad).max())


@pytest.mark.parametrize("length, keys, segments, window, heads_at_once", [
    (150, 150, None, None, 2),
    (150, 150, "packed", None, 1),
    (150, 150, "packed", 9, 2),
    (130, 130, "prefixes", None, 1),
    (64, 64, None, 7, 2),
    (5, 5, "packed", None, 2),
    (150, 40, None, None, 1),       # to the keys of another sequence
    (3, 70, None, None, 2),
])  # fmt: skip
def test_blocks_of_queries_that_see_both_directions(length, keys, segments, window, heads_at_once, monkeypatch):
    monkeypatch.setattr(blocked, "FEWEST", 1)
    monkeypatch.setattr(bidirectional, "core_count", lambda: 1)
    rows = -(-length // -(-length // 64)) * N // K
    monkeypatch.setattr(bidirectional, "SCORES", heads_at_once * B * rows * keys * 4)
    q, _, _, packed, at = inputs(3, length)
    _, k, v, *_ = inputs(4, keys)
    v = np.concatenate([v, v[..., :3] ** 2], -1)
    whose, prefixes = (packed, None) if segments == "packed" else branches(length) if segments == "prefixes" else (None, None)
    k_at = np.broadcast_to(np.arange(keys, dtype=np.int32), (B, keys))
    at, k_at, whose, prefixes = (a if a is None else jnp.asarray(a) for a in (at, k_at, whose, prefixes))
    see = See(at, k_at, whose, whose, causal=False, aligned=length == keys, q_prefix=prefixes)

    def of(implementation):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attention(q, k, v, see, Score(0.3, window), implementation)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*map(jnp.asarray, (q, k, v)))

    value, grads = of("blocked")
    expected, expected_grads = of("reference")
    assert abs(float(value - expected)) < 1e-4 * max(1, abs(float(expected)))
    for got, wanted in zip(grads, expected_grads):
        assert np.abs(got - wanted).max() < 5e-6 * max(1, np.abs(wanted).max())


def test_what_is_not_causal_takes_blocks_on_cpus_and_keeps_no_scores():
    """The reference keeps [B N T S] numbers for its backward pass."""
    shape = jax.ShapeDtypeStruct((1, 512, 4, 16), jnp.float32)
    at = jnp.arange(512, dtype=jnp.int32)[None]

    def temporaries(implementation):
        loss = lambda *a: jnp.sum(attention(*a, See(at, at, causal=False), Score(0.25), implementation) ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * 512 * 512 * 4
    assert temporaries(None) < scores < temporaries("reference")


@pytest.mark.parametrize("name", ["splash", "ring"])
def test_kernels_without_prefixes_say_so(name):
    """Where the platform and the mesh are theirs, so that the reference takes over."""
    q, k, v, _, at = inputs(T=40)
    segments, prefixes = map(jnp.asarray, branches(40))
    see = See(jnp.asarray(at), jnp.asarray(at), segments, segments, aligned=True)
    arrays = tuple(map(jnp.asarray, (q, k, v)))
    refuses = ATTENTION[name].refuses
    refusals = {}
    for prefix in (None, prefixes):
        with scope(MeshSettings(context=2, fsdp=4).build()) if name == "ring" else nullcontext():
            arguments = (*arrays, replace(see, q_prefix=prefix), Score(0.3), False)
            refusals[prefix is None] = splash_refusal(*arguments) if name == "splash" else refuses(*arguments)
    assert refusals == {True: None, False: "no prefixes of segments"}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_kernels_for_other_devices_are_tested_on_their_own(name):
    assert Path(__file__).with_name(f"test_attention_{name}.py").exists()
    assert any(name in preferred for preferred in (*ATTENTION.prefer.values(), ATTENTION.always))


def test_what_an_implementation_cannot_do_it_refuses():
    q, k, v, _, at = inputs(T=8)
    see = See(jnp.asarray(at), jnp.asarray(at), aligned=True)
    with pytest.raises(Unsupported, match="cap"):
        attention(*map(jnp.asarray, (q, k, v)), see, Score(1.0, cap=3.0), "blocked")
    with pytest.raises(Unsupported, match="whole sequences"):
        attention(*map(jnp.asarray, (q, k, v)), See(see.q_at, see.k_at), Score(1.0), "blocked")
    with pytest.raises(Unsupported, match="whole sequences"):
        attention(*map(jnp.asarray, (q, k, v)), See(see.q_at, see.k_at, causal=False), Score(1.0, 3), "blocked")
    with pytest.raises(Unsupported, match="choice"):
        attention(*map(jnp.asarray, (q, k, v)), replace(see, picked=jnp.ones((B, 8, 8), bool)), Score(1.0), "blocked")


def test_what_the_best_cannot_do_falls_to_the_reference():
    """A cap must not be dropped because the preferred implementation has none."""
    q, k, v, _, at = inputs(T=8)
    see = See(jnp.asarray(at), jnp.asarray(at), aligned=True)
    arrays = tuple(map(jnp.asarray, (q, k, v)))
    capped = attention(*arrays, see, Score(1.0, cap=0.5))
    assert relative(capped, attention(*arrays, see, Score(1.0, cap=0.5), "reference")) == 0
    assert relative(capped, attention(*arrays, see, Score(1.0), "reference")) > 1e-2
