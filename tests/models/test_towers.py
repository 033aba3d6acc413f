"""Folders that hold a vision tower beside the text model: the text model is read, the rest left out and said so."""

import json

import numpy as np
import pytest
from golden_weights import write_model
from helpers import LOGIT_ROUNDING, relative
from models.test_parity import GOLDENS
from safetensors.numpy import load_file, save_file

import argosy
from argosy.checkpoint.open import open_model
from argosy.jobs.convert import convert

TOWERS = {
    "gemma3": ["vision_tower.vision_model.embeddings.patch_embedding.bias", "multi_modal_projector.mm_soft_emb_norm.weight"],
    "llama4": ["vision_model.class_embedding", "multi_modal_projector.linear_1.weight"],
}


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("llama4", marks=pytest.mark.slow)])
def test_a_folder_with_a_vision_tower(kind, tmp_path):
    plain = write_model(GOLDENS / f"{kind}-plain", tmp_path / "plain")
    golden = dict(np.load(GOLDENS / f"{kind}-plain" / "golden.npz"))
    folder = tmp_path / "multimodal"
    folder.mkdir()
    tensors = {f"language_model.{name}": array for name, array in load_file(plain / "model.safetensors").items()}
    save_file(tensors | {name: np.ones((5, 3), np.float32) for name in TOWERS[kind]}, folder / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text, "vision_config": {}}))
    messages = []
    open_model(folder, messages.append)
    assert "2 tensors are ignored" in messages[0]
    assert relative(argosy.load(folder).logits(golden["tokens"]), golden["logits"]) < LOGIT_ROUNDING
    convert(str(folder), tmp_path / "text", "hub", None)
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["model_type"] == f"{kind}_text"
    assert "text_config" not in config
    assert relative(argosy.load(tmp_path / "text").logits(golden["tokens"]), golden["logits"]) < LOGIT_ROUNDING
