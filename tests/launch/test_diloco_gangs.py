"""A replica on each of two processes, against two replicas in one."""

from pathlib import Path

import numpy as np
import pytest
from test_gangs import argosy, metrics_of
from test_guard_gangs import FIRST, command, gang

from argosy.checkpoint.step.layout import STATE
from argosy.checkpoint.step.load import load_item, load_weights

TRAIN = FIRST + """
import runpy, sys
sys.argv[0] = "argosy"
runpy.run_module("argosy", run_name="__main__")
"""
REPLICAS = ["diloco.every=3", "mesh.fsdp=1", "checkpoint.every=4"]


@pytest.mark.slow
def test_replicas_on_two_processes_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also what a checkpoint holds between two outer steps, from which one process goes on."""
    monkeypatch.setattr("test_guard_gangs.POISON", TRAIN.removeprefix(FIRST))
    metrics, states = {}, {}
    for count, mesh in ((1, "mesh.data=2"), (2, "mesh.between.data=2")):
        run = tmp_path / str(count)
        codes, output = gang(tmp_path / f"said-{count}", command(run, *REPLICAS, mesh), count)
        assert codes == [0] * count, output
        assert "2 replicas of 4 rows a step, an outer step every 3 steps" in output[0]
        metrics[count] = metrics_of(run)
        folder = run / "checkpoints" / "4"
        states[count] = {name: np.asarray(a) for name, a in (load_weights(folder) | load_item(folder, STATE)).items()}
    assert metrics[1] == pytest.approx(metrics[2], rel=1e-5)
    assert states[1].keys() == states[2].keys()
    for name, a in states[1].items():
        np.testing.assert_allclose(states[2][name], a, rtol=1e-4, atol=2e-6, err_msg=name)
    apart = [name for name, a in states[2].items() if name.startswith("optimizer.replicas.") and (a[0] != a[1]).any()]
    assert len(apart) == sum(name.startswith("optimizer.replicas.") for name in states[2])
    # Written by two processes, resumed by one.
    for step in (tmp_path / "2" / "checkpoints").glob("6"):
        step.rename(tmp_path / "six")
    done = argosy(command(tmp_path / "2", *REPLICAS, "mesh.data=2"), JAX_NUM_CPU_DEVICES="2")
    assert done.returncode == 0, done.stderr
    again, before = (load_weights(at) for at in (tmp_path / "2" / "checkpoints" / "6", tmp_path / "six"))
    for name, a in before.items():
        np.testing.assert_allclose(again[name], a, rtol=1e-4, atol=2e-6, err_msg=name)
