"""A run's log.txt: the command, the versions, every logged step, every message, and how the run ended, each line with its
time."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from argosy.observe.picture import evaluated, headed, stepped
from argosy.observe.readable import one_line


class Logged:
    """A view that passes everything on to another view and also writes it to the log."""

    def __init__(self, view: Any, write: Callable[[str], None]):
        self.view, self.write = view, write

    def say(self, text: str) -> None:
        self._write(text)
        self.view.say(text)

    def header(self, facts: Mapping[str, Any]) -> None:
        for line in headed(facts):
            self._write(line)
        self.view.header(facts)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self._write(f"step {step}  {stepped(numbers)}")
        self.view.step(step, numbers)

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        self._write(f"step {step}  {evaluated(numbers)}")
        self.view.evaluation(step, numbers)

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._write(f"step {step}  prompt: {one_line(prompt)}  sample: {one_line(text)}")
        self.view.sample(step, prompt, text)

    def end(self, text: str) -> None:
        """Logs how the run ended; only the log has this line."""
        self._write(text)

    def close(self) -> None:
        self.view.close()

    def _write(self, text: str) -> None:
        self.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}")
