"""The models that the laws of families run over: every registered family, in small odd sizes, every option both ways.

A new family adds its cases here; the laws then hold it to everything.
"""

import zlib

import jax
import jax.numpy as jnp
import numpy as np

from argosy.models.llama import LlamaConfig
from argosy.models.parts.rope import Llama3, Rope
from argosy.models.parts.stack import Run, layer_addresses
from argosy.models.parts.weight import fill, merge, put, split, variables

ODD = {"vocab": 113, "width": 44, "layers": 3, "ffn": 70, "heads": 4, "context": 200}

CASES = {
    "llama": LlamaConfig(**ODD, kv_heads=2, head_size=14),
    "llama-tied-biased": LlamaConfig(
        **ODD, kv_heads=1, head_size=10, tied=True, attention_bias=True, mlp_bias=True, rope=Rope(scaling=Llama3(original=16))
    ),
    "mistral-window": LlamaConfig(**ODD, head_size=12, window=7, rope=Rope(base=1e6)),
}


def built(config, run: Run, seed: int = 0):
    """A model with noise on every weight: zeros and ones at the start would let parity pass trivially."""
    model = config.build(run)
    names = layer_addresses(model)
    fill(model, jax.random.key(seed), addresses=names)
    leaves = {}
    for address, v in variables(model).items():
        value = np.asarray(v.get_value())
        stacked = value.ndim > len(v.get_metadata()["meaning"].letters)
        parts = [_noisy(name, part) for name, part in zip(names(address), value if stacked else [value])]
        leaves[address] = jnp.asarray(np.stack(parts) if stacked else parts[0])
    put(model, leaves)
    return model


def _noisy(name: str, value: np.ndarray) -> np.ndarray:
    """The same noise for the same weight, whatever the layout."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(value.shape)
    return (1.5 * value + 0.1 * noise).astype(np.float32)


def forward(model):
    """The model as a compiled function of (tokens, attend, cache)."""
    graph, weights = split(model)
    call = jax.jit(lambda w, tokens, attend, cache: merge(graph, w)(tokens, attend, cache))
    return lambda tokens, attend, cache=None: call(weights, tokens, attend, cache)


def tokens_of(config, rows: int = 2, length: int = 41) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(7).integers(3, config.vocab, (rows, length)), jnp.int32)
