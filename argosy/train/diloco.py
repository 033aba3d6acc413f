"""DiLoCo: replicas of the weights train alone, and an outer step brings them together every H steps (arXiv:2311.08105, algorithm 1).

    inner step   θ_r <- AdamW(θ_r, gradient of the loss of replica r's rows)      in every step, for each replica r
    outer step   Δ = mean over r of (θ - θ_r)                                     after every H inner steps
                 m <- μ m + Δ;   θ <- θ - η (Δ + μ m);   θ_r <- θ                 SGD with Nesterov momentum

Each index of the mesh axis `data` is a replica. An inner step runs inside a `shard_map` over that axis alone, so nothing of it can be
summed over replicas but what is written here: its metrics. The other axes split the work within a replica as they do without.

`TrainState.params` are the outer weights θ: evaluation, samples and whoever reads a checkpoint get these, and only outer steps move
them. The rest is in the state of the optimizer: a checkpoint between two outer steps holds every replica.

As in the paper, the inner optimizer's state stays with its replica over an outer step, and each replica clips its own gradient. What
differs: replicas take their rows of one order of the data, so what they see is never of different kinds. Inner steps wait for an outer
one, in which all weights move at once (Streaming DiLoCo, arXiv:2501.18512, does otherwise).
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
# In the optimizer's state: of each replica [R ...], its optimizer's state and its weights; the momentum m; and of the last outer step,
# how far the replicas were from their mean (root of the mean square over replicas of the L2 norm), and the norm of Δ.
INNER, REPLICAS, MOMENTUM, APART, MOVED = "inner", "replicas", "momentum", "replicas_apart", "outer_grad_norm"
OF_EACH = (INNER, REPLICAS)


def replicated_optimizer(optimizer: optax.GradientTransformation, replicas: int) -> optax.GradientTransformation:
    """The inner optimizer with the state of a run of so many replicas, which begin alike; its update is that of one replica."""

    def init(params: Any) -> dict[str, Any]:
        each = {INNER: optimizer.init(params), REPLICAS: params}
        each = jax.tree.map(lambda a: jnp.broadcast_to(a, (replicas, *a.shape)), each)
        nothing = {name: jnp.zeros((), jnp.float32) for name in (APART, MOVED)}
        return each | {MOMENTUM: jax.tree.map(jnp.zeros_like, params)} | nothing

    return optax.GradientTransformation(init, optimizer.update)


def places(optimizer: Mapping[str, Any], weights: Mapping[str, NamedSharding], shapes: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Shardings for a state of `replicated_optimizer`, from its shapes: what each replica has is split over `data`, and within it as
    weights are."""
    each = {name: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), optimizer[name]) for name in OF_EACH}
    within = like_weights(dict(optimizer) | each, weights, shapes, mesh)
    return within | {n: jax.tree.map(lambda place: NamedSharding(mesh, P(AXIS, *place.spec)), within[n]) for n in OF_EACH}


def alone(step: Callable[..., Any]) -> Callable[..., Any]:
    """The inner step of all replicas, from a step `(state, batch, frozen) -> state, metrics` of one. Metrics are means over replicas,
    `targets` their sum. Traced under the mesh."""

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
    """The inner step of all replicas, and after every `every` of them an outer step. A step that a guard skipped counts; one at
    which the state halted does not. Metrics: also what is known of the last outer step."""

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
    """The outer weights, and what moves beside them, after an outer step."""
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
