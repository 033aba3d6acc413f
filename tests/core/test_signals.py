"""Signals end a command at once, or ask it to stop: in processes of their own, without jax."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.core.process import signals

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of Unix")


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    """Programs that the tests start inherit what nohup ignores, and would wait for a SIGHUP for ever."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


READY = "print('ready', flush=True)"
# C code that lets go of the lock on the interpreter, as XLA does while it compiles, and does not look for signals.
BUSY = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"


def run(body: str, *numbers: int, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """The exit code and stderr of a program that is sent signals, each when it has written another line to stdout."""
    head = "import os, sys, time\nfrom argosy.core.process import signals\nsignals.take_over()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {}),
    )
    assert process.stdout
    for number in numbers:
        process.stdout.readline()
        process.send_signal(number)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["int", "term", "hup"]
)
def test_a_signal_ends_the_process_though_c_code_runs(number: int, code: int):
    assert run(f"{READY}\n{BUSY}", number) == (code, "")


def test_an_import_is_ended_without_a_traceback(tmp_path: Path):
    (tmp_path / "slow.py").write_text(f"try:\n    {READY}; import time; time.sleep(60)\nexcept BaseException:\n    raise ImportError")
    assert run("import slow", signal.SIGINT, environment={"PYTHONPATH": f"{ROOT}:{tmp_path}"}) == (130, "")


ASKED = f"""
with signals.asked_to_stop("saving first") as stop:
    {READY}
    while not stop():
        time.sleep(0.01)
    {READY}
    {{then}}
print("saved", stop.code, file=sys.stderr)
sys.exit(stop.code)
"""


def test_the_first_signal_asks_and_is_answered_at_once():
    assert run(ASKED.format(then="pass"), signal.SIGTERM) == (143, "saving first\nsaved 143\n")


def test_the_second_signal_ends_the_process():
    assert run(ASKED.format(then=BUSY), signal.SIGINT, signal.SIGINT) == (130, "saving first\n")


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGINT])
def test_a_hang_up_after_a_signal_does_not_prevent_saving(first: signal.Signals):
    """A closing terminal may send SIGHUP twice: once from its shell, once from the kernel."""
    code = 128 + first
    assert run(ASKED.format(then="time.sleep(0.5)"), first, signal.SIGHUP) == (code, f"saving first\nsaved {code}\n")


def test_a_second_hang_up_is_ignored_in_somebody_elses_program():
    with signals.asked_to_stop() as stop:
        signal.raise_signal(signal.SIGHUP)
        try:
            signal.raise_signal(signal.SIGHUP)
        except KeyboardInterrupt:
            pytest.fail("the second SIGHUP ended the block")
        assert stop.code == 129


def test_after_the_block_signals_end_the_process_again():
    body = f"with signals.asked_to_stop():\n    pass\n{READY}\n{BUSY}"
    assert run(body, signal.SIGINT) == (130, "")


def test_what_is_to_be_said_is_reported_and_a_callback_that_hangs_is_not_waited_for():
    program = f"with signals.before_leaving(lambda: print('bye', file=sys.stderr, flush=True)):\n    {READY}\n    {BUSY}"
    assert run(program, signal.SIGINT) == (130, "bye\n")
    hangs = f"signals.CLEANING_S = 0.1\nwith signals.before_leaving(lambda: time.sleep(60)):\n    {READY}\n    {BUSY}"
    assert run(hangs, signal.SIGINT) == (130, "")


def test_a_hang_up_that_is_ignored_stays_ignored():
    """nohup: the command goes on when the terminal closes."""
    body = f"""
import signal
signals._State.taken_over = False
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signals.take_over()
{READY}
time.sleep(0.2)
"""
    assert run(body, signal.SIGHUP) == (0, "")


def test_signals_wait_while_the_process_is_replaced():
    body = """
if "again" not in os.environ:
    signals.hold()
    os.environ["again"] = "1"
    os.kill(os.getpid(), 2)
    os.execv(sys.executable, sys.orig_argv)
time.sleep(60)
"""
    assert run(body) == (130, "")


def test_during_teardown_a_signal_no_longer_changes_the_exit_code():
    body = "import atexit\natexit.register(lambda: (print('x', flush=True), time.sleep(0.5)))\nsignals.end_command(0)"
    assert run(body, signal.SIGINT) == (0, "")


def test_in_somebody_elses_program_handlers_are_borrowed():
    from argosy.core.process.signals import asked_to_stop

    before = signal.getsignal(signal.SIGINT)
    with asked_to_stop() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop.code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_ctrl_c_at_random_moments_of_verbs(tmp_path: Path):
    import campaign_interrupt

    blows = campaign_interrupt.campaign(tmp_path, 2, verbs=("train", "generate", "convert"))
    assert any(blow.code is not None for blow in blows)
    assert all(blow.good for blow in blows), [blow for blow in blows if not blow.good]


RAISED = f"""
try:
    with signals.raising():
        {READY}
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
except SystemExit as end:
    print("ends with", end.code, file=sys.stderr)
{READY}
time.sleep(60)
"""


@pytest.mark.parametrize("number, stderr", [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "ends with 143\n")])
def test_a_signal_raises_at_a_prompt_and_ends_the_process_after_it(number: int, stderr: str):
    assert run(RAISED, number, signal.SIGTERM) == (143, stderr)
