"""Small random models by transformers, with what they answer: `./run reference make [NAME ...]`.

Runs in an environment of its own, with torch; knows nothing of Argosy. Each golden is a folder:

    config.json                                as transformers writes it, of this generation or the one before
    tensors.json                               names, shapes and how each tensor is drawn (golden_weights.py)
    golden.npz
        tokens [2 41], logits [2 41 V] float32     one forward of whole sequences
        greedy [31]                                11 given tokens and the 20 that follow

Notable: every parameter carries noise, biases and norms included, since zeros and ones would let a forgotten one pass.
Weights are large enough that attention is far from uniform. Every greedy choice is clear of rounding: the second best is
at least 5e-4 of the largest logit behind, 25 times the tolerance of the tests.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from variants import BASE, MODELS

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden_weights import digest, drawn, write_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
MARGIN, SHARP = 5e-4, 0.3
TOKENS, PROMPT, GREEDY = (2, 41), 11, 20
GAIN = 12.0  # on the deviation of matrices as transformers draws them


def config_of(name: str) -> transformers.PretrainedConfig:
    kind, _, differs = MODELS[name]
    said = {k: v for k, v in (BASE | differs).items() if not k.startswith("_") and (v is not None or "window" in k)}
    config = transformers.CONFIG_MAPPING[kind](**said | dict.fromkeys(differs.get("_none", ())))
    config._attn_implementation = "eager"
    return config


def tensors_of(name: str) -> tuple[dict[str, list], dict]:
    """{name on the Hub: [shape, mean, deviation]} and config.json, from what transformers writes of a new model."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name)).eval().float()
    gain = MODELS[name][2].get("_gain", GAIN)
    out: dict[str, list] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        with safe_open(Path(scratch) / "model.safetensors", "np") as file:
            for key in sorted(file.keys()):
                value = file.get_tensor(key).astype(np.float64)
                spread = float(value.std())
                if value.ndim > 1:
                    quiet = MODELS[name][2].get("_embed", 1.0) if "embed" in key else 1.0
                    out[key] = [list(value.shape), 0.0, round(quiet * gain * spread, 4) or 0.24]
                else:
                    sharper = 1.0 if "q_norm" in key or "k_norm" in key else 0.0  # else attention stays near uniform
                    sharper += MODELS[name][2].get("_means", {}).get(key.rpartition(".")[2], 0.0)
                    out[key] = [
                        list(value.shape),
                        round(float(value.mean()) + sharper, 4),
                        round(0.3 * spread + 0.1, 4),
                    ]
        return out, json.loads((Path(scratch) / "config.json").read_text(encoding="utf-8"))


def load(folder: Path) -> torch.nn.Module:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not told["missing_keys"] | told["unexpected_keys"], told
    return model.eval()


@torch.no_grad()
def answers(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """What the model says to tokens drawn from the seed."""
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(3, BASE["vocab_size"], TOKENS))
    greedy = tokens[:1, :PROMPT]
    for _ in range(GREEDY):
        greedy = torch.cat([greedy, model(greedy, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    found = {"tokens": tokens, "logits": model(tokens, use_cache=False).logits, "greedy": greedy[0]}
    return {key: value.numpy() for key, value in found.items()}


@torch.no_grad()
def margin(model: torch.nn.Module, greedy: np.ndarray) -> float:
    """How far the second best stayed behind at the closest greedy choice, as a share of the largest logit."""
    logits = model(torch.from_numpy(greedy)[None], use_cache=False).logits[0, PROMPT - 1 : -1]
    best = logits.topk(2).values
    return float(((best[:, 0] - best[:, 1]) / logits.abs().amax(-1)).min())


@torch.no_grad()
def sharpness(model: torch.nn.Module, tokens: np.ndarray) -> float:
    """The largest attention weight of a query, over the second half of the sequence, on average; uniform is 0.03."""
    weights = model(torch.from_numpy(tokens), output_attentions=True, use_cache=False).attentions
    return float(torch.stack([w for w in weights if w is not None])[..., TOKENS[1] // 2 :, :].amax(-1).mean())


def make(name: str) -> None:
    """Writes one golden from the first seed whose greedy text is clear of rounding."""
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = tensors_of(name)
    write_config(folder / "config.json", config, MODELS[name][1])
    for seed in range(200):
        said = {"seed": seed, "sha256": digest(drawn(tensors, seed)), "tensors": tensors}
        (folder / "tensors.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        with tempfile.TemporaryDirectory() as scratch:
            model = load(write_model(folder, Path(scratch) / "model"))
        found = answers(model, seed)
        clear, sharp = margin(model, found["greedy"]), sharpness(model, found["tokens"])
        if clear > MARGIN and sharp > SHARP and len(set(found["greedy"][PROMPT:].tolist())) > GREEDY // 3:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a greedy text that is clear of rounding")
    np.savez_compressed(folder / "golden.npz", **found)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name:30s} seed {seed:3d}, closest choice {clear:.1e}, sharpness {sharp:.2f}, {size:,} bytes", flush=True)


def write_config(path: Path, config: dict, generation: str) -> None:
    """config.json as transformers writes it now, or as it did before version 5."""
    rope = config.get("rope_parameters")
    if generation == "old":
        config |= {"torch_dtype": config.pop("dtype")}
    if generation == "old" and rope:
        config.pop("rope_parameters")
        if "full_attention" in rope:  # by type of layer
            rope, local = rope["full_attention"], rope["sliding_attention"]
            if MODELS[path.parent.name][0] == "gemma3_text":
                config["rope_local_base_freq"] = local["rope_theta"]
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type")
        if kind != "default":
            config["rope_scaling"] = {"type" if kind == "linear" else "rope_type": kind} | rope
        if "layer_types" not in MODELS[path.parent.name][2]:
            config.pop("layer_types", None)
    if "head_dim" not in MODELS[path.parent.name][2]:
        config.pop("head_dim", None)
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in sys.argv[1:] or MODELS:
        make(name)
