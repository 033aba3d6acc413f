"""Runs of which one batch is bad: what is saved, what is left out, and that a resume makes the same steps."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from campaign_kill import ASKING, SMALL
from helpers import Heard, default, numbers

from argosy.checkpoint.step.load import stored_shapes
from argosy.checkpoint.tiers.local import LocalCheckpoints
from argosy.core.errors import ArgosyError
from argosy.core.storage import Store
from argosy.data.pipeline import RowBatches
from argosy.jobs.history.report import report
from argosy.jobs.quickstart.proof import digest
from argosy.jobs.train import train
from argosy.observe.life import account
from argosy.observe.metrics import read
from argosy.run.start import initial
from argosy.train.guard import Diverged
from argosy.train.objectives import next_token

WORDS = [*SMALL, "checkpoint.every=4", "steps=12", "checkpoint.keep=9"]
JUMP = 50.0


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes batches of the data bad, by their numbers: the loss of one is not finite, or fifty times as large."""
    nans, jumps = set[int](), set[int]()
    get, loss = RowBatches.__next__, next_token.next_token_loss

    def poisoned(self: RowBatches) -> Any:
        batch = get(self)
        if self.handed in nans:
            batch = batch | {"mask": batch["mask"] * float("nan")}
        # A weight that does not change a mean marks the batch.
        return batch | {"mask": batch["mask"] * 2} if self.handed in jumps else batch

    def jumping(settings: Any, models: Any, batch: Any) -> Any:
        import jax.numpy as jnp

        from argosy.train.objectives.loss import Loss, WeightedMean

        result = loss(settings, models, batch)
        times = jnp.where(jnp.max(batch["mask"]) > 1.5, JUMP, 1.0)
        return Loss(WeightedMean(result.loss.total * times, result.loss.weight), result.metrics, result.updates)

    def choose(nan: set[int] = set(), jump: set[int] = set()) -> None:  # noqa: B006
        nans.clear()
        jumps.clear()
        nans.update(nan)
        jumps.update(jump)

    monkeypatch.setattr(RowBatches, "__next__", poisoned)
    monkeypatch.setattr(next_token, "next_token_loss", jumping)
    return choose


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Takes a window of batches out of the data itself."""

    def take_out(first: int, last: int) -> None:
        get = RowBatches.__next__

        def without(self: RowBatches) -> Any:
            batch = get(self)
            while first <= self.handed <= last:
                batch = get(self)
            return batch

        monkeypatch.setattr(RowBatches, "__next__", without)

    return take_out


def fit(run: Path, *words: str, view: Any = None) -> Any:
    return train("tiny", [*WORDS, f"dir={run}", *words], view or Heard())


def bad(run: Path) -> list[dict[str, Any]]:
    return [line["bad"] | {"step": line["step"]} for line in read(Store(run)) if "bad" in line]


@pytest.mark.parametrize("step", default(8, of=[7, 8, 12]))
def test_a_run_that_stops_saves_the_last_good_step(poison: Any, tmp_path: Path, step: int):
    """Between two checkpoints, at one, and at the last step."""
    poison({step})
    with pytest.raises(Diverged) as raised:
        fit(tmp_path / "run")
    assert raised.value.exit_code == 1
    assert raised.value.what == f"loss is nan at step {step}"
    message = f"{raised.value.where} {raised.value.hint}"
    assert f"loss nan, grad_norm nan, batch {step} at {{'row': {(step - 1) * 8}}}; checkpoint {step - 1} is good" in message
    poison()
    fit(tmp_path / "good", f"steps={step - 1}")
    assert digest(tmp_path / "run", step - 1) == digest(tmp_path / "good", step - 1)
    assert max(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()) == step - 1
    # The batch was no batch of bad data after all: the run goes on as if nothing had happened.
    fit(tmp_path / "run")
    fit(tmp_path / "good")
    assert digest(tmp_path / "run", 12) == digest(tmp_path / "good", 12)
    assert not bad(tmp_path / "run")


def test_a_first_step_that_is_bad(poison: Any, tmp_path: Path):
    poison({1})
    with pytest.raises(Diverged, match="loss is nan at step 1"):
        fit(tmp_path / "run")
    assert not any(map(str.isdecimal, numbers(tmp_path / "run", "loss")))


@pytest.mark.slow
def test_a_step_that_is_skipped_is_counted_and_resumes_bit_for_bit(poison: Any, tmp_path: Path):
    poison({6, 7})
    heard = Heard()
    fit(tmp_path / "whole", "guard.nonfinite=skip", view=heard)
    assert "step 6 is skipped: loss is nan (grad_norm nan, batch 6)" in heard.words
    assert [(entry["step"], entry["action"], entry["loss"]) for entry in bad(tmp_path / "whole")] == [
        (6, "skip", "nan"),
        (7, "skip", "nan"),
    ]
    skipped = numbers(tmp_path / "whole", "skipped")
    assert (skipped[5], skipped[6], skipped[12]) == (0, 1, 2)
    # Across checkpoints before, between and after them.
    for at in (5, 6, 7):
        run = tmp_path / str(at)
        fit(run, f"steps={at}", "guard.nonfinite=skip")
        fit(run, "guard.nonfinite=skip")
        assert digest(run, 12) == digest(tmp_path / "whole", 12)
        assert numbers(run, "skipped")[12] == 2
    poison()
    fit(tmp_path / "other")
    assert digest(tmp_path / "other", 12) != digest(tmp_path / "whole", 12)
    page = report(tmp_path / "whole").read_text()
    assert "2 steps were skipped" in page


@pytest.mark.slow
def test_the_logged_learning_rate_is_that_which_is_applied(poison: Any, tmp_path: Path):
    """A skipped step delays the schedule by one step, also in a run that no longer skips."""
    words = ["guard.nonfinite=skip", "schedule=linear", "schedule.warmup=10", "optimizer.learning_rate=0.01"]
    poison({6, 7})
    fit(tmp_path / "run", *words, "steps=10")
    rates = numbers(tmp_path / "run", "lr")
    expected = [1, 2, 3, 4, 5, 6, 6, 6, 7, 8]
    assert [rates[step] for step in range(1, 11)] == pytest.approx([0.001 * n for n in expected])
    poison()
    fit(tmp_path / "run", *words, "guard.nonfinite=stop", "steps=40")
    assert numbers(tmp_path / "run", "lr")[11] == pytest.approx(0.009)


@pytest.mark.slow
def test_too_many_skips_stop_the_run(poison: Any, tmp_path: Path):
    poison({5, 6, 7, 8})
    with pytest.raises(Diverged, match=r"more than guard\.in_row = 3 steps in a row") as raised:
        fit(tmp_path / "run", "guard.nonfinite=skip", "guard.in_row=3")
    assert "checkpoint 7 is good" in (raised.value.where or "")
    with pytest.raises(Diverged, match="at step 8"):
        fit(tmp_path / "run", "guard.nonfinite=skip", "guard.in_row=3")


ROLL = ["guard.nonfinite=rollback", "guard.spike=rollback", "guard.window=4", "guard.deviations=20"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "beyond"), [("nan", 0), ("jump", 1)])
def test_a_rollback_is_a_run_whose_data_lacked_the_window(poison: Any, lacking: Any, tmp_path: Path, kind: str, beyond: int):
    poison(**{kind: {7}})
    heard = Heard()
    fit(tmp_path / "run", *ROLL, f"guard.beyond={beyond}", view=heard)
    assert f"going back to step 4, without the batches 5 to {7 + beyond}" in heard.words
    (entry,) = json.loads((tmp_path / "run" / "rollbacks.json").read_text())
    assert (entry["step"], entry["restored"], entry["first"], entry["last"]) == (7, 4, 5, 7 + beyond)
    lacking(5, 7 + beyond)
    fit(tmp_path / "without", *ROLL)
    assert not (tmp_path / "without" / "rollbacks.json").exists()
    assert digest(tmp_path / "run", 12) == digest(tmp_path / "without", 12)
    assert numbers(tmp_path / "run", "loss") == numbers(tmp_path / "without", "loss")
    assert "1 rollback" in report(tmp_path / "run").read_text()
    # Another step may be under way when the numbers of a bad one are read.
    spent, without = (account(Store(tmp_path / name)) for name in ("run", "without"))
    assert spent is not None
    assert spent.lost_steps in (3, 4)
    assert 0 < spent.seconds["lost"] < spent.wall
    assert without is not None
    assert without.lost_steps == 0
    assert "lost" not in without.seconds


@pytest.mark.slow
@pytest.mark.parametrize("at", [None, pytest.param(5, marks=pytest.mark.slow), pytest.param("going back", marks=pytest.mark.slow)])
def test_a_rollback_makes_the_same_steps_whatever_local_checkpoints_there_are(poison: Any, tmp_path: Path, at: Any):
    """Killed after it or not: local checkpoints of steps that were made before it are not resumed from."""
    poison({7})
    fit(tmp_path / "whole", *ROLL)
    words = [*ROLL, f"checkpoint.local={tmp_path / 'fast'}", "checkpoint.local_every=1"]
    if at is not None:
        with pytest.raises(Killed):
            fit(tmp_path / "run", *words, view=Kills(at, 2) if isinstance(at, int) else Kills(at))
    fit(tmp_path / "run", *words)
    assert digest(tmp_path / "run", 12) == digest(tmp_path / "whole", 12)


@pytest.mark.slow
def test_a_rollback_of_adapters_leaves_the_base_where_it_is(poison: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its weights are neither read nor put onto the devices again: as many bytes live there after the rollback as before it."""
    words = ["dir=" + str(tmp_path / "base"), "steps=1", "model.width=64", "model.ffn=128"]
    train("tiny", [*WORDS, *words], Heard())
    adapting = [word for word in WORDS if not word.startswith("model.")]
    words = [f"init.weights={tmp_path / 'base'}", "adapter=lora", "adapter.rank=2", f"dir={tmp_path / 'run'}", *ROLL]
    opened: list[Any] = []
    read_base = initial.base_of
    monkeypatch.setattr(initial, "base_of", lambda *args: (opened.append(args), read_base(*args))[1])
    poison({7})
    view = Weighs()
    train("tiny", [*adapting, *words], view)
    assert "going back to step 4" in view.words
    assert not opened
    before, after = view.bytes[:6], view.bytes[6:]
    assert len(after) == 8
    assert sum(4 * a.size for a in stored_shapes(tmp_path / "base" / "checkpoints" / "1").values()) > 100_000
    assert abs(max(after) - max(before)) < 4_000, (before, after)


class Weighs(Heard):
    """Counts the bytes on devices whenever a step is told."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def step(self, step: int, numbers: object) -> None:
        gc.collect()
        self.bytes.append(sum(a.nbytes for a in jax.live_arrays()))


def persistent(run: Path) -> list[int]:
    return sorted(int(step.name) for step in (run / "checkpoints").iterdir() if step.name.isdecimal())


@pytest.mark.slow
def test_a_stop_saves_a_step_that_only_the_local_tier_has(poison: Any, tmp_path: Path):
    poison({8})
    local = [f"checkpoint.local={tmp_path / 'fast'}", "checkpoint.local_every=1"]
    with pytest.raises(Diverged):
        fit(tmp_path / "run", "checkpoint.every=6", *local)
    assert persistent(tmp_path / "run") == [6, 7]


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch, run: Path, *words: str) -> None:
    """A run that is killed instead of its local save of a step."""
    save = LocalCheckpoints.save

    def killed(self: LocalCheckpoints, at: int, *rest: Any) -> None:
        if at == step:
            self.join()
            raise Killed
        save(self, at, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(LocalCheckpoints, "save", killed)
        with pytest.raises(Killed):
            fit(run, *words)


@pytest.mark.slow
def test_a_run_that_goes_on_from_a_local_step_has_something_to_go_back_to(poison: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    poison()
    local = [f"checkpoint.local={tmp_path / 'fast'}", "checkpoint.local_every=1", "checkpoint.every=100"]
    killed_at(6, monkeypatch, tmp_path / "run", *local)
    assert not (tmp_path / "run" / "checkpoints").exists() or persistent(tmp_path / "run") == []
    poison({8})
    heard = Heard()
    fit(tmp_path / "run", *local, *ROLL, view=heard)
    assert "going back to step 5, without the batches 6 to 8" in heard.words


@pytest.mark.slow
def test_a_local_step_of_before_a_rollback_is_not_resumed_from(poison: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed with a local step, rolled back without the local tier, and started with it again."""
    poison()
    local = [f"checkpoint.local={tmp_path / 'fast'}", "checkpoint.local_every=1"]
    killed_at(8, monkeypatch, tmp_path / "run", *ROLL, *local, "checkpoint.every=100")
    poison({3})
    fit(tmp_path / "run", *ROLL, "steps=6")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    fit(tmp_path / "run", *ROLL, *local)
    fit(tmp_path / "copy", *ROLL)
    assert digest(tmp_path / "run", 12) == digest(tmp_path / "copy", 12)


@pytest.mark.slow
def test_a_rollback_to_the_first_weights(poison: Any, lacking: Any, tmp_path: Path):
    poison({2})
    fit(tmp_path / "run", *ROLL)
    lacking(1, 2)
    fit(tmp_path / "without", *ROLL)
    assert digest(tmp_path / "run", 12) == digest(tmp_path / "without", 12)


class Killed(BaseException):
    pass


class Kills(Heard):
    """Ends the run when a step is told, or when something is said, as a kill does: nothing is saved any more."""

    def __init__(self, at: int | str, times: int = 1):
        super().__init__()
        self.at, self.times = at, times

    def step(self, step: int, numbers: object) -> None:
        if step == self.at:
            self.times -= 1
            if not self.times:
                raise Killed

    def say(self, text: str) -> None:
        super().say(text)
        if isinstance(self.at, str) and self.at in text:
            raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("at", ["going back", "resuming from step 4", (5, 2), (7, 1), (9, 1), (11, 1)])
def test_a_kill_around_a_rollback_changes_nothing(poison: Any, tmp_path: Path, at: Any):
    """While it is made, before the first checkpoint after it, and after that; two windows, the second after the first."""
    poison({7, 14})
    fit(tmp_path / "whole", *ROLL)
    with pytest.raises(Killed):
        fit(tmp_path / "run", *ROLL, view=Kills(*at) if isinstance(at, tuple) else Kills(at))
    fit(tmp_path / "run", *ROLL)
    assert digest(tmp_path / "run", 12) == digest(tmp_path / "whole", 12)
    windows = [json.loads((tmp_path / name / "rollbacks.json").read_text()) for name in ("run", "whole")]
    assert windows[0] == windows[1]
    assert len(windows[0]) == 2
    # The windows hold whatever the settings are now.
    fit(tmp_path / "run", "steps=16")
    fit(tmp_path / "whole", "steps=16")
    assert digest(tmp_path / "run", 16) == digest(tmp_path / "whole", 16)


def test_a_second_failure_at_the_step_stops(poison: Any, tmp_path: Path):
    poison({7, 10})
    with pytest.raises(Diverged, match="at step 7: a rollback from there did not help"):
        fit(tmp_path / "run", *ROLL)
    assert len(json.loads((tmp_path / "run" / "rollbacks.json").read_text())) == 1


@pytest.mark.slow
def test_the_rollbacks_of_a_run_are_limited(poison: Any, tmp_path: Path):
    poison({2, 10, 17})
    with pytest.raises(Diverged, match=r"rolled back 2 times, guard\.rollbacks at most"):
        fit(tmp_path / "run", *ROLL, "guard.rollbacks=2", "steps=20")


def test_rollouts_are_not_rolled_back(tmp_path: Path):
    with pytest.raises(ArgosyError, match="rollouts and guard=rollback do not combine"):
        train("grpo", [*ASKING, "guard.spike=rollback", "reward=exact", f"dir={tmp_path}", "data.source=x.jsonl"])
