"""Small random models by transformers, with what they answer: `./run reference make [NAME ...]`.

Runs in an environment of its own, with torch; knows nothing of Argosy. Each golden is a Hub folder and golden.npz:

    tokens [2 41], logits [2 41 V] float32     one forward of whole sequences
    greedy [31]                                11 given tokens and the 20 that follow
    seed                                       that rebuilds the weights

Notable: every size is odd or divides by nothing convenient. Every parameter carries noise, biases and norms included,
since zeros and ones would let a forgotten one pass. Weights are large enough that attention is far from uniform. Every
greedy choice is clear of rounding: the second best is at least 5e-4 of the largest logit behind, 25 times the tolerance
of the tests.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
MARGIN, SHARP = 5e-4, 0.3
TOKENS, PROMPT, GREEDY = (2, 41), 11, 20
FILE_BYTES = 200_000

BASE = {
    "vocab_size": 97,
    "max_position_embeddings": 200,
    "hidden_size": 42,
    "intermediate_size": 58,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 3e-5,
}
GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
MULTI_QUERY = {"num_attention_heads": 3, "num_key_value_heads": 1}  # head_dim not given: 42 / 3
MULTI_HEAD = {"num_attention_heads": 3, "num_key_value_heads": 3}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5e3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50, "rope_theta": 1e4}
YARN_TOLD = YARN | {"factor": 5.0, "beta_fast": 9.0, "beta_slow": 0.7, "truncate": False, "attention_factor": 1.15}

# name -> (model type, generation of config.json, what differs from BASE)
MODELS = {
    "llama-grouped": ("llama", "new", GROUPED),
    "llama-multi-query-tied": ("llama", "old", MULTI_QUERY | {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "llama-multi-head-biased": ("llama", "new", MULTI_HEAD | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-attention-bias": ("llama", "old", GROUPED | {"rope_parameters": LINEAR, "attention_bias": True}),
    "llama-linear-multi-query": ("llama", "new", MULTI_QUERY | {"rope_parameters": LINEAR}),
    "llama-llama3-mlp-bias-tied": (
        "llama",
        "new",
        MULTI_HEAD | {"rope_parameters": LLAMA3, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-llama3-old": ("llama", "old", GROUPED | {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", "new", GROUPED | {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "llama-yarn-told": ("llama", "old", MULTI_HEAD | {"rope_parameters": YARN_TOLD, "attention_bias": True}),
    "mistral-window": ("mistral", "new", GROUPED | {"sliding_window": 7}),
    "mistral-window-tied": ("mistral", "old", MULTI_QUERY | {"sliding_window": 4, "tie_word_embeddings": True}),
    "mistral-whole": (
        "mistral",
        "new",
        MULTI_HEAD | {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
}


def config_of(name: str) -> transformers.PretrainedConfig:
    kind, _, differs = MODELS[name]
    config = transformers.CONFIG_MAPPING[kind](**BASE | differs)
    config._attn_implementation = "eager"
    return config


def build(name: str, seed: int) -> torch.nn.Module:
    """The model with weights that only the seed decides."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name)).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12.0 if parameter.ndim > 1 else 1.0)
            parameter.add_(torch.randn_like(parameter) * (0.3 * parameter.std() + 0.05))
    return model


@torch.no_grad()
def answers(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """What the model says to tokens drawn from the seed."""
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(3, BASE["vocab_size"], TOKENS))
    greedy = tokens[:1, :PROMPT]
    for _ in range(GREEDY):
        greedy = torch.cat([greedy, model(greedy).logits[:, -1].argmax(-1, keepdim=True)], 1)
    found = {"tokens": tokens, "logits": model(tokens).logits, "greedy": greedy[0]}
    return {key: value.numpy() for key, value in found.items()}


@torch.no_grad()
def margin(model: torch.nn.Module, greedy: np.ndarray) -> float:
    """How far the second best stayed behind at the closest greedy choice, as a share of the largest logit."""
    logits = model(torch.from_numpy(greedy)[None]).logits[0, PROMPT - 1 : -1]
    best = logits.topk(2).values
    return float(((best[:, 0] - best[:, 1]) / logits.abs().amax(-1)).min())


@torch.no_grad()
def sharpness(model: torch.nn.Module, tokens: np.ndarray) -> float:
    """The largest attention weight of a query, over the second half of the sequence, on average; uniform is 0.03."""
    weights = model(torch.from_numpy(tokens), output_attentions=True).attentions
    return float(torch.stack(weights)[..., TOKENS[1] // 2 :, :].amax(-1).mean())


def make(name: str) -> None:
    """Writes one golden from the first seed whose greedy text is clear of rounding."""
    for seed in range(200):
        model = build(name, seed)
        found = answers(model, seed)
        clear, sharp = margin(model, found["greedy"]), sharpness(model, found["tokens"])
        if clear > MARGIN and sharp > SHARP and len(set(found["greedy"][PROMPT:].tolist())) > GREEDY // 2:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a greedy text that is clear of rounding")
    folder = GOLDENS / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_config(folder / "config.json", MODELS[name][1])
    np.savez(folder / "golden.npz", **found, seed=np.int64(seed))
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size < FILE_BYTES + found["logits"].nbytes + 5_000, f"{name} has {size} bytes"
    print(f"{name:30s} seed {seed:3d}, closest choice {clear:.1e}, sharpness {sharp:.2f}, {size:,} bytes")


def write_config(path: Path, generation: str) -> None:
    """config.json as transformers writes it now, or as it did before version 5."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if generation == "old":
        rope = config.pop("rope_parameters")
        config |= {"torch_dtype": config.pop("dtype"), "rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
        kind = rope.pop("rope_type")
        if kind != "default":
            config["rope_scaling"] = {"type" if kind == "linear" else "rope_type": kind} | rope
    if "head_dim" not in MODELS[path.parent.name][2]:
        config.pop("head_dim", None)
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in sys.argv[1:] or MODELS:
        make(name)
