"""Winners: the implementations of ops that `argosy autotune` found to be the fastest, by kind of device and case (op and shapes).

The winners that a run takes are stored with it, because implementations agree only to rounding. $ARGOSY_TUNED names the file of
winners; the default is a file in this machine's cache.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from argosy.core.caches import cache_home
from argosy.core.errors import BadInput
from argosy.core.process.cores import core_count
from argosy.observe.environment import processor_name
from argosy.ops.op import recorded_cases
from argosy.run.assembly.decided import Decided

if TYPE_CHECKING:
    from argosy.run.assembly.assembly import Assembly

VARIABLE = "ARGOSY_TUNED"


def tuned_device(device: Any = None) -> str:
    """Returns the kind of a device, as files of winners name it. For a CPU it is the processor and the number of cores."""
    device = device or jax.devices()[0]
    return f"{processor_name()}, {core_count()} cores" if device.platform == "cpu" else str(device.device_kind)


def winners_file() -> Path | None:
    """Returns this machine's file of winners; None if this user has no home directory."""
    home = cache_home()
    return None if home is None else home / "tuned.json"


def stored_winners(path: Path | None) -> dict[str, dict[str, Any]]:
    """Reads a file of winners, {device: {case: winner}}. Returns an empty mapping if there is none or it cannot be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        if path is not None:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return {str(device): {name: dict(winner) for name, winner in cases.items()} for device, cases in stored.items()}
    return {}


def winners_for_device(device: str) -> dict[str, str]:
    """Returns the winners for a kind of device, by case.

    Raises:
        BadInput: $ARGOSY_TUNED names no file of winners.
    """
    shared = os.environ.get(VARIABLE)
    by_device = stored_winners(Path(shared) if shared else winners_file())
    if shared and not by_device:
        raise BadInput(f"{shared} holds no winners", where=f"set by ${VARIABLE}", hint=f"`argosy autotune out={shared}` writes it")
    return {name: str(winner["implementation"]) for name, winner in by_device.get(device, {}).items() if "implementation" in winner}


def write_winners(path: Path, winners: Mapping[str, Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(winners, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    draft.replace(path)


def with_winners(a: "Assembly") -> Decided:
    """Adds the winners for the shapes of a new run to its choices. If there are winners for this device, the update is traced to find
    its shapes.

    Runs on several devices have no winners, because whole calls on one device were measured. Runs with rollouts have none either,
    because their updates consist of several programs.
    """
    if a.mesh.size > 1 or a.run.rollout is not None or not a.target.is_here:
        return a.decided
    device, execution = tuned_device(a.mesh.devices.flat[0]), a.run.execution
    free = [op for op in ("attention", "experts") if getattr(execution, op) is None]
    candidates = {name: winner for name, winner in winners_for_device(device).items() if name.partition(" ")[0] in free}
    if not candidates:
        return a.decided
    with recorded_cases() as cases:
        a.lower()
    matches = {name: candidates[name] for name in cases if name in candidates}
    return replace(a.decided, winners={device: matches}) if matches else a.decided


def winners_of(a: "Assembly") -> dict[str, str]:
    """Returns the winners that a run uses on its devices, by case: those that were stored with it for this kind of device."""
    if not a.decided.winners:
        return {}
    return dict(a.decided.winners.get(tuned_device(a.mesh.devices.flat[0]), {}))


def winners_text(a: "Assembly") -> str:
    """Returns the winners of a run as text, by op; "" if there are none."""
    pairs = {(name.partition(" ")[0], winner) for name, winner in winners_of(a).items()}
    return ", ".join(f"{op} by `{winner}`" for op, winner in sorted(pairs))
