"""cuDNN's attention: its call gives what the reference gives, with XLA in cuDNN's place, and its programs compile for an H100."""

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.core.errors import Unsupported
from argosy.ops.attention import ATTENTION, Score, See, attention, attention_reference
from argosy.ops.attention import cudnn as attention_cudnn
from argosy.ops.attention.cudnn import PLUGINS, cudnn, cudnn_refusal
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope

BENCH = Path(__file__).parents[2] / "bench"


def inputs_of(T=37, N=6, K=2, H=12, U=10, packed=True, causal=True, B=2, branched=False):
    rng = np.random.default_rng(T)
    q, k, v = (jnp.asarray(rng.standard_normal((B, T, n, h)), jnp.float32) for n, h in ((N, H), (K, H), (K, U)))
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (B, T)), 1), jnp.int32) if packed else None
    at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    # Each segment but the first has the one before it as its prefix.
    prefix = jnp.maximum(segments - 1, 0) if branched else None
    return (q, k, v), See(at, at, segments, segments, causal=causal, aligned=True, q_prefix=prefix)


def value_and_gradients(run, arrays, see, score):
    return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(run(*a, see, score))), (0, 1, 2)))(*arrays)


def same(first, other):
    assert float(abs(first[0] - other[0])) < 1e-4 * max(1, abs(float(other[0])))
    for got, expected in zip(first[1], other[1], strict=True):
        assert np.abs(got - expected).max() < 5e-6 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_its_call_equals_the_reference(window, packed, causal):
    """An odd length, odd heads, values of another size, shared key heads."""
    arrays, see = inputs_of(packed=packed, causal=causal)
    score = Score(0.3, window)
    same(
        value_and_gradients(partial(cudnn, kernel="xla"), arrays, see, score),
        value_and_gradients(attention_reference, arrays, see, score),
    )


def test_a_query_sees_the_prefix_of_its_segment():
    arrays, see = inputs_of(branched=True)
    result = value_and_gradients(partial(cudnn, kernel="xla"), arrays, see, Score(0.3))
    same(result, value_and_gradients(attention_reference, arrays, see, Score(0.3)))
    alone = value_and_gradients(attention_reference, *inputs_of()[:2], Score(0.3))
    assert float(abs(result[0] - alone[0])) > 1e-2


@pytest.mark.parametrize("branched", [False, True])
def test_devices_share_rows_and_heads(branched):
    arrays, see = inputs_of(B=4, N=4, branched=branched)
    expected = value_and_gradients(attention_reference, arrays, see, Score(0.3))
    with scope(MeshSettings(data=2, fsdp=2, tensor=2).build()):
        same(value_and_gradients(partial(cudnn, kernel="xla"), arrays, see, Score(0.3)), expected)


def test_what_it_cannot_do_is_refused():
    arrays, see = inputs_of(T=8)
    half = tuple(a.astype(jnp.bfloat16) for a in arrays)
    assert cudnn_refusal(*half, see, Score(1.0), False) is None
    assert "float32" in cudnn_refusal(*arrays, see, Score(1.0), False)
    assert "soft cap" in cudnn_refusal(*half, see, Score(1.0, cap=2.0), False)
    assert "sinks" in cudnn_refusal(*half, see, Score(1.0, sinks=jnp.zeros(6)), False)
    assert "log-sum-exp" in cudnn_refusal(*half, see, Score(1.0), True)
    assert "whole sequences" in cudnn_refusal(*half, See(see.q_at, see.k_at), Score(1.0), False)
    large = tuple(jnp.zeros((1, 8, 2, 192), jnp.bfloat16) for _ in range(3))
    assert "heads of 192, of 128 at most" in cudnn_refusal(*large, see, Score(1.0), False)
    with pytest.raises(Unsupported, match="for NVIDIA GPUs; this program is for cpu"):
        attention(*half, see, Score(1.0), "cudnn")
    if not any(map(find_spec, PLUGINS)):
        with jax.default_device("gpu"):
            assert "plugin for CUDA" in ATTENTION["cudnn"].refuses(*half, see, Score(1.0), False)


def test_old_gpus_are_refused(monkeypatch):
    """The kernel is for Ampere and later; XLA says so only when the program is made."""
    arrays, see = inputs_of(T=8)
    half = tuple(a.astype(jnp.bfloat16) for a in arrays)
    monkeypatch.setattr(attention_cudnn, "find_spec", lambda name: True)
    with jax.default_device("gpu"):
        for capability, refused in ((None, False), (7.5, True), (8.0, False), (9.0, False), (12.0, False)):
            monkeypatch.setattr(attention_cudnn, "_capability", lambda version=capability: version)
            assert ("Ampere" in (ATTENTION["cudnn"].refuses(*half, see, Score(1.0), False) or "")) == refused


def test_it_compiles_for_an_h100():
    """One kernel forward and one backward in each program, also where layers are recomputed and over a mesh."""
    if not any(map(find_spec, PLUGINS)):
        pytest.skip("JAX's plugin for CUDA is not installed: no GPU can be described")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    words = [sys.executable, str(BENCH / "attention_cuda.py")]
    table = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=env, check=True, timeout=300).stdout
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 8
    for name, kernels, _ in rows:
        kernel = "fmhaSoftmax" if "whole rows" in name else "fmhaScaleBiasSoftmax"
        assert sorted(kernels.split(", ")) == [kernel, kernel + "Backward"], name
