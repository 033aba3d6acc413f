"""The update: accumulation, precision and meshes change no number but by rounding; frozen weights do not move."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, noisy_model
from train.test_next_token import batch_of

from argosy.adapt.surgery import freeze
from argosy.data.batch import Field
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import abstract, logical
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.place import batch_sharding, like_weights
from argosy.parallel.rules import DEFAULT, shardings
from argosy.parallel.scope import scope
from argosy.train.objectives.next_token import NextToken
from argosy.train.objectives.objective import Needs
from argosy.train.optimizers.adam import AdamW
from argosy.train.optimizers.muon import Muon
from argosy.train.optimizers.sgd import SGD
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, flatten_state, meanings_of, split_trained, unflatten_state
from argosy.train.step import in_parts, make_step


def prepare(optimizer=None, run=None, freeze_what=None, **options):
    """A model's state and its update."""
    model = noisy_model(CASES["llama-plain"], run or Unroll())
    if freeze_what:
        freeze(model, freeze_what)
    graph, params, rest = split_trained(model)
    rate = Constant(warmup=0).build(10)
    transform = (optimizer or AdamW(learning_rate=1e-2)).build(rate, meanings_of(model))
    state = TrainState.start(params, rest, transform.init(params), 0)
    return model, state, make_step(graph, NextToken(), transform, rate, **options)


def rows(times):
    return jax.tree.map(lambda a: jnp.concatenate([a] * times), batch_of())


def changes_of(state, before):
    return {a: np.asarray(w) - np.asarray(before.params[a]) for a, w in state.params.items()}


@pytest.mark.slow
def test_accumulation_changes_nothing():
    batch = rows(2)
    batch["mask"] = batch["mask"].at[0].set(0.0)  # parts of unequal weight
    _, state, step = prepare()
    whole, metrics = jax.jit(step)(state, batch)
    _, _, parts = prepare(accumulate=4)
    pieces, told_pieces = jax.jit(parts)(state, batch)
    assert relative(told_pieces["loss"], metrics["loss"]) < 1e-6
    assert relative(told_pieces["grad_norm"], metrics["grad_norm"]) < 1e-5
    for a, step_taken in changes_of(whole, state).items():
        assert relative(changes_of(pieces, state)[a], step_taken) < 2e-2, a  # Adam's first step is a sign


def test_accumulation_splits_no_group():
    """Rows 0 and 1 are a pair: a part holds both or neither."""

    class Pairs(NextToken):
        needs: ClassVar[Needs] = Needs(rows_per_group=2)

        def reads(self):
            return {"margin": Field("B", np.float32, "group")}

    parts = in_parts({"tokens": jnp.arange(8)[:, None], "margin": jnp.arange(4)}, 2, Pairs())
    assert parts["tokens"][..., 0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert parts["margin"].tolist() == [[0, 2], [1, 3]]


@pytest.mark.slow
def test_bfloat16_stays_near_and_weights_stay_float32():
    _, state, step = prepare()
    _, _, low = prepare(precision="bfloat16")
    _, metrics = jax.jit(step)(state, batch_of())
    after, told_low = jax.jit(low)(state, batch_of())
    assert 0 < abs(float(metrics["loss"] - told_low["loss"])) < 0.05 * float(metrics["loss"])
    assert {w.dtype for w in after.params.values()} == {jnp.dtype("float32")}


def test_frozen_weights_do_not_move():
    _, state, step = prepare(freeze_what=r"layers\.block\.attn\..*")
    assert all(".attn." in a for a in state.rest)
    after, _ = jax.jit(step)(state, batch_of())
    assert all((np.asarray(after.rest[a]) == np.asarray(w)).all() for a, w in state.rest.items())
    assert all(np.abs(d).max() > 0 for d in changes_of(after, state).values()), "a trained weight that did not move"


MESHES = [{"data": 8, "fsdp": 1}, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]


# By default tests/laws/test_devices.py holds it, for one layout and mesh.
@pytest.mark.slow
@pytest.mark.parametrize(("run", "mesh"), [(run, mesh) for run in (Unroll(), Scan()) for mesh in MESHES])
def test_eight_devices_equal_one(mesh, run):
    batch = rows(4)
    model, state, step = prepare(Muon(), run)
    alone, metrics = jax.jit(step)(state, batch)
    devices = MeshSettings(**mesh).build()
    shapes = abstract(model)
    places = shardings(logical(model), {a: s.shape for a, s in shapes.items()}, DEFAULT, devices)
    if mesh["fsdp"] > 1:
        assert any(p.spec != jax.sharding.PartitionSpec(*[None] * len(p.spec)) for p in places.values()), (
            "nothing is split"
        )
    everywhere = like_weights(state, places, shapes, devices)
    with scope(devices):
        spread = jax.jit(step, out_shardings=(everywhere, None))(
            jax.device_put(state, everywhere), jax.device_put(batch, batch_sharding(devices))
        )
    assert relative(spread[1]["loss"], metrics["loss"]) < 1e-5
    for a, w in alone.params.items():
        assert relative(spread[0].params[a], w) < 1e-4, a


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_device_computes_its_own_rows_only(accumulate):
    """With weights split over D, every product still has this device's rows alone: 8 devices, an eighth of the FLOPs."""
    model, _, _ = prepare()
    devices = MeshSettings(data=2, fsdp=4).build()

    def compiled_flops(mesh):
        graph, params, rest = split_trained(model)
        rate = Constant(warmup=0).build(10)
        transform = SGD(learning_rate=1e-2).build(rate, meanings_of(model))
        state = TrainState.start(params, rest, transform.init(params), 0)
        places = shardings(logical(model), {a: s.shape for a, s in abstract(model).items()}, DEFAULT, mesh)
        spread = like_weights(state, places, abstract(model), mesh)
        step = make_step(graph, NextToken(head="logits"), transform, rate, accumulate=accumulate)
        batch = jax.device_put(rows(8), batch_sharding(mesh))
        with scope(mesh):
            lowered = jax.jit(step, out_shardings=(spread, None)).lower(jax.device_put(state, spread), batch)
            return lowered.compile().cost_analysis()["flops"]

    alone = compiled_flops(MeshSettings(data=1, fsdp=1).build(jax.devices()[:1]))
    assert compiled_flops(devices) < alone / 5


def test_an_optimizer_state_survives_being_named():
    _, state, _ = prepare(Muon())
    leaves = flatten_state(state.optimizer)
    assert len(leaves) == len(jax.tree.leaves(state.optimizer))
    back = unflatten_state(state.optimizer, leaves)
    assert jax.tree.structure(back) == jax.tree.structure(state.optimizer)
