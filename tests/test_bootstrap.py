"""`./run` and the wheel, without a network: what is decided, what is said, what is left behind.

A checkout in a folder with a space, whose environment is a stand-in that tells how it was called.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
STAND_IN = '#!/bin/sh\nprintf "%s\\n" "in $PWD" "$@"\n'

posix = pytest.mark.skipif(os.name == "nt", reason="the stand-in for Python is a shell script")


def load(path: Path) -> ModuleType:
    loader = SourceFileLoader("bootstrap", str(path))
    spec = importlib.util.spec_from_loader("bootstrap", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> ModuleType:
    """A checkout's `run`, beside what it reads, without an environment."""
    root = tmp_path / "a checkout"
    root.mkdir()
    shutil.copy(ROOT / "run", root / "run")
    shutil.copy(ROOT / "pyproject.toml", root / "pyproject.toml")
    shutil.copytree(ROOT / "requirements", root / "requirements")
    return load(root / "run")


@pytest.fixture
def ready(checkout: ModuleType) -> ModuleType:
    """The same with a stand-in for its environment."""
    python = checkout.python_of(checkout.VENV)
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN, encoding="utf-8")
    python.chmod(0o755)
    write_stamps(checkout)
    return checkout


def write_stamps(checkout: ModuleType) -> None:
    for kind in ("base", "dev"):
        stamp = checkout.stamp_of(checkout.lock_file(kind), checkout.ROOT / "pyproject.toml")
        (checkout.VENV / f"{kind}.stamp").write_text(stamp, encoding="utf-8")


def call(
    checkout: ModuleType, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, checkout.ROOT / "run", *words],
        cwd=cwd or checkout.ROOT,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        check=False,
    )


# ---------------------------------------------------------------- calling


@posix
def test_a_verb_runs_where_the_user_stands(ready: ModuleType, tmp_path: Path):
    done = call(ready, "generate", "my model", "x=1", cwd=tmp_path)
    assert done.stdout.splitlines() == [f"in {tmp_path}", "-P", "-m", "argosy", "generate", "my model", "x=1"]
    assert (done.returncode, done.stderr) == (0, "")


@posix
def test_a_second_call_imports_nothing_of_a_set_up(ready: ModuleType):
    """It looks at two files and becomes the command: nothing is started, downloaded or searched for."""
    command = [sys.executable, "-X", "importtime", str(ready.ROOT / "run"), "quickstart"]
    done = subprocess.run(command, cwd=ready.ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hashlib" in imported
    assert not imported & {"subprocess", "venv", "fcntl", "tempfile"}


@posix
@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_a_device_has_an_environment_and_a_lock_of_its_own(ready: ModuleType, kind: str):
    python = ready.python_of(ready.VENVS[kind])
    assert python.parent.parent.name == f".venv-{kind}"
    python.parent.mkdir(parents=True)
    shutil.copy(ready.python_of(ready.VENV), python)
    python.chmod(0o755)
    (ready.VENVS[kind] / f"{kind}.stamp").write_text(
        ready.stamp_of(ready.lock_file(kind), ready.ROOT / "pyproject.toml"), encoding="utf-8"
    )
    shutil.rmtree(ready.VENV)  # the other environment is not asked for
    done = call(ready, f"--{kind}", "train", "tiny")
    assert done.stdout.splitlines()[1:] == ["-P", "-m", "argosy", "train", "tiny"], done.stderr


@pytest.mark.parametrize(("kind", "package"), [("gpu", "jax-cuda12-plugin"), ("tpu", "libtpu")])
def test_a_devices_lock_is_the_base_lock_and_its_plugin(kind: str, package: str):
    def pins(name: str) -> set[str]:
        lines = (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8").splitlines()
        return {line.partition(" ")[0] for line in lines if "==" in line}

    assert pins("base") <= pins(kind)
    assert any(pin.startswith(f"{package}==") for pin in pins(kind))


@posix
def test_the_command_that_was_typed_is_handed_on(ready: ModuleType):
    stand_in = ready.python_of(ready.VENV)
    stand_in.write_text('#!/bin/sh\necho "$ARGOSY_COMMAND"\n', encoding="utf-8")
    done = subprocess.run(["./run", "train"], cwd=ready.ROOT, capture_output=True, text=True)
    assert done.stdout == "./run\n", done.stderr


@posix
def test_an_installer_does_not_outlive_a_killed_set_up(checkout: ModuleType, tmp_path: Path):
    """It would write into the environment that the next set-up makes."""
    program = f"""
import os, sys
sys.dont_write_bytecode = True
from importlib.machinery import SourceFileLoader
run = SourceFileLoader("run", {str(checkout.ROOT / "run")!r}).load_module()
run.forward()
run.runs([sys.executable, "-c", "import os, time; open('pid', 'w').write(str(os.getpid())); os.rename('pid', 'there'); time.sleep(60)"])
"""
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", program], cwd=checkout.ROOT)
    while not (there := checkout.ROOT / "there").exists():
        assert process.poll() is None
        time.sleep(0.01)
    child = int(there.read_text())
    process.terminate()
    assert process.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@posix
def test_tests_run_on_all_cores_and_a_file_on_one(ready: ModuleType, tmp_path: Path):
    whole = call(ready, "test", "-x", cwd=tmp_path).stdout.splitlines()
    assert {"-n", "auto", "worksteal", "-x", str(ready.ROOT / "tests")} <= set(whole)
    (tmp_path / "test_one.py").touch()
    lines = call(ready, "test", "test_one.py::f", cwd=tmp_path).stdout.splitlines()
    assert lines[-1] == "test_one.py::f"
    assert "-n" not in lines


@posix
def test_python_is_the_environments(ready: ModuleType):
    assert call(ready, "python", "-c", "1 + 1").stdout.splitlines()[1:] == ["-c", "1 + 1"]


def test_usage_needs_no_environment(checkout: ModuleType):
    done = call(checkout, "--help")
    assert done.returncode == 0
    assert "quickstart" in done.stdout
    assert not checkout.VENV.exists()


# ---------------------------------------------------------------- when to set up


def test_what_makes_an_environment_stale(ready: ModuleType, monkeypatch: pytest.MonkeyPatch):
    inputs = (ready.lock_file("base"), ready.ROOT / "pyproject.toml")
    assert ready.is_ready(ready.VENV, "base", ready.stamp_of(*inputs))
    for path in inputs:
        before = path.read_bytes()
        path.write_bytes(before + b"\n")
        assert not ready.is_ready(ready.VENV, "base", ready.stamp_of(*inputs)), path.name
        path.write_bytes(before)
    monkeypatch.setattr(ready.platform, "python_version", lambda: "3.99.1")
    assert not ready.is_ready(ready.VENV, "base", ready.stamp_of(*inputs))


def test_a_copied_checkout_is_not_ready(ready: ModuleType, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(ready.ROOT, copy)
    other = load(copy / "run")
    stamp = other.stamp_of(other.lock_file("base"), other.ROOT / "pyproject.toml")
    assert not other.is_ready(other.VENV, "base", stamp)


def test_a_killed_set_up_is_made_afresh_and_a_stale_one_in_place(ready: ModuleType, monkeypatch: pytest.MonkeyPatch):
    commands = []
    monkeypatch.setattr(ready, "call", commands.append)
    ready.make_venv(ready.VENV)
    assert not commands
    assert not list(ready.VENV.glob("*.stamp")), "a kill from here on must leave no stamp"
    ready.make_venv(ready.VENV)
    assert "--clear" in commands[0]


@posix
def test_two_at_once_wait_for_each_other(ready: ModuleType):
    (ready.VENV / "base.stamp").unlink()
    with ready.alone():
        other = subprocess.Popen(
            [sys.executable, ready.ROOT / "run", "help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert other.stderr is not None
        assert "waiting for another ./run" in other.stderr.readline()
        write_stamps(ready)
    out, err = other.communicate(timeout=30)
    assert other.returncode == 0
    assert "argosy" in out
    assert "setting up" not in err


# ---------------------------------------------------------------- what can go wrong


@pytest.mark.slow
def test_no_network_is_reported_and_leaves_no_stamp(checkout: ModuleType):
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "UV_OFFLINE": "1"}
    done = call(checkout, "quickstart", env=nowhere | {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""})
    assert done.returncode == 1
    first, *rest = done.stderr.strip().splitlines()
    assert first.startswith("setting up .venv")
    assert rest[0] == "error: cannot reach the package index"
    assert len(rest) <= 5
    assert not list(checkout.VENV.glob("*.stamp"))


@pytest.mark.parametrize(
    "output, problem",
    [
        ("OSError: [Errno 28] No space left on device", "no space left"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "not the one that was locked"),
        ("Failed to establish a new connection: [Errno 111] Connection refused", "cannot reach the package index"),
        ("[Errno 13] Permission denied: '.venv'", "no permission"),
        ("a line\nsomething else\n\n", "the set-up failed: something else"),
        ("", "the set-up failed: no output"),
    ],
)
def test_an_installers_output_is_understood(checkout: ModuleType, output: str, problem: str):
    diagnosis, hint = checkout.diagnose(output)
    assert problem in diagnosis
    assert hint


def test_an_old_python_is_reported(checkout: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(checkout, "OLDEST", (9, 9))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as ended:
        checkout.main(["quickstart"])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: this is Python 3.")
    assert lines[1:] == ["", "hint: install one, then: python3.12 run quickstart"]


# ---------------------------------------------------------------- what is locked


def names_of(lock: str) -> dict[str, set[str]]:
    """Package -> its pinned versions, one for each range of Pythons."""
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9._-]+)==([^ ;]+)", lock, re.M):
        versions.setdefault(name, set()).add(version)
    return versions


def test_locks_agree_and_hold_what_installs_the_rest():
    base, dev = (names_of((ROOT / "requirements" / f"{k}.lock").read_text(encoding="utf-8")) for k in ("base", "dev"))
    assert {"jax", "uv", "hatchling", "editables"} <= set(base)
    assert {name: dev.get(name) for name in base} == base
    assert {"pytest", "pytest-xdist", "ruff", "basedpyright"} <= set(dev)
    assert not set(dev) & {"torch", "transformers"}


def test_the_package_asks_for_what_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["dependencies"]) <= set((ROOT / "requirements" / "base.in").read_text(encoding="utf-8").split())


def test_one_entry_of_a_lock_is_cut_out_whole(checkout: ModuleType):
    entry = checkout.pin(checkout.lock_file("base").read_text(encoding="utf-8"), "uv").splitlines()
    assert entry[0].startswith("uv==")
    assert len(entry) > 1
    assert all("--hash=sha256:" in line for line in entry[1:])
    assert not entry[-1].endswith("\\")


# ---------------------------------------------------------------- the wheel


def test_a_wheel_holds_the_package_and_its_configs(tmp_path: Path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    names = set(zipfile.ZipFile(next(tmp_path.glob("argosy-*.whl"))).namelist())
    paths = [p for suffix in ("*.py", "*.yml") for p in (ROOT / "argosy").rglob(suffix)]
    assert {p.relative_to(ROOT).as_posix() for p in paths} <= names
    assert {n.split("/")[0] for n in names} == {"argosy", next(n for n in names if ".dist-info/" in n).split("/")[0]}
    assert any(n.endswith("entry_points.txt") for n in names)
