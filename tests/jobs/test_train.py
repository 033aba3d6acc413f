"""A run and its directory: what may go on, what is refused, and what a refusal leaves behind, which is nothing."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign_flip import compiled_once
from campaign_kill import SMALL

import argosy
from argosy.core.errors import ArgosyError, BadInput, Busy, Damaged, UserError
from argosy.core.storage import Store
from argosy.jobs import assemble as assembling
from argosy.jobs.train import Quiet
from argosy.observe.metrics import by_step, read

STEPS, EVERY = 4, 2
WORDS = [*SMALL, f"checkpoint.every={EVERY}"]


class Heard(Quiet):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.words = ""

    def say(self, text: str) -> None:
        self.words += text + "\n"


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory.mktemp("programs")):
        yield


def fit(run: Path, *words: str) -> tuple[argosy.Outcome, str]:
    heard = Heard()
    return argosy.fit("tiny", *WORDS, f"dir={run}", *words, view=heard), heard.words


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("a path with spaces") / "run"
    fit(run, f"steps={STEPS}")
    return run


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def everything(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes, but the lock: whoever looks takes it for a moment."""
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != ".lock"}


# ---------------------------------------------------------------- what may go on


def test_a_path_with_spaces_is_a_path(finished: Path):
    assert sorted(d.name for d in (finished / "checkpoints").iterdir()) == ["2", "4"]
    assert list(by_step(read(Store(finished)), "loss")) == [1, 2, 3, 4]


def test_a_finished_run_says_so_and_touches_nothing_but_its_log(copy: Path):
    before = everything(copy)
    outcome, said = fit(copy, f"steps={STEPS}")
    assert (outcome.exit_code, outcome.step) == (0, STEPS)
    assert "is done: 4 steps of 4" in said
    log = {str(copy / "log.txt"): b""}
    assert everything(copy) | log == before | log


def test_more_steps_and_other_intervals_may_be_asked_for(copy: Path):
    outcome, said = fit(copy, "steps=6", "checkpoint.every=5", "log.every=2", "eval.every=7")
    assert "going on from step 4 of 6" in said
    assert outcome.step == 6
    assert (copy / "checkpoints" / "6" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["optimizer.learning_rate=1e-4"], ["optimizer.learning_rate", "0.003 there", "0.0001 now"]),
        (["seed=3", "model.width=32"], ["seed: 0 there, 3 now", "model.width: 16 there, 32 now"]),
        (["mesh.data=2"], ["mesh.data"]),
    ],
)
def test_any_other_difference_is_refused_by_name(copy: Path, words: list[str], named: list[str]):
    before = everything(copy)
    with pytest.raises(BadInput) as told:
        fit(copy, "steps=6", *words)
    assert all(part in str(told.value) for part in [*named, "dir=NEW"])
    assert everything(copy) == before


def test_other_data_under_the_same_name_is_refused(tmp_path: Path):
    text = tmp_path / "text.txt"
    words = [w for w in WORDS if not w.startswith(("data.source", "model.vocab"))]
    words += [f"data.source={text}", "model.vocab=258", f"data.cache={tmp_path / 'cache'}", f"dir={tmp_path / 'run'}"]
    text.write_text("the same words again and again\n" * 200)
    argosy.fit("tiny", *words, "steps=2")
    text.write_text("other words now and then\n" * 200)
    with pytest.raises(UserError, match="the data is not what the saved position belongs to"):
        argosy.fit("tiny", *words, "steps=4")


# ---------------------------------------------------------------- who may write


@pytest.fixture
def holder(copy: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run."""
    program = "import sys, time\nfrom argosy.core.storage import Store\n"
    program += "with Store(sys.argv[1]).lock():\n    print(flush=True)\n    time.sleep(99)\n"
    process = subprocess.Popen([sys.executable, "-c", program, str(copy)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_launcher_is_told_who_holds_the_run(copy: Path, holder: subprocess.Popen[str]):
    with pytest.raises(Busy, match=f"process {holder.pid} on "):
        fit(copy, "steps=6")


def test_the_dead_hold_nothing(copy: Path, holder: subprocess.Popen[str]):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert fit(copy, f"steps={STEPS}")[0].exit_code == 0


# ---------------------------------------------------------------- mistakes leave nothing behind


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer.learning_rat=1"],
        ["data.batch=7"],
        ["data.sequence=64"],
        ["data.source=/nowhere/at/all.txt"],
        ["mesh.data=3"],
        ["init.weights=/nowhere/at/all"],
        ["init.state=/nowhere/at/all"],
    ],
)
def test_a_mistake_leaves_no_file(tmp_path: Path, words: list[str]):
    run = tmp_path / "run"
    with pytest.raises(UserError):
        fit(run, "steps=2", *words)
    assert not everything(tmp_path)


def test_a_recipe_that_is_no_yaml_leaves_no_file(tmp_path: Path):
    (tmp_path / "mine.yml").write_text("steps: [1\n")
    with pytest.raises(ArgosyError) as told:
        argosy.fit(str(tmp_path / "mine.yml"), f"dir={tmp_path / 'run'}")
    assert "mine.yml" in str(told.value)
    assert [f.name for f in tmp_path.iterdir()] == ["mine.yml"]


def test_a_directory_that_is_a_file(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("mine")
    for run in (file, file / "run"):
        with pytest.raises(BadInput, match="is a file"):
            fit(run, "steps=2")
    assert file.read_text() == "mine"


def test_a_directory_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write anywhere
    with pytest.raises(BadInput, match="no permission to write in"):
        fit(tmp_path / "run", "steps=2")


def test_checkpoints_without_settings_are_not_written_over(copy: Path):
    (copy / "settings.yml").unlink()
    with pytest.raises(BadInput, match=r"holds checkpoints but no settings\.yml"):
        fit(copy, "steps=6")


def test_a_run_with_nothing_but_damage_is_left_as_it_is(copy: Path):
    for step in (copy / "checkpoints").iterdir():
        (step / "meta.json").write_text("{")
    before = everything(copy / "checkpoints")
    with pytest.raises(Damaged, match="none of the 2 checkpoints"):
        fit(copy, "steps=6")
    assert everything(copy / "checkpoints") == before


def test_a_device_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_backend() -> str:
        raise RuntimeError("Unable to initialize backend 'tpu': INTERNAL: no TPU\nmore")

    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr(assembling.jax, "default_backend", no_backend)
    with pytest.raises(BadInput, match="no such device: Unable to initialize backend 'tpu'") as told:
        fit(tmp_path / "run", "steps=2")
    assert "JAX_PLATFORMS=tpu" in str(told.value)
    assert not everything(tmp_path)


@pytest.mark.slow
def test_a_device_that_does_not_exist_from_outside(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "argosy", "train", "tiny", *WORDS, "steps=2", f"dir={tmp_path / 'run'}"],
        env=os.environ | {"JAX_PLATFORMS": "tpu", "ARGOSY_HUGE_PAGES": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "JAX_PLATFORMS=tpu" in done.stderr


# ---------------------------------------------------------------- disks


def test_a_disk_that_fills_up_costs_a_checkpoint_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from argosy.checkpoint import manifest

    write = manifest.write

    def full(folder: Path) -> None:
        if folder.name == "4":
            raise OSError(28, "No space left on device")
        write(folder)

    monkeypatch.setattr(manifest, "write", full)
    outcome, said = fit(tmp_path / "run", "steps=6")
    assert "No space left on device; trying again with step 6" in said
    assert outcome.exit_code == 0
    assert sorted(d.name for d in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "6"]


def test_a_disk_that_stays_full_is_an_error_with_what_was_saved_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from argosy.checkpoint import manifest

    write, run = manifest.write, tmp_path / "run"

    def full(folder: Path) -> None:
        if folder.name != "2":
            raise OSError(28, "No space left on device")
        write(folder)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", full)
        with pytest.raises(ArgosyError, match="No space left"):
            fit(run, "steps=6")
    outcome, said = fit(run, "steps=6")
    assert "going on from step 2 of 6" in said
    assert outcome.done
