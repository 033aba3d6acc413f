"""The parts of seam 2 that Llama does not use: a layer that carries a state, a layer that holds something other than heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import relative

from argosy.models.parts.attend import Contiguous, Packed, Paged, Score
from argosy.models.parts.cache import Spec, contiguous, paged
from argosy.models.parts.stack import Layer, Scan, Stack, Unroll, groups, layer_addresses
from argosy.models.parts.weight import Draw, Meaning, fill, merge, split, weight

B, T, D = 2, 11, 6


class Decaying(nnx.Module):
    """A recurrence: s = decay * s + x, forgotten where a sequence starts, untouched by dead tokens."""

    def __init__(self):
        self.decay = weight((D,), Meaning("D"), Draw("normal", 0.3))

    def holds(self, each):
        return Spec(row=(("s", (D,)),))

    def __call__(self, x, each, cache, attend):
        state, starts, live = attend.carry(cache)
        s = jnp.zeros((x.shape[0], D)) if state is None else state["s"]
        outs = []
        for t in range(x.shape[1]):
            fresh = jnp.where(starts[:, t, None], 0.0, s)
            s = jnp.where(live[:, t, None], self.decay[...] * fresh + x[:, t], s)
            outs.append(s)
        return x + jnp.stack(outs, 1), attend.keep(cache, {"s": s}), {"last": s.sum()}


class Shared:
    """One latent [B S R] held for all heads: keys W_k c, values W_v c. Absorbed, W_k moves to the query."""

    def __init__(self, k, v):
        self.k, self.v = k, v  # [R H] each

    def expand(self, held):
        c = held["latent"]
        return (c @ self.k)[:, :, None], (c @ self.v)[:, :, None]

    def absorb(self, q, held):
        c = held["latent"][:, :, None]
        return jnp.einsum("BTNH,RH->BTNR", q, self.k), c, c

    def release(self, y):
        return jnp.einsum("BTNR,RH->BTNH", y, self.v)

    def narrow(self, held, see, window):
        return see

    def multiplications(self, T, S):
        return S * 2, T


@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=["unroll", "scan"])
def test_a_state_is_carried_forgotten_and_left_alone(run):
    stack = Stack([Layer("mix")] * 3, lambda kind: Decaying(), run=run)
    fill(stack, jax.random.key(0), addresses=layer_addresses(stack))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, D)), jnp.float32)
    segments = jnp.ones((B, T), jnp.int32)
    whole, _, told = stack(x, None, Packed(segments))
    assert told["mix"]["last"].shape == (3,)
    two = stack(x, None, Packed(segments.at[:, 4:].set(2)))[0]
    assert relative(two[:, 4:], stack(x[:, 4:], None, Packed(segments[:, 4:]))[0]) < 1e-6
    assert relative(two[:, 4:], whole[:, 4:]) > 1e-3

    cache = jax.tree.map(lambda a: jnp.full_like(a, 7.7), contiguous(stack.holds(), B, T))
    live = jnp.ones((B, 1), bool)
    for t in range(T):
        y, cache, _ = stack(x[:, t : t + 1], cache, Contiguous(jnp.full((B, 1), t, jnp.int32), live))
        assert relative(y[:, 0], whole[:, t]) < 1e-5

    pool = jax.tree.map(lambda a: jnp.full_like(a, 7.7), paged(stack.holds(), 4, 8, 4))
    slots, table = jnp.asarray([2, 0], jnp.int32), jnp.zeros((B, 1), jnp.int32)
    done = 0
    for new in (5, 0, 3, 3):
        t = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (B, 5))
        chunk = jnp.pad(x[:, done : done + new], ((0, 0), (0, 5 - new), (0, 0)), constant_values=9.0)
        attend = Paged(table, slots, jnp.full(B, done, jnp.int32), jnp.full(B, new, jnp.int32), t)
        y, pool, _ = stack(chunk, pool, attend)
        if new:
            assert relative(y[:, :new], whole[:, done : done + new]) < 1e-5
        done += new
    for a in jax.tree.leaves(pool):
        slot_axis = 1 if run.stacked else 0
        assert (np.take(np.asarray(a), [1, 3], slot_axis) == np.float32(7.7)).all(), "somebody else's state was written"


@pytest.mark.parametrize("absorb", [None, True, False])
def test_absorbed_equals_expanded(absorb):
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((4, 6)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.standard_normal((B, T, 3, 6)), jnp.float32)
    held = {"latent": jnp.asarray(rng.standard_normal((B, T, 4)), jnp.float32)}
    segments = jnp.ones((B, T), jnp.int32)
    score = Score(0.4, window=5)
    expected = Packed(segments, absorb=False)(q, held, None, Shared(k, v), score=score)[0]
    assert relative(Packed(segments, absorb=absorb)(q, held, None, Shared(k, v), score=score)[0], expected) < 1e-5


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("aaaa", [(0, 1, 4)]),
        ("ab" * 3, [(0, 2, 3)]),
        ("daaaa", [(0, 1, 1), (1, 1, 4)]),
        ("lllg" * 2 + "ll", [(0, 4, 2), (8, 1, 2)]),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
    ],
)
def test_plans_fall_into_repeating_groups(plan, expected):
    assert groups([Layer(k) for k in plan]) == expected


def test_mixed_kinds_scan_as_they_unroll():
    """Two kinds of layers in an order that repeats and then does not."""

    def make(kind):
        block = Decaying()
        block.decay.set_metadata(draw=Draw("normal", 0.1 if kind == "slow" else 0.5))
        return block

    plan = [Layer(k) for k in ["slow", "fast", "fast"] * 2 + ["slow"]]
    x = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, D)), jnp.float32)
    outs = []
    for run in (Unroll(), Scan()):
        stack = Stack(plan, make, run=run)
        fill(stack, jax.random.key(0), addresses=layer_addresses(stack))
        graph, weights = split(stack)
        outs.append(
            jax.jit(lambda w, x, g=graph: merge(g, w)(x, None, Packed(jnp.ones((B, T), jnp.int32))))(weights, x)
        )
    assert relative(outs[1][0], outs[0][0]) < 1e-6
    for kind in ("slow", "fast"):
        assert relative(outs[1][2][kind]["last"], outs[0][2][kind]["last"]) < 1e-6
