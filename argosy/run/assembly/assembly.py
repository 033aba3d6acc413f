"""The parts of a training run, with the functions that need several parts: training states, sizes, and the scope in which programs are
traced.

`run.assembly.assemble` builds the parts. Two of them depend on the kind of objective: `updates` turns a batch into an update, and
`rollouts` samples batches if the objective learns from samples.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from argosy.adapt.quant import Scheme
from argosy.data.batch import Batches
from argosy.data.tokenizers.load import Tokenizer
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, parameter_count
from argosy.ops.op import implementations, winners
from argosy.parallel.compiler_options import OPTIONS
from argosy.parallel.place import batch_sharding, on_devices, place_batch
from argosy.parallel.scope import scope
from argosy.parallel.target import Target
from argosy.run.assembly.decided import Decided
from argosy.run.assembly.products import ProductChoice
from argosy.run.assembly.winners import winners_of
from argosy.run.distillation.served import ServedTeacher
from argosy.run.distillation.teacher import Teacher
from argosy.run.frozen.perceptual_net import PerceptualNet
from argosy.run.frozen.pipeline_parts import FrozenPart
from argosy.run.frozen.role import Role
from argosy.run.memory import batch_shapes, requested_attention
from argosy.run.settings.run import Run
from argosy.train.beside import split_parts
from argosy.train.ema import RAW
from argosy.train.guard import FLAG, begin
from argosy.train.guard_settings import GuardSettings
from argosy.train.objectives.images.perceptual import PERCEPTUAL
from argosy.train.state import TrainState, flatten_state, meanings_of, split_trained, unflatten_state

if TYPE_CHECKING:
    from argosy.run.assembly.encoded import SamplePrompts
    from argosy.run.rl.parts import RolloutParts

# The prefix of a guard's arrays in a checkpoint, and the names of all of them.
GUARD = "guard."
GUARD_ARRAYS = tuple(begin(GuardSettings(nonfinite="skip", spike="skip")))


class Updates(Protocol):
    """Turns batches into updates."""

    def roles(self, assembly: "Assembly") -> Mapping[str, Role]:
        """Returns the frozen models that an update reads, by role."""
        ...

    def lower(self, assembly: "Assembly") -> Any:
        """Traces and lowers the update, without compiling it."""
        ...

    def compile(self, assembly: "Assembly") -> Any:
        """Compiles the update (state, batch, frozen weights) -> (state, metrics)."""
        ...

    def place(self, assembly: "Assembly", batch: Any) -> Any:
        """Moves a batch from the host to the devices."""
        ...


@dataclass(frozen=True)
class AdapterParts:
    """The adapters of a run. All fields are empty if there are none.

    contractions: the names of the matrix products with an adapter.
    base: the parameter names of the frozen base weights, which checkpoints leave out.
    retrained: the parameter names of the weights that are trained in full in addition to adapters.
    stacked: the factors of frozen adapters of the base, to which the trained adapters are added, by parameter name.
    schemes: the quantization of the base in its file, by the name of each layer's weight, if the quantized codes are kept. If empty,
        the base is converted to floats, which `adapter=qlora` quantizes again.
    """

    contractions: tuple[str, ...] = ()
    base: frozenset[str] = frozenset()
    retrained: frozenset[str] = frozenset()
    stacked: Mapping[str, Any] = field(default_factory=dict)
    schemes: Mapping[str, Scheme] = field(default_factory=dict)


@dataclass
class Assembly:
    """The parts of a run. No array exists until `start` or `restored` creates a state.

    run: the settings of the run.
    decided: the resolved "auto" settings.
    mesh: the mesh of devices.
    tokenizer: the tokenizer; None if the data are not text.
    batches: the training batches.
    evals: the evaluation batches; None without evaluation, or if rollouts evaluate.
    model: the module. Its weights are shapes until they are initialized or read.
    graph: the structure of the module without weights.
    adapters: the adapters.
    optimizer: the Optax transformation.
    rate: (step) -> the learning rate.
    shapes: the shapes of the arrays of the training state.
    places: the shardings of the arrays of the training state.
    updates: turns a batch into an update.
    products: the implementation of matrix products with weights.
    roles: the frozen models that steps read, by role.
    target: the devices that the run is built for.
    frozen: the weights of the frozen models by role, from when they are read.
    teacher: the teacher of a distillation run; otherwise None.
    parts: further frozen models by role: those of the diffusers folder that the trained model belongs to, or the network of a
        perceptual loss.
    rollouts: the parts of sampling, if batches are sampled from the run's own model; otherwise None.
    prompts: the prompts that a denoiser draws during training, encoded; None for other models.
    """

    run: Run
    decided: Decided
    mesh: Mesh
    tokenizer: Tokenizer | None
    batches: Batches
    evals: Batches | None
    model: Any
    graph: Any
    adapters: AdapterParts
    optimizer: Any
    rate: Any
    shapes: TrainState
    places: TrainState
    updates: Updates
    products: ProductChoice
    roles: dict[str, Role]
    target: Target
    teacher: Teacher | ServedTeacher | None = None
    parts: dict[str, FrozenPart | PerceptualNet] = field(default_factory=dict)
    rollouts: "RolloutParts | None" = None
    prompts: "SamplePrompts | None" = None
    frozen: dict[str, Any] = field(default_factory=dict)

    # ---------------------------------------------------------------- states

    def start(self) -> TrainState:
        """Makes a state with random weights from the run's seed."""
        self.draw()
        _, params, rest = split_trained(self.model)
        return self.begin(params, rest)

    def draw(self) -> None:
        """Initializes, in place, the weights that the model still lacks, from the run's seed."""
        places = self.places.params | self.places.rest
        fill(self.model, jax.random.key(self.run.seed), addresses=layer_addresses(self.model), place=places.__getitem__)

    def begin(self, params: dict[str, Any], rest: dict[str, Any], step: int = 0, optimizer: Any = None) -> TrainState:
        """Makes a state with these weights. The state of the optimizer is initialized unless it is given.

        Args:
            params: the trained weights, by parameter name.
            rest: all other weights, by parameter name.
            step: the number of updates so far.
            optimizer: the state of the optimizer.
        """
        if optimizer is None:
            optimizer = jax.jit(self.optimizer.init, out_shardings=self.places.optimizer)(params)
        key = jax.random.key(self.run.seed)
        number = on_devices(np.asarray(step, np.int32), self.places.step)
        # Arrays of their own: the next update donates both.
        ema = {a: w.copy() for a, w in params.items()} if self.run.ema.on else None
        return TrainState(number, params, rest, optimizer, key, self._guard({}), ema)

    def packed(self, state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Converts a state to the form that checkpoints store. Returns two mappings {name: array}.

        The first has the weights of the model, without the base under adapters. The second has everything else, such as the optimizer's
        state and the weights of auxiliary modules (a critic). If the run averages its weights, the first has the average, and the
        trained weights are in the second.
        """
        key, inference = jax.random.key_data(state.key), state.inference_params
        weights = {name: leaf for name, leaf in (inference | state.rest).items() if name not in self.adapters.base}
        weights, extras = split_parts(weights)
        extras |= {f"{RAW}{a}": w for a, w in state.params.items()} if self.run.averages else {}
        guard = {f"{GUARD}{name}": a for name, a in state.guard.items() if name != FLAG}
        return weights, {"step": state.step, "key": key} | guard | extras | {
            f"optimizer.{name}": leaf for name, leaf in flatten_state(state.optimizer).items()
        }

    def restored(self, weights: dict[str, Any], arrays: dict[str, Any]) -> TrainState:
        """Makes a state from the two mappings of `packed`, the first with the weights of the base added. The arrays must be sharded as
        `state_places` returns."""
        arrays, extras = split_parts(arrays)
        weights = weights | extras
        optimizer = unflatten_state(self.shapes.optimizer, {k.removeprefix("optimizer."): v for k, v in arrays.items()})
        params, ema = {a: weights[a] for a in self.shapes.params}, None
        if self.run.averages:
            params, ema = {a: arrays[f"{RAW}{a}"] for a in params}, params if self.run.ema.on else None
        rest = {a: weights[a] for a in self.shapes.rest}
        key = jax.random.wrap_key_data(arrays["key"])
        return TrainState(arrays["step"], params, rest, optimizer, key, self._guard(arrays), ema)

    def state_places(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the shardings of the arrays that `packed` returns."""
        everywhere = self.places.step
        # A checkpoint may lack a guard's arrays: its settings may change.
        state = {"step": everywhere, "key": everywhere} | {f"{GUARD}{name}": everywhere for name in GUARD_ARRAYS}
        state |= {f"optimizer.{name}": place for name, place in flatten_state(self.places.optimizer).items()}
        weights, extras = split_parts(self.places.params | self.places.rest)
        raw = {f"{RAW}{a}": place for a, place in self.places.params.items()} if self.run.averages else {}
        return weights, state | extras | raw

    def _guard(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the guard's arrays. They are those of a checkpoint if they fit the settings, otherwise the initial ones."""
        stored = {name: (arrays.get(f"{GUARD}{name}"), first) for name, first in begin(self.run.guard).items()}
        fits = {name: a is not None and a.shape == first.shape for name, (a, first) in stored.items()}
        # Losses and their number go together.
        fits = {name: fits[name] and fits.get("losses", True) for name in fits}
        return {name: a if fits[name] else on_devices(first, self.places.step) for name, (a, first) in stored.items()}

    # ---------------------------------------------------------------- programs

    @property
    def compiler_options(self) -> dict[str, str]:
        """The compiler options for steps."""
        return OPTIONS.get(self.target.platform, {}) if self.run.execution.compiler_options == "auto" else {}

    def compile(self) -> Any:
        """Compiles the update. It takes the state as donated, except for the frozen base weights."""
        return self.updates.compile(self)

    def lower(self) -> Any:
        """Traces and lowers the update without compiling it, for devices that may be absent."""
        return self.updates.lower(self)

    def with_frozen(self, program: Any) -> Any:
        """Binds this run's frozen models to a compiled update or evaluation. Returns a function of state and batch."""
        names = tuple(self.updates.roles(self))
        return lambda state, batch: program(state, batch, {name: self.frozen[name] for name in names})

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which programs of this run are traced: under its mesh, with the implementations of ops that its settings and
        `argosy autotune` chose."""
        attention, experts = requested_attention(self.run), self.run.execution.experts
        choices = implementations(attention=attention, experts=experts, products=self.products.name)
        with scope(self.mesh, self.run.mesh.table()), choices, winners(winners_of(self)):
            yield

    def batch_shapes(self, sizes: Mapping[str, int] | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of the arrays of a batch, by name.

        Args:
            sizes: the sizes of the axes that belong to one field, by letter; None: those of the training batches.
        """
        data, sizes = self.run.data, self.batches.sizes if sizes is None else sizes
        return batch_shapes(self.run.objective, data.batch, data.sequence, batch_sharding(self.mesh), sizes)

    def place(self, batch: Any) -> Any:
        """Moves the arrays of a batch that an update reads from the host to the devices."""
        return self.updates.place(self, batch)

    def place_fields(self, batch: Any) -> Any:
        """Moves arrays from the host to the devices, with their rows split over the devices."""
        return place_batch(batch, self.mesh)

    def close(self) -> None:
        """Stops the threads that prefetch data, and the processes that sample."""
        for part in (self.batches, self.evals, self.rollouts):
            if part is not None:
                part.close()

    # ---------------------------------------------------------------- sizes

    @property
    def steps(self) -> int:
        """The number of steps of the run: the setting `steps`, or fewer if the epochs end before."""
        return scheduled_steps(self.run.steps, self.batches)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model and of its adapters. A quantized base counts as if it were not quantized."""
        if self.adapters.base:
            return self.run.model.parameters() + parameter_count(self._factors)
        return parameter_count(self.shapes.params) + parameter_count(self.shapes.rest)

    @property
    def positions(self) -> int:
        """The number of positions in a row: tokens of a text, or patches of an image."""
        sizes = self.batches.sizes
        if self.run.model.inputs != "images":
            return self.run.data.sequence
        return sizes["h"] * sizes["w"] // self.run.model.size_multiple**2

    @property
    def flops_per_step(self) -> int:
        """The FLOPs of a forward and backward pass. Attention counts in full, although half of it is masked. Frozen weights have no
        gradient, so only two of three passes over them count; adapters count with all three."""
        model, tokens = self.run.model, self.positions
        if not self.adapters.base:
            net = self.parts.get(PERCEPTUAL)
            beside = net.training_flops(tokens) if isinstance(net, PerceptualNet) else 0
            return self.run.data.batch * (model.training_flops(tokens) + beside)
        weights = model.flops(tokens) - model.mixing_flops(tokens)
        meanings = meanings_of(self.model)
        whole = sum(math.prod(self.shapes.params[a].shape) for a in self.adapters.retrained if meanings[a][0].inner)
        row = model.training_flops(tokens) - weights + tokens * (6 * parameter_count(self._factors) + 2 * whole)
        return self.run.data.batch * row

    @property
    def _factors(self) -> dict[str, Any]:
        """Returns the trained weights of adapters, by parameter name."""
        return {address: shape for address, shape in self.shapes.params.items() if address not in self.adapters.retrained}


def scheduled_steps(steps: int, batches: Batches) -> int:
    """Returns the number of steps over which the learning rate is scheduled: the setting `steps`, or fewer if the epochs end before.
    Otherwise a run on a small file could end in the middle of its warm-up.
    """
    return min(steps, batches.summary().ends_after or steps)
