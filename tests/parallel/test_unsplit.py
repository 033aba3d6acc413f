"""What is said of weights that no axis of a mesh splits."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from argosy.parallel.mesh import MeshSettings
from argosy.parallel.unsplit import unsplit_weights


def test_whole_weights_are_named_with_their_share():
    mesh = MeshSettings(fsdp=1, tensor=4).build(jax.devices()[:4])
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("tensor",), ()))
    embed = jax.device_put(jnp.zeros((8, 4)), split)
    weights = {"embed": embed, "head": jax.device_put(jnp.zeros((24, 4)), whole), "bias": jax.device_put(jnp.zeros(1), whole)}
    assert unsplit_weights(mesh, weights) == "388 B of weights (75%) on every device, as no rule splits them: head [24, 4], bias [1]"
    assert unsplit_weights(mesh, {"embed": embed}) == ""
    alone = MeshSettings(fsdp=1, data=4).build(jax.devices()[:4])
    assert unsplit_weights(alone, {"head": jax.device_put(jnp.zeros(8), NamedSharding(alone, PartitionSpec()))}) == ""
