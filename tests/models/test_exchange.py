"""Experts that are split over devices: rows sent to them and back, against all of them on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import default, relative
from models.test_moe import HOWS, WIDTH, inputs, make_moe

from argosy.adapt.lora import DoRA, LoRA
from argosy.adapt.quant import int8
from argosy.adapt.surgery import swap
from argosy.models.parts.moe import exchange
from argosy.models.parts.weight import fill, merge, put, split, variables
from argosy.models.settings import Experts
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope

EIGHT = HOWS["softmax"].model_copy(update={"count": 8})
ALL_TO_TWO = 9.0  # on two experts' logits


def uneven_moe(experts: Experts, **made_as):
    """Experts of which nearly all tokens choose the first two, which one device has."""
    moe = make_moe(experts, **made_as)
    lead = jnp.zeros((WIDTH, experts.count)).at[0, :2].set(ALL_TO_TWO)
    moe.router.w.set_value(moe.router.w[...] + lead)
    return moe


def of_mesh(moe, x, live, sizes):
    """Output, aux outputs, and the gradients of weights and input, on a mesh or on one device."""
    graph, leaves = split(moe)
    trained = {a: w for a, w in leaves.items() if jnp.issubdtype(w.dtype, jnp.floating)}
    x, live = jnp.asarray(x), jnp.asarray(live)

    def run(trained, x):
        y, aux = merge(graph, leaves | trained)(x, live)
        return jnp.sum(jnp.sin(y)) + jnp.sum(aux["balance"]), (y, aux)

    both = jax.jit(jax.grad(run, (0, 1), has_aux=True))
    if sizes is None:
        return both(trained, x)
    count = int(np.prod(list(sizes.values())))
    with scope(MeshSettings(**{"fsdp": 1} | sizes).build(jax.devices()[:count])):
        return both(trained, x)


def same(moe, x, live, sizes):
    alone, other = of_mesh(moe, x, live, None), of_mesh(moe, x, live, sizes)
    for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(alone), strict=True):
        if np.abs(b).max():
            assert relative(a, b) < 1e-5
        else:
            assert not np.asarray(a).any()
    return alone[1]


def rows_with_a_lead(B=4):
    x, live = inputs(B=B)
    x[..., 0] = 1.0
    return x, live


@pytest.mark.parametrize("weigh", ["output", pytest.param("input", marks=pytest.mark.slow)])
def test_no_row_is_dropped_however_uneven_the_load(weigh):
    """Three rounds, where one is what an even load needs; the gradient of each."""
    moe = uneven_moe(EIGHT.model_copy(update={"weigh": weigh}))
    x, live = rows_with_a_lead()
    y, aux = same(moe, x, live, {"expert": 4})
    load = np.asarray(aux["load"])
    places = exchange.ROOM * live[0].size * EIGHT.active / 4
    assert load[:2].sum() / 4 > 1.5 * places, "one round is enough"
    assert np.abs(np.asarray(y)[live]).min(-1).max() > 0


GRIDS = [{"expert": 2, "tensor": 2}, {"expert": 8}, {"data": 2, "fsdp": 2, "expert": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", default(GRIDS[0], of=GRIDS), ids=str)
@pytest.mark.parametrize("capacity", [None, 0.7])
def test_split_experts_equal_those_of_one_device(sizes, capacity):
    """With biases, which a tensor axis must add once, and a bias of the choice."""
    experts = HOWS["sigmoid, groups of two, bias"].model_copy(update={"count": 8, "capacity": capacity})
    aux = same(make_moe(experts, bias=True), *inputs(B=8), sizes)[1]
    assert capacity is None or np.asarray(aux["dropped"]).max() > 0


@pytest.mark.parametrize("capacity", [None, pytest.param(0.7, marks=pytest.mark.slow)])
def test_rows_that_do_not_divide_are_computed_where_their_experts_are(capacity):
    """The engine's one row of tokens."""
    same(make_moe(EIGHT.model_copy(update={"capacity": capacity}), bias=True), *inputs(B=1), {"expert": 2, "tensor": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "kind", "sizes"),
    [
        ("float32", LoRA, {"expert": 4}),
        ("int8", LoRA, {"expert": 4}),
        ("float32", LoRA, {"expert": 2, "tensor": 2}),
        ("float32", DoRA, {"expert": 2, "tensor": 2}),
        ("float32", DoRA, {"tensor": 2}),
    ],
)
def test_adapters_on_split_experts(base, kind, sizes):
    """The norms of DoRA are over all features, of which `tensor` gives a device a share."""
    moe = make_moe(EIGHT)
    if base == "int8":
        swap(moe, "gate|up|down", int8)
    swap(moe, "gate|up|down", lambda of: kind(of, 3, 6.0))
    fill(moe, jax.random.key(0), addresses=lambda address: [address])
    rng = np.random.default_rng(3)
    put(moe, {a: jnp.asarray(0.3 * rng.standard_normal(v.shape), jnp.float32) for a, v in variables(moe).items() if a.endswith(".b")})
    same(moe, *rows_with_a_lead(), sizes)
