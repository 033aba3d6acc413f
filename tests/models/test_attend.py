"""The parts of seam 2 that Llama does not use: a layer that carries a state, a layer that holds something other than heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import default, relative

from argosy.core.errors import UnknownName, Unsupported
from argosy.models.parts.attention.attend import Attend, Contiguous, Packed, Paged, Score, See, StackedAttend
from argosy.models.parts.attention.cache import ROW, Spec, contiguous, empty_pools, restore, snapshot
from argosy.models.parts.stack import Layer, Scan, Stack, Unroll, repeating
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.stack.watch import Listening, WatchedAttend
from argosy.models.parts.weight import Draw, Meaning, fill, merge, split, weight
from argosy.ops import attention as ops_attention
from argosy.ops.op import implementations

B, T, D = 2, 11, 6


class Decaying(nnx.Module):
    """A recurrence: s = decay * s + x, forgotten where a sequence starts, untouched by dead tokens."""

    def __init__(self):
        self.decay = weight((D,), Meaning("D"), Draw("normal", 0.3))

    def holds(self, each):
        return Spec(row=(("s", (D,)),))

    def __call__(self, x, each, cache, attend, condition=None):
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

    def expand(self, entries):
        c = entries["latent"]
        return (c @ self.k)[:, :, None], (c @ self.v)[:, :, None]

    def absorb(self, q, entries):
        c = entries["latent"][:, :, None]
        return jnp.einsum("BTNH,RH->BTNR", q, self.k), c, c

    def release(self, y):
        return jnp.einsum("BTNR,RH->BTNH", y, self.v)

    def narrow(self, entries, see, window):
        return see

    def multiplications(self, T, S):
        return S * 2, T

    narrows = False

    def of_rows(self, cut):
        return self


@pytest.mark.parametrize("run", [pytest.param(Unroll(), marks=pytest.mark.slow), Scan()], ids=["unroll", "scan"])
def test_a_state_is_carried_forgotten_and_left_alone(run):
    stack = Stack([Layer("mix")] * 3, lambda kind: Decaying(), run=run)
    fill(stack, jax.random.key(0), addresses=layer_addresses(stack))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, D)), jnp.float32)
    segments = jnp.ones((B, T), jnp.int32)
    whole, _, aux = stack(x, None, Packed(segments))
    assert aux["mix"]["last"].shape == (3,)
    two = stack(x, None, Packed(segments.at[:, 4:].set(2)))[0]
    assert relative(two[:, 4:], stack(x[:, 4:], None, Packed(segments[:, 4:]))[0]) < 1e-6
    assert relative(two[:, 4:], whole[:, 4:]) > 1e-3

    cache = jax.tree.map(lambda a: jnp.full_like(a, 7.7), contiguous(stack.holds(), B, T))
    live = jnp.ones((B, 1), bool)
    for t in range(T):
        y, cache, _ = stack(x[:, t : t + 1], cache, Contiguous(jnp.full((B, 1), t, jnp.int32), live))
        assert relative(y[:, 0], whole[:, t]) < 1e-5

    pool = jax.tree.map(lambda a: jnp.full_like(a, 7.7), empty_pools(stack.holds(), 4, 8, 4))
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
    cached = {"latent": jnp.asarray(rng.standard_normal((B, T, 4)), jnp.float32)}
    segments = jnp.ones((B, T), jnp.int32)
    score = Score(0.4, window=5)
    expected = Packed(segments, absorb=False)(q, cached, None, Shared(k, v), score=score)[0]
    assert relative(Packed(segments, absorb=absorb)(q, cached, None, Shared(k, v), score=score)[0], expected) < 1e-5


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
    assert repeating([Layer(k) for k in plan]) == expected


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


# ---------------------------------------------------------------- chunks

CHUNK, LONG = 4, 23
CHUNKED = Score(0.5, CHUNK, chunked=True)


def heads(seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((B, LONG, n, D)), jnp.float32) for n in (6, 2, 2)]


def by_hand(q, k, v, segments):
    """A query at a time, in float64: each sequence is cut every CHUNK tokens, from its own start."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.zeros(q.shape)
    for b, row in enumerate(segments):
        start = 0
        for t, segment in enumerate(row):
            start = t if t == 0 or segment != row[t - 1] else start
            low = t - (t - start) % CHUNK
            for n in range(q.shape[2]):
                p = np.exp(k[b, low : t + 1, n // 3] @ q[b, t, n] * CHUNKED.scale)
                out[b, t, n] = p / p.sum() @ v[b, low : t + 1, n // 3]
    return out


def keys_and_values(k, v):
    return {"k": k, "v": v}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "none"])
def test_chunks_begin_where_their_sequence_does(backend, monkeypatch):
    """Sequences that begin in the middle of a row, padding between and after them."""
    monkeypatch.setattr(ops_attention.ATTENTION, "prefer", {"cpu": ("blocked",)} if backend == "cpu" else {})
    q, k, v = heads()
    segments = np.asarray([[1] * 9 + [2] * 3 + [3] * 11, [4] * 6 + [0] * 3 + [9] * 13 + [0]], np.int32)
    y, _ = Packed(jnp.asarray(segments))(q, keys_and_values(k, v), None, score=CHUNKED)
    live = segments > 0
    assert relative(np.asarray(y)[live], by_hand(q, k, v, segments)[live]) < 1e-6
    plain, _ = Packed(jnp.asarray(segments))(q, keys_and_values(k, v), None, score=Score(0.5, CHUNK))
    assert relative(np.asarray(plain)[live], by_hand(q, k, v, segments)[live]) > 1e-2


@pytest.mark.parametrize("ring", [True, False])
def test_chunks_are_decoded_as_they_are_read(ring):
    """A first piece that ends within a chunk, one that spans several, then a token at a time; rows at their own places."""
    q, k, v = heads(1)
    expected = by_hand(q, k, v, np.ones((B, LONG), np.int32))
    spec = Spec(token=(("k", (2, D)), ("v", (2, D))), span=CHUNK if ring else None)
    cache = jax.tree.map(lambda a: a + 7.7, contiguous({"layer": (spec, None)}, B, LONG)["layer"])
    step = jax.jit(lambda q, k, v, attend, cache: attend(q, keys_and_values(k, v), cache, score=CHUNKED))
    done = np.zeros(B, int)
    for new in ([6, 3], [9, 5], *[[1, 1]] * LONG):
        take = np.minimum(new, LONG - done)
        at = done[:, None] + np.arange(max(new))
        live = np.arange(max(new)) < take[:, None]
        rows = np.arange(B)[:, None], np.minimum(at, LONG - 1)
        attend = Contiguous(jnp.asarray(at, jnp.int32), jnp.asarray(live), fresh=not done.any())
        y, cache = step(q[rows], k[rows], v[rows], attend, cache)
        for b in range(B):
            if take[b]:
                assert relative(y[b, : take[b]], expected[b, done[b] : done[b] + take[b]]) < 1e-5
        done += take
    assert (done == LONG).all()


@pytest.mark.slow
@pytest.mark.parametrize("ring", default(False, of=(True, False)))
def test_chunks_are_served_as_they_are_read(ring):
    """Shuffled pages that are longer than a chunk, or rings in slots; ragged pieces; a row of nobody."""
    q, k, v = heads(2)
    expected = by_hand(q, k, v, np.ones((B, LONG), np.int32))
    spec = Spec(token=(("k", (2, D)), ("v", (2, D))), span=CHUNK if ring else None)
    cache = jax.tree.map(lambda a: a + 7.7, empty_pools({"layer": (spec, None)}, 3, 12, 5)["layer"])
    table = jnp.asarray([[7, 2, 11, 0, 5], [1, 9, 3, 10, 4], [0] * 5], jnp.int32)
    slots = jnp.asarray([2, 0, 3], jnp.int32)
    step = jax.jit(lambda q, k, v, attend, cache: attend(q, keys_and_values(k, v), cache, score=CHUNKED))
    done = np.zeros(B, int)
    for new in ([6, 11], [0, 2], [7, 1], *[[1, 1]] * LONG):
        take = np.minimum(new, LONG - done)
        at = np.minimum(done[:, None] + np.arange(max(new)), LONG - 1)
        padded = [jnp.concatenate([a[np.arange(B)[:, None], at], jnp.full_like(a[:1, : max(new)], 9.0)]) for a in (q, k, v)]
        t = jnp.broadcast_to(jnp.arange(max(new), dtype=jnp.int32), (B + 1, max(new)))
        attend = Paged(table, slots, jnp.asarray([*done, 0], jnp.int32), jnp.asarray([*take, 0], jnp.int32), t)
        y, cache = step(*padded, attend, cache)
        for b in range(B):
            if take[b]:
                assert relative(y[b, : take[b]], expected[b, done[b] : done[b] + take[b]]) < 1e-5
        done += take
    assert (done == LONG).all()


# ---------------------------------------------------------------- layers that hold both, roll back, log-sum-exp


class Both(nnx.Module):
    """A window of attention and a state beside it: keys, values and a row entry in one layer."""

    def __init__(self):
        self.decay = weight((D,), Meaning("D"), Draw("normal", 0.3))

    def holds(self, each):
        return Spec(token=(("k", (1, D)), ("v", (1, D))), row=(("s", (D,)),), span=each)

    def __call__(self, x, each, cache, attend, condition=None):
        y, cache = attend(x[:, :, None], {"k": x[:, :, None], "v": x[:, :, None]}, cache, score=Score(0.7, each))
        state, starts, live = attend.carry(cache)
        s = jnp.zeros((x.shape[0], D)) if state is None else state["s"]
        outs = []
        for t in range(x.shape[1]):
            s = jnp.where(live[:, t, None], self.decay[...] * jnp.where(starts[:, t, None], 0.0, s) + x[:, t], s)
            outs.append(s)
        return y[:, :, 0] + jnp.stack(outs, 1), attend.keep(cache, {"s": s}), {}


def both(run, span):
    """Two layers that hold both, and `step(x, attend, cache) -> y, cache` over them."""
    stack = Stack([Layer("mix", span)] * 2, lambda kind: Both(), run=LAYOUTS[run])
    fill(stack, jax.random.key(0), addresses=layer_addresses(stack))
    graph, weights = split(stack)
    step = jax.jit(lambda x, attend, cache: merge(graph, weights)(x, cache, attend)[:2])
    x = jnp.asarray(np.random.default_rng(3).standard_normal((B, T, D)), jnp.float32)
    return stack.holds(), step, x


def paged_step(step, x, done, new, cache, slots=(2, 0)):
    table = jnp.asarray([[3, 1, 6, -1], [0, 5, 2, 8]], jnp.int32)
    attend = Paged(
        table,
        jnp.asarray(slots, jnp.int32),
        jnp.full(B, done, jnp.int32),
        jnp.full(B, new, jnp.int32),
        jnp.broadcast_to(jnp.arange(new, dtype=jnp.int32), (B, new)),
    )
    return step(x[:, done : done + new], attend, cache)


LAYOUTS = {"unroll": Unroll(), "scan": Scan()}
LAYOUTS_AND_SPANS = [(run, span) for run in LAYOUTS for span in (None, 3)]


@pytest.mark.parametrize(("run", "span"), default(("unroll", 3), of=LAYOUTS_AND_SPANS))
def test_a_layer_may_hold_tokens_and_a_state(run, span):
    specs, step, x = both(run, span)
    whole, _ = step(x, Packed(jnp.ones((B, T), jnp.int32)), None)
    cache = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), empty_pools(specs, 3, 8, 4, longest=T))
    for done, new in ((0, 4), (4, 1), (5, 4)):
        y, cache = paged_step(step, x, done, new, cache)
        assert relative(y, whole[:, done : done + new]) < 1e-5
    buffers = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), contiguous(specs, B, T))
    for t in range(T):
        y, buffers = step(x[:, t : t + 1], Contiguous(jnp.full((B, 1), t, jnp.int32), jnp.ones((B, 1), bool)), buffers)
        assert relative(y[:, 0], whole[:, t]) < 1e-5


@pytest.mark.parametrize(("run", "span"), default(("scan", 3), ("unroll", None), of=LAYOUTS_AND_SPANS))
def test_a_rejected_draft_is_rolled_back_and_decoding_resumes(run, span):
    """Four tokens are drafted and rejected. A ring with slack needs its length alone, a state its snapshot; a snapshot of both
    goes on in another slot, too."""
    specs, step, x = both(run, span)
    whole, _ = step(x, Packed(jnp.ones((B, T), jnp.int32)), None)
    draft = x.at[:, 5:].set(9.0)
    for slack in (0, 4):
        cache = empty_pools(specs, 4, 9, 4, longest=T, slack=slack)
        _, cache = paged_step(step, x, 0, 5, cache)
        before = snapshot(specs, cache, jnp.asarray([2, 0], jnp.int32))
        _, cache = paged_step(step, draft, 5, 4, cache)
        copies = before
        if slack:  # rings roll back by length: put back the states alone
            copies = {name: {n: a for n, a in caches_of.items() if n.startswith(ROW)} for name, caches_of in before.items()}
        resumed = restore(specs, cache, copies, jnp.asarray([2, 0], jnp.int32))
        assert relative(paged_step(step, x, 5, 4, resumed)[0], whole[:, 5:9]) < 1e-5
        unrestored = paged_step(step, x, 5, 4, cache)[0]
        assert relative(unrestored, whole[:, 5:9]) > 1e-2, "nothing had to be rolled back"
        restored = restore(specs, cache, before, jnp.asarray([3, 1], jnp.int32))
        assert relative(paged_step(step, x, 5, 4, restored, (3, 1))[0], whole[:, 5:9]) < 1e-5
        nowhere = restore(specs, cache, before, jnp.asarray([-1, 4], jnp.int32))
        assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (nowhere, cache))))


def test_indexes_out_of_range_belong_to_no_row():
    """A slot or page of -1 would wrap round into the last one; a token beyond its table would overwrite the row's last page."""
    specs, step, x = both("unroll", None)
    cache = jax.tree.map(lambda a: jnp.full_like(a, 5.0), empty_pools(specs, 3, 8, 4))
    outside = Paged(
        jnp.asarray([[-1], [7]], jnp.int32),
        jnp.asarray([-1, -7], jnp.int32),
        jnp.asarray([0, 4], jnp.int32),
        jnp.full(2, 4, jnp.int32),
        jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (2, 4)),
    )
    _, after = step(x[:, :4], outside, cache)
    assert all((np.asarray(a) == 5).all() for a in jax.tree.leaves(after))
    beyond = Contiguous(jnp.asarray([[-1, T]] * B, jnp.int32), jnp.ones((B, 2), bool))
    buffers = jax.tree.map(lambda a: jnp.full_like(a, 5.0), contiguous(specs, B, T))
    _, after = step(x[:, :2], beyond, buffers)
    assert all((np.asarray(a) == 5).all() for caches_of in after.values() for n, a in caches_of.items() if not n.startswith(ROW))


@pytest.mark.slow
def test_attention_over_parts_of_the_keys_merges_by_log_sum_exp():
    q, k, v = heads(4)
    at = jnp.broadcast_to(jnp.arange(LONG, dtype=jnp.int32), (B, LONG))
    score = Score(0.5, sinks=None, cap=3.0)
    whole, lse = ops_attention.attention(q, k, v, See(at, at), score, lse=True)
    assert relative(whole, ops_attention.attention(q, k, v, See(at, at), score)) == 0
    parts = [
        ops_attention.attention(q, k[:, part], v[:, part], See(at, at[:, part]), score, lse=True)
        for part in (slice(0, 7), slice(7, 8), slice(8, None))
    ]
    y, total = ops_attention.merge_attention(parts)
    assert relative(y, whole) < 1e-6
    assert relative(total, lse) < 1e-6


def test_an_implementation_can_be_asked_for_by_name():
    q, k, v = heads()
    attend = Packed(jnp.ones((B, LONG), jnp.int32))

    def primitives():
        return str(jax.make_jaxpr(lambda q, k, v: attend(q, keys_and_values(k, v), None, score=Score(0.5))[0])(q, k, v))

    assert "custom_vjp" in primitives()
    with implementations(attention="reference"):
        assert "custom_vjp" not in primitives()
    with implementations(attention="blocked"), pytest.raises(Unsupported, match="soft cap"):
        attend(q, keys_and_values(k, v), None, score=Score(0.5, cap=1.0))
    with implementations(attention="flush"), pytest.raises(UnknownName):
        primitives()


def test_a_strategy_is_known_without_asking_for_its_positions():
    """They would trace operations at every call whose arguments are checked."""

    class Silent:
        @property
        def positions(self):
            raise AssertionError

        def __call__(self):
            raise AssertionError

        live, recur = positions, __call__

    assert isinstance(Silent(), Attend)
    assert not isinstance(Silent(), StackedAttend)
    plain = Packed(jnp.ones((B, LONG), jnp.int32))
    assert isinstance(Listening(WatchedAttend(plain)), Attend)
    for other in (plain.segments, None, keys_and_values):
        assert not isinstance(other, Attend)
