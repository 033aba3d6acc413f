"""Runs of two processes of which one is slow: by its data, or because it does not get to run."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import Clock, free_port
from test_gangs import SMALL, environment
from test_guard_gangs import FIRST

# A batch of rank 1 takes a second, as long as the file is there.
SLOW_DATA = """
import os, runpy, sys, time
from argosy.data.pipeline import RowBatches
get = RowBatches.__next__
def slow(self):
    if os.environ["ARGOSY_RANK"] == "1" and os.path.exists(os.environ["TEST_SLOW"]):
        time.sleep(1)
    return get(self)
RowBatches.__next__ = slow
sys.argv[0] = "argosy"
runpy.run_module("argosy", run_name="__main__")
"""

class Gang:
    """Two processes that train together until they are asked to stop."""

    def __init__(self, folder: Path, code: str, *words: str):
        self.folder, self.run = folder, folder / "run"
        more = {"ARGOSY_COORDINATOR": f"127.0.0.1:{free_port()}", "ARGOSY_PROCESSES": "2", "TEST_SLOW": str(folder / "slow")}
        train = ["train", "tiny", "data.source=synthetic", f"dir={self.run}", *SMALL, "eval.batches=0", *words]
        self.started = []
        for rank in range(2):
            with (folder / f"said-{rank}").open("wb") as log:
                variables = environment(**more, ARGOSY_RANK=str(rank))
                program = ["-c", FIRST + code] if code else ["-m", "argosy"]
                self.started.append(subprocess.Popen([sys.executable, *program, *train], env=variables, stdout=log, stderr=log))

    def lines(self) -> list[dict]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()[:-1]] if path.exists() else []

    def verdicts(self) -> list[dict]:
        return [line["straggler"] for line in self.lines() if "straggler" in line]

    def until(self, condition, seconds: float = 100) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.said()
            assert all(process.poll() is None for process in self.started), self.said()
            time.sleep(0.05)

    def said(self) -> list[str]:
        return [(self.folder / f"said-{rank}").read_text() for rank in range(2)]

    def stop(self) -> list[int]:
        """Their exit codes, after a signal to one."""
        self.started[1].send_signal(signal.SIGTERM)
        return [process.wait(60) for process in self.started]

    def kill(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


LONG = ["steps=100000", "checkpoint.every=100000"]


@pytest.mark.slow
def test_slow_data_is_named_and_its_recovery_too(tmp_path: Path, clock: Clock):
    slow = tmp_path / "slow"
    gang = Gang(tmp_path, SLOW_DATA, *LONG)
    try:
        gang.until(lambda: len(gang.lines()) > 30)
        before = gang.verdicts()
        slow.touch()
        first = max(line["step"] for line in gang.lines())
        with clock("noticed"):
            slow_data = {"process": 1, "cause": "data", "is_recovered": False}
            gang.until(lambda: any(verdict | slow_data == verdict for verdict in gang.verdicts()))
        step = next(line["step"] for line in gang.lines() if line.get("straggler", {}).get("cause") == "data")
        slow.unlink()
        with clock("over"):
            gang.until(lambda: any(verdict["is_recovered"] and verdict["cause"] == "data" for verdict in gang.verdicts()))
        assert gang.stop() == [143, 143], gang.said()
    finally:
        gang.kill()
    verdict = next(verdict for verdict in gang.verdicts() if verdict["cause"] == "data")
    assert verdict["process"] == 1
    assert 0.3 < verdict["seconds"] < 1.5
    assert not before
    assert step - first <= 25
    output = gang.said()
    assert len(re.findall(r"process 1 on host \S+ is slow: its data takes", output[0])) == 1
    assert "process 1 on host" in output[0].split("is slow")[-1]
    assert "is slow" not in output[1]
    assert "process 0" not in output[0]


@pytest.mark.slow
def test_a_process_that_is_stopped_again_and_again_is_named(tmp_path: Path, clock: Clock):
    """As a container does to one that exceeds its share of processors: half of the time."""
    gang, over = Gang(tmp_path, "", *LONG), threading.Event()

    def limit() -> None:
        while not over.wait(0.1):
            os.kill(gang.started[1].pid, signal.SIGSTOP)
            time.sleep(0.1)
            os.kill(gang.started[1].pid, signal.SIGCONT)

    thread = threading.Thread(target=limit)
    try:
        gang.until(lambda: len(gang.lines()) > 30)
        thread.start()
        with clock("noticed"):
            gang.until(lambda: any(verdict["process"] == 1 and not verdict["is_recovered"] for verdict in gang.verdicts()))
        over.set()
        thread.join()
        assert gang.stop() == [143, 143], gang.said()
    finally:
        over.set()
        gang.kill()
    assert not [verdict for verdict in gang.verdicts() if verdict["process"] == 0]
    assert re.search(r"process 1 on host \S+ is slow: it stands still for 0\.\d+ s of each step", gang.said()[0])
