"""Gemma 3 folders with a vision tower: the text model is read, the rest left out and said so."""

import json

import numpy as np
from golden_weights import write_model
from helpers import relative
from models.test_parity import GOLDENS
from safetensors.numpy import load_file, save_file

import argosy
from argosy.checkpoint.stored import open_model
from argosy.jobs.convert import convert

PUBLISHED = {       # google/gemma-3-4b-it, as its config.json says
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}


def test_the_published_config_is_the_preset():
    from argosy.checkpoint.hub import config_from
    from argosy.jobs.public import preset_config

    assert config_from(PUBLISHED, "").resolved() == preset_config("gemma3-4b").resolved().model_copy(update={"preset": None})


def test_a_folder_with_a_vision_tower(tmp_path):
    plain = write_model(GOLDENS / "gemma3-plain", tmp_path / "plain")
    golden = np.load(GOLDENS / "gemma3-plain" / "golden.npz")
    folder = tmp_path / "multimodal"
    folder.mkdir()
    tensors = {f"language_model.{name}": array for name, array in load_file(plain / "model.safetensors").items()}
    tower = {"vision_tower.vision_model.embeddings.patch_embedding.bias": np.ones(7, np.float32)}
    save_file(tensors | tower | {"multi_modal_projector.mm_soft_emb_norm.weight": np.ones(5, np.float32)}, folder / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    told = []
    open_model(folder, told.append)
    assert "2 tensors are left out" in told[0]
    assert relative(argosy.load(folder).logits(golden["tokens"]), golden["logits"]) < 2e-5
    convert(str(folder), tmp_path / "text", "hub", None)
    written = json.loads((tmp_path / "text" / "config.json").read_text())
    assert written["model_type"] == "gemma3_text"
    assert "text_config" not in written
    assert relative(argosy.load(tmp_path / "text").logits(golden["tokens"]), golden["logits"]) < 2e-5
