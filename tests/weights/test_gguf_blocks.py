"""Weights that stay in a GGUF file's blocks are those that are read as floats, bit for bit."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_blocks import gguf_in_blocks

from argosy.checkpoint.open import open_model
from argosy.core.formats.gguf import GGUF
from argosy.core.keymap import KeyMap, KeyRow
from argosy.infer.cpu import panels
from argosy.infer.cpu.panels import block_forms
from argosy.models.base.language import LanguageConfig
from argosy.models.deepseek import DeepSeekConfig
from argosy.models.llama import LlamaConfig
from argosy.models.parts.stack import Unroll
from argosy.models.phi import PhiConfig
from argosy.models.qwen import QwenConfig
from argosy.models.settings import Experts
from argosy.weights.gguf.blocks import BlockedWeights
from argosy.weights.hub.reader import MappedTensors

SIZES: dict[str, Any] = {"vocab": 97, "width": 64, "layers": 2, "ffn": 96, "heads": 4, "head_size": 16, "context": 64}
ATTENTION = {f"attn.{name}.w" for name in "qkvo"}
MLP = {"mlp.gate.w", "mlp.up.w", "mlp.down.w"}
MODELS: dict[str, tuple[LanguageConfig, set[str]]] = {
    "llama": (LlamaConfig(**SIZES, kv_heads=2), {"embed.w", "head.w", *ATTENTION, *MLP}),
    "llama-tied": (LlamaConfig(**SIZES, kv_heads=2, tied=True), {"embed.w", *ATTENTION, *MLP}),
    "phi3": (PhiConfig(**SIZES, kv_heads=2), {"embed.w", "head.w", *ATTENTION, *MLP}),
    "qwen3moe": (
        QwenConfig(**SIZES, kv_heads=2, qk_norm=True, moe=Experts(count=3, active=2, ffn=32)),
        {"embed.w", "head.w", "mlp.router.w", *ATTENTION, *MLP},
    ),
}


@pytest.fixture(autouse=True)
def keep_small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "SMALLEST", 0)


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_blocks_are_those_that_are_read(name: str, tmp_path: Path):
    """Rotary rows in llama.cpp's order, rows of fused tensors, and experts, whose tensors have three axes."""
    config, expected = MODELS[name]
    stored = open_model(gguf_in_blocks(tmp_path / "model.gguf", config, ("Q8_0", "Q4_1", "Q5_0", "Q4_0", "Q5_1")))
    assert stored.blocks is not None
    addresses = set()
    for address, form in block_forms(config.build(Unroll())).items():
        if (rows := stored.blocks.of(address, *form)) is None:
            continue
        addresses.add(".".join(address.split(".")[2:]) if address.startswith("layers") else address)
        weight, floats = rows.packed(), stored.weights.read(address)
        assert weight.nbytes == rows.nbytes
        np.testing.assert_array_equal(np.asarray(weight.dense()), floats, err_msg=address)
    assert addresses == expected


def test_files_of_every_model_open(tmp_path: Path):
    """What is not a matrix of a product, or is summed along another axis than its blocks, is read as floats."""
    moe = Experts(count=4, active=2, ffn=32, shared=32, score="sigmoid", bias=True)
    config = DeepSeekConfig(**SIZES, rope_size=16, latent_rank=32, value_size=16, dense=1, moe=moe)
    stored = open_model(gguf_in_blocks(tmp_path / "model.gguf", config, ("Q8_0",)))
    assert stored.blocks is not None
    forms = block_forms(config.build(Unroll()))
    addresses = {address for address, form in forms.items() if stored.blocks.of(address, *form) is not None}
    assert "layers.0.attn.o.w" in addresses
    assert "layers.0.mlp.down.w" in addresses
    assert not {address for address in addresses if "k_up" in address or "v_up" in address}


# ---------------------------------------------------------------- rows of a table


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUF:
    """A [12 64], b [4 64], plain [12 64]; c [4 12 64]."""
    path, rng = tmp_path_factory.mktemp("blocks") / "x.gguf", np.random.default_rng(0)
    writer, kind = gguf.GGUFWriter(path, "none"), gguf.GGMLQuantizationType.Q4_0
    for name, shape in {"a": (12, 64), "b": (4, 64), "c": (4, 12, 64)}.items():
        writer.add_tensor(name, gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind), raw_dtype=kind)
    writer.add_tensor("plain", rng.normal(size=(12, 64)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUF.open(path)


@pytest.mark.parametrize(
    ("theirs", "ours", "pattern", "form", "is_rows"),
    [
        ("a", "w", "M D -> M D", (1, False), True),
        ("a", "w", "M D -> D M", (1, True), True),
        ("a", "w", "(N P two) D -> D N (two P)", (1, True), True),
        ("a", "w", "M (X Y) -> X Y M", (2, True), True),
        pytest.param("a", ("u", "w"), "(N|J) D -> D N, D J", (1, True), True, id="part"),
        pytest.param("a", "w", "M D -> M D", (1, True), False, id="summed over rows"),
        pytest.param("a", "w", "M (X Y) -> Y X M", (2, True), False, id="columns in another order"),
        pytest.param("a", ("u", "w"), "M (X|Z) -> M X, M Z", (1, False), False, id="part of the columns"),
        pytest.param(("a", "b"), "w", "M D, F D -> D (M|F)", (1, True), False, id="two tensors"),
        pytest.param("plain", "w", "M D -> M D", (1, False), False, id="floats"),
        pytest.param("c", "w", "F M D -> F M D", (1, False), False, id="three axes"),
    ],
)
def test_what_is_whole_rows_of_a_tensor(file: GGUF, theirs: Any, ours: Any, pattern: str, form: tuple[int, bool], is_rows: bool):
    sizes = {"M": 12, "D": 64, "N": 2, "P": 3, "two": 2, "X": 4, "Y": 16, "J": 10, "Z": 60, "F": 4}
    mapped = MappedTensors(KeyMap([KeyRow(theirs, ours, pattern)], sizes, ignore=("*",)), file, "x")
    rows = BlockedWeights(file, mapped).of("w", *form)
    assert (rows is not None) == is_rows
    if rows is not None:
        np.testing.assert_array_equal(np.asarray(rows.packed().dense()), mapped.read("w"))
