"""Finds small changes of a run's settings with which it fits into memory, by the analytic model."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from argosy.adapt.settings import Lora, LowRank, Qlora
from argosy.core.errors import UserError
from argosy.observe.hardware import CHIPS
from argosy.parallel.place import row_shares
from argosy.parallel.target import Target
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.plan.memory import memory_by_kind

# CPU seconds after which no other settings are tried.
LIMIT_S = 4.0
# Settings that are named.
NAMED = 2


@dataclass(frozen=True)
class Change:
    """A change of settings with which a run fits.

    words: the changed settings, as `key=value`.
    total: the memory of a device with them, in bytes.
    """

    words: tuple[str, ...]
    total: int

    def document(self) -> dict[str, Any]:
        return {"settings": list(self.words), "memory_bytes": self.total}


def nearest_fits(assembly: Any) -> list[Change]:
    """Returns changes of settings with which a run fits, the smallest first. There are at most two, and none if no tried change
    helps."""
    changes: list[Change] = []
    start = time.process_time()
    for words, target in _candidates(assembly):
        if len(changes) == NAMED or time.process_time() - start > LIMIT_S:
            break
        if changed_keys(words) in [changed_keys(change.words) for change in changes]:
            continue
        try:
            run = changed_run(assembly.run, [word for word in words if not word.startswith("device=")])
            other = assemble(run, Decided.here(run, target), target=target, reads=False)
        except UserError:
            continue
        total = sum(memory_by_kind(other).values())
        if target.memory_bytes is not None and total <= target.memory_bytes:
            changes.append(Change(words, total))
    return changes


def changed_keys(words: Sequence[str]) -> list[str]:
    """Returns the names of the settings that words (`key=value`) change."""
    return [word.partition("=")[0] for word in words]


def changed_run(run: Any, words: Sequence[str]) -> Any:
    """Returns the settings of a run with some of them changed by words such as `data.batch=8`. `adapter=qlora` keeps the settings that
    both kinds of adapter have."""
    for word in words:
        key, _, text = word.partition("=")
        if key == "adapter":
            fields = {name: value for name, value in run.adapter if name in LowRank.model_fields}
            run = run.model_copy(update={"adapter": Qlora(**fields)})
            continue
        *above, last = key.split(".")
        group = run
        for name in above:
            group = getattr(group, name)
        group = group.model_copy(update={last: int(text) if text.lstrip("-").isdecimal() else text})
        for depth in reversed(range(len(above))):
            outer = run
            for name in above[:depth]:
                outer = getattr(outer, name)
            group = outer.model_copy(update={above[depth]: group})
        run = group
    return run


def _candidates(assembly: Any) -> Iterator[tuple[tuple[str, ...], Target]]:
    """Yields changes to try, from the smallest to the largest: recomputation, lower ranks, fewer rows, a quantized base, another mesh,
    more devices."""
    run, target, mesh = assembly.run, assembly.target, assembly.mesh
    room, memory = target.memory_bytes or 0, memory_by_kind(assembly)
    state = memory["parameters"] + memory["optimizer"] + memory["gradients"]
    again = ("execution.remat=full",) if run.execution.remat != "full" else ()
    # Gradients and optimizer state are those of the adapters, and of modules beside them.
    ranks = [n for n in (128, 32, 8) if isinstance(run.adapter, LowRank) and n < run.adapter.rank]
    small = memory["optimizer"] + memory["gradients"] < 0.1 * room
    lower_ranks = [] if small else [((*again, f"adapter.rank={n}"), target) for n in ranks]
    if state < room:
        if again:
            yield again, target
        yield from lower_ranks
        least = row_shares(mesh) * run.accumulate * run.objective.rows_per_group
        batch = run.data.batch // 2
        while batch >= least:
            yield (*again, f"data.batch={batch}"), target
            batch //= 4
    else:
        yield from lower_ranks
    if type(run.adapter) is Lora and run.adapter.init == "zero" and run.adapter.onto is None:
        yield ("adapter=qlora",), target
        if again:
            yield ("adapter=qlora", *again), target
    if mesh.size > 1 and mesh.shape["fsdp"] * mesh.shape["stage"] < mesh.size:
        yield ("mesh.fsdp=-1", "mesh.data=1", "mesh.tensor=1", *again), target
    if target.hardware is None:
        return
    chip = target.hardware.chip
    kind = next(name for name, candidate in CHIPS.items() if candidate is chip)
    count = target.hardware.chips
    for _ in range(12):
        count *= 2
        if count > chip.largest:
            break
        # What is split falls with the devices; the rest does not.
        if state * target.hardware.chips / count > 0.8 * room:
            continue
        name = f"{kind}-{count * chip.per_name}"
        try:
            larger = Target.described(name)
        except UserError:
            continue
        words = (f"device={name}", *again)
        if run.data.batch % (row_shares(mesh) * count // target.hardware.chips):
            words = (*words, f"data.batch={row_shares(mesh) * count // target.hardware.chips * run.accumulate}")
        yield words, larger
