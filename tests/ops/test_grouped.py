"""Every implementation equals one product a group, in float64; on CPUs no more is computed than that; all compile for TPUs."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import described_tpus, relative

from argosy.core.errors import UnknownName, Unsupported
from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.products import product_flops, uncounted_kernels
from argosy.ops.grouped import blocked as grouped_blocked
from argosy.ops.grouped import grouped_matmul, kernels
from argosy.ops.grouped.kernels import MEGABLOX

# Rows, weights [D M], and how many rows each expert has.
CASES = {
    "even": (64, (16, 8), [16, 16, 16, 16]),
    "odd sizes": (701, (7, 5), [13, 300, 1, 0, 257, 130]),
    "empty experts": (40, (9, 6), [0, 0, 11, 0, 29, 0, 0]),
    "one takes all": (600, (8, 12), [0, 600, 0]),
    "rows of nobody": (90, (8, 4), [20, 0, 33]),
    "nobody has any": (20, (4, 4), [0, 0, 0]),
    "fewer rows than experts": (5, (6, 3), [0, 1, 0, 0, 2, 0, 0, 0, 2]),
    "one row": (1, (6, 3), [0, 0, 1, 0]),
    "one expert": (37, (6, 3), [37]),
    "two tiles and rows of nobody": (560, (4, 3), [13, 500, 0, 20]),
    "at the edge of a block": (289, (4, 4), [255, 1, 33]),
    "sides of several tiles": (200, (200, 330), [60, 0, 130]),
}
HERE = [name for name in ("ragged_dot", "blocked", "tokamax") if name != "tokamax" or find_spec("tokamax")]


def arrays(case, dtype=np.float32):
    rows, (d, m), sizes = CASES[case]
    rng = np.random.default_rng(len(case))
    matrices = (rng.standard_normal(shape) for shape in ((rows, d), (len(sizes), d, m), (rows, m)))
    return [jnp.asarray(a, dtype) for a in matrices], jnp.asarray(sizes, jnp.int32)


def oracle(x, w, g, sizes):
    """All rows times all experts, masked, in float64: y, and the gradients of sum(y g)."""
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    mine = np.zeros((len(x), len(sizes)))
    mine[np.arange(len(owner)), owner] = 1
    y = np.einsum("xe,xd,edm->xm", mine, x, w)
    return y, np.einsum("xe,xm,edm->xd", mine, g, w), np.einsum("xe,xd,xm->edm", mine, x, g)


def rules(name):
    """The rules of types to trace under: libraries are not written for the strict ones."""
    return jax.numpy_dtype_promotion("standard" if name in ("megablox", "tokamax") else "strict")


def value_and_gradients(run, x, w, g):
    y, back = jax.vjp(run, x, w)
    return y, *back(g)


def agree(got, expected, tolerance):
    for a, b in zip(got, expected, strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() <= tolerance * max(1, np.abs(b).max())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", HERE)
def test_values_and_gradients(name, case):
    (x, w, g), sizes = arrays(case)

    def run(x, w):
        return grouped_matmul(x, w, sizes, implementation=name)

    agree(jax.jit(lambda *a: value_and_gradients(run, *a))(x, w, g), oracle(x, w, g, sizes), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["two tiles and rows of nobody", "odd sizes", "empty experts", "sides of several tiles"])
def test_megablox_interpreted(case, monkeypatch):
    """The kernels' bodies, run on the CPU: padding to tiles, sides that tiles do not divide, and rows that are left unwritten."""
    monkeypatch.setattr(kernels, "TILE_SIDES", 128)
    (x, w, g), sizes = arrays(case)
    agree(value_and_gradients(lambda x, w: MEGABLOX.run(x, w, sizes), x, w, g), oracle(x, w, g, sizes), 1e-5)


@pytest.mark.parametrize("name", HERE)
def test_rows_without_an_owner_may_contain_anything(name):
    """Neither NaN there nor a gradient that arrives there reaches anything."""
    (x, w, g), sizes = arrays("rows of nobody")
    x, g = x.at[53:].set(jnp.nan), g.at[53:].set(jnp.nan)
    y, dx, dw = value_and_gradients(lambda x, w: grouped_matmul(x, w, sizes, implementation=name), x, w, g)
    assert not np.asarray(y)[53:].any()
    assert not np.asarray(dx)[53:].any()
    assert np.isfinite(np.asarray(dw)).all()


@pytest.mark.parametrize("name", HERE)
def test_bfloat16_rows_with_float32_weights(name):
    """The output and dx are bfloat16, dw is of the weights' type; sums are float32, so one rounding apart."""
    (x, w, g), sizes = arrays("odd sizes")
    x, g = x.astype(jnp.bfloat16), g.astype(jnp.bfloat16)
    w = w.astype(jnp.bfloat16).astype(jnp.float32)
    with rules(name):
        got = value_and_gradients(lambda x, w: grouped_matmul(x, w, sizes, implementation=name), x, w, g)
    assert [a.dtype for a in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    agree(got, oracle(x, w, g, sizes), 2**-8)


def test_integer_weights():
    """int8 values meet the rows as they are; the gradient is of the rows alone."""
    (x, w, g), sizes = arrays("odd sizes")
    q = jnp.round(w * 40).astype(jnp.int8)
    y, back = jax.vjp(lambda x: grouped_matmul(x, q, sizes), x)
    expected = oracle(x, q, g, sizes)
    agree((y, *back(g)), expected[:2], 1e-5)


def test_inside_scan_and_checkpoint():
    (x, w, g), sizes = arrays("even")
    w = jnp.concatenate([w, w[..., ::-1]], -1)[None] * jnp.asarray([0.2, 0.3], jnp.float32)[:, None, None, None]

    def stacked(x, w, run):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(run(x, w)), None))
        return jax.lax.scan(layer, x, w)[0]

    def plain(x, w, run):
        return jnp.tanh(run(jnp.tanh(run(x, w[0])), w[1]))

    g = jnp.concatenate([g, g], -1)
    got = jax.jit(
        lambda *a: value_and_gradients(lambda x, w: stacked(x, w, lambda x, w: grouped_matmul(x, w, sizes)), *a)
    )
    owner = jnp.repeat(jnp.arange(4), 16)

    def dense(x, w):
        return jnp.einsum("xd,xdm->xm", x, w[owner])

    agree(got(x, w, g), value_and_gradients(lambda x, w: plain(x, w, dense), x, w, g), 1e-5)


def test_the_routing_may_change_without_compiling_again():
    (x, w, _), _ = arrays("odd sizes")
    run = jax.jit(lambda x, w, sizes: grouped_matmul(x, w, sizes))
    for sizes in ([701, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 3], [100, 100, 101, 100, 200, 100]):
        y = run(x, w, jnp.asarray(sizes, jnp.int32))
        assert relative(y, oracle(x, w, y, sizes)[0]) < 1e-5
    assert run._cache_size() == 1


# ---------------------------------------------------------------- what it costs


def count_rows(monkeypatch, case):
    """Rows that each kind of product really meets in a step forward and backward, counted while it runs."""
    rows = {}
    dot = grouped_blocked._dot

    def counted(a, b, axes):
        size = a.shape[axes[0] ^ 1]
        jax.debug.callback(lambda: rows.update({axes: rows.get(axes, 0) + (a.shape[0] if axes == (0, 0) else size)}))
        return dot(a, b, axes)

    monkeypatch.setattr(grouped_blocked, "_dot", counted)
    (x, w, g), sizes = case
    jax.block_until_ready(value_and_gradients(lambda x, w: grouped_matmul(x, w, sizes), x, w, g))
    jax.effects_barrier()
    return rows


def test_no_more_is_computed_than_needed(monkeypatch):
    """2,048 tokens choose 8 of 64 experts: `ragged_dot` on a CPU computes 65 times the rows; this at most 1.5 times."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.standard_normal((2048, 64)), 1)[:, :8]
    sizes = jnp.asarray(np.bincount(experts.reshape(-1), minlength=64), jnp.int32)
    x, w, g = jnp.ones((16384, 2)), jnp.ones((64, 2, 3)), jnp.ones((16384, 3))
    rows = count_rows(monkeypatch, ((x, w, g), sizes))
    assert set(rows) == {(1, 0), (1, 1), (0, 0)}
    assert all(16384 <= n < 1.05 * 16384 for n in rows.values()), rows


def test_few_rows_touch_only_the_experts_they_chose(monkeypatch):
    """Decoding: a weight is read where its expert has rows, and each block has at most seven rows too many."""
    sizes = jnp.zeros(64, jnp.int32).at[jnp.asarray([3, 17, 60])].set(jnp.asarray([1, 9, 6], jnp.int32))
    x, w, g = jnp.ones((16, 2)), jnp.ones((64, 2, 3)), jnp.ones((16, 3))
    seen = []
    index = grouped_blocked.dynamic_index_in_dim

    def watched(w, i, **options):
        jax.debug.callback(lambda i: seen.append(int(i)), i)
        return index(w, i, **options)

    monkeypatch.setattr(grouped_blocked, "dynamic_index_in_dim", watched)
    rows = count_rows(monkeypatch, ((x, w, g), sizes))
    assert rows == {(1, 0): 32, (1, 1): 32, (0, 0): 32}
    assert sorted(seen) == [3, 3, 17, 17, 60, 60]


# ---------------------------------------------------------------- which one runs


def test_cpus_take_blocked_and_tpus_kernels_where_they_fit():
    (x, w, _), sizes = arrays("even")
    wide = jax.ShapeDtypeStruct((64, 1448), jnp.float32), jax.ShapeDtypeStruct((4, 1448, 256), jnp.float32)
    assert "while" in str(jax.make_jaxpr(lambda x: grouped_matmul(x, w, sizes))(x))
    with jax.default_device("tpu"):
        assert "ragged_dot" in str(jax.make_jaxpr(lambda x: grouped_matmul(x, w, sizes))(x))
        assert "ragged_dot" not in (kernel := str(jax.make_jaxpr(lambda x, w: grouped_matmul(x, w, sizes))(*wide)))
    assert "pallas_call" in kernel


def test_what_cannot_run_says_so():
    (x, w, _), sizes = arrays("even")
    with pytest.raises(Unsupported, match="for TPUs; this program is for cpu"):
        grouped_matmul(x, w, sizes, implementation="megablox")
    with pytest.raises(UnknownName, match="block"):
        grouped_matmul(x, w, sizes, implementation="block")
    if not find_spec("tokamax"):
        with pytest.raises(Unsupported, match="tokamax is not installed"):
            grouped_matmul(x, w, sizes, implementation="tokamax")


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["ragged_dot", "megablox", *(["tokamax"] if find_spec("tokamax") else [])])
def test_compiles_for_a_tpu(name, monkeypatch):
    """Forward and gradient, by the real compiler. XLA's gradient of the weights multiplies all rows for each of the eight experts."""
    device = described_tpus(monkeypatch, "v5p:2x2x1")[0]
    on = jax.sharding.SingleDeviceSharding(device)
    shapes = [((4096, 1024), jnp.bfloat16), ((8, 1024, 512), jnp.bfloat16), ((8,), jnp.int32)]
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=on) for shape, dtype in shapes]

    def loss(x, w, sizes):
        return jnp.sum(jnp.sin(grouped_matmul(x, w, sizes, implementation=name).astype(jnp.float32)))

    with jax.default_device(device), rules(name):
        text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile().as_text()
    program = HloModule.read(text)
    assert uncounted_kernels(program) in ([], ["ragged-dot-metadata"])
    assert product_flops(program) == {"ragged_dot": 2 + 8}.get(name, 3) * 2 * 4096 * 1024 * 512
