"""Predicts the memory of a training run before its first step: first an estimate from shapes, then the compiler's number.

    parameters, gradients, optimizer   exact, from shapes
    activations    arrays that the backward pass keeps: estimated by tracing the loss (0.1 s), then XLA's number
    replay         the copy of the state from which a step is repeated (`guard.replay`)
    checkpoint     the copy that is written during the next steps, which is in host memory, so it counts on CPUs only
    process        Python, the libraries and the compiler, which count on CPUs only

CPU devices share the machine's memory, so their needs are added. Each accelerator has its own memory.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax

from argosy.adapt.lora import dropping
from argosy.core.errors import BadInput
from argosy.models.parts.stack import Scan
from argosy.models.parts.weight import abstract
from argosy.observe.memory import resident_bytes
from argosy.observe.readable import format_bytes
from argosy.ops.op import implementations
from argosy.parallel.place import row_shares
from argosy.parallel.target import Target
from argosy.rl.policy.critic import attach_critic
from argosy.train.beside import CRITIC
from argosy.train.objectives.distillation import projection
from argosy.train.objectives.distillation.teacher import ROLE
from argosy.train.offload import HOST
from argosy.train.state import split_trained, training_graph
from argosy.train.step import model_for

KINDS = ("parameters", "gradients", "optimizer", "activations", "replay", "checkpoint", "process")
# Tokens of the traced sequence.
TRACED = 1024
# The smallest share of the traced activations that XLA keeps; measured 0.74 to 4.3, docs/log.
TRUST = 0.6
# A process that keeps what it frees grows to 1.25 times its size; measured, docs/log.
KEEPING = 1.5


@dataclass(frozen=True)
class Need:
    """The memory that a run needs on one device, or on all devices together if they share the machine's memory.

    sizes: the need in bytes, by kind.
    limit: the available bytes; None if unknown.
    where: the name of the memory, for messages.
    changes: the settings that reduce the need, for messages.
    shared: whether the devices share the machine's memory.
    host: the bytes that this machine's accelerators keep in host memory.
    host_limit: the size of the host memory in bytes; None if unknown.
    """

    sizes: dict[str, int]
    limit: int | None
    where: str
    changes: str
    shared: bool = False
    host: int = 0
    host_limit: int | None = None

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    @property
    def leaves_room(self) -> bool:
        """Whether the machine has enough memory for the allocator to keep freed blocks (`core.process.allocator`). False for
        accelerators, which do not allocate with malloc.
        """
        return self.shared and self.limit is not None and self.total * KEEPING <= self.limit

    def document(self) -> dict[str, int]:
        """Returns the bytes by kind and in total, as a JSON object."""
        sizes = {kind: self.sizes[kind] for kind in KINDS if kind in self.sizes} | {"total": self.total}
        return sizes | ({"host": self.host} if self.host else {})

    def check(self) -> None:
        """Checks that there is enough memory.

        Raises:
            BadInput: there is too little memory. The message gives sizes by kind, and settings to change.
        """
        if self.host_limit is not None and self.host > self.host_limit:
            host, limit = format_bytes(self.host), format_bytes(self.host_limit)
            problem = f"execution.offload keeps {host} in the host's memory, and this machine has {limit}"
            raise BadInput(problem, hint="execution.offload=optimizer or none; mesh.fsdp=-1 over more machines")
        if self.limit is None or self.total <= self.limit:
            return
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.sizes.items() if size)
        problem = f"training needs {format_bytes(self.total)} of memory, and {self.where} has {format_bytes(self.limit)}"
        raise BadInput(problem, where=parts, hint=self.changes)


def estimated_need(
    run: Any,
    decided: Any,
    shapes: Any,
    places: Any,
    mesh: Any,
    target: Target,
    roles: Mapping[str, Any] = MappingProxyType({}),
    axis_sizes: Mapping[str, int] = MappingProxyType({}),
) -> Need:
    """Estimates the memory need before anything is compiled. It counts the smallest share of activations that XLA ever keeps, so a run
    that is refused here would certainly not fit.

    Args:
        shapes: the shapes of the training state.
        places: the shardings of the training state.
        roles: the frozen models by role (`run.frozen.role.Role`).
        axis_sizes: as in `batch_shapes`.
    """
    traced = 0
    if target.memory_bytes is not None:
        rows = run.data.batch // run.accumulate if run.rollout is None else run.rollout.rows_over(row_shares(mesh))
        arguments = (run.objective, decided.precision, run.execution.recompute)
        options: Any = {"adapter": run.adapter, "roles": roles, "axis_sizes": axis_sizes}
        with implementations(attention=requested_attention(run)):
            whole = activation_bytes(run.model, rows, run.data.sequence, *arguments, **options)
        traced = whole // (1 if target.shares_memory else mesh.size)
    state = state_bytes(shapes, places, mesh, target, roles)
    frozen = frozen_bytes(roles, mesh, target)
    need = _need(state, state["gradients"], int(TRUST * traced), run, mesh, target, frozen)
    return replace(need, host=host_bytes(shapes, places, mesh, target), host_limit=target.host_memory_bytes)


def requested_attention(run: Any) -> str | None:
    """Returns the implementation of attention that a run needs; None for the default of the device. Objectives that differentiate in
    forward mode need `reference`, because the other implementations have a custom backward pass."""
    attention = run.execution.attention
    return "reference" if attention is None and run.objective.needs.forward else attention


def compiled_need(assembly: Any, program: Any, there: Any = ()) -> Need:
    """Returns the memory need of a compiled update. XLA's temporaries are gradients and activations.

    Args:
        program: the compiled update.
        there: the arrays of the state and of frozen models that exist already. The other memory of the process is counted as `process`.
    """
    target = assembly.target
    state = state_bytes(assembly.shapes, assembly.places, assembly.mesh, target, assembly.roles)
    analysis = program.memory_analysis()
    times = assembly.mesh.size if target.shares_memory else 1
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "alias_size_in_bytes")
    argument, output, temp, alias = (int(getattr(analysis, name, 0) or 0) * times for name in sizes)
    rest = argument + output + temp - alias - state["parameters"] - state["optimizer"]
    trained = state["gradients"]
    state["gradients"] = min(trained, max(rest, 0))
    frozen = frozen_bytes(assembly.roles, assembly.mesh, target)
    activations = max(rest - state["gradients"], 0)
    need = _need(state, trained, activations, assembly.run, assembly.mesh, target, frozen, _bytes_here(there))
    return replace(need, host=host_bytes(assembly.shapes, assembly.places, assembly.mesh, target), host_limit=target.host_memory_bytes)


def activation_bytes(
    config: Any,
    rows: int,
    tokens: int,
    objective: Any,
    precision: Any,
    remat: Any,
    adapter: Any = None,
    roles: Mapping[str, Any] = MappingProxyType({}),
    axis_sizes: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Estimates the bytes of activations that the backward pass keeps for `rows` sequences of `tokens` tokens. The loss is traced, and
    all arrays that the backward pass needs are counted, before XLA fuses any of them.

    Layers are traced as a scan, which takes as long for 80 layers as for 2. Long sequences are extrapolated as a T + b T^2, because
    attention masks are created while tracing and would take 17 GB for 131k tokens.

    Args:
        config: the config of the model.
        precision: the compute type.
        remat: the setting `execution.recompute`.
        adapter: the settings of the adapter.
        roles: the frozen models by role (`run.frozen.role.Role`).
        axis_sizes: as in `batch_shapes`.
    """
    arguments = (config, rows, objective, precision, remat, adapter, roles, axis_sizes)
    if tokens <= 2 * TRACED:
        return _traced_bytes(tokens, *arguments)
    single, double = _traced_bytes(TRACED, *arguments), _traced_bytes(2 * TRACED, *arguments)
    n = tokens / TRACED
    b = max(0.0, (double - 2 * single) / 2)
    return int((single - b) * n + b * n * n)


def _traced_bytes(
    tokens: int,
    config: Any,
    rows: int,
    objective: Any,
    precision: Any,
    remat: Any,
    adapter: Any,
    roles: Mapping[str, Any],
    axis_sizes: Mapping[str, int],
) -> int:
    residuals, weights = _residuals(tokens, config, rows, objective, precision, remat, adapter, roles, axis_sizes)
    # The weights are among what is kept.
    return max(0, _bytes(residuals) - _bytes(weights))


def _residuals(
    tokens: int,
    config: Any,
    rows: int,
    objective: Any,
    precision: Any,
    remat: Any,
    adapter: Any,
    roles: Mapping[str, Any],
    axis_sizes: Mapping[str, int],
) -> tuple[Any, Any]:
    """Returns the shapes of all arrays that the backward pass keeps, and the shapes of the weights, which are among them."""
    model = config.build(Scan(remat))
    if adapter is not None and not adapter.trains_base:
        adapter.put_on(model)
    if CRITIC in objective.trained_parts:
        attach_critic(model, config, Scan(remat))
    if ROLE in roles:
        projection.attach(model, objective, roles)
    _, params, rest = split_trained(model)
    graph, shapes, batch = training_graph(model), abstract(model), batch_shapes(objective, rows, tokens, axis_sizes=axis_sizes)

    def residuals(params: Any, rest: Any, frozen: Any, batch: Any) -> Any:
        others = {role: model_for(roles[role].graph, precision, leaves) for role, leaves in frozen.items()}

        def loss(params: Any) -> Any:
            model = model_for(graph, precision, params, rest)
            dropping(model, jax.random.key(0))
            models = {"model": model} | others
            return objective(models, batch, jax.random.key(0)).loss.total

        return jax.vjp(loss, params)[1]

    param_shapes, rest_shapes = {a: shapes[a] for a in params}, {a: shapes[a] for a in rest}
    frozen = {role: of.shapes for role, of in roles.items()}
    return jax.eval_shape(residuals, param_shapes, rest_shapes, frozen, batch), (param_shapes, rest_shapes, frozen)


def saved_activations(assembly: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the activations that the backward pass of a run keeps for a micro-batch. They are global shapes, over all
    devices, as traced for the run's devices, before XLA fuses any of them."""
    run, decided = assembly.run, assembly.decided
    rows, arguments = run.data.batch // run.accumulate, (run.objective, decided.precision, run.execution.recompute)
    with assembly.tracing():
        residuals, weights = _residuals(
            run.data.sequence, run.model, rows, *arguments, run.adapter, assembly.roles, assembly.batches.sizes
        )
    there = Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(weights))
    out = []
    for leaf in jax.tree.leaves(residuals):
        if not hasattr(leaf.dtype, "itemsize"):
            continue
        if there[leaf.shape, leaf.dtype]:
            there[leaf.shape, leaf.dtype] -= 1
            continue
        out.append(leaf)
    return out


def batch_shapes(
    objective: Any, rows: int, tokens: int, place: Any = None, axis_sizes: Mapping[str, int] = MappingProxyType({})
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of the arrays that an objective reads, by name.

    Args:
        rows: the number of rows.
        tokens: the number of tokens in a row.
        place: the sharding of all arrays.
        axis_sizes: the sizes of axes that belong to one field, by letter. Axes that are not given have size 1.
    """
    return shapes_of(objective.reads(), rows, tokens, objective.rows_per_group, axis_sizes, place)


def shapes_of(
    fields: Any, rows: int, tokens: int, per_group: int, axis_sizes: Mapping[str, int], place: Any = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of the arrays of these fields. The arguments are those of `batch_shapes`.

    Args:
        per_group: the number of rows in a group.
    """
    sizes, out = {"B": rows, "T": tokens, **axis_sizes}, {}
    for name, field in fields.items():
        shape = [sizes.get(letter, 1) for letter in field.axes.split()]
        shape[0] //= per_group if field.per == "group" else 1
        out[name] = jax.ShapeDtypeStruct(tuple(shape), field.dtype, sharding=place)
    return out


def training_bytes(config: Any, tokens: int) -> dict[str, int]:
    """Estimates the bytes that training in float32 with AdamW takes on one sequence of `tokens` tokens: those of the state, and those
    of the activations for each value of `remat`.
    """
    from argosy.train.objectives import OBJECTIVES

    objective: Any = OBJECTIVES["next_token"]()
    of = SimpleNamespace(**{r: activation_bytes(config, 1, tokens, objective, "float32", r) for r in ("none", "full")})
    return {"state": 16 * config.parameters(), "activations": of.none, "activations_recomputed": of.full}


def state_bytes(shapes: Any, places: Any, mesh: Any, target: Target, roles: Mapping[str, Any]) -> dict[str, int]:
    """Computes the bytes of the training state by kind. The parameters of frozen models are counted too."""
    params = _total(shapes.params, places.params, mesh, target)
    rest = _total(shapes.rest, places.rest, mesh, target)
    return {
        "parameters": params + rest + frozen_bytes(roles, mesh, target),
        # They are on the device wherever the weights are.
        "gradients": _total(shapes.params, places.params, mesh, target, on_host=True),
        # The average of the weights counts as a part of it.
        "optimizer": _total((shapes.optimizer, shapes.ema), (places.optimizer, places.ema), mesh, target),
    }


def frozen_bytes(roles: Mapping[str, Any], mesh: Any, target: Target) -> int:
    """Bytes of the frozen models' own parameters, which no checkpoint of the run has."""
    unshared = [{a: s for a, s in role.shapes.items() if a not in role.shared} for role in roles.values()]
    return sum(_total(leaves, {a: s.sharding for a, s in leaves.items()}, mesh, target) for leaves in unshared)


def _total(shapes: Any, places: Any, mesh: Any, target: Target, on_host: bool = False) -> int:
    """Computes the bytes of arrays on one device, or on all devices if they share memory.

    Args:
        on_host: whether arrays that accelerators keep in host memory count too.
    """
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(places), strict=True)
    shared = target.shares_memory
    here = [(s, place) for s, place in pairs if shared or on_host or place.memory_kind != HOST]
    each = sum(math.prod(place.shard_shape(s.shape)) * s.dtype.itemsize for s, place in here)
    return each * (mesh.size if shared else 1)


def host_bytes(shapes: Any, places: Any, mesh: Any, target: Target) -> int:
    """Computes the bytes of a state in the memory of one host, over all accelerators of the host."""
    if target.shares_memory:
        return 0
    here = target.count // target.processes
    if target.is_here:
        here = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    states = [(shapes.params, places.params), (shapes.optimizer, places.optimizer)]
    return here * sum(_total(*pair, mesh, target, on_host=True) - _total(*pair, mesh, target) for pair in states)


def _bytes(tree: Any) -> int:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf.dtype, "itemsize")]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _bytes_here(tree: Any) -> int:
    """Computes the bytes of arrays on this process's devices. An array that occurs several times counts once."""
    each = {id(a): a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)}.values()
    return sum(shard.data.nbytes for a in each for shard in a.addressable_shards)


def _need(
    sizes: dict[str, int], trained: int, activations: int, run: Any, mesh: Any, target: Target, frozen: int, there: int = 0
) -> Need:
    limit, where = target.memory_bytes, "this machine" if target.shares_memory else f"each {target.kind}"
    sizes = sizes | {"activations": activations}
    if run.guard.replay:
        sizes["replay"] = trained + sizes["optimizer"]
    if target.shares_memory:
        # Gradients are as large as what is trained, which is what is saved.
        saved = sizes["parameters"] - frozen if run.adapter.trains_base else sizes["gradients"]
        sizes |= {"checkpoint": saved + sizes["optimizer"], "process": max(0, resident_bytes() - there)}
    changes = []
    if activations > sizes["parameters"]:
        changes.append("a smaller data.batch, or accumulate=N: the same update in N parts")
        if run.execution.recompute != "full":
            changes.append("execution.remat=full: layers computed twice instead of kept")
    else:
        changes.append("a smaller model")
        if mesh.size > 1 and not run.mesh.splits("fsdp"):
            changes.append("mesh.fsdp=-1: weights split over the devices")
        if run.execution.offload != "weights" and not target.shares_memory:
            next_offload = {"none": "optimizer: the optimizer's state", "optimizer": "weights: the weights of the layers too,"}
            changes.append(f"execution.offload={next_offload[run.execution.offload]} in the host's memory")
    return Need(sizes, limit, where, "; ".join(changes), target.shares_memory)
