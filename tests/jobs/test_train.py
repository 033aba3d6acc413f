"""A run and its directory: what may go on, what is refused, and what a refusal leaves behind, which is nothing."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from campaign_kill import SMALL
from helpers import Heard

import argosy
from argosy.checkpoint.run_directory import RunDirectory
from argosy.cli import main
from argosy.cli.verbs.train import train as trains
from argosy.core.errors import ArgosyError, BadInput, Busy, Damaged, UserError
from argosy.core.settings import Reading
from argosy.core.storage import Store
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.load import find_tokenizer
from argosy.jobs.train import Quiet, train
from argosy.observe.metrics import by_step, read
from argosy.parallel import target
from argosy.run.header import tokenizer_of
from argosy.run.outcome import ending
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run

STEPS, EVERY = 4, 2
WORDS = [*SMALL, f"checkpoint.every={EVERY}"]


def fit(run: Path, *words: str) -> tuple[argosy.Outcome, str]:
    heard = Heard()
    return argosy.fit("tiny", *WORDS, f"dir={run}", *words, view=heard), heard.words


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("a path with spaces") / "run"
    fit(run, f"steps={STEPS}")
    return run


@pytest.fixture
def copy(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def test_a_run_that_its_epochs_end_knows_it(tmp_path: Path):
    """Header, evaluation and end speak of the 5 steps that there are, not of the 10,000 that were asked for."""
    (tmp_path / "text.txt").write_text("one two three four. " * 60)
    run = tmp_path / "run"
    more = ["data.tokenizer=byte", "model.vocab=258", "data.epochs=1", "data.held_out=0.1", "eval.batches=1", "eval.every=4"]
    outcome = argosy.fit("tiny", *WORDS, f"dir={run}", f"data.source={tmp_path / 'text.txt'}", *more, "steps=10000")
    assert outcome.exit_code == 0
    (header,) = [line["header"] for line in read(Store(run)) if "header" in line]
    assert (header["steps"], header["ends"]) == (outcome.step, "by data.epochs, before steps=10000")
    assert 2 < outcome.step < 100
    evaluated = [line["step"] for line in read(Store(run)) if "eval_loss" in line]
    assert evaluated[-1] == outcome.step, "the last step is evaluated, as that of every run"


def reading_of(address: str, *words: str) -> Reading[Run]:
    return compose(Run, "tiny", [*WORDS, f"dir={address}", *words])


def everything(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes, but the lock: whoever looks takes it for a moment."""
    return {str(f): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != ".lock"}


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_a_run_killed_before_its_settings_were_written_starts(tmp_path: Path, where: str):
    address = str(tmp_path / "run") if where == "folder" else f"memory://{tmp_path.name}/run"
    Store(address).append_line("log.txt", "2026-01-01T00:00:00Z reading the data ...")
    RunDirectory(address).admit(reading_of(address))


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_a_run_killed_before_its_first_checkpoint_is_held_against_its_settings(tmp_path: Path, where: str):
    address = str(tmp_path / "run") if where == "folder" else f"memory://{tmp_path.name}/run"
    directory = RunDirectory(address)
    directory.write_settings(reading_of(address))
    directory.admit(reading_of(address))
    with pytest.raises(BadInput, match="seed: 0 there, 5 now"):
        directory.admit(reading_of(address, "seed=5"))


class Cut(ByteTokenizer):
    """A tokenizer whose saving is cut off between two files."""

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "tokenizer.json").write_text("{")
        raise KeyboardInterrupt


def test_a_tokenizer_is_there_as_a_whole_or_not_at_all(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        directory.write_tokenizer(Cut())
    assert not (tmp_path / "tokenizer").exists()
    directory.write_tokenizer(ByteTokenizer())
    tokenizer = find_tokenizer(tmp_path / "tokenizer")
    assert tokenizer is not None
    assert tokenizer.fingerprint == ByteTokenizer().fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_a_tokenizer_that_was_cut_short_is_mended_and_an_edited_one_is_kept(tmp_path: Path, where: str):
    directory = RunDirectory(str(tmp_path / "run") if where == "folder" else f"memory://{tmp_path.name}/run")
    store = directory.store
    directory.write_tokenizer(ByteTokenizer())
    whole = {name: store.read_text(f"tokenizer/{name}") for name in store.list("tokenizer")}
    assert whole.keys() == {"tokenizer.json", "tokenizer_config.json"}
    store.write_text("tokenizer/tokenizer.json", whole["tokenizer.json"][:100])
    store.remove("tokenizer/tokenizer_config.json")
    directory.write_tokenizer(ByteTokenizer())
    assert {name: store.read_text(f"tokenizer/{name}") for name in store.list("tokenizer")} == whole
    store.write_text("tokenizer/tokenizer_config.json", "{}")
    directory.write_tokenizer(ByteTokenizer())
    assert store.read_text("tokenizer/tokenizer_config.json") == "{}"


def test_settings_are_compared_once_the_lock_is_held(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process may have started a run while this one built its model."""
    run, lock = tmp_path / "run", Store.lock

    def late(self: Store) -> object:
        shutil.copytree(finished_run, run, dirs_exist_ok=True)
        return lock(self)

    monkeypatch.setattr(Store, "lock", late)
    with pytest.raises(BadInput, match="seed: 0 there, 5 now"):
        fit(run, f"steps={STEPS}", "seed=5")
    assert everything(run).keys() == {name.replace(str(finished_run), str(run)) for name in everything(finished_run)}


# ---------------------------------------------------------------- what may go on


def test_a_path_with_spaces_is_a_path(finished_run: Path):
    assert sorted(d.name for d in (finished_run / "checkpoints").iterdir()) == ["2", "4"]
    assert list(by_step(read(Store(finished_run)), "loss")) == [1, 2, 3, 4]


def test_a_finished_run_says_so_and_touches_nothing_but_its_log(copy: Path):
    before = everything(copy)
    outcome, output = fit(copy, f"steps={STEPS}")
    assert (outcome.exit_code, outcome.step) == (0, STEPS)
    assert "is done: 4 steps of 4; steps=N trains longer, for N above 4" in output
    log = {str(copy / "log.txt"): b""}
    assert everything(copy) | log == before | log
    _, output = fit(copy, "steps=2")
    assert "is done: 4 steps, and steps=2 asks for fewer; steps=N trains longer" in output


def test_the_header_says_where_the_weights_come_from_and_how_large_the_tokenizer_is(finished_run: Path):
    log = (finished_run / "log.txt").read_text()
    assert "weights     random, from seed 0" in log
    assert re.search(r"tokenizer   none; the model's vocabulary has \d+ tokens\n", log)
    settings = SimpleNamespace(data=SimpleNamespace(tokenizer="byte"), model=SimpleNamespace(inputs="tokens", vocab=1024))
    assembly: Any = SimpleNamespace(tokenizer=SimpleNamespace(vocab=258), run=settings)
    assert tokenizer_of(assembly) == "byte, 258 tokens of the model's 1,024"


def test_a_run_that_nobody_reads_the_answer_of_ends_well(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """`argosy train ... --json | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["train", "tiny", *WORDS, f"steps={STEPS}", f"dir={copy}", "--json"]) == 0


def test_more_steps_and_other_intervals_may_be_asked_for(copy: Path):
    outcome, output = fit(copy, "steps=6", "checkpoint.every=5", "log.every=2", "eval.every=7")
    assert "resuming from step 4 of 6" in output
    assert outcome.step == 6
    assert (copy / "checkpoints" / "6" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["optimizer.learning_rate=1e-4"], ["optimizer.learning_rate", "0.003 there", "0.0001 now"]),
        (["seed=3", "model.width=32"], ["seed: 0 there, 3 now", "model.width: 16 there, 32 now"]),
        (
            ["seed=3", "model.width=32", "data.batch=4", "optimizer.b1=0.8", "model.ffn=48", "data.shuffle=false"],
            ["seed: ", "model.width: ", "data.batch: ", "optimizer.b1: ", "model.ffn: ", "data.shuffle: "],
        ),
    ],
)
def test_any_other_difference_is_refused_by_name(copy: Path, words: list[str], parts: list[str]):
    before = everything(copy)
    with pytest.raises(BadInput) as caught:
        fit(copy, "steps=6", *words)
    assert all(part in str(caught.value) for part in [*parts, "dir=NEW"])
    assert everything(copy) == before


def test_a_refusal_offers_the_state_where_it_can_be_used_and_only_there(copy: Path):
    for words, offers in (
        (["optimizer.learning_rate=1e-4"], f"init.state={copy}"),
        (["data.batch=16"], f"init.state={copy}"),
        (["seed=3"], f"init.state={copy}"),
        (["optimizer=lion"], f"init.weights={copy}"),
    ):
        with pytest.raises(BadInput) as caught:
            fit(copy, "steps=6", *words)
        assert offers in str(caught.value)
    with pytest.raises(BadInput) as caught:
        fit(copy, "steps=6", "model.ffn=48")
    assert "init." not in str(caught.value)


@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(copy: Path, finished_run: Path, tmp_path: Path):
    same = Path(shutil.copytree(finished_run, tmp_path / "same"))
    fit(same, "steps=6")
    _, output = fit(copy, "steps=6", "mesh.data=2", "mesh.fsdp=4")
    assert "resuming from step 4 of 6" in output
    losses = [by_step(read(Store(run)), "loss") for run in (same, copy)]
    assert [losses[1][step] for step in (5, 6)] == pytest.approx([losses[0][step] for step in (5, 6)], rel=1e-5)
    assert fit(copy, "steps=7", "mesh.fsdp=8")[0].step == 7, "a number where -1 stood"


def test_an_edited_settings_yml_is_held_against_the_checkpoint(copy: Path):
    text = (copy / "settings.yml").read_text()
    assert "learning_rate: 0.003" in text
    (copy / "settings.yml").write_text(text.replace("learning_rate: 0.003", "learning_rate: 0.001"))
    with pytest.raises(BadInput) as caught:
        argosy.fit(str(copy), "steps=6")
    assert "optimizer.learning_rate: 0.003 there, 0.001 now" in str(caught.value)


@pytest.mark.slow
def test_a_moved_run_resumes_where_it_is(copy: Path, tmp_path: Path):
    target = tmp_path / "elsewhere"
    copy.rename(target)
    outcome = argosy.fit(str(target), "steps=6", view=(heard := Heard()))
    assert (outcome.dir, outcome.step) == (target, 6)
    assert "resuming from step 4 of 6" in heard.words
    assert not copy.exists()
    assert str(target) in (target / "settings.yml").read_text()
    other = argosy.fit(str(target), "steps=2", f"dir={tmp_path / 'new'}")
    assert (other.dir, other.step) == (tmp_path / "new", 2)


def test_who_set_what_is_kept_when_the_directory_is_the_recipe(copy: Path):
    def setters(text: str) -> dict[str, str]:
        lines = [line.partition("  # ") for line in text.splitlines() if "  # " in line]
        return {line.strip(): who.strip() for line, _, who in lines}

    before = setters((copy / "settings.yml").read_text())
    assert before["width: 16"] == "fit(...)"
    argosy.fit(str(copy), "steps=6")
    after = setters((copy / "settings.yml").read_text())
    changed = {line for line in after if before.get(line) != after[line]}
    assert {line.partition(":")[0] for line in changed} <= {"steps", "dir"}
    assert after["steps: 6"] == "fit(...)"


def test_an_empty_directory_name_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="`dir` is empty") as caught:
        argosy.fit("tiny", *WORDS, "steps=2", "dir=''")
    assert caught.value.where == "set by fit(...)"
    assert not everything(tmp_path)


@pytest.mark.slow
def test_stretching_a_schedule_says_both_rates_and_the_way_out(tmp_path: Path):
    run, words = tmp_path / "run", ["schedule=cosine", "schedule.warmup=0"]
    fit(run, "steps=4", *words)
    _, output = fit(run, "steps=6", *words)
    line = next(line for line in output.splitlines() if line.startswith("steps 4 -> 6"))
    rates = by_step(read(Store(run)), "lr")
    assert f"the learning rate of step 5 is {rates[5]:.3g}, and would have been {rates[4]:.3g}" in line
    assert f"init.state={run} dir=NEW" in line
    fit(tmp_path / "flat", "steps=2")
    assert "stretches" not in fit(tmp_path / "flat", "steps=4")[1], "a constant rate is the same rate"


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
    with pytest.raises(ArgosyError) as caught:
        argosy.fit(str(tmp_path / "mine.yml"), f"dir={tmp_path / 'run'}")
    assert "mine.yml" in str(caught.value)
    assert [f.name for f in tmp_path.iterdir()] == ["mine.yml"]


def test_a_directory_that_is_a_file(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("mine")
    for run in (file, file / "run"):
        with pytest.raises(BadInput, match="is a file"):
            fit(run, "steps=2")
    assert file.read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory that root cannot write either")
def test_a_directory_that_may_not_be_written():
    with pytest.raises(BadInput, match="cannot write in /proc"):
        fit(Path("/proc/argosy-run"), "steps=2")


def test_a_run_that_does_not_fit_is_refused_with_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("argosy.parallel.target.memory_bytes", lambda: (1 << 16, 1 << 16))
    with pytest.raises(BadInput, match=r"training needs .* this machine has 64\.0 KiB") as caught:
        fit(tmp_path / "run", "steps=2")
    text = str(caught.value)
    assert all(kind in text for kind in ("parameters", "gradients", "optimizer", "activations"))
    assert "data.batch" in text
    assert "execution.remat=full" in text
    assert not everything(tmp_path)


# ---------------------------------------------------------------- what a run writes down


@pytest.mark.slow
def test_the_best_evaluation_is_saved_between_checkpoints(tmp_path: Path):
    words = [w for w in WORDS if not w.startswith("eval.batches")] + ["eval.batches=1", "eval.every=1"]
    words += ["optimizer.learning_rate=10"]  # so that the loss rises, and the last step is not the best
    run = tmp_path / "run"
    argosy.fit("tiny", *words, "checkpoint.every=100", "checkpoint.keep=1", "steps=3", f"dir={run}")
    losses = by_step(read(Store(run)), "eval_loss")
    best = min(losses, key=losses.__getitem__)
    assert best < 3
    assert set(steps_of(run)) == {best, 3}
    argosy.fit(
        "tiny", *words, "checkpoint.every=100", "checkpoint.keep=1", "checkpoint.keep_best=0", "steps=5", f"dir={run}"
    )
    assert steps_of(run) == [5]


def test_the_best_three_are_saved_and_kept(tmp_path: Path):
    from types import SimpleNamespace

    from argosy.run.hooks.saver import Saver

    saved: list[int] = []
    checkpoints = SimpleNamespace(eval_losses=lambda: {10: 2.0, 20: 1.0})
    reading = compose(Run, "tiny", ["checkpoint.keep_best=2"])
    saver = Saver(None, reading, checkpoints, {})  # pyright: ignore[reportArgumentType]
    saver.__class__ = type("Noting", (Saver,), {"__call__": lambda self, now: saved.append(now.step)})
    for step, loss in ((0, 0.1), (30, 3.0), (40, 1.5), (50, 1.7), (60, float("nan")), (70, 0.5)):
        saver.evaluated(SimpleNamespace(step=step), loss)
    assert saved == [40, 70]


def test_a_run_without_a_checkpoint_starts_anew_and_offers_no_state(copy: Path):
    """As after a kill before the first checkpoint."""
    first = by_step(read(Store(copy)), "loss")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(BadInput, match="other settings") as caught:
        fit(copy, f"steps={STEPS}", "seed=3")
    assert caught.value.hint is not None
    assert "no checkpoint" in caught.value.hint
    assert "init." not in caught.value.hint
    (copy / "metrics.jsonl").unlink()
    assert "resuming" not in fit(copy, f"steps={STEPS}")[1]
    assert by_step(read(Store(copy)), "loss") == first


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (None, "no checkpoint is saved, and the same command starts anew"),
        (0, "checkpoint 0 is saved, and the same command resumes from step 0"),
        (2, "checkpoint 2 is saved, and the same command resumes from step 2"),
    ],
)
def test_what_the_next_start_does_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int | None, words: str
):
    """A run that learns from rewards and is stopped in its first rollout saves checkpoint 0."""
    outcome = argosy.Outcome(tmp_path, saved or 0, STEPS, 143, {}, {"step": 1.0}, saved)
    monkeypatch.setattr("argosy.jobs.train.run", lambda *_: outcome)
    messages: list[str] = []
    monkeypatch.setattr("argosy.cli.verbs.train.say", messages.append)
    monkeypatch.setattr("argosy.jobs.machine.start_jax", lambda: None)
    assert trains("tiny", [*WORDS, f"dir={tmp_path / 'run'}"]) == 143
    assert messages[-1] == f"stopped at step {saved or 0} of {STEPS}: {words}"
    assert ending(outcome).endswith(f"after 1.0 s; {words.partition(',')[0]}")


def test_the_log_holds_command_versions_steps_and_ending(finished_run: Path):
    log = (finished_run / "log.txt").read_text()
    assert "argosy train tiny model.width=16" in log
    assert "python 3." in log
    assert "jax 0." in log
    assert [f"step {step}  loss " in log for step in range(1, STEPS + 1)] == [True] * STEPS
    assert log.splitlines()[-1].endswith("; checkpoint 4 is saved")
    assert "memory" in log
    header = next(line["header"] for line in read(Store(finished_run)) if "header" in line)
    assert header["memory"]["total"] == sum(v for k, v in header["memory"].items() if k != "total") > 0
    assert header["vocab"] == 64


@pytest.mark.slow
def test_a_sample_is_shown_with_its_prompt_and_what_takes_long_is_reported(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("argosy.core.progress.PATIENCE", 0)
    words = [w for w in WORDS if not w.startswith(("model.vocab", "data.source"))]
    text = tmp_path / "text.txt"
    text.write_text("def f(): pass\n" * 400)
    words += ["model.vocab=258", f"data.source={text}", f"data.cache={tmp_path / 'cache'}"]
    run = tmp_path / "run"
    argosy.fit("tiny", *words, "steps=1", "sample.every=1", "sample.tokens=2", "sample.prompt=def ", f"dir={run}")
    line = next(line for line in read(Store(run)) if "sample" in line)
    assert line["prompt"] == "def "
    assert "prompt: def " in (run / "log.txt").read_text()
    assert "def " in (run / "report.html").read_text()
    stderr = capsys.readouterr().err
    assert all(
        f"{step_name} ..." in stderr for step_name in ("reading the data", "drawing the weights", "compiling the training step")
    )


def steps_of(run: Path) -> list[int]:
    return sorted(int(d.name) for d in (run / "checkpoints").iterdir())


# ---------------------------------------------------------------- more mistakes


def test_checkpoints_without_settings_are_not_written_over(copy: Path):
    (copy / "settings.yml").unlink()
    with pytest.raises(BadInput, match=r"holds checkpoints but no settings\.yml"):
        fit(copy, "steps=6")


def test_a_run_with_nothing_but_damage_is_left_as_it_is(copy: Path):
    for step in (copy / "checkpoints").iterdir():
        (step / "meta.json").write_text("{")
    before = everything(copy / "checkpoints")
    with pytest.raises(Damaged, match="all 2 checkpoints are damaged"):
        fit(copy, "steps=6")
    assert everything(copy / "checkpoints") == before


def test_a_device_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_backend() -> str:
        raise RuntimeError("Unable to initialize backend 'tpu': INTERNAL: no TPU\nmore")

    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr(target.jax, "default_backend", no_backend)
    with pytest.raises(BadInput, match="no such device: Unable to initialize backend 'tpu'") as caught:
        fit(tmp_path / "run", "steps=2")
    assert "JAX_PLATFORMS=tpu" in str(caught.value)
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
    from argosy.weights import manifest

    write = manifest.commit

    def full(folder: Path, files: dict[str, Any]) -> None:
        if folder.stem == "4":
            raise OSError(28, "No space left on device")
        write(folder, files)

    monkeypatch.setattr(manifest, "commit", full)
    outcome, output = fit(tmp_path / "run", "steps=6")
    assert "No space left on device; trying again with step 6" in output
    assert outcome.exit_code == 0
    assert sorted(d.name for d in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "6"]


@pytest.mark.slow
def test_a_disk_that_stays_full_is_an_error_with_what_was_saved_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from argosy.weights import manifest

    write, run = manifest.commit, tmp_path / "run"

    def full(folder: Path, files: dict[str, Any]) -> None:
        if folder.stem != "2":
            raise OSError(28, "No space left on device")
        write(folder, files)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "commit", full)
        with pytest.raises(ArgosyError, match="No space left"):
            fit(run, "steps=6")
    outcome, output = fit(run, "steps=6")
    assert "resuming from step 2 of 6" in output
    assert outcome.done


def test_a_disk_without_room_for_a_checkpoint_is_found_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from argosy.run import disk

    sizes, measure = list[int](), disk.checkpoint_bytes
    monkeypatch.setattr(disk, "checkpoint_bytes", lambda assembly: sizes.append(measure(assembly)) or sizes[-1])
    fit(tmp_path / "run", "steps=2")
    arrays = (tmp_path / "run" / "checkpoints" / "2").rglob("c/**/*")
    assert sizes[0] == pytest.approx(sum(f.stat().st_size for f in arrays if f.is_file()), rel=0.05)
    monkeypatch.setattr(disk, "free_bytes", lambda folder: sizes[0] - 1)
    with pytest.raises(BadInput, match=r"a checkpoint takes .* and the disk of .* has .* free"):
        fit(tmp_path / "some" / "other", "steps=2")
    assert not (tmp_path / "some").exists(), "a start that is refused leaves no folder"
    with pytest.raises(BadInput, match="a checkpoint takes"):
        fit(tmp_path / "run", "steps=4")
    monkeypatch.setattr(disk, "free_bytes", lambda folder: sizes[0] * 2)
    outcome, output = fit(tmp_path / "other", "steps=2")
    assert outcome.done
    assert "do not fit into the" in output
    monkeypatch.undo()
    assert "do not fit into the" not in fit(tmp_path / "third", "steps=2")[1]


def test_a_run_without_a_checkpoint_says_so_where_none_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from argosy.weights import manifest

    def full(folder: Path, files: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "commit", full)
    heard = Heard()
    with pytest.raises(ArgosyError, match="No space left") as caught:
        argosy.fit("tiny", *WORDS, f"dir={tmp_path / 'run'}", "steps=4", view=heard)
    assert "the run has no checkpoint, and starts anew; free some space" in str(caught.value.hint)
    assert "trying again with step 4; the run has no checkpoint yet" in heard.words


def test_a_mistake_that_is_found_after_work_began_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A directory that became read-only, for example: 2 says that nothing was done."""

    def refused(*_: object) -> None:
        raise BadInput("no permission for `x`", where="in a directory", hint="give it")

    monkeypatch.setattr("argosy.run.hooks.saver.Saver.__call__", refused)
    with pytest.raises(ArgosyError, match="no permission for `x`") as caught:
        fit(tmp_path / "run", "steps=4")
    assert (caught.value.exit_code, caught.value.hint) == (1, "give it")


def test_a_start_that_is_refused_after_the_lock_leaves_nothing(finished_run: Path, tmp_path: Path):
    with pytest.raises(UserError, match="has made 4 steps, but steps = 1"):
        fit(tmp_path / "deep" / "run", "steps=1", f"init.state={finished_run}")
    assert not (tmp_path / "deep").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="has made 4 steps, but steps = 1"):
        fit(tmp_path / "there", "steps=1", f"init.state={finished_run}")
    assert (tmp_path / "there").is_dir(), "it was there before"


def test_settings_name_implementations(tmp_path: Path):
    """A name that is none, or one that cannot do what is asked, is an error before the first file."""
    for words, says in (
        (["execution.attention=flash"], "attention implementation"),
        (["execution.experts=blockd"], "blocked"),
    ):
        with pytest.raises(UserError, match=says):
            train("tiny", [*SMALL, "steps=2", *words, f"dir={tmp_path / 'none'}"], Quiet())
        assert not (tmp_path / "none").exists()
