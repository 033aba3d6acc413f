"""Runs in few bits: their losses stay near those of floats, they resume bit for bit, and what does not combine is said first."""

from pathlib import Path

import pytest
from campaign_kill import SMALL

from argosy.core.errors import UserError
from argosy.core.storage import Store
from argosy.jobs.quickstart.proof import digest
from argosy.jobs.train import Quiet, train
from argosy.observe.metrics import by_step, read

STEPS = 12
WORDS = [*SMALL, "checkpoint.every=6", "data.batch=16"]
KINDS = {
    "int8": ["quant.train=int8"],
    "fp8": ["quant.train=fp8"],
    "qat": ["quant.train=qat", "quant.preset=w4a8"],
    "int8-stochastic": ["quant.train=int8", "quant.rounding=stochastic"],
    # Histories are also summed over parts of a batch, and scanned.
    "fp8-delayed": ["quant.train=fp8", "quant.scaling=delayed", "quant.history=4", "accumulate=2", "execution.run=scan"],
}

# The others are these with more state.
LONGER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "fp8")]


def losses(run: Path) -> dict[int, float]:
    return by_step(read(Store(run)), "loss")


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    run = tmp_path_factory.mktemp("floats") / "run"
    train("tiny", [*WORDS, f"dir={run}", f"steps={STEPS}"], Quiet())
    return losses(run)


@pytest.mark.parametrize("kind", [*LONGER, "int8-stochastic", "fp8-delayed", "qat"])
def test_a_run_in_few_bits_learns_as_floats_do_and_resumes_bit_for_bit(kind: str, floats: dict[int, float], tmp_path: Path):
    words = [*WORDS, *KINDS[kind]]
    train("tiny", [*words, f"dir={tmp_path / 'alone'}", f"steps={STEPS}"], Quiet())
    for steps in (6, STEPS):
        train("tiny", [*words, f"dir={tmp_path / 'resumed'}", f"steps={steps}"], Quiet())
    alone, resumed = losses(tmp_path / "alone"), losses(tmp_path / "resumed")
    assert alone == resumed
    assert digest(tmp_path / "alone", STEPS) == digest(tmp_path / "resumed", STEPS)
    assert alone != floats
    # Within 1 % of the loss of float32 at equal steps.
    assert alone[STEPS] == pytest.approx(floats[STEPS], rel=0.01)
    # The number format is part of the run.
    with pytest.raises(UserError, match="quant"):
        train("tiny", [*WORDS, f"dir={tmp_path / 'alone'}", f"steps={STEPS + 1}"], Quiet())


@pytest.mark.parametrize("kind", [LONGER[0], "qat", "fp8-delayed"])
@pytest.mark.usefixtures("one_device")
def test_devices_change_a_loss_by_rounding_alone(kind: str, tmp_path: Path):
    """Scales are of whole rows and blocks, however these are split. Sums in another order move a few numbers over a tie."""
    losses_of = []
    for name, mesh in (("one", ["mesh.data=1", "mesh.fsdp=1"]), ("eight", ["mesh.data=2", "mesh.fsdp=4"])):
        words = [*WORDS, *KINDS[kind], *mesh, f"dir={tmp_path / name}", "steps=4"]
        train("tiny", words, Quiet())
        losses_of.append(losses(tmp_path / name))
    assert losses_of[0].keys() == losses_of[1].keys()
    assert [losses_of[1][step] for step in losses_of[0]] == pytest.approx([losses_of[0][step] for step in losses_of[0]], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["quant.train=qat"], "preset or rules"),
        (["quant.train=qat", "quant.preset=w5"], "no preset `w5`"),
        (["quant.train=int8", "quant.where=layers.*.atn.*"], "nothing in the model matches"),
        (["quant.train=int4"], "quant.train"),
        (["quant.train=int8", "quant.scaling=delayed"], "scaling=delayed is for train=fp8"),
        (["quant.train=fp8", "quant.rounding=stochastic"], "rounding=stochastic is for train=int8"),
        (["quant.train=fp8", "quant.history=4"], "history is for scaling=delayed"),
        (["quant.train=fp8", "quant.scaling=delayed", "execution.offload=optimizer"], "quant.scaling=delayed"),
        (["quant.train=int8", "execution.offload=weights"], "quant.train"),
    ],
)
def test_mistakes_are_said_before_a_file_is_written(words: list[str], problem: str, tmp_path: Path):
    with pytest.raises(UserError, match=problem):
        train("tiny", [*WORDS, *words, f"dir={tmp_path / 'run'}", "steps=2"], Quiet())
    assert not (tmp_path / "run").exists()
