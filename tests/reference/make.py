"""Small random models by transformers, with what they answer: `./run reference make [NAME ...]`.

Runs in an environment of its own, with torch; knows nothing of Argosy. Each golden is a folder:

    config.json                                as transformers writes it, of this generation or the one before
    tensors.json                               names, shapes and how each tensor is drawn (golden_weights.py)
    golden.npz
        tokens [2 41], logits [2 41 V] float32     one forward of whole sequences
        greedy [31]                                11 given tokens and the 20 that follow
        ahead [2 40 V]                             of the token after the next one, where a model predicts it
        double [1 41 V] float64                    logits of the first row in float64, where layers recur: there float32's own
                                                   rounding grows with depth
    golden.npz of an encoder
        tokens, types, mask [2 41]                 one row whole, one padded; tokens of both types
        hidden [2 41 D], pooled [2 D]              the last layer's vectors; what the pooler makes of them, if there is one

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
from transformers import modeling_rope_utils
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from variants import BASE, EVERY, OUTSIDE

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden_weights import digest, draw_weights, write_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
MARGIN, SHARP = 5e-4, 0.3
TOKENS, PROMPT, GREEDY = (2, 41), 11, 20
ENCODERS, LIVE = ("bert", "roberta", "xlm-roberta"), 26
MTP_NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
GAIN = 12.0  # on the deviation of matrices as transformers draws them


def config_of(name: str) -> transformers.PretrainedConfig:
    kind, _, differs = EVERY[name]
    fields = {k: v for k, v in (BASE | differs).items() if not k.startswith("_") and (v is not None or "window" in k)}
    config = transformers.CONFIG_MAPPING[kind](**fields | dict.fromkeys(differs.get("_none", ())))
    config._attn_implementation = "eager"
    return config


def tensors_of(name: str) -> tuple[dict[str, list], dict]:
    """{name on the Hub: [shape, mean, deviation]} and config.json, from what transformers writes of a new model."""
    torch.manual_seed(0)
    config = config_of(name)
    pooled = {} if "_pooler" not in EVERY[name][2] else {"add_pooling_layer": EVERY[name][2]["_pooler"]}
    model = class_of(config.model_type).from_config(config, **pooled).eval().float()
    gain = EVERY[name][2].get("_gain", GAIN)
    out: dict[str, list] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        with safe_open(Path(scratch) / "model.safetensors", "np") as file:
            for key in sorted(file.keys()):
                value = file.get_tensor(key).astype(np.float64)
                spread = float(value.std())
                if value.ndim > 1:
                    quiet = EVERY[name][2].get("_embed", 1.0) if "embed" in key or "wte" in key else 1.0
                    out[key] = [list(value.shape), 0.0, round(quiet * gain * spread, 4) or 0.24]
                else:
                    sharper = 1.0 if "q_norm" in key or "k_norm" in key else 0.0  # else attention stays near uniform
                    sharper += EVERY[name][2].get("_means", {}).get(key.rpartition(".")[2], 0.0)
                    out[key] = [
                        list(value.shape),
                        round(float(value.mean()) + sharper, 4),
                        round(0.3 * spread + 0.1, 4),
                    ]
        if EVERY[name][2].get("_mtp"):
            out |= further_tensors(out, config_of(name))
        return out, json.loads((Path(scratch) / "config.json").read_text(encoding="utf-8"))


def class_of(kind: str) -> type:
    """Of a model type: with a head, or an encoder."""
    return transformers.AutoModel if kind in ENCODERS else transformers.AutoModelForCausalLM


def further_tensors(tensors: dict[str, list], config: transformers.PretrainedConfig) -> dict[str, list]:
    """Those of the module that predicts further ahead, as DeepSeek-V3 lays them out: one more layer, with copies of the
    embedding and the head."""
    last, new = (f"model.layers.{config.num_hidden_layers - n}." for n in (1, 0))
    out = {name.replace(last, new): spec for name, spec in tensors.items() if name.startswith(last)}
    width = config.hidden_size
    out |= {f"{new}{norm}.weight": [[width], 1.0, 0.1] for norm in ("enorm", "hnorm", "shared_head.norm")}
    out |= {f"{new}eh_proj.weight": [[width, 2 * width], 0.0, 0.24]}
    copies = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    return out | {f"{new}{name}.weight": [*tensors[of], of] for name, of in copies.items()}


def load(folder: Path) -> torch.nn.Module:
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    if kind in ENCODERS:
        with safe_open(folder / "model.safetensors", "np") as file:
            options |= {"add_pooling_layer": any(key.startswith("pooler.") for key in file.keys())}  # noqa: SIM118
    else:
        options |= {"experts_implementation": "eager"}
    model, loading = class_of(kind).from_pretrained(folder, **options, output_loading_info=True)
    further = f"model.layers.{model.config.num_hidden_layers}."
    unexpected = {key for key in loading["unexpected_keys"] if not key.startswith(further)}
    assert not loading["missing_keys"] | unexpected, loading
    return model.eval()


@torch.no_grad()
def answers(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """What the model says to tokens drawn from the seed."""
    draw = np.random.default_rng(seed)
    tokens = torch.from_numpy(draw.integers(3, BASE["vocab_size"], TOKENS))
    if model.config.model_type in ENCODERS:
        types = torch.from_numpy(draw.integers(0, model.config.type_vocab_size, TOKENS))
        mask = torch.ones(TOKENS, dtype=torch.long)
        mask[1, LIVE:] = 0
        output = model(tokens, attention_mask=mask, token_type_ids=types)
        outputs = {"tokens": tokens, "types": types, "mask": mask, "hidden": output.last_hidden_state}
        outputs |= {} if output.pooler_output is None else {"pooled": output.pooler_output}
        return {key: value.numpy() for key, value in outputs.items()}
    greedy = tokens[:1, :PROMPT]
    for _ in range(GREEDY):
        greedy = torch.cat([greedy, model(greedy, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    outputs = {"tokens": tokens, "logits": model(tokens, use_cache=False).logits, "greedy": greedy[0]}
    return {key: value.numpy() for key, value in outputs.items()}


@torch.no_grad()
def ahead(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Logits [B T-1 V] of the module that predicts further ahead: of the token after the next one."""
    last, folder = model.config.num_hidden_layers, Path(model.config._name_or_path)
    kinds = {k: v for k in ("layer_types", "mlp_layer_types") if (v := getattr(model.config, k, None))}
    for name, kind_list in kinds.items():
        setattr(model.config, f"mtp_{name}", kind_list[-1:])
    deeper = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        num_hidden_layers=last + 1,  # its layer, read as one more of the others
        **{name: kind_list + kind_list[-1:] for name, kind_list in kinds.items()},
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    further = MtpModel(model, 1).eval()
    further.config.layer_types = None  # it knows no mask for indexed attention: that of full attention is the same
    further.layers[0].mtp_block = deeper.model.layers[last]
    for module in further.layers[0].mtp_block.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        for ours, theirs in MTP_NAMES.items():
            getattr(further.layers[0], ours).weight.copy_(file.get_tensor(f"model.layers.{last}.{theirs}.weight"))
    x = model.model(torch.from_numpy(tokens), use_cache=False).last_hidden_state[:, :-1]
    at = torch.arange(1, tokens.shape[1])[None].expand(len(tokens), -1)
    cache = MtpCache(config=model.config.get_mtp_config())
    x = further.forward_layer(0, x, at, cache, input_ids=torch.from_numpy(tokens[:, 1:]))
    return further._project_to_logits(x).numpy()


class Doubled:
    """`torch` with float64 in the place of float32."""

    def __getattr__(self, name: str) -> object:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@torch.no_grad()
def double(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Logits of the first row computed in float64 throughout: also where the code says float32."""
    modules, to_float = (sys.modules[type(model).__module__], modeling_rope_utils), torch.Tensor.float
    try:
        torch.Tensor.float = torch.Tensor.double
        for module in modules:
            module.torch = Doubled()
        whole = type(model)(model.config).double().eval()  # built anew: it keeps a table of rotations
        whole.load_state_dict(model.state_dict())
        return whole(torch.from_numpy(tokens[:1]), use_cache=False).logits.numpy()
    finally:
        torch.Tensor.float = to_float
        for module in modules:
            module.torch = torch


@torch.no_grad()
def margin(model: torch.nn.Module, greedy: np.ndarray) -> float:
    """How far the second best stayed behind at the closest greedy choice, as a share of the largest logit."""
    logits = model(torch.from_numpy(greedy)[None], use_cache=False).logits[0, PROMPT - 1 : -1]
    best = logits.topk(2).values
    return float(((best[:, 0] - best[:, 1]) / logits.abs().amax(-1)).min())


@torch.no_grad()
def sharpness(model: torch.nn.Module, tokens: np.ndarray) -> float:
    """The largest attention weight of a query, over the second half of the sequence, on average; uniform is 0.03."""
    options = {} if model.config.model_type in ENCODERS else {"use_cache": False}
    weights = model(torch.from_numpy(tokens), output_attentions=True, **options).attentions
    return float(torch.stack([w for w in weights if w is not None])[..., TOKENS[1] // 2 :, :].amax(-1).mean())


def make(name: str) -> None:
    """Writes one golden from the first seed whose greedy text is clear of rounding."""
    folder = (GOLDENS.with_name("outside") if name in OUTSIDE else GOLDENS) / name
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = tensors_of(name)
    write_config(folder / "config.json", config, EVERY[name][1])
    for seed in range(200):
        description = {"seed": seed, "sha256": digest(draw_weights(tensors, seed)), "tensors": tensors}
        (folder / "tensors.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        with tempfile.TemporaryDirectory() as scratch:
            model = load(write_model(folder, Path(scratch) / "model"))
            outputs = answers(model, seed)
            if EVERY[name][2].get("_mtp"):
                outputs["ahead"] = ahead(model, outputs["tokens"])
            if EVERY[name][2].get("_double"):
                outputs["double"] = double(model, outputs["tokens"])
        sharp = sharpness(model, outputs["tokens"])
        clear = margin(model, outputs["greedy"]) if "greedy" in outputs else 1.0
        varied = "greedy" not in outputs or len(set(outputs["greedy"][PROMPT:].tolist())) > GREEDY // 3
        if clear > MARGIN and sharp > SHARP and varied:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a greedy text that is clear of rounding")
    np.savez_compressed(folder / "golden.npz", **outputs)
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
            if EVERY[path.parent.name][0] == "gemma3_text":
                config["rope_local_base_freq"] = local["rope_theta"]
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type")
        if kind != "default":
            config["rope_scaling"] = {"type" if kind == "linear" else "rope_type": kind} | rope
        for lists in {"layer_types", "mlp_layer_types"} - set(EVERY[path.parent.name][2]):
            config.pop(lists, None)
    if "head_dim" not in EVERY[path.parent.name][2]:
        config.pop("head_dim", None)
    path.write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in sys.argv[1:] or EVERY:
        make(name)
