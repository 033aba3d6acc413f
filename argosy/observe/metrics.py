"""Writes and reads the metrics of a run: one JSON object per line, append-only. The terminal, the report and trackers use these lines.

Floats are written so that they read back bit for bit. If the process is killed, the last line may be incomplete, and opening the file
removes it. Steps after the last checkpoint are then written again with the same values, so readers take the last line of each step.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from argosy.core.storage import Store
from argosy.observe.backlog import Backlog

FILE = "metrics.jsonl"
# The completions of the rollouts of a run that learns from rewards.
ANSWERS = "answers.jsonl"


def conversation_text(line: Mapping[str, Any]) -> str:
    """Returns the completion in a line of answers.jsonl: its text, or its turns with their speakers and advantages."""
    turns = line.get("turns")
    return line["completion"] if not turns else "\n".join(f"{speaker(turn)}: {turn_text(turn)}" for turn in turns)


def speaker(message: Mapping[str, Any]) -> str:
    """Returns the speaker of a message, with the advantage of the message if it has one of its own."""
    return f"{message['role']} ({message['advantage']:+.2f})" if "advantage" in message else str(message["role"])


def turn_text(message: Mapping[str, Any]) -> str:
    """Returns the text of a message and its tool calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    words = [str(message.get("content") or ""), *(f"{call['name']}({json.dumps(call['arguments'])})" for call in calls)]
    return " ".join(word.strip() for word in words if word.strip())


class Metrics:
    """Appends lines to the metrics file of a run directory, or to another file of JSON lines. Lines that cannot be written wait in
    memory, and `say` is called with a sentence about that.
    """

    def __init__(self, store: Store, file: str = FILE, say: Callable[[str], None] = lambda _: None):
        self._lines = Backlog(store, file, say)
        if store.exists(file):
            text = store.read_text(file)
            if text and not text.endswith("\n"):
                store.write_text(file, text[: text.rfind("\n") + 1])

    def write(self, line: dict[str, Any]) -> None:
        self._lines.append(json.dumps({k: _plain(v) for k, v in line.items()}))

    def flush(self) -> None:
        """Writes the waiting lines, if that is possible."""
        self._lines.flush()

    def close(self) -> None:
        """Writes the waiting lines, or says how many are lost."""
        self._lines.close()


def read(store: Store, file: str = FILE) -> list[dict[str, Any]]:
    """Reads all complete lines, in the order in which they were written."""
    if not store.exists(file):
        return []
    out = []
    for line in store.read_text(file).splitlines():
        try:
            out.append(json.loads(line))
        # The line is incomplete because the process was killed.
        except json.JSONDecodeError:
            continue
    return out


def by_step(lines: list[dict[str, Any]], key: str) -> dict[int, Any]:
    """Returns {step: value} for one number, with the last value that was written for each step."""
    values = {line["step"]: line[key] for line in lines if key in line}
    return dict(sorted(values.items()))


def _plain(value: Any) -> Any:
    """Converts a number to a plain Python number, and NaN and infinities to strings, because JSON has neither."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
