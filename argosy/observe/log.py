"""A run's words: log.txt, each line with its time, beside whatever shows the run."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from argosy.observe.readable import one_line


class Logged:
    """A view that also writes down what is said, planned, evaluated and sampled. Steps are in metrics.jsonl."""

    def __init__(self, view: Any, write: Callable[[str], None]):
        self.view, self.write = view, write

    def say(self, text: str) -> None:
        self._write(text)
        self.view.say(text)

    def plan(self, facts: Mapping[str, Any]) -> None:
        self._write(" ".join(f"{name}={value}" for name, value in facts.items()))
        self.view.plan(facts)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.view.step(step, numbers)

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        self._write(f"step {step} " + " ".join(f"{name}={value:.6g}" for name, value in numbers.items()))
        self.view.evaluation(step, numbers)

    def sample(self, step: int, text: str) -> None:
        self._write(f"step {step} sample: {one_line(text)}")
        self.view.sample(step, text)

    def close(self) -> None:
        self.view.close()

    def _write(self, text: str) -> None:
        self.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}")
