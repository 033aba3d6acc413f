"""The kernels for TPUs, interpreted on a CPU, equal the reference in value and gradient; tests/ops/test_attention_tpu.py compiles
them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import default, relative
from jax._src.mesh import AbstractDevice

from argosy.core.errors import Unsupported
from argosy.ops.attention import ATTENTION, Score, See, attention_reference
from argosy.ops.attention import splash as attention_splash
from argosy.ops.attention.splash import splash, splash_refusal
from argosy.ops.attention.splash_blocks import INSTRUCTIONS, block_of, block_sizes, count_blocks
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope

# name: heads, key heads, sizes of keys and values, causal, packed, what the score has
CASES = {
    "plain": (4, 4, 64, 64, True, False, {}),
    "packed, shared heads, odd sizes": (6, 2, 10, 12, True, True, {}),
    "a window": (4, 2, 16, 16, True, True, {"window": 20}),
    "a window of one": (2, 1, 16, 16, True, False, {"window": 1}),
    "a cap and sinks": (6, 3, 16, 16, True, True, {"cap": 2.0, "sinks": np.linspace(-1, 3, 6, dtype=np.float32)}),
    "both ways": (2, 2, 24, 16, False, True, {}),
    "both ways, alone": (2, 2, 24, 16, False, False, {}),
    "both ways, a window": (2, 2, 16, 16, False, False, {"window": 40}),
}


def inputs_of(N, K, H, U, packed, causal=True, T=150, B=2):
    rng = np.random.default_rng(N + T)
    q, k, v = (jnp.asarray(rng.standard_normal((B, T, n, h)), jnp.float32) for n, h in ((N, H), (K, H), (K, U)))
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (B, T)), 1), jnp.int32) if packed else None
    at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    return (q, k, v), See(at, at, segments, segments, causal=causal, aligned=True)


def score_of(options):
    return Score(0.3, **{name: jnp.asarray(value) if name == "sinks" else value for name, value in options.items()})


def value_and_gradients(run, arrays, see, score):
    """Value and gradients, those of sinks included."""

    def loss(q, k, v, sinks):
        return jnp.sum(jnp.sin(run(q, k, v, see, Score(score.scale, score.window, score.cap, sinks))))

    which = (0, 1, 2) if score.sinks is None else (0, 1, 2, 3)
    return jax.jit(jax.value_and_grad(loss, which))(*arrays, score.sinks)


def same(first, other):
    assert float(abs(first[0] - other[0])) < 1e-4 * max(1, abs(float(other[0])))
    for got, expected in zip(first[1], other[1], strict=True):
        assert np.abs(got - expected).max() < 5e-6 * max(1, np.abs(expected).max())


@pytest.mark.parametrize(
    "name", default("packed, shared heads, odd sizes", "a window", "a cap and sinks", "both ways", of=CASES)
)
def test_it_equals_the_reference(name, monkeypatch):
    """In blocks of 128, of which some are skipped."""
    monkeypatch.setattr(attention_splash, "block_of", lambda *_: 128)
    N, K, H, U, causal, packed, options = CASES[name]
    arrays, see = inputs_of(N, K, H, U, packed, causal)
    score = score_of(options)
    same(
        value_and_gradients(partial(splash, interpret=True), arrays, see, score),
        value_and_gradients(attention_reference, arrays, see, score),
    )


def test_its_log_sum_exp_has_no_gradient():
    arrays, see = inputs_of(4, 2, 16, 16, packed=True, T=40)
    score = score_of({"sinks": np.linspace(-1, 3, 4, dtype=np.float32)})
    y, lse = splash(*arrays, see, score, lse=True, interpret=True)
    expected, expected_lse = attention_reference(*arrays, see, score, lse=True)
    assert relative(y, expected) < 1e-5
    assert relative(lse, expected_lse) < 1e-5
    with pytest.raises(Unsupported, match="no gradient"):
        jax.grad(lambda q: splash(q, *arrays[1:], see, score, lse=True, interpret=True)[1].sum())(arrays[0])


@pytest.mark.parametrize(
    ("sizes", "heads", "keys"),
    [({"data": 2, "fsdp": 2, "tensor": 2}, 4, 2), pytest.param({"fsdp": 2, "tensor": 4}, 8, 2, marks=pytest.mark.slow)],
)
def test_devices_share_rows_and_heads(sizes, heads, keys):
    """With 2 key heads for 4 devices, each is computed by two."""
    arrays, see = inputs_of(heads, keys, 16, 16, packed=True, T=40, B=4)
    score = score_of({"sinks": np.linspace(-1, 3, heads, dtype=np.float32)})
    expected = value_and_gradients(attention_reference, arrays, see, score)
    with scope(MeshSettings(**sizes).build()):
        assert splash_refusal(*arrays, see, score, False) is None
        same(value_and_gradients(partial(splash, interpret=True), arrays, see, score), expected)


def test_what_it_cannot_do_is_refused():
    arrays, see = inputs_of(6, 3, 16, 16, packed=True, T=8)
    why = partial(splash_refusal, *arrays, score=Score(1.0), lse=False)
    assert why(see=see) is None
    assert "whole sequences" in why(see=See(see.q_at, see.k_at))
    picked = See(see.q_at, see.k_at, aligned=True, picked=jnp.ones((2, 8, 8), bool))
    assert "choose their keys" in why(see=picked)
    assert "int8" in splash_refusal(arrays[0].astype(jnp.int8), *arrays[1:], see, Score(1.0), False)
    assert "for TPUs; this program is for cpu" in ATTENTION["splash"].refuses(*arrays, see, Score(1.0), False)
    old = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=AbstractDevice("TPU v3", 1, "tpu"))
    with jax.sharding.use_abstract_mesh(old):
        assert "TPU v4 and later" in ATTENTION["splash"].refuses(*arrays, see, Score(1.0), False)
    with scope(MeshSettings(fsdp=1, tensor=2).build(jax.devices()[:2])):
        assert "2 do not share 3" in why(see=see)


@pytest.mark.parametrize("window", [None, 1, 128, 129, 300])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_that_are_seen(window, causal):
    """Against the mask itself: those counted for the choice of a size, and those that the kernels compute."""
    n, side = 5, 128
    at = np.arange(n * side)
    ahead = at[:, None] - at
    seen = (ahead >= 0) | (not causal)
    if window is not None:
        seen &= np.abs(ahead) < window
    blocks = seen.reshape(n, side, n, side)
    assert count_blocks(n, side, window, causal) == blocks.any((1, 3)).sum()
    if window is None and not causal:
        return      # JAX's own mask, which is full
    reach = None if window is None else window - 1
    band = attention_splash._band()((n * side, n * side), (reach, 0 if causal else reach), 0)
    for i, j in np.ndindex(n, n):
        block = band[slice(i * side, i * side + side), slice(j * side, j * side + side)]
        assert np.array_equal(np.broadcast_to(block, (side, side)), blocks[i, :, j])


def test_sizes_of_blocks():
    """Long sequences take large blocks; windows and short sequences small ones; large heads what was compiled."""
    for kind in (*INSTRUCTIONS, "TPU v9"):
        assert block_of(8192, None, True, 128, 2, kind) == 1024
        assert block_of(8192, 128, True, 128, 2, kind) == 512
        assert block_of(100, None, True, 128, 2, kind) == 128
        assert block_of(8192, None, True, 576, 2, kind) == 512
    assert block_of(8192, None, True, 128, 2, "TPU v4") == 512
    assert block_sizes(1024)["block_kv_compute"] == 512
    assert set(block_sizes(256).values()) == {256}
