"""Runs whose layers are split over stages: the same numbers as scanned layers, resumed with and without them, and what is refused."""

from pathlib import Path

import pytest
from campaign_kill import SMALL
from helpers import numbers

from argosy.core.errors import ArgosyError, BadInput, Unsupported
from argosy.jobs.train import Quiet, train

# Adam would make of a gradient's rounding a step of full size.
WORDS = [*SMALL, "model.layers=4", "data.batch=16", "mesh.data=-1", "mesh.fsdp=1", "checkpoint.every=2"]
WORDS += ["eval.batches=1", "eval.every=2", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.learning_rate=0.1"]


class Headed(Quiet):
    """Keeps the header of a run."""

    facts = None

    def header(self, facts):
        self.facts = facts


def fit(run: Path, *words: str) -> dict:
    view = Headed()
    train("tiny", [*WORDS, f"dir={run}", *words], view)
    return view.facts or {}


@pytest.mark.slow
def test_a_run_goes_on_with_other_stages(tmp_path: Path):
    """With 2 stages, without, with 4: as the run that was scanned all along."""
    fit(tmp_path / "scan", "steps=6", "execution.run=scan")
    header = fit(tmp_path / "run", "steps=2", "mesh.stage=2")
    assert header["pipeline"] == "2 stages, 4 microbatches, idle 20% of the time"
    assert "pipeline" not in fit(tmp_path / "run", "steps=4", "mesh.stage=1")
    fit(tmp_path / "run", "steps=6", "mesh.stage=4", "execution.microbatches=8")
    for name in ("loss", "grad_norm", "eval_loss"):
        expected, found = numbers(tmp_path / "scan", name), numbers(tmp_path / "run", name)
        assert found == pytest.approx(expected, rel=1e-5), name
        assert len(expected) == (3 if name == "eval_loss" else 6)


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["mesh.stage=4", "model.layers=3"], BadInput, "mesh.stage = 4: 3 layers repeat 3 times, in groups"),
        (["mesh.stage=2", "model.layers=1"], BadInput, "mesh.stage = 2: 1 layers repeat 1 times"),
        (["mesh.stage=2", "data.batch=12"], BadInput, "data.batch = 12 does not divide into 2 microbatches over 4 devices"),
        (["mesh.stage=2", "execution.microbatches=3"], BadInput, "microbatches = 3 is no multiple of mesh.stage = 2"),
        (["mesh.stage=2", "execution.microbatches=8"], BadInput, "does not divide into 8 microbatches over 4 devices"),
        (["mesh.stage=2", "execution.run=unroll"], BadInput, "mesh.stage = 2 splits stacked layers"),
        (["execution.microbatches=4"], BadInput, "execution.microbatches is of a pipeline, and mesh.stage is 1"),
        (["mesh.stage=2", "sample.every=2"], Unsupported, "sample.every: not built over several stages yet"),
    ],
)
def test_what_stages_cannot_do_is_said_before_a_run_begins(tmp_path: Path, words, kind, said):
    with pytest.raises(ArgosyError) as caught:
        fit(tmp_path / "run", "steps=2", *words)
    assert isinstance(caught.value, kind)
    assert said in str(caught.value)
    assert caught.value.hint
    assert not (tmp_path / "run").exists()
