"""Memory asked before the first step: the estimate from a trace, the compiler's figure, and what each counts."""

from pathlib import Path

import jax
import numpy as np
import pytest

import argosy
from argosy.checkpoint.saving.memory import HostMemory
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.memory import KINDS, TRACED, TRUST, Need, activation_bytes, compiled_need, training_bytes
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run

WORDS = [
    "model.width=32",
    "model.ffn=96",
    "model.vocab=64",
    "model.layers=4",
    "data.source=synthetic",
    "eval.batches=0",
]


def run_of(*words: str) -> Run:
    return compose(Run, "tiny", [*WORDS, *words]).value


def traced_bytes(run: Run, tokens: int | None = None, remat: str = "none") -> int:
    rows = run.data.batch // run.accumulate
    return activation_bytes(run.model, rows, tokens or run.data.sequence, run.objective, "float32", remat)


@pytest.mark.slow
def test_the_state_is_counted_exactly_and_the_estimate_is_below_the_compiled_figure():
    run = run_of()
    assembly = assemble(run, Decided.here(run))
    try:
        need = compiled_need(assembly, assembly.compile())
    finally:
        assembly.close()
    sizes = need.sizes
    devices = assembly.mesh.size  # they share this machine's memory
    weights = 4 * assembly.parameters
    # A step is not made again here.
    assert tuple(sizes) == tuple(kind for kind in KINDS if kind != "replay")
    assert weights <= sizes["parameters"] <= weights * devices
    assert sizes["gradients"] == sizes["parameters"]
    assert 2 * sizes["parameters"] <= sizes["optimizer"] <= 2 * sizes["parameters"] + 100 * devices
    assert sizes["checkpoint"] == sizes["parameters"] + sizes["optimizer"]
    assert TRUST * traced_bytes(run) < sizes["activations"]
    assert need.document()["total"] == sum(sizes.values())


def test_what_exists_already_is_counted_once(monkeypatch: pytest.MonkeyPatch):
    """The process holds the state when the program is compiled, and the state has kinds of its own."""
    run = run_of()
    assembly = assemble(run, Decided.here(run))
    monkeypatch.setattr("argosy.run.memory.resident_bytes", lambda: 100_000_000)
    try:
        program = assembly.compile()
        shapes, places = ((parts.params, parts.optimizer) for parts in (assembly.shapes, assembly.places))
        state = jax.tree.map(lambda s, place: jax.device_put(np.zeros(s.shape, s.dtype), place), shapes, places)
        alone, with_copy = compiled_need(assembly, program), compiled_need(assembly, program, (state, {"again": state}))
    finally:
        assembly.close()
    state_bytes = alone.sizes["parameters"] + alone.sizes["optimizer"]
    assert alone.sizes["process"] == 100_000_000
    assert with_copy.sizes == alone.sizes | {"process": pytest.approx(100_000_000 - state_bytes, abs=1000)}


def test_the_copy_for_a_save_is_not_counted_as_the_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its memory is taken before the first save, and not before the need is known."""
    order = list[str]()
    real, reserve = Need.check, HostMemory.reserve
    monkeypatch.setattr(Need, "check", lambda self: (order.append("need"), real(self))[1])
    monkeypatch.setattr(HostMemory, "reserve", lambda self, sizes: (order.append("reserve"), reserve(self, sizes))[1])
    argosy.fit("tiny", *WORDS, f"dir={tmp_path / 'run'}", "steps=2")
    assert order[-2:] == ["need", "reserve"]
    assert order.count("reserve") == 1


def test_accumulation_and_recomputation_need_less():
    run = run_of()
    assert traced_bytes(run_of("accumulate=4")) < 0.3 * traced_bytes(run)
    assert traced_bytes(run, remat="full") < 0.3 * traced_bytes(run)
    assert traced_bytes(run, remat="full") < traced_bytes(run, remat="dots") < traced_bytes(run)


def test_long_sequences_are_extrapolated_near_what_a_trace_says(monkeypatch: pytest.MonkeyPatch):
    run = run_of("model.context=512", "data.sequence=512")
    whole = traced_bytes(run, 512)
    monkeypatch.setattr("argosy.run.memory.TRACED", 128)
    assert traced_bytes(run, 512) == pytest.approx(whole, rel=0.25)
    assert TRACED > 128


def test_training_takes_sixteen_bytes_a_parameter_and_activations():
    run = run_of()
    need = training_bytes(run.model, 128)
    assert need["state"] == 16 * run.model.parameters()
    assert 0 < need["activations_recomputed"] < need["activations"]
