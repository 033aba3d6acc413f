"""Recomputation in the backward pass: the same gradients from less memory, whichever way the layers run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.models.llama import LlamaConfig
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, merge, split

CONFIG = LlamaConfig(vocab=32, width=32, layers=8, heads=2, ffn=256, context=128, tied=True)
B, T = 4, 128


def gradient(run: Any) -> tuple[Any, Any]:
    """The compiled gradient of a scalar of the model, and its weights."""
    model = CONFIG.build(run)
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    graph, weights = split(model)
    tokens = jnp.tile(jnp.arange(T, dtype=jnp.int32) % 32, (B, 1))
    segments = jnp.ones((B, T), jnp.int32)

    def loss(weights: Any) -> Any:
        out = merge(graph, weights)(tokens, Packed(segments))
        return (jax.tree.leaves(out)[0].astype(jnp.float32) ** 2).mean()

    return jax.jit(jax.grad(loss)).lower(weights).compile(), weights


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any]:
    return gradient(Unroll())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "most"),
    [(Unroll("full"), 0.4), (Unroll("dots"), 0.9), (Scan("full"), 0.4)],
)
def test_memory_falls_and_gradients_stay(plain: tuple[Any, Any], run: Any, most: float):
    program, weights = gradient(run)
    before = plain[0].memory_analysis().temp_size_in_bytes
    assert program.memory_analysis().temp_size_in_bytes < most * before
    if not run.stacked:
        mine, whole = program(weights), plain[0](plain[1])
        assert all(relative(np.asarray(mine[a]), np.asarray(whole[a])) < 1e-5 for a in whole)
