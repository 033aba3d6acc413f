"""The average of the weights: its numbers, what reads it, and runs that resume with it."""

from pathlib import Path

import jax.numpy as jnp
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
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.train.ema import RAW, EmaSettings

TINY = ["model.width=16", "model.layers=1", "model.heads=2", "model.ffn=32", "data.sequence=32", "data.batch=8", "eval.batches=2"]
TINY += ["data.max_bytes=40000", "eval.every=100", "checkpoint.every=1", "checkpoint.keep=20", "log.every=1"]
DECAY = 0.3


def train(folder, *more, steps):
    argosy.fit("tiny", *TINY, f"dir={folder}", *more, view=Heard(), steps=steps)
    return folder


def weights_of(model):
    return {name: np.asarray(a) for name, a in split(argosy.load(model).module)[1].items()}


def raw_of(folder, step):
    arrays = load_item(Path(folder) / "checkpoints" / str(step), STATE)
    return {name.removeprefix(RAW): np.asarray(a) for name, a in arrays.items() if name.startswith(RAW)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("ema") / "run", f"ema.decay={DECAY}", steps=6)


def step_of(folder, step):
    return Path(folder) / "checkpoints" / str(step)


def test_the_average_is_that_of_the_equation_and_training_does_not_see_it(run, tmp_path):
    plain = train(tmp_path / "plain", steps=6)
    average = None
    for n in range(1, 7):
        raw = raw_of(run, n)
        for name, w in weights_of(step_of(plain, n)).items():
            np.testing.assert_array_equal(raw[name], w, err_msg=f"{name} at step {n}")
        saved = weights_of(step_of(run, n))
        if average is not None:
            d = min(DECAY, (1 + n) / (10 + n))
            average = {a: d * average[a] + (1 - d) * raw[a].astype(np.float64) for a in raw}
            for name, w in average.items():
                np.testing.assert_allclose(saved[name], w, rtol=1e-5, atol=1e-6, err_msg=f"{name} at step {n}")
        average = {a: w.astype(np.float64) for a, w in saved.items()}
    assert np.abs(saved["embed.w"] - raw["embed.w"]).max() > 1e-4


def test_a_run_with_an_average_resumes_bit_for_bit(run, tmp_path):
    for steps in (2, 6):
        train(tmp_path / "run", f"ema.decay={DECAY}", "schedule=constant", "schedule.warmup=2", steps=steps)
    whole = train(tmp_path / "whole", f"ema.decay={DECAY}", "schedule=constant", "schedule.warmup=2", steps=6)
    for arrays in (weights_of, lambda folder: raw_of(folder, 6)):
        resumed, two = arrays(tmp_path / "run"), arrays(whole)
        assert resumed
        for name, a in resumed.items():
            np.testing.assert_array_equal(a, two[name], err_msg=name)


def test_the_average_is_evaluated(run):
    last = [line for line in read(Store(run)) if "eval_loss" in line][-1]
    lm = argosy.load(run)
    settings = compose(Run, "tiny", [*TINY, f"ema.decay={DECAY}", "steps=6"]).value
    assembly = assemble(settings, Decided.here(settings))
    losses = weights = 0.0
    assert assembly.evals is not None
    for batch in assembly.evals:
        logits = np.asarray(lm.logits(batch["tokens"]), np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        each = -np.take_along_axis(logp, batch["targets"][..., None], -1)[..., 0]
        losses, weights = losses + (each * batch["mask"]).sum(), weights + batch["mask"].sum()
    assembly.close()
    assert last["eval_loss"] == pytest.approx(losses / weights, rel=1e-4)


def test_a_state_moves_between_runs_with_and_without_an_average(run, tmp_path):
    without = train(tmp_path / "without", f"init.state={step_of(run, 4)}", steps=5)
    with_ = train(tmp_path / "with", f"init.state={step_of(run, 4)}", f"ema.decay={DECAY}", steps=5)
    there = raw_of(with_, 5)
    assert not raw_of(without, 5)
    for name, a in weights_of(without).items():
        np.testing.assert_array_equal(a, there[name], err_msg=name)
    onto = train(tmp_path / "onto", f"init.state={step_of(without, 5)}", f"ema.decay={DECAY}", steps=6)
    assert raw_of(onto, 6)


@pytest.mark.parametrize("n, d", [(1, 2 / 11), (90, 0.91), (10**6, 0.99)])
def test_the_decay_warms_up(n, d):
    assert float(EmaSettings(decay=0.99).rate(jnp.asarray(n))) == pytest.approx(d)


@pytest.mark.parametrize("more", [["diloco.every=2"], ["execution.offload=optimizer", "execution.run=scan"]], ids=" ".join)
def test_what_does_not_combine_is_refused(tmp_path, more):
    with pytest.raises(UserError, match=r"ema\.decay"):
        train(tmp_path / "run", "ema.decay=0.9", *more, steps=1)


def test_a_mesh_averages_alike(run, tmp_path):
    meshed = train(tmp_path / "run", f"ema.decay={DECAY}", "mesh.data=4", "mesh.fsdp=2", steps=6)
    single, two = weights_of(run), weights_of(meshed)
    for name, a in single.items():
        np.testing.assert_allclose(a, two[name], rtol=2e-3, atol=2e-4, err_msg=name)
