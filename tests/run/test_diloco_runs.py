"""Runs of replicas that train alone: what a checkpoint holds, what is evaluated, how they resume, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import Heard, default, numbers

from argosy.checkpoint.step.layout import STATE
from argosy.checkpoint.step.load import load_item, load_weights
from argosy.core.errors import ArgosyError
from argosy.jobs.train import train
from argosy.models.parts.stack import Unroll
from argosy.parallel.mesh import MeshSettings
from argosy.run.assembly import diloco
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.settings.combinations import Situation, violations
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from tools.devices import config_of

REPLICAS = ["mesh.data=2", "mesh.fsdp=1", "diloco.every=4"]
WORDS = [*SMALL, "steps=12", "checkpoint.every=6", "checkpoint.keep=9"]


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many devices as the mesh has."""
    build = MeshSettings.build
    monkeypatch.setattr(MeshSettings, "build", lambda self, devices=None: build(self, jax.devices()[: self.data * max(self.fsdp, 1)]))


def fit(run: Path, *words: str, view: Any = None) -> Any:
    return train("tiny", [*WORDS, *REPLICAS, f"dir={run}", *words], view or Heard())


def arrays_of(run: Path, step: int) -> dict[str, np.ndarray]:
    """All that a checkpoint holds."""
    folder = run / "checkpoints" / str(step)
    return {name: np.asarray(a) for name, a in (load_weights(folder) | load_item(folder, STATE)).items()}


class Killed(BaseException):
    pass


class Kills(Heard):
    """Ends the run when a step is told, as a kill does."""

    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def step(self, step: int, numbers: object) -> None:
        if step == self.at:
            raise Killed


@pytest.mark.slow
def test_a_resume_between_outer_steps_is_bit_for_bit(tmp_path: Path):
    """Checkpoint 6 is in the middle of the second inner phase, whose replicas it holds."""
    fit(tmp_path / "whole")
    with pytest.raises(Killed):
        fit(tmp_path / "run", view=Kills(8))
    middle = arrays_of(tmp_path / "run", 6)
    ours = {name.removeprefix("optimizer.replicas."): a for name, a in middle.items() if name.startswith("optimizer.replicas.")}
    assert set(ours) == set(load_weights(tmp_path / "run" / "checkpoints" / "6"))
    for address, replicas in ours.items():
        assert replicas.shape == (2, *middle[address].shape)
        assert (replicas[0] != replicas[1]).any(), address
        assert (replicas[0] != middle[address]).any(), address
    heard = Heard()
    fit(tmp_path / "run", view=heard)
    assert "resuming from step 6 of 12" in heard.words
    resumed, expected = arrays_of(tmp_path / "run", 12), arrays_of(tmp_path / "whole", 12)
    assert resumed.keys() == expected.keys()
    assert [name for name in expected if resumed[name].tobytes() != expected[name].tobytes()] == []
    for name in ("loss", "grad_norm", "replicas_apart", "outer_grad_norm"):
        assert numbers(tmp_path / "run", name) == numbers(tmp_path / "whole", name)
    apart = numbers(tmp_path / "whole", "replicas_apart")
    assert [apart[step] for step in (1, 3)] == [0, 0]
    assert 0 < apart[4] == apart[7] != apart[8] > 0


@pytest.mark.slow
def test_outer_weights_are_what_is_evaluated_and_stored(tmp_path: Path):
    """They stay until the first outer step, whatever the replicas have learned."""
    source = tmp_path / "text.txt"
    source.write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(3000)))
    text = [f"data.source={source}", "model.vocab=258", "eval.before=true", "eval.every=1", "eval.batches=1", "checkpoint.every=1"]
    heard = Heard()
    fit(tmp_path / "run", *text, "steps=8", view=heard)
    losses = numbers(tmp_path / "run", "eval_loss")
    assert losses[0] == losses[1] == losses[3] != losses[4] == losses[7] != losses[8]
    weights = {step: load_weights(tmp_path / "run" / "checkpoints" / str(step)) for step in (1, 3, 4, 7)}
    for address, w in weights[1].items():
        assert (np.asarray(w) == np.asarray(weights[3][address])).all()
        assert (np.asarray(weights[4][address]) == np.asarray(weights[7][address])).all()
        assert (np.asarray(w) != np.asarray(weights[4][address])).any(), address


@pytest.mark.slow
def test_sums_after_every_step_are_data_parallel_training(tmp_path: Path):
    """The whole run, whose rows are of the same length."""
    plain = ["optimizer=sgd", "optimizer.weight_decay=0", "optimizer.clip=none", "optimizer.learning_rate=0.1", "steps=4"]
    fit(tmp_path / "replicas", *plain, "diloco.every=1", "diloco.lr=1", "diloco.momentum=0")
    fit(tmp_path / "summed", *plain, "diloco.every=0")
    ours, theirs = (load_weights(tmp_path / name / "checkpoints" / "4") for name in ("replicas", "summed"))
    for address, w in theirs.items():
        np.testing.assert_allclose(ours[address], w, atol=2e-6)
    assert not any(name.startswith("optimizer.replicas") for name in arrays_of(tmp_path / "summed", 4))
    few = numbers(tmp_path / "replicas", "loss"), numbers(tmp_path / "summed", "loss")
    assert few[0] == pytest.approx(few[1], rel=1e-5)


def test_the_header_says_how_many_replicas_there_are(tmp_path: Path):
    class Told(Heard):
        def header(self, fields: Any) -> None:
            self.fields = fields

    view = Told()
    fit(tmp_path / "run", "steps=4", view=view)
    assert view.fields["diloco"] == "2 replicas of 4 rows a step, an outer step every 4 steps"


def settings(*words: str) -> Run:
    return compose(Run, "tiny", [*WORDS, *REPLICAS, *words]).value


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["mesh.data=1"], r"the mesh has one replica: mesh\.data is 1"),
        (["steps=10"], r"steps = 10 is no multiple of diloco\.every = 4: the last 2 steps would move no outer weights"),
        (["steps=3"], r"steps = 3 is no multiple of diloco\.every = 4"),
        (["data.batch=9"], r"data\.batch = 9 does not divide over 2 devices"),
        (["data.batch=6", "accumulate=2"], r"data\.batch = 6 does not divide over 2 devices, accumulate = 2"),
        (["init.state=somewhere"], r"diloco\.every and init\.state do not combine"),
        (["objective=dpo"], r"diloco\.every and another objective than next_token do not combine"),
        (["init.weights=somewhere", "adapter=lora"], r"diloco\.every and an adapter do not combine"),
    ],
)
def test_what_replicas_cannot_do_is_refused(words: list[str], problem: str):
    run = settings(*words)
    with pytest.raises(ArgosyError, match=problem):
        assemble(run, Decided("unroll", "float32"))


def test_steps_that_no_outer_step_followed_are_said():
    """A rollback may make the data end in the middle of a phase."""
    run = settings()
    every = run.diloco.every
    assert every > 1
    assert diloco.unfinished_outer_step(run, 4 * every) == ""
    message = diloco.unfinished_outer_step(run, 4 * every + 1)
    assert message == f"; its last 1 step moved no outer weights, which are those of step {4 * every} (diloco.every)"
    assert diloco.unfinished_outer_step(settings("diloco.every=0"), 7) == ""


def test_layers_that_replicas_cannot_have_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    with pytest.raises(ArgosyError, match=r"diloco\.every and mesh\.stage do not combine"):
        assemble(settings("mesh.stage=2", "model.layers=2", "mesh.fsdp=-1"), Decided("scan", "float32"))
    two = settings("mesh.fsdp=2", "mesh.tensor=2")
    with pytest.raises(ArgosyError, match=r"mesh\.fsdp = 2 and mesh\.tensor = 2 within a replica: XLA aborts"):
        diloco.check(two, two.mesh.build())
    config = config_of("experts")
    run = settings("mesh.expert=2", "mesh.fsdp=-1")
    assert "diloco.every and mesh.expert do not combine" in " ".join(error.what for error in violations(Situation(run)))
    run = settings("accumulate=2", "execution.gather=once", "mesh.fsdp=-1")
    assert [error.what for error in violations(Situation(run))] == [
        "diloco.every and execution.gather=once do not combine: not built together yet"
    ]
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"bias": True})})
    with pytest.raises(ArgosyError, match=r"router biases that move by load \(layers\.0\.\w+\.bias"):
        diloco.check_model(run, config.build(Unroll()), 12)


@pytest.mark.slow
def test_a_run_resumes_with_as_many_replicas_and_the_same_outer_steps(tmp_path: Path):
    fit(tmp_path / "run", "steps=4")
    with pytest.raises(ArgosyError, match="the run has 2 replicas, and the mesh 4") as raised:
        fit(tmp_path / "run", "mesh.data=4")
    assert "resume with mesh.data x mesh.between.data = 2" in (raised.value.hint or "")
    for other in ("diloco.every=2", "diloco.every=0", "diloco.lr=1", "diloco.momentum=0"):
        with pytest.raises(ArgosyError, match=other.split("=")[0]):
            fit(tmp_path / "run", other)
    for other in (["diloco.every=0"], ["diloco.every=4"]):
        with pytest.raises(ArgosyError, match=r"trained replicas|diloco\.every and init\.state do not combine"):
            fit(tmp_path / "new", f"init.state={tmp_path / 'run'}", *other)
    # Its outer weights may begin other runs, and other axes may split a replica.
    fit(tmp_path / "new", f"init.weights={tmp_path / 'run'}", "mesh.data=4", "steps=4")
    fit(tmp_path / "run", "mesh.fsdp=2", "steps=8")


@pytest.mark.slow
@pytest.mark.parametrize("words", default(["guard.replay=2"], of=[["guard.replay=2"], ["guard.nonfinite=rollback", "guard.replay=3"]]))
def test_a_step_of_replicas_is_made_twice_with_the_same_bits(tmp_path: Path, words: list[str]):
    fit(tmp_path / "twice", *words)
    fit(tmp_path / "once")
    ours, theirs = arrays_of(tmp_path / "twice", 12), arrays_of(tmp_path / "once", 12)
    assert [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()] == []


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the rows of one replica in one batch bad."""
    from argosy.data.pipeline import RowBatches

    bad, get = set[int](), RowBatches.__next__

    def poisoned(self: RowBatches) -> Any:
        batch = get(self)
        if self.handed in bad:
            mask = batch["mask"].copy()
            mask[-1] = float("nan")
            batch = batch | {"mask": mask}
        return batch

    monkeypatch.setattr(RowBatches, "__next__", poisoned)
    return bad.add


@pytest.mark.slow
@pytest.mark.parametrize("step", default(8, of=(6, 8)))
def test_a_bad_step_of_one_replica_is_skipped_by_all_and_outer_steps_are_not(poison: Any, tmp_path: Path, step: int):
    poison(step)
    fit(tmp_path / "run", "guard.nonfinite=skip", "checkpoint.every=1", "steps=8")
    before, after = arrays_of(tmp_path / "run", step - 1), arrays_of(tmp_path / "run", step)
    inner = [name for name in before if name.startswith("optimizer.inner.")]
    assert inner
    assert all(before[name].tobytes() == after[name].tobytes() for name in inner)
    for name in (name for name in before if name.startswith("optimizer.replicas.")):
        address = name.removeprefix("optimizer.replicas.")
        outer = step % 4 == 0
        assert (before[address] != after[address]).any() == outer
        assert (before[name] != after[name]).any() == outer
        assert not outer or (after[name] == after[address]).all()


@pytest.mark.slow
def test_a_rollback_goes_back_to_the_replicas_of_the_checkpoint(poison: Any, tmp_path: Path):
    """In the middle of an inner phase."""
    poison(8)
    heard = Heard()
    fit(tmp_path / "run", "guard.nonfinite=rollback", view=heard)
    assert "going back to step 6, without the batches 7 to 8" in heard.words
    with pytest.raises(Killed):
        fit(tmp_path / "again", "guard.nonfinite=rollback", view=Kills(10))
    fit(tmp_path / "again", "guard.nonfinite=rollback")
    ours, theirs = arrays_of(tmp_path / "again", 12), arrays_of(tmp_path / "run", 12)
    assert [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()] == []
