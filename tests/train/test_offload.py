"""The optimizer's state in the host's memory: the same numbers, and less memory of a device."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Heard, default, described_tpus, numbers

from argosy.checkpoint.step.layout import STATE
from argosy.checkpoint.step.load import load_item, load_weights
from argosy.core.errors import BadInput, UserError
from argosy.data.pipeline import RowBatches
from argosy.jobs.train import train
from argosy.models.parts.stack import Scan
from argosy.models.parts.weight import abstract, logical
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.rules import DEFAULT, shardings
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.train import offload
from argosy.train.offload import HOST, pieces_for
from argosy.train.optimizers.adam import AdamW
from argosy.train.optimizers.base import Optimizer
from argosy.train.optimizers.lion import Lion
from argosy.train.optimizers.muon import Muon
from argosy.train.optimizers.sgd import SGD
from argosy.train.state import meanings_of
from tools.devices import config_of, lowered_step

WORDS = ["model.width=32", "model.ffn=96", "model.vocab=64", "model.layers=2", "model.heads=2", "data.source=synthetic", "data.batch=8"]
WORDS += ["data.sequence=32", "eval.batches=0", "steps=4", "schedule=constant", "log.every=1", "execution.run=scan", "mesh.fsdp=-1"]
OFFLOADED, WEIGHTS = "execution.offload=optimizer", "execution.offload=weights"


def fit(folder: Path, *words: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[int, float]]:
    """The weights and the state at the end of a run, and its losses."""
    train("tiny", [*WORDS, f"dir={folder}", *words], Heard())
    last = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    loaded = (load_weights(last), load_item(last, STATE))
    weights, state = ({name: np.asarray(a) for name, a in arrays.items()} for arrays in loaded)
    assert any(name.startswith("optimizer.") for name in state)
    return weights, state, numbers(folder, "loss")


def close(first: Any, other: Any, tolerance: float = 2e-6) -> None:
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def kinds(optimizer: Any) -> set[str]:
    """Where arrays of a state are. Numbers do not count."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(optimizer) if leaf.ndim > 1}


@pytest.mark.parametrize("settings", [AdamW(), Lion(), SGD(momentum=0.9), Muon()], ids=lambda s: type(s).__name__)
def test_updates_and_state_are_those_of_the_device(settings: Optimizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload, "PIECE", 20_000)
    model = config_of("dense", layers=3).build(Scan())
    meanings, shapes = meanings_of(model), abstract(model)
    shapes = {a: shapes[a] for a in meanings}
    mesh = MeshSettings(fsdp=1).build(jax.devices()[:1])
    places = shardings(logical(model), {a: s.shape for a, s in shapes.items()}, DEFAULT, mesh)
    pieces = pieces_for(settings, meanings, shapes, places)
    stacked = {a for a in shapes if shapes[a].shape[0] == 3}
    assert stacked
    assert all(pieces[a] == (0, 3) for a in stacked)
    cut = set(pieces) - stacked
    assert cut
    assert all(places[a].spec[pieces[a][0]] is None for a in cut if pieces[a][0] < len(places[a].spec))
    keys = jax.random.split(jax.random.key(0), 2)
    params, grads = ({a: jax.random.normal(key, s.shape) for a, s in shapes.items()} for key in keys)
    plain = settings.build(lambda _: 1.0, meanings)
    away = settings.build(lambda _: 1.0, meanings, pieces)

    def twice(rule: Any, **options: Any) -> Any:
        def run(params: Any, grads: Any) -> Any:
            updates, state = rule.update(grads, rule.init(params), params, **options)
            return rule.update(grads, state, optax.apply_updates(params, updates), **options)

        return jax.jit(run)(params, grads)

    expected, result = twice(plain), twice(away, stays=jnp.zeros((), bool))
    assert jax.tree.structure(expected) == jax.tree.structure(result)
    close(expected, result, 2e-5)
    assert kinds(result[1]) == {HOST}
    # What stays is as it began.
    _, stayed = twice(away, stays=jnp.ones((), bool))
    assert all(map(np.array_equal, jax.tree.leaves(jax.jit(plain.init)(params)), jax.tree.leaves(stayed)))


@pytest.mark.slow
def test_a_run_learns_the_same_and_resumes_with_and_without(tmp_path: Path):
    device = fit(tmp_path / "device")
    host = fit(tmp_path / "host", OFFLOADED)
    close(device, host)
    settings = compose(Run, "tiny", [*WORDS, OFFLOADED]).value
    assembly = assemble(settings, Decided.here(settings))
    large = [place for place, leaf in zip(*map(jax.tree.leaves, (assembly.places.optimizer, assembly.shapes.optimizer))) if leaf.ndim]
    assembly.close()
    assert {place.memory_kind for place in large} == {HOST}
    for first, then in ([OFFLOADED], []), ([], [OFFLOADED]), ([OFFLOADED], [OFFLOADED]):
        folder = tmp_path / f"{len(first)}{len(then)}"
        fit(folder, "steps=2", *first)
        resumed = fit(folder, "steps=4", *then)
        close(host, resumed)
    # The last one was on the host all along.
    for before, other in zip(host, resumed):
        assert before.keys() == other.keys()
        assert all(np.array_equal(before[name], other[name]) for name in before)


MORE = [["execution.remat=dots"], ["execution.remat=full", "accumulate=2", "data.batch=16"], ["guard.nonfinite=skip", "mesh.tensor=2"]]


@pytest.mark.parametrize("more", default([], of=[[], *MORE]), ids=" ".join)
def test_weights_on_the_host_learn_the_same_and_resume(tmp_path: Path, more: list[str]):
    words = ["eval.batches=1", *more]
    device = fit(tmp_path / "device", *words)
    heard = Heard()
    train("tiny", [*WORDS, f"dir={tmp_path / 'host'}", "steps=2", WEIGHTS, *words], heard)
    assert "execution.offload=weights saves no memory here" in heard.words
    close(device, fit(tmp_path / "host", WEIGHTS, *words))
    # It may change when a run resumes.
    fit(tmp_path / "turns", "steps=2", WEIGHTS, *words)
    close(device, fit(tmp_path / "turns", *words))


def test_the_weights_of_layers_alone_are_on_the_host():
    settings = compose(Run, "tiny", [*WORDS, WEIGHTS]).value
    assembly = assemble(settings, Decided.here(settings))
    host_weights = {address for address, place in assembly.places.params.items() if place.memory_kind == HOST}
    assembly.close()
    assert host_weights == {address for address in assembly.places.params if address.startswith("layers.")}
    assert "embed.w" not in host_weights


@pytest.mark.parametrize("mesh", default("mesh.fsdp=-1", of=["mesh.fsdp=-1", "mesh.tensor=2", "mesh.data=2"]))
def test_a_bad_step_leaves_the_state_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str):
    """The third batch makes a loss that is not finite."""
    get = RowBatches.__next__

    def poisoned(self: RowBatches) -> Any:
        batch = get(self)
        return batch | {"mask": batch["mask"] * float("nan")} if self.handed == 3 else batch

    monkeypatch.setattr(RowBatches, "__next__", poisoned)
    words = ["guard.nonfinite=skip", mesh]
    device, host = fit(tmp_path / "device", *words), fit(tmp_path / "host", OFFLOADED, *words)
    assert device[2].pop(3) == host[2].pop(3) == "nan"
    assert all(np.isfinite(a).all() for a in host[1].values() if a.dtype.kind == "f")
    assert host[1]["guard.skipped"] == 1
    close(device, host)


@pytest.mark.parametrize(
    ("words", "problem", "kind"),
    [
        (["execution.run=unroll"], "these layers are a list", BadInput),
        (["mesh.data=8", "mesh.fsdp=1", "diloco.every=2"], "execution.offload and diloco.every", BadInput),
        (["optimizer=sgd"], "SGD keeps no arrays", BadInput),
        (["guard.replay=2"], "execution.offload and guard.replay", BadInput),
        (["mesh.stage=2", "model.layers=4", "mesh.fsdp=4", "execution.run=auto"], "execution.offload and mesh.stage", BadInput),
    ],
)
def test_what_is_not_built_is_refused(words: list[str], problem: str, kind: type[UserError]):
    settings = compose(Run, "tiny", [*WORDS, OFFLOADED, *words]).value
    with pytest.raises(kind, match=problem):
        assemble(settings, Decided.here(settings))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["sample.every=2"], "execution.offload=weights and sample.every do not combine"),
        (["execution.gather=once", "accumulate=2", "data.batch=16"], "execution.offload=weights and execution.gather=once"),
    ],
)
def test_what_is_not_built_for_weights_is_refused(words: list[str], problem: str):
    settings = compose(Run, "tiny", [*WORDS, WEIGHTS, *words]).value
    with pytest.raises(BadInput, match=problem):
        assemble(settings, Decided.here(settings))


@pytest.mark.tpu
def test_on_tpus_a_device_holds_the_weights_of_one_layer_or_two(monkeypatch: pytest.MonkeyPatch):
    devices = described_tpus(monkeypatch, "v5e:2x2")
    for count, remat in ((1, "full"), (4, "full"), (1, "none")):
        model = config_of("dense", width=1024, ffn=4096, vocab=4096, layers=8).build(Scan(remat))
        mesh, memory = MeshSettings(fsdp=count).build(devices[:count]), {}
        for where in ("optimizer", "weights"):
            lowered = lowered_step(model, mesh, 4, 256, "bfloat16", optimizer=AdamW(), offload=where)
            memory[where] = lowered.compile().memory_analysis()
        here, away = memory["optimizer"], memory["weights"]
        layers = sum(w.size * 4 for a, w in abstract(model).items() if a.startswith("layers.")) / count
        assert here.argument_size_in_bytes - away.argument_size_in_bytes == pytest.approx(layers, rel=0.01)
        assert away.host_argument_size_in_bytes - here.host_argument_size_in_bytes == pytest.approx(layers, rel=0.01)
        assert away.host_temp_size_in_bytes == 0
        assert away.temp_size_in_bytes < here.temp_size_in_bytes + 2 * layers / 8


@pytest.mark.tpu
def test_on_tpus_a_device_holds_a_piece_a_piece_of_the_state(monkeypatch: pytest.MonkeyPatch):
    """It had all of it, when the state of whole weights was fetched: twice. A host had it twice where loops gave new arrays."""
    devices = described_tpus(monkeypatch, "v5e:2x2")
    # Large embeddings come in pieces where the mesh does not split their rows.
    for count, vocab in ((1, 32768), (4, 4096)):
        model = config_of("dense", width=1024, ffn=4096, vocab=vocab, layers=8).build(Scan("full"))
        mesh, memory = MeshSettings(fsdp=count).build(devices[:count]), {}
        for where in ("none", "optimizer"):
            lowered = lowered_step(model, mesh, 4, 128, "bfloat16", optimizer=AdamW(), offload=where)
            memory[where] = lowered.compile().memory_analysis()
        here, away = memory["none"], memory["optimizer"]
        state = 2 * sum(w.size * 4 for w in abstract(model).values()) / count
        assert here.argument_size_in_bytes - away.argument_size_in_bytes == pytest.approx(state, rel=0.01)
        assert away.host_argument_size_in_bytes == pytest.approx(state, rel=0.01)
        assert away.host_temp_size_in_bytes == 0
        assert away.temp_size_in_bytes < here.temp_size_in_bytes + 0.25 * state
