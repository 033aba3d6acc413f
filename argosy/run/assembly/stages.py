"""Chooses how the layers of a run are executed: as a scan, unrolled, or as a pipeline over the stages of the mesh."""

from typing import Any

from flax import nnx
from jax.sharding import Mesh

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.models.parts.stack import Execution, Stack, groups_of
from argosy.models.parts.stack.pipeline import AXIS, Pipeline
from argosy.parallel.place import row_shares

# Microbatches a stage, unless a setting says otherwise: a fifth of the time is idle.
EACH = 4


def execution(run: Any, decided: Any, mesh: Mesh) -> Execution:
    """Returns how the layers of a run are executed on this mesh.

    Raises:
        BadInput: the rows do not divide into microbatches, microbatches are set without stages, or the layers of stages or rounds are
            unrolled.
    """
    stages = mesh.shape[AXIS]
    if decided.rounds > 1 and decided.layers == "unroll":
        problem = f"execution.rounds = {decided.rounds} is of stacked layers, and these are a list (execution.run=unroll)"
        raise BadInput(problem, hint="execution.run=scan; a run that began with a list of layers keeps it")
    if stages == 1:
        if run.execution.microbatches is not None:
            hint = "leave it out, or write execution.microbatches=none; accumulate=N computes a batch in parts"
            raise BadInput("execution.microbatches is of a pipeline, and mesh.stage is 1", hint=hint)
        return decided.run(run.execution.recompute)
    if decided.layers == "unroll":
        hint = "execution.run=scan; a run that began with a list of layers keeps it"
        raise BadInput(f"mesh.stage = {stages} splits stacked layers, and these are a list (execution.run=unroll)", hint=hint)
    return Pipeline(stages, microbatches(run, mesh), run.execution.recompute, decided.rounds)


def microbatches(run: Any, mesh: Mesh) -> int:
    """Returns the number of microbatches of the pipeline, a multiple of the number of stages.

    Raises:
        BadInput: the rows do not divide into microbatches.
    """
    stages, shares, requested = mesh.shape[AXIS], row_shares(mesh), run.execution.microbatches
    rows = run.data.batch // run.accumulate // shares
    tried = [requested] if requested is not None else [stages * n for n in range(EACH, 0, -1)]
    for count in tried:
        if count % stages == 0 and rows % count == 0:
            return count
    if requested is not None and requested % stages:
        problem = f"execution.microbatches = {requested} is no multiple of mesh.stage = {stages}"
        hint = f"at least {stages}, and better {EACH * stages}: more of them leave stages idle for less of the time"
        raise BadInput(problem, hint=hint)
    each = run.accumulate * shares * (requested or stages)
    problem = f"data.batch = {run.data.batch} does not divide into {requested or stages} microbatches"
    problem += f" over {plural(shares, 'device')}" if shares > 1 else ""
    problem += f" and accumulate = {run.accumulate}" if run.accumulate > 1 else ""
    raise BadInput(problem, hint=f"make it a multiple of {each}")


def check_groups(model: nnx.Module, stages: int, rounds: int) -> None:
    """Checks that every stack of layers can be divided over all stages and rounds.

    Raises:
        BadInput: a stack cannot.
    """
    for path, stack in nnx.iter_modules(model):
        if not isinstance(stack, Stack) or not stack.run.stacked or stages == rounds == 1:
            continue
        repeats = [group.repeats for group in groups_of(stack.plan)]
        if not any(n % (stages * rounds) == 0 for n in repeats):
            most = max(repeats)
            fits = [n for n in range(2, most + 1) if any(m % n == 0 for m in repeats)]
            layout = f"mesh.stage = {stages}" + (f" and execution.rounds = {rounds}" if rounds > 1 else "")
            problem = f"{layout}: {len(stack.plan)} layers repeat {' + '.join(map(str, repeats))} times, in groups"
            size = "stages times rounds" if rounds > 1 else "stages"
            hint = f"{size} that divide one of them: {', '.join(map(str, fits))}" if fits else "no layers repeat: leave mesh.stage at 1"
            raise BadInput(problem, where=".".join(map(str, path)), hint=hint)


def stages_header(run: Execution) -> dict[str, str]:
    """Returns the header's lines about pipeline stages; empty without stages."""
    if not isinstance(run, Pipeline):
        return {}
    idle = (run.stages - 1) / (run.microbatches * run.rounds + run.stages - 1)
    rounds = f" in {run.rounds} rounds" if run.rounds > 1 else ""
    return {"pipeline": f"{run.stages} stages, {run.microbatches} microbatches{rounds}, idle {idle:.0%} of the time"}
