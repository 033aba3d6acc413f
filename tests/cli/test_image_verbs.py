"""The verbs of models that draw images: a run of a denoiser and diffusers folders, drawn, served and exported."""

import base64
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from golden_weights import write_model, write_pipeline
from helpers import Heard

import argosy
from argosy.cli import main
from argosy.core.errors import BadInput, UserError
from argosy.core.formats.image_files import read_image
from argosy.jobs.export import export_bundle
from argosy.jobs.image_models import draws_images, parsed_size
from argosy.jobs.images import GenerateImages, generate_images

FLUX = Path(__file__).parents[1] / "goldens" / "images" / "pipeline-flux"
SMALL = ["model.width=32", "model.layers=1", "model.heads=2", "model.waves=16", "data.batch=16", "eval.batches=2", "mesh.data=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of two steps on gray images of three classes."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    np.savez(folder / "noise.npz", images=rng.integers(0, 256, (60, 8, 8), np.uint8), labels=rng.integers(0, 3, 60))
    words = ["diffusion", *SMALL, "model.classes=3", f"data.source={folder / 'noise.npz'}", f"dir={folder / 'run'}"]
    argosy.fit(*words, view=Heard(), steps=2)
    return str(folder / "run")


def test_the_kind_of_a_model_is_known_from_its_files(run: str, tmp_path: Path):
    assert draws_images(run)
    assert draws_images(next(iter(sorted((Path(run) / "checkpoints").iterdir()))))
    assert not draws_images(tmp_path)
    assert not draws_images("llama3.2-1b")
    (tmp_path / "model_index.json").write_text("{}")
    assert draws_images(tmp_path)


@pytest.mark.parametrize("verb", ["serve", "chat", "export"])
def test_verbs_without_a_use_for_clip_say_so(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_model(FLUX.parent / "clip", tmp_path / "clip")
    assert main([verb, str(folder), *([str(tmp_path / "bundle")] if verb == "export" else [])]) == 2
    assert f"argosy {verb} of CLIP with both towers is not built" in capsys.readouterr().err


def generate(run: str, **words: Any) -> list[dict[str, Any]]:
    return generate_images(run, "1", GenerateImages(**words))


def test_generate_writes_what_the_pipeline_draws(run: str, tmp_path: Path):
    entries = generate(run, image=f"{tmp_path}/out.png", n=2, seed=5, size="12x8", steps=3, guidance=2.0)
    assert [entry["file"] for entry in entries] == [f"{tmp_path}/out-0.png", f"{tmp_path}/out-1.png"]
    assert (entries[0]["width"], entries[0]["height"], entries[0]["seed"]) == (12, 8, 5)
    expected = argosy.load(run).images("1", n=2, seed=5, size=(8, 12), steps=3, guidance=2.0)
    for entry, image in zip(entries, expected, strict=True):
        np.testing.assert_array_equal(read_image(Path(entry["file"]).read_bytes()), image)


def test_generate_tells_what_step_caching_reused(tmp_path: Path):
    folder = write_pipeline(FLUX, tmp_path / "flux")
    options: Any = {"image": f"{tmp_path}/out.png", "steps": 8, "size": "32x48", "n": 2}
    entries = generate(str(folder), **options, step_cache=0.9, compare=True)
    assert all(entry["step_cache"]["evaluations"] == 8 and 0 < entry["step_cache"]["reused"] < 8 for entry in entries)
    assert len({entry["step_cache"]["error"] for entry in entries}) == 2
    assert "step_cache" not in generate(str(folder), **options)[0]
    with pytest.raises(BadInput, match="compare without step_cache"):
        generate(str(folder), **options, compare=True)


def test_generate_begins_from_an_image(run: str, tmp_path: Path):
    generate(run, image=f"{tmp_path}/one.png")
    generate(run, image=f"{tmp_path}/two.png", source=f"{tmp_path}/one.png", strength=0.05, guidance=1.0)
    first, two = (read_image((tmp_path / f"{name}.png").read_bytes()).astype(int) for name in ("one", "two"))
    assert np.abs(first - two).mean() < 40


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"image": "out.gif"}, "files end in"),
        ({"image": "nowhere/out.png"}, "no folder nowhere"),
        ({"image": "out.png", "size": "large"}, "size=large"),
        ({"image": "out.png", "size": 9}, "multiples of 2"),
        ({"image": "out.png", "source": "none.png"}, "no such file"),
    ],
)
def test_mistakes_are_named_before_anything_is_drawn(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], says: str
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        generate(run, **words)
    assert says in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "size"), [("768x512", (512, 768)), (64, (64, 64)), ("64", (64, 64)), (None, None)])
def test_sizes_are_width_by_height(text: Any, size: Any):
    assert parsed_size(text) == size


def test_export_writes_a_bundle_that_draws(run: str, tmp_path: Path):
    from argosy.export.bundle import Bundle

    facts = export_bundle(run, str(tmp_path / "bundle"), signatures=None, platforms=["cpu"], batch=[1], length=None, steps=3)
    assert facts["default"] == "denoise"
    assert facts["lineage"]["run"]["dir"] == "run"
    inputs = {"labels": np.array([2], np.int32), "seed": np.array([4], np.uint32)}
    images = np.asarray(Bundle.open(tmp_path / "bundle").run(inputs)["images"]).astype(int)
    assert np.abs(images - argosy.load(run).images("2", seed=4, steps=3)).max() <= 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"signatures": ["logits"]}, "this model draws images"),
        ({"signatures": None, "length": [4]}, "length is for models of text"),
        ({"signatures": None, "quantization": "w8"}, "quantization: not built"),
    ],
)
def test_an_export_of_another_kind_is_refused(run: str, tmp_path: Path, options: dict, says: str):
    with pytest.raises(BadInput, match=says):
        export_bundle(run, str(tmp_path / "bundle"), **{"platforms": ["cpu"], "batch": None, "length": None} | options)
    assert not (tmp_path / "bundle").exists()


def argosy_process(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-P", "-m", "argosy", *words], capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert done.returncode == code, (done.stdout[-1000:], done.stderr[-3000:])
    return done


@pytest.mark.slow
def test_generate_as_a_process(run: str, tmp_path: Path):
    done = argosy_process("generate", run, "1", f"image={tmp_path}/a.png", "steps=2")
    assert done.stdout == f"{tmp_path}/a.png\n"
    argosy_process("generate", run, "fox", f"image={tmp_path}/b.png", code=2)
    assert not (tmp_path / "b.png").exists()
    assert "image=out.png" in argosy_process("generate", run, "1", code=2).stderr


@pytest.mark.slow
def test_serve_as_a_process(run: str):
    words = [sys.executable, "-P", "-m", "argosy", "serve", run, "port=0", "batch=2"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        address = None
        while address is None:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line, "the server ended"
            match = re.search(r"ready on (http://\S+)", line)
            address = match and match[1]
        body = {"prompt": "2", "seed": 1, "size": "8x8"}
        document = httpx.post(f"{address}/v1/images/generations", json=body, timeout=60).json()
        image = read_image(base64.b64decode(document["data"][0]["b64_json"]))
        assert np.abs(image.astype(int) - argosy.load(run).images("2", seed=1)[0]).max() <= 1
    finally:
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 143, rest
