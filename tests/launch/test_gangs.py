"""What several processes agree on, with two real ones on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers import Clock, free_port

from argosy.checkpoint.step.load import load_data, load_weights
from argosy.checkpoint.step.reader import read_array
from argosy.core.errors import ArgosyError
from argosy.core.storage import Store
from argosy.launch.cluster import ProcessPlace, check_free
from argosy.observe.life import account
from argosy.weights import manifest

JOIN = """
import json, os, sys, time
from argosy.launch.cluster import detect_place, join
place = detect_place(os.environ)
join(place)
from argosy.parallel import processes
from argosy.core.errors import ArgosyError, BadInput, FailedElsewhere
rank, out = processes.rank(), {}
def caught(do):
    try:
        return do()
    except ArgosyError as error:
        return [type(error).__name__, error.what, error.exit_code]
"""
END = "\nprint('OUT ' + json.dumps(out))\n"


def gang(code: str, count: int = 2, **more: str) -> list[subprocess.Popen[str]]:
    base = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    base |= {"ARGOSY_COORDINATOR": f"127.0.0.1:{free_port()}", "ARGOSY_PROCESSES": str(count), "JAX_PLATFORMS": "cpu", **more}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", JOIN + code + END]
    return [subprocess.Popen(words, env=base | {"ARGOSY_RANK": str(rank)}, **pipes) for rank in range(count)]


def results(started: list[subprocess.Popen[str]]) -> list[dict]:
    documents = []
    for process in started:
        out, err = process.communicate(timeout=90)
        lines = [line for line in out.splitlines() if line.startswith("OUT ")]
        assert lines, err[-2000:]
        documents.append(json.loads(lines[0].removeprefix("OUT ")))
    return documents


def test_processes_agree():
    """One test, because joining takes seconds."""
    code = """
out["told"] = processes.broadcast("a", lambda: {"from": rank})
out["again"] = processes.broadcast("a", lambda: ["second", rank])
def no(): raise BadInput(f"no, says {rank}")
out["told badly"] = caught(lambda: processes.broadcast("b", no))
out["together"] = processes.run_together("c", lambda: f"done by {rank}")
def one(): return no() if rank == 1 else "done"
out["one failed"] = caught(lambda: processes.run_together("d", one))
out["all failed"] = caught(lambda: processes.run_together("e", no))
out["collected"] = processes.all_gather("f", rank * 10)
out["alike"] = caught(lambda: processes.check_same_facts({"version": "1"}, {}))
out["not alike"] = caught(lambda: processes.check_same_facts({"version": "1", "settings": str(rank)}, {"settings": "the hint"}))
order = []
out["one by one"] = processes.one_by_one("g", lambda: time.time())
"""
    first, second = results(gang(code))
    for document in (first, second):
        assert document["told"] == {"from": 0}
        assert document["again"] == ["second", 0]
        assert document["collected"] == [0, 10]
        assert document["alike"] is None
    assert first["told badly"] == ["BadInput", "no, says 0", 2]
    assert second["told badly"] == ["FailedElsewhere", "no, says 0", 2]
    assert (first["together"], second["together"]) == ("done by 0", "done by 1")
    assert first["one failed"] == ["FailedElsewhere", "no, says 1 (in process 1)", 2]
    assert second["one failed"] == ["BadInput", "no, says 1", 2]
    assert first["all failed"] == ["BadInput", "no, says 0", 2]
    assert second["all failed"][0] == "FailedElsewhere"
    assert second["not alike"] == ["BadInput", "process 1 has another settings than process 0", 2]
    assert first["not alike"][0] == "FailedElsewhere"
    assert first["one by one"] <= second["one by one"]


def test_all_stop_after_the_same_step():
    """The processes are steps apart: nothing but the stop makes them wait for each other."""
    code = """
asked, followed = [False], []
stop = processes.Stopping(lambda: asked[0], lambda: 143, followed.append)
step = 0
while step < 2000:
    time.sleep(0.002 if rank else 0.003)
    step += 1
    if rank == 1 and step == 300:
        asked[0] = True
    if stop():
        break
out["step"], out["followed"] = step, followed
stop.close()
"""
    first, second = results(gang(code))
    assert first["step"] == second["step"] < 2000
    assert first["step"] >= 300
    assert first["followed"] == second["followed"] == [143]


@pytest.mark.slow
def test_checkpoints_that_each_process_writes_its_share_of(tmp_path: Path):
    """A save that fails in one process is not committed, all know why, and the next one is."""
    code = """
import numpy as np, jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pathlib import Path
from argosy.checkpoint.step import files
from argosy.checkpoint.settings import CheckpointSettings
from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.shared import check_shared
from argosy.checkpoint.step.load import load_weights
from argosy.core.storage import Store
folder, said = Path(os.environ["TEST_FOLDER"]), []
check_shared(Store(folder))
own = Path(os.environ["TEST_FOLDER"], "apart", str(rank))
own.mkdir(parents=True)
out["apart"] = caught(lambda: check_shared(Store(own)))
mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("a", "b"))
def made(values, *axes):
    place = NamedSharding(mesh, P(*axes))
    return jax.make_array_from_callback(values.shape, place, lambda at: values[at])
rows = np.arange(48, dtype=np.float32).reshape(6, 8)
weights = {
    "split": made(rows, "b", "a"), "one": made(rows, "a"), "whole": made(rows), "scalar": made(np.float32(7)),
    "odd": made(np.arange(3, dtype=np.int32)), "none": made(np.zeros((0, 4), np.float32)),
    "half": made(rows.astype(jax.numpy.bfloat16), ("a", "b")[::-1][:1]),
}
state = {"step": made(np.int32(5))}
checkpoints = Checkpoints(folder / "run", CheckpointSettings(keep=2), said.append)
write, full = files.write_files, [True]
def failing(folder, what, pace):
    if rank == 1 and full[0]:
        raise OSError(28, "No space left on device")
    return write(folder, what, pace)
files.write_files = failing
checkpoints.save(1, weights, state, {"a": 1})
checkpoints.join()
full[0] = False
checkpoints.save(2, weights, state, {"a": 2}, {"seen": np.arange(4)})
# What is trained with goes on changing.
weights = {name: a + 0 for name, a in weights.items()}
checkpoints.wait()
out["said"], out["steps"] = said, checkpoints.steps()
places = {name: NamedSharding(mesh, P("b") if name in ("split", "one") else P()) for name in weights}
back = load_weights(checkpoints.path(2), places)
out["equal"] = {name: all(np.array_equal(s.data, np.asarray(rows if name in ("split", "one", "whole") else
    {"scalar": np.float32(7), "odd": np.arange(3), "none": np.zeros((0, 4)), "half": rows}[name])[s.index])
    for s in a.addressable_shards) for name, a in back.items()}
"""
    first, second = results(gang(code, TEST_FOLDER=str(tmp_path), JAX_NUM_CPU_DEVICES="2"))
    for document in (first, second):
        assert document["steps"] == [2]
        assert document["equal"] == dict.fromkeys(["split", "one", "whole", "scalar", "odd", "none", "half"], True)
        assert "No space left on device" in document["said"][0]
        assert document["said"][0].endswith("trying again with step 2; the run has no checkpoint yet")
    assert "(in process 1)" in first["said"][0]
    assert second["apart"][:2] == ["BadInput", f"process 1 does not see the files that process 0 writes in {tmp_path}/apart/1"]
    manifest.verify_folder(tmp_path / "run" / "2")
    # By a process alone, with its own readers and with Orbax.
    rows = np.arange(48, dtype=np.float32).reshape(6, 8)
    for name, expected in {"split": rows, "one": rows, "whole": rows, "scalar": np.float32(7)}.items():
        np.testing.assert_array_equal(read_array(tmp_path / "run" / "2", name), expected)
    back = load_weights(tmp_path / "run" / "2")
    np.testing.assert_array_equal(back["split"], rows)
    assert back["half"].dtype == "bfloat16"
    np.testing.assert_array_equal(load_data(tmp_path / "run" / "2")["seen"], np.arange(4))


@pytest.mark.slow
def test_a_process_that_never_comes_is_said():
    started = gang("", ARGOSY_JOIN_S="3")
    started[1].kill()
    started[1].communicate()
    _, err = started[0].communicate(timeout=60)
    assert started[0].returncode == 1, "jaxlib's own time-out aborts the process"
    assert "error: process 0 of 2 waited 3 s for the others at 127.0.0.1" in err
    assert "failure stack trace" not in err


@pytest.mark.slow
def test_a_leader_that_nobody_knows_is_said():
    started = gang("", ARGOSY_COORDINATOR="nobody.invalid:4000", ARGOSY_JOIN_S="3")
    started[0].kill()
    for process in started:
        _, err = process.communicate(timeout=60)
    assert started[1].returncode == 1
    assert "waited 3 s for the others at nobody.invalid:4000; no address of nobody.invalid is known" in err


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_port_that_is_taken_is_an_error_before_jaxlib_crashes(address: str):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as other:
        other.bind((address, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ArgosyError, match=r"cannot listen on some-host:.*in use"):
            check_free(ProcessPlace("jax", f"some-host:{port}", 2, 0, 0), "" if address != "127.0.0.1" else address)
    check_free(ProcessPlace("jax", f"some-host:{port}", 2, 0, 0), "")


SMALL = [
    "steps=6", "data.batch=8", "data.sequence=32", "model.layers=2", "model.width=32", "model.ffn=64", "model.heads=2",
    "model.kv_heads=1", "model.head_size=16", "checkpoint.every=2", "eval.every=3", "eval.batches=2", "log.every=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(3000)))
    return path


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"} | more


def command(text: Path, run: Path, *words: str) -> list[str]:
    return ["train", "tiny", f"data.source={text}", f"dir={run}", *SMALL, *words]


def argosy(words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "argosy", *words], env=environment(**more), capture_output=True, text=True, timeout=200, check=False
    )


def metrics_of(run: Path) -> dict[tuple[int, str], float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], name): line[name] for line in lines for name in ("loss", "grad_norm", "eval_loss") if name in line}


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], float]:
    """One process with two devices."""
    run = tmp_path_factory.mktemp("alone") / "run"
    done = argosy(command(text, run), JAX_NUM_CPU_DEVICES="2")
    assert done.returncode == 0, done.stderr
    return metrics_of(run)


@pytest.mark.slow
def test_two_processes_train_as_one_with_two_devices(text: Path, tmp_path: Path, alone: dict):
    """Bit for bit, and with a process killed in the middle; one process goes on from what two saved."""
    run = tmp_path / "run"
    words = ["launch", "processes=2", "grace=5", "--", *command(text, run)]
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "argosy", *words], env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 100
    while not (run / "checkpoints" / "2" / "manifest.json").exists() and time.monotonic() < until and supervisor.poll() is None:
        time.sleep(0.01)
    children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
    if children:
        os.kill(int(children[-1]), signal.SIGKILL)
    _, output = supervisor.communicate(timeout=200)
    assert supervisor.returncode == 0, output
    assert metrics_of(run) == alone
    steps = sorted(int(step.name) for step in (run / "checkpoints").iterdir() if step.name.isdigit())
    assert steps[-1] == 6
    assert [step.name for step in (run / "checkpoints" / "6" / "weights" / "embed.w" / "c").iterdir()]
    longer = argosy(command(text, run, "steps=8"))
    assert longer.returncode == 0, longer.stderr
    assert "resuming from step 6 of 8" in longer.stderr
    for metric in ("loss", "eval_loss"):
        assert (8, metric) in metrics_of(run)
    # The last steps were made by one process alone: nobody waited for the other in them.
    spent = account(Store(run))
    assert spent is not None
    first, second = (spent.by_process[process] for process in (0, 1))
    assert first["step"] > second["step"] > 0
    assert min(first["waiting"], second["waiting"]) >= 0
    names = [{json.loads(line).get("gang") for line in (run / "life" / f"{n}.jsonl").read_text().splitlines()} for n in (0, 1)]
    assert names[1] < names[0]


@pytest.mark.slow
def test_a_signal_to_one_process_saves_the_same_step_in_all(text: Path, tmp_path: Path, clock: Clock):
    run = tmp_path / "run"
    words = command(text, run, "steps=100000", "checkpoint.every=100000", "eval.every=100000")
    started = gang_of(tmp_path, words)
    until = time.monotonic() + 100
    while time.monotonic() < until and (not (run / "metrics.jsonl").exists() or len(metrics_of(run)) < 10):
        time.sleep(0.05)
    started[1].send_signal(signal.SIGTERM)
    with clock("over"):
        assert [process.wait(60) for process in started] == [143, 143], said_by(tmp_path)
    (saved,) = [step.name for step in (run / "checkpoints").iterdir() if (step / "manifest.json").exists()]
    assert f"stopped at step {saved} of 100000: checkpoint {saved} is saved" in said_by(tmp_path)[0]


# Longer than Gloo waits for another process.
SLOW_TO_COMPILE = """
import os, runpy, sys, time
from argosy.core.process import signals
signals.take_over()
from argosy.run.assembly.assembly import Assembly
from argosy.run.hooks import evaluation as hooks
for where, name in ((Assembly, "compile"), (hooks, "compile_evaluation")):
    def slow(assembly, make=getattr(where, name)):
        if os.environ["ARGOSY_RANK"] == "1":
            time.sleep(35)
        return make(assembly)
    setattr(where, name, slow)
sys.argv[0] = "argosy"
runpy.run_module("argosy", run_name="__main__")
"""


@pytest.mark.slow
def test_one_that_is_slow_to_compile_is_waited_for(text: Path, tmp_path: Path, alone: dict):
    run = tmp_path / "run"
    started = gang_of(tmp_path, command(text, run), program=["-c", SLOW_TO_COMPILE])
    assert [process.wait(200) for process in started] == [0, 0], said_by(tmp_path)
    assert metrics_of(run) == alone


STUCK = """
import os, sys, threading, time
from pathlib import Path
def get_stuck(*_):
    Path(os.environ["TEST_STUCK"]).touch()
    time.sleep(1000)
def later():
    metrics = Path(os.environ["TEST_RUN"], "metrics.jsonl")
    while not metrics.exists() or metrics.read_text().count("grad_norm") < 5:
        time.sleep(0.05)
    sys.modules["argosy.run.assembly.assembly"].place_batch = get_stuck
if os.environ.get("ARGOSY_RANK") == "1" and os.environ.get("ARGOSY_ATTEMPT") == "0":
    threading.Thread(target=later, daemon=True).start()
"""


@pytest.mark.slow
def test_a_process_that_is_stuck_says_where_and_all_start_again(text: Path, tmp_path: Path, clock: Clock):
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    long = command(text, tmp_path / "run", "steps=3000", "checkpoint.every=2", "eval.every=9999")
    words = ["launch", "processes=2", "stuck=60", "--", *long]
    with (tmp_path / "said").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "argosy", *words], stderr=output, stdout=output, start_new_session=True,
            env=environment(PYTHONPATH=str(tmp_path), TEST_RUN=str(tmp_path / "run"), TEST_STUCK=str(tmp_path / "stuck")),
        )  # fmt: skip
        try:
            wait_until(lambda: (tmp_path / "stuck").exists())
            with clock("noticed"):
                wait_until(lambda: "in get_stuck" in (tmp_path / "said").read_text())
            with clock("over"):
                wait_until(lambda: "resuming from step" in (tmp_path / "said").read_text())
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
    log_text = (tmp_path / "said").read_text()
    assert "in get_stuck" in log_text, log_text
    assert "(restart 1)" in log_text
    assert "resuming from step" in log_text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("both", "theirs", "problem"),
    [
        ([], ["optimizer.learning_rate=0.5"], "process 1 has another settings than process 0"),
        (["data.batch=5"], [], "data.batch = 5 does not divide over 2 devices"),
        (["sample.every=2"], [], "several processes and sample.every do not combine"),
    ],
)
def test_a_mistake_is_one_error(text: Path, tmp_path: Path, both: list[str], theirs: list[str], problem: str, clock: Clock):
    words = [*command(text, tmp_path / "run"), *both]
    with clock("over"):
        codes = [process.wait(100) for process in gang_of(tmp_path, words, [*words, *theirs])]
    texts = said_by(tmp_path)
    assert codes[0] == codes[1], texts
    assert codes[0] in (1, 2)
    assert [text.count("error:") for text in texts] in ([1, 0], [0, 1]), texts
    assert sum(problem in text for text in texts) == 1
    assert not (tmp_path / "run" / "settings.yml").exists()


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Waits until something is true, or for so long; the test says what it misses."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)


def gang_of(folder: Path, *words: list[str], program: Sequence[str] = ("-m", "argosy")) -> list[subprocess.Popen[bytes]]:
    """Two processes of these commands; the same, if there is one. What they say goes to files: a full pipe would hold them up."""
    more = {"ARGOSY_COORDINATOR": f"127.0.0.1:{free_port()}", "ARGOSY_PROCESSES": "2"}
    started = []
    for rank, its in enumerate(words * 2 if len(words) == 1 else words):
        with (folder / f"said-{rank}").open("wb") as log:
            variables = environment(**more, ARGOSY_RANK=str(rank))
            started.append(subprocess.Popen([sys.executable, *program, *its], env=variables, stdout=log, stderr=log))
    return started


def said_by(folder: Path) -> list[str]:
    return [(folder / f"said-{rank}").read_text() for rank in range(2)]
