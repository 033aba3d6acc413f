"""The chunked delta rule is the recurrent one, in value and gradient, and that one is the paper's equation in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.observe.flops import contraction_flops
from argosy.ops.delta import delta_flops, delta_rule, unit_solve

B, K, G, H, U = 2, 2, 3, 5, 7
RULE = jax.jit(delta_rule, static_argnames="chunk")


def inputs(T: int, dtype=np.float32, seed: int = 0):
    """Keys of length 1, decays from nearly none to nearly all of the state."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((B, T, K, H)) for _ in "qk")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, state = rng.standard_normal((B, T, K, G, U)), rng.standard_normal((B, K, G, H, U))
    decay, rate = -np.exp(rng.uniform(-6, 2, (B, T, K, G))), rng.uniform(0, 1, (B, T, K, G))
    return tuple(np.asarray(a, dtype) for a in (q, k, v, decay, rate, state))


def borders(T: int, seed: int = 1):
    """Sequences that start anywhere, some at the first token; dead tokens anywhere."""
    rng = np.random.default_rng(seed)
    starts, live = rng.random((B, T)) < 0.1, rng.random((B, T)) < 0.8
    starts[0, 0] = live[0, 0] = True
    return starts, live


def oracle(q, k, v, decay, rate, state, starts, live):
    """The equation as the paper prints it, in float64: S = S a (I - b k k') + b v k'."""
    y, after = np.zeros(v.shape), np.zeros(state.shape)
    for b, i, g in np.ndindex(B, K, G):
        S = state[b, i, g].astype(np.float64).T
        for t in range(q.shape[1]):
            if live[b, t]:
                S = np.zeros_like(S) if starts[b, t] else S
                key, r = k[b, t, i].astype(np.float64), float(rate[b, t, i, g])
                S = S @ (np.exp(decay[b, t, i, g]) * (np.eye(H) - r * np.outer(key, key)))
                S = S + r * np.outer(v[b, t, i, g], key)
            y[b, t, i, g] = S @ q[b, t, i]
        after[b, i, g] = S.T
    return y, after


def difference(a, b, live) -> float:
    """Of outputs at live tokens, and of states."""
    on = live[..., None, None, None]
    return max(relative(np.where(on, a[0], 0), np.where(on, b[0], 0)), relative(a[1], b[1]))


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_both_forms_equal_the_paper(chunk: int):
    case = *inputs(23), *borders(23)
    assert difference(RULE(*map(jnp.asarray, case), chunk=chunk), oracle(*case), case[-1]) < 2e-6


def gradients(case, chunk: int):
    """Output, state after, and gradients in everything, of a function that uses both."""
    arrays, flags = case[:-2], case[-2:]

    def loss(arrays):
        y, state = delta_rule(*arrays, *flags, chunk=chunk)
        return jnp.sum(jnp.where(flags[1][..., None, None, None], jnp.sin(y), 0)) + jnp.sum(jnp.cos(state)), (y, state)

    return jax.jit(jax.grad(loss, has_aux=True))(arrays)


@pytest.mark.parametrize(
    ("T", "chunk", "dtype", "tolerance"),
    [(23, 4, np.float32, 1e-5), *((T, chunk, np.float64, 1e-10) for T, chunk in [(2, 64), (23, 4), (40, 64), (150, 64)])],
)
def test_chunked_equals_recurrent(T: int, chunk: int, dtype, tolerance: float):
    """Over more tokens in float64 alone: in float32 the state's rounding grows with them, to 4e-6 after 150."""
    with jax.enable_x64(True):
        case = tuple(map(jnp.asarray, (*inputs(T, dtype), *borders(T))))
        (grads, values), (expected_grads, expected) = (gradients(case, n) for n in (chunk, 1))
        assert values[0].dtype == dtype
        assert difference(values, expected, np.asarray(case[-1])) < tolerance
        assert max(map(relative, grads, expected_grads)) < tolerance


def test_a_state_is_handed_over():
    """In pieces of any length, it says what it says at once."""
    case = tuple(map(jnp.asarray, (*inputs(90), *borders(90))))
    y, state = RULE(*case)
    *arrays, before, starts, live = case
    parts, at = [], 0
    for n in (30, 1, 7, 1, 51):
        piece = [a[:, at : at + n] for a in (*arrays, starts, live)]
        out, before = RULE(*piece[:-2], before, *piece[-2:], chunk=16)
        parts.append(out)
        at += n
    assert difference((jnp.concatenate(parts, 1), before), (y, state), np.asarray(live)) < 1e-5


@pytest.mark.parametrize("T", [1, 9])
def test_what_a_former_owner_left_is_forgotten(T: int):
    *arrays, state, starts, live = map(jnp.asarray, (*inputs(T), *borders(T)))
    starts, live = starts.at[:, 0].set(True), live.at[:, 0].set(True)
    y, after = RULE(*arrays, jnp.full_like(state, jnp.nan), starts, live)
    expected = RULE(*arrays, jnp.zeros_like(state), starts, live)
    assert (y == expected[0]).all()
    assert (after == expected[1]).all()


@pytest.mark.parametrize("T", [1, 9])
def test_dead_tokens_leave_the_state_as_it_is(T: int):
    *arrays, state, starts, _ = map(jnp.asarray, (*inputs(T), *borders(T)))
    assert (RULE(*arrays, state, starts, jnp.zeros_like(starts))[1] == state).all()


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 40, 64])
def test_a_triangular_system_is_solved_as_numpy_solves_it(size: int):
    """The hardest case is that of equal keys, whose powers grow to 1e17 at 64."""
    rng = np.random.default_rng(size)
    sides = rng.normal(size=(2, 3, size, 5))
    for system in (np.ones((2, 3, size, size)), rng.normal(size=(2, 3, size, size)) / np.sqrt(size)):
        expected = np.linalg.solve(np.tril(system, -1) + np.eye(size), sides)
        solved, back = jax.vjp(unit_solve, jnp.asarray(system, jnp.float32), jnp.asarray(sides, jnp.float32))
        assert relative(solved, expected) < 1e-5
        _, dsides = back(jnp.asarray(sides, jnp.float32))
        assert relative(dsides, np.linalg.solve((np.tril(system, -1) + np.eye(size)).swapaxes(-1, -2), sides)) < 1e-5


@pytest.mark.parametrize(("T", "chunk"), [(1, 64), (23, 64), (23, 1), (64, 64), (65, 64), (150, 32)])
def test_flops_are_those_of_the_trace(T: int, chunk: int):
    """Forward, and twice as much backward."""
    case = [jnp.asarray(a)[:1] for a in (*inputs(T), *borders(T))]

    def loss(*case):
        return delta_rule(*case, chunk=chunk)[0].sum()

    assert contraction_flops(jax.make_jaxpr(loss)(*case).jaxpr) == delta_flops(T, K, G, H, U, chunk=chunk)
    both = contraction_flops(jax.make_jaxpr(jax.grad(loss, range(6)))(*case).jaxpr)
    assert both == 3 * delta_flops(T, K, G, H, U, chunk=chunk)
