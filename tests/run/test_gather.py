"""Weights that are gathered once for all parts of a batch (`execution.gather=once`): what is gathered, and what it costs."""

import math
from typing import Any

import jax
import pytest
from helpers import described_tpus

from argosy.core.errors import UserError
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import abstract
from argosy.observe.hlo import Cost, cost
from argosy.parallel.mesh import MeshSettings
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from tools.devices import config_of, lowered_step

PARTS = 4
WORDS = [
    "data.source=synthetic", "data.sequence=32", "data.batch=32", "eval.batches=0", "model.width=64", "model.layers=2", "model.ffn=128",
    "model.heads=4", "model.kv_heads=4", "model.head_size=16", f"accumulate={PARTS}", "mesh.fsdp=-1",
]  # fmt: skip


def assembly_and_cost(*words: str) -> tuple[Any, Cost]:
    settings = compose(Run, "tiny", [*WORDS, *words]).value
    assembly = assemble(settings, Decided.here(settings))
    try:
        return assembly, cost(assembly.compile())
    finally:
        assembly.close()


@pytest.mark.slow
def test_each_weight_is_gathered_once_a_step():
    assembly, cost_once = assembly_and_cost("execution.gather=once")
    places = assembly.places.params
    split = [a for a, w in assembly.shapes.params.items() if places[a].shard_shape(w.shape) != w.shape]
    weights = sum(math.prod(assembly.shapes.params[a].shape) * 4 for a in split)
    assert weights > 0.9 * sum(a.size * 4 for a in jax.tree.leaves(assembly.shapes.params))
    assert cost_once.moved["all-gather"] == pytest.approx(weights, rel=0.05)
    # XLA on CPUs takes most gathers out of the loop by itself.
    _, each = assembly_and_cost()
    assert each.moved["all-gather"] > 1.2 * weights
    # Gradients are summed in each part either way, and the weights stay. Those of rows of the embedding are sent where its features
    # are, unless it is whole.
    (embedding,) = (math.prod(w.shape) * 4 for a, w in assembly.shapes.params.items() if a.startswith("embed."))
    assert cost_once.moved["all-reduce"] - each.moved["all-reduce"] == PARTS * embedding
    assert cost_once.temporary_bytes < each.temporary_bytes + 1.1 * weights


@pytest.mark.tpu
def test_on_tpus_each_weight_is_gathered_once_a_step(monkeypatch: pytest.MonkeyPatch):
    model = config_of("dense", width=256, ffn=1024).build(Unroll())
    mesh = MeshSettings(fsdp=4).build(described_tpus(monkeypatch, "v5e:2x2"))
    weights = sum(w.size * 4 for w in abstract(model).values())
    traffic = {}
    for gather in ("each", "once"):
        traffic[gather] = cost(lowered_step(model, mesh, 4 * PARTS, 256, "bfloat16", PARTS, gather).compile()).moved
    # They are cast before.
    assert traffic["once"]["all-gather"] == pytest.approx(weights / 2, rel=0.02)
    assert traffic["each"]["all-gather"] > 1.05 * PARTS * weights / 2
    # Gradients of matrices are summed as often either way, but for those of rows of the embedding, which are sent where its features
    # are, unless it is whole; those of norms, which are whole, in the loop over parts or after it.
    norms = sum(w.size * 4 for w in abstract(model).values() if len(w.shape) == 1)
    (embedding,) = (w.size * 4 for address, w in abstract(model).items() if address.startswith("embed."))
    assert 0 <= traffic["each"]["all-reduce"] + PARTS * embedding - traffic["once"]["all-reduce"] <= (PARTS - 1) * norms
    assert traffic["once"]["all-reduce"] > 20 * PARTS * norms


def test_weights_that_are_whole_have_nothing_to_gather():
    with pytest.raises(UserError, match="nothing to gather once"):
        assembly_and_cost("mesh.data=-1", "mesh.fsdp=1", "execution.gather=once")


def test_one_part_has_nothing_to_gather_once():
    with pytest.raises(UserError, match="accumulate=1 makes one part"):
        compose(Run, "tiny", ["execution.gather=once"])
