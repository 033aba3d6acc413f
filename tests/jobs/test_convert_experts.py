"""Experts pass one by one: memory near the source's largest tensor, where all experts of a layer are many times that."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from argosy.checkpoint.open import open_model
from argosy.core.formats import TensorEntry
from argosy.core.formats.safetensors import write_folder
from argosy.core.keymap import KeyMap
from argosy.jobs.convert import REST_BYTES, convert
from argosy.weights.hub.config import config_from
from argosy.weights.hub.reader import open_folder
from argosy.weights.stream import largest_tensor, streaming_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
WIDTH = 1024
KINDS = {"qwen3-moe": None, "fp8": "qwen3-moe", "gpt-oss-plain": None, "mxfp4": "gpt-oss-plain"}


def entry(name: str, shape: tuple[int, ...], dtype: type, most: int) -> TensorEntry:
    """Random positive numbers: codes up to `most`, of which none is infinite."""
    kind = np.dtype(dtype)

    def make() -> np.ndarray:
        rng = np.random.default_rng(list(name.encode()))
        return rng.integers(0, most, shape, f"u{kind.itemsize}").view(kind)

    return TensorEntry(name, shape, kind, make)


def stored_entries(name: str, shape: tuple[int, ...], kind: str) -> list[TensorEntry]:
    """A tensor as it is published: experts in blocks, all else in bfloat16."""
    if kind == "fp8" and ".experts." in name:
        tiles = tuple(-(-n // 128) for n in shape)
        values = entry(name, shape, ml_dtypes.float8_e4m3fn, 0x7F)
        return [values, entry(f"{name}_scale_inv", tiles, np.float32, 0x40000000)]
    if kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
        experts, summed, rows = shape
        scales = (experts, rows, summed // 32)
        return [entry(f"{name}_blocks", (*scales, 16), np.uint8, 256), entry(f"{name}_scales", scales, np.uint8, 120)]
    return [entry(name, shape, ml_dtypes.bfloat16, 0x4000)]


def write_source(folder: Path, kind: str, experts: int, width: int) -> Path:
    """One layer with so many experts of width x width."""
    config = json.loads((GOLDENS / (KINDS[kind] or kind) / "config.json").read_text())
    ffn = "intermediate_size" if config["model_type"] == "gpt_oss" else "moe_intermediate_size"
    config |= {"hidden_size": width, ffn: width, "num_local_experts": experts}
    config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"], "dtype": "bfloat16"}
    blocks = {"quant_method": kind, "weight_block_size": [128, 128]}
    table = KeyMap(*config_from(config, "").hub_rows())
    shapes = {name: shape for group in table._groups for name, shape in group.their_shapes(table.sizes).items()}
    write_folder(folder, [entry for name, shape in shapes.items() for entry in stored_entries(name, shape, kind)])
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": blocks} if KINDS[kind] else {})))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_one_by_one_they_are_what_they_are_at_once(kind, tmp_path):
    """`open_folder` reads whole tensors; conversions read parts, into either format and on from there."""
    whole = open_folder(write_source(tmp_path / "source", kind, experts=5, width=64)).weights
    convert(str(tmp_path / "source"), tmp_path / "ours", "argosy", None)
    for source in ("source", "ours"):
        convert(str(tmp_path / source), tmp_path / f"{source}-hub", "hub", None)
    for target in ("ours", "source-hub", "ours-hub"):
        weights = open_model(tmp_path / target).weights
        assert set(weights.names) == set(whole.names)
        for name in whole.names:
            a, b = weights.read(name), whole.read(name)
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), (target, name)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_what_becomes_float32_is_reported_unless_a_type_is_reported(kind, tmp_path):
    write_source(tmp_path / "source", kind, experts=3, width=64)
    for dtype in (None, "bfloat16"):
        messages: list[str] = []
        convert(str(tmp_path / "source"), tmp_path / str(dtype), "hub", dtype, say=messages.append)
        assert [line for line in messages if "3 tensors" in line and "float32; dtype=bfloat16" in line] == messages[
            : dtype is None
        ]


def test_the_largest_tensor_is_the_sources(tmp_path):
    source = streaming_model(open_model(write_source(tmp_path / "apart", "qwen3-moe", experts=9, width=128)))
    assert largest_tensor(source)[1] == 128 * 128 * 2
    source = streaming_model(open_model(write_source(tmp_path / "stacked", "mxfp4", experts=9, width=128)))
    assert largest_tensor(source) == ("model.layers.0.mlp.experts.gate_up_proj_blocks", 9 * 256 * 128 // 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "experts", "largest_bytes"),
    [
        ("qwen3-moe", 128, WIDTH * WIDTH * 2),  # an expert in bfloat16; a layer's stack has 268 MB
        ("fp8", 64, WIDTH * WIDTH * 4),  # an expert, read as float32; a stack has 268 MB
        ("gpt-oss-plain", 64, 64 * 2 * WIDTH * WIDTH * 2),  # gate and up of all experts, 268 MB
        ("mxfp4", 64, 64 * WIDTH * WIDTH),  # blocks of gate and up, 67 MB; in float32 they have 537 MB
    ],
)
def test_memory_stays_under_twice_the_sources_largest_tensor_and_500_mb(kind, experts, largest_bytes, tmp_path):
    write_source(tmp_path / "source", kind, experts, WIDTH)
    for a, *words in (
        ("source", "ours", "to=argosy"),
        ("source", "plain"),
        ("source", "half", "dtype=bfloat16"),
        ("ours", "back"),
        ("back", "--check", "ours"),
        ("source", "--check", "back"),
    ):
        words = [word if word.startswith("--") or "=" in word else str(tmp_path / word) for word in words]
        command = [sys.executable, "-m", "argosy", "convert", str(tmp_path / a), *words, "--json"]
        memory = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["memory"]
        if a == "source" and "--check" not in words:
            assert memory["bound_bytes"] == 2 * largest_bytes + REST_BYTES
        assert memory["peak_bytes"] < memory["bound_bytes"], (a, words)
