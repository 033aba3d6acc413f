"""Attention over sequences that are split over devices."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.core.errors import Unsupported
from argosy.models.parts.stack import Scan
from argosy.ops.attention import Score, See, attention
from argosy.ops.attention import ring as attention_ring
from argosy.ops.attention.ring import _routes
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope
from tools.devices import config_of, lowered_step

B, N, H, U = 4, 4, 8, 6
FOUR, EIGHT, CUBE = {"fsdp": 2, "context": 4}, {"fsdp": 1, "context": 8}, {"fsdp": 2, "context": 2, "tensor": 2}


def both(sizes, T=32, K=2, causal=True, segments=True, sinks=False, dtype=jnp.float32, **score):
    """(y, lse) and their gradients, of the reference on one device and of the ring on eight."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=s), dtype) for s in ((B, T, N, H), (B, T, K, H), (B, T, K, U)))
    segment_ids = jnp.asarray(np.sort(rng.integers(1, 4, (B, T)), 1), jnp.int32) if segments else None
    at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    dy, dlse = jnp.asarray(rng.normal(size=(B, T, N, U)), jnp.float32), jnp.asarray(rng.normal(size=(B, T, N)), jnp.float32)
    arrays = {"q": q, "k": k, "v": v} | ({"sinks": jnp.asarray(rng.normal(size=N), jnp.float32)} if sinks else {})

    def total(arrays, name):
        rule = Score(H**-0.5, sinks=arrays.get("sinks"), **score)
        see = See(at, at, segment_ids, segment_ids, causal=causal, aligned=True)
        y, lse = attention(arrays["q"], arrays["k"], arrays["v"], see, rule, name, lse=True)
        return jnp.sum(y.astype(jnp.float32) * dy) + jnp.sum(lse * dlse), {"y": y, "lse": lse}

    gradients = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    expected = gradients(arrays, "reference")
    with scope(MeshSettings(**sizes).build()):
        return expected, gradients(arrays, "ring")


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (FOUR, {}),
        (EIGHT, {"K": 4, "segments": False}),
        (CUBE, {"sinks": True, "cap": 2.0}),
        (FOUR, {"window": 7, "sinks": True}),
        (FOUR, {"window": 9}),
        (CUBE, {"window": 100, "segments": False}),
        (FOUR, {"causal": False}),
        (FOUR, {"causal": False, "window": 5}),
        ({"data": 2, "fsdp": 1, "context": 4}, {"K": 1, "T": 64}),
    ],
)
def test_value_and_gradients_equal_the_reference(sizes, options):
    for a, b in zip(*map(jax.tree.leaves, both(sizes, **options)), strict=True):
        assert relative(b, a) < 3e-6


def test_queries_in_blocks(monkeypatch):
    monkeypatch.setattr(attention_ring, "QUERIES", 3)
    for a, b in zip(*map(jax.tree.leaves, both(FOUR, T=48, sinks=True)), strict=True):
        assert relative(b, a) < 3e-6


def test_bfloat16_stays_near():
    (_, exact), (_, other) = both(FOUR, dtype=jnp.bfloat16)
    assert other["y"].dtype == jnp.bfloat16
    assert relative(other["y"].astype(jnp.float32), exact["y"].astype(jnp.float32)) < 2e-2


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_each_device_gets_a_piece_and_its_mirror(n):
    """The rule of the exchange: 2n pieces, of which device i works on i and 2n-1-i."""
    even, odd = _routes(n)
    got = {i: set() for i in range(n)}
    for half, route in enumerate((even, odd)):
        assert sorted(a for a, _ in route) == sorted(b for _, b in route) == list(range(n)), "each sends one and gets one"
        for a, b in route:
            got[b].add(2 * a + half)
    assert got == {i: {i, 2 * n - 1 - i} for i in range(n)}


def test_padding_that_sees_nothing_is_finite():
    """A row of padding alone has a segment of its own; a window keeps it to itself."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(B, 32, 2, 8)), jnp.float32) for _ in range(3))
    segments = jnp.asarray(np.repeat([[1], [0], [1], [0]], 32, 1), jnp.int32)
    at = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), (B, 32))
    with scope(MeshSettings(**FOUR).build()):
        y = jax.jit(lambda: attention(q, k, v, See(at, at, segments, segments, aligned=True), Score(1.0)))()
    assert bool(jnp.all(jnp.isfinite(y)))


def test_it_is_taken_where_sequences_are_split_and_only_there():
    q = jnp.zeros((B, 32, N, H))
    at = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), (B, 32))
    ask = lambda q=q, at=at, **options: attention(q, q, q, See(at, at, aligned=True), Score(1.0), **options)  # noqa: E731
    with scope(MeshSettings(**FOUR).build()):
        assert "collective_permute" in jax.jit(ask).lower().as_text()
        with pytest.raises(Unsupported, match="divides into 8 pieces, twice mesh"):
            ask(q[:, :30], at[:, :30], implementation="ring")
    with scope(MeshSettings(fsdp=8).build()):
        assert "collective_permute" not in jax.jit(ask).lower().as_text()
        with pytest.raises(Unsupported, match="split over devices"):
            ask(implementation="ring")


@pytest.mark.parametrize("remat", ["none", "full"])
def test_masks_exist_for_a_block_of_queries_alone(monkeypatch, remat):
    """All layers have the same masks. JAX computed them once for all blocks, before a loop over layers, and kept them: 41 GB for
    131,072 tokens over 8 devices."""
    queries, length, ways = 4, 64, 4
    monkeypatch.setattr(attention_ring, "QUERIES", queries)
    model = config_of("dense", layers=3).build(Scan(remat))
    text = lowered_step(model, MeshSettings(fsdp=2, context=ways).build(), 2, length).as_text()
    masks = [math.prod(map(int, mask.split("x"))) for mask in re.findall(r"tensor<([\dx]+)xi1>", text)]
    heads = model.config.heads
    # The loss compares targets with the whole vocabulary, and not in the ring.
    of_ring = [n for n in masks if n % (2 * length * model.config.vocab)]
    assert max(of_ring) == heads * queries * length // ways
