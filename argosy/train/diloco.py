"""DiLoCo: replicas of the weights train alone, and an outer step averages them every H steps (arXiv:2311.08105, algorithm 1).

    inner step   θ_r <- AdamW(θ_r, gradient of the loss of replica r's rows)      in every step, for each replica r
    outer step   Δ = mean over r of (θ - θ_r)                                     after every H inner steps
                 m <- μ m + Δ;   θ <- θ - η (Δ + μ m);   θ_r <- θ                 SGD with Nesterov momentum

Each index of the mesh axis `data` is a replica. An inner step runs inside a `shard_map` over this axis alone. So nothing can be summed
over replicas by accident; only metrics are. The other mesh axes split the work within a replica, as they do without DiLoCo.

`TrainState.params` are the outer weights θ, which only outer steps change. Evaluations, samples and readers of a checkpoint use these.
The weights of the replicas are in the state of the optimizer, so a checkpoint between two outer steps holds every replica.

As in the paper, the state of the inner optimizer stays with its replica over an outer step, and each replica clips its own gradient.
Differences from the paper: all replicas take their rows from the same shuffled data, so their data are never of different kinds. Inner
steps wait for the outer step, in which all weights move at once (unlike Streaming DiLoCo, arXiv:2501.18512).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from argosy.parallel.place import like_weights
from argosy.train.diloco_settings import DilocoSettings
from argosy.train.state import TrainState

# The mesh axis whose indices are replicas.
AXIS = "data"
# Entries of the optimizer's state. INNER, REPLICAS: the optimizer state and the weights of each replica [R ...]. MOMENTUM: m.
# APART: how far the replicas were from their mean at the last outer step (root mean square over replicas of the L2 norm).
# MOVED: the norm of Δ at the last outer step.
INNER, REPLICAS, MOMENTUM, APART, MOVED = "inner", "replicas", "momentum", "replicas_apart", "outer_grad_norm"
OF_EACH = (INNER, REPLICAS)


def replicated_optimizer(optimizer: optax.GradientTransformation, replicas: int) -> optax.GradientTransformation:
    """Returns the inner optimizer with the state of a DiLoCo run: weights and optimizer state of each replica, which begin equal, and
    the outer momentum. The update is that of a single replica."""

    def init(params: Any) -> dict[str, Any]:
        each = {INNER: optimizer.init(params), REPLICAS: params}
        each = jax.tree.map(lambda a: jnp.broadcast_to(a, (replicas, *a.shape)), each)
        nothing = {name: jnp.zeros((), jnp.float32) for name in (APART, MOVED)}
        return each | {MOMENTUM: jax.tree.map(jnp.zeros_like, params)} | nothing

    return optax.GradientTransformation(init, optimizer.update)


def places(optimizer: Mapping[str, Any], weights: Mapping[str, NamedSharding], shapes: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Makes the shardings of a state of `replicated_optimizer`. Arrays [R ...] of replicas are split over `data`, and their other axes
    as weights are.

    Args:
        optimizer: the shapes of the state.
        weights: the shardings of the weights, by parameter name.
        shapes: the shapes of the weights, by parameter name.
    """
    each = {name: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), optimizer[name]) for name in OF_EACH}
    within = like_weights(dict(optimizer) | each, weights, shapes, mesh)
    return within | {n: jax.tree.map(lambda place: NamedSharding(mesh, P(AXIS, *place.spec)), within[n]) for n in OF_EACH}


def alone(step: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the inner step of all replicas from the step `(state, batch, frozen) -> state, metrics` of one replica. Metrics are means
    over replicas; `targets` is a sum. The step must be traced under the mesh."""

    def of_one(counter: Array, key: Array, params: Any, rest: Any, inner: Any, batch: Any, frozen: Any) -> Any:
        params, inner = jax.tree.map(lambda a: a[0], (params, inner))
        key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))
        new, metrics = step(TrainState(counter, params, rest, inner, key), batch, frozen)
        targets = jax.lax.psum(metrics["targets"], AXIS)
        metrics = jax.tree.map(lambda a: jax.lax.pmean(a, AXIS), metrics) | {"targets": targets}
        return *jax.tree.map(lambda a: a[None], (new.params, new.optimizer)), metrics

    each, all_ = P(AXIS), P()
    of_all = jax.shard_map(
        of_one,
        in_specs=(all_, all_, each, all_, each, each, all_),
        out_specs=(each, each, all_),
        axis_names={AXIS},
        check_vma=False,
    )

    def update(state: TrainState, batch: Any, frozen: Any = None) -> tuple[TrainState, dict[str, Array]]:
        optimizer: dict[str, Any] = state.optimizer
        replicas, inner, metrics = of_all(state.step, state.key, optimizer[REPLICAS], state.rest, optimizer[INNER], batch, frozen or {})
        return replace(state, step=state.step + 1, optimizer=optimizer | {REPLICAS: replicas, INNER: inner}), metrics

    return update


def together(step: Callable[..., Any], settings: DilocoSettings) -> Callable[..., Any]:
    """Adds the outer step to an inner step of all replicas, after every `every` steps. A step that a guard skipped counts; a step at
    which the state halted does not. The metrics `replicas_apart` and `outer_grad_norm` describe the last outer step.

    Args:
        step: the inner step of all replicas, as `alone` makes it.
    """

    def update(state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Array]]:
        new, metrics = step(state, *args)
        inner = {INNER: new.optimizer[INNER]}
        moving = {name: part for name, part in new.optimizer.items() if name != INNER}
        due = (new.step != state.step) & (new.step % settings.every == 0)
        outer = lambda params, moving: outer_step(params, moving, settings)  # noqa: E731
        params, moving = jax.lax.cond(due, outer, lambda *of: of, new.params, moving)
        return replace(new, params=params, optimizer=inner | moving), metrics | {name: moving[name] for name in (APART, MOVED)}

    return update


def outer_step(params: Any, moving: Mapping[str, Any], settings: DilocoSettings) -> tuple[Any, dict[str, Any]]:
    """Computes an outer step.

    Args:
        params: the outer weights.
        moving: the entries of the optimizer's state but that of the inner optimizer.

    Returns:
        The new outer weights and the new entries.
    """
    ways = {a: w - moving[REPLICAS][a] for a, w in params.items()}
    mean = {a: jnp.mean(way, 0) for a, way in ways.items()}
    momentum = {a: settings.momentum * m + mean[a] for a, m in moving[MOMENTUM].items()}
    params = {a: w - settings.lr * (mean[a] + settings.momentum * momentum[a]) for a, w in params.items()}
    apart = sum(_squares(way - mean[a]) for a, way in ways.items())
    return params, {
        REPLICAS: {a: jnp.broadcast_to(params[a], way.shape) for a, way in ways.items()},
        MOMENTUM: momentum,
        APART: jnp.sqrt(jnp.mean(apart)).astype(jnp.float32),
        MOVED: optax.tree.norm(mean).astype(jnp.float32),
    }


def _squares(ways: Float[Array, "R ..."]) -> Float[Array, "R"]:
    return jnp.sum(jnp.square(ways), range(1, ways.ndim))
