"""What is read from the text of a compiled program, against programs whose products and bytes are counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from argosy.observe.hlo import collective_bytes, cost
from argosy.parallel.mesh import MeshSettings


def looped(x, w, times):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=times)[0]


@pytest.mark.parametrize("times", [1, 7])
def test_products_in_loops_count_as_often_as_they_run(times):
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    one = 2 * 4 * 8 * 8
    assert cost(jax.jit(lambda x, w: looped(x, w, times)).lower(x, w).compile()).products == times * one
    nested = jax.jit(lambda x, w: jax.lax.scan(lambda x, _: (looped(x, w, times) @ w, None), x, None, length=5)[0])
    assert cost(nested.lower(x, w).compile()).products == 5 * (times + 1) * one


def test_collectives_in_loops_count_as_often_as_they_run():
    mesh = MeshSettings(data=8, fsdp=1).build()

    def ring(x):
        right = [(i, (i + 1) % 8) for i in range(8)]
        return jax.lax.scan(lambda x, _: (jax.lax.ppermute(x, "data", right), None), x, None, length=5)[0]

    moved = jax.shard_map(ring, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    found = cost(jax.jit(moved).lower(jax.ShapeDtypeStruct((16, 3), jnp.float32)).compile())
    assert found.collectives == {"collective-permute": 2 * 3 * 4}
    assert found.moved == {"collective-permute": 5 * 2 * 3 * 4}


@pytest.mark.parametrize(
    ("groups", "counts"),
    [
        ("{{0},{1}}", False),
        ("{{0,1},{2,3}}", True),
        ("[8,1]<=[8]", False),
        ("[2,4]<=[8]", True),
        ("mesh['axis_0'=1,'axis_1'=8] {'axis_0'}", False),
        ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", True),
        ("mesh['a'=1,'b'=8] {'a','b'}", True),
        ("mesh['a'=8] {'a':(1)2}", True),
    ],
)
def test_a_collective_of_one_device_moves_nothing(groups: str, counts: bool):
    line = f"  %r = f32[4,2]{{1,0}} all-reduce(f32[4,2]{{1,0}} %x), channel_id=1, replica_groups={groups}, to_apply=%sum"
    text = f"ENTRY %main (x: f32[4,2]) -> f32[4,2] {{\n{line}\n}}\n"
    assert collective_bytes(text) == ({"all-reduce": 32} if counts else {})
