"""Updates and evaluations of whole batches: one program computes one batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from argosy.parallel.compiler_options import compile_lowered
from argosy.parallel.gather import GatherOnce
from argosy.run.assembly.assembly import Assembly
from argosy.run.frozen.role import Role
from argosy.train import diloco
from argosy.train.ema import with_average
from argosy.train.guard import guard_step, judge_step
from argosy.train.state import TrainState, training_graph
from argosy.train.step import make_evaluation, make_step


@dataclass(frozen=True)
class BatchUpdates:
    """Updates by one program, which computes the gradient of a whole batch and updates the weights."""

    def roles(self, assembly: Assembly) -> Mapping[str, Role]:
        return assembly.roles

    def place(self, assembly: Assembly, batch: Any) -> Any:
        return assembly.place_fields({name: batch[name] for name in assembly.run.objective.reads()})

    def compile(self, assembly: Assembly) -> Any:
        def program(sizes: Mapping[str, int] | None) -> Any:
            compiled = compile_lowered(self.lower(assembly, sizes), assembly.compiler_options)
            return UpdateWithBase(compiled, assembly.adapters.base) if assembly.adapters.base else compiled

        return BucketPrograms(assembly.batches.buckets, program) if assembly.batches.buckets else program(None)

    def lower(self, assembly: Assembly, sizes: Mapping[str, int] | None = None) -> Any:
        """Traces and lowers the update, without compiling it.

        Args:
            sizes: as in `Assembly.batch_shapes`.
        """
        a, run, base = assembly, assembly.run, assembly.adapters.base

        def stays(guard: Any, loss: Any, norm: Any) -> Any:
            return judge_step(guard, loss, norm, run.guard).stays

        step = make_step(
            training_graph(a.model),
            run.objective,
            a.optimizer,
            a.rate,
            precision=a.decided.precision,
            accumulate=run.accumulate,
            roles=_graphs(a),
            gather=GatherOnce(a.places.params | a.places.rest) if run.execution.gather == "once" else None,
            stays=stays if run.execution.offload != "none" else None,
        )
        step = with_average(step, run.ema)
        step = guard_step(diloco.alone(step), run.guard) if run.diloco.every else guard_step(step, run.guard)
        step = diloco.together(step, run.diloco) if run.diloco.every else step
        if base:
            moving = replace(a.places, rest={name: p for name, p in a.places.rest.items() if name not in base})
            jitted = jax.jit(_with_base(step), donate_argnums=0, out_shardings=(moving, None))
            with a.tracing():
                return jitted.lower(*split_base(a.shapes, base), a.batch_shapes(sizes), _frozen_shapes(a))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(a.places, None))
        with a.tracing():
            return jitted.lower(a.shapes, a.batch_shapes(sizes), _frozen_shapes(a))


def compile_evaluation(assembly: Assembly) -> Any:
    """Compiles the evaluation (state, batch, frozen weights) -> {name of a metric: sum and weight}."""
    a = assembly
    evaluate_state = make_evaluation(a.graph, a.run.objective, precision=a.decided.precision, roles=_graphs(a))

    def evaluate(state: TrainState, batch: Any, frozen: Any) -> Any:
        return evaluate_state(replace(state, params=state.inference_params), batch, frozen)

    def program(sizes: Mapping[str, int]) -> Any:
        with a.tracing():
            return jax.jit(evaluate).lower(a.shapes, a.batch_shapes(sizes), _frozen_shapes(a)).compile()

    assert a.evals is not None
    return BucketPrograms(a.evals.buckets, program) if a.evals.buckets else program(a.evals.sizes)


class BucketPrograms:
    """The compiled programs for batches of several sizes (buckets), called like one program. The program of the largest bucket, which
    needs the most memory, is compiled at once. Every other one is compiled before the first batch of its bucket.

    Args:
        buckets: the sizes of each bucket, by the letters of their axes; the largest bucket comes first.
        compile: (sizes) -> the compiled program.
    """

    def __init__(self, buckets: tuple[Mapping[str, int], ...], compile: Callable[[Mapping[str, int]], Any]):
        self.sizes = {(axes["h"], axes["w"]): axes for axes in buckets}
        self.compile, self.largest = compile, compile(buckets[0])
        self.programs = {next(iter(self.sizes)): self.largest}

    def __call__(self, state: TrainState, batch: Any, frozen: Any = None) -> Any:
        size = batch["images"].shape[1:3]
        if size not in self.programs:
            self.programs[size] = self.compile(self.sizes[size])
        return self.programs[size](state, batch, frozen or {})

    def memory_analysis(self) -> Any:
        return self.largest.memory_analysis()

    def as_text(self) -> str:
        return self.largest.as_text()


def _graphs(assembly: Assembly) -> dict[str, Any]:
    return {name: role.graph for name, role in assembly.roles.items()}


def _frozen_shapes(assembly: Assembly) -> dict[str, Any]:
    return {name: role.shapes for name, role in assembly.roles.items()}


# ---------------------------------------------------------------- adapters over a frozen base


def split_base(state: TrainState, base: frozenset[str]) -> tuple[TrainState, dict[str, Any]]:
    """Splits a state into the state without the frozen base weights, and these weights by parameter name."""
    moving = {a: leaf for a, leaf in state.rest.items() if a not in base}
    return replace(state, rest=moving), {a: state.rest[a] for a in base}


def _with_base(step: Any) -> Any:
    """Makes a step that takes the base weights as a separate argument and does not return them, so that their arrays are not copied."""

    def update(state: TrainState, base: dict[str, Any], batch: Any, frozen: Any) -> Any:
        new, metrics = step(replace(state, rest=state.rest | base), batch, frozen)
        return split_base(new, frozenset(base))[0], metrics

    return update


@dataclass(frozen=True)
class UpdateWithBase:
    """A compiled update that takes the base weights as a separate argument, called like an update of the whole state.

    program: the compiled update (state without the base, base, batch, frozen weights).
    base: the parameter names of the base weights.
    """

    program: Any
    base: frozenset[str]

    def __call__(self, state: TrainState, batch: Any, frozen: Any = None) -> Any:
        moving, base = split_base(state, self.base)
        new, metrics = self.program(moving, base, batch, frozen or {})
        return replace(new, rest=new.rest | base), metrics

    def memory_analysis(self) -> Any:
        return self.program.memory_analysis()

    def as_text(self) -> str:
        return self.program.as_text()
