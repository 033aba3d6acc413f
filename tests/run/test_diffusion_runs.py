"""Runs of a denoiser: they learn, resume bit for bit, and name mistakes before the first step."""

import base64
import struct
import zlib

import jax
import numpy as np
import pytest
from helpers import Heard

import argosy
from argosy.core.errors import UserError
from argosy.core.formats.png import image_grid
from argosy.core.storage import Store
from argosy.jobs.history.report import report
from argosy.models.parts.weight import split
from argosy.observe.metrics import read

SMALL = ["model.width=32", "model.layers=2", "model.heads=2", "model.waves=16", "data.batch=16", "eval.batches=2", "mesh.data=1"]


@pytest.fixture(scope="module")
def stripes(tmp_path_factory):
    """Images of 8 x 8 with stripes along one of three directions."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 240)
    rows, columns = np.mgrid[0:8, 0:8]
    along = np.stack([rows, columns, rows + columns])
    images = (along[labels] + draw.integers(0, 4, 240)[:, None, None]) % 4 < 2
    path = tmp_path_factory.mktemp("stripes") / "stripes.npz"
    np.savez(path, images=(images * 255).astype(np.uint8), labels=labels)
    return path


def words(stripes, folder, *more):
    return ["diffusion", *SMALL, "model.classes=3", f"data.source={stripes}", f"dir={folder}", "log.every=10", *more]


def last_of(folder):
    return [line for line in read(Store(folder)) if "eval_loss" in line][-1]


def weights_of(folder):
    return {name: np.asarray(a) for name, a in split(argosy.load(folder).denoiser)[1].items()}


def test_a_denoiser_learns_and_resumes_bit_for_bit(stripes, tmp_path):
    settings = ["schedule=constant", "schedule.warmup=5", "checkpoint.every=20", "eval.every=20"]
    for steps in (20, 40):
        argosy.fit(*words(stripes, tmp_path / "halves", *settings), view=Heard(), steps=steps)
    argosy.fit(*words(stripes, tmp_path / "whole", *settings), view=Heard(), steps=40)
    halves, two = weights_of(tmp_path / "halves"), weights_of(tmp_path / "whole")
    for name, a in halves.items():
        np.testing.assert_array_equal(a, two[name], err_msg=name)
    evals = [line["eval_loss"] for line in read(Store(tmp_path / "whole")) if "eval_loss" in line]
    assert evals == [line["eval_loss"] for line in read(Store(tmp_path / "halves")) if "eval_loss" in line]
    # A new model predicts 0: an error of 2, the variance of noise and image.
    assert evals[1] < evals[0] < 2
    assert evals[1] < 1.7
    assert {f"eval_error_q{q}" for q in range(1, 5)} <= set(last_of(tmp_path / "whole"))


def decode_png(data: bytes) -> np.ndarray:
    """The image of a PNG file without filters, read by its specification."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, color = struct.unpack(">IIBB", data[16:26])
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        body = data[at + 4 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(body),)
        chunks[body[:4]] = body[4:]
        at += 12 + size
    channels = {0: 1, 2: 3, 6: 4}[color]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert depth == 8
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


def test_grids_are_drawn_of_weights_and_their_average_and_stand_in_the_report(stripes, tmp_path):
    settings = ["schedule.warmup=0", "optimizer.learning_rate=0.02", "ema.decay=0.9"]
    settings += ["sample.every=2", "sample.images=5", "sample.steps=4", "sample.guidance=2"]
    argosy.fit(*words(stripes, tmp_path / "run", *settings), view=Heard(), steps=4)
    files = sorted((tmp_path / "run" / "samples").iterdir())
    assert [file.name for file in files] == ["00000002-raw.png", "00000002.png", "00000004-raw.png", "00000004.png"]
    grids = [decode_png(file.read_bytes()) for file in files]
    # Three columns, one a class; the third row has none in its last two places.
    assert {grid.shape for grid in grids} == {(17, 26, 3)}
    assert (grids[0][8] == 255).all()
    assert not np.array_equal(grids[2], grids[3])
    assert grids[3].std() > 20
    page = (report(tmp_path / "run")).read_text()
    for file in files:
        assert base64.b64encode(file.read_bytes()).decode() in page
    # The run's pipeline draws the same, from the average.
    pipeline = argosy.load(tmp_path / "run")
    images = pipeline.images([str(i % 3) for i in range(5)], seed=[0, 1, 2, 3, 4])
    assert pipeline.defaults.steps == 4
    assert np.abs(image_grid(images, 3).astype(int) - grids[3]).max() <= 1
    assert pipeline.defaults.guidance == 2
    assert np.abs(pipeline.images(["0"], guidance=100.0).astype(int) - images[:1]).max() > 1


@pytest.mark.parametrize("word, problem", [
    ("model.channels=3", "images have 1 channel, and the model reads 3"),
    ("model.patch=4 model.size=12 data.image.size=6", "images of 6 x 6 do not divide into the model's patches of 4"),
    ("model.classes=2", "the data has 3 classes, and the model knows 2"),
    ("objective.condition=none", "the model reads labels, and objective.condition = none gives none"),
    ("model.width=30", "multiple of"),
    ("objective=next_token", "the model reads images, and the objective trains models that read tokens"),
    ("data.batch=15 accumulate=2", "data.batch = 15 is not a multiple of accumulate = 2"),
    ("adapter=lora", "the weights under an adapter are random"),
])  # fmt: skip
def test_mistakes_are_named_before_the_first_step(stripes, tmp_path, word, problem):
    with pytest.raises(UserError, match=problem):
        argosy.fit(*words(stripes, tmp_path / "run", *word.split()), view=Heard(), steps=1)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_adapter_trains_on_a_denoiser(stripes, tmp_path):
    argosy.fit(*words(stripes, tmp_path / "base"), view=Heard(), steps=10)
    base = weights_of(tmp_path / "base")
    settings = [f"init.weights={tmp_path / 'base'}", "adapter=lora", "adapter.rank=2"]
    argosy.fit(*words(stripes, tmp_path / "lora", *settings), view=Heard(), steps=10)
    adapted = weights_of(tmp_path / "lora")
    for name, a in base.items():
        inside = f"{name[:-2]}.of{name[-2:]}"
        np.testing.assert_array_equal(adapted[inside if inside in adapted else name], a, err_msg=name)
    assert np.abs(adapted["layers.0.attn.q.b"]).max() > 0
    assert np.abs(adapted["layers.1.mlp.down.b"]).max() > 0
    header = next(line["header"] for line in read(Store(tmp_path / "lora")) if "header" in line)
    assert "lora, rank 2" in header["adapter"]


@pytest.mark.parametrize("mesh", [["mesh.data=8"], ["mesh.fsdp=4", "mesh.tensor=2"]], ids=" ".join)
def test_meshes_train_alike(stripes, tmp_path, mesh):
    assert len(jax.devices()) == 8
    losses = {}
    for name, settings in {"one": ["mesh.data=1"], "many": mesh}.items():
        argosy.fit(*words(stripes, tmp_path / name, *settings, "execution.run=scan", "log.every=1"), view=Heard(), steps=3)
        losses[name] = [line["loss"] for line in read(Store(tmp_path / name)) if "loss" in line]
    assert losses["many"] == pytest.approx(losses["one"], rel=1e-4)
