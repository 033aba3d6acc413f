"""Which implementation multiplies in a run, and that a run on matrix units has the losses of one without, and resumes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from argosy.core.errors import Unsupported
from argosy.ops.native import library
from argosy.run.assembly.decided import Decided
from argosy.run.assembly.products import decided_products, products_of
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from tests.helpers import numbers

SMALL = ["data.source=synthetic", "model.layers=2", "model.vocab=512", "model.width=256", "model.ffn=512"]
SMALL += [
    "data.sequence=64",
    "data.batch=4",
    "mesh.data=1",
    "mesh.fsdp=1",
    "eval.batches=0",
    "log.every=1",
    "checkpoint.every=2",
]


def run_of(*words: str) -> Run:
    return compose(Run, "tiny", [*SMALL, *words]).value


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A processor with matrix units, and each time that the kernels were asked for."""
    calls: list[str] = []
    monkeypatch.setattr(library, "load", lambda *_: calls.append("load") or "")
    monkeypatch.setattr(library, "has_amx", lambda: True)
    return calls


def decide_products(*words: str, precision: str = "float32", devices: int = 1, platform: str = "cpu") -> str:
    return decided_products(run_of(*words), precision, devices, platform)


def test_a_run_takes_the_units_there_are(loads: list[str], monkeypatch: pytest.MonkeyPatch):
    assert decide_products() == "amx"
    assert decide_products("execution.products=amx3") == "amx3"
    monkeypatch.setattr(library, "has_amx", lambda: False)
    assert decide_products() == "xla"
    monkeypatch.setattr(library, "load", lambda *_: "no compiler")
    assert decide_products() == "xla"


def test_kernels_are_not_built_where_they_cannot_be_used(loads: list[str]):
    assert decide_products("model.width=64", "model.ffn=64") == "xla"
    assert decide_products(precision="bfloat16") == "xla"
    assert decide_products(devices=2) == "xla"
    assert decide_products(platform="tpu") == "xla"
    assert decide_products("execution.products=xla") == "xla"
    assert loads == []


def test_what_was_decided_stays_or_it_is_said(loads: list[str], monkeypatch: pytest.MonkeyPatch):
    assert products_of(run_of(), "amx", "float32", "cpu", 1) == ("amx", "")
    assert products_of(run_of(), "xla", "float32", "cpu", 1) == ("xla", ""), "a run that began with it keeps it"
    monkeypatch.setattr(library, "load", lambda *_: "no compiler")
    assert products_of(run_of(), "amx", "float32", "cpu", 1) == ("xla", "needs the kernels of CPUs: no compiler")
    assert Decided(**{"layers": "scan", "precision": "float32"}).products == "xla", "as old runs were"


@pytest.mark.parametrize(
    ("precision", "devices", "problem"),
    [("bfloat16", 1, "computes in bfloat16"), ("float32", 2, "this run has 2"), ("float32", 1, "needs matrix units")],
)
def test_what_is_named_and_cannot_run_is_a_mistake(
    loads: list[str], monkeypatch: pytest.MonkeyPatch, precision: str, devices: int, problem: str
):
    monkeypatch.setattr(library, "has_amx", lambda: False)
    with pytest.raises(Unsupported, match=problem):
        products_of(run_of("execution.products=amx"), "amx", precision, "cpu", devices)


def train(recipe: str, *words: str, **variables: str) -> str:
    """In a process with one device: what it said."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | variables
    command = [sys.executable, "-m", "argosy", "train", recipe, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


@pytest.mark.slow
def test_a_run_on_matrix_units(tmp_path: Path):
    """The losses are those of XLA's products to rounding, and a resumed run repeats an undisturbed one bit for bit."""
    if why := library.load():
        pytest.skip(f"no kernels here: {why}")
    if not library.has_amx():
        pytest.skip("this processor has no matrix units")
    words = [*SMALL, "model.vocab=4096", "model.ffn=1024", "data.sequence=128", "data.batch=8", "schedule=constant"]
    runs = {name: tmp_path / name for name in ("xla", "amx", "resumed")}
    train("tiny", *words, f"dir={runs['xla']}", "execution.products=xla", "steps=6")
    train("tiny", *words, f"dir={runs['amx']}", "steps=6")
    train("tiny", *words, f"dir={runs['resumed']}", "steps=4")
    assert "products were" not in train(str(runs["resumed"]), "steps=6")
    losses = {name: numbers(run, "loss") for name, run in runs.items()}
    assert len(losses["amx"]) == 6
    np.testing.assert_allclose([*losses["amx"].values()], [*losses["xla"].values()], rtol=2e-5)
    assert losses["amx"] != losses["xla"], "other products, other rounding"
    assert losses["resumed"] == losses["amx"]
    output = train(str(runs["resumed"]), "steps=7", ARGOSY_NATIVE="0")
    assert "products were computed by `amx` until step 6, and are by `xla` from here: `amx` needs the kernels of CPUs" in output
