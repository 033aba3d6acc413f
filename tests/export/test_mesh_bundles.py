"""Bundles whose programs run on several devices together, each with its share of the weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_files import rewrite_manifest, run_alone
from helpers import LOGIT_ROUNDING, relative, stories_model
from laws.families import CASES, noisy_model, tokens_of

from argosy.cli import main
from argosy.core.errors import BadInput, Damaged, Unsupported, UserError
from argosy.core.settings import read_settings, words_layer
from argosy.export.bundle import Bundle
from argosy.export.manifest import MANIFEST
from argosy.export.mesh import ExportMesh, device_mesh
from argosy.export.model import export_model
from argosy.export.refresh import refresh_bundle
from argosy.export.verify import verify_bundle
from argosy.infer.lm import LM
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import logical
from argosy.ops.programs.store import open_store

CASE = "llama-window"
SPLIT = {"tensor": 2, "fsdp": 2}


def model_of(case: str, run: Any = None) -> LM:
    return LM(CASES[case], noisy_model(CASES[case], run or Unroll()))


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """A bundle for four devices, and one of the same model for one."""
    folder, lm = tmp_path_factory.mktemp("mesh"), model_of(CASE)
    export_model(lm, folder / "four", platforms=["cpu"], mesh=SPLIT)
    export_model(lm, folder / "one", platforms=["cpu"])
    return folder / "four", folder / "one"


def rows() -> dict[str, np.ndarray]:
    tokens, mask = np.asarray(tokens_of(CASES[CASE], 3, 13)), np.ones((3, 13), np.int32)
    mask[1, 9:] = 0
    return {"tokens": tokens, "mask": mask}


def test_four_devices_compute_what_one_does(pair, tmp_path):
    """In a process that may import no model."""
    four, single = run_alone([{"bundle": path, "inputs": rows()} for path in pair], tmp_path)
    for row, length in enumerate((13, 9, 13)):
        assert relative(four["logits"][row, :length], single["logits"][row, :length]) < LOGIT_ROUNDING


def test_each_device_has_its_share_of_the_weights(pair):
    bundle = Bundle.open(pair[0])
    bundle.run(rows())
    total = sum(a.nbytes for a in bundle._arrays.values())
    for device in bundle.mesh.devices.flat:
        share = sum(s.data.nbytes for a in bundle._arrays.values() for s in a.addressable_shards if s.device == device)
        # Norms and keys are split over two of them alone.
        assert share < 0.3 * total
    # As training and serving split them.
    axes = logical(model_of(CASE).module)
    splits = {pair for name, split in bundle.manifest.splits().items() for pair in zip(axes[name], split) if pair[1]}
    expected = {(axis, "tensor") for axis in ("heads", "ffn")} | {("embed", "fsdp")}
    # Two key heads and an odd vocabulary may or may not divide.
    assert expected <= splits <= expected | {("kv_heads", "tensor"), ("vocab", "tensor"), ("vocab", "fsdp")}


def test_programs_of_several_devices_are_compiled_ahead_and_kept(pair, tmp_path):
    sizes = {"logits": [{"batch": 2, "length": 16}]}
    for _ in range(2):
        bundle, store = Bundle.open(pair[0]), open_store(tmp_path / "programs", sources=False)
        assert bundle.compile(sizes, store) == 1
        outputs = bundle.run({"tokens": np.ones((2, 16), np.int32)})["logits"]
        assert len(list((tmp_path / "programs").iterdir())) == 1
        np.testing.assert_array_equal(outputs, Bundle.open(pair[0]).run({"tokens": np.ones((2, 16), np.int32)})["logits"])


def test_a_renewed_bundle_stays_split(pair, tmp_path):
    refresh_bundle(pair[0], tmp_path / "new")
    old, new = Bundle.open(pair[0]), Bundle.open(tmp_path / "new")
    assert (new.manifest.mesh, new.manifest.splits()) == (SPLIT, old.manifest.splits())
    np.testing.assert_array_equal(new.run(rows())["logits"], old.run(rows())["logits"])


def test_a_bundle_for_one_device_has_the_text_that_it_had(pair):
    four, single = (json.loads((path / MANIFEST).read_text()) for path in pair)
    assert "mesh" in four
    assert "mesh" not in single
    assert not any("split" in layout for file in single["weights"] for layout in file["tensors"].values())


def test_devices_that_are_not_there_are_refused(pair, tmp_path):
    """Tests have eight."""
    with pytest.raises(Unsupported, match=r"its programs are for 16 devices \(fsdp 2 x tensor 8\), and this process has 8"):
        device_mesh({"tensor": 8, "fsdp": 2}, tmp_path)
    folder = Path(shutil.copytree(pair[0], tmp_path / "wrong"))
    # Programs for four devices under the manifest of eight.
    rewrite_manifest(folder, lambda content: content["mesh"].update(data=2))
    with pytest.raises(Damaged, match="does not have the shapes and types of its signature"):
        Bundle.open(folder).run(rows())


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda content: content["mesh"].update(tensor=3), "cannot be split as"),
        (lambda content: content.pop("mesh"), "cannot be split as"),
        (lambda content: content["mesh"].update(rows=2), "its mesh is"),
        (lambda content: content["mesh"].update(tensor=-1), "its mesh is"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(pair, tmp_path, edit, why):
    folder = Path(shutil.copytree(pair[0], tmp_path / "b"))
    rewrite_manifest(folder, edit)
    with pytest.raises(Damaged, match=why):
        verify_bundle(folder)


def test_a_mesh_that_splits_nothing_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"mesh.tensor = 37 divides no weight"):
        export_model(model_of(CASE), tmp_path / "b", mesh={"tensor": 37})
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("sizes", [{}, {"batch": 2}, {"length": 16}])
def test_experts_on_several_devices_need_listed_sizes(tmp_path, sizes):
    """XLA's compiler crashes where it fills in open ones."""
    with pytest.raises(BadInput, match="left open, in a model with experts"):
        export_model(model_of("mixtral-plain"), tmp_path / "b", mesh={"tensor": 2}, **sizes)


def test_other_axes_are_answered():
    assert read_settings(ExportMesh, words_layer(["tensor=2"])).value.sizes() == {"tensor": 2}
    for word, hint in (("stage=2", "bundles split no layers"), ("data=2", "several servers hold copies"), ("tp=2", "`tensor`")):
        with pytest.raises(UserError, match=hint):
            read_settings(ExportMesh, words_layer([word]))


def test_the_command_line_exports_for_devices_that_are_absent(tmp_path, capsys):
    """Sixteen, of which tests have eight."""
    assert main(["export", str(stories_model()), str(tmp_path / "b"), "platforms=tpu,cpu", "mesh.tensor=2", "mesh.fsdp=8"]) == 0
    assert "logits for 16 devices; 1 program" in capsys.readouterr().out
    assert main(["bundle", "show", str(tmp_path / "b")]) == 0
    assert "run on 16 devices together: fsdp 8 x tensor 2" in capsys.readouterr().out
    assert main(["bundle", "run", str(tmp_path / "b")]) == 1
    assert "for 16 devices (fsdp 8 x tensor 2), and this process has 8" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=["unroll", "scan"])
@pytest.mark.parametrize("case", ["mixtral-plain", "gpt_oss-plain", "deepseek-2", "gemma-3", "bert-plain", "qwen3_next-plain"])
def test_other_families_compute_on_four_devices_what_they_do_on_one(case, run, tmp_path):
    lm, outputs = model_of(case, run), []
    tokens = np.asarray(tokens_of(CASES[case], 4, 16))
    for name, mesh in (("four", SPLIT), ("one", None)):
        export_model(lm, tmp_path / name, platforms=["cpu"], mesh=mesh, batch=4, length=16)
        outputs.append(next(iter(Bundle.open(tmp_path / name).run({"tokens": tokens}).values())))
    assert relative(*outputs) < 4 * LOGIT_ROUNDING
