"""One update as a pure function: `step(state, batch) -> state, metrics`. It owns no clock, no file and no host work.

Gradients are sums over targets, divided once by the weight of the whole batch: accumulation and packing change no number but
by rounding. In mixed precision, activations and contractions are in the compute type, weights and optimizer in float32.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from argosy.models.parts.moe import MoE
from argosy.models.parts.weight import Leaves, merge
from argosy.train.objectives import Loss, Mean, Objective
from argosy.train.objectives.routers import moved
from argosy.train.schedule import Factor
from argosy.train.state import TrainState

Batch = dict[str, Array]
Metrics = dict[str, Array]
Precision = Literal["float32", "bfloat16"]


def model_for(graph: Any, precision: Precision, *leaves: Leaves, training: bool = False) -> Any:
    """The model with these weights, computing in this type."""
    model = merge(graph, *leaves)
    model.dtype = jnp.dtype(precision)
    model.set_attributes(MoE, training=training, raise_if_not_found=False)
    return model


def make_step(
    graph: Any,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    rate: Factor,
    *,
    precision: Precision = "float32",
    accumulate: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The update, to be jitted with its state donated.

    Metrics: `loss` and what the objective tells, as means; `grad_norm` before clipping; `lr`; `targets`, the weight of the batch.
    """

    def total(params: Leaves, rest: Leaves, batch: Batch, key: Array) -> tuple[Array, Loss]:
        loss = objective(model_for(graph, precision, params, rest, training=True), batch, key)
        return loss.loss.total, loss

    def gradients(state: TrainState, batch: Batch, key: Array) -> tuple[Leaves, Loss]:
        grads, loss = jax.grad(total, has_aux=True)(state.params, state.rest, batch, key)
        return grads, loss

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        if accumulate == 1:
            grads, loss = gradients(state, batch, key)
        else:
            grads, loss = _accumulated(gradients, state, batch, key, accumulate)
        grads = jax.tree.map(lambda g: g / jnp.maximum(loss.loss.weight, 1e-30), grads)
        updates, new = optimizer.update(grads, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss.loss.value()} | {name: mean.value() for name, mean in loss.metrics.items()}
        metrics |= {
            "grad_norm": optax.tree.norm(grads),
            "lr": jnp.asarray(rate(state.step)),
            "targets": loss.loss.weight,
        }
        rest = state.rest
        if loss.loads:
            rest = moved(rest, loss.loads, merge(graph, state.params, rest).config.experts.bias_rate)
        return TrainState(state.step + 1, params, rest, new, state.key), metrics

    return step


def _accumulated(
    gradients: Callable[..., Any], state: TrainState, batch: Batch, key: Array, parts: int
) -> tuple[Leaves, Loss]:
    """The same sums, over parts of the batch one after the other. A part takes every `parts`-th row, so that each device
    has its share of every part."""
    pieces = jax.tree.map(lambda a: a.reshape(a.shape[0] // parts, parts, *a.shape[1:]).swapaxes(0, 1), batch)
    first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), pieces)
    zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(gradients, state, first, key))

    def one(so_far: Any, piece: Any) -> tuple[Any, None]:
        i, part = piece
        return jax.tree.map(jnp.add, so_far, gradients(state, part, jax.random.fold_in(key, i))), None

    return jax.lax.scan(one, zero, (jnp.arange(parts), pieces))[0]


def make_evaluation(
    graph: Any, objective: Objective, *, precision: Precision = "float32"
) -> Callable[[TrainState, Batch], Mean]:
    """The summed cross-entropy of a batch, and its weight."""

    def evaluate(state: TrainState, batch: Batch) -> Mean:
        loss = objective(model_for(graph, precision, state.params, state.rest), batch, state.key)
        return loss.metrics.get("cross_entropy", loss.loss)

    return evaluate
