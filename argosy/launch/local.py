"""Runs a command as several processes on this machine, and restarts all of them when one fails.

    exit code of a process     result
    0                          The others end too.
    2                          The user made a mistake. All processes end, and none is restarted.
    65                         The process would fail again (`core.errors.Final`). As for 2, but the exit code is 1.
    129, 130, 143              The process was asked to stop. The others are asked to stop too.
    any other                  All processes are killed, and restart from the last checkpoint.

The processes find each other through the environment (`launch.cluster`). Rank 0 prints to this terminal. The output of each other
process, and the output of native libraries, goes to a file, which is named if the process fails. All processes end when this process
ends, however it ends. This module does not import jax.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.core.counts import plural
from argosy.core.errors import ATTEMPT, FINAL, SUPERVISED, BadInput
from argosy.core.process.child import reason_of
from argosy.core.process.signals import Stop, asked_to_stop
from argosy.core.progress import Say
from argosy.launch.cluster import ABORTED, LOST, NATIVE, PARENT, STACKS, STUCK
from argosy.launch.logs import LogFile, show
from argosy.launch.ports import HeldPort
from argosy.launch.rendered import ScriptCheck
from argosy.launch.settings import LocalLaunch
from argosy.observe.stacks import fold_stacks
from argosy.observe.whereabouts import WHERE, whereabouts

STOPPED = (128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)
# After these, nothing is started again.
FOR_GOOD = (2, FINAL, *STOPPED)
LOOK_S = 0.05
# Lines that are kept of what a process prints.
KEPT = 200
# Those of them that are shown where it fails.
SHOWN = 12
# How long processes have to write where they are.
DUMP_S = 1.0


@dataclass
class LocalProcess:
    """A process of a group.

    rank: the rank of the process.
    process: the Popen object.
    printed: the last lines of its output.
    reader: the thread that reads its output.
    ended: the time at which its end was noticed, on the monotonic clock; None while it runs.
    log: the file of its output; None if it prints to the terminal.
    log_from: the offset at which the output of this start begins in the file.
    was_stopped: whether the process was stopped (SIGSTOP) when the others ended.
    """

    rank: int
    process: subprocess.Popen[bytes]
    printed: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    reader: threading.Thread | None = None
    ended: float | None = None
    log: Path | None = None
    log_from: int = 0
    was_stopped: bool = False

    @property
    def code(self) -> int | None:
        """The exit code, which is negative if a signal ended the process; None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    @property
    def lost_another(self) -> bool:
        """Whether the process ended because another process ended or no longer replied."""
        return self.code == LOST or (self.code == -signal.SIGABRT and any(ABORTED in line for line in self.last(KEPT)))

    @property
    def was_killed(self) -> bool:
        """Whether a signal from elsewhere than this supervisor killed the process."""
        return (self.code or 0) < 0 and not self.lost_another

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped (by SIGSTOP or a debugger), as far as the system shows it."""
        pid = getattr(self.process, "pid", None)
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except (OSError, IndexError):
            return False

    def last(self, count: int) -> list[str]:
        """Returns the last lines of the output, including that of native libraries."""
        try:
            text = self.log.read_bytes()[self.log_from :].decode("utf-8", "replace") if self.log is not None else ""
        except OSError:
            text = ""
        return [line for line in text.splitlines() or self.printed if line.strip()][-count:]


@dataclass
class ProcessEnding:
    """The end of a group of processes.

    code: the exit code of the group.
    first: the process that ended first with a nonzero code; None if there is none.
    stacks: the stack traces of the processes.
    silent: the processes that no longer replied, because of which the others ended.
    places: the line of code at which each rank was.
    """

    code: int
    first: LocalProcess | None = None
    stacks: str = ""
    silent: Sequence[LocalProcess] = ()
    places: Mapping[int, str] = field(default_factory=dict)


class LocalGang:
    """The group of processes of one start.

    logs: the folder for the output of the processes.
    """

    def __init__(self, words: Sequence[str], settings: LocalLaunch, attempt: int, environment: Mapping[str, str], logs: Path):
        self.settings, self.folder = settings, Path(tempfile.mkdtemp(prefix="argosy-"))
        self.logs: Path | None = logs
        self.port, variables = HeldPort(), dict(environment)
        variables |= {"ARGOSY_COORDINATOR": f"127.0.0.1:{self.port.number}", "ARGOSY_PROCESSES": str(settings.processes)}
        variables |= {ATTEMPT: str(attempt), PARENT: str(os.getpid()), STUCK: str(settings.stuck), SUPERVISED: "1"}
        self.members: list[LocalProcess] = []
        try:
            for rank in range(settings.processes):
                self.members.append(self._start(words, rank, variables))
        except BaseException:
            self.kill()
            self.close()
            raise

    def _start(self, words: Sequence[str], rank: int, environment: dict[str, str]) -> LocalProcess:
        variables = environment | {"ARGOSY_RANK": str(rank), STACKS: str(self._stacks_of(rank)), WHERE: str(self._where_of(rank))}
        log = log_of(self.logs, rank) if self.logs is not None else None
        variables |= {NATIVE: str(log.absolute())} if log is not None else {}
        variables |= devices_of(rank, self.settings, environment)
        to_terminal = rank == 0 and self.settings.logs is None
        pipe: Any = {} if to_terminal else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # A session of its own: Ctrl-C in this terminal comes here, and is passed on once.
        process: Any = subprocess.Popen(
            words, env=variables, start_new_session=True, stdin=subprocess.DEVNULL, **pipe
        )
        member = LocalProcess(rank, process, log=log, log_from=log.stat().st_size if log is not None and log.exists() else 0)
        if not to_terminal:
            member.reader = threading.Thread(target=self._read, args=(member,), daemon=True)
            member.reader.start()
        return member

    def _read(self, member: LocalProcess) -> None:
        stream = member.process.stdout
        assert stream is not None
        log = LogFile(log_of(self.logs, member.rank)) if self.logs is not None else None
        with stream:
            for line in stream:
                member.printed.append(line.decode("utf-8", "replace").rstrip("\n"))
                if log is not None:
                    log.write(line)
                if member.rank == 0:
                    show(line)

    def _stacks_of(self, rank: int) -> Path:
        return self.folder / f"stacks-{rank}"

    def _where_of(self, rank: int) -> Path:
        return self.folder / f"where-{rank}"

    # ---------------------------------------------------------------- until it ends

    def wait(self, stop: Stop) -> ProcessEnding:
        """Waits until all processes have ended. If one fails, the others write their stack traces, and are killed after the grace
        period.

        Args:
            stop: tells whether a signal asked this supervisor to stop.
        """
        first: LocalProcess | None = None
        silent: list[LocalProcess] = []
        passed_on, until = False, float("inf")
        while any(member.code is None for member in self.members):
            if stop.code and not passed_on:
                passed_on = True
                # One is enough: they agree on the step after which they stop. One that does not train yet ends at once.
                self.signal(stop.code - 128)
            if first is None:
                first = next((member for member in self._by_end() if member.code), None)
                if first is not None:
                    suspects = self._ask_for_stacks(first)
                    silent = suspects if first.lost_another else []
                    # Those that lost a peer end by themselves; what is stuck or stopped does not.
                    until = time.monotonic() + (self.settings.grace if first.code in FOR_GOOD else 0)
            if time.monotonic() > until:
                self.kill()
            time.sleep(LOOK_S)
        self._settle()
        first = next((member for member in self._by_end() if member.code), None)
        places = {member.rank: whereabouts(self._where_of(member.rank)) for member in self.members}
        return ProcessEnding(_as_exit(first.code or 0) if first else 0, first, self._stacks(), silent, places)

    def _by_end(self) -> list[LocalProcess]:
        """Returns the processes that ended, in the order of their ends. Processes that only lost another process come last."""
        over = [member for member in self.members if member.code is not None]
        return sorted(over, key=lambda member: (member.lost_another, member.ended))

    def _ask_for_stacks(self, first: LocalProcess) -> list[LocalProcess]:
        """Lets the running processes write their stack traces. Returns those that may be the cause of the failure: those that are
        stopped, or if there are none, those that do not reply. If a signal killed the first process, the others are not asked, because
        they are not the cause.

        Args:
            first: the process that ended first.
        """
        if first.code in FOR_GOOD or first.was_killed:
            return []
        # A moment, in which those that notice by themselves end.
        time.sleep(DUMP_S)
        running = [member for member in self.members if member.code is None]
        for member in running:
            member.process.send_signal(signal.SIGUSR1)
        for member in running:
            member.was_stopped = member.is_stopped
        if running:
            time.sleep(DUMP_S)
        return [member for member in running if member.was_stopped] or running

    def _stacks(self) -> str:
        texts = {member.rank: self._said_in_stacks(member) for member in self.members}
        shutil.rmtree(self.folder, ignore_errors=True)
        return fold_stacks({rank: text for rank, text in texts.items() if text})

    def _said_in_stacks(self, member: LocalProcess) -> str:
        path = self._stacks_of(member.rank)
        return path.read_text() if path.exists() else ""

    def signal(self, number: int) -> None:
        for member in self.members:
            if member.code is None:
                member.process.send_signal(number)

    def kill(self) -> None:
        for member in self.members:
            if member.code is None:
                member.process.kill()

    def close(self) -> None:
        """Releases the group's resources, after its processes have ended."""
        self.port.close()

    def _settle(self) -> None:
        for member in self.members:
            member.process.wait()
            if member.reader is not None:
                member.reader.join(timeout=2)


def checks(settings: LocalLaunch) -> list[ScriptCheck]:
    """Returns checks that the processes can be started."""

    def logs() -> None:
        folder = Path(settings.logs or ".")
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise BadInput(f"logs={settings.logs}: {there} is a file", hint="name a folder")

    return [ScriptCheck(("processes", "devices"), lambda: devices_of(0, settings, os.environ)), ScriptCheck(("logs",), logs)]


# Words for messages: what counts as progress, and what remains of a run that fails too often.
CHECKPOINTS = "a new checkpoint", "; what is saved stays"


def run(
    words: Sequence[str],
    settings: LocalLaunch,
    say: Say,
    progress: Callable[[], object] = lambda: None,
    about: tuple[str, str] = CHECKPOINTS,
) -> int:
    """Runs a command as a group of processes until it succeeds, is stopped, or fails too often. Returns its exit code.

    Args:
        words: the command; the program comes first.
        settings: the settings of the engine.
        say: called with messages.
        progress: returns a value that changes when the run makes progress, such as the newest checkpoint.
        about: two phrases for messages: what counts as progress, and what remains of a run that fails too often.
    """
    logs, failed = Path(settings.logs or tempfile.mkdtemp(prefix="argosy-logs-")), False

    def start(attempt: int) -> LocalGang:
        nonlocal failed
        failed = attempt > 0
        return LocalGang(words, settings, attempt, os.environ, logs)

    code = 1
    try:
        code = supervise(start, settings, say, progress, logs, about)
    finally:
        # Nobody was told where they are.
        if settings.logs is None and not failed and code in (0, 2, *STOPPED):
            shutil.rmtree(logs, ignore_errors=True)
    return code


def supervise(
    start: Callable[[int], LocalGang],
    settings: LocalLaunch,
    say: Say,
    progress: Callable[[], object],
    logs: Path | None = None,
    about: tuple[str, str] = CHECKPOINTS,
) -> int:
    """Starts and restarts groups of processes until one succeeds, is stopped, or too many fail. Returns the exit code.

    Args:
        start: (attempt) -> the group of an attempt, which is started. Attempts count from 0.
        logs: the folder of the output, for messages.
        say, progress, about: as in `run`.
    """
    if settings.logs is not None:
        check_logs(Path(settings.logs))
    attempt = failures = 0
    with asked_to_stop("stopping all processes; once more kills them") as stop:
        while True:
            begun, before = time.monotonic(), progress()
            gang = start(attempt)
            try:
                ending = gang.wait(stop)
            finally:
                gang.kill()
                gang.close()
            if ending.first is None or ending.code in FOR_GOOD:
                _show(ending, say, settings.processes, only_others=True)
                code = 1 if ending.code == FINAL else ending.code
                return stop.code or code if ending.first is not None else 0
            _show(ending, say, settings.processes)
            printed = f"; what each printed is in {logs}/" if logs is not None else ""
            attempt, failures = attempt + 1, 1 if progress() != before else failures + 1
            if stop.code or failures > settings.restarts:
                if not stop.code:
                    times = plural(failures, "time")
                    say(f"it failed {times} without {about[0]}, and restarts={settings.restarts}{about[1]}{printed}")
                return stop.code or ending.code
            duration = f"{time.monotonic() - begun:.0f} s"
            say(f"starting all {settings.processes} processes again, which had run for {duration}{printed} (restart {attempt})")


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _at(ending: ProcessEnding, member: LocalProcess) -> str:
    place = ending.places.get(member.rank)
    return f", {place}" if place else ""


def check_logs(folder: Path) -> None:
    """Makes the folder of logs, and checks that it can be written.

    Raises:
        BadInput: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"logs={folder}: {(error.strerror or str(error)).lower()}", hint="name a folder") from None


def _show(ending: ProcessEnding, say: Say, count: int, only_others: bool = False) -> None:
    """Reports which process ended first or did not reply, and the line of code at which it was. Also reports the last lines of its
    output, unless they are on the terminal already.

    Args:
        count: the number of processes.
        only_others: whether the exit code of the first process is left out of the report.
    """
    first = ending.first
    if first is None:
        return
    for member in ending.silent:
        why = "a signal had stopped it" if member.was_stopped else "no message of it arrived"
        say(f"process {member.rank} of {count} did not answer any more{_at(ending, member)}: {why}, and the others ended without it")
    if ending.silent:
        return
    if not only_others:
        say(f"process {first.rank} of {count} ended {ending_words(first.code or 0)}{_at(ending, first)}")
    crashed = (first.code or 0) < 0 and first.code != -signal.SIGKILL
    lines = first.last(SHOWN) if crashed else [line for line in first.printed if line.strip()][-SHOWN:] if first.rank else []
    if lines:
        say("\n".join(f"  [{first.rank}] {line}" for line in lines))
    if first.was_killed:
        for rank, place in sorted(ending.places.items()):
            if rank != first.rank and place:
                say(f"process {rank} of {count} was alive, {place}")
    elif ending.stacks:
        say(f"where the processes were:\n{ending.stacks}")


def ending_words(code: int) -> str:
    """Describes an exit code, such as "with exit code 3" or "by SIGKILL"."""
    return f"{'with' if code >= 0 else 'by'} {reason_of(code)}"


def _as_exit(code: int) -> int:
    return code if code >= 0 else 128 - code


# ---------------------------------------------------------------- devices


def devices_of(rank: int, settings: LocalLaunch, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that assign devices to a process.

    Raises:
        BadInput: the number of GPUs is not divisible by the number of processes.
    """
    cards = gpus(environment)
    if not cards or environment.get("JAX_PLATFORMS") == "cpu":
        return {"JAX_NUM_CPU_DEVICES": str(settings.devices or environment.get("JAX_NUM_CPU_DEVICES") or 1)}
    if len(cards) % settings.processes:
        problem = f"{len(cards)} GPUs do not divide among {settings.processes} processes"
        raise BadInput(problem, hint="choose processes= so that they do, or name some of them in CUDA_VISIBLE_DEVICES")
    each = len(cards) // settings.processes
    return {"CUDA_VISIBLE_DEVICES": ",".join(cards[rank * each : (rank + 1) * each])}


def gpus(environment: Mapping[str, str], folder: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Returns the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES uses.

    Args:
        folder: the folder in which the driver lists the GPUs.
    """
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [card.strip() for card in visible.split(",") if card.strip() and card.strip() != "-1"]
    return [str(i) for i, _ in enumerate(folder.iterdir())] if folder.is_dir() else []
