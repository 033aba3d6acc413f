"""Makes updates from the micro-batches of a rollout. One compiled program adds up their gradients, another updates the weights.

The number of micro-batches in an update depends on the lengths of the rollout's completions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax

from argosy.core.errors import Unsupported
from argosy.parallel.compiler_options import compile_lowered
from argosy.rl.rollouts.packing import RolloutBatch
from argosy.run.assembly.assembly import Assembly
from argosy.run.frozen.role import Role
from argosy.run.rl.parts import PartArrays
from argosy.train.guard import guard_step
from argosy.train.state import TrainState, training_graph
from argosy.train.step import make_parts

SIZES = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "alias_size_in_bytes")


@dataclass(frozen=True)
class PlacedBatch:
    """The batch of an update on the devices.

    parts: the arrays of each micro-batch.
    numbers: the metrics that are logged with the update.
    """

    parts: Sequence[Any]
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class RolloutUpdates:
    """Updates whose gradients are summed over micro-batches.

    names: the roles of the frozen models that an update reads. A policy's reference is not among them, because it is read once per
        rollout.
    """

    names: tuple[str, ...] = ()

    def roles(self, assembly: Assembly) -> Mapping[str, Role]:
        return {name: assembly.roles[name] for name in self.names}

    def place(self, assembly: Assembly, batch: RolloutBatch) -> PlacedBatch:
        arrays = PartArrays(assembly)
        return PlacedBatch([arrays.place(part) for part in batch.parts], batch.numbers)

    def lower(self, assembly: Assembly) -> Any:
        raise Unsupported("updates of rollouts are several programs, which are compiled together")

    def compile(self, assembly: Assembly) -> "RolloutUpdate":
        a, run, graph, roles = assembly, assembly.run, training_graph(assembly.model), self.roles(assembly)
        settings: Any = {"precision": a.decided.precision, "roles": {name: role.graph for name, role in roles.items()}}
        add, finish = make_parts(graph, run.objective, a.optimizer, a.rate, **settings)
        finish = guard_step(finish, run.guard)
        shapes, part, key = a.shapes, PartArrays(a).shapes(), jax.eval_shape(lambda: jax.random.key(0))
        frozen = {name: role.shapes for name, role in roles.items()}
        with a.tracing():
            sums = jax.eval_shape(add, shapes.params, shapes.rest, frozen, part, key)
            places = (a.places.params, jax.tree.map(lambda _: a.places.step, sums[1]))
            sums = jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), sums, places)
            arguments = (shapes.params, shapes.rest, frozen, part, key)
            first = compile_lowered(jax.jit(add, out_shardings=places).lower(*arguments), a.compiler_options)
            more = jax.jit(add, donate_argnums=5, out_shardings=places)
            further = compile_lowered(more.lower(*arguments, sums), a.compiler_options)
            update_names = frozenset(sums[1].updates)
            small = replace(shapes, rest={name: shapes.rest[name] for name in update_names})
            out = replace(a.places, rest={name: a.places.rest[name] for name in update_names}), None
            last = compile_lowered(jax.jit(finish, donate_argnums=0, out_shardings=out).lower(small, sums), a.compiler_options)
        waiting = sum(
            math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf, place in zip(jax.tree.leaves(shapes.optimizer), jax.tree.leaves(a.places.optimizer), strict=True)
        )
        return RolloutUpdate(first, further, last, update_names, waiting)


@dataclass(frozen=True)
class RolloutUpdate:
    """The compiled update of a state by the micro-batches of a rollout.

    first: the program for the first micro-batch.
    further: the program for later micro-batches, which adds to the sums of gradients.
    last: the program that updates the weights from the sums.
    moved: the names of weights that a rule updates instead of a gradient.
    waiting: the bytes of the optimizer's state on a device, which is idle while gradients are computed.
    """

    first: Any
    further: Any
    last: Any
    moved: frozenset[str]
    waiting: int

    def __call__(self, state: TrainState, batch: PlacedBatch, frozen: Mapping[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        sums: Any = None
        key = jax.random.fold_in(state.key, state.step)
        for i, part in enumerate(batch.parts):
            args = (state.params, state.rest, frozen, part, jax.random.fold_in(key, i))
            sums = self.first(*args) if sums is None else self.further(*args, sums)
        small = replace(state, rest={a: state.rest[a] for a in self.moved})
        new, metrics = self.last(small, sums)
        return replace(new, rest=state.rest | new.rest), dict(metrics) | dict(batch.numbers)

    def memory_analysis(self) -> Any:
        """Returns the sizes of the program for a micro-batch, including the optimizer's state, which stays on the device meanwhile."""
        analysis = self.further.memory_analysis()
        sizes = {name: int(getattr(analysis, name, 0) or 0) for name in SIZES}
        sizes["argument_size_in_bytes"] += self.waiting
        return SimpleNamespace(**sizes)
