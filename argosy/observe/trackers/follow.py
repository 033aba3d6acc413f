"""Sends the lines of metrics.jsonl to trackers, each in its own thread, from the position that it had reached before.

A step never waits for a tracker, and a tracker that fails never stops a run. Lines that were not sent stay in the file, and the next
attempt, or the next start of the run, continues at the position in `trackers/NAME.json`. The position is written after the tracker has
flushed. So if the process is killed in between, some lines are sent twice, but none is lost. A resumed run writes some steps again with
the same values; a tracker gets each metric of a step once.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from argosy.core.errors import ArgosyError
from argosy.core.storage import Store
from argosy.observe.metrics import FILE
from argosy.observe.trackers.base import FOLDER, Connection, TrackedRun, TrackerSettings

# Seconds between two looks at the file, between two attempts after a failure, and of waiting for a tracker at the end of a run.
LOOK_S, AGAIN_S, LAST_S = 1.0, 20.0, 30.0
# The most lines that are sent before the position is written.
BATCH = 200


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a line, without its step."""
    out = {}
    for name, value in line.items():
        number = float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value
        if name != "step" and isinstance(number, int | float) and not isinstance(number, bool):
            out[name] = float(number)
    return out


class Follower:
    """Sends the metrics of a run to one tracker, and remembers the position in the metrics file.

    Args:
        name: the name of the tracker's file with the position.
        settings: the settings of the tracker.
        store: the run directory.
        run: the run, as the tracker displays it.
        say: called with a sentence when the tracker fails, and when it has caught up.
    """

    def __init__(self, name: str, settings: TrackerSettings, store: Store, run: TrackedRun, say: Callable[[str], None]):
        self.name, self.settings, self.store, self.run, self.say = name, settings, store, run, say
        self.file = f"{FOLDER}/{name}.json"
        before: dict[str, Any] = json.loads(store.read_text(self.file)) if store.exists(self.file) else {}
        self.position, self.id = int(before.get("position", 0)), str(before.get("id", ""))
        # {metric: the last step for which it was sent}
        self.sent: dict[str, int] = {name: int(step) for name, step in before.get("sent", {}).items()}
        self.connection: Connection | None = None
        self.failed = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float = LAST_S) -> None:
        """Sends the remaining lines, and waits at most this many seconds for that."""
        self._ends.set()
        self._thread.join(seconds)
        if self._thread.is_alive() or self.failed:
            self.say(f"{self.name} has not caught up: it goes on from `{self.file}` when the run starts again with it")

    def _follow(self) -> None:
        while True:
            # This is checked before the last look at the file, so that no line is missed.
            last = self._ends.is_set()
            try:
                if self.connection is None:
                    self.connection = self.settings.open(self.run, self.id)
                    self.id = self.connection.id
                while self.send(self.connection, last):
                    pass
                if last:
                    self.connection.close()
                if self.failed:
                    self.say(f"{self.name} answers again, and has caught up")
                self.failed = False
            except Exception as error:
                problem = error.what if isinstance(error, ArgosyError) else f"{type(error).__name__}: {error}".splitlines()[0][:200]
                if not self.failed:
                    self.say(f"{self.name} fails, and the run goes on: {problem}")
                self.failed, self.connection = True, None
            if last:
                return
            self._ends.wait(AGAIN_S if self.failed else LOOK_S)

    def send(self, connection: Connection, last: bool = False) -> int:
        """Sends the next complete lines, and writes the position. Returns the number of lines.

        Args:
            last: whether the file is complete.
        """
        lines = next_lines(self.store, self.position, BATCH)
        if connection.whole_steps and not last:
            # Further lines of the newest step may follow.
            newest = max((line["step"] for line, _ in lines if "step" in line), default=None)
            while lines and lines[-1][0].get("step") == newest:
                lines.pop()
        if not lines:
            return 0
        sent, position = dict(self.sent), lines[-1][1]
        for step, line in by_whole_steps(lines) if connection.whole_steps else ((line.get("step"), line) for line, _ in lines):
            if not isinstance(step, int):
                continue
            new = {name: number for name, number in numbers_of(line).items() if step > sent.get(name, -1)}
            # Steps of a tracker must not decrease. It already has the lines that a resumed run writes again.
            if new and step >= max(sent.values(), default=-1):
                connection.log(step, new, time.time())
                sent |= dict.fromkeys(new, step)
        connection.flush()
        self.position, self.sent = position, sent
        self.store.write_text(self.file, json.dumps({"position": position, "id": self.id, "sent": sent}) + "\n")
        return len(lines)


def by_whole_steps(lines: Sequence[tuple[dict[str, Any], int]]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Merges neighboring lines of the same step. Yields (step, line)."""
    for step, group in groupby((line for line, _ in lines), key=lambda line: line.get("step")):
        together: dict[str, Any] = {}
        for line in group:
            together |= line
        yield step, together


def next_lines(store: Store, position: int, most: int) -> list[tuple[dict[str, Any], int]]:
    """Reads complete lines of the metrics file from a position in bytes. Returns each line with the position after it. If the file has
    become shorter, only an incomplete last line was removed, so no complete line is missed.

    Args:
        most: the most lines to read.
    """
    if not store.exists(FILE):
        return []
    if store.is_local:
        with store.local_path(FILE).open("rb") as file:
            file.seek(position)
            data = file.read(1 << 20)
    else:
        data = store.read_text(FILE).encode()[position:][: 1 << 20]
    out: list[tuple[dict[str, Any], int]] = []
    for raw in data.splitlines(keepends=True)[:most]:
        if not raw.endswith(b"\n"):
            break
        position += len(raw)
        try:
            out.append((json.loads(raw), position))
        except ValueError:
            # The line is incomplete because the process was killed.
            out.append(({}, position))
    return out


class Trackers:
    """All trackers of a run."""

    def __init__(self, followers: Sequence[Follower]):
        self.followers = list(followers)

    def start(self) -> None:
        for follower in self.followers:
            follower.start()

    def close(self) -> None:
        ends = time.monotonic() + LAST_S
        for follower in self.followers:
            follower.close(max(0.1, ends - time.monotonic()))


def flat_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as trackers display them: numbers, texts and booleans by dotted name. Other values become texts."""
    plain = (str, int, float, bool)
    return {
        key: value if isinstance(value, plain) and (not isinstance(value, float) or math.isfinite(value)) else str(value)
        for key, value in settings.items()
        if value is not None
    }
