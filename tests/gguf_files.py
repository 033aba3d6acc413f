"""GGUF files from Hub tensors, as llama.cpp's converter writes them: by the gguf library's names of tensors and keys.

What a config says and no key can is folded into the weights, so that the numbers stay those of the config: Gemma's query
scale into queries, the ratio of DeepSeek's two kinds of `mscale` into what turns. NumPy and gguf alone.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, ExpertGatingFuncType, RopeScalingType

ARCHS = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma": MODEL_ARCH.GEMMA,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "phi3": MODEL_ARCH.PHI3,
    "deepseek_v2": MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": MODEL_ARCH.DEEPSEEK2,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
}

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]
Packed = tuple[np.ndarray, gguf.GGMLQuantizationType | None]


def write_gguf(
    path: Path,
    config: Config,
    weights: Tensors,
    *,
    old: bool = False,
    pack: Callable[[str, np.ndarray], Packed] = lambda name, tensor: (tensor, None),
    more: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
) -> Path:
    """One file.

    Args:
        old: as files were before April 2024 (an expert a tensor) and before April 2025 (DeepSeek's kv_b whole).
        pack: a tensor of theirs as blocks, with their type.
        more: writes further keys.
    """
    arch = ARCHS[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    write_keys(writer, config, old)
    more(writer)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in [*convert_tensors(config, weights, old), *rope_factors(config)]:
        theirs = name if name.startswith(("rope_", "blk.")) else names.get_name(name, try_suffixes=(".weight", ".bias"))
        theirs = theirs or {"lm_head.weight": "output.weight"}[name]  # Gemma 2 has no head of its own in llama.cpp
        packed, kind = pack(theirs, np.ascontiguousarray(tensor, np.float32))
        writer.add_tensor(theirs, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def head_size(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rope_of(config: Config) -> dict[str, Any]:
    """Both generations of config.json; of Gemma 3 the global layers'."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    return {"rope_theta": config.get("rope_theta", 10000.0)} | rope


# ---------------------------------------------------------------- keys


def write_keys(w: gguf.GGUFWriter, config: Config, old: bool) -> None:
    kind, rope = config["model_type"], rope_of(config)
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_vocab_size(config["vocab_size"])
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    if experts := config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts"):
        w.add_expert_count(experts)
        w.add_expert_used_count(config["num_experts_per_tok"])
    if rope.get("rope_type", rope.get("type")) in ("linear", "yarn"):
        w.add_rope_scaling_type(RopeScalingType(rope.get("rope_type", rope.get("type"))))
        w.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind.startswith("deepseek"):
        return deepseek_keys(w, config, rope, old)
    w.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        w.add_key_length(config["head_dim"])
        w.add_value_length(config["head_dim"])
    if config.get("sliding_window") and (kind.startswith(("gemma", "phi", "gpt")) or kind in ("mistral", "mixtral")):
        w.add_sliding_window(config["sliding_window"])
    if kind in ("llama", "mistral", "mixtral"):
        w.add_rope_dimension_count(head_size(config))
    if kind in ("qwen2_moe", "qwen3_moe", "gpt_oss"):
        w.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if kind == "qwen2_moe":
        w.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind == "gemma2":
        w.add_attn_logit_softcapping(config["attn_logit_softcapping"] or 0.0)
        w.add_final_logit_softcapping(config["final_logit_softcapping"] or 0.0)
    if kind == "phi3":
        phi_keys(w, config, rope)
    return None


def phi_keys(w: gguf.GGUFWriter, config: Config, rope: dict[str, Any]) -> None:
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    original, longest = config["original_max_position_embeddings"], config["max_position_embeddings"]
    w.add_rope_dimension_count(int(partial * config["hidden_size"]) // config["num_attention_heads"])
    w.add_rope_scaling_orig_ctx_len(original)
    if "long_factor" in rope:
        w.add_rope_scaling_type(RopeScalingType.LONGROPE)
        w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longest / original) / math.log(original)))


def deepseek_keys(w: gguf.GGUFWriter, config: Config, rope: dict[str, Any], old: bool) -> None:
    size, rank = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["kv_lora_rank"]
    w.add_head_count_kv(config["num_attention_heads"] if old else 1)
    w.add_key_length(size if old else rank + config["qk_rope_head_dim"])
    w.add_value_length(config["v_head_dim"] if old else rank)
    if not old:
        w.add_key_length_mla(size)
        w.add_value_length_mla(config["v_head_dim"])
    w.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        w.add_q_lora_rank(config["q_lora_rank"])
    w.add_rope_dimension_count(config["qk_rope_head_dim"])
    w.add_leading_dense_block_count(config["first_k_dense_replace"])
    w.add_expert_feed_forward_length(config["moe_intermediate_size"])
    w.add_expert_shared_count(config["n_shared_experts"])
    w.add_expert_weights_scale(config["routed_scaling_factor"])
    w.add_expert_weights_norm(config["norm_topk_prob"])
    w.add_expert_group_count(config["n_group"])
    w.add_expert_group_used_count(config["topk_group"])
    if config["model_type"] == "deepseek_v3":
        w.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if rope.get("mscale_all_dim"):
        w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


# ---------------------------------------------------------------- tensors


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rotary halves side by side: the converter's `permute`, for weights and biases."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def convert_tensors(config: Config, weights: Tensors, old: bool) -> Iterator[tuple[str, np.ndarray]]:
    kind, layers = config["model_type"], config["num_hidden_layers"]
    tied = config["tie_word_embeddings"]
    weights = {n: t for n, t in weights.items() if not (tied and n == "lm_head.weight") and within(n, layers)}
    fold = {"gemma2": folded_gemma, "gemma3_text": folded_gemma}.get(kind)
    fold = folded_deepseek if kind.startswith("deepseek") else fold
    if kind.startswith("gemma"):
        weights = {n: t + 1 if n.endswith("norm.weight") else t for n, t in weights.items()}
    if fold:
        weights = {n: fold(config, n, t) for n, t in weights.items()}
    if not (old and kind == "mixtral"):
        weights = stack_experts(weights)
    for name, tensor in weights.items():
        yield from pieces(config, name, tensor, old)


def within(name: str, layers: int) -> bool:
    """Not of a module that predicts further ahead."""
    return not name.startswith("model.layers.") or int(name.split(".")[2]) < layers


def stack_experts(weights: Tensors) -> Tensors:
    """Experts in one tensor a layer."""
    out: dict[str, Any] = {}
    for name, tensor in weights.items():
        head, mark, tail = name.partition(".experts.")
        if mark and tail[0].isdigit():
            out.setdefault(f"{head}.experts.{tail.partition('.')[2]}", []).append(tensor)
        else:
            out[name] = tensor
    return {name: np.stack(tensor) if isinstance(tensor, list) else tensor for name, tensor in out.items()}


def pieces(config: Config, name: str, tensor: np.ndarray, old: bool) -> Iterator[tuple[str, np.ndarray]]:
    """What one tensor of the Hub becomes."""
    kind, end = config["model_type"], name.rpartition("self_attn.")[2]
    if kind in ("llama", "mistral", "mixtral") and end.startswith(("q_proj", "k_proj")):
        heads = "num_attention_heads" if end.startswith("q") else "num_key_value_heads"
        yield name, permuted(tensor, config[heads])
    elif ".experts." in name and name.split(".experts.")[1][0].isdigit():
        layer, expert, ours = name.split(".")[2], *name.split(".experts.")[1].split(".")[:2]
        yield f"blk.{layer}.ffn_{ {'w1': 'gate', 'w2': 'down', 'w3': 'up'}[ours] }.{expert}.weight", tensor
    elif name.endswith("shared_expert_gate.weight"):
        yield name, tensor[0]
    elif name.endswith("e_score_correction_bias"):
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor
    elif end == "kv_b_proj.weight" and not old:
        heads = tensor.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        yield name.replace("kv_b", "k_b"), heads[:, : config["qk_nope_head_dim"]].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), heads[:, config["qk_nope_head_dim"] :]
    elif kind == "gpt_oss" and (".experts." in name or name.endswith("sinks")):
        yield from of_gpt_oss(name, tensor)
    else:
        yield name, tensor


def of_gpt_oss(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if name.endswith("sinks"):
        yield f"{name}.weight", tensor
        return
    end = ".bias" if name.endswith("_bias") else ".weight"
    tensor = tensor if end == ".bias" else tensor.swapaxes(-1, -2)
    name = name.removesuffix("_bias")
    if name.endswith("down_proj"):
        yield name + end, tensor
        return
    at = -1 if end == ".bias" else -2
    for first, ours in ((0, "gate_proj"), (1, "up_proj")):
        yield name.replace("gate_up_proj", ours) + end, np.take(tensor, range(first, tensor.shape[at], 2), at)


def folded_gemma(config: Config, name: str, tensor: np.ndarray) -> np.ndarray:
    """llama.cpp divides by the square root of the head size, whatever the query scale."""
    scaled = "q_norm." if config["model_type"] == "gemma3_text" else "q_proj."
    factor = math.sqrt(head_size(config) / config["query_pre_attn_scalar"])
    return tensor * np.float32(factor) if scaled in name else tensor


def folded_deepseek(config: Config, name: str, tensor: np.ndarray) -> np.ndarray:
    """llama.cpp takes both kinds of `mscale` as the same, where their ratio would scale what turns."""
    rope, end = rope_of(config), name.rpartition("self_attn.")[2]
    if not rope.get("mscale_all_dim") or not end.startswith(("q_proj", "q_b_proj", "kv_a_proj_with_mqa")):
        return tensor
    mscale, every = (0.1 * rope[key] * math.log(rope["factor"]) + 1 for key in ("mscale", "mscale_all_dim"))
    heads = config["num_attention_heads"] if end.startswith("q") else 1
    out = tensor.reshape(heads, -1, *tensor.shape[1:]).copy()
    out[:, -config["qk_rope_head_dim"] :] *= np.float32(mscale / every)
    return out.reshape(tensor.shape)


def rope_factors(config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """Factors of frequencies, which llama.cpp keeps as tensors."""
    rope = rope_of(config)
    if "long_factor" in rope:
        yield "rope_factors_long.weight", np.array(rope["long_factor"])
        yield "rope_factors_short.weight", np.array(rope["short_factor"])
    if rope.get("rope_type") == "llama3":
        size, original = head_size(config), rope["original_max_position_embeddings"]
        yield (
            "rope_freqs.weight",
            np.array([llama3(rope, rope["rope_theta"] ** (i / size), original) for i in range(0, size, 2)]),
        )


def llama3(rope: dict[str, Any], period: float, original: int) -> float:
    length = 2 * math.pi * period
    if length < original / rope["high_freq_factor"]:
        return 1.0
    if length > original / rope["low_freq_factor"]:
        return rope["factor"]
    smooth = (original / length - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


# ---------------------------------------------------------------- vocabularies


def write_vocabulary(path: Path, tokens: list[str], kinds: list[int], scores: list[float], **keys: Any) -> Path:
    """A file with the tables of a `llama` tokenizer and no tensors. keys: further ones below `tokenizer.ggml.`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    for key, value in keys.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted_vocabulary(
    model: Any, added: dict[int, dict[str, Any]], size: int
) -> tuple[list[str], list[int], list[float]]:
    """Tokens, kinds and scores as llama.cpp's converter makes them of a SentencePiece model
    (conversion/base.py, _create_vocab_sentencepiece).

    Args:
        model: a SentencePieceProcessor.
        added: `added_tokens_decoder` of tokenizer_config.json.
        size: rows of the embedding.
    """
    normal, unknown, control, user_defined, unused, byte = 1, 2, 3, 4, 5, 6
    tokens, kinds, scores = [f"[PAD{i}]" for i in range(size)], [unused] * size, [-10000.0] * size
    for number in range(model.vocab_size()):
        tokens[number], scores[number] = model.id_to_piece(number), model.get_score(number)
        tests_of_kind = {unknown: model.is_unknown, control: model.is_control, unused: model.is_unused, byte: model.is_byte}
        kinds[number] = next((kind for kind, is_kind in tests_of_kind.items() if is_kind(number)), normal)
    for number, token in added.items():
        text = token["content"]
        kinds[number] = control if token["special"] else user_defined
        tokens[number] = text if token["special"] else text.replace("\u2581", " ")
        scores[number] = -1000.0
    return tokens, kinds, scores
