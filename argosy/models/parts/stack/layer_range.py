"""Runs a range of a stack's layers, for callers that decide something between layers (`infer.denoise.step_cache`) or change the output
of each layer.

The weights of scanned layers stay in one array. A loop over indexes reads one layer after the other, because a slice of the array
would copy nearly all weights.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import dynamic_index_in_dim

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.stack import LayerGroup, Stack, Streams, constrain_streams, group_parts, run_block
from argosy.models.parts.stack.remat import on_picked_weights
from argosy.models.parts.weight import split

# A function (streams, index of the layer) that is applied after a layer. The index is traced if layers are scanned.
AfterLayer = Callable[[Streams, Any], Streams]


def run_layers(
    stack: Stack, x: Streams, attend: Attend, condition: Any, start: int = 0, stop: int | None = None, after: AfterLayer | None = None
) -> Streams:
    """Runs the layers from `start` up to, not including, `stop`, without caches. Returns the streams.

    Args:
        stop: None: the number of layers.
        after: is applied to the streams after each layer. Without it, the whole range of layers runs by the stack's own strategy.
    """
    layers = range(len(stack.plan))[start:stop]
    if len(layers) == len(stack.plan) and after is None:
        return stack(x, None, attend, condition)[0]
    x, attend = constrain_streams(x), stack.with_angles(attend)
    if stack.run.stacked:
        for group in stack.groups:
            x = _run_group_range(stack, group, x, attend, condition, layers, after)
        return x
    for i in layers:
        graph, weights = split(getattr(stack, str(i)))
        with jax.named_scope(f"layers.{i}"):
            x = run_block(graph, stack.plan[i], weights, x, None, attend, stack.run.remat, True, condition)[0]
            x = x if after is None else after(x, i)
    return x


def _run_group_range(
    stack: Stack, group: LayerGroup, x: Streams, attend: Attend, condition: Any, layers: range, after: AfterLayer | None
) -> Streams:
    """Runs the layers of a group that are in the range. Whole repeats run in a loop, the layers before and after them one by one."""
    period = len(group.layers)
    first, last = (min(max(at - group.start, 0), period * group.repeats) for at in (layers.start, layers.stop))
    graphs, leaves = group_parts(stack, group)
    uses = Counter(layer.kind for layer in group.layers)

    def run_layer(x: Streams, repeat: Any, j: int) -> Streams:
        layer = group.layers[j]
        place = repeat * uses[layer.kind] + sum(before.kind == layer.kind for before in group.layers[:j])
        weights = jax.tree.map(lambda a: dynamic_index_in_dim(a, place, keepdims=False), leaves[layer.kind])
        x = run_block(graphs[layer.kind], layer, weights, x, None, attend, stack.run.remat, condition=condition)[0]
        return x if after is None else after(x, group.start + repeat * period + j)

    def body(x: Streams, repeat: Any) -> tuple[Streams, None]:
        for j in range(period):
            # The backward pass reads each layer's weights again. Otherwise it would keep a copy of all layers' weights.
            x = on_picked_weights(partial(run_layer, j=j), stack.run.remat)(x, repeat)
        return x, None

    repeats = range(-(-first // period), last // period)
    with jax.named_scope("layers"):
        for i in range(first, repeats.start * period if repeats else last):
            x = run_layer(x, i // period, i % period)
        if repeats:
            x, _ = jax.lax.scan(body, x, jnp.arange(repeats.start, repeats.stop))
            for i in range(repeats.stop * period, last):
                x = run_layer(x, i // period, i % period)
    return x
