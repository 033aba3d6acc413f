"""llama.cpp's architecture `deepseek2`: DeepSeek V2, V3, R1 and Kimi K2, which use latent attention.

llama.cpp scores a group of experts by its best two experts. The definition of V2 takes the score of the best expert, and so does this
module. Files from before September 2025 do not store the expert groups. All experts are then one group, as in llama.cpp at the time.
The files do not contain the modules for multi-token prediction. Sources: llama.cpp's convert_hf_to_gguf.py and llama-model.cpp.
"""

from typing import Any

from argosy.core.keymap import KeyRow
from argosy.models.deepseek import DeepSeekConfig
from argosy.models.settings import Experts, Rope, Yarn
from argosy.weights.gguf import rows as rows
from argosy.weights.gguf.metadata import Metadata, decimal, read_experts, read_gguf_rope
from argosy.weights.gguf.rows import Described, fused_row


def read_deepseek2(meta: Metadata) -> Described:
    """Reads DeepSeek V2, V3, R1 and Kimi K2. Rotary pairs are interleaved, as on the Hub. In files since April 2025 the number of key
    heads is 1, because the latent counts as one head, and other keys give the head sizes."""
    config = _config(meta)
    dense, sparse = range(config.dense), range(config.dense, config.layers)
    every = range(config.layers)
    table = rows.end_rows(config.tied) + rows.norm_rows(every, rows.NORMS) + _latent(meta, config)
    table += (rows.glu_rows(dense) if dense else []) + rows.expert_rows(meta, sparse)
    table += rows.shared_expert_rows(sparse) if config.moe.shared else []
    table += rows.layer_rows(sparse, ("exp_probs_b.bias", "mlp.bias", "E -> E")) if config.moe.bias else []
    return Described(config, table, config.dims)


def _config(meta: Metadata) -> DeepSeekConfig:
    sizes, rotary_size = _sizes(meta), meta.count("rope.dimension_count")
    first = meta.some("leading_dense_block_count") or 0
    return DeepSeekConfig(
        **sizes | {"head_size": sizes["head_size"] - rotary_size},
        rope_size=rotary_size,
        latent_rank=meta.count("attention.kv_lora_rank"),
        query_rank=meta.some("attention.q_lora_rank"),
        attention_bias=meta.has("blk.0.attn_output.bias"),
        rope=_rope(meta, rotary_size),
        dense=first,
        moe=_experts(meta, first),
    )


def _experts(meta: Metadata, first: int) -> Experts:
    """Reads the settings of the experts. Whether scores have a bias is read from `first`, the first layer with experts."""
    score = "sigmoid" if meta.get("expert_gating_func") == 2 else "softmax"
    width = meta.count("expert_feed_forward_length")
    return read_experts(
        meta,
        width,
        score=score,
        normalized=bool(meta.get("expert_weights_norm")),
        shared=(meta.some("expert_shared_count") or 0) * width,
        groups=meta.count("expert_group_count", 1),
        kept_groups=meta.count("expert_group_used_count", 1),
        group_strength="max" if score == "softmax" else "top2",
        bias=meta.has(f"blk.{first}.exp_probs_b.bias"),
    )


def _sizes(meta: Metadata) -> dict[str, Any]:
    """Reads the sizes. The head sizes have different keys in files before and since April 2025."""
    absorbed = meta.get("attention.key_length_mla") is not None
    end, rank = ("_mla", meta.count("attention.kv_lora_rank")) if absorbed else ("", 0)
    heads = meta.count("attention.head_count")
    sizes: dict[str, Any] = {
        "vocab": meta.axis("token_embd.weight", 0),
        "width": meta.count("embedding_length"),
        "layers": meta.layers,
        "ffn": meta.count("feed_forward_length"),
        "heads": heads,
        "head_size": meta.count(f"attention.key_length{end}"),
        "value_size": meta.count(f"attention.value_length{end}"),
        "context": meta.count("context_length"),
        "norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "tied": not meta.has("output.weight"),
    }
    meta.must("attention.causal", True)
    meta.must("attention.head_count_kv", 1 if absorbed else heads, heads)
    if absorbed:
        meta.must("attention.key_length", rank + meta.count("rope.dimension_count"))
        meta.must("attention.value_length", rank)
    return sizes


def _rope(meta: Metadata, rotary_size: int) -> Rope:
    """Reads the settings of YaRN. `mscale_all_dim` is ten times the key `yarn_log_multiplier`, and `mscale` equals `mscale_all_dim` in
    every released model."""
    rope = read_gguf_rope(meta, rotary_size).model_copy(update={"pairs": "interleaved"})
    if isinstance(rope.scaling, Yarn) and meta.get(sharpening := "rope.scaling.yarn_log_multiplier"):
        sharper = decimal(10 * meta.number(sharpening))
        sharpening_values = {"mscale": sharper, "mscale_all_dim": sharper}
        return rope.model_copy(update={"scaling": rope.scaling.model_copy(update=sharpening_values)})
    return rope


def _latent(meta: Metadata, config: DeepSeekConfig) -> list[KeyRow]:
    every = range(config.layers)
    table = rows.layer_rows(
        every,
        ("attn_kv_a_norm.weight", "attn.kv_norm.scale", "R -> R"),
        ("attn_output.weight", "attn.o.w", "D (N U) -> N U D"),
    )
    down = ("attn.kv_down.w", "attn.k_rope.w")
    table.append(fused_row(every, "attn_kv_a_mqa.weight", down, "(R|P) D -> D R, D P"))
    if meta.has("blk.0.attn_kv_b.weight"):
        up = ("attn.k_up.w", "attn.v_up.w")
        table.append(fused_row(every, "attn_kv_b.weight", up, "(N (H|U)) R -> R N H, R N U"))
    else:
        table += rows.layer_rows(every, ("attn_k_b.weight", "attn.k_up.w", "N R H -> R N H"))
        table += rows.layer_rows(every, ("attn_v_b.weight", "attn.v_up.w", "N U R -> R N U"))
    if config.query_rank is None:
        table += rows.layer_rows(every, ("attn_q.weight", "attn.q.w", "(N C) D -> D N C"))
    else:
        table += rows.layer_rows(
            every,
            ("attn_q_a.weight", "attn.q_down.w", "Q D -> D Q"),
            ("attn_q_a_norm.weight", "attn.q_norm.scale", "Q -> Q"),
            ("attn_q_b.weight", "attn.q_up.w", "(N C) Q -> Q N C"),
        )
    if config.attention_bias:
        table.append(fused_row(every, "attn_kv_a_mqa.bias", ("attn.kv_down.b", "attn.k_rope.b"), "(R|P) -> R, P"))
        table += rows.layer_rows(every, ("attn_output.bias", "attn.o.b", "D -> D"))
    if config.attention_bias and config.query_rank:
        table += rows.layer_rows(every, ("attn_q_a.bias", "attn.q_down.b", "Q -> Q"))
    return table
