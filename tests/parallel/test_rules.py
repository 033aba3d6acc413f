"""Logical axes to mesh axes, and meshes that do not fit."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from argosy.core.errors import BadInput
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.place import batch_sharding
from argosy.parallel.rules import DEFAULT, add_rules

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


def test_layers_are_split_over_stages_and_rows_outside_of_them():
    mesh = MeshSettings(data=2, fsdp=2, stage=2).build()
    assert DEFAULT.weight(("layers", "embed", "ffn"), (4, 64, 70), mesh.shape) == P("stage", "fsdp", None)
    assert DEFAULT.weight(("layers", "embed", "ffn"), (3, 64, 70), mesh.shape) == P(None, "fsdp", None)
    assert DEFAULT.activation("B T D", (8, 6, 64), mesh.shape) == P(("data", "fsdp", "stage"), None, None)
    assert batch_sharding(mesh).spec == P(("data", "fsdp", "expert"))


@pytest.mark.parametrize(
    ("rule", "problem", "hint"),
    [
        ("embd:tensor", "no axis of weights is called `embd`", "did you mean `embed`?"),
        ("qqqq:tensor", "no axis of weights is called `qqqq`", "axes of weights: "),
        ("embed:tensr", "the mesh has no axis `tensr`", "data, tensor, or none"),
    ],
)
def test_rules_of_ones_own_that_name_nothing_are_refused(rule: str, problem: str, hint: str):
    with pytest.raises(BadInput, match=problem) as caught:
        add_rules(DEFAULT, [rule], ["data", "tensor"])
    assert hint in (caught.value.hint or "")
