"""`--check` against differences made by hand, and distances against their definition."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from golden_weights import write_model, write_pipeline
from helpers import shared
from safetensors.numpy import load_file, save_file

from argosy.cli import main
from argosy.jobs.convert import convert
from argosy.jobs.history.compare import compare, distances

GOLDEN = Path(__file__).parents[1] / "goldens" / "models" / "llama-grouped"
UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(GOLDEN, tmp_path_factory.mktemp("compare") / "source")


def copy_changed(source: Path, folder: Path, change) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_every_kind_of_folder_compares_with_every_other(source, tmp_path):
    convert(str(source), tmp_path / "ours", "argosy", None)
    convert(str(source), tmp_path / "shards", "hub", None, shard_gb=3e-5)
    for a in (source, tmp_path / "ours", tmp_path / "shards"):
        for b in (source, tmp_path / "ours", tmp_path / "shards"):
            report = compare(str(a), str(b))
            assert report["equal"], report
            assert report["tensors"] == len(load_file(source / "model.safetensors"))


def test_a_gguf_compares_with_the_folder_it_was_made_from():
    folder = str(shared("models/stories260k"))
    report = compare(folder, str(shared("gguf/stories260K-f32.gguf")))
    assert (report["differences"], report["only_in_a"], report["only_in_b"]) == ([], [], [])
    packed = compare(folder, str(shared("gguf/stories260K-q8_0.gguf")), 0.0)["differences"]
    assert packed
    assert max(difference["relative"] for difference in packed) < 1 / 127, (
        "half of one of 127 steps, and the scale's own rounding"
    )


def test_one_bit_is_found_and_named(source, tmp_path, capsys):
    def flip(tensors):
        tensors[UP].view(np.uint8).reshape(-1)[777] ^= 1

    other = copy_changed(source, tmp_path / "other", flip)
    assert main(["convert", str(source), "--check", str(other)]) == 1
    output = capsys.readouterr()
    assert "layers.1.mlp.up.w: " in output.out
    assert "differences: 1" in output.out
    assert main(["convert", str(source), "--check", str(other), "tolerance=1e-3"]) == 0
    assert main(["convert", str(source), "--check", str(other), "tolerance=0", "--json"]) == 1
    report = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    (difference,) = report["differences"]
    a, b = (load_file(f / "model.safetensors")[UP].astype(np.float64) for f in (source, other))
    assert difference["max_abs"] == np.abs(a - b).max() > 0
    assert difference["relative"] == np.abs(a - b).max() / np.abs(b).max()


def test_types_differ_unless_a_tolerance_is_reported(source, tmp_path):
    convert(str(source), tmp_path / "half", "argosy", "bfloat16")
    report = compare(str(source), str(tmp_path / "half"))
    assert {difference["what"] for difference in report["differences"]} == {"dtype"}
    assert len(report["differences"]) == report["tensors"]
    assert {(difference["a"], difference["b"]) for difference in report["differences"]} == {("float32", "bfloat16")}
    assert compare(str(source), str(tmp_path / "half"), 2**-8)["equal"], "half a unit of the last of eight bits"
    assert not compare(str(source), str(tmp_path / "half"), 2**-12)["equal"]


def test_shapes_names_and_settings(source, tmp_path):
    def narrow(tensors):
        for name in list(tensors):
            if "mlp.up" in name or "mlp.gate" in name:
                tensors[name] = np.ascontiguousarray(tensors[name][:-1])
            if "mlp.down" in name:
                tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])
        del tensors["lm_head.weight"]

    other = copy_changed(source, tmp_path / "other", narrow)
    config = json.loads((other / "config.json").read_text()) | {"intermediate_size": 57, "tie_word_embeddings": True}
    (other / "config.json").write_text(json.dumps(config))
    report = compare(str(source), str(other))
    assert not report["equal"]
    assert (report["only_in_a"], report["only_in_b"]) == (["head.w"], [])
    assert compare(str(other), str(source))["only_in_b"] == ["head.w"]
    shapes = {
        difference["name"]: (difference["a"], difference["b"]) for difference in report["differences"] if difference["what"] == "shape"
    }
    assert shapes["layers.0.mlp.up.w"] == ([42, 58], [42, 57])
    assert len(shapes) == 6
    assert {"name": "ffn", "a": 58, "b": 57} in report["settings"]


def test_nan_equals_itself_and_nothing_else(source, tmp_path):
    def spoil(tensors):
        tensors[NORM][3] = np.nan

    other = copy_changed(source, tmp_path / "other", spoil)
    assert compare(str(other), str(other))["equal"]
    for a, b in ((source, other), (other, source)):
        for tolerance in (None, 1e6):
            (difference,) = compare(str(a), str(b), tolerance)["differences"]
            assert difference["name"] == "norm.scale"
            assert np.isnan(difference["max_abs"])


@pytest.mark.parametrize("slab", [1, 7, 1 << 20])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_distances_are_those_of_their_definition(monkeypatch, dtype, slab):
    monkeypatch.setattr("argosy.jobs.history.compare.SLAB_VALUES", slab)
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(5, 3, 4)).astype(dtype).transpose(2, 0, 1) for _ in range(2))
    x, y = a.astype(np.float64), b.astype(np.float64)
    figures = distances(a, b)
    assert figures["max_abs"] == np.abs(x - y).max()
    assert figures["largest"] == np.abs(y).max()
    assert np.isclose(figures["cosine"], (x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), rtol=1e-12)


def test_distances_of_zeros():
    zero, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert distances(zero, zero) == {"max_abs": 0.0, "relative": 0.0, "cosine": 1.0, "largest": 0.0}
    assert distances(ones, zero) == {"max_abs": 1.0, "relative": np.inf, "cosine": 0.0, "largest": 0.0}


def test_pipelines_are_compared_part_by_part(tmp_path, capsys):
    golden = GOLDEN.parents[1] / "images" / "pipeline-sd"
    a, b = (write_pipeline(golden, tmp_path / name) for name in "ab")
    report = compare(str(a), str(b))
    assert report["equal"]
    assert report["tensors"] == sum(len(load_file(path)) for path in a.glob("*/*.safetensors"))
    file = next((b / "text_encoder").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("final_layer_norm.bias"))
    tensors[name][0] += 1
    save_file(tensors, file)
    scheduler = b / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"beta_end": 0.5}))
    assert main(["convert", str(a), "--check", str(b), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [difference["name"].partition("/")[0] for difference in report["differences"]] == ["text_encoder"]
    assert [difference["name"] for difference in report["settings"]] == ["scheduler/beta_end"]
    shutil.rmtree(b / "vae")
    assert compare(str(a), str(b))["only_in_a"] == ["vae/"]


def test_pipelines_differ_in_what_they_make_of_prompts(tmp_path):
    """Entries of model_index.json, and vocabularies, lengths and padding of tokenizers; not versions, and not what draws nothing."""
    golden = GOLDEN.parents[1] / "images" / "pipeline-sdxl"
    a, b = (write_pipeline(golden, tmp_path / name) for name in "ab")

    def change(path: str, values: dict[str, object]) -> None:
        (b / path).write_text(json.dumps(json.loads((b / path).read_text()) | values))

    checker: dict[str, object] = {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
    change("model_index.json", {"_diffusers_version": "0.1", "_name_or_path": "elsewhere", "requires_safety_checker": True, **checker})
    index = json.loads((b / "model_index.json").read_text())
    # True is the default of the pipeline.
    assert index.pop("force_zeros_for_empty_prompt") is True
    (b / "model_index.json").write_text(json.dumps(index))
    (b / "safety_checker").mkdir()
    (b / "safety_checker" / "config.json").write_text('{"model_type": "clip"}')
    assert compare(str(a), str(b))["equal"]
    change("model_index.json", {"force_zeros_for_empty_prompt": False})
    change("tokenizer_2/tokenizer_config.json", {"model_max_length": 5, "pad_token": "!"})
    model = json.loads((b / "tokenizer" / "tokenizer.json").read_text())["model"]
    first, second = list(model["vocab"])[:2]
    exchanged = {first: model["vocab"][second], second: model["vocab"][first]}
    change("tokenizer/tokenizer.json", {"model": model | {"vocab": model["vocab"] | exchanged}})
    result = compare(str(a), str(b))
    names = ["model_index.json/force_zeros_for_empty_prompt", "tokenizer/sha256"]
    names += ["tokenizer_2/pad_token", "tokenizer_2/model_max_length"]
    assert [setting["name"] for setting in result["settings"]] == names
    assert not result["equal"]
