"""The supervisor of several processes, with programs that need no jax."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import Clock

from argosy.core.errors import BadInput
from argosy.launch.local import devices_of, gpus, run
from argosy.launch.settings import LocalLaunch

START = "import os, sys, time, signal; rank, attempt = int(os.environ['ARGOSY_RANK']), int(os.environ['ARGOSY_ATTEMPT'])\n"


def launch(code: str, tmp_path: Path, progress=lambda: None, **settings) -> tuple[int, list[str]]:
    messages: list[str] = []
    local = LocalLaunch(**{"processes": 2, "grace": 5, **settings})
    os.environ["TEST_FOLDER"] = str(tmp_path)
    try:
        return run([sys.executable, "-c", START + code], local, messages.append, progress), messages
    finally:
        del os.environ["TEST_FOLDER"]


def test_processes_that_all_end_well(tmp_path: Path):
    code = "open(os.environ['TEST_FOLDER'] + f'/{rank}', 'w').write(os.environ['ARGOSY_COORDINATOR'])"
    assert launch(code, tmp_path, processes=3) == (0, [])
    assert len({(tmp_path / str(rank)).read_text() for rank in range(3)}) == 1, "one coordinator for all"


def test_a_death_ends_the_others_and_starts_all_again(tmp_path: Path):
    code = """
print('hello from', rank, file=sys.stderr, flush=True)
if attempt == 0 and rank == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
if attempt == 0: time.sleep(60)
"""
    begun = time.monotonic()
    code, messages = launch(code, tmp_path)
    assert code == 0
    assert time.monotonic() - begun < 10
    assert messages[0] == "process 1 of 2 ended by SIGKILL"
    assert messages[1] == "  [1] hello from 1"
    assert messages[-1].endswith("(restart 1)")


def test_a_stopped_process_is_named_with_its_place(tmp_path: Path):
    code = """
if attempt: sys.exit(0)
from pathlib import Path
from argosy.observe.whereabouts import Whereabouts
Whereabouts(Path(os.environ['ARGOSY_WHERE']), lambda: 48)('checkpoint')
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
Path(os.environ['ARGOSY_NATIVE_LOG']).write_text('F1124 Terminating process because the JAX distributed service detected fatal errors.')
os.abort()
"""
    code, messages = launch(code, tmp_path)
    assert code == 0
    assert messages[0] == (
        "process 1 of 2 did not answer any more, after step 48, while it saved: "
        "a signal had stopped it, and the others ended without it"
    )
    assert "what each printed is in " in messages[1]
    assert len(messages) == 2


def test_a_mistake_of_the_users_starts_nothing_again(tmp_path: Path):
    code, messages = launch("open(os.environ['TEST_FOLDER'] + f'/{rank}-{attempt}', 'w'); print('wrong'); sys.exit(2)", tmp_path)
    assert code == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0-0", "1-0"]
    assert not any("restart" in line for line in messages)


def test_a_failure_that_would_come_again_starts_nothing_again(tmp_path: Path):
    code, messages = launch("from argosy.train.guard import Diverged; sys.exit(Diverged('x').exit_code)", tmp_path)
    assert code == 1
    assert not any("restart" in line for line in messages)


def test_a_directory_in_use_starts_nothing_again_and_is_waited_for_after_a_restart(tmp_path: Path):
    busy = "from argosy.core.errors import Busy; sys.exit(Busy('x').exit_code)"
    code, messages = launch(busy, tmp_path)
    assert code == 1
    assert not any("restart" in line for line in messages)
    # The process that holds it may be one that was killed and has not ended.
    killed = f"attempt or os.kill(os.getpid(), 9)\nif attempt < 3:\n    {busy}"
    code, messages = launch(killed, tmp_path)
    assert code == 0
    assert sum("restart" in line for line in messages) == 3


def test_restarts_without_progress_end(tmp_path: Path):
    code, messages = launch("sys.exit(1 if rank == 1 else 75)", tmp_path, restarts=2)
    assert code == 1, "of the process that failed, not of one that lost it"
    assert len([line for line in messages if "restart " in line]) == 2
    assert messages[-1].startswith("it failed 3 times without a new checkpoint")


def test_restarts_with_progress_go_on(tmp_path: Path):
    steps = iter(range(100))
    code, messages = launch("sys.exit(1 if attempt < 5 else 0)", tmp_path, lambda: next(steps), restarts=1)
    assert code == 0
    assert len([line for line in messages if "restart " in line]) == 5


@pytest.mark.slow
def test_processes_say_where_they_are_when_another_dies(tmp_path: Path):
    code = """
import faulthandler
faulthandler.register(signal.SIGUSR1, file=open(os.environ['ARGOSY_STACKS'], 'a'), all_threads=True)
def held_up(): time.sleep(60)
if attempt: sys.exit(0)
if rank == 2:
    time.sleep(1)
    sys.exit(1)
held_up()
"""
    code, messages = launch(code, tmp_path, processes=3)
    assert code == 0
    assert any("processes 0-1:" in line and "in held_up" in line for line in messages)


def test_the_others_say_a_line_each_when_one_is_killed(tmp_path: Path):
    code = """
import faulthandler
from pathlib import Path
from argosy.observe.whereabouts import WHERE, Whereabouts
faulthandler.register(signal.SIGUSR1, file=open(os.environ['ARGOSY_STACKS'], 'a'), all_threads=True)
Whereabouts(Path(os.environ[WHERE]), lambda: 48 + rank)("checkpoint")
def live(): time.sleep(60)
if attempt: sys.exit(0)
if rank == 2:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
live()
"""
    code, messages = launch(code, tmp_path, processes=3)
    assert code == 0
    assert messages[:3] == [
        "process 2 of 3 ended by SIGKILL, after step 50, while it saved",
        "process 0 of 3 was alive, after step 48, while it saved",
        "process 1 of 3 was alive, after step 49, while it saved",
    ]
    assert len(messages) == 4, "and that all start again"


def test_what_processes_print_goes_to_files_where_asked(tmp_path: Path):
    launch("print('rank', rank)", tmp_path, logs=str(tmp_path / "logs"))
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "rank 1\n"
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "rank 0\n"


def test_a_folder_of_logs_that_is_a_file_is_a_mistake(tmp_path: Path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(BadInput, match=r"logs=.*exists"):
        launch("pass", tmp_path, logs=str(tmp_path / "logs"))


COMMAND = """
import sys
from argosy.core.process import signals
signals.take_over()
from argosy.launch.local import run
from argosy.launch.settings import LocalLaunch
sys.exit(run([sys.executable, "-c", sys.argv[1]], LocalLaunch(processes=2, grace=5), print))
"""


def start_supervisor(code: str, folder: Path) -> subprocess.Popen[bytes]:
    variables = os.environ | {"TEST_FOLDER": str(folder)}
    return subprocess.Popen([sys.executable, "-c", COMMAND, code], env=variables, start_new_session=True)


def ready(folder: Path) -> list[int]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if len(paths := [p for p in folder.glob("pid-*") if p.read_text()]) == 2:
            return [int(p.read_text()) for p in paths]
        time.sleep(0.05)
    raise AssertionError("the processes did not start")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PIDS = START + "open(os.environ['TEST_FOLDER'] + f'/pid-{rank}', 'w').write(str(os.getpid()))\n"


def test_ctrl_c_reaches_every_process_once_and_its_exit_code_is_kept(tmp_path: Path):
    code = PIDS + """
def asked(*_):
    open(os.environ['TEST_FOLDER'] + f'/asked-{rank}', 'a').write('x')
    time.sleep(0.2)
    sys.exit(130)
signal.signal(signal.SIGINT, asked)
time.sleep(60)
"""
    supervisor = start_supervisor(code, tmp_path)
    ready(tmp_path)
    time.sleep(0.3)
    os.killpg(supervisor.pid, signal.SIGINT)
    assert supervisor.wait(20) == 130
    assert [(tmp_path / f"asked-{rank}").read_text() for rank in range(2)] == ["x", "x"]


def test_processes_end_with_their_supervisor(tmp_path: Path, clock: Clock):
    code = PIDS + """
import threading
from argosy.launch.cluster import _end_with
threading.Thread(target=_end_with, args=(int(os.environ['ARGOSY_PARENT']),), daemon=True).start()
time.sleep(60)
"""
    supervisor = start_supervisor(code, tmp_path)
    pids = ready(tmp_path)
    supervisor.kill()
    supervisor.wait()
    until = time.monotonic() + 15
    with clock("over"):
        while any(map(is_alive, pids)) and time.monotonic() < until:
            time.sleep(0.1)
    assert not any(map(is_alive, pids))


def test_gpus_are_shared_out(tmp_path: Path):
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    assert gpus({}, tmp_path) == ["0", "1", "2", "3"]
    assert gpus({"CUDA_VISIBLE_DEVICES": "GPU-x, 3"}) == ["GPU-x", "3"]
    assert gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert gpus({}, tmp_path / "none") == []
    seen = [devices_of(rank, LocalLaunch(processes=2), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) for rank in range(2)]
    assert seen == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    with pytest.raises(BadInput, match="3 GPUs do not divide among 2 processes"):
        devices_of(0, LocalLaunch(processes=2), {"CUDA_VISIBLE_DEVICES": "1,2,3"})
    assert devices_of(1, LocalLaunch(devices=4), {"JAX_PLATFORMS": "cpu"}) == {"JAX_NUM_CPU_DEVICES": "4"}
