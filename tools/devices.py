"""What each device computes, stores and sends in a training step as devices are added: the table of docs/reference/devices.md,
and the figures that the laws assert. Programs are compiled, not run.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from argosy.models import FAMILIES
from argosy.models.parts.stack import Execution, Scan, Unroll
from argosy.models.parts.stack.pipeline import Pipeline
from argosy.models.parts.weight import abstract, logical
from argosy.observe.hlo import Cost, cost
from argosy.parallel.gather import GatherOnce
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.place import batch_sharding, like_weights
from argosy.parallel.rules import DEFAULT, shardings
from argosy.parallel.scope import scope
from argosy.train.objectives.next_token import NextToken
from argosy.train.offload import pieces_for, places_on_host, weights_on_host
from argosy.train.optimizers.sgd import SGD
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, meanings_of, split_trained, training_graph
from argosy.train.step import Precision, make_step

ROWS, LENGTH = 16, 64
COMMON: dict[str, Any] = {"vocab": 512, "width": 64, "layers": 2, "context": 256}
EXPERTS = {"count": 8, "active": 2, "ffn": 64}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "llama", "ffn": 256, "heads": 8, "kv_heads": 4, "head_size": 16},
    "experts": {"family": "mixtral", "ffn": 64, "heads": 8, "kv_heads": 4, "head_size": 16, "moe": EXPERTS},
    "latent attention": {
        "family": "deepseek",
        "ffn": 256,
        "heads": 8,
        "head_size": 16,
        "rope_size": 8,
        "value_size": 16,
        "latent_rank": 32,
        "query_rank": 32,
        "dense": 1,
        "moe": EXPERTS | {"score": "sigmoid", "group_strength": "max"},
    },
    "delta nets": {
        "family": "qwen3_next",
        "ffn": 256,
        "heads": 8,
        "kv_heads": 4,
        "head_size": 16,
        "pattern": "RG",
        "delta": {"key_heads": 8, "value_heads": 8, "key_size": 16, "value_size": 16},
        "moe": EXPERTS | {"shared": 64, "shared_gate": True},
    },
}
MESHES: dict[str, dict[str, int]] = {
    "1": {"data": 1, "fsdp": 1},
    "fsdp 2": {"data": 1, "fsdp": 2},
    "fsdp 4": {"data": 1, "fsdp": 4},
    "fsdp 8": {"data": 1, "fsdp": 8},
    "data 2, fsdp 2, tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp 2, tensor 4": {"data": 1, "fsdp": 2, "tensor": 4},
    "context 2": {"data": 1, "fsdp": 1, "context": 2},
    "context 4": {"data": 1, "fsdp": 1, "context": 4},
    "fsdp 2, context 2, tensor 2": {"data": 1, "fsdp": 2, "context": 2, "tensor": 2},
}
# Of the models with experts, beside those.
EXPERT_MESHES: dict[str, dict[str, int]] = {
    "expert 2": {"fsdp": 1, "expert": 2},
    "expert 4": {"fsdp": 1, "expert": 4},
    "expert 8": {"fsdp": 1, "expert": 8},
    "fsdp 2, expert 2, tensor 2": {"fsdp": 2, "expert": 2, "tensor": 2},
}
# Deeper models over stages, in so many microbatches.
STAGED_LAYERS, MICROBATCHES = 8, 8
STAGED: dict[str, dict[str, int]] = {
    "1": {"data": 1, "fsdp": 1},
    "stage 2": {"data": 1, "fsdp": 1, "stage": 2},
    "stage 4": {"data": 1, "fsdp": 1, "stage": 4},
    "stage 2, data 2, tensor 2": {"data": 2, "fsdp": 1, "tensor": 2, "stage": 2},
    "stage 2, fsdp 2, tensor 2": {"data": 1, "fsdp": 2, "tensor": 2, "stage": 2},
}


def config_of(name: str, **sizes: Any) -> Any:
    sizes = COMMON | MODELS[name] | sizes
    return FAMILIES[sizes.pop("family")](**sizes)


def staged_cost(config: Any, sizes: dict[str, Any]) -> Cost:
    """The cost of a step whose layers are scanned, and split over the stages of the mesh if it has some."""
    stages = sizes.get("stage", 1)
    return step_cost(config, sizes, run=Scan() if stages == 1 else Pipeline(stages, MICROBATCHES))


def step_cost(config: Any, sizes: dict[str, Any], rows: int = ROWS, run: Execution | None = None) -> Cost:
    """The cost of a model's training step over a mesh, per device. run: how the layers run; default: unrolled."""
    count = 1
    for n in sizes.values():
        count *= n
    return cost(lowered_step(config.build(run or Unroll()), MeshSettings(**sizes).build(jax.devices()[:count]), rows, LENGTH).compile())


def lowered_step(
    model: Any,
    mesh: Mesh,
    rows: int,
    length: int,
    precision: Precision = "float32",
    accumulate: int = 1,
    gather: str = "each",
    optimizer: Any = None,
    offload: str = "none",
) -> jax.stages.Lowered:
    """A training step of a model over a mesh, whose devices may be described. Nothing is stored on them.

    Args:
        optimizer: its settings; default: SGD.
        offload: what is in the host's memory (`Execution.offload`).
    """
    _, params, rest = split_trained(model)
    rate = Constant(warmup=0).build(10)
    shapes = abstract(model)
    weights = shardings(logical(model), {a: s.shape for a, s in shapes.items()}, DEFAULT, mesh)
    settings = optimizer or SGD(learning_rate=1e-2)
    offloads = offload != "none"
    pieces = pieces_for(settings, meanings_of(model), shapes, weights) if offloads else None
    optimizer = settings.build(rate, meanings_of(model), pieces)
    state = jax.eval_shape(
        lambda params, rest: TrainState.start(params, rest, optimizer.init(params), 0),
        {a: shapes[a] for a in params},
        {a: shapes[a] for a in rest},
    )
    places = like_weights(state, weights, shapes, mesh)
    if offloads:
        places = replace(places, optimizer=places_on_host(places.optimizer, state.optimizer, state.params))
    if offload == "weights":
        places = replace(places, params=weights_on_host(places.params, meanings_of(model)))
    described = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), state, places)
    goal = NextToken(head="logits")
    batch = {
        name: jax.ShapeDtypeStruct((rows, length), jnp.dtype(f.dtype), sharding=batch_sharding(mesh))
        for name, f in goal.reads().items()
    }
    options: dict[str, Any] = {"accumulate": accumulate, "gather": GatherOnce(weights) if gather == "once" else None}
    if offloads:
        options["stays"] = lambda *_: jnp.zeros((), bool)
    step = make_step(training_graph(model), goal, optimizer, rate, precision=precision, **options)
    with scope(mesh):
        return jax.jit(step, donate_argnums=0, out_shardings=(places, None)).lower(described, batch)


def table() -> str:
    """A Markdown table with a row for each kind of model and each mesh."""
    lines = [
        "| model | mesh | GFLOP | temporaries, kB | state and batch, kB | collectives, kB | of which |",
        "|---|---|---|---|---|---|---|",
    ]
    models = {name: config_of(name) for name in MODELS}
    experts = models["experts"]
    models["experts, capacity 1.25"] = experts.model_copy(update={"moe": experts.moe.model_copy(update={"capacity": 1.25})})
    for name, config in models.items():
        for mesh, sizes in (MESHES | EXPERT_MESHES if name.startswith("experts") else MESHES).items():
            c = step_cost(config, sizes)
            kinds = ", ".join(f"{kind} {n / 1e3:,.0f}" for kind, n in sorted(c.collectives.items()))
            kb = [f"{n / 1e3:,.0f}" for n in (c.temporary_bytes, c.argument_bytes, c.collective_bytes)]
            lines.append(f"| {name} | {mesh} | {c.flops / 1e9:.3f} | {' | '.join(kb)} | {kinds} |")
    return "\n".join(lines)


def staged_table() -> str:
    """A Markdown table with a row for each mesh with stages."""
    lines = [
        "| model | mesh | products, GFLOP | temporaries, kB | state and batch, kB | collectives, kB | of which |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("dense", "experts"):
        for mesh, sizes in STAGED.items():
            c = staged_cost(config_of(name, layers=STAGED_LAYERS), sizes)
            kinds = ", ".join(f"{kind} {n / 1e3:,.0f}" for kind, n in sorted(c.moved.items()))
            kb = [f"{n / 1e3:,.0f}" for n in (c.temporary_bytes, c.argument_bytes, sum(c.moved.values()))]
            lines.append(f"| {name} | {mesh} | {c.products / 1e9:.3f} | {' | '.join(kb)} | {kinds} |")
    return "\n".join(lines)
