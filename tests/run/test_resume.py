"""A run that was ended, however it was ended, goes on as if it had not been: losses and weights, bit for bit."""

import shutil
import signal
from pathlib import Path

import campaign_flip
import campaign_kill
import numpy as np
import pytest
from campaign_kill import SMALL

import argosy
from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.open import open_model
from argosy.checkpoint.step.load import load_weights
from argosy.core.errors import BadInput
from argosy.core.process.signals import asked_to_stop
from argosy.core.storage import Store
from argosy.jobs.history.report import report
from argosy.jobs.quickstart.proof import digest
from argosy.jobs.train import Quiet, train
from argosy.observe.metrics import by_step, read

STEPS, EVERY = 12, 4
WORDS = [*SMALL, f"checkpoint.every={EVERY}"]


class Signalled(Quiet):
    """Sends this process a signal as soon as a step is told."""

    def __init__(self, step: int, number: int):
        self.at, self.number, self.words = step, number, ""

    def say(self, text: str) -> None:
        self.words += text + "\n"

    def step(self, step: int, numbers: object) -> None:
        if step == self.at:
            signal.raise_signal(self.number)


def fit(run: Path, *words: str, view: Quiet | None = None) -> argosy.Outcome:
    return train("tiny", [*WORDS, f"dir={run}", *words], view or Quiet())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbed."""
    run = tmp_path_factory.mktemp("resume") / "alone"
    fit(run, f"steps={STEPS}")
    return run


def same(run: Path, alone: Path, steps: int = STEPS) -> bool:
    losses = [by_step(read(Store(r)), "loss") for r in (run, alone)]
    assert len(losses[1]) == steps
    return losses[0] == losses[1] and digest(run, steps) == digest(alone, steps)


def test_a_run_that_stopped_at_a_checkpoint(alone: Path, tmp_path: Path):
    run = tmp_path / "run"
    fit(run, "steps=8")
    fit(run, f"steps={STEPS}")
    assert same(run, alone)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_ends_and_resumes(alone: Path, tmp_path: Path, number: int, code: int):
    run, view = tmp_path / "run", Signalled(5, number)
    handler = signal.getsignal(number)
    outcome = fit(run, f"steps={STEPS}", view=view)
    assert signal.getsignal(number) is handler
    assert outcome.exit_code == code
    assert EVERY < outcome.step < 8, "between two checkpoints"
    assert (run / "checkpoints" / str(outcome.step) / "manifest.json").exists()
    again = Signalled(0, 0)
    assert fit(run, f"steps={STEPS}", view=again).exit_code == 0
    assert f"resuming from step {outcome.step} of" in again.words
    assert same(run, alone)


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup sets it
    try:
        with asked_to_stop() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_before_the_first_step_is_not_waited_with(tmp_path: Path):
    """Nothing is there to save: Ctrl-C does what it does by default, and the directory trains as if nothing had happened."""

    class Early(Signalled):
        def header(self, facts: object) -> None:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", f"steps={STEPS}", view=Early(0, 0))
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert fit(tmp_path / "run", "steps=4").saved == 4


def test_what_a_kill_left_half_written_is_not_gone_on_from(alone: Path, tmp_path: Path):
    run = Path(shutil.copytree(alone, tmp_path / "run"))
    (run / "checkpoints" / "12" / "manifest.json").unlink()
    half = run / "checkpoints" / "16"
    shutil.copytree(run / "checkpoints" / "8", half)
    (half / "manifest.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')
    view = Signalled(0, 0)
    fit(run, f"steps={STEPS}", view=view)
    assert "resuming from step 8" in view.words
    assert same(run, alone)
    assert not half.exists()


@pytest.mark.slow
def test_a_run_in_an_object_store_resumes_bit_for_bit(alone: Path, tmp_path: Path):
    run = f"memory://{tmp_path.name}/run"
    argosy.fit("tiny", *WORDS, f"dir={run}", "steps=4", view=Quiet())
    heard = Signalled(0, 0)
    argosy.fit("tiny", *WORDS, f"dir={run}", "steps=8", view=heard)
    assert "resuming from step 4" in heard.words
    outcome = argosy.fit(run, f"steps={STEPS}", view=heard)
    assert f"resuming from step 8 of {STEPS} in {run}" in heard.words, "by its address alone"
    assert by_step(read(Store(run)), "loss") == by_step(read(Store(alone)), "loss")
    fetched = Checkpoints(Store(f"{run}/checkpoints"))
    theirs = load_weights(alone / "checkpoints" / str(STEPS))
    assert all(np.array_equal(a, theirs[name]) for name, a in load_weights(fetched.path(STEPS)).items())
    assert {"settings.yml", "log.txt", "metrics.jsonl"} <= set(Store(run).list())

    assert outcome.dir == run
    here, there = argosy.load(alone), argosy.load(outcome.dir)
    assert np.array_equal(here.logits([1, 2, 3]), there.logits([1, 2, 3]))
    assert open_model(f"file://{alone}").path.is_relative_to(alone), "a folder of this machine is read where it lies"
    with pytest.raises(BadInput, match="nothing at"):
        argosy.load(f"{run}/none")
    assert report(run) == f"{run}/report.html"


def test_data_resumes_where_it_was(tmp_path: Path):
    """Each row is its own number, so what the steps saw can be read off the batches."""
    from argosy.run.assembly.assemble import assemble
    from argosy.run.assembly.decided import Decided
    from argosy.run.settings.compose import compose
    from argosy.run.settings.run import Run

    settings = compose(Run, "tiny", [*WORDS, "steps=6"]).value
    whole = assemble(settings, Decided.here(settings)).batches
    expected = [next(whole)["tokens"].tobytes() for _ in range(6)]
    whole.close()
    assert len(set(expected)) == 6

    first = assemble(settings, Decided.here(settings)).batches
    seen = [next(first)["tokens"].tobytes() for _ in range(2)]
    state = first.state()
    first.close()
    second = assemble(settings, Decided.here(settings)).batches
    second.restore(state)
    seen += [next(second)["tokens"].tobytes() for _ in range(4)]
    second.close()
    assert seen == expected


@pytest.mark.slow
def test_a_schedule_that_depends_on_the_steps_follows_them(tmp_path: Path):
    run = tmp_path / "run"
    fit(run, "steps=4", "schedule=linear")
    fit(run, "steps=8", "schedule=linear")
    rates = by_step(read(Store(run)), "lr")
    whole = tmp_path / "whole"
    fit(whole, "steps=8", "schedule=linear")
    expected = by_step(read(Store(whole)), "lr")
    assert [rates[s] for s in range(5, 9)] == [expected[s] for s in range(5, 9)]
    assert rates[4] < expected[4], "the first four fell towards an end at 4"


# ---------------------------------------------------------------- other processes


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_from_outside(tmp_path: Path, number: int, code: int):
    run = tmp_path / "run"
    process = campaign_kill.launch(run, campaign_kill.WORDS)
    campaign_kill.wait_for(process, lambda: bool(campaign_kill.lines_from(run)), True)
    process.send_signal(number)
    assert process.wait(timeout=campaign_kill.PATIENCE_S) == code
    assert campaign_kill.newest(run) == max(step for step, _ in campaign_kill.lines_from(run))


@pytest.mark.slow
def test_kills(tmp_path: Path):
    kills, wrong = campaign_kill.campaign(tmp_path, 3)
    assert len(kills) == 3
    assert not wrong


@pytest.mark.slow
def test_flips(tmp_path: Path):
    blows = campaign_flip.campaign(tmp_path, 6, others=False)
    assert len({blow.kind for blow in blows}) == 6
    assert all(blow.good for blow in blows), blows
