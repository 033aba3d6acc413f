"""The table of the two seams: every family, every way its layers run, every use, with the largest difference in each cell.

`./run docs` writes it to docs/reference/seams.md. The laws (tests/laws) assert bounds on the same figures.
"""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.adapt.lora import LoRA
from argosy.adapt.quant import int8
from argosy.adapt.surgery import swap
from argosy.export.lower import lower, raise_again
from argosy.models import FAMILIES
from argosy.models.base.language import LanguageConfig
from argosy.models.parts.attention.attend import Contiguous, Paged
from argosy.models.parts.attention.cache import contiguous, empty_pools
from argosy.models.parts.stack import Execution, Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import abstract, fill, logical, merge, put, split, variables
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.place import batch_sharding
from argosy.parallel.rules import DEFAULT, shardings
from argosy.parallel.scope import scope


def examples() -> dict[str, Any]:
    """The small configs of every registered family of text models."""
    text = [family for family in FAMILIES if issubclass(FAMILIES[family], LanguageConfig)]
    return {f"{family}-{name}": config for family in text for name, config in FAMILIES[family].examples().items()}


def fullest() -> dict[str, Any]:
    """The last example of each family, which by convention has most of its options."""
    return dict({type(config): (name, config) for name, config in examples().items()}.values())


ROWS, LENGTH = 8, 24
RUNS: dict[str, Execution] = {"scan": Scan(), "unroll": Unroll()}


def build(config: Any, run: Execution) -> Any:
    """A model with noise on every weight, the same in either layout. Norms and biases start as zeros and ones, for which parity
    would be trivial."""
    model = config.build(run)
    names = layer_addresses(model)
    fill(model, jax.random.key(0), addresses=names)
    leaves = {}
    for address, v in variables(model).items():
        value = np.asarray(v.get_value())
        stacked = value.ndim > len(v.get_metadata()["meaning"].letters)
        parts = [_noisy(name, part) for name, part in zip(names(address), value if stacked else [value])]
        leaves[address] = jax.device_put(np.stack(parts) if stacked else parts[0])
    put(model, leaves)
    return model


def _noisy(name: str, value: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(value.shape)
    return (1.5 * value + 0.1 * noise).astype(np.float32)


def call(model: Any) -> Callable[..., Any]:
    graph, weights = split(model)
    compiled = jax.jit(lambda w, tokens, attend, cache: merge(graph, w)(tokens, attend, cache))
    return lambda tokens, attend, cache=None: compiled(weights, tokens, attend, cache)


def worst(got: Any, expected: Any) -> float:
    """The largest difference, as a share of the largest logit."""
    return float(np.abs(np.asarray(got) - np.asarray(expected)).max() / np.abs(np.asarray(expected)).max())


def cells(config: Any, run: Execution, expected: np.ndarray, tokens: Any) -> dict[str, float | None]:
    """One row of the table. None: an encoder does not decode."""
    model = build(config, run)
    step = call(model)
    ones = jnp.ones_like(tokens)
    full = step(tokens, config.attend(ones))[0]
    lora = build(config, run)
    swap(lora, r"layers\..*", lambda of: LoRA(of, 3, 6.0))
    fill(lora, jax.random.key(1), addresses=layer_addresses(lora))
    in_int8 = build(config, run)
    swap(in_int8, r"layers\..*", int8)
    quantized = call(in_int8)
    return {
        "full": worst(full, expected),
        "packed": packed(config, step, tokens),
        "contiguous decode": worst(contiguous_decode(model, step, tokens), expected) if config.causal else None,
        "paged decode": worst(paged_decode(model, step, tokens), expected) if config.causal else None,
        "LoRA at its start": worst(call(lora)(tokens, config.attend(ones))[0], expected),
        "int8 decode against int8 whole": worst(
            paged_decode(in_int8, quantized, tokens), quantized(tokens, config.attend(ones))[0]
        )
        if config.causal
        else None,
        "8 devices": worst(eight_devices(model, tokens), expected),
        "exported StableHLO": worst(raise_again(lower(model))(split(model)[1], tokens, ones), expected),
    }


def packed(config: Any, step: Callable[..., Any], tokens: Any) -> float:
    """The largest difference between two texts in one row and each text alone."""
    cut = LENGTH // 3
    segments = jnp.concatenate([jnp.ones((ROWS, cut), jnp.int32), jnp.full((ROWS, LENGTH - cut), 2, jnp.int32)], 1)
    together = step(tokens, config.attend(segments))[0]
    first = step(tokens[:, :cut], config.attend(segments[:, :cut]))[0]
    second = step(tokens[:, cut:], config.attend(segments[:, cut:]))[0]
    return worst(together, jnp.concatenate([first, second], 1))


def contiguous_decode(model: Any, step: Callable[..., Any], tokens: Any, prefill: int = 7) -> Any:
    cache = contiguous(model.layers.holds(), ROWS, LENGTH)
    outs = []
    for low, high in [(0, prefill)] + [(t, t + 1) for t in range(prefill, LENGTH)]:
        at = jnp.broadcast_to(jnp.arange(low, high, dtype=jnp.int32), (ROWS, high - low))
        logits, cache, _ = step(tokens[:, low:high], Contiguous(at, jnp.ones_like(at, bool)), cache)
        outs.append(logits)
    return jnp.concatenate(outs, 1)


def paged_decode(model: Any, step: Callable[..., Any], tokens: Any, prefill: int = 7, page: int = 4) -> Any:
    pages = -(-LENGTH // page)
    table = np.random.default_rng(0).permutation(ROWS * pages).reshape(ROWS, pages).astype(np.int32)
    cache = empty_pools(model.layers.holds(), ROWS, ROWS * pages, page)
    slots = jnp.arange(ROWS, dtype=jnp.int32)
    outs = []
    for low, high in [(0, prefill)] + [(t, t + 1) for t in range(prefill, LENGTH)]:
        t = jnp.broadcast_to(jnp.arange(high - low, dtype=jnp.int32), (ROWS, high - low))
        attend = Paged(
            jnp.asarray(table), slots, jnp.full(ROWS, low, jnp.int32), jnp.full(ROWS, high - low, jnp.int32), t
        )
        logits, cache, _ = step(tokens[:, low:high], attend, cache)
        outs.append(logits)
    return jnp.concatenate(outs, 1)


def eight_devices(model: Any, tokens: Any) -> Any:
    mesh = MeshSettings(data=2, fsdp=4).build(jax.devices()[:8])
    graph, weights = split(model)
    shapes = {a: s.shape for a, s in abstract(model).items()}
    places = shardings(logical(model), shapes, DEFAULT, mesh)
    placed = {a: jax.device_put(w, places[a]) for a, w in weights.items()}
    forward = jax.jit(lambda w, t: merge(graph, w)(t, model.config.attend(jnp.ones_like(t)))[0])
    with scope(mesh):
        return forward(placed, jax.device_put(tokens, batch_sharding(mesh)))


def table() -> str:
    """A Markdown table with a row for the fullest example of each family and each way its layers run."""
    lines, header = [], None
    for name, config in fullest().items():
        tokens = jnp.asarray(np.random.default_rng(7).integers(3, config.vocab, (ROWS, LENGTH)), jnp.int32)
        expected = np.asarray(call(build(config, Unroll()))(tokens, config.attend(jnp.ones_like(tokens)))[0])
        for run_name, run in RUNS.items():
            row = cells(config, run, expected, tokens)
            if header is None:
                header = "| family | layers | " + " | ".join(row) + " |\n|---|---|" + "---|" * len(row)
            lines.append(f"| {name} | {run_name} | " + " | ".join(map(shown, row.values())) + " |")
    return "\n".join([header or "", *lines])


def shown(apart: float | None) -> str:
    """One cell of the table."""
    return "" if apart is None else f"{apart:.1e}" if apart else "equal"
