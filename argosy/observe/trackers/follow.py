"""Sends the lines of metrics.jsonl to trackers, in a thread for each, from where it was before.

A step never waits for a tracker, and a tracker that fails never stops a run: what it was not sent stays in the file, and the next
attempt, or the next start of the run, goes on from the position in `trackers/NAME.json`. The position is written after the tracker has
flushed, so a kill between the two sends some lines twice, and loses none. Steps that a resumed run writes again have the same values; a
tracker gets each number of a step once.
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

# Seconds between two looks at the file, between two attempts of a tracker that failed, and how long the end of a run waits for one.
LOOK_S, AGAIN_S, LAST_S = 1.0, 20.0, 30.0
# Lines between two positions that are written.
BATCH = 200


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line, without its step."""
    out = {}
    for name, value in line.items():
        number = float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else value
        if name != "step" and isinstance(number, int | float) and not isinstance(number, bool):
            out[name] = float(number)
    return out


class Follower:
    """One tracker of a run, and how far it has come.

    Args:
        name: a name for its file.
        say: called with a sentence when it fails, and when it has caught up.
    """

    def __init__(self, name: str, settings: TrackerSettings, store: Store, run: TrackedRun, say: Callable[[str], None]):
        self.name, self.settings, self.store, self.run, self.say = name, settings, store, run, say
        self.file = f"{FOLDER}/{name}.json"
        before: dict[str, Any] = json.loads(store.read_text(self.file)) if store.exists(self.file) else {}
        self.position, self.id = int(before.get("position", 0)), str(before.get("id", ""))
        # {number: the last step of which it was sent}
        self.sent: dict[str, int] = {name: int(step) for name, step in before.get("sent", {}).items()}
        self.connection: Connection | None = None
        self.failed = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float = LAST_S) -> None:
        """Sends what is left, if that is possible in so many seconds."""
        self._ends.set()
        self._thread.join(seconds)
        if self._thread.is_alive() or self.failed:
            self.say(f"{self.name} has not caught up: it goes on from `{self.file}` when the run starts again with it")

    def _follow(self) -> None:
        while True:
            # Asked before the last look, so that nothing comes after it.
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
        """Sends the next complete lines, and writes the position. Returns how many there were.

        Args:
            last: no more will come.
        """
        lines = next_lines(self.store, self.position, BATCH)
        if connection.whole_steps and not last:
            # More of the newest step may come.
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
            # A tracker's steps never fall: what a resumed run writes again is there already.
            if new and step >= max(sent.values(), default=-1):
                connection.log(step, new, time.time())
                sent |= dict.fromkeys(new, step)
        connection.flush()
        self.position, self.sent = position, sent
        self.store.write_text(self.file, json.dumps({"position": position, "id": self.id, "sent": sent}) + "\n")
        return len(lines)


def by_whole_steps(lines: Sequence[tuple[dict[str, Any], int]]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Neighboring lines of one step as one: (step, line)."""
    for step, group in groupby((line for line, _ in lines), key=lambda line: line.get("step")):
        together: dict[str, Any] = {}
        for line in group:
            together |= line
        yield step, together


def next_lines(store: Store, position: int, most: int) -> list[tuple[dict[str, Any], int]]:
    """Complete lines of the metrics file from a position in bytes, each with the position after it. Where the file has become shorter,
    its torn last line was dropped, and no complete one begins before."""
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
            # Torn by a kill.
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
    """Settings as trackers show them: numbers, texts and switches by dotted name."""
    plain = (str, int, float, bool)
    return {
        key: value if isinstance(value, plain) and (not isinstance(value, float) or math.isfinite(value)) else str(value)
        for key, value in settings.items()
        if value is not None
    }
