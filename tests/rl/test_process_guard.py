"""What environments start ends with their answer and with the run, however these end: also what has left its process group."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from rl.talking import language_model, prompts, table

from argosy.core.errors import ArgosyError
from argosy.infer.lm import LM

ECHO = """
class Own:
    def reset(self): pass
    def step(self, said): return Turn(said)
"""


@pytest.fixture(scope="module")
def lm() -> LM:
    return language_model()


def test_no_process_outlives_its_table(lm: LM, tmp_path):
    setup = table(tmp_path, ECHO, prompts(lm, ["a"]))
    session = setup.environments._process.pid
    played = [setup.environments.open() for _ in range(3)]
    for environment in played:
        environment.ask({"seed": 1, "reset": {}})
    while any(environment.reply is None for environment in played):
        setup.environments.look(played, 1.0)
    assert len(alive(session)) >= 5
    setup.close()
    assert eventually(lambda: not alive(session))


def alive(session: int) -> list[int]:
    """The processes of a session, without those that have ended and that nobody has asked for."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, its = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            pids += [int(folder.name)] if int(its) == session and state not in "ZX" else []
    return pids


def eventually(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + 20
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return true()


def test_what_an_environment_started_ends_with_it(lm: LM, tmp_path):
    code = """
    import subprocess
    class Own:
        def reset(self):
            self.other = subprocess.Popen(["sh", "-c", "sleep 97; true"])
        def step(self, said): pass
    """
    setup = table(tmp_path, code, prompts(lm, ["a"]))
    session = setup.environments._process.pid
    assert eventually(lambda: len(alive(session)) == 2)
    environment = setup.environments.open()
    environment.ask({"seed": 1, "reset": {}})
    layout = "besides guard and server: the environment, the process around it, the shell, and what that runs"
    assert eventually(lambda: len(alive(session)) == 6), layout
    setup.environments.end(environment)
    assert eventually(lambda: len(alive(session)) == 2)
    setup.close()


@pytest.mark.skipif(sys.platform != "linux", reason="what a process leaves behind is found on Linux alone")
@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "sys.exit()"])
def test_what_an_environment_that_crashes_started_ends_before_the_run_does(lm: LM, tmp_path, end: str):
    """A shell with a child, and one that has left the group and whose parent is gone. Another environment keeps its own."""
    code = f"""
    import subprocess, sys
    class Own:
        def reset(self, prompt):
            self.other = subprocess.Popen(["sh", "-c", "sleep 97; true"])
            return subprocess.check_output(["sh", "-c", "setsid sleep 98 > /dev/null & echo $!"]).decode()
        def step(self, said):
            {end}
    """
    setup = table(tmp_path, code, prompts(lm, ["a"]))
    session = setup.environments._process.pid
    environment, other = setup.environments.open(), setup.environments.open()
    for each in (environment, other):
        each.ask({"seed": 1, "reset": {"prompt": "a"}})
    while environment.reply is None or other.reply is None:
        setup.environments.look([environment, other], 1.0)
    crashed, other_pid = int(environment.reply["observation"]), int(other.reply["observation"])
    # The child that leaves the group may be about to.
    assert eventually(lambda: len(alive(session)) == 2 + 2 * 4)
    environment.ask({"step": "x"})
    while environment.reply is None:
        setup.environments.look([environment], 1.0)
    assert environment.reply.keys() & {"died", "raised"}
    if "raised" in environment.reply:
        setup.environments.end(environment)
    assert eventually(lambda: len(alive(session)) == 2 + 4)
    assert eventually(lambda: not is_alive(crashed))
    assert is_alive(other_pid)
    setup.environments.end(other)
    assert eventually(lambda: not is_alive(other_pid))
    setup.close()


LEAVES = """
    import re, subprocess
    class Own:
        def __init__(self, folder): self.folder = folder
        def reset(self):
            other = subprocess.Popen(["sleep", "96"], start_new_session=True)
            open(f"{self.folder}/pid-{other.pid}", "w").close()
        def step(self, said): re.match(r"(a+)+$", "a" * 64 + "b")
"""
# Starts as `LEAVES` does where the class is loaded, and never comes back.
PREPARES = LEAVES + """
        @classmethod
        def prepare(cls, folder):
            cls(folder).reset()
            if os.path.exists(folder + "/stuck"): re.match(r"(a+)+$", "a" * 64 + "b")
"""
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="what has left the group is found on Linux alone")


def escaped_pids(folder: Path) -> list[int]:
    """The processes that have left their group."""
    return [int(path.name[4:]) for path in folder.glob("pid-*")]


@ON_LINUX
@pytest.mark.parametrize("code", [LEAVES, PREPARES])
def test_closing_ends_what_has_left_the_group_of_an_answer_that_goes_on(lm: LM, tmp_path, code: str):
    setup = table(tmp_path, code, prompts(lm, ["a"]), args={"folder": str(tmp_path)})
    environment = setup.environments.open()
    environment.ask({"seed": 1, "reset": {}})
    while environment.reply is None:
        setup.environments.look([environment], 1.0)
    # It is in a call that never gives the interpreter back.
    environment.ask({"step": "x"})
    pids = escaped_pids(tmp_path)
    assert len(pids) == (1 if code is LEAVES else 2)
    assert all(map(is_alive, pids))
    start = time.monotonic()
    setup.close()
    assert not any(map(is_alive, pids)), "closing waits for them"
    assert time.monotonic() - start < 5


TRAINER = """
import sys
from pathlib import Path
from argosy.rl.environments.pool import EnvironmentPool
path = Path(sys.argv[1]) / "own.py"
source = {"of": "own.py:Own", "file": str(path), "source": path.read_text(), "function": "Own", "args": {"folder": sys.argv[1]}}
made = EnvironmentPool(source, 100.0, [])
one = made.open()
one.ask({"seed": 1, "reset": {}})
while one.reply is None: made.look([one], 1.0)
one.ask({"step": "x"})
print("ready", flush=True)
sys.stdin.read()
"""


@ON_LINUX
@pytest.mark.parametrize("situation", ["answer", "loading"])
def test_sigkill_of_the_trainer_ends_what_has_left_the_group(tmp_path, situation: str):
    """With an environment, or the server while it loads, in a call that never gives the interpreter back."""
    path = tmp_path / "own.py"
    path.write_text("import os, time\nfrom argosy.rl.environment import Turn\n" + textwrap.dedent(PREPARES))
    if situation == "loading":
        (tmp_path / "stuck").touch()
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)], stdin=pipe, stdout=pipe, text=True) as trainer:
        assert trainer.stdout is not None
        if situation == "answer":
            assert trainer.stdout.readline() == "ready\n"
        assert eventually(lambda: len(escaped_pids(tmp_path)) == (2 if situation == "answer" else 1))
        assert all(map(is_alive, escaped_pids(tmp_path)))
        trainer.kill()
    assert eventually(lambda: not any(map(is_alive, escaped_pids(tmp_path))))


@ON_LINUX
def test_an_environment_that_kills_its_group_leaves_nothing(lm: LM, tmp_path):
    code = LEAVES.replace('re.match(r"(a+)+$", "a" * 64 + "b")', "os.killpg(0, 9)")
    setup = table(tmp_path, code, prompts(lm, ["a"]), args={"folder": str(tmp_path)})
    environment = setup.environments.open()
    environment.ask({"seed": 1, "reset": {}})
    while environment.reply is None:
        setup.environments.look([environment], 1.0)
    (pid,) = escaped_pids(tmp_path)
    environment.ask({"step": "x"})
    assert eventually(lambda: not is_alive(pid))
    with pytest.raises(ArgosyError, match="ended"):
        eventually(lambda: setup.environments.open() is None)
    setup.close()


@ON_LINUX
def test_processes_that_lost_their_parent_are_collected_while_an_answer_goes_on(lm: LM, tmp_path):
    code = """
    import subprocess
    class Own:
        def reset(self): pass
        def step(self, said):
            for _ in range(5): subprocess.run(["sh", "-c", "sleep 0.05 &"])
            time.sleep(0.5)
            return Turn(str(os.getppid()))
    """
    setup = table(tmp_path, code, prompts(lm, ["a"]))
    environment = setup.environments.open()
    for command in ({"seed": 1, "reset": {}}, {"step": "x"}):
        environment.ask(command)
        while environment.reply is None:
            setup.environments.look([environment], 1.0)
    guard = int(environment.reply["observation"])
    children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
    setup.close()
    assert len(children) == 1, "the environment, and no process that has ended"


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_a_guard_waits_on_descriptors_above_1023():
    """They are numbered as the trainer's are, which has a socket for each environment."""
    code = """
import os, resource, sys
from argosy.core.process import guard as process_guard
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
read, write = os.pipe()
os.dup2(read, 1500)
if (pid := os.fork()) == 0:
    os.close(write)
    process_guard.run_guarded(1500)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "7", done.stderr
