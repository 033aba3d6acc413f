"""Processes on a real Ray of this machine, which needs the extra: `pip install -e '.[ray]'`, then `pytest -m slow` on this file."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from argosy.core.errors import Unsupported
from argosy.launch import ray as engine

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
# Compiling is most of the time; the engine passes them on.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
SMALL = [
    "steps=8", "data.batch=8", "data.sequence=32", "model.layers=2", "model.width=32", "model.ffn=64", "model.heads=2",
    "model.kv_heads=1", "model.head_size=16", "checkpoint.every=2", "eval.every=3", "eval.batches=2", "log.every=1",
]  # fmt: skip


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Unsupported, match="not installed") as caught, engine.connect_ray(None, 1):
        pass
    assert "[ray]'" in str(caught.value)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a text") / "it's.txt"
    path.write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(3000)))
    return path


def start_run(words: list[str], text: Path, run: Path, *more: str, **variables: str) -> subprocess.Popen[str]:
    variables_of_run = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK} | variables
    words = [sys.executable, "-m", "argosy", *words, "train", "tiny", f"data.source={text}", f"dir={run}", *SMALL, *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=variables_of_run, cwd=text.parent, start_new_session=True, **pipes)


LAUNCH = ["launch", "engine=ray", "processes=2", "grace=5", "--"]


def metrics_of(run: Path) -> dict[tuple[int, str], float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], name): line[name] for line in lines for name in ("loss", "grad_norm", "eval_loss") if name in line}


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], float]:
    """One process with two devices, without Ray."""
    run = tmp_path_factory.mktemp("alone") / "run"
    process = start_run([], text, run, JAX_NUM_CPU_DEVICES="2")
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    return metrics_of(run)


def process_of(rank: int, run: Path) -> int | None:
    """The process of this rank that trains the run."""
    for folder in Path("/proc").iterdir():
        try:
            words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if folder.name.isdigit() and f"dir={run}".encode() in words and f"ARGOSY_RANK={rank}".encode() in variables:
            return int(folder.name)
    return None


def at_step(step: int, run: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not (run / "checkpoints" / str(step) / "manifest.json").exists():
        assert time.monotonic() < until, "no checkpoint"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("killed", ["process", "actor"])
def test_two_ray_workers_train_as_one_process_with_two_devices(text: Path, tmp_path: Path, alone: dict, killed: str):
    """Bit for bit, with a worker killed in the middle: the process that trains, or the actor that started it."""
    run = tmp_path / "run"
    process = start_run(LAUNCH, text, run)
    at_step(2, run, process)
    pid = process_of(1, run)
    assert pid is not None, "it ended before it could be killed"
    if killed == "actor":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert "process 1 of 2 ended by SIGKILL" in stderr
    assert "starting all 2 processes again" in stderr
    assert metrics_of(run) == alone


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_saves_and_ends_all(text: Path, tmp_path: Path, number: signal.Signals):
    """A terminal sends Ctrl-C to everything that the command started in it."""
    run = tmp_path / "run"
    process = start_run(LAUNCH, text, run, "steps=100000", "checkpoint.every=100", "eval.every=100000")
    until = time.monotonic() + 120
    while time.monotonic() < until and (not (run / "metrics.jsonl").exists() or len(metrics_of(run)) < 10):
        time.sleep(0.05)
    os.kill(process.pid, number) if number == signal.SIGTERM else os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=250)
    assert process.returncode == 128 + number, stderr
    newest = max(int(step.name) for step in (run / "checkpoints").iterdir() if (step / "manifest.json").exists())
    assert f"stopped at step {newest} of 100000: checkpoint {newest} is saved" in stderr
    assert "again" not in stderr
    assert process_of(0, run) is process_of(1, run) is None


@pytest.mark.slow
def test_what_a_process_prints_last_is_told_and_one_left_behind_holds_nothing_up(tmp_path: Path):
    host = engine.Host()
    program = "import subprocess, sys; one = subprocess.Popen(['sleep', '60']); print(one.pid, flush=True); print('last'); sys.exit(7)"
    host.start([sys.executable, "-c", program], {"A": "b"}, str(tmp_path / "none"))
    begun, lines, code = time.monotonic(), [], None
    try:
        while code is None:
            more, code, stacks = host.news()
            lines += more
        assert (lines[1:], code, stacks) == ([b"last\n"], 7, "")
        assert time.monotonic() - begun < 30
    finally:
        os.kill(int(lines[0]), signal.SIGKILL)


@needs_ray
@pytest.mark.slow
def test_a_mistake_of_the_users_starts_nothing_again(text: Path, tmp_path: Path):
    """That there are two devices is known in the processes alone."""
    process = start_run(LAUNCH, text, tmp_path / "run", "mesh.fsdp=4")
    _, stderr = process.communicate(timeout=250)
    assert process.returncode == 2, stderr
    assert "fsdp 4" in stderr
    assert "starting all" not in stderr


@needs_ray
@pytest.mark.slow
def test_no_room_is_said(text: Path, tmp_path: Path):
    process = start_run(["launch", "engine=ray", "processes=1", "gpus=1", "wait=3", "--"], text, tmp_path / "run")
    _, stderr = process.communicate(timeout=250)
    assert process.returncode == 1, stderr
    assert "Ray has no room for 1 processes" in stderr
