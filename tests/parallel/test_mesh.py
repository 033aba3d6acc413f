"""Groups of devices that a slower network joins, rules that a user changes, and meshes by name."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import described_tpus
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from argosy.core.errors import BadInput, SettingsError, UnknownName
from argosy.parallel.mesh import BetweenSettings, MeshSettings, rows_divide
from argosy.run.assembly.grid import mesh_header
from argosy.run.settings.compose import compose
from argosy.run.settings.mesh_presets import mesh_presets
from argosy.run.settings.recipe_files import CONFIGS
from argosy.run.settings.run import Run


@dataclass(frozen=True)
class Described:
    """What `build` reads of a device."""

    id: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "gpu"
    device_kind: str = "described"


def processes(count: int, each: int) -> list[Described]:
    return [Described(i, i // each) for i in range(count * each)]


def slices(monkeypatch: pytest.MonkeyPatch, count: int, topology: str) -> list[Described]:
    """So many slices, each like the devices of a described TPU, and of one process."""

    @dataclass(frozen=True)
    class Chip:
        id: int
        slice_index: int
        coords: tuple[int, ...]
        core_on_chip: int
        platform: str
        device_kind: str
        process_index: int

    described = described_tpus(monkeypatch, topology)
    facts_of_chips = [(d.coords, d.core_on_chip, d.platform, d.device_kind) for d in described]
    return [Chip(i + s * len(facts_of_chips), s, *facts, s) for s in range(count) for i, facts in enumerate(facts_of_chips)]


def grid(settings: MeshSettings, devices, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, int], np.ndarray]:
    """Sizes above 1, and the devices without axes of size 1. jax's own mesh takes no described devices."""
    built = {}
    monkeypatch.setattr("jax.sharding.Mesh", lambda grid, names, axis_types: built.update(grid=grid, names=names))
    settings.build(devices)
    sizes = {name: n for name, n in zip(built["names"], built["grid"].shape) if n > 1}
    return sizes, np.squeeze(built["grid"])


def test_groups_are_the_outer_parts_of_each_axis(monkeypatch):
    sizes, devices = grid(MeshSettings(fsdp=2, tensor=2, between=BetweenSettings(data=2)), processes(2, 4), monkeypatch)
    assert sizes == {"data": 2, "fsdp": 2, "tensor": 2}
    assert [{d.process_index for d in part.flat} for part in devices] == [{0}, {1}]
    sizes, devices = grid(MeshSettings(tensor=2, between=BetweenSettings(fsdp=2)), processes(2, 4), monkeypatch)
    assert sizes == {"fsdp": 4, "tensor": 2}
    assert [[d.process_index for d in row] for row in devices] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    sizes, _ = grid(MeshSettings(between=BetweenSettings(data=-1, stage=2)), processes(4, 2), monkeypatch)
    assert sizes == {"stage": 2, "data": 2, "fsdp": 2}


def test_hosts_of_gpus_are_one_group_unless_asked(monkeypatch):
    """With a process for each GPU, too."""
    for each in (4, 1):
        gpus = [Described(i, i // each, i // 4) for i in range(8)]
        assert grid(MeshSettings(), gpus, monkeypatch)[0] == {"fsdp": 8}
        assert grid(MeshSettings(between=BetweenSettings(data=-1)), gpus, monkeypatch)[0] == {"data": 2, "fsdp": 4}


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v5e:4x4", "v5e:4x8", "v5p:2x2x4", "v5p:4x4x4"])
@pytest.mark.parametrize("sizes", [{}, {"data": -1, "fsdp": 4}, {"tensor": 4}], ids=str)
def test_each_process_of_a_slice_reads_one_share_of_the_rows(monkeypatch, topology, sizes):
    built = {}
    monkeypatch.setattr("jax.sharding.Mesh", lambda grid, names, axis_types: built.update(grid=grid))
    devices = described_tpus(monkeypatch, topology)
    assert len({d.process_index for d in devices}) > 1
    MeshSettings(**sizes).build(devices)
    assert rows_divide(built["grid"])


@pytest.mark.tpu
def test_weights_are_copied_between_tpu_slices_and_neighbors_stay_neighbors(monkeypatch):
    sizes, devices = grid(MeshSettings(), slices(monkeypatch, 2, "v5e:4x4"), monkeypatch)
    assert sizes == {"data": 2, "fsdp": 16}
    assert [{d.slice_index for d in part} for part in devices] == [{0}, {1}]
    settings = MeshSettings(fsdp=4, tensor=4, between=BetweenSettings(fsdp=2))
    sizes, devices = grid(settings, slices(monkeypatch, 2, "v5e:4x4"), monkeypatch)
    assert sizes == {"fsdp": 8, "tensor": 4}
    for row in devices:
        assert len({d.slice_index for d in row}) == 1
        steps = [np.abs(np.subtract(a.coords, b.coords)).sum() for a, b in pairwise(row)]
        assert steps == [1, 1, 1]


@pytest.mark.parametrize(
    ("between", "devices", "problem"),
    [
        ({"data": 3}, processes(2, 4), "mesh.between data 3 x fsdp 1 x tensor 1 does not make 2 processes"),
        ({"data": 2}, processes(1, 4), "mesh.between data 2 x fsdp 1 x tensor 1 does not make 1 process"),
        ({"data": -1}, processes(2, 4)[:-1], "processes have different numbers of devices: 4, 3"),
    ],
)
def test_groups_that_do_not_fit_are_refused(between, devices, problem):
    with pytest.raises(BadInput, match=problem):
        MeshSettings(between=BetweenSettings(**between)).build(devices)


def test_a_group_that_its_axes_do_not_make_is_refused():
    with pytest.raises(BadInput, match="mesh data 1 x fsdp 3 x tensor 1 does not make 4 devices of each process"):
        MeshSettings(fsdp=3, between=BetweenSettings(data=2)).build(processes(2, 4))


def test_own_rules_come_first_and_replace_those_of_their_axis():
    mesh = MeshSettings(fsdp=4, tensor=2, rules=["embed:tensor", "vocab:none"])
    rules, sizes = mesh.table(), mesh.build().shape
    assert rules.weight(("vocab", "embed"), (64, 64), sizes) == P(None, "tensor")
    assert rules.weight(("embed", "ffn"), (64, 64), sizes) == P("tensor", "fsdp")
    assert rules.weight(("layers", "heads", "head"), (4, 8, 16), sizes) == P(None, "tensor", None)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [("vocb:fsdp", "no axis of weights is called `vocb`"), ("vocab:data2", "no axis `data2`"), ("vocab", "no axis ``"),
     ("layers:fsdp", "mesh.stage alone splits `layers`")],
)  # fmt: skip
def test_a_rule_that_is_none_is_a_wrong_setting(rule, problem):
    with pytest.raises(SettingsError, match=problem) as caught:
        compose(Run, "tiny", [f"mesh.rules=[{rule}]"])
    assert caught.value.problems[0].what.startswith("`mesh.rules`: ")
    assert caught.value.problems[0].where == "set by command line"


def test_a_mesh_by_name_is_a_layer_of_settings(tmp_path: Path):
    mine = tmp_path / "mine.yml"
    mine.write_text("fsdp: 2\ntensor: -1\n")
    for words, expected in [
        (["mesh=tensor"], {"fsdp": 1, "tensor": -1}),
        (["mesh=hsdp", "mesh.fsdp=2"], {"fsdp": 2}),
        (["mesh.tensor=4", "mesh=pipeline"], {"fsdp": 1, "stage": -1, "tensor": 4}),
        ([f"mesh={mine}"], {"fsdp": 2, "tensor": -1}),
    ]:
        mesh_settings = compose(Run, "tiny", words).value.mesh
        assert mesh_settings.model_dump(exclude_defaults=True, exclude={"between"}) == expected
    assert compose(Run, "tiny", ["mesh=hsdp"]).value.mesh.between.data == -1
    (tmp_path / "recipe.yml").write_text("extends: tiny\nmesh:\n  tensor: 2\n")
    assert compose(Run, tmp_path / "recipe.yml", ["mesh=fsdp"]).value.mesh.tensor == 1
    with pytest.raises(UnknownName, match="hspd"):
        compose(Run, "tiny", ["mesh=hspd"])


@pytest.mark.parametrize("name", mesh_presets(CONFIGS))
def test_every_mesh_by_name_is_one(name: str):
    assert compose(Run, "tiny", [f"mesh={name}"]).value.mesh.build().size == 8


def test_weights_that_no_rule_splits_are_said():
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))

    def weight(shape, *spec):
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P(*spec)))

    split = {"a": weight((64, 64), "fsdp"), "norm": weight((16,), None)}
    assert mesh_header(mesh, split) == {"mesh": "fsdp 4 x tensor 2"}
    weights = split | {"odd": weight((63, 7), None, None)}
    whole = mesh_header(mesh, weights)["whole"]
    assert whole == "1.79 KiB of weights (10%) on every device, as no rule splits them: odd [63, 7], norm [16]"
    copies = Mesh(np.asarray(jax.devices()).reshape(8), ("data",))
    assert "whole" not in mesh_header(copies, weights)


def test_slices_that_are_left_over_hold_copies_and_processes_do_not():
    settings = BetweenSettings(fsdp=2)
    assert {name: size for name, size in settings.resolve(8, slices=True).items() if size > 1} == {"data": 4, "fsdp": 2}
    with pytest.raises(BadInput):
        settings.resolve(8, slices=False)
