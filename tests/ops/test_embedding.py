"""Rows of an embedding whose features are split: values and gradients on any mesh, and no whole weight or gradient on any device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from jax.sharding import NamedSharding

from argosy.observe.hlo.collectives import bytes_by_kind, collectives
from argosy.observe.hlo.module import HloModule
from argosy.ops.embedding import embedding_rows
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.place import batch_sharding
from argosy.parallel.rules import shardings
from argosy.parallel.scope import scope

B, T, V, D = 8, 6, 40, 16
AXES = ("vocab", "embed")
MESHES = {
    "fsdp": {"fsdp": 8},
    "data": {"data": 2, "fsdp": 4},
    "vocabulary": {"data": 1, "fsdp": 4, "tensor": 2},
    "experts": {"fsdp": 4, "expert": 2},
    "times": {"fsdp": 4, "context": 2},
    "rows alone": {"data": 8, "fsdp": 1},
}


def arrays():
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    return jnp.asarray(rng.standard_normal((V, D)), jnp.float32), ids, jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32)


def on_mesh(sizes, custom=()):
    """The gradient of a weighted sum of the rows and the rows, and where the weight lies."""
    settings = MeshSettings(**sizes, rules=list(custom))
    mesh = settings.build()
    place = shardings({"w": AXES}, {"w": (V, D)}, settings.table(), mesh)["w"]

    def rows(w, ids, g):
        y = embedding_rows(w, AXES, ids)
        return jnp.sum(y * g), y

    return scope(mesh, settings.table()), jax.jit(jax.grad(rows, has_aux=True), out_shardings=(place, None)), place


@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_gives_the_same(name):
    w, ids, g = arrays()
    scoped, step, place = on_mesh(MESHES[name])
    with scoped as mesh:
        rows = batch_sharding(mesh)
        dw, y = step(jax.device_put(w, place), jax.device_put(ids, rows), jax.device_put(g, rows))
    np.testing.assert_array_equal(y, w[ids])
    assert relative(dw, jnp.zeros_like(w).at[ids].add(g)) < 1e-6


@pytest.mark.parametrize("count", [1, 3])
def test_rows_that_do_not_divide_and_other_ranks_are_looked_up_too(count):
    w, ids, _ = arrays()
    scoped, _, place = on_mesh({"fsdp": 8})
    with scoped:
        look_up = jax.jit(lambda w, ids: (embedding_rows(w, AXES, ids), embedding_rows(w, AXES, ids[0])))
        for got, expected in zip(look_up(jax.device_put(w, place), ids[:count]), (w[ids[:count]], w[ids[0]])):
            np.testing.assert_array_equal(got, expected)


def test_a_vocabulary_that_rows_share_is_gathered():
    w, ids, g = arrays()
    scoped, step, place = on_mesh({"fsdp": 8}, ["embed:none", "vocab:fsdp"])
    assert place.spec[0] == "fsdp"
    with scoped as mesh:
        rows = batch_sharding(mesh)
        dw, y = step(jax.device_put(w, place), jax.device_put(ids, rows), jax.device_put(g, rows))
    np.testing.assert_array_equal(y, w[ids])
    assert relative(dw, jnp.zeros_like(w).at[ids].add(g)) < 1e-6


def test_no_device_has_the_whole_weight_or_its_gradient():
    w, ids, g = arrays()
    scoped, step, place = on_mesh({"fsdp": 8})
    with scoped as mesh:
        rows = batch_sharding(mesh)
        inputs = (w, place), (ids, rows), (g, rows)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, at.spec)) for a, at in inputs]
        text = step.lower(*shapes).compile().as_text()
    assert f"f32[{V},{D // 8}]" in text
    assert f"f32[{V},{D}]" not in text
    assert bytes_by_kind(collectives(HloModule.read(text), 8)) == {"all-gather": 4 * B * T, "all-to-all": 2 * 4 * T * D}
