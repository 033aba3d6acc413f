"""Checksums that each device makes of what it holds itself."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import flip_bit
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from argosy.parallel.checksum import by_device, checksum, copies, odd_ones


def test_a_flip_of_any_bit_changes_the_sum():
    a = np.random.default_rng(0).normal(size=37).astype(np.float32)
    good, sums = int(checksum(jnp.asarray(a))), []
    for bit in range(32):
        for place in (0, 5, 36):
            b = a.copy()
            b.view(np.uint32)[place] ^= np.uint32(1 << bit)
            sums.append(int(checksum(jnp.asarray(b))))
    assert len(sums) == 96
    assert good not in sums


def test_each_device_sums_its_own_copy():
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    places = [NamedSharding(mesh, P()), NamedSharding(mesh, P("b"))]
    x = np.arange(8, dtype=np.float32)
    whole, split = jax.device_put(x, places[0]), jax.device_put(x, places[1])
    sums = np.asarray(by_device(places, mesh)([whole, split]))
    assert sums.shape == (4, 2)
    assert (sums[:, 0] == int(checksum(jnp.asarray(x)))).all()
    assert sums[:, 1].tolist() == [int(checksum(jnp.asarray(part))) for part in (x[:4], x[4:])] * 2
    bad = np.asarray(by_device(places, mesh)([flip_bit(whole, 2, 7), split]))
    assert np.argwhere(bad != sums).tolist() == [[2, 0]]
    groups = [copies(place, x.shape, mesh) for place in places]
    assert groups == [[[0, 1, 2, 3]], [[0, 2], [1, 3]]]
    assert odd_ones(bad[:, 0], groups[0]) == [2]
    assert odd_ones(sums[:, 1], groups[1]) == []
    again = np.asarray(by_device(places, mesh)([whole, flip_bit(split, 1, 30)]))
    assert odd_ones(again[:, 1], groups[1]) == [1, 3], "of two nobody knows which is right"
