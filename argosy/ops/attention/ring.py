"""Ring attention over sequences that are split over devices: keys and values move around the ring of devices, and each device keeps its
queries (Liu et al. 2023, arXiv:2310.01889).

In every step, a device attends to the keys that it currently has and sends them to the next device. Outputs are merged by their
log-sum-exp. In the backward pass, the gradients of keys and values move around together with the keys. A device never holds more keys
than its own share and one neighbor's share.

With causal attention, the device with the end of the sequence would work while the others wait. The sequence is therefore cut into 2n
pieces for n devices, and halves are exchanged first so that device i works on pieces i and 2n-1-i (Brandon et al. 2023,
arXiv:2311.09431, by pieces instead of stripes). Every step but the first is then two blocks of scores on every device, all of which are
seen. With a window, shares stay where they are, and only the steps within the window are taken.

Scores exist for `QUERIES` queries at a time. Soft caps and sinks are supported; a bias is not.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.ops.attention import UNSEEN, Score, See
from argosy.ops.op import Implementation
from argosy.ops.precision import sums_in, wide
from argosy.parallel.scope import activation_spec, axis_sizes, splits

AXIS = "context"
# The number of queries whose scores exist at a time.
QUERIES = 512


class RingCall(NamedTuple):
    """The constants of a call.

    n: the number of devices in the ring.
    causal, window, scale, cap: as in `See` and `Score`.
    """

    n: int
    causal: bool
    window: int | None
    scale: float
    cap: float | None

    @property
    def balanced(self) -> bool:
        return self.causal and self.window is None

    def steps(self, each: int) -> int:
        """Returns the number of steps after which no query sees the keys anymore, with `each` tokens in a device's share."""
        return min(self.n, -(-(self.window - 1) // each) + 1) if self.causal and self.window is not None else self.n


class Keys(NamedTuple):
    """Keys and values that move around the ring.

    at: their positions in the sequence.
    segments: their segments.
    """

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K U"]
    at: Int[Array, " S"]
    segments: Int[Array, "B S"]


class RingQueries(NamedTuple):
    """Queries of a device, with further inputs of the backward pass.

    at, segments: the positions and segments of the queries.
    g: the gradient of the output. Only in the backward pass.
    lse, delta: [B T N], the log-sum-exp of scores, and the sum of g y over features. Only in the backward pass.
    """

    q: Float[Array, "B T N H"]
    at: Int[Array, " T"]
    segments: Int[Array, "B T"]
    g: Array | None = None
    lse: Array | None = None
    delta: Array | None = None

    def cut(self, half: Any) -> "RingQueries":
        return jax.tree.map(lambda a: a[half] if a.ndim == 1 else a[:, half], self)


def is_split() -> bool:
    """Whether the sequences of the program being traced are split over devices."""
    return splits("time")


def ring(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K U"],
    see: See,
    score: Score,
    *,
    lse: bool = False,
) -> Any:
    """Computes `attention` over sequences that the mesh in scope splits."""
    rule = RingCall(axis_sizes()[AXIS], see.causal, score.window, score.scale, score.cap)
    segments = see.q_segment if see.q_segment is not None else jnp.ones(q.shape[:2], jnp.int32)
    queries, keys = activation_spec("B T N H", q.shape), activation_spec("B T K H", k.shape)
    rows = activation_spec("B T", q.shape[:2])
    # Query heads must be on the devices of their key heads, so both are split over the same devices, or neither is.
    heads = keys[2] if keys[2] == queries[2] else None
    four, three = PartitionSpec(*rows, heads, None), PartitionSpec(*rows, heads)
    sinks = None if score.sinks is None else wide(score.sinks)
    call = partial(_local, rule)
    y, total = jax.shard_map(
        call, in_specs=(four, four, four, rows, PartitionSpec(heads)), out_specs=(four, three), check_vma=False
    )(q, k, v, segments, jnp.full(q.shape[2], -jnp.inf) if sinks is None else sinks)
    return (y, total) if lse else y


def _refuses(q: Array, k: Array, v: Array, see: See, score: Score, lse: bool) -> str | None:
    if not is_split():
        return "only sequences that are split over devices (mesh.context)"
    if not see.aligned or see.picked is not None:
        return "only a pass over whole sequences, in which queries do not choose their keys"
    if see.q_prefix is not None:
        return "no prefixes of segments"
    if score.bias is not None:
        return "no bias"
    n = axis_sizes()[AXIS]
    if not isinstance(q.shape[1], int) or q.shape[1] % (2 * n):
        return f"only a length that divides into {2 * n} pieces, twice mesh.context, and not {q.shape[1]}"
    return None


RING = Implementation(ring, _refuses)


# ---------------------------------------------------------------- one device


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _local(rule: RingCall, q: Array, k: Array, v: Array, segments: Array, sinks: Array) -> tuple[Array, Array]:
    return _forward(rule, q, k, v, segments, sinks)[0]


def _forward(rule: RingCall, q: Array, k: Array, v: Array, segments: Array, sinks: Array) -> Any:
    mine, keys = _in_ring_order(rule, RingQueries(*_bound(q, segments)), k, v)
    y, lse = _attend_all(rule, mine, keys, lambda part, keys: _attended(rule, part, keys))
    # A sink is an additional score without a value.
    total = jnp.logaddexp(lse, sinks)
    y = y * jnp.exp(lse - total)[..., None]
    out = _restored(rule, y.astype(v.dtype)), _restored(rule, total)
    return out, (q, k, v, segments, sinks, *out)


def _backward(rule: RingCall, residuals: Any, g: tuple[Array, Array]) -> Any:
    q, k, v, segments, sinks, y, lse = residuals
    dy, dlse = g
    # The gradient of softmax is dscore = p (g v' - delta), with delta = sum(g y) minus the gradient of the log-sum-exp itself.
    delta = jnp.sum(wide(dy) * wide(y), -1) - dlse
    dsinks = -jnp.sum(jnp.exp(sinks - lse) * delta, (0, 1))
    dsinks = jnp.where(jnp.isfinite(sinks), dsinks, 0)
    mine, keys = _in_ring_order(rule, RingQueries(*_bound(q, segments), dy, lse, delta), k, v)
    dq, dk, dv = _round_again(rule, mine, keys)
    typed = _restored(rule, dq).astype(q.dtype), _restored(rule, dk).astype(k.dtype), _restored(rule, dv).astype(v.dtype)
    return *typed, np.zeros(segments.shape, jax.dtypes.float0), dsinks


_local.defvjp(_forward, _backward)


def _bound(q: Array, segments: Array) -> tuple[Array, Array, Array]:
    """Returns queries, positions and segments such that positions and segments seem to depend on the queries.

    Otherwise, since they are the same in all layers, JAX would compute the masks of all blocks of scores once, before the layers, and
    keep them: 41 GB at 131,072 tokens over 8 devices.
    """
    return lax.optimization_barrier((q, _places(q.shape[1]), segments))


def _places(each: int) -> Int[Array, " T"]:
    return lax.axis_index(AXIS).astype(jnp.int32) * each + jnp.arange(each, dtype=jnp.int32)


def _turned(n: int, tree: Any) -> Any:
    return jax.tree.map(lambda a: lax.ppermute(a, AXIS, [(i, (i + 1) % n) for i in range(n)]), tree)


# ---- which device works on which pieces


def _in_ring_order(rule: RingCall, mine: RingQueries, k: Array, v: Array) -> tuple[RingQueries, Keys]:
    """Moves queries and keys to the devices that work on them. If the call is balanced, a device then has its earlier piece first."""
    keys = Keys(k, v, mine.at, mine.segments)
    if not rule.balanced:
        return mine, keys
    return jax.tree.map(partial(_exchanged, rule.n), (mine, keys))


def _routes(n: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the (source, target) pairs of devices, for the first halves and for the second halves of shares."""
    to = lambda piece: piece if piece < n else 2 * n - 1 - piece  # noqa: E731
    return [(i, to(2 * i)) for i in range(n)], [(i, to(2 * i + 1)) for i in range(n)]


def _axis_of(a: Array) -> int:
    """Returns the axis of tokens: the only axis of positions, and the second axis of all other arrays."""
    return 0 if a.ndim == 1 else 1


def _exchanged(n: int, a: Array) -> Array:
    axis = _axis_of(a)
    even, odd = _routes(n)
    first, second = (lax.ppermute(half, AXIS, route) for half, route in zip(jnp.split(a, 2, axis), (even, odd)))
    # Device i gets pieces i and 2n-1-i. One of them has an even number, on even devices piece i.
    is_even = lax.axis_index(AXIS) % 2 == 0
    low, high = jnp.where(is_even, first, second), jnp.where(is_even, second, first)
    return jnp.concatenate([low, high], axis)


def _restored(rule: RingCall, a: Array) -> Array:
    """The inverse of `_exchanged`."""
    if not rule.balanced:
        return a
    axis, (even, odd) = _axis_of(a), _routes(rule.n)
    low, high = jnp.split(a, 2, axis)
    is_even = lax.axis_index(AXIS) % 2 == 0
    first, second = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
    turned = [lax.ppermute(half, AXIS, [(b, a) for a, b in route]) for half, route in ((first, even), (second, odd))]
    return jnp.concatenate(turned, axis)


# ---- moving keys around the ring


def _attend_all(rule: RingCall, mine: RingQueries, keys: Keys, of: Any) -> tuple[Array, Array]:
    """Computes (output, log-sum-exp) of this device's queries over all keys, in float32 at least."""
    y, lse = of(mine, keys)

    def step(carry: Any, i: Array) -> Any:
        keys, y, lse = carry
        keys = _turned(rule.n, keys)
        return (keys, *_merge_step(rule, mine, keys, i, y, lse, of)), None

    steps = rule.steps(mine.q.shape[1])
    (_, y, lse), _ = lax.scan(step, (keys, y, lse), jnp.arange(1, steps, dtype=jnp.int32))
    return y, lse


def _merge_step(rule: RingCall, mine: RingQueries, keys: Keys, i: Array, y: Array, lse: Array, of: Any) -> tuple[Array, Array]:
    """Merges the outputs so far with those over the keys that have made i steps."""
    if not rule.balanced:
        return _merge((y, lse), of(mine, keys))
    low, high = slice(0, mine.q.shape[1] // 2), slice(mine.q.shape[1] // 2, None)
    # The later piece of queries sees the earlier piece of keys of every other device.
    upper = _merge((y[:, high], lse[:, high]), of(mine.cut(high), _cut(keys, low)))
    # From an earlier device, the earlier piece of keys is also before the earlier queries. From a later device, both pieces of keys are
    # before the later queries.
    earlier = lax.axis_index(AXIS) >= i
    select, pick = (lambda a, b: jax.tree.map(partial(jnp.where, earlier), a, b)), jnp.where
    more = of(select(mine.cut(low), mine.cut(high)), select(_cut(keys, low), _cut(keys, high)))
    before = _merge((y[:, low], lse[:, low]), more)
    after = _merge(upper, more)
    lower = tuple(pick(earlier, a, b) for a, b in zip(before, (y[:, low], lse[:, low])))
    upper = tuple(pick(earlier, a, b) for a, b in zip(upper, after))
    return jnp.concatenate([lower[0], upper[0]], 1), jnp.concatenate([lower[1], upper[1]], 1)


def _cut(keys: Keys, half: slice) -> Keys:
    return Keys(keys.k[:, half], keys.v[:, half], keys.at[half], keys.segments[:, half])


def _merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    total = jnp.logaddexp(a[1], b[1])
    return a[0] * jnp.exp(a[1] - total)[..., None] + b[0] * jnp.exp(b[1] - total)[..., None], total


def _round_again(rule: RingCall, mine: RingQueries, keys: Keys) -> tuple[Array, Array, Array]:
    """Computes the gradients of queries, keys and values. The gradients of keys and values move around the ring together with the
    keys."""
    half = mine.q.shape[1] // 2
    low, high = slice(0, half), slice(half, None)
    dq, dk, dv = _gradients(rule, mine, keys)

    def step(carry: Any, i: Array) -> Any:
        dq, travel = carry
        keys, dk, dv = _turned(rule.n, travel)
        if not rule.balanced:
            more = _gradients(rule, mine, keys)
            return (dq + more[0], (keys, dk + more[1], dv + more[2])), None
        up = _gradients(rule, mine.cut(high), _cut(keys, low))
        earlier = lax.axis_index(AXIS) >= i
        select = lambda a, b: jax.tree.map(partial(jnp.where, earlier), a, b)  # noqa: E731
        more = _gradients(rule, select(mine.cut(low), mine.cut(high)), select(_cut(keys, low), _cut(keys, high)))
        none = jax.tree.map(jnp.zeros_like, more)
        first, second = select(more, none), select(none, more)
        dq = dq + jnp.concatenate([first[0], up[0] + second[0]], 1)
        dk = dk + jnp.concatenate([up[1] + first[1], second[1]], 1)
        dv = dv + jnp.concatenate([up[2] + first[2], second[2]], 1)
        return (dq, (keys, dk, dv)), None

    steps = rule.steps(mine.q.shape[1])
    (dq, (_, dk, dv)), _ = lax.scan(step, (dq, (keys, dk, dv)), jnp.arange(1, steps, dtype=jnp.int32))
    # Sends the gradients of keys and values back to the devices of those keys, over the rest of the ring.
    home = [(i, (i - (steps - 1)) % rule.n) for i in range(rule.n)]
    return dq, *(lax.ppermute(a, AXIS, home) for a in (dk, dv))


# ---- a block of scores


def _scores(rule: RingCall, part: RingQueries, keys: Keys) -> tuple[Array, Array]:
    """Computes scores [B K G T S] after the soft cap. Also returns the mask of the scores that are seen."""
    B, T, N, H = part.q.shape
    K = keys.k.shape[2]
    grouped = part.q.reshape(B, T, K, N // K, H)
    s = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, keys.k, preferred_element_type=sums_in(part.q.dtype)) * rule.scale
    if rule.cap is not None:
        s = rule.cap * jnp.tanh(s / rule.cap)
    ahead = part.at[:, None] - keys.at[None, :]
    seen = jnp.ones(ahead.shape, bool)
    if rule.causal:
        seen &= ahead >= 0
    if rule.window is not None:
        seen &= (ahead if rule.causal else jnp.abs(ahead)) < rule.window
    seen = seen & (part.segments[:, :, None] == keys.segments[:, None, :])
    return s, seen[:, None, None]


def _attended(rule: RingCall, part: RingQueries, keys: Keys) -> tuple[Array, Array]:
    """Computes (output [B T N U], log-sum-exp [B T N]) over these keys. A query that sees none of them gets 0 and `UNSEEN`."""

    def block(part: RingQueries) -> tuple[Array, Array]:
        s, seen = _scores(rule, part, keys)
        s = jnp.where(seen, s, UNSEEN)
        top = jnp.max(s, -1, keepdims=True)
        p = jnp.where(seen, jnp.exp(s - top), 0)
        z = jnp.sum(p, -1)
        y = jnp.einsum("BKGTS,BSKU->BTKGU", p.astype(keys.v.dtype), keys.v, preferred_element_type=z.dtype)
        y = y / jnp.maximum(jnp.moveaxis(z, 3, 1), 1e-30)[..., None]
        lse = jnp.where(z > 0, jnp.log(jnp.maximum(z, 1e-30)) + top[..., 0], UNSEEN)
        B, T, N, _ = part.q.shape
        return y.reshape(B, T, N, -1), jnp.moveaxis(lse, 3, 1).reshape(B, T, N)

    return _by_blocks(block, part)


def _gradients(rule: RingCall, part: RingQueries, keys: Keys) -> tuple[Array, Array, Array]:
    """Computes what these queries and keys contribute to the gradients of queries, keys and values, in float32 at least."""
    kind = sums_in(part.q.dtype)

    def block(sums: Any, part: RingQueries) -> Any:
        B, T, N, _ = part.q.shape
        K = keys.k.shape[2]
        apart = lambda a: jnp.moveaxis(a.reshape(B, T, K, N // K), 1, 3)[..., None]  # noqa: E731
        s, seen = _scores(rule, part, keys)
        p = jnp.where(seen, jnp.exp(s - apart(part.lse)), 0)
        g = part.g.reshape(B, T, K, N // K, -1)  # pyright: ignore[reportOptionalMemberAccess]
        dp = jnp.einsum("BTKGU,BSKU->BKGTS", g, keys.v, preferred_element_type=kind)
        ds = p * (dp - apart(part.delta))
        if rule.cap is not None:
            ds = ds * (1 - (s / rule.cap) ** 2)
        ds = (ds * rule.scale).astype(part.q.dtype)
        dq = jnp.einsum("BKGTS,BSKH->BTKGH", ds, keys.k, preferred_element_type=kind)
        dk = jnp.einsum("BKGTS,BTKGH->BSKH", ds, part.q.reshape(B, T, K, N // K, -1), preferred_element_type=kind)
        dv = jnp.einsum("BKGTS,BTKGU->BSKU", p.astype(g.dtype), g, preferred_element_type=kind)
        return (sums[0] + dk, sums[1] + dv), dq.reshape(part.q.shape)

    zero = jnp.zeros(keys.k.shape, kind), jnp.zeros(keys.v.shape, kind)
    count = _blocks(part.q.shape[1])
    if count == 1:
        (dk, dv), dq = block(zero, part)
        return dq, dk, dv
    (dk, dv), dq = lax.scan(block, zero, jax.tree.map(partial(_split_blocks, count), part))
    return _join_blocks(dq), dk, dv


def _blocks(T: int) -> int:
    """Returns the number of blocks that T queries are cut into, all of equal length."""
    return next(n for n in range(-(-T // QUERIES), T + 1) if T % n == 0)


def _by_blocks(of: Any, part: RingQueries) -> Any:
    count = _blocks(part.q.shape[1])
    if count == 1:
        return of(part)
    return jax.tree.map(_join_blocks, lax.map(of, jax.tree.map(partial(_split_blocks, count), part)))


def _split_blocks(count: int, a: Array) -> Array:
    axis = _axis_of(a)
    return jnp.moveaxis(a.reshape(*a.shape[:axis], count, -1, *a.shape[axis + 1 :]), axis, 0)


def _join_blocks(a: Array) -> Array:
    return jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:])
