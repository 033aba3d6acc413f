"""Devices that are not here: their meshes, and the programs that are traced and compiled for them."""

import jax
import jax.numpy as jnp
import pytest
from helpers import described_tpus

from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import device_kind, platform, scope
from argosy.parallel.target import Target


def test_this_machine_is_the_default_target():
    here = Target.described("this")
    assert (here.platform, here.count, here.processes) == ("cpu", jax.device_count(), 1)
    assert here.shares_memory
    assert here.mesh(MeshSettings()).devices.size == jax.device_count()
    assert here.missing_compiler() is None


def test_devices_that_are_absent_have_meshes_shardings_and_a_platform():
    target = Target.described("v5p-128")
    mesh = target.mesh(MeshSettings(fsdp=16, tensor=4))
    assert {axis: n for axis, n in mesh.shape.items() if n > 1} == {"fsdp": 16, "tensor": 4}
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tensor"))
    assert place.shard_shape((64, 64)) == (4, 16)
    with scope(mesh):
        assert (platform(), device_kind()) == ("tpu", "TPU v5")
    with scope(Target.described("h100-8").mesh(MeshSettings())):
        assert platform() == "gpu"


@pytest.mark.tpu
@pytest.mark.parametrize(
    "name", ["v4-8", "v5p-2", "v5p-16", "v5p-128", "v5e-1", "v5e-8", "v5e-16", "v6e-8", "v6e-256", "v7x-8", "v7x-128"]
)
def test_a_compiler_describes_the_devices_that_the_table_names(monkeypatch: pytest.MonkeyPatch, name: str):
    described_tpus(monkeypatch, "v5e:2x2")
    target = Target.described(name)
    described = target.compiled()
    assert (described.count, described.kind, len(described.devices)) == (target.count, target.kind, target.count)
    assert described.processes == target.processes


@pytest.mark.tpu
def test_a_program_is_refused_beyond_the_memory_of_the_table(monkeypatch: pytest.MonkeyPatch):
    described_tpus(monkeypatch, "v5e:2x2")
    for name in ("v4-8", "v5p-8", "v5e-4", "v6e-4", "v7x-8"):
        target = Target.described(name).compiled()
        placement = jax.sharding.SingleDeviceSharding(target.devices[0])
        x = jax.ShapeDtypeStruct((1 << 19, 1 << 19), jnp.float32, sharding=placement)
        with pytest.raises(Exception, match="exceeds available HBM") as caught:
            jax.jit(lambda x: jnp.sort(x @ x.T)).lower(x).compile()
        assert f"({target.memory_bytes / 2**30:.2f}G)" in str(caught.value), name
