"""One update as a pure function `step(state, batch, frozen) -> state, metrics`. It does no timing, file access or other work of the
host.

Gradients are sums over targets, divided once by the weight of the whole batch, so accumulation and packing only change rounding. In
mixed precision, activations and matrix products have the compute type; weights and optimizer state are float32. Frozen models (a
reference, a teacher) are arguments, because constants would be compiled into the program.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from argosy.adapt.lora import dropping
from argosy.adapt.scaling import LargestMagnitude, histories_of, next_amax_history, with_scaling
from argosy.models.parts.stack.hosted import on_host, slots, with_slots
from argosy.models.parts.weight import Leaves, merge
from argosy.parallel.gather import GatherOnce
from argosy.train.objectives.loss import Loss, Models, RuleUpdate, WeightedMean
from argosy.train.objectives.objective import Objective
from argosy.train.schedule import Factor
from argosy.train.state import TrainState

Batch = dict[str, Array]
Metrics = dict[str, Array]
# {role: weights}
Frozen = Mapping[str, Leaves]
# (what the guard keeps, loss, norm of the gradient) -> whether the step is bad, so that the state stays as it is.
Stays = Callable[[Any, Array, Array], Array]
# float64 is for proofs, under `jax.enable_x64`: no setting asks for it.
Precision = Literal["float32", "bfloat16", "float64"]


def model_for(graph: Any, precision: Precision, *leaves: Leaves) -> Any:
    """Builds the model of a graph and its weights, which computes in this precision."""
    model = merge(graph, *leaves)
    model.dtype = jnp.dtype(precision)
    return model


def make_step(
    graph: Any,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    rate: Factor,
    *,
    precision: Precision = "float32",
    accumulate: int = 1,
    roles: Mapping[str, Any] | None = None,
    gather: GatherOnce | None = None,
    stays: Stays | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Makes the update `(state, batch, frozen={}) -> state, metrics`, to be jitted with its state donated.

    The metrics are `loss` and the metrics of the objective, as means over the batch; `grad_norm`, the norm before clipping; `lr`, the
    learning rate of this update; and `targets`, the weight of the batch.

    Args:
        graph: the graph of the trained model.
        objective: the loss.
        optimizer: the optimizer, including the learning rate.
        rate: (number of updates so far) -> the learning rate, for the metric `lr`.
        precision: the compute type.
        accumulate: the number of micro-batches of a batch, which are computed one after the other. Groups of rows are not split.
        roles: the graphs of the frozen models that the objective reads, by role. Their weights are in `frozen`.
        gather: gathers the weights once for all micro-batches. None: each micro-batch gathers them.
        stays: (state of the guard, loss, gradient norm) -> whether the state stays as it is, because the step is bad. It is given only
            for an optimizer whose state is in the host's memory.
    """
    models_for = _models(graph, precision, roles or {})

    def gradients(state: TrainState, frozen: Frozen, batch: Batch, key: Array) -> tuple[Leaves, Loss]:
        def total(moving: Leaves, rest: Leaves) -> tuple[Array, Loss]:
            with jax.named_scope("loss"):
                loss = objective(models_for(with_slots(state.params, moving), rest, frozen, key), batch, key)
            return loss.loss.total, loss

        return _gradients(total, slots(state.params), state.rest)

    def shared(state: TrainState, frozen: Frozen, parts: Batch, key: Array) -> Batch:
        """Computes the means over the whole batch that every micro-batch reads (`Objective.batch_means`)."""
        models = models_for(state.params, state.rest, frozen)
        means = _summed(lambda part, key: objective.batch_means(models, part, key), parts, key)
        return {name: mean.value() for name, mean in means.items()}

    def step(state: TrainState, batch: Batch, frozen: Frozen | None = None) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step)
        if accumulate == 1:
            grads, loss = gradients(state, frozen or {}, batch, key)
        else:
            parts, gathered = in_parts(batch, accumulate, objective), state
            if gather is not None:
                gathered = replace(state, params=gather.whole(state.params), rest=gather.whole(state.rest))

            def of_part(part: Batch, key: Array) -> tuple[Leaves, Loss]:
                grads, loss = gradients(gathered, frozen or {}, part | shared_values, key)
                return grads if gather is None else gather.shares(grads), loss

            with nullcontext() if gather is None else gather.in_scope():
                shared_values = shared(gathered, frozen or {}, parts, key)
                grads, loss = _summed(of_part, parts, key)
        return apply_update(state, grads, loss, optimizer, rate, stays)

    return step


def make_parts(
    graph: Any,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    rate: Factor,
    *,
    precision: Precision = "float32",
    roles: Mapping[str, Any] | None = None,
) -> tuple[Callable[..., Any], Callable[..., tuple[TrainState, Metrics]]]:
    """Makes the update of `make_step` for batches of any number of micro-batches, as two functions to be jitted:

        add(params, rest, frozen, part, key, sums) -> sums    adds gradients and loss of a micro-batch (`sums` is None for the first)
        finish(state, sums) -> state, metrics                 makes the update from the sums over all micro-batches

    Of the weights that are not trained, `finish` needs and returns only those that change by a rule.
    """
    models_for = _models(graph, precision, roles or {})

    def add(params: Leaves, rest: Leaves, frozen: Frozen, part: Batch, key: Array, sums: Any = None) -> Any:
        def total(params: Leaves, rest: Leaves) -> tuple[Array, Loss]:
            loss = objective(models_for(params, rest, frozen, key), part, key)
            return loss.loss.total, loss

        grads_and_loss = _gradients(total, params, rest)
        return grads_and_loss if sums is None else _added(sums, grads_and_loss)

    def finish(state: TrainState, sums: Any) -> tuple[TrainState, Metrics]:
        grads, loss = sums
        return apply_update(state, grads, loss, optimizer, rate)

    return add, finish


def _gradients(total: Callable[[Leaves, Leaves], tuple[Array, Loss]], params: Leaves, rest: Leaves) -> tuple[Leaves, Loss]:
    """Computes the gradients of a loss, and the loss. Updates of the histories of delayed scaling, which are among the other weights,
    are added to the loss's updates.

    Args:
        total: (trained weights, other weights) -> the sum that is differentiated, and the loss.
    """
    (grads, seen), loss = jax.grad(
        lambda params, histories: total(params, rest | histories), argnums=(0, 1), has_aux=True
    )(params, histories_of(rest))
    updates = {address: RuleUpdate(LargestMagnitude(amax), next_amax_history) for address, amax in seen.items()}
    return grads, loss._replace(updates=loss.updates | updates)


def apply_update(
    state: TrainState,
    grads: Leaves,
    loss: Loss,
    optimizer: Any,
    rate: Factor,
    stays: Stays | None = None,
) -> tuple[TrainState, Metrics]:
    """Computes the next state, and the metrics, from gradients that are sums over targets.

    Args:
        grads: the gradients, by parameter name.
        loss: the loss of the whole batch.
    """
    grads = jax.tree.map(lambda g: g / jnp.maximum(loss.loss.weight, 1e-30), grads)
    norm, mean_loss = optax.tree.norm(grads), loss.loss.value()
    kwargs = {} if stays is None else {"stays": stays(state.guard, mean_loss, norm)}
    with jax.named_scope("optimizer"):
        updates, new = optimizer.update(grads, state.optimizer, state.params, **kwargs)
    # Those of the host's memory are updated where they are (`train.offload`).
    device_updates = {a: u for a, u in updates.items() if not on_host(u)}
    params: Any = updates | optax.apply_updates({a: state.params[a] for a in device_updates}, device_updates)
    metrics = {"loss": mean_loss} | {name: mean.value() for name, mean in loss.metrics.items()}
    metrics |= {
        "grad_norm": norm,
        "lr": jnp.asarray(rate(steps_of(state.optimizer, state.step))),
        "targets": loss.loss.weight,
    }
    rest_updates = {a: update.rule(state.rest[a], update.statistic) for a, update in loss.updates.items()}
    return TrainState(state.step + 1, params, state.rest | rest_updates, new, state.key), metrics


def steps_of(optimizer: Any, step: Array) -> Array:
    """Returns the number of updates that an optimizer has counted, which decides its learning rate. It is smaller than the number of
    steps if updates were skipped.

    Args:
        optimizer: the state of the optimizer.
        step: the number of steps, which is returned for an optimizer without a schedule, since that does not count.
    """
    scheduled = lambda part: isinstance(part, optax.ScaleByScheduleState)  # noqa: E731
    return next((part.count for part in jax.tree.leaves(optimizer, is_leaf=scheduled) if scheduled(part)), step)


def _models(graph: Any, precision: Precision, roles: Mapping[str, Any]) -> Callable[..., Models]:
    def models(params: Leaves, rest: Leaves, frozen: Frozen, key: Array | None = None) -> Models:
        """Builds all models by role.

        Args:
            key: the random key for the dropout of adapters and stochastic rounding; None outside of training.
        """
        if set(frozen) != set(roles):
            raise ValueError(f"frozen models {sorted(frozen)} given, {sorted(roles)} declared")
        others = {role: model_for(roles[role], precision, leaves) for role, leaves in frozen.items()}
        model = model_for(graph, precision, params, rest)
        with_scaling(model, key)
        if key is not None:
            dropping(model, key)
        return {"model": model} | others

    return models


def in_parts(batch: Batch, parts: int, objective: Objective) -> Batch:
    """Splits a batch into micro-batches: each array [n ...] becomes [parts, n / parts ...]. A micro-batch takes every `parts`-th group
    of rows, so that each device has a share of every micro-batch. Rows of a group stay together."""
    fields, together = objective.reads(), objective.rows_per_group

    def split_rows(name: str, a: Array) -> Array:
        rows = 1 if name in fields and fields[name].per == "group" else together
        n = len(a) // rows
        apart = a.reshape(n // parts, parts, rows, *a.shape[1:]).swapaxes(0, 1)
        return apart.reshape(parts, len(a) // parts, *a.shape[1:])

    return {name: split_rows(name, a) for name, a in batch.items()}


def _summed(of_part: Callable[[Batch, Array], Any], parts: Batch, key: Array) -> Any:
    """Sums the results of a function over micro-batches, which are computed one after the other.

    Args:
        of_part: (micro-batch, key) -> a pytree.
        parts: the micro-batches, as `in_parts` makes them.
    """
    count = len(next(iter(parts.values())))
    first = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), parts)
    zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(of_part, first, key))

    def step(so_far: Any, piece: Any) -> tuple[Any, None]:
        i, part = piece
        term = of_part(part, jax.random.fold_in(key, i))
        return _added(so_far, term), None

    return jax.lax.scan(step, zero, (jnp.arange(count), parts))[0]


def _added(a: Any, b: Any) -> Any:
    """Adds two pytrees of gradients, losses or metrics. Metrics are added by their own `+`, which for a maximum is the larger value."""
    return jax.tree.map(lambda a, b: a + b, a, b, is_leaf=lambda x: hasattr(x, "value"))


def make_evaluation(
    graph: Any, objective: Objective, *, precision: Precision = "float32", roles: Mapping[str, Any] | None = None
) -> Callable[..., dict[str, WeightedMean]]:
    """Makes a function `(state, batch, frozen={})` that returns the objective's metrics on a batch, and its `loss`, which is the
    cross-entropy where there is one."""
    models_for = _models(graph, precision, roles or {})

    def evaluate(state: TrainState, batch: Batch, frozen: Frozen | None = None) -> dict[str, WeightedMean]:
        loss = objective(models_for(state.params, state.rest, frozen or {}), batch, state.key)
        return loss.metrics | {"loss": loss.metrics.get("cross_entropy", loss.loss)}

    return evaluate
