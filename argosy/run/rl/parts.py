"""The parts of a run whose batches are sampled from its own model, and the arrays of a micro-batch of a rollout.

Completions are packed into micro-batches of one shape, so one compiled program computes updates of any size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.data.batch import Batch, Fields
from argosy.data.rows.prompts import Prompt
from argosy.parallel.place import batch_sharding, row_shares
from argosy.rl.policy.objective import ROWS, shared_of
from argosy.rl.rollouts.batches import RolloutBatches
from argosy.rl.rollouts.packing import PartShape
from argosy.rl.rollouts.records import Trainer
from argosy.run.assembly.assembly import Assembly
from argosy.run.memory import shapes_of
from argosy.run.rl.rollout_workers import RolloutWorkers
from argosy.run.settings.run import Run


@dataclass
class RolloutParts:
    """The parts of a run that differ between objectives that learn from rollouts.

    batches: the rollouts, as batches.
    trainer: (assembly, engine, say) -> the rollouts' access to the trainer.
    first_prompt: () -> the prompt that a run displays before its first step.
    selection: (metrics of an evaluation) -> the number by which checkpoints are compared; lower is better. None if every reward was
        missing.
    summary: the lines of the run's header.
    roles: the roles of the frozen models that every update reads.
    workers: the processes that sample, from when they run; otherwise None.
    """

    batches: RolloutBatches
    trainer: Callable[[Assembly, Any, Say], Trainer]
    first_prompt: Callable[[], Prompt]
    selection: Callable[[Mapping[str, float]], float | None]
    summary: Mapping[str, str]
    roles: tuple[str, ...] = ()
    workers: RolloutWorkers | None = None

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


def rollouts_of(assembly: Assembly) -> RolloutParts:
    """Returns the rollouts of a run, which must have some."""
    assert assembly.rollouts is not None
    return assembly.rollouts


class PartArrays:
    """The arrays of one micro-batch of packed completions (`rl.rollouts.packing`). Rows are split over the devices. The arrays of
    completions are replicated on every device."""

    def __init__(self, assembly: Assembly):
        batches: Any = assembly.batches
        self.shape: PartShape = batches.shape
        self.fields: Fields = {**assembly.run.objective.reads(), **shared_of(self.shape)}
        # The arrays that log-probabilities are computed from.
        self.scored = (*ROWS, *shared_of(self.shape), "places")
        self._rows, self._everywhere = batch_sharding(assembly.mesh), assembly.places.step

    def shapes(self, only: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns the shapes, types and shardings of the arrays, by name.

        Args:
            only: the names of the arrays; None: all.
        """
        fields = {name: self.fields[name] for name in only or self.fields}
        arrays = shapes_of(fields, self.shape.rows, self.shape.sequence, 1, self.shape.sizes, None)
        return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._place_of(name)) for name, a in arrays.items()}

    def place(self, part: Batch) -> dict[str, Any]:
        """Moves a micro-batch from the host to the devices."""
        return {name: jax.device_put(a, self._place_of(name)) for name, a in part.items()}

    def place_scored(self, part: Batch, *more: str) -> dict[str, Any]:
        """Moves only the arrays that log-probabilities are computed from to the devices.

        Args:
            more: the names of further arrays to move.
        """
        return self.place({name: part[name] for name in (*self.scored, *more)})

    def _place_of(self, name: str) -> Any:
        field = self.fields.get(name)
        return self._rows if field is not None and field.axes.startswith("B") else self._everywhere


def part_shape(run: Run, mesh: Any, shared: bool = False) -> PartShape:
    """Returns the shape of the micro-batches that completions are packed into.

    Args:
        shared: whether completions of one prompt share one copy of it.

    Raises:
        BadInput: the rows do not divide over the devices.
    """
    rollout, shares = run.rollout, row_shares(mesh)
    assert rollout is not None
    rows = rollout.rows_over(shares)
    if rows % shares:
        problem = f"rollout.rows = {rows} does not divide over {plural(shares, 'device')}"
        raise BadInput(problem, hint=f"make it a multiple of {shares}")
    return PartShape(rows, run.data.sequence, rollout.tokens, shared=shared)
