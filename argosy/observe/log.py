"""Writes a run's log.txt: the command, the versions, every logged step, every message, and how the run ended. Each line begins with its
time."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from argosy.observe.readable import one_line
from argosy.observe.terminal.picture import TOKEN, evaluation_text, header_lines, step_text


class Logged:
    """A view of a run that passes all events to another view and also writes them to the log.

    If the other view raises OSError (the reader of its pipe ended), it gets no more events, the log says so, and the run continues.
    """

    def __init__(self, view: Any, write: Callable[[str], None]):
        self.view, self.write = view, write
        self.is_shown, self.unit = True, TOKEN

    def say(self, text: str) -> None:
        self._write(text)
        self._show("say", text)

    def header(self, facts: Mapping[str, Any]) -> None:
        self.unit = str(facts.get("unit", TOKEN))
        for line in header_lines(facts):
            self._write(line)
        self._show("header", facts)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self._write(f"step {step}  {step_text(numbers, self.unit)}")
        self._show("step", step, numbers)

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        self._write(f"step {step}  {evaluation_text(numbers)}")
        self._show("evaluation", step, numbers)

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._write(f"step {step}  prompt: {one_line(prompt)}  sample: {one_line(text)}")
        self._show("sample", step, prompt, text)

    def end(self, text: str) -> None:
        """Logs how the run ended. The other view does not get this line."""
        self._write(text)

    def close(self) -> None:
        self._show("close")

    def _show(self, event: str, *values: Any) -> None:
        if not self.is_shown:
            return
        try:
            getattr(self.view, event)(*values)
        except OSError as error:
            self.is_shown = False
            self._write(f"the display failed ({error.strerror or error}); the run continues with this log alone")

    def _write(self, text: str) -> None:
        self.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}")
