"""Logical axes to mesh axes, and meshes that do not fit."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from argosy.core.errors import BadInput
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.rules import DEFAULT

MESH = MeshSettings(data=2, fsdp=4)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("embed", "heads", "head"), (64, 8, 16), P("fsdp", None, None)),
        (("heads", "head", "embed"), (8, 16, 64), P(None, None, "fsdp")),
        (("vocab", "embed"), (100, 64), P(None, "fsdp")),
        (("vocab", "embed"), (100, 63), P("fsdp", None)),             # embed does not divide: the next rule
        (("layers", "embed"), (12, 64), P(None, "fsdp")),
        (("embed", "ffn"), (63, 70), P(None, None)),                  # nothing divides: whole everywhere
    ],
)
def test_the_first_rule_that_divides_wins(axes, shape, expected):
    assert DEFAULT.weight(axes, shape, MESH.build().shape) == expected


@pytest.mark.parametrize("sizes", [{"data": 3, "fsdp": -1}, {"data": 2, "fsdp": 2}, {"data": -1, "fsdp": -1}, {"data": 0, "fsdp": 8}])
def test_meshes_that_do_not_fit_are_refused(sizes):
    assert len(jax.devices()) == 8
    with pytest.raises(BadInput, match="mesh"):
        MeshSettings(**sizes).build()


def test_minus_one_is_whatever_is_left():
    sizes = MeshSettings(data=2, fsdp=-1, tensor=2).build().shape
    assert {name: n for name, n in sizes.items() if n > 1} == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize("axis", ["stage"])
def test_axes_that_are_not_built_are_refused(axis):
    with pytest.raises(BadInput, match=f"{axis} = 2: .* not split over devices yet") as caught:
        MeshSettings(**{axis: 2})
    assert caught.value.exit_code == 2
    assert caught.value.hint
