"""Predicts a step by compiling it for devices that may be absent.

The compiler for TPUs refuses a step that does not fit into memory, after seconds. The compiler for CPUs reports the memory of a step
and refuses none.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from argosy.core.errors import BadInput
from argosy.observe.hlo.estimate import CollectiveTime, Prices, price_program
from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.products import uncounted_kernels
from argosy.observe.hlo.text import type_bytes
from argosy.observe.readable import format_bytes
from argosy.parallel.compiler_options import compile_lowered
from argosy.run.memory import compiled_need
from argosy.run.plan.figures import Buffer, Figures, Traffic
from argosy.run.plan.memory import memory_by_kind
from argosy.run.plan.nearest import nearest_fits
from argosy.run.plan.rollouts import update_assembly
from argosy.run.plan.speed import work_of

# A compiler's message about too little memory.
NEEDS = re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT])?\)|[Uu]sed ([\d.]+)([KMGT])? of ([\d.]+)([KMGT])? hbm")
UNITS = {None: 1, "": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
LARGEST = 8
# Parts of the names of operations that JAX adds.
ADDED = re.compile(r"(jit|jvp|transpose|vmap|checkpoint|closed_call|body|while)\b")
# Instructions whose result is another's.
ALIASES = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "constant", "copy-done")


def out_of_memory(error: BaseException) -> int | None:
    """Reads the bytes that a program needs from the error of a compiler that refuses it because it does not fit. Returns 0 if the error
    does not name the bytes, and None for other errors."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "Ran out of memory" not in text:
        return None
    match = NEEDS.search(text)
    if match is None:
        return 0
    number, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    return int(float(number) * UNITS[unit])


def compiled_figures(assembly: Any, prices: Prices | None, error: float) -> Figures:
    """Predicts the step of a run that is assembled for devices with a compiler.

    Args:
        prices: the speeds of the device; None: times are not predicted.
        error: the relative error of predicted times.
    """
    if assembly.run.rollout is not None:
        return _of_rollouts(assembly, prices, error)
    target, guess = assembly.target, memory_by_kind(assembly)
    try:
        program = compile_lowered(assembly.lower(), assembly.compiler_options)
    except Exception as failure:
        needed = out_of_memory(failure)
        if needed is None:
            raise
        memory = dict(guess)
        state = memory["parameters"] + memory["optimizer"]
        memory["temporaries"] += max(0, needed - (sum(memory.values()) - state))
        return Figures("compiler", memory, target.memory_bytes, False, error=error, buffers=state_buffers(assembly))
    module = HloModule.read(program.as_text() or "")
    memory = _memory(assembly, program, guess)
    fits = target.memory_bytes is None or sum(memory.values()) <= target.memory_bytes
    buffers = largest_buffers(module, assembly)
    if prices is None:
        return Figures("compiler", memory, target.memory_bytes, fits, buffers=buffers, error=error)
    if target.shares_memory:
        # Instructions of CPUs read what others left in the cache, so their bytes say little.
        work = work_of(assembly, prices)
        return Figures(
            "compiler", memory, target.memory_bytes, fits, sum(work.by_kind.values()), work.traffic, buffers, work.by_kind, error
        )
    priced = price_program(module, prices, assembly.mesh.size)
    times = {computation.name: n for computation, n in module.running()}
    traffic = collective_traffic(priced.collectives, dict(assembly.mesh.shape), times)
    return Figures(
        "compiler", memory, target.memory_bytes, fits, priced.compute_seconds, traffic, buffers, priced.by_kind, error,
        uncounted_kernels(module), len(module.unknown_loops),
    )  # fmt: skip


def _of_rollouts(assembly: Any, prices: Prices | None, error: float) -> Figures:
    """Predicts an update from rollouts on this machine: the memory from its compiled programs, and the time by the analytic model."""
    target = assembly.target
    memory = dict(compiled_need(assembly, assembly.compile()).sizes)
    fits = target.memory_bytes is None or sum(memory.values()) <= target.memory_bytes
    if prices is None:
        return Figures("compiler", memory, target.memory_bytes, fits, error=error)
    work = work_of(update_assembly(assembly), prices)
    seconds = sum(work.by_kind.values())
    return Figures("compiler", memory, target.memory_bytes, fits, seconds, work.traffic, (), work.by_kind, error)


def _memory(assembly: Any, program: Any, guess: dict[str, int]) -> dict[str, int]:
    """Returns bytes by kind, whose sum is what the compiler allocates. The state counts as in the analytic model. The rest is divided
    among kinds as the analytic model does, scaled down if its sum is too large.

    Args:
        guess: the bytes by kind by the analytic model.
    """
    if assembly.target.shares_memory:
        return dict(compiled_need(assembly, program).sizes)
    analysis = program.memory_analysis()
    sizes = {
        name: int(getattr(analysis, f"{name}_size_in_bytes", 0) or 0)
        for name in ("argument", "output", "alias", "temp", "generated_code")
    }
    state = {"parameters": guess["parameters"], "optimizer": guess["optimizer"]}
    rest = sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"] + sizes["generated_code"] - sum(state.values())
    moving = {kind: guess[kind] for kind in ("gradients", "activations", "gathered_weights")}
    total = sum(moving.values())
    if total > rest:
        moving = {kind: int(size * max(rest, 0) / total) for kind, size in moving.items()}
    return state | moving | {"temporaries": max(0, rest - sum(moving.values()))}


def state_buffers(assembly: Any) -> list[Buffer]:
    """Returns the largest arrays of the training state on a device."""
    params = assembly.shapes.params | assembly.shapes.rest
    places = assembly.places.params | assembly.places.rest
    buffers = []
    for address, shape in params.items():
        if not hasattr(shape, "shape"):
            continue
        shard_shape = places[address].shard_shape(shape.shape)
        buffers.append(Buffer(address, f"{shape.dtype}{list(shard_shape)}", math.prod(shard_shape) * shape.dtype.itemsize))
    return sorted(buffers, key=lambda buffer: -buffer.bytes)[:LARGEST]


def largest_buffers(module: HloModule, assembly: Any) -> list[Buffer]:
    """Returns the largest arrays that a program makes on a device, named by the operation that makes them. Each shape is listed
    once."""
    fused = {name for c in module.computations.values() for i in c.instructions if i.opcode == "fusion" for _, name in i.called()}
    buffers: dict[str, Buffer] = {}
    for computation, _ in module.running():
        if computation.name in fused:
            continue
        for instruction in computation.instructions:
            if instruction.opcode in ALIASES or instruction.type.startswith("("):
                continue
            plain = re.sub(r"\{[^}]*\}", "", instruction.type)
            if plain not in buffers:
                buffers[plain] = Buffer(_readable(instruction.op_name) or instruction.name, plain, type_bytes(plain))
    return sorted(buffers.values(), key=lambda buffer: -buffer.bytes)[:LARGEST]


def _readable(op_name: str) -> str:
    """Shortens JAX's name of an operation by removing what JAX adds to it."""
    parts = [part for part in op_name.split("/") if part and not ADDED.match(part)]
    where = "layers: " if "/while/" in op_name else ""
    return where + "/".join(parts[-2:]) + (" (backward)" if "transpose(jvp" in op_name else "")


def collective_traffic(timed: Iterable[CollectiveTime], mesh: dict[str, int], times: dict[str, int]) -> list[Traffic]:
    """Groups collectives by kind and mesh axes, in descending order of exposed time.

    Args:
        mesh: the sizes of the mesh axes, by name.
        times: the number of times that each computation of the program runs, by name.
    """
    groups: dict[tuple[str, str], list[CollectiveTime]] = defaultdict(list)
    for timing in timed:
        axis = "x".join(timing.collective.axes(mesh)) or "several"
        groups[timing.collective.kind, axis].append(timing)
    out = []
    for (kind, axis), members in groups.items():
        size = sum(m.collective.bytes * m.collective.times for m in members)
        asynchronous = sum(m.collective.bytes * m.collective.times for m in members if m.collective.asynchronous)
        seconds, exposed = (
            sum(getattr(m, name) * m.collective.times for m in members) for name in ("seconds", "exposed_seconds")
        )
        count = sum(m.collective.times for m in members)
        out.append(Traffic(kind, axis, size, count, seconds, exposed, asynchronous / size if size else 0.0))
    return sorted(out, key=lambda traffic: -traffic.exposed_seconds)


def compile_update(assembly: Any) -> Any:
    """Compiles the update of a run.

    Raises:
        BadInput: the compiler refuses the update because it does not fit into the memory of a device. The message names the largest
            arrays, and settings that fit.
    """
    try:
        return assembly.compile()
    except Exception as failure:
        needed = out_of_memory(failure)
        if needed is None:
            raise
        raise memory_refusal(assembly, needed) from None


def memory_refusal(assembly: Any, needed: int) -> BadInput:
    """Makes the error of a run whose step does not fit into memory.

    Args:
        needed: the bytes that the compiler asks for; 0 if unknown.
    """
    target = assembly.target
    request = f"; the compiler asks for {format_bytes(needed)} beside the state" if needed else ""
    has = f", which has {format_bytes(target.memory_bytes)}" if target.memory_bytes else ""
    largest = ", ".join(f"{buffer.name} {format_bytes(buffer.bytes)}" for buffer in state_buffers(assembly)[:3])
    ways = " or ".join(" ".join(change.words) for change in nearest_fits(assembly))
    return BadInput(
        f"the training step does not fit on a device ({target.kind}){has}{request}",
        where=f"largest of the state: {largest}",
        hint=f"{ways} fits, by an estimate" if ways else "a smaller model, a smaller data.batch, or more devices",
    )
