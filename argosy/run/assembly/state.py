"""Builds the optimizer of a run, and the shapes and shardings of its training state."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from argosy.core.errors import BadInput
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import abstract, logical
from argosy.parallel.gather import GatherOnce
from argosy.parallel.place import like_weights
from argosy.parallel.rules import shardings
from argosy.rl.policy.critic import PREFIX
from argosy.run.assembly.decided import Decided
from argosy.run.assembly.offload import check_offload
from argosy.run.settings.run import Run
from argosy.train import diloco
from argosy.train.beside import CRITIC
from argosy.train.guard import begin
from argosy.train.offload import HOST, pieces_for, places_on_host, weights_on_host
from argosy.train.optimizers.base import scale_updates
from argosy.train.state import TrainState, meanings_of, split_trained


@dataclass(frozen=True)
class StateParts:
    """The parts of a run that describe its training state. `Assembly` describes the fields. The shapes include shardings."""

    graph: Any
    optimizer: Any
    rate: Callable[[Any], Any]
    shapes: TrainState
    places: TrainState


def build_state(run: Run, decided: Decided, mesh: Mesh, model: Any, steps: int) -> StateParts:
    """Builds the optimizer, and the shapes and shardings of the arrays of the training state.

    Args:
        steps: the number of steps over which the learning rate is scheduled.

    Raises:
        UserError: the settings ask for something that this state does not support.
    """
    graph, params, rest = split_trained(model)
    shapes = abstract(model)
    weights = shardings(logical(model), {a: s.shape for a, s in shapes.items()}, run.mesh.table(), mesh)
    offloads = run.execution.offload != "none"
    if offloads:
        check_offload(decided, mesh)
    pieces = pieces_for(run.optimizer, meanings_of(model), shapes, weights) if offloads else None
    schedule = run.schedule.build(steps)
    optimizer = run.optimizer.build(schedule, meanings_of(model), pieces, layer_addresses(model))
    if CRITIC in run.objective.trained_parts:
        optimizer = scale_updates(optimizer, PREFIX, run.objective.critic.rate)
    if run.diloco.every:
        optimizer = diloco.replicated_optimizer(optimizer, mesh.shape[diloco.AXIS])
    state = jax.eval_shape(
        lambda params, rest: TrainState.start(
            params, rest, optimizer.init(params), 0, begin(run.guard), params if run.ema.on else None
        ),
        {a: shapes[a] for a in params},
        {a: shapes[a] for a in rest},
    )
    places = like_weights(state, weights, shapes, mesh)
    if offloads:
        places = _offload_places(run, model, state, places)
    if run.execution.gather == "once" and not GatherOnce(weights).gathers:
        problem = "no weight is split over mesh.fsdp, so there is nothing to gather once"
        raise BadInput(problem, where="set by execution.gather")
    if run.diloco.every:
        places = replace(places, optimizer=diloco.places(state.optimizer, weights, shapes, mesh))

    def placed(leaf: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    def rate(step: Any) -> Any:
        return run.optimizer.learning_rate * schedule(step)

    return StateParts(graph, optimizer, rate, jax.tree.map(placed, state, places), places)


def _offload_places(run: Run, model: Any, state: TrainState, places: TrainState) -> TrainState:
    """Returns the shardings of a state with the optimizer's state, and with `offload=weights` also layers, in the host's memory.

    Raises:
        BadInput: the optimizer has no state to move there.
    """
    places = replace(places, optimizer=places_on_host(places.optimizer, state.optimizer, state.params))
    if run.execution.offload == "weights":
        return replace(places, params=weights_on_host(places.params, meanings_of(model)))
    if not any(place.memory_kind == HOST for place in jax.tree.leaves(places.optimizer)):
        problem = f"{type(run.optimizer).__name__} keeps no arrays with these settings, so there is nothing to move to the host"
        raise BadInput(problem, where="set by execution.offload", hint="execution.offload=none")
    return places
