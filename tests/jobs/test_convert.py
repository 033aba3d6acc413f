"""Conversions: killed and gone on with, in little memory, refused with everything that is wrong."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from golden_weights import write_model
from helpers import shared
from safetensors.numpy import load_file, save_file

from argosy.cli import main
from argosy.cli.verbs.convert import ConversionProgress
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.data.tokenizers.load import find_tokenizer
from argosy.jobs.convert import REST_BYTES, convert
from argosy.jobs.history.compare import compare
from argosy.weights import manifest
from argosy.weights.staging import JOURNAL

GOLDEN = Path(__file__).parents[1] / "goldens" / "models" / "llama-grouped"
SHARD = 3e-5  # GB: the model has 100 KB


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(GOLDEN, tmp_path / "source")


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(
        (x.dtype, x.shape, x.tobytes()) == (b[n].dtype, b[n].shape, b[n].tobytes()) for n, x in a.items()
    )


# ---- what is written


def test_there_and_back_is_byte_for_byte(source, tmp_path):
    convert(str(source), tmp_path / "ours", "argosy", None)
    report = convert(str(tmp_path / "ours"), tmp_path / "back", "hub", None)
    assert same(tensors_of(tmp_path / "back"), tensors_of(source))
    assert report["tensors"] == len(tensors_of(source))
    assert report["bytes"] == sum(path.stat().st_size for path in (tmp_path / "back").iterdir())
    assert not (tmp_path / "ours.part").exists()
    assert not (tmp_path / "ours" / JOURNAL).exists()


def test_the_manifest_is_what_hashing_every_file_gives(source, tmp_path):
    convert(str(source), tmp_path / "ours", "argosy", None)
    manifest_bytes = (tmp_path / "ours" / manifest.NAME).read_bytes()
    manifest.write_manifest(tmp_path / "ours")
    assert manifest.read_manifest(tmp_path / "ours") == json.loads(manifest_bytes)["files"]


@pytest.mark.parametrize("to", ["hub", "argosy"])
def test_a_chosen_type(source, tmp_path, to):
    convert(str(source), tmp_path / "half", to, "bfloat16")
    convert(str(tmp_path / "half"), tmp_path / "back", "hub", None)
    for name, x in tensors_of(source).items():
        tensor = tensors_of(tmp_path / "back")[name]
        assert tensor.dtype == ml_dtypes.bfloat16
        assert tensor.tobytes() == x.astype(ml_dtypes.bfloat16).tobytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_shards_are_as_large_as_asked_for(source, tmp_path):
    convert(str(source), tmp_path / "sharded", "hub", None, shard_gb=SHARD)
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert len(shards) > 3
    assert same(tensors_of(tmp_path / "sharded"), tensors_of(source))
    for shard in shards:
        tensors = load_file(shard)
        assert {index["weight_map"][name] for name in tensors} == {shard.name}
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= SHARD * 1e9


# ---- killed


KILL = """
import os, signal, sys, time
import argosy.weights.staging as staging
from argosy.cli import main
real, left = staging.StagedFolder._whole, [{files}]
def whole(self, file, output):
    real(self, file, output)
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.{signal})
        time.sleep(60)
staging.StagedFolder._whole = whole
sys.exit(main())
"""


def run_interrupted(
    source: Path, target: Path, *words: str, files: int, by: str = "SIGKILL"
) -> subprocess.CompletedProcess:
    program = KILL.format(files=files, signal=by)
    command = [sys.executable, "-c", program, "convert", str(source), str(target), *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["to=hub", f"shard_gb={SHARD}"], id="hub"),
        pytest.param(["to=argosy"], id="argosy", marks=pytest.mark.slow),
    ],
)
def test_killed_between_files_the_same_command_resumes(source, tmp_path, capsys, words):
    target = tmp_path / "target"
    assert run_interrupted(source, target, *words, files=3).returncode == -signal.SIGKILL
    assert not target.exists()
    whole = {path: path.stat().st_mtime_ns for path in (tmp_path / "target.part").rglob("*") if path.is_file()}
    assert len(whole) >= 4
    kept_files = [json.loads(line)["file"] for line in (tmp_path / "target.part" / JOURNAL).read_text().splitlines()[1:]]
    before = {name: (tmp_path / "target.part" / name).stat().st_mtime_ns for name in kept_files}
    assert main(["convert", str(source), str(target), *words]) == 0
    output = capsys.readouterr()
    assert "resuming: " in output.err
    assert "kept from before" in output.out
    assert {name: (target / name).stat().st_mtime_ns for name in kept_files} == before, "not written again"
    convert(str(target), tmp_path / "back", "hub", None)
    assert same(tensors_of(tmp_path / "back"), tensors_of(source))
    assert main(["convert", str(source), "--check", str(target)]) == 0


@pytest.mark.slow
def test_after_ctrl_c_it_says_how_to_resume(source, tmp_path):
    done = run_interrupted(source, tmp_path / "target", "to=argosy", files=3, by="SIGINT")
    assert done.returncode == 130
    assert "the same command resumes" in done.stderr
    assert "Traceback" not in done.stderr
    assert convert(str(source), tmp_path / "target", "argosy", None)["kept_bytes"] > 0


def test_other_words_or_another_source_are_not_resumed(source, tmp_path):
    words = [f"shard_gb={SHARD}"]
    run_interrupted(source, tmp_path / "target", *words, files=2)
    with pytest.raises(BadInput, match="an unfinished folder of another conversion") as caught:
        convert(str(source), tmp_path / "target", "hub", "float16")
    assert caught.value.where == f"dtype was kept, is float16; shard_gb was {SHARD}, is 5.0"
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(BadInput) as caught:
        convert(str(source), tmp_path / "target", "hub", None, shard_gb=SHARD)
    assert (caught.value.where or "").startswith("source was hub ")
    assert (tmp_path / "target.part").is_dir()
    assert not (tmp_path / "target").exists()


def test_nothing_is_overwritten(source, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("x")
    with pytest.raises(BadInput, match="not empty"):
        convert(str(source), tmp_path / "target", "hub", None)
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["mine"]


# ---- what is refused, before anything is written


def drop(tensors):
    del tensors["model.norm.weight"]


def add(tensors):
    tensors["spare.weight"] = np.zeros(3, np.float32)


def misshape(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((5, 4), np.float32)


def all_three(tensors):
    drop(tensors), add(tensors), misshape(tensors)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (drop, ["1 missing", "`model.norm.weight` is missing"]),
        (add, ["1 unexpected", "`spare.weight` has no place"]),
        (misshape, ["1 misshapen", "`model.layers.1.mlp.up_proj.weight` is [5, 4], expected [58, 42]"]),
        (all_three, ["1 missing, 1 unexpected, 1 misshapen", "norm.weight", "spare", "up_proj"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_tensors_that_do_not_fit(source, tmp_path, change, parts):
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    check_refused(source, tmp_path, BadInput, parts)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "lama"}, ["`lama` is not built", "did you mean `llama`?", "docs/new-family.md"]),
        ({"vocab_size": 98}, ["`vocab_size` is 98", "97 rows", '"vocab_size": 97']),
        ({"intermediate_size": 59}, ["6 misshapen", "expected [59, 42]"]),
        ({"num_hidden_layers": 3}, ["9 missing", "`model.layers.2."]),
        ({"num_hidden_layers": 1}, ["9 unexpected", "`model.layers.1."]),
        ({"tie_word_embeddings": True}, ["ties `lm_head.weight`", "differ"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_config_that_contradicts_its_tensors(source, tmp_path, changes, parts):
    config = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps(config))
    check_refused(source, tmp_path, BadInput, parts)


def test_shards_and_their_index(source, tmp_path):
    folder = tmp_path / "sharded"
    convert(str(source), folder, "hub", None, shard_gb=SHARD)
    first, second, third, *_ = sorted(folder.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    twice = load_file(third) | {"model.norm.weight": np.ones(42, np.float32)}
    save_file(twice, third)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost"] = third.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    parts = ["4 problems", "cut short", f"no file `{second}`", "`model.norm.weight` is in", "`ghost` is not in"]
    check_refused(folder, tmp_path, Damaged, parts)


def check_refused(source: Path, folder: Path, kind: type[ArgosyError], parts: list[str]) -> None:
    for to in ("hub", "argosy"):
        with pytest.raises(kind) as caught:
            convert(str(source), folder / "target", to, None)
        assert len(str(caught.value).splitlines()) <= 5
        for part in parts:
            assert part in str(caught.value)
        assert not list(folder.glob("target*")), "nothing is written"


def test_from_gguf_both_ways(tmp_path):
    """Its tokenizer goes along, and the manifest counts it."""
    gguf = shared("gguf/stories260K-q8_0.gguf")
    for to in ("hub", "argosy"):
        convert(str(gguf), tmp_path / to, to, None)
        assert compare(str(gguf), str(tmp_path / to))["equal"]
        assert find_tokenizer(tmp_path / to) is not None
    small = {path.name for path in (tmp_path / "argosy").iterdir() if path.is_file()} - {manifest.NAME}
    assert small <= manifest.read_manifest(tmp_path / "argosy").keys()


# ---- memory, words


def test_memory_is_reported_with_its_bound(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "target"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["memory"]
    largest = max(x.nbytes for x in tensors_of(source).values())
    assert (report["largest_bytes"], report["bound_bytes"]) == (largest, 2 * largest + REST_BYTES)
    assert report["peak_bytes"] > 50e6


@pytest.mark.slow
def test_memory_stays_under_twice_the_largest_tensor_and_500_mb(tmp_path):
    """540 MB in float32, the largest tensor 65 MB: all of it at once would take 750 MB."""
    config = json.loads((GOLDEN / "config.json").read_text())
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "vocab_size": 16000,
        "head_dim": 64,
        "num_attention_heads": 16,
    }
    config |= sizes | {"num_key_value_heads": 16, "num_hidden_layers": 6, "tie_word_embeddings": False}
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    square, tall, words = (1024, 1024), (4096, 1024), (16000, 1024)
    shapes = {"model.embed_tokens.weight": words, "lm_head.weight": words, "model.norm.weight": (1024,)}
    for i in range(6):
        shapes |= {f"model.layers.{i}.self_attn.{n}_proj.weight": square for n in "qkvo"}
        shapes |= {f"model.layers.{i}.mlp.{n}_proj.weight": tall for n in ("gate", "up")}
        shapes |= {f"model.layers.{i}.mlp.down_proj.weight": (1024, 4096)}
        shapes |= {f"model.layers.{i}.{n}_layernorm.weight": (1024,) for n in ("input", "post_attention")}
    save_file(
        {n: np.full(s, i, np.float32) for i, (n, s) in enumerate(shapes.items())},
        tmp_path / "source" / "model.safetensors",
    )
    for a, b, *words in (
        ("source", "ours", "to=argosy"),
        ("ours", "back"),
        ("source", "half", "dtype=bfloat16"),
        ("back", "--check", "source"),
    ):
        where = [b] if b.startswith("--") else [str(tmp_path / b)]
        words = [str(tmp_path / w) if w == "source" else w for w in words]
        command = [sys.executable, "-m", "argosy", "convert", str(tmp_path / a), *where, *words, "--json"]
        report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["memory"]
        assert report["bound_bytes"] == 2 * 16000 * 1024 * 4 + REST_BYTES
        assert report["peak_bytes"] < report["bound_bytes"], a


def test_progress_says_how_far_it_is_where_no_line_can_be_replaced(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("argosy.cli.verbs.convert.time.monotonic", lambda: now[0])
    with ConversionProgress("written") as progress:
        progress(0, 8_000_000_000, 2_000_000_000)
        for _ in range(8):
            progress(500_000_000, 8_000_000_000, 2_000_000_000)
            now[0] += 1.0
    assert capsys.readouterr().err.splitlines() == [
        "resuming: 2.00 GB of 8.00 GB are already written and intact",
        "5.00 GB of 8.00 GB written, 62%, 600 MB/s, 5.0 s left",
    ]


def test_progress_replaces_its_line_at_a_terminal(monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    now = [0.0]
    monkeypatch.setattr("argosy.cli.verbs.convert.time.monotonic", lambda: now[0])
    stream = Terminal()
    with ConversionProgress("written", stream) as progress:
        for _ in range(4):
            progress(1_000_000_000, 4_000_000_000, 0)
            now[0] += 1.0
    assert stream.getvalue().count("\r") >= 3
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith(" \r"), "the line is gone afterwards"


def test_words_that_make_no_sense(source, capsys):
    assert main(["convert", str(source)]) == 2
    assert "no target" in capsys.readouterr().err
    assert main(["convert", str(source), str(source), "--check", str(source)]) == 2
    assert "and --check" in capsys.readouterr().err
    assert main(["convert", str(source), "x.gguf", "to=argosy"]) == 2
    assert "x.gguf and to=argosy" in capsys.readouterr().err
    assert main(["convert", str(source), "x", "to=gguf"]) == 2
    assert "name a file that ends in .gguf" in capsys.readouterr().err
    assert main(["convert", str(source), "x", "shard_gb=0"]) == 2
    assert main(["convert", str(source), "--check", str(source), "tolerence=1"]) == 2
    assert "`tolerance`" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".onnx", ".pth"])
def test_a_file_of_another_format_is_not_a_folder(source: Path, tmp_path: Path, ending: str):
    with pytest.raises(BadInput, match=f"{ending} files are not written"):
        convert(str(source), tmp_path / f"model{ending}", "hub", None)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
