"""Predicts the memory and the time of an engine's steps by compiling them for devices that may be absent.

The forward pass of each step is compiled as the engine calls it, with a cache of the size that the engine would have. The part of the
cache that an attention kernel reads depends on the sequences, and the experts that a grouped matmul reads depend on the tokens. So the
times of both are those of the analytic model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from argosy.infer.engine.batch import BatchBuilder, sampler_rows
from argosy.infer.engine.cache import CacheSize
from argosy.infer.forward.passes import OneProgram
from argosy.infer.forward.step import PageTables, StepSizes
from argosy.models.parts.attention.cache import layouts
from argosy.models.parts.attention.ragged import rows_share_pages
from argosy.observe.hlo.estimate import Prices, price_program
from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.products import kernel_name, uncounted_kernels
from argosy.parallel.scope import scope
from argosy.run.plan.compiled import collective_traffic, out_of_memory
from argosy.run.plan.serving import PlannedModel, ServingStep, StepKey, expert_seconds, step_work

# The kernel that reads pages in place, and the one that multiplies by experts.
PAGED, GROUPED = "ragged_paged_attention", "gmm"
CACHE, EXPERTS = "reading the cache", "experts"


@dataclass(frozen=True)
class CompiledServing:
    """The prediction of an engine's steps by the compiler.

    needed: the bytes on each device of the largest step, with its arguments; 0 if the compiler refuses it without naming a number.
    fits: whether the compiler accepts all steps.
    steps: the time of each step; empty if a step is refused.
    uncounted: the kernels whose work is unknown.
    unknown_loops: the number of loops whose length depends on data. Such a loop is counted as one iteration.
    """

    needed: int
    fits: bool
    steps: Mapping[StepKey, ServingStep]
    uncounted: Sequence[str] = ()
    unknown_loops: int = 0


def compiled_serving(model: PlannedModel, size: CacheSize, keys: Sequence[StepKey], prices: Prices) -> CompiledServing:
    """Compiles these steps of a model for its target, and predicts their memory and time."""
    needed, loops, steps, kernels = 0, 0, dict[StepKey, ServingStep](), set[str]()
    compiled: dict[StepSizes, Any] = {}
    for key in keys:
        sizes = step_sizes(model, key)
        if sizes not in compiled:
            try:
                compiled[sizes] = lowered_step(model, size, key).compile()
            except Exception as failure:
                asked_bytes = out_of_memory(failure)
                if asked_bytes is None:
                    raise
                return CompiledServing(asked_bytes, False, {})
        program = compiled[sizes]
        module = HloModule.read(program.as_text() or "")
        needed, loops = max(needed, _bytes_needed(program)), max(loops, len(module.unknown_loops))
        kernels |= set(uncounted_kernels(module))
        steps[key] = _price(model, module, step_work(model, *key, prices), prices)
    return CompiledServing(needed, True, steps, sorted(name for name in kernels if not name.startswith(PAGED)), loops)


def step_sizes(model: PlannedModel, key: StepKey) -> StepSizes:
    """Returns the array sizes for which the engine compiles a step."""
    decodes, prompt, _ = key
    needs = model.needs
    shares = rows_share_pages(needs.specs, needs.longest, slack=needs.longest)
    tables = PageTables(needs.page, needs.pages, tuple(needs.windows))
    with scope(model.mesh):
        builder = BatchBuilder(model.settings, tables, shares, model.config.width)
        return builder.decode_sizes(decodes) if decodes else builder.prompt_sizes(prompt)


def lowered_step(model: PlannedModel, size: CacheSize, key: StepKey) -> Any:
    """Traces and lowers the forward pass of a step for the devices of a model."""
    sizes, forward = step_sizes(model, key), OneProgram(model.module)
    with scope(model.mesh):
        caches = jax.eval_shape(lambda: model.needs.empty(model.settings.slots, size))
        caches = jax.tree.map(lambda a, spec: _shape_of(model, a, spec), caches, layouts(model.needs.specs, caches))
        weights = {at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=model.places[at]) for at, a in model.shapes.items()}
        counts = (model.settings.slots, sizes.words, sampler_rows(key[0] or 1))
        last, words, picked = (_shape_of(model, jax.ShapeDtypeStruct((n,), jnp.int32), PartitionSpec()) for n in counts)
        return forward.program(forward.step_kind).lower(weights, caches, (last, words), (picked,), sizes)


def _shape_of(model: PlannedModel, a: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(model.mesh, spec))


def _bytes_needed(program: Any) -> int:
    analysis = program.memory_analysis()
    parts = ("argument", "output", "temp", "generated_code")
    total = sum(int(getattr(analysis, f"{name}_size_in_bytes", 0) or 0) for name in parts)
    return total - int(getattr(analysis, "alias_size_in_bytes", 0) or 0)


def _price(model: PlannedModel, module: HloModule, estimate: ServingStep, prices: Prices) -> ServingStep:
    """Computes the time of a compiled step.

    Args:
        module: the compiled program.
        estimate: the time of the same step by the analytic model.
        prices: the speeds of the device.
    """
    count = model.target.count
    reading = next(seconds for kind, seconds in estimate.by_kind.items() if kind in (CACHE, "attention"))
    times = {computation.name: n for computation, n in module.running()}
    work = {PAGED: (reading, CACHE), GROUPED: (expert_seconds(model, estimate.decodes + estimate.prompt, prices), EXPERTS)}
    calls = {name: _calls(module, name) for name in work}
    priced = price_program(module, prices, count, {name: (work[name][0] / n, work[name][1]) for name, n in calls.items() if n})
    names = {"products": next(iter(estimate.by_kind)), "memory": "other instructions"}
    by_kind: dict[str, float] = {}
    for kind, seconds in priced.by_kind.items():
        by_kind[names.get(kind, kind)] = by_kind.get(names.get(kind, kind), 0.0) + seconds
    traffic = collective_traffic(priced.collectives, dict(model.mesh.shape), times)
    return ServingStep(estimate.decodes, estimate.prompt, by_kind, traffic)


def _calls(module: HloModule, kernel: str) -> int:
    """Counts how often a step calls a kernel.

    Args:
        kernel: the prefix of the kernel's name.
    """
    of = [(times, i) for c, times in module.running() for i in c.instructions if i.opcode == "custom-call"]
    return sum(times for times, i in of if kernel_name(i).startswith(kernel))
