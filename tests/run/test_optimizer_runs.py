"""Runs with optimizers whose state is not that of Adam: what resumes, what is saved, and what groups freeze."""

from pathlib import Path

import numpy as np
import pytest
from helpers import Heard

import argosy
from argosy.checkpoint.step.layout import STATE
from argosy.checkpoint.step.load import load_item
from argosy.core.errors import UserError
from argosy.core.storage import Store
from argosy.models.parts.weight import split
from argosy.observe.metrics import read

TINY = ["model.width=16", "model.layers=2", "model.heads=2", "model.ffn=32", "data.sequence=32", "data.batch=8", "eval.batches=2"]
TINY += ["data.max_bytes=40000", "eval.every=100", "checkpoint.every=2", "checkpoint.keep=20", "log.every=1"]
FREE = ["optimizer=schedule_free", "schedule=constant", "schedule.warmup=2"]


def train(folder, *more, steps):
    view = Heard()
    argosy.fit("tiny", *TINY, f"dir={folder}", *more, view=view, steps=steps)
    return folder


def weights_of(model):
    return {name: np.asarray(a) for name, a in split(argosy.load(model).module)[1].items()}


def arrays_of(folder, step):
    return {name: np.asarray(a) for name, a in load_item(Path(folder) / "checkpoints" / str(step), STATE).items() if name != "key"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        FREE,
        ["optimizer=soap", "optimizer.every=2"],
        ["optimizer=adafactor", "optimizer.factored=8"],
        ["optimizer=prodigy", "optimizer.state=bfloat16"],
        ["optimizer.state=int8", "optimizer.lookahead.every=3"],
    ],
    ids=lambda settings: settings[0].partition("=")[2],
)
def test_a_run_resumes_bit_for_bit(settings, tmp_path):
    settings = [*settings, "schedule=constant", "schedule.warmup=2"]
    for steps in (2, 4):
        train(tmp_path / "parts", *settings, steps=steps)
    train(tmp_path / "whole", *settings, steps=4)
    for arrays in (weights_of, lambda folder: arrays_of(folder, 4)):
        parts, two = arrays(tmp_path / "parts"), arrays(tmp_path / "whole")
        assert parts.keys() == two.keys()
        for name, a in parts.items():
            np.testing.assert_array_equal(a, two[name], err_msg=name)


@pytest.mark.slow
def test_the_average_of_schedule_free_is_saved_and_evaluated(tmp_path):
    """x = (y - (1 - b1) z) / b1, of the weights y that are trained and of z, both beside it in the checkpoint."""
    run = train(tmp_path / "run", *FREE, steps=4)
    arrays, saved = arrays_of(run, 4), weights_of(run)
    for name, x in saved.items():
        y, z = arrays[f"raw.{name}"], arrays[f"optimizer.1.z.{name}"]
        np.testing.assert_allclose(x, (y.astype(np.float64) - 0.1 * z) / 0.9, rtol=1e-5, atol=1e-6)
        assert np.abs(x - y).max() > 0
    loss = [line for line in read(Store(run)) if "eval_loss" in line][-1]["eval_loss"]
    lm = argosy.load(run)
    assert lm.config.layers == 2
    # Trained further without steps: a run from these weights evaluates them before its first step.
    again = train(tmp_path / "again", f"init.weights={run}", "eval.before=true", steps=1)
    first = next(line for line in read(Store(again)) if "eval_loss" in line)["eval_loss"]
    assert first == pytest.approx(loss, rel=1e-6)


def test_schedule_free_refuses_a_schedule_that_decays(tmp_path):
    with pytest.raises(UserError, match="schedule=constant"):
        train(tmp_path / "run", "optimizer=schedule_free", steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["unroll", "scan"])
def test_frozen_groups_stay_in_both_layouts_of_the_layers(layout, tmp_path):
    groups = 'optimizer.groups=[{match: "layers.0", freeze: true}, {match: embed, freeze: true}]'
    run = train(tmp_path / "run", groups, f"execution.run={layout}", steps=2)
    still = ["optimizer.learning_rate=1e-30", "optimizer.weight_decay=0"]
    before = train(tmp_path / "start", f"execution.run={layout}", *still, steps=1)
    after, start = weights_of(run), weights_of(before)
    unmoved = {name for name in after if (after[name] == start[name]).all()}
    expected = {name for name in after if name.startswith(("layers.0.", "embed."))}
    assert unmoved == expected
    # Without gradients there is no state.
    names = arrays_of(run, 2)
    assert not any("embed" in name for name in names)
    assert any("layers" in name for name in names)
