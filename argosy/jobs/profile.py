"""`argosy profile`: requests a capture of some steps from a running job, or reads an existing capture."""

import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, BadInput
from argosy.core.storage import Store
from argosy.jobs.history import listing
from argosy.observe.hlo.module import HloModule
from argosy.observe.profile.capture import FOLDER, REQUEST, Window, captures, read_window, write_json
from argosy.observe.profile.table import Profile, profile_of
from argosy.observe.profile.trace import read_trace

Say = Callable[[str], None]


def profile(
    place: str, steps: int | None = None, *, at: int | None = None, timeout: float = 600.0, say: Say = lambda _: None
) -> Profile:
    """Returns the tables of a capture.

    Args:
        place: a run directory, a capture in one, or a log directory of the profiler.
        steps: the number of steps of a new capture that is requested from the run. None reads the newest capture.
        at: the first step of the capture to read. None reads the newest one.
        timeout: the seconds to wait for a new capture.

    Raises:
        BadInput: there is no run, it is not running, or it has no capture.
        ArgosyError: the run ended, or did not reply in time.
    """
    path = Path(place)
    if (path / "window.json").is_file():
        return read_profile(path)
    run = listing.require(path)
    if not isinstance(run, Path):
        raise BadInput(f"{place} is not on this machine", hint="captures are files of a run directory here")
    if steps is not None:
        return read_profile(request_capture(run, steps, timeout, say))
    folders = captures(run)
    if at is not None:
        folders = [folder for folder in folders if int(folder.name) == at]
    if not folders:
        running = listing.is_held(run)
        hint = "steps=3 captures three steps of it now" if running else "train with profile.steps=10-12, or ask while it runs: steps=3"
        raise BadInput(f"{run} has no capture{'' if at is None else f' that begins with step {at}'}", hint=hint)
    return read_profile(max(folders, key=lambda folder: (folder / "window.json").stat().st_mtime))


def request_capture(run: Path, steps: int, timeout: float, say: Say) -> Path:
    """Requests a capture from a run and waits for it. Returns the folder of the capture.

    Raises:
        BadInput: the run is not running.
        ArgosyError: the run ended before the capture was complete, or took longer than `timeout` seconds.
    """
    if not listing.is_held(run):
        raise BadInput(f"{run} is not running", hint="without steps=, captures that it took are shown; profile.steps=10-12 takes one")
    request, name = run / FOLDER / REQUEST, uuid4().hex[:12]
    if request.exists():
        raise ArgosyError(f"another capture of {run} is under way", hint=f"wait for it, or remove {request}")
    write_json(request, {"id": name, "steps": steps})
    say(f"waiting for {plural(steps, 'step')} of {run} ...")
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        for folder in captures(run):
            if read_window(folder).request == name:
                return folder
        if not listing.is_held(run):
            request.unlink(missing_ok=True)
            raise ArgosyError(f"{run} ended before the capture was complete")
        time.sleep(0.2)
    request.unlink(missing_ok=True)
    raise ArgosyError(f"{run} did not answer within {timeout:.0f} s", hint="timeout=SECONDS waits longer; its steps may take long")


def read_profile(folder: Path) -> Profile:
    """Reads the tables of a capture in a run directory.

    Raises:
        BadInput: the capture is not complete.
    """
    window: Window = read_window(folder)
    text = folder / "process-0.hlo.txt"
    program = HloModule.read(text.read_text(encoding="utf-8")) if text.is_file() else None
    return profile_of(window, read_trace(folder / "process-0"), program)


def profile_of_run(store: Store) -> Profile | None:
    """The newest capture of a run, for its report; None if there is none that can be read."""
    if not store.is_local:
        return None
    try:
        folders = captures(store.local_path())
        return read_profile(folders[-1]) if folders else None
    except (ArgosyError, OSError, ValueError, RuntimeError):
        # Reports are needed most for runs that went wrong.
        return None
