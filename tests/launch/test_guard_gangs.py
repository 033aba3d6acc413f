"""Bad steps in runs of two processes, of which one has the bad batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import free_port
from test_gangs import SMALL, environment, metrics_of

# Batch 5 is bad in the second half of its rows, which rank 1 reads.
# As the command does before it imports jax, so that its own exit function runs after those of jax.
FIRST = """
from argosy.core.process import signals
signals.take_over()
"""

POISON = """
import os, runpy, sys
from argosy.data.pipeline import RowBatches
get = RowBatches.__next__
def poisoned(self):
    batch = get(self)
    if self.handed == 5 and os.environ.get("ARGOSY_RANK", "1") == "1":
        batch = {name: a.copy() for name, a in batch.items()}
        batch["mask"][-1] = float("nan")
    return batch
RowBatches.__next__ = poisoned
sys.argv[0] = "argosy"
runpy.run_module("argosy", run_name="__main__")
"""


def gang(folder: Path, words: list[str], count: int) -> tuple[list[int], list[str]]:
    """Exit codes of processes that train together, and what they said."""
    if count == 1:
        places = [environment(JAX_NUM_CPU_DEVICES="2")]
    else:
        more = {"ARGOSY_COORDINATOR": f"127.0.0.1:{free_port()}", "ARGOSY_PROCESSES": str(count)}
        places = [environment(**more, ARGOSY_RANK=str(rank)) for rank in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"said-{i}" for i in range(count)]
    started = []
    for file, place in zip(files, places, strict=True):
        with file.open("wb") as log:
            started.append(subprocess.Popen([sys.executable, "-c", FIRST + POISON, *words], env=place, stdout=log, stderr=log))
    return [process.wait(150) for process in started], [file.read_text() for file in files]


def command(run: Path, *words: str) -> list[str]:
    return ["train", "tiny", "data.source=synthetic", f"dir={run}", *SMALL, "eval.batches=0", *words]


@pytest.mark.slow
@pytest.mark.parametrize(("action", "code"), [("rollback", 0), ("skip", 0), ("stop", 1)])
def test_two_processes_do_as_one(tmp_path: Path, action: str, code: int):
    words = [f"guard.nonfinite={action}", "guard.replay=2"]
    metrics = {}
    for count in (1, 2):
        run = tmp_path / str(count)
        codes, output = gang(tmp_path / f"said-{count}", command(run, *words), count)
        assert codes == [code] * count, output
        metrics[count] = {key: str(value) for key, value in metrics_of(run).items()}
        saved = {int(step.name) for step in (run / "checkpoints").iterdir() if step.name.isdigit()}
        assert max(saved) == (4 if action == "stop" else 6)
        if action == "stop":
            assert sum("loss is nan at step 5" in text for text in output) == 1
        if action == "rollback":
            (rollback,) = json.loads((run / "rollbacks.json").read_text())
            assert (rollback["restored"], rollback["first"], rollback["last"]) == (4, 5, 5)
    assert metrics[1] == metrics[2]


TWICE = """
from argosy.run.hooks import replay
check = replay.Replay.check
def differs(self, step, sums):
    import numpy as np
    first, second = (np.array(one) for one in sums)
    first[1] += 1
    return check(self, step, (first, second))
replay.Replay.check = differs
"""


@pytest.mark.slow
def test_corruption_ends_all_processes_with_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{__name__}.POISON", TWICE + POISON.replace("== 5", "== 99"))
    codes, output = gang(tmp_path / "said", command(tmp_path / "run", "guard.replay=4"), 2)
    assert codes == [1, 1], output
    assert sum("of process 1" in text and "step 4 was computed twice" in text for text in output) == 1
    assert max(int(step.name) for step in (tmp_path / "run" / "checkpoints").iterdir() if step.name.isdigit()) == 2
