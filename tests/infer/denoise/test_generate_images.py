"""`argosy generate MODEL PROMPT image=FILE` as a process, and its mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden_weights import write_pipeline
from helpers import stories_model
from models.test_autoencoders import png_pixels

import argosy

GOLDENS = Path(__file__).parents[2] / "goldens" / "images"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_pipeline(GOLDENS / "pipeline-flux", tmp_path_factory.mktemp("images") / "flux")


def run(*words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-P", "-m", "argosy", "generate", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_images_are_written_as_the_pipeline_draws_them(folder: Path, tmp_path: Path):
    how = ["steps=2", "guidance=2.5", "seed=3", "size=24x16", "n=2"]
    done = run(str(folder), "a red fox", f"image={tmp_path}/out.png", *how, "--json")
    assert done.returncode == 0, done.stderr
    files = [Path(one["file"]) for one in json.loads(done.stdout)]
    assert [file.name for file in files] == ["out-0.png", "out-1.png"]
    drawn = argosy.load(folder).images("a red fox", steps=2, guidance=2.5, seed=3, size=(16, 24), n=2)
    for file, image in zip(files, drawn, strict=True):
        apart = png_pixels(file.read_bytes()).astype(int) - image
        assert np.abs(apart).max() <= 1  # rounding of another process
    assert "step 2 of 2" in done.stderr


def test_mistakes_are_named_before_anything_is_loaded(folder: Path, tmp_path: Path):
    for words, named in (
        ([f"image={tmp_path}/out.bmp"], "files end in"),
        ([f"image={tmp_path}/none/out.png"], "there is no folder"),
        ([f"image={tmp_path}/out.png", "size=large"], "size=768x512"),
        ([f"image={tmp_path}/out.png", "stepz=3"], "did you mean `steps`"),
        ([f"image={tmp_path}/out.png", "size=20"], "multiples of 8"),
        ([], "image=out.png"),
    ):
        done = run(str(folder), "a fox", *words)
        assert done.returncode == 2, done.stderr
        assert named in done.stderr
    text = run(str(stories_model()), "a fox", f"image={tmp_path}/out.png")
    assert text.returncode == 2
    assert "draws no images" in text.stderr
