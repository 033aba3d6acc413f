"""Checkpoints of several processes in an object store: here files of one disk, reached through fsspec as those of a store are."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_gangs import alone, command, environment, gang, metrics_of, results, text  # noqa: F401

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.step.load import load_weights
from argosy.core.storage import Store
from argosy.weights import manifest

SETUP = """
import numpy as np, jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathlib import Path
from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.medium import objects
from argosy.checkpoint.settings import CheckpointSettings
from argosy.checkpoint.shared import check_shared
from argosy.checkpoint.step.layout import STATE, WEIGHTS
from argosy.checkpoint.step.load import load_data, load_item, load_weights
from argosy.core.storage import ReadOnly, Store
disk, said = Path(os.environ["TEST_FOLDER"]), []
store = (ReadOnly if rank else Store)("local://" + os.environ["TEST_FOLDER"])
mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("a", "b"))
rows = np.arange(48, dtype=np.float32).reshape(6, 8)
def place(*axes):
    return NamedSharding(mesh, P(*axes))
def made(values, *axes):
    return jax.make_array_from_callback(values.shape, place(*axes), lambda at: values[at])
def opened():
    return Checkpoints(store, CheckpointSettings(keep=9), said.append)
def save(checkpoints, step):
    weights = {"split": made(rows + step, "a", "b"), "whole": made(rows)}
    checkpoints.save(step, weights, {"step": made(np.int32(step))}, {"step": step}, {"seen": np.arange(step)})
    checkpoints.join()
def restored(checkpoints, step):
    wanted = {WEIGHTS: {"split": place("a"), "whole": place()}, STATE: {"step": place()}}
    checkpoints.prepare(step, wanted)
    folder = checkpoints.path(step)
    back, state = load_weights(folder, wanted[WEIGHTS]), load_item(folder, STATE, wanted[STATE])
    same = all(np.array_equal(s.data, (rows + step)[s.index]) for s in back["split"].addressable_shards)
    same &= all(np.array_equal(s.data, rows) for s in back["whole"].addressable_shards) and int(state["step"]) == step
    return bool(same and checkpoints.meta(step)["step"] == step and np.array_equal(load_data(folder)["seen"], np.arange(step)))
def shards_in(folder):
    names = [f.relative_to(folder) for f in folder.rglob("*") if f.is_file()]
    return sorted(name.as_posix() for name in names if "c" in name.parts)
def flip(step):
    if rank == 0:
        file = disk / str(step) / "weights" / "split" / "c" / "1" / "1"
        data = bytearray(file.read_bytes())
        data[5] ^= 1
        file.write_bytes(data)
    processes.run_together("flipped", lambda: None)
"""


def run_gang(code: str, folder: Path) -> list[dict]:
    return results(gang(SETUP + code, TEST_FOLDER=str(folder), JAX_NUM_CPU_DEVICES="2"))


@pytest.mark.slow
def test_each_process_sends_and_fetches_its_own_shards(tmp_path: Path):
    """Where sending fails in one, the step is not committed, all say so, and the next save works."""
    code = """
check_shared(store)
out["shared"] = caught(lambda: check_shared(Store(f"memory://{rank}")))
checkpoints, upload, full = opened(), objects.upload, [True]
def failing(to, name, file):
    if rank == 1 and full[0]:
        raise OSError(5, "the store is away")
    return upload(to, name, file)
objects.upload = failing
save(checkpoints, 1)
full[0] = False
save(checkpoints, 2)
checkpoints.wait()
out["said"], out["steps"] = list(said), checkpoints.steps()
again = opened()
out["good"] = again.latest_good()
out["described"] = shards_in(again.path(2))
out["back"] = restored(again, 2)
out["fetched"] = shards_in(again.path(2))
scratch = again.path(2)
save(again, 3)
out["left"] = scratch.exists()
"""
    first, second = run_gang(code, tmp_path)
    for document in (first, second):
        assert document["steps"] == [2]
        assert document["said"] == [document["said"][0]]
        assert "the store is away" in document["said"][0]
        assert document["said"][0].endswith("trying again with step 2; the run has no checkpoint yet")
        assert (document["good"], document["back"], document["left"]) == (2, True, False)
        assert document["described"] == ["data/seen/c/0"]
    assert "(in process 1)" in first["said"][0]
    assert second["shared"][1] == "process 1 does not see the files that process 0 writes in memory://1"
    # Rows 0 to 2 are read by the devices of process 0, and those after them by the devices of the other.
    shared = ["data/seen/c/0", "state/step/c", "weights/whole/c/0/0"]
    for rank, document in enumerate((first, second)):
        assert document["fetched"] == sorted([*shared, f"weights/split/c/{rank}/0", f"weights/split/c/{rank}/1"])
    # A process alone reads it, and its own readers verify it.
    manifest.verify_folder(tmp_path / "3")
    reader = Checkpoints(Store(f"local://{tmp_path}"))
    assert reader.latest_good() == 3
    np.testing.assert_array_equal(load_weights(reader.path(3))["split"], np.arange(48).reshape(6, 8) + 3)


@pytest.mark.slow
def test_damage_and_a_store_that_is_away(tmp_path: Path):
    code = """
checkpoints = opened()
for step in (1, 2, 3):
    save(checkpoints, step)
flip(3)
again = opened()
out["good"] = [again.latest_good(), restored(again, 2), said[-1:]]
open_, names = Store.open, []
def away(self, name, mode="rb"):
    if rank == 1 and mode == "rb" and "split" in name:
        raise OSError(110, "Connection timed out")
    return open_(self, name, mode)
Store.open = away
out["away"] = caught(lambda: opened().latest_good())
Store.open = open_
out["after"] = opened().latest_good()
# It changes between the moment when it is verified and that when it is read.
again = opened()
again.latest_good()
flip(2)
out["changed"] = caught(lambda: restored(again, 2))
flip(2), flip(1), flip(2)
out["all"] = caught(lambda: opened().latest_good())
out["names"] = sorted(f.name for f in disk.iterdir())
"""
    first, second = run_gang(code, tmp_path)
    for document in (first, second):
        assert document["good"][:2] == [2, True]
        assert document["after"] == 2
        assert document["names"] == ["1", "2", "3.damaged"], "nothing is renamed where none is good, or one cannot be reached"
    assert first["good"][2][0].startswith("checkpoint 3 is damaged and was set aside as 3.damaged: weights/split/c/1/1 differs")
    assert second["good"][2] == []
    assert first["away"] == ["ArgosyError", "cannot be reached: [Errno 110] Connection timed out", 1], "it may be started again"
    assert second["away"][0] == "FailedElsewhere"
    assert {first["changed"][0], second["changed"][0]} == {"Damaged", "FailedElsewhere"}
    assert first["all"][0] == "Damaged"
    assert first["all"][1].startswith("all 2 checkpoints are damaged; the newest: weights/split/c/1/1 differs")
    assert second["all"][0] == "FailedElsewhere"


@pytest.mark.slow
def test_a_step_whose_arrays_orbax_packed(tmp_path: Path):
    """Every process fetches the files that its arrays share."""
    from orbax.checkpoint import v1

    rows = np.arange(48, dtype=np.float32).reshape(6, 8)
    weights, step = {"split": rows + 4, "whole": rows}, tmp_path / "4"
    v1.save_checkpointables(step, {"weights": weights, "state": {"step": np.asarray(4)}, "data": {"seen": np.arange(4)}})
    assert not (step / "weights" / "split").exists(), "packed"
    (step / "meta.json").write_text('{"step": 4}')
    manifest.write_manifest(step)
    for document in run_gang("again = opened()\nout['back'] = [again.latest_good(), restored(again, 4)]", tmp_path):
        assert document["back"] == [4, True]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(text: Path, tmp_path: Path, alone: dict):  # noqa: F811
    """Bit for bit."""
    run = tmp_path / "run"
    words = command(text, run)
    words[words.index(f"dir={run}")] = f"dir=local://{run}"
    launch = [sys.executable, "-m", "argosy", "launch", "processes=2", "grace=5", "--", *words]
    process = subprocess.Popen(launch, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 100
    while not (run / "checkpoints" / "2" / "manifest.json").exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert "(restart 1)" in stderr
    assert metrics_of(run) == alone
    assert Checkpoints(Store(f"local://{run}/checkpoints")).latest_good() == 6
