"""Head and loss by blocks of the vocabulary, on any mesh: values, gradients, and what devices send."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from jax.sharding import NamedSharding, PartitionSpec

from argosy.ops.cross_entropy import from_logits
from argosy.ops.vocabulary_scan import HeadLayout, vocabulary_scan
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope

B, T, D = 8, 6, 16
# No multiple of a block's width.
V = 600
CAP = 3.0


def arrays(order: str):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((B, T, D), (V, D)))
    targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    return x, w if order == "VD" else w.T, targets, jnp.asarray(rng.standard_normal((2, B, T)), jnp.float32)


def plain(x, w, targets, order, cap):
    logits = x @ (w.T if order == "VD" else w)
    return from_logits(logits if cap is None else cap * jnp.tanh(logits / cap), targets)


def loss(of, weights, x, w):
    # Different weights on each row, and on the loss and its log partition: a gradient of either alone would show.
    return sum(jnp.sum(a * b) for a, b in zip(of(x, w), weights))


def compare_losses(layout: HeadLayout):
    x, w, targets, weights = arrays(layout.order)
    expected = jax.value_and_grad(partial(loss, lambda x, w: plain(x, w, targets, layout.order, layout.cap), weights), (0, 1))(x, w)
    step = jax.jit(jax.value_and_grad(partial(loss, lambda x, w: vocabulary_scan(x, w, targets, layout), weights), (0, 1)))
    for a, b in zip(jax.tree.leaves(step(x, w)), jax.tree.leaves(expected)):
        assert relative(a, b) < 3e-6


@pytest.mark.parametrize("order", ["VD", "DV"])
@pytest.mark.parametrize("cap", [None, CAP])
@pytest.mark.parametrize("chunk", [7, 48])
def test_it_equals_logits_in_value_and_gradient(order: str, cap: float | None, chunk: int):
    compare_losses(HeadLayout(PartitionSpec(None, None), PartitionSpec(None, None), order, chunk, cap))


# Sizes of a mesh, the split of rows, and of V and D.
MESHES = {
    "fsdp": ({"fsdp": 8}, (("fsdp",), None), (None, "fsdp")),
    "data": ({"data": 4, "fsdp": 2}, (("data", "fsdp"), None), (None, "fsdp")),
    "tensor": ({"fsdp": 4, "tensor": 2}, (("fsdp",), None), ("tensor", "fsdp")),
    "vocabulary over rows": ({"fsdp": 8}, (("fsdp",), None), ("fsdp", None)),
    "context": ({"fsdp": 4, "context": 2}, (("fsdp",), ("context",)), (None, "fsdp")),
    "rows not split": ({"fsdp": 8}, (None, None), (None, "fsdp")),
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("order", ["VD", "DV"])
def test_any_mesh_gives_the_same(name: str, order: str):
    sizes, rows, (of_v, of_d) = MESHES[name]
    weight = (of_v, of_d) if order == "VD" else (of_d, of_v)
    with scope(MeshSettings(**sizes).build()):
        compare_losses(HeadLayout(PartitionSpec(*rows), PartitionSpec(*weight), order, 1, CAP))


def test_a_target_outside_the_vocabulary_is_no_column():
    x, w, targets, _ = arrays("VD")
    layout = HeadLayout(PartitionSpec(None, None), PartitionSpec(None, None), "VD", 7)
    nll, lse = vocabulary_scan(x, w, targets.at[0, 0].set(-1), layout)
    np.testing.assert_array_equal(nll[0, 0], lse[0, 0])


def test_huge_logits_stay_finite():
    x, w, targets, _ = arrays("VD")
    layout = HeadLayout(PartitionSpec(None, None), PartitionSpec(None, None), "VD", 7)
    got, expected = vocabulary_scan(x * 1e3, w, targets, layout), plain(x * 1e3, w, targets, "VD", None)
    assert relative(got[0], expected[0]) < 1e-6


def test_the_head_is_gathered_twice_and_its_gradient_reduced_once_in_blocks():
    mesh = MeshSettings(fsdp=8).build()
    layout = HeadLayout(PartitionSpec("fsdp", None), PartitionSpec(None, "fsdp"), "VD", 1)
    x, w, targets, weights = arrays("VD")
    rows, split = (NamedSharding(mesh, spec) for spec in (layout.rows, layout.weight))
    with scope(mesh):
        step = jax.grad(partial(loss, lambda x, w: vocabulary_scan(x, w, targets, layout), weights), (0, 1))
        inputs = jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp"))), jax.device_put(w, split)
        text = jax.jit(step, out_shardings=(rows, split)).lower(*inputs).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    transfers = re.findall(rf"= \(?(\w+\[[\d,]*\])[^=]*? ({kinds})(?:-start)?\(", text)
    gathers = [shape for shape, kind in transfers if kind == "all-gather"]
    assert gathers == [f"f32[128,{D}]"] * 2, transfers
    reduced = [shape for shape, kind in transfers if kind in ("all-reduce", "reduce-scatter")]
    assert len(reduced) == 1, transfers
    # The whole head is nowhere.
    assert f"f32[{V},{D}]" not in text
