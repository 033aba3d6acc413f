"""Whatever a model lies in, it opens the same way; what is none says so."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from golden_weights import write_model

from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput, Damaged
from argosy.jobs.convert import convert
from argosy.models.parts.stack import Scan, Unroll
from argosy.weights.fill import check_fit

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(GOLDENS / "llama-grouped", tmp_path_factory.mktemp("stored") / "hub")


@pytest.fixture(scope="module")
def step(hub: Path) -> Path:
    folder = hub.parent / "model"
    convert(str(hub), folder, "argosy", None)
    return folder


def test_a_step_holds_what_the_folder_held(hub: Path, step: Path):
    theirs, ours = open_model(hub), open_model(step)
    assert (theirs.kind, ours.kind) == ("hub", "argosy")
    assert set(ours.weights.names) == set(theirs.weights.names)
    for name in ours.weights.names:
        assert ours.weights.shape(name) == theirs.weights.shape(name)
        assert ours.weights.dtype(name) == theirs.weights.dtype(name)
        assert np.array_equal(ours.weights.read(name), theirs.weights.read(name)), name


def test_one_flipped_bit_of_a_step_is_found_before_it_is_read(step: Path, tmp_path: Path):
    copy = Path(shutil.copytree(step, tmp_path / "copy"))
    array = max((f for f in copy.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(array.read_bytes())
    data[len(data) // 2] ^= 1
    array.write_bytes(data)
    with pytest.raises(Damaged, match="SHA-256"):
        open_model(copy)


def test_a_path_without_a_model_is_refused_with_what_one_is(tmp_path: Path):
    with pytest.raises(BadInput, match="no model at"):
        open_model(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="is not a model"):
        open_model(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(BadInput, match="no checkpoint yet"):
        open_model(tmp_path)


@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=["unroll", "scan"])
def test_every_weight_that_does_not_fit_is_listed(hub: Path, run):
    stored = open_model(hub)
    wider = stored.config.model_copy(update={"ffn": stored.config.ffn + 1, "tied": True})
    with pytest.raises(BadInput) as caught:
        check_fit(wider.build(run), stored.weights)
    assert "7 weights do not fit" in caught.value.what  # three projections in each of two layers, and the head
    for part in ("unexpected head.w", "layers.1.mlp.down.w is (58, 42), not (59, 42)"):
        assert part in caught.value.what


def test_a_step_without_its_settings_is_damaged(step: Path, tmp_path: Path):
    from argosy.weights import manifest

    copy = Path(shutil.copytree(step, tmp_path / "copy"))
    meta = json.loads((copy / "meta.json").read_text())
    del meta["model"]
    (copy / "meta.json").write_text(json.dumps(meta))
    manifest.write_manifest(copy)
    with pytest.raises(Damaged, match="'model'"):
        open_model(copy)
