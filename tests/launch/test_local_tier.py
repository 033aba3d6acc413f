"""Local checkpoints of several processes, each with a disk of its own: one loses it, is damaged, or is full."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_gangs import gang, results

SETUP = """
import numpy as np, jax, shutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathlib import Path
from argosy.checkpoint.step import files
from argosy.checkpoint.tiers.local import LocalCheckpoints
from argosy.checkpoint.step.layout import STATE, WEIGHTS
from argosy.checkpoint.step.load import load_data, load_item, load_weights
folder, said = Path(os.environ["TEST_FOLDER"]), []
mesh = Mesh(np.asarray(jax.devices()).reshape(jax.device_count() // 2, 2), ("a", "b"))
rows = np.arange(48, dtype=np.float32).reshape(6, 8)
def made(values, *axes):
    place = NamedSharding(mesh, P(*axes))
    return jax.make_array_from_callback(values.shape, place, lambda at: values[at])
def tier(copies=1):
    return LocalCheckpoints(folder / f"disk-{rank}" / "run", copies, said.append)
def save(local, step, axes=("a",)):
    local.save(step, {"split": made(rows + step, *axes), "whole": made(rows)}, {"step": made(np.int32(step))}, {"step": step},
        {"seen": np.arange(step)})
    local.join()
def restored(local, step):
    places = {"split": NamedSharding(mesh, P("b")), "whole": NamedSharding(mesh, P())}
    local.prepare(step, {WEIGHTS: places, STATE: {"step": NamedSharding(mesh, P())}})
    back = load_weights(local.path(step), places)
    state = load_item(local.path(step), STATE, {"step": NamedSharding(mesh, P())})
    same = all(np.array_equal(s.data, (rows + step)[s.index]) for s in back["split"].addressable_shards)
    same &= all(np.array_equal(s.data, rows) for s in back["whole"].addressable_shards) and int(state["step"]) == step
    return bool(same and local.meta(step)["step"] == step and np.array_equal(load_data(local.path(step))["seen"], np.arange(step)))
def lose(who):
    if rank == who:
        shutil.rmtree(folder / f"disk-{rank}")
    processes.run_together("lost", lambda: None)
"""


def run_gang(code: str, folder: Path) -> list[dict]:
    return results(gang(SETUP + code, TEST_FOLDER=str(folder), JAX_NUM_CPU_DEVICES="2"))


@pytest.mark.slow
def test_a_host_that_lost_its_disk_reads_from_the_others(tmp_path: Path):
    """With copies, or with replicas; without either the step is not used, and no part of it is left to hinder a newer one."""
    code = """
local = tier()
save(local, 1)
out["all there"] = [tier().latest_good()]
again = tier(); again.latest_good()
out["all there"].append(restored(again, 1))
lose(1)
out["alone"] = tier().latest_good()
out["left"] = sorted(str(f) for f in folder.rglob("manifest.json"))
save(tier(), 2, (None, "b"))
lose(0)
again = tier()
out["replicas"] = [again.latest_good(), restored(again, 2)]
save(tier(2), 3)
lose(1)
again = tier(2)
out["copies"] = [again.latest_good(), restored(again, 3)]
out["said"] = said
"""
    for document in run_gang(code, tmp_path):
        assert document["all there"] == [1, True]
        assert document["alone"] is None
        assert document["left"] == []
        assert document["replicas"] == [2, True]
        assert document["copies"] == [3, True]
        assert any("local checkpoint 1 lacks 1 of its" in text for text in document["said"])
        assert any("of local checkpoint 3 came from other hosts" in text for text in document["said"])


@pytest.mark.slow
def test_a_full_disk_and_a_flipped_bit_of_one_host(tmp_path: Path):
    """The save fails in all, is said in all, and the next one is good; a damaged copy is read from the other host."""
    code = """
local, write, full = tier(2), files.write_files, [False]
def failing(folder, what, pace):
    if rank == 1 and full[0]:
        raise OSError(28, "No space left on device")
    return write(folder, what, pace)
files.write_files = failing
save(local, 1)
full[0] = True
save(local, 2)
full[0] = False
out["here"] = local.steps()
save(local, 3)
out["said"] = list(said)
if rank == 0:
    file = folder / "disk-0" / "run" / "0" / "3" / "weights" / "split" / "c" / "0" / "0"
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
processes.run_together("flipped", lambda: None)
again = tier(2)
out["back"] = [again.latest_good(), restored(again, 3)]
# Copies that have come apart are no checkpoint.
again.save(4, {"split": made(rows, "a"), "whole": made(rows + rank)}, {"step": made(np.int32(4))}, {}, None)
again.join()
again.settle(5)
out["apart"] = said[-1]
"""
    for document in run_gang(code, tmp_path):
        assert document["here"] == [1]
        assert "No space left on device" in document["said"][0]
        assert document["said"][0].endswith("trying again with step 3")
        assert document["back"] == [3, True]
        assert "process 1 holds another copy of weights/whole/c/0/0 than a process before it" in document["apart"]


@pytest.mark.slow
def test_another_number_of_processes_reads_them(tmp_path: Path):
    """Of one host: two processes wrote, each a part; one goes on alone."""
    shared = SETUP.replace('folder / f"disk-{rank}"', 'folder / "disk"')
    first = results(gang(shared + "save(tier(), 7)\nout['said'] = said", TEST_FOLDER=str(tmp_path), JAX_NUM_CPU_DEVICES="2"))
    assert [document["said"] for document in first] == [[], []]
    script = "import json, os\nfrom argosy.parallel import processes\nrank, out = 0, {}\n" + shared
    script += "again = tier()\nout['back'] = [again.latest_good(), restored(again, 7)]\nagain.retire(7)\n"
    script += "print('OUT ' + json.dumps(out))"
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    variables |= {"JAX_PLATFORMS": "cpu", "TEST_FOLDER": str(tmp_path), "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=90, check=False)
    assert json.loads(done.stdout.partition("OUT ")[2])["back"] == [7, True], done.stderr[-2000:]
    assert sorted(f.name for f in (tmp_path / "disk" / "run").iterdir()) == ["0"]
