"""Gemma 3 as it is published; folders with its vision tower are in test_towers.py."""

from argosy.run.settings.recipe_files import preset_config
from argosy.weights.hub.config import config_from

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
    assert config_from(PUBLISHED, "").resolved() == preset_config("gemma3-4b").resolved().model_copy(update={"preset": None})
