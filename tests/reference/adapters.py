"""Adapters of the PEFT library on the small reference models, with what they answer: `./run reference adapters`.

Each golden is the folder that PEFT wrote, and golden.npz: tokens and logits of the model with the adapter.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from make import GOLDENS, load

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden_weights import write_model

ADAPTERS = GOLDENS.parent / "adapters"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# golden: what LoraConfig is told
CASES = {
    "llama-grouped": {"r": 3, "lora_alpha": 5, "target_modules": LINEAR},
    "qwen3-plain": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"],
    },
    "phi3-window": {"r": 2, "lora_alpha": 4, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},
    "gemma2-plain": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"v_proj": 5},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 7},
    },
    "llama-multi-head-biased": {"r": 3, "lora_alpha": 5, "use_dora": True, "target_modules": LINEAR},
    "phi3-long": {"r": 2, "lora_alpha": 4, "use_dora": True, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]},
    "gpt2-untied": {"r": 2, "lora_alpha": 4, "use_dora": True, "target_modules": ["c_attn", "c_fc", "c_proj"]},
    # Modules that are trained in full: an embedding with the head that is tied to it, and apart.
    "qwen2-tied": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["embed_tokens", "input_layernorm"],
        "ensure_weight_tying": True,
    },
    "mistral-window": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["embed_tokens", "lm_head", "o_proj", "norm"],
    },
}


@torch.no_grad()
def make(name: str) -> None:
    """Writes one golden: PEFT's own draws for A, noise for B, which starts at zero."""
    torch.manual_seed(7)
    with tempfile.TemporaryDirectory() as scratch:
        model = load(write_model(GOLDENS / name, Path(scratch) / "model"))
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **CASES[name])).eval()
    for key, value in model.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            noise = torch.randn_like(value)
            value.copy_(noise * 0.3 if "lora_" in key and "magnitude" not in key else value * (1 + 0.3 * noise))
    folder = ADAPTERS / name
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = name  # not where it lay
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tokens = torch.from_numpy(np.load(GOLDENS / name / "golden.npz")["tokens"])
    np.savez_compressed(
        folder / "golden.npz", tokens=tokens.numpy(), logits=model(tokens, use_cache=False).logits.numpy()
    )
    print(name, sum(f.stat().st_size for f in folder.iterdir()), flush=True)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or CASES:
        make(name)
