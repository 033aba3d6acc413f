"""`argosy generate MODEL PROMPT image=FILE` as a process, and its mistakes."""

import io
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
from argosy.core.errors import BadInput
from argosy.core.formats.image_files import animation_file
from argosy.jobs.images import GenerateImages, generate_images

GOLDENS = Path(__file__).parents[2] / "goldens" / "images"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_pipeline(GOLDENS / "pipeline-flux", tmp_path_factory.mktemp("images") / "flux")


@pytest.fixture(scope="module")
def wan(tmp_path_factory) -> Path:
    return write_pipeline(GOLDENS / "pipeline-wan", tmp_path_factory.mktemp("videos") / "wan")


def run(*words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-P", "-m", "argosy", "generate", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_images_are_written_as_the_pipeline_draws_them(folder: Path, tmp_path: Path):
    words = ["steps=2", "guidance=2.5", "seed=3", "size=24x16", "n=2"]
    done = run(str(folder), "a red fox", f"image={tmp_path}/out.png", *words, "--json")
    assert done.returncode == 0, done.stderr
    files = [Path(entry["file"]) for entry in json.loads(done.stdout)]
    assert [file.name for file in files] == ["out-0.png", "out-1.png"]
    images = argosy.load(folder).images("a red fox", steps=2, guidance=2.5, seed=3, size=(16, 24), n=2)
    for file, image in zip(files, images, strict=True):
        apart = png_pixels(file.read_bytes()).astype(int) - image
        assert np.abs(apart).max() <= 1  # rounding of another process
    assert "evaluation 2 of 2" in done.stderr


@pytest.mark.parametrize("ending", [".webp", ".gif", ".png"])
def test_an_animated_file_has_all_frames_and_their_rate(ending: str):
    """Pillow stores equal frames once. GIF has 256 colors, and WebP is compressed with losses."""
    image_module = pytest.importorskip("PIL.Image")
    frames = np.zeros((5, 16, 24, 3), np.uint8)
    frames[1:3], frames[3, :, :12], frames[4] = 255, (200, 30, 30), 90
    with image_module.open(io.BytesIO(animation_file(frames, ending[1:], 12.5))) as opened:
        assert opened.size == (24, 16)
        frames_shown: list[np.ndarray] = []
        for i in range(opened.n_frames):
            opened.seek(i)
            frame = np.array(opened.convert("RGB")).astype(int)
            frames_shown += [frame] * round(opened.info["duration"] / 80)
    assert len(frames_shown) == 5
    assert all(np.abs(a - b).mean() < 6 for a, b in zip(frames_shown, frames, strict=True))


def test_videos_are_written_as_the_pipeline_draws_them(wan: Path, tmp_path: Path):
    """As a folder of frames, in another process, and as an animated file."""
    pytest.importorskip("PIL.Image")
    fields: dict = {"steps": 2, "size": "16x32", "frames": 5, "n": 2}
    entries = generate_images(str(wan), "a red fox", GenerateImages(image=f"{tmp_path}/clip.webp", **fields))
    assert [Path(entry["file"]).name for entry in entries] == ["clip-0.webp", "clip-1.webp"]
    assert entries[1] | {"file": ""} == {"file": "", "seed": 0, "number": 1, "height": 32, "width": 16, "frames": 5}
    done = run(str(wan), "a red fox", f"image={tmp_path}/frames/", *(f"{name}={value}" for name, value in fields.items()))
    assert done.returncode == 0, done.stderr
    videos = argosy.load(wan).images("a red fox", steps=2, size=(32, 16), frames=5, n=2)
    for video, name in zip(videos, ("frames-0", "frames-1"), strict=True):
        files = sorted((tmp_path / name).iterdir())
        assert [file.name for file in files] == [f"{i:04}.png" for i in range(5)]
        for file, frame in zip(files, video, strict=True):
            assert np.abs(png_pixels(file.read_bytes()).astype(int) - frame).max() <= 1


def test_mistakes_with_videos_are_named(folder: Path, wan: Path, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "0000.png").touch()
    for model, words, problem in (
        (wan, {"image": f"{tmp_path}/out.mp4", "frames": 5}, "files of videos end in .webp, .gif, .png"),
        (wan, {"image": f"{tmp_path}/out.gif"}, "gif: files end in"),
        (wan, {"image": f"{tmp_path}/full", "frames": 5}, "is there already"),
        (wan, {"image": f"{tmp_path}/out.png", "fps": 8}, "only animated files have a rate"),
        (wan, {"image": f"{tmp_path}/out.png", "frames": 5, "source": "a.png"}, "begins from noise"),
        (wan, {"image": f"{tmp_path}/out.png", "frames": 6}, "frames = 6: .* multiple of 4"),
        (folder, {"image": f"{tmp_path}/out.png", "frames": 5}, "draws images alone"),
    ):
        with pytest.raises(BadInput, match=problem):
            generate_images(str(model), "a fox", GenerateImages(**words))


def test_without_pillow_animated_files_are_refused_and_folders_of_frames_are_not(wan: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BadInput, match="needs the package `pillow`"):
        generate_images(str(wan), "a fox", GenerateImages(image=f"{tmp_path}/out.webp", frames=5))
    # Another mistake, which is found later.
    for words in ({"image": f"{tmp_path}/frames/", "frames": 6}, {"image": f"{tmp_path}/out.png", "size": "20x20"}):
        with pytest.raises(BadInput, match="multiple"):
            generate_images(str(wan), "a fox", GenerateImages(**words))


def test_mistakes_are_named_before_anything_is_loaded(folder: Path, tmp_path: Path):
    for words, problem in (
        ([f"image={tmp_path}/out.bmp"], "files end in"),
        ([f"image={tmp_path}/none/out.png"], "there is no folder"),
        ([f"image={tmp_path}/out.png", "size=large"], "size=768x512"),
        ([f"image={tmp_path}/out.png", "stepz=3"], "did you mean `steps`"),
        ([f"image={tmp_path}/out.png", "size=20"], "multiples of 8"),
        ([], "image=out.png"),
    ):
        done = run(str(folder), "a fox", *words)
        assert done.returncode == 2, done.stderr
        assert problem in done.stderr
    text = run(str(stories_model()), "a fox", f"image={tmp_path}/out.png")
    assert text.returncode == 2
    assert "draws no images" in text.stderr
