"""Stacks of stuck processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from argosy.observe import stacks
from argosy.observe.stacks import Watchdog, fold_stacks

ONE = """Thread 0x00007f12 (most recent call first):
  File "a.py", line 1 in inner
  File "a.py", line 9 in outer

Current thread 0x00007f34 [python] (most recent call first):
  File "b.py", line 2 in step
Extension modules: numpy, yaml (total: 2)
"""


def test_stacks_that_are_alike_are_shown_once():
    other = ONE.replace("0x00007f34", "0x00009934").replace("line 2 in step", "line 3 in wait")
    folded = fold_stacks({0: ONE, 1: ONE.replace("7f", "aa"), 2: ONE, 4: other})
    assert folded.count('line 9 in outer') == 1
    assert "processes 0-2, 4:\n" + '  File "a.py", line 1 in inner' in folded
    assert "processes 0-2:\n" + '  File "b.py", line 2 in step' in folded
    assert 'process 4:\n  File "b.py", line 3 in wait' in folded
    assert "Extension" not in folded
    assert "0x" not in folded


def test_threads_that_wait_for_work_are_left_out():
    code = """
import faulthandler, queue, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
pool.submit(int).result()
def works(): time.sleep(60)
for waits in (queue.Queue().get, queue.SimpleQueue().get, threading.Event().wait, works):
    threading.Thread(target=waits, daemon=True).start()
time.sleep(0.3)
faulthandler.dump_traceback(sys.stdout)
sys.stdout.flush()
import os; os._exit(0)
"""
    dump = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    folded = fold_stacks({0: dump})
    assert dump.count("most recent call first") == 6
    assert " in works" in folded
    assert " in <module>" in folded
    assert " in _worker" not in folded
    assert 'queue.py"' not in folded
    # The thread of a queue without Python code of its own ends in `run`.
    assert folded.count("process 0:") <= 3


def test_a_process_that_does_not_go_on_ends_and_says_where(tmp_path: Path):
    code = """
import sys, time
from pathlib import Path
from argosy.observe.stacks import Watchdog
def held_up(): time.sleep(30)
dog = Watchdog(1.0, Path(sys.argv[1]))
dog.alive()
held_up()
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "stacks")], timeout=20, check=False)
    assert ended.returncode == 1
    assert "in held_up" in fold_stacks({3: (tmp_path / "stacks").read_text()})


def test_how_long_a_step_may_take_follows_from_those_before(monkeypatch: pytest.MonkeyPatch):
    now, armed = [0.0], []
    monkeypatch.setattr(stacks.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stacks.faulthandler, "dump_traceback_later", lambda seconds, **_: armed.append(seconds))
    monkeypatch.setattr(stacks.faulthandler, "register", lambda *_, **__: None)
    dog = Watchdog(600)
    assert armed == [600]
    for at in (100, 102, 104):
        now[0] = at
        dog.alive()
    assert armed == [600, 30, 30, 30], "the first has a compilation in it, and is no measure"
    now[0] = 109
    dog.alive()
    assert armed[-1] == 50
    dog.patiently(lambda _: now.__setitem__(0, 400))(None)
    assert armed[-2:] == [600, 50], "what was done patiently is no measure of a step, and the step after it may take no longer"
    now[0] = 403
    dog.alive()
    assert armed[-1] == 50
    now[0] = 1003
    dog.alive()
    assert armed[-1] == 600, "never longer than what the settings say"
