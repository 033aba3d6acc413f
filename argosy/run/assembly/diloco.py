"""Checks that a run can train replicas independently (`train.diloco`), and describes them for its header."""

from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from argosy.core.counts import plural
from argosy.core.errors import BadInput, Unsupported, some
from argosy.models.parts.weight import Moved, variables
from argosy.train.diloco import AXIS, REPLICAS

WHERE = "diloco.every={}"
# Of these mesh axes, one may split a replica.
WITHIN = ("fsdp", "tensor", "context")


def check(run: Any, mesh: Mesh) -> None:
    """Checks that the replicas of a run can train independently.

    Raises:
        BadInput: there is only one replica.
        Unsupported: two axes of the mesh split a replica.
    """
    if not run.diloco.every:
        return
    where = WHERE.format(run.diloco.every)
    if mesh.shape[AXIS] == 1:
        hint = "mesh.data=2, or mesh.between.data=2 with a replica on each group of devices; mesh.fsdp is then within a replica"
        raise BadInput("the mesh has one replica: mesh.data is 1", where=where, hint=hint)
    if len(split := [f"mesh.{axis} = {mesh.shape[axis]}" for axis in WITHIN if mesh.shape[axis] > 1]) > 1:
        # jax 0.10.2: "Check failed" in spmd_partitioner_util.cc, for dense layers as for others.
        problem = f"{' and '.join(split)} within a replica: XLA aborts where it splits a replica over two axes"
        raise Unsupported(problem, where=where, hint="let one of them be 1")


def check_model(run: Any, model: Any, steps: int) -> None:
    """Checks the model and the number of steps.

    Args:
        steps: the number of steps of the run, or fewer if its epochs end before.

    Raises:
        BadInput: the last steps would be followed by no outer step.
        Unsupported: some weights are updated by a rule instead of a gradient.
    """
    every = run.diloco.every
    if not every:
        return
    if steps % every:
        reason = f"the last {plural(steps % every, 'step')} would move no outer weights"
        ends = f"steps = {steps}" if steps == run.steps else f"the data ends after {plural(steps, 'step')}, which"
        hint = f"steps={steps - steps % every}" if steps > every else f"diloco.every={steps} or less"
        raise BadInput(f"{ends} is no multiple of diloco.every = {every}: {reason}", hint=hint)
    if biases := [address for address, v in variables(model).items() if isinstance(v, Moved)]:
        problem = f"router biases that move by load ({some(biases, 2)}): not built over replicas yet"
        hint = "model.moe.bias=false with model.moe.balance=0.01 balances by a loss"
        raise Unsupported(problem, where=WHERE.format(every), hint=hint)


def check_replicas(run: Any, mesh: Mesh, folder: Path) -> None:
    """Checks that a checkpoint of the run has as many replicas as the mesh.

    Raises:
        BadInput: the numbers differ.
    """
    if not run.diloco.every:
        return
    from argosy.checkpoint.step.layout import STATE
    from argosy.checkpoint.step.load import stored_shapes

    prefix = f"optimizer.{REPLICAS}."
    stored = next(a.shape[0] for name, a in stored_shapes(folder, STATE).items() if name.startswith(prefix))
    if stored != mesh.shape[AXIS]:
        problem = f"the run has {plural(stored, 'replica')}, and the mesh {mesh.shape[AXIS]}"
        hint = f"resume with mesh.data x mesh.between.data = {stored}; init.weights=RUN dir=NEW starts others from its outer weights"
        raise BadInput(problem, where=str(folder), hint=hint)


def unfinished_outer_step(run: Any, step: int) -> str:
    """Returns a note for a run that ended between two outer steps, as it may after a rollback; "" for other runs."""
    if not run.diloco.every or not (remainder := step % run.diloco.every):
        return ""
    return f"; its last {plural(remainder, 'step')} moved no outer weights, which are those of step {step - remainder} (diloco.every)"


def diloco_header(run: Any, mesh: Mesh) -> dict[str, str]:
    """Returns the header's line about replicas; empty without DiLoCo."""
    every = run.diloco.every
    if not every:
        return {}
    rows = run.data.batch // mesh.shape[AXIS]
    return {"diloco": f"{mesh.shape[AXIS]} replicas of {plural(rows, 'row')} a step, an outer step every {plural(every, 'step')}"}
