"""Displays a run in a Jupyter notebook, as a table under the cell that is updated as steps are logged. IPython is imported only
there."""

import sys
import time
from collections.abc import Mapping
from html import escape
from typing import Any

from argosy.observe.readable import decimals

COLUMNS = {"loss": "loss", "eval_loss": "eval loss", "lr": "learning rate", "grad_norm": "grad norm", "tokens_per_s": "{}s/s"}
# The number of rows of the table, and the least seconds between two updates.
ROWS, PACE_S = 20, 0.5


def in_notebook() -> bool:
    """Whether this program runs in a notebook that displays HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class Notebook:
    """Displays a run in a notebook. This is a view of runs (`run.view.View`) and a context manager."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.title, self.shown, self.handle, self.unit = "", 0.0, None, "token"

    def __enter__(self) -> "Notebook":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)

    def header(self, facts: Mapping[str, Any]) -> None:
        self.unit = str(facts.get("unit", self.unit))
        self.title = f"{facts.get('model', '')}, {facts.get('steps', '?')} steps"
        self._show()

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.rows.setdefault(step, {}).update(numbers)
        if time.monotonic() - self.shown > PACE_S:
            self._show()

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        self.rows.setdefault(step, {}).update(numbers)
        self._show()

    def sample(self, step: int, prompt: str, text: str) -> None:
        print(f"step {step}: {prompt}{text}")

    def close(self) -> None:
        if self.rows:
            self._show()

    def table(self) -> str:
        """Returns the table as HTML."""
        names = [name for name in COLUMNS if any(name in row for row in self.rows.values())]
        head = "".join(f"<th>{word}</th>" for word in ("step", *(COLUMNS[name].format(self.unit) for name in names)))
        body = ""
        for step, row in sorted(self.rows.items())[-ROWS:]:
            cells = (decimals(row[name]) if name in row else "" for name in names)
            body += f"<tr><td>{step}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        return f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{body}</table>"

    def _show(self) -> None:
        from importlib import import_module

        shell: Any = import_module("IPython.display")
        self.shown = time.monotonic()
        if self.handle is None:
            self.handle = shell.display(shell.HTML(self.table()), display_id=True)
        else:
            self.handle.update(shell.HTML(self.table()))
