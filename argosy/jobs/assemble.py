"""Builds everything a training run needs from its settings, before anything is written: model, data, optimizer, compiled step.

"auto" is decided here from the devices, and stored with the run: a run that resumes elsewhere keeps its first choice, because
scan and unroll agree only to rounding.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from argosy.adapt.base import base_addresses, lay, retrained
from argosy.adapt.settings import Dora
from argosy.core.counts import plural
from argosy.core.errors import BadInput, Unsupported, mistakes_of, refuse
from argosy.core.settings import Choice
from argosy.data import pipeline
from argosy.data.across import FIELDS as OF_BOTH
from argosy.data.batch import Batches
from argosy.data.sources import RowSource
from argosy.data.tokenize import Tokenizer
from argosy.jobs import diloco as replicas
from argosy.jobs import reference, teacher_cache
from argosy.jobs.across import Both, is_across
from argosy.jobs.address import is_endpoint
from argosy.jobs.frozen import Role
from argosy.jobs.memory import batch_shapes, estimated_need
from argosy.jobs.offload import check_offload
from argosy.jobs.preflight import check_experts
from argosy.jobs.products import products_of
from argosy.jobs.run import Run
from argosy.jobs.served import Served
from argosy.jobs.stages import check_groups, execution
from argosy.jobs.teacher import ROLE as TEACHER
from argosy.jobs.teacher import Teacher
from argosy.jobs.teacher import kind_of as taught
from argosy.models.parts.remat import check_kept
from argosy.models.parts.stack import Execution, Scan, Unroll, layer_addresses
from argosy.models.parts.weight import Choosing, abstract, count, fill, logical, variables
from argosy.ops.attention import IMPLEMENTATIONS as ATTENTION
from argosy.ops.choice import implementations
from argosy.ops.grouped import IMPLEMENTATIONS as EXPERTS
from argosy.ops.matmul import IMPLEMENTATIONS as PRODUCTS
from argosy.parallel.gather import Once
from argosy.parallel.place import batch_sharding, like_weights, on_devices, place_batch, row_shares, rows_here
from argosy.parallel.rules import shardings
from argosy.parallel.scope import scope
from argosy.rl.critic import PREFIX, attach
from argosy.train import diloco, projection
from argosy.train.beside import parted
from argosy.train.guard import FLAG, begin, guarded, judged
from argosy.train.guard_settings import GuardSettings
from argosy.train.offload import HOST, pieces_for, places_on_host, weights_on_host
from argosy.train.optim import scaled
from argosy.train.settings import OBJECTIVES
from argosy.train.state import TrainState, flattened, meanings_of, trained, training_graph, unflattened
from argosy.train.step import Precision, make_evaluation, make_step

# Arrays of a checkpoint that a guard keeps begin so; these there are.
GUARD = "guard."
KEPT = tuple(begin(GuardSettings(nonfinite="skip", spike="skip")))


@dataclass(frozen=True)
class Decided:
    """What "auto" means on these devices."""

    layers: Literal["unroll", "scan"]
    precision: Precision
    # The type of frozen weights under an adapter.
    base_dtype: Precision = "float32"
    # In how many arrays scanned layers are stored.
    rounds: int = 1

    @classmethod
    def here(cls, run: Run) -> "Decided":
        cpu = backend() == "cpu"
        layers, rounds = run.execution.run, run.execution.rounds
        if layers == "auto":
            layers = "unroll" if cpu and run.model.layers <= 32 and not run.mesh.splits("stage") and rounds == 1 else "scan"
        precision = run.precision
        if precision == "auto":
            precision = "float32" if cpu else "bfloat16"
        return cls(layers, precision, base_dtype(run) if precision == "bfloat16" else "float32", rounds)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.precision)

    def run(self, remat: Any) -> Execution:
        return Unroll(remat) if self.layers == "unroll" else Scan(remat, self.rounds)


def base_dtype(run: Run) -> Precision:
    """The type of frozen weights in a run that computes in bfloat16: bfloat16 if their file has no more bits, float32 otherwise, so
    that nothing is rounded."""
    if run.adapter.trains_base or not run.init.weights:
        return "float32"
    from argosy.checkpoint.stored import open_model

    weights = open_model(run.init.weights).weights
    return "bfloat16" if {str(weights.dtype(name)) for name in weights.names} == {"bfloat16"} else "float32"


def backend() -> str:
    """The platform that jax computes on.

    Raises:
        BadInput: the requested platform does not exist here.
    """
    try:
        return jax.default_backend()
    except RuntimeError as error:
        asked = f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}" if os.environ.get("JAX_PLATFORMS") else None
        reason = (str(error).splitlines() or ["no reason given"])[0][:200]
        raise BadInput(
            f"jax has no such device: {reason}", where=asked, hint="`argosy doctor` lists the devices there are"
        ) from None


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
    teacher: Teacher | Served | None = None
    # The implementation of products with weights.
    products: str = "xla"

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
        chosen = implementations(attention=how.attention, experts=how.experts, products=self.products)
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


def check_implementations(execution: Any) -> None:
    """Checks that the implementations that the settings name exist.

    Raises:
        UserError: one does not.
    """
    named = ((ATTENTION, execution.attention), (EXPERTS, execution.experts), (PRODUCTS, execution.products))
    refuse(mistakes_of(*(partial(registry.__getitem__, name) for registry, name in named if name is not None)))


def mesh_of(run: Run) -> Mesh:
    """The mesh of a run over the devices of this process.

    Raises:
        BadInput: it does not fit the devices, or the batch or the experts do not divide over it.
    """
    if run.rollout is not None:
        from argosy.jobs.rollout_engine import trainer_devices

        if run.mesh.splits("context"):
            raise Unsupported("mesh.context with rollouts is not built", hint="mesh.fsdp and mesh.tensor split their work")
        mesh = run.mesh.build(trainer_devices(run.rollout))
        check_experts(run.model, mesh.shape["expert"])
        return mesh
    mesh = run.mesh.build()
    check_experts(run.model, mesh.shape["expert"])
    shares, together = row_shares(mesh), run.objective.rows_per_group
    if run.data.batch % (shares * run.accumulate * together):
        raise BadInput(
            f"data.batch = {run.data.batch} does not divide over {plural(shares, 'device')}"
            + (f", accumulate = {run.accumulate}" if run.accumulate > 1 else "")
            + (f" and groups of {together} rows" if together > 1 else ""),
            hint=f"make it a multiple of {shares * run.accumulate * together}",
        )
    if (context := mesh.shape["context"]) > 1 and run.data.sequence % (2 * context):
        what = f"data.sequence = {run.data.sequence} does not divide into {2 * context} pieces, twice mesh.context"
        raise BadInput(what, hint=f"make it a multiple of {2 * context}")
    return mesh


def data_of(run: Run) -> tuple[Any, Tokenizer | None]:
    """The source of a run's data and its tokenizer.

    Raises:
        UserError: one of them is missing, or the tokenizer makes tokens that the model lacks.
    """
    source, tokenizer = pipeline.find(run.data), pipeline.tokenizer_for(run.data)
    is_text = not isinstance(source, RowSource)
    check_formats(run, source)
    return source, pipeline.fitting(tokenizer, run.data, run.model.vocab) if is_text else tokenizer


def prompts_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer of a run that learns from answers to prompts.

    Raises:
        BadInput: there is none.
    """
    tokenizer = pipeline.tokenizer_for(run.data)
    if tokenizer is None:
        raise BadInput("prompts are texts, and this data has no tokenizer", hint="data.tokenizer=FOLDER")
    return pipeline.fitting(tokenizer, run.data, run.model.vocab)


def check_formats(run: Run, source: Any) -> None:
    """Checks that the records of the data are what the objective trains on.

    Raises:
        BadInput: they are not, or the data has none.
    """
    from argosy.data.prepare import Prepared
    from argosy.data.sources import Source
    from argosy.data.sources.records import FORMATS, GROUPS

    if not isinstance(source, Source | Prepared):
        return
    found = source.format if isinstance(source, Source) else source.fingerprint.get("source.format", "text")
    wanted, name = getattr(run.objective, "trains_on", ()), Choice(OBJECTIVES).name_of(run.objective)
    where = f"data.source={run.data.source}"
    if wanted and found not in wanted:
        columns = " or ".join(" and ".join(f"`{c}`" for c in FORMATS[one][0]) for one in wanted)
        what = f"objective={name} trains on `{'` or `'.join(wanted)}` records, and this data is `{found}`"
        raise BadInput(what, where=where, hint=f"give records with {columns}; data.columns.NAME=COLUMN renames")
    if not wanted and found in GROUPS:
        others = {
            "preference": "data.columns.completion=chosen trains on the chosen answers; data.format=messages reads other columns",
            "kto": "data.format=completion reads the answers without their labels",
        }
        what = f"objective={name} trains on single texts, and this data is `{found}`"
        raise BadInput(what, where=where, hint=others.get(found, "objective=process_reward trains on it"))
    batch, least = run.data.batch // run.objective.rows_per_group, getattr(run.objective, "least_groups", 1)
    if batch < least:
        what = f"data.batch = {run.data.batch} holds {batch} example, and objective={name} estimates a divergence over the batch"
        raise BadInput(what, where=where, hint=f"make it at least {least * run.objective.rows_per_group}: two rows an example")


def scheduled(steps: int, batches: Batches) -> int:
    """The steps over which the learning rate is scheduled: those of the run, or fewer if its epochs end before. Otherwise a small file
    would end in the middle of a warm-up."""
    return min(steps, batches.summary().ends_after or steps)


def check_processes(run: Run) -> None:
    """Checks that a run of several processes asks for nothing that only one process can do.

    Raises:
        BadInput: it does.
    """
    if jax.process_count() == 1:
        return
    frozen = reference.kind_of(run.objective) or taught(run.objective)
    asked = {"rollouts": run.rollout is not None, "sample.every": run.sample.every, "a reference or a teacher": frozen}
    # Sums that are scattered over CPUs of several processes are wrong now and then (jax-ml/jax#40830).
    asked["mesh.stage on CPUs"] = run.mesh.splits("stage") and backend() == "cpu"
    if found := [name for name, is_asked in asked.items() if is_asked]:
        what = f"{' and '.join(found)}: not built over several processes yet"
        raise BadInput(what, hint="use the devices of one process")


def assemble(run: Run, decided: Decided, progress: Any = None) -> Assembly:
    """Checks and builds everything, without drawing or reading weights.

    Raises:
        UserError: a mistake in implementations, data, tokenizer, model, mesh, batch or memory.
    """
    backend()
    check_processes(run)
    parts: dict[str, Any] = {}
    refuse(
        mistakes_of(
            lambda: check_implementations(run.execution),
            lambda: parts.update(mesh=mesh_of(run)),
            lambda: parts.update(data=data_of(run) if run.rollout is None else (None, prompts_tokenizer(run))),
        )
    )
    mesh, (source, tokenizer) = parts["mesh"], parts["data"]
    replicas.check(run, mesh)
    if run.rollout is not None and taught(run.objective):
        from argosy.jobs.lessons import Tutored, lessons_of

        return _assembled(Tutored, run, decided, mesh, tokenizer, lessons_of(run, mesh, tokenizer), None)
    if run.rollout is not None:
        from argosy.jobs.reinforce import Reinforced, rollouts_of

        return _assembled(Reinforced, run, decided, mesh, tokenizer, rollouts_of(run, mesh, tokenizer), None)
    common: dict[str, Any] = {"vocab": run.model.vocab, "seed": run.seed, "progress": progress}
    share, shares = rows_here(mesh, run.data.batch)
    common |= {"process": share, "processes": shares, "source": source}
    teaching = taught(run.objective)
    if teaching == "cached":
        teacher_cache.check_settings(run)
    both = Both(run, tokenizer) if is_across(run.objective) else None
    fields = teacher_cache.asked_of_data(run.objective) if teaching == "cached" else reference.asked_of_data(run.objective)
    fields = {name: field for name, field in fields.items() if both is None or name not in OF_BOTH}
    common |= {"fields": fields, "rows_per_group": run.objective.rows_per_group}
    batches: Any = pipeline.build(run.data, tokenizer, **common)
    evals: Any = None
    if run.eval.batches and pipeline.holds_out(run.data, source):
        evals = pipeline.eval_batches(run.data, tokenizer, limit=run.eval.batches, **common)
    if reference.kind_of(run.objective) == "cached":
        batches, evals = reference.WithReference(batches), evals and reference.WithReference(evals)
    if teaching == "cached":
        batches, evals = (of and teacher_cache.WithTeacher(of, run.objective.top) for of in (batches, evals))
    if both is not None:
        batches, evals = both(batches), both(evals)
    return _assembled(Assembly, run, decided, mesh, tokenizer, batches, evals)


def _assembled(
    kind: type[Assembly], run: Run, decided: Decided, mesh: Mesh, tokenizer: Any, batches: Batches, evals: Batches | None
) -> Assembly:
    """What does not depend on where batches come from: the model, the optimizer, and whether they fit."""
    how = execution(run, decided, mesh)
    model = run.model.build(how)
    check_groups(model, mesh.shape["stage"], run.execution.rounds)
    check_kept(model, run.execution.keep)
    replicas.check_model(run, model, scheduled(run.steps, batches))
    if not (run.init.weights or run.init.state) and (
        drawn := [a for a, v in variables(model).items() if isinstance(v, Choosing)]
    ):
        raise BadInput(
            f"{plural(len(drawn), 'weight')} of the sparse-attention indexer would keep their random values: nothing trains them",
            hint="start from trained weights (init.weights=FOLDER), or leave the indexer out: model.index=none",
        )
    adapted, beneath = list[str](), dict[str, Any]()
    if not run.adapter.trains_base:
        laid = beneath_of(run)
        under = (lambda model: beneath.update(lay(model, laid))) if laid else None
        adapted = run.adapter.put_on(model, jnp.dtype(decided.base_dtype), under)
    base = frozenset(base_addresses(model)) if adapted else frozenset()
    whole = frozenset(retrained(model))
    critic = getattr(run.objective, "critic", None)
    if critic is not None:
        attach(model, run.model, how)
    roles: dict[str, Role] = {}
    teaching = taught(run.objective)
    served = teaching == "cached" and is_endpoint(run.objective.teacher)
    teacher: Any = None
    if teaching:
        teacher = Served(run, tokenizer) if served else Teacher(run, decided, mesh, tokenizer)
    if teacher is not None and teaching == "online":
        roles[TEACHER] = teacher.role
        projection.attach(model, run.objective, roles)
    graph, params, rest = trained(model)
    rate = run.schedule.build(scheduled(run.steps, batches))
    shapes = abstract(model)
    weights = shardings(logical(model), {a: s.shape for a, s in shapes.items()}, run.mesh.table(), mesh)
    offloads = run.execution.offload != "none"
    if offloads:
        check_offload(run, decided, mesh)
    pieces = pieces_for(run.optimizer, meanings_of(model), shapes, weights) if offloads else None
    optimizer = run.optimizer.build(rate, meanings_of(model), pieces)
    if critic is not None:
        optimizer = scaled(optimizer, PREFIX, critic.rate)
    if run.diloco.every:
        optimizer = diloco.around(optimizer, mesh.shape[diloco.AXIS])

    def described(leaf: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    state = jax.eval_shape(
        lambda params, rest: TrainState.start(params, rest, optimizer.init(params), 0, begin(run.guard)),
        {a: shapes[a] for a in params},
        {a: shapes[a] for a in rest},
    )
    places = like_weights(state, weights, shapes, mesh)
    if offloads:
        places = replace(places, optimizer=places_on_host(places.optimizer, state.optimizer, state.params))
        if run.execution.offload == "weights":
            places = replace(places, params=weights_on_host(places.params, meanings_of(model)))
        elif not any(place.memory_kind == HOST for place in jax.tree.leaves(places.optimizer)):
            what = f"{type(run.optimizer).__name__} keeps no arrays with these settings, so there is nothing to move to the host"
            raise BadInput(what, where="set by execution.offload", hint="execution.offload=none")
    if run.execution.gather == "once" and not Once(weights).gathers:
        raise BadInput("no weight is split over mesh.fsdp, so there is nothing to gather once", where="set by execution.gather")
    if run.diloco.every:
        places = replace(places, optimizer=diloco.places(state.optimizer, weights, shapes, mesh))
    stated = jax.tree.map(described, state, places)
    if reference.kind_of(run.objective) in ("online", "rollout"):
        beside = frozenset(a for a in shapes if a.startswith(PREFIX)) if critic is not None else frozenset()
        roles[reference.ROLE] = Role(graph, stated.params | stated.rest, base | beside)
    estimated_need(run, decided, state, places, mesh, roles).check()
    learning_rate = lambda step: run.optimizer.learning_rate * rate(step)  # noqa: E731
    return kind(
        run, decided, mesh, tokenizer, batches, evals, model, graph, optimizer, learning_rate,
        stated, places, tuple(adapted), base, whole, beneath, roles, teacher=teacher,
        products=products_of(run, decided.precision, mesh),
    )  # fmt: skip


def beneath_of(run: Run) -> Mapping[str, Any]:
    """The adapters of the base that stay as they are under a run's own ones, by the per-layer name of their contraction.

    Raises:
        BadInput: the base has adapters, and the run does not say what happens to them; or it says so, and there are none.
        Unsupported: DoRA on either side, adapters of a quantized base, or rollouts.
    """
    from argosy.checkpoint.stored import open_model

    onto, weights = run.adapter.onto, str(run.init.weights)
    if "://" not in weights and not Path(weights).exists():
        # A run that resumes says what is missing when it looks for its base.
        return {}
    under = open_model(weights).adapted
    if under is None:
        if onto is not None:
            raise BadInput(f"adapter.onto = {onto}, and {weights} has no adapters", hint="leave adapter.onto out")
        return {}
    if onto is None:
        hint = "adapter.onto=merge puts the new ones on their sum; adapter.onto=stack keeps them as they are under the new ones"
        raise BadInput(f"{weights} has adapters already", hint=hint)
    if onto == "merge":
        return {}
    merge = "adapter.onto=merge"
    if under.is_quantized:
        raise Unsupported("adapters of a quantized base cannot be stacked on: its rounding would be lost", hint=merge)
    if isinstance(run.adapter, Dora) or any(one.m is not None for one in under.adapters.values()):
        raise Unsupported("DoRA is not stacked: it scales the sum of all below it", hint=merge)
    if run.rollout is not None:
        raise Unsupported("rollouts with stacked adapters are not built", hint=merge)
    return under.adapters


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
