"""Ranks meshes, recomputation and batch sizes of a run by predicted tokens per second, among those that fit into memory.

The batch size changes what is learned, so other sizes are tried only if the user leaves it open.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from argosy.core.errors import UserError
from argosy.parallel.target import Target
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.plan.memory import memory_by_kind
from argosy.run.plan.nearest import changed_run
from argosy.run.plan.speed import prices_of, work_of

REMATS = ("none", "dots", "full")
# Rows of a device that are tried, and the most parts along an axis other than fsdp.
ROWS, PARTS = (1, 2, 4, 8), (2, 4, 8)
# The share of the memory that the model may fill: it is a tenth off.
ROOM = 0.9


@dataclass(frozen=True)
class Candidate:
    """Settings, with their prediction by the analytic model.

    words: the settings, as `key=value`.
    total: the memory of a device in bytes.
    tokens_per_s: tokens per second.
    step_seconds: the time of a step in seconds.
    """

    words: tuple[str, ...]
    total: int
    tokens_per_s: float
    step_seconds: float

    def document(self) -> dict[str, Any]:
        return {
            "settings": list(self.words),
            "memory_bytes": self.total,
            "tokens_per_s": self.tokens_per_s,
            "step_seconds": self.step_seconds,
        }


def rank_candidates(run: Any, target: Target, open_batch: bool) -> list[Candidate]:
    """Returns the candidates that fit into memory, the fastest first.

    Args:
        open_batch: whether other batch sizes are tried.
    """
    chip = target.chip
    if chip is None:
        return []
    candidates = []
    for words in _candidates(run, target, open_batch):
        try:
            other = assemble(changed_run(run, words), Decided.here(run, target), target=target, reads=False)
        except UserError:
            continue
        total = sum(memory_by_kind(other).values())
        if target.memory_bytes is None or total <= ROOM * target.memory_bytes:
            work = work_of(other, prices_of(chip))
            seconds = sum(work.by_kind.values()) + sum(transfer.exposed_seconds for transfer in work.traffic)
            candidates.append(Candidate(tuple(words), total, other.batches.tokens_per_batch / seconds, seconds))
    return sorted(candidates, key=lambda candidate: -candidate.tokens_per_s)


def _candidates(run: Any, target: Target, open_batch: bool) -> Iterator[list[str]]:
    for mesh in _meshes(run, target.count):
        tensor = int(dict(word.split("=") for word in mesh).get("mesh.tensor", 1))
        shares = target.count // tensor
        batches = [n * shares * run.accumulate for n in ROWS] if open_batch else [run.data.batch]
        for batch in batches:
            for remat in REMATS:
                yield [*mesh, f"execution.remat={remat}", f"data.batch={batch}"]


def _meshes(run: Any, count: int) -> Iterator[list[str]]:
    """Yields meshes as words: fsdp over all devices, with data parallelism, with tensor parallelism, and with expert parallelism."""
    def whole(**sizes: int) -> list[str]:
        every = {"data": 1, "fsdp": -1, "tensor": 1, "context": 1, "expert": 1, "stage": 1} | sizes
        return [f"mesh.{axis}={n}" for axis, n in every.items()]

    yield whole()
    heads = getattr(run.model, "kv_heads", None) or getattr(run.model, "heads", 1)
    moe = getattr(run.model, "moe", None)
    for parts in PARTS:
        if count % parts or parts >= count:
            continue
        yield whole(data=parts)
        if heads % parts == 0:
            yield whole(tensor=parts)
        if moe is not None and moe.count % parts == 0:
            yield whole(expert=parts)
