"""The table of a run in a notebook, beside a stand-in of the few names of IPython that it uses."""

import sys
from types import ModuleType

import pytest

from argosy.observe.terminal.notebook import Notebook, in_notebook


class ZMQInteractiveShell:
    """Named as the shell of notebooks is."""


@pytest.fixture
def displays_made(monkeypatch):
    """What is displayed under the cell, by display."""
    displays = []

    class Handle:
        def __init__(self, html):
            displays.append([html])
            self.at = len(displays) - 1

        def update(self, html):
            displays[self.at].append(html)

    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: ZMQInteractiveShell()
    module.HTML, module.display = str, lambda html, display_id: Handle(html)
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return displays


def test_a_terminal_is_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()


def test_one_table_changes_with_the_steps(displays_made, monkeypatch):
    monkeypatch.setattr("argosy.observe.terminal.notebook.PACE_S", 0)
    assert in_notebook()
    with Notebook() as view:
        view.header({"model": "<tiny>", "steps": 40})
        for step in range(1, 31):
            view.step(step, {"loss": 5 - step / 10, "lr": 1e-3, "targets": 7.0})
        view.evaluation(30, {"eval_loss": 1.5})
    assert len(displays_made) == 1
    last = displays_made[0][-1]
    assert "&lt;tiny&gt;, 40 steps" in last
    assert last.count("<tr>") == 21
    assert "<td>30</td><td>2</td><td>1.5</td>" in last.replace("2.0000", "2").replace("1.5000", "1.5")
    assert "<td>10</td>" not in last
    assert "targets" not in last
