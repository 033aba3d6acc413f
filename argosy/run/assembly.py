"""Everything that a training run needs: model, data, optimizer, compiled steps, and how its state is stored."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from argosy.data.batch import Batches
from argosy.data.tokenizers.load import Tokenizer
from argosy.models.parts.stack import layer_addresses
from argosy.models.parts.weight import count, fill
from argosy.ops.op import implementations
from argosy.parallel.gather import Once
from argosy.parallel.place import batch_sharding, on_devices, place_batch
from argosy.parallel.scope import scope
from argosy.run.decided import Decided
from argosy.run.distillation.served import ServedTeacher
from argosy.run.distillation.teacher import Teacher
from argosy.run.frozen.role import Role
from argosy.run.memory import batch_shapes
from argosy.run.settings import Run
from argosy.train import diloco
from argosy.train.beside import parted
from argosy.train.guard import FLAG, begin, guarded, judged
from argosy.train.guard_settings import GuardSettings
from argosy.train.state import TrainState, flattened, meanings_of, trained, training_graph, unflattened
from argosy.train.step import make_evaluation, make_step

# Arrays of a checkpoint that a guard keeps begin so; these there are.
GUARD = "guard."
KEPT = tuple(begin(GuardSettings(nonfinite="skip", spike="skip")))


@dataclass
class Assembly:
    """Everything a run needs. No array exists until `start` or `restored` creates a state."""

    run: Run
    decided: Decided
    mesh: Mesh
    tokenizer: Tokenizer | None
    batches: Batches
    evals: Batches | None
    model: Any
    graph: Any
    optimizer: Any
    rate: Any
    shapes: TrainState
    places: TrainState
    # The contractions with adapters, and the addresses of the frozen weights under them, which checkpoints leave out.
    adapted: tuple[str, ...] = ()
    base: frozenset[str] = frozenset()
    # The addresses of the weights that are trained in full beside adapters.
    retrained: frozenset[str] = frozenset()
    # The factors of adapters that stay as they are under the trained ones, by address.
    beneath: dict[str, Any] = field(default_factory=dict)
    # Frozen models that steps read, by role; and their weights, once they are known.
    roles: dict[str, Role] = field(default_factory=dict)
    frozen: dict[str, Any] = field(default_factory=dict)
    # The model to learn from, in distillation.
    teacher: Teacher | ServedTeacher | None = None
    # The implementation of products with weights, and why it is not what was decided.
    multiplies: tuple[str, str] = ("xla", "")

    # ---------------------------------------------------------------- states

    def start(self) -> TrainState:
        """A state with random weights from the seed."""
        self.draw()
        _, params, rest = trained(self.model)
        return self.begin(params, rest)

    def draw(self) -> None:
        """Draws the weights that the model does not have yet from the seed."""
        places = self.places.params | self.places.rest
        fill(self.model, jax.random.key(self.run.seed), addresses=layer_addresses(self.model), place=places.__getitem__)

    def begin(self, params: dict[str, Any], rest: dict[str, Any], step: int = 0, optimizer: Any = None) -> TrainState:
        """A state with these weights, and a fresh optimizer unless one is given."""
        if optimizer is None:
            optimizer = jax.jit(self.optimizer.init, out_shardings=self.places.optimizer)(params)
        key = jax.random.key(self.run.seed)
        return TrainState(self._here(step), params, rest, optimizer, key, self._guard({}))

    def packed(self, state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state as a checkpoint stores it: weights except those of a base, and the rest, both {name: array}. The weights of parts
        beside the model are in the rest."""
        key = jax.random.key_data(state.key)
        weights = {address: leaf for address, leaf in (state.params | state.rest).items() if address not in self.base}
        weights, beside = parted(weights)
        kept = {f"{GUARD}{name}": a for name, a in state.guard.items() if name != FLAG}
        return weights, {"step": state.step, "key": key} | kept | beside | {
            f"optimizer.{name}": leaf for name, leaf in flattened(state.optimizer).items()
        }

    def restored(self, weights: dict[str, Any], arrays: dict[str, Any]) -> TrainState:
        """The state from what `packed` returned and the weights of the base, with arrays placed as `state_places` says."""
        arrays, beside = parted(arrays)
        weights = weights | beside
        optimizer = unflattened(self.shapes.optimizer, {k.removeprefix("optimizer."): v for k, v in arrays.items()})
        params = {a: weights[a] for a in self.shapes.params}
        rest = {a: weights[a] for a in self.shapes.rest}
        key = jax.random.wrap_key_data(arrays["key"])
        return TrainState(arrays["step"], params, rest, optimizer, key, self._guard(arrays))

    def state_places(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shardings of the arrays that `packed` returns."""
        everywhere = self.places.step
        # What a guard keeps may be there or not: its settings may change.
        state = {"step": everywhere, "key": everywhere} | {f"{GUARD}{name}": everywhere for name in KEPT}
        state |= {f"optimizer.{name}": place for name, place in flattened(self.places.optimizer).items()}
        weights, beside = parted(self.places.params | self.places.rest)
        return weights, state | beside

    def _here(self, number: Any) -> Any:
        return on_devices(np.asarray(number, np.int32), self.places.step)

    def _guard(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """What the guard keeps, from a checkpoint where it fits these settings, or from its beginning."""
        found = {name: (arrays.get(f"{GUARD}{name}"), first) for name, first in begin(self.run.guard).items()}
        fits = {name: a is not None and a.shape == first.shape for name, (a, first) in found.items()}
        # Losses and how many there are go together.
        fits = {name: fits[name] and fits.get("losses", True) for name in fits}
        return {name: a if fits[name] else on_devices(first, self.places.step) for name, (a, first) in found.items()}

    # ---------------------------------------------------------------- programs

    def compile(self) -> Any:
        """Compiles the update for these shapes; the state is donated, except the frozen weights of a base."""
        step = make_step(
            training_graph(self.model),
            self.run.objective,
            self.optimizer,
            self.rate,
            precision=self.decided.precision,
            accumulate=self.run.accumulate,
            roles=self.graphs,
            once=Once(self.places.params | self.places.rest) if self.run.execution.gather == "once" else None,
            stays=self._stays if self.run.execution.offload != "none" else None,
        )
        how = self.run.diloco
        step = guarded(diloco.alone(step), self.run.guard) if how.every else guarded(step, self.run.guard)
        step = diloco.together(step, how) if how.every else step
        if self.base:
            moving = replace(self.places, rest={a: p for a, p in self.places.rest.items() if a not in self.base})
            jitted = jax.jit(beside_base(step), donate_argnums=0, out_shardings=(moving, None))
            with self.tracing():
                lowered = jitted.lower(*apart(self.shapes, self.base), self.batch_shapes(), self.frozen_shapes)
                return BesideBase(lowered.compile(), self.base)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(self.places, None))
        with self.tracing():
            return jitted.lower(self.shapes, self.batch_shapes(), self.frozen_shapes).compile()

    def _stays(self, kept: Any, loss: Any, norm: Any) -> Any:
        return judged(kept, loss, norm, self.run.guard).stays

    def compile_evaluation(self) -> Any:
        evaluate = make_evaluation(self.graph, self.run.objective, precision=self.decided.precision, roles=self.graphs)
        with self.tracing():
            return jax.jit(evaluate).lower(self.shapes, self.batch_shapes(self.evals), self.frozen_shapes).compile()

    def with_frozen(self, program: Any) -> Any:
        """A compiled update or evaluation as a function of state and batch, with this run's frozen models."""
        return lambda state, batch: program(state, batch, self.frozen)

    @property
    def graphs(self) -> dict[str, Any]:
        """The graphs of frozen models by role."""
        return {name: role.graph for name, role in self.roles.items()}

    @property
    def frozen_shapes(self) -> dict[str, Any]:
        return {name: role.shapes for name, role in self.roles.items()}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Programs of this run are traced inside: under its mesh, with the implementations its settings name."""
        how = self.run.execution
        chosen = implementations(attention=how.attention, experts=how.experts, products=self.multiplies[0])
        with scope(self.mesh, self.run.mesh.table()), chosen:
            yield

    def batch_shapes(self, batches: Batches | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a training batch, or of one of others."""
        data, own = self.run.data, (batches or self.batches).sizes
        return batch_shapes(self.run.objective, data.batch, data.sequence, batch_sharding(self.mesh), own)

    def place(self, batch: Any) -> Any:
        """Puts a host batch onto the devices: the arrays that the step reads."""
        return self.place_fields({name: batch[name] for name in self.run.objective.reads()})

    def place_fields(self, batch: Any) -> Any:
        """Puts arrays of rows onto the devices."""
        return place_batch(batch, self.mesh)

    def close(self) -> None:
        """Stops the threads that read ahead."""
        self.batches.close()
        if self.evals is not None:
            self.evals.close()

    # ---------------------------------------------------------------- sizes

    @property
    def steps(self) -> int:
        """The steps of the run, or fewer if its epochs end before."""
        return scheduled_steps(self.run.steps, self.batches)

    @property
    def parameters(self) -> int:
        """The parameters of the model and of its adapters; those of a quantized base count as before."""
        if self.base:
            return self.run.model.parameters() + count(self._factors)
        return count(self.shapes.params) + count(self.shapes.rest)

    @property
    def flops_per_step(self) -> int:
        """FLOPs of the forward and backward pass; attention counts in full, although half of it is masked. Frozen weights have no
        gradient, which saves one of three passes over them; adapters have all three."""
        model, tokens = self.run.model, self.run.data.sequence
        if not self.base:
            return self.run.data.batch * model.training_flops(tokens)
        weights = model.flops(tokens) - model.mixing_flops(tokens)
        own = meanings_of(self.model)
        whole = sum(math.prod(self.shapes.params[a].shape) for a in self.retrained if own[a][0].inner)
        row = model.training_flops(tokens) - weights + tokens * (6 * count(self._factors) + 2 * whole)
        return self.run.data.batch * row

    @property
    def _factors(self) -> dict[str, Any]:
        """What is trained in adapters."""
        return {address: shape for address, shape in self.shapes.params.items() if address not in self.retrained}


def scheduled_steps(steps: int, batches: Batches) -> int:
    """The steps over which the learning rate is scheduled: those of the run, or fewer if its epochs end before. Otherwise a small file
    would end in the middle of a warm-up."""
    return min(steps, batches.summary().ends_after or steps)


def apart(state: TrainState, base: frozenset[str]) -> tuple[TrainState, dict[str, Any]]:
    """A state without the frozen weights of its base, and those."""
    moving = {a: leaf for a, leaf in state.rest.items() if a not in base}
    return replace(state, rest=moving), {a: state.rest[a] for a in base}


def beside_base(step: Any) -> Any:
    """A step that takes the base beside the state and does not return it: its arrays stay what they are."""

    def update(state: TrainState, base: dict[str, Any], batch: Any, frozen: Any) -> Any:
        new, metrics = step(replace(state, rest=state.rest | base), batch, frozen)
        return apart(new, frozenset(base))[0], metrics

    return update


@dataclass(frozen=True)
class BesideBase:
    """A compiled `beside_base`, called as a step of the whole state."""

    program: Any
    base: frozenset[str]

    def __call__(self, state: TrainState, batch: Any, frozen: Any = None) -> Any:
        moving, base = apart(state, self.base)
        new, metrics = self.program(moving, base, batch, frozen or {})
        return replace(new, rest=new.rest | base), metrics

    def memory_analysis(self) -> Any:
        return self.program.memory_analysis()
