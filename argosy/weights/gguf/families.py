"""Reads llama.cpp's architectures with plain attention: the settings from the metadata, and the table that maps tensors to parameters.

Some facts are fixed in llama.cpp's code and stored under no key: which layers are local, how experts are weighted, how Gemma
scales its scores. This module supplies them. Where llama.cpp deviates from a model's own definition (Phi 3's window, gpt-oss's YaRN
ramp), this module follows the definition. Sources: llama.cpp's convert_hf_to_gguf.py and llama-model.cpp.
"""

from typing import Any

from argosy.models.gemma import GemmaConfig
from argosy.models.gpt_oss import GptOssConfig
from argosy.models.llama import LlamaConfig
from argosy.models.mixtral import MixtralConfig
from argosy.models.phi import PhiConfig
from argosy.models.qwen import QwenConfig
from argosy.weights.gguf import rows as rows
from argosy.weights.gguf.metadata import Metadata, read_experts, read_gguf_rope, read_sizes
from argosy.weights.gguf.rows import Described, fused_row

WINDOW, PERIOD = "attention.sliding_window", "attention.sliding_window_pattern"


def read_llama(meta: Metadata) -> Described:
    """Reads Llama, Mistral, Mixtral, and other models of the same structure."""
    sizes = read_sizes(meta)
    sizes |= {"window": meta.some(WINDOW), "rope": read_gguf_rope(meta, sizes["head_size"])}
    over = range(sizes["layers"])
    table = rows.end_rows(sizes["tied"]) + rows.norm_rows(over, rows.NORMS)
    halves = {"P": sizes["head_size"] // 2, "two": 2}
    if meta.get("expert_count"):
        sizes["ffn"] = meta.count("expert_feed_forward_length", sizes["ffn"])
        config = MixtralConfig(**sizes, moe=read_experts(meta, sizes["ffn"], score="softmax", normalized=True))
        table += rows.attention_rows(over, paired=True) + rows.expert_rows(meta, over)
        return Described(config, table, config.dims | halves)
    bias, mlp_bias = meta.has("blk.0.attn_q.bias"), meta.has("blk.0.ffn_gate.bias")
    config = LlamaConfig(**sizes, attention_bias=bias, mlp_bias=mlp_bias)
    table += rows.attention_rows(over, paired=True, bias=bias, out_bias=bias) + rows.glu_rows(over, bias=mlp_bias)
    return Described(config, table, config.dims | halves)


def read_qwen2(meta: Metadata) -> Described:
    """Reads Qwen 2 and 2.5."""
    return _qwen(meta, read_sizes(meta))


def read_qwen3(meta: Metadata) -> Described:
    """Reads Qwen 3, which normalizes queries and keys over each head."""
    return _qwen(meta, read_sizes(meta) | {"qk_norm": True})


def read_qwen2moe(meta: Metadata) -> Described:
    """Reads Qwen 1.5 and 2 with experts and a gated shared expert."""
    sizes, dense = _with_experts(meta)
    width, shared = _expert_width(meta, dense), meta.count("expert_shared_feed_forward_length", sizes["ffn"])
    moe = read_experts(meta, width, score="softmax", normalized=False, shared=shared, shared_gate=True)
    return _qwen(meta, sizes | {"moe": moe, "dense": dense})


def read_qwen3moe(meta: Metadata) -> Described:
    """Reads Qwen 3 with experts."""
    sizes, dense = _with_experts(meta)
    moe = read_experts(meta, _expert_width(meta, dense), score="softmax", normalized=True)
    return _qwen(meta, sizes | {"moe": moe, "dense": dense, "qk_norm": True})


def _with_experts(meta: Metadata) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Returns the sizes, and the indices of the layers without experts."""
    return read_sizes(meta), meta.without("blk.{l}.ffn_gate_inp.weight")


def _expert_width(meta: Metadata, dense: tuple[int, ...]) -> int:
    """The feed-forward width of an expert. In files from before August 2024, only the shapes of tensors give it."""
    first = next((i for i in range(meta.layers) if i not in dense), 0)
    return meta.some("expert_feed_forward_length") or meta.axis(f"blk.{first}.ffn_gate_exps.weight", 1)


def _qwen(meta: Metadata, values: dict[str, Any]) -> Described:
    bias, out_bias = meta.has("blk.0.attn_q.bias"), meta.has("blk.0.attn_output.bias")
    rope = read_gguf_rope(meta, values["head_size"])
    config = QwenConfig(**values, rope=rope, qkv_bias=bias, out_bias=out_bias)
    over = range(config.layers)
    dense, sparse = ([i for i in over if config.kinds[i] == kind] for kind in ("dense", "experts"))
    table = rows.end_rows(config.tied) + rows.norm_rows(over, rows.NORMS)
    table += rows.attention_rows(over, bias=bias, out_bias=out_bias)
    table += rows.head_norm_rows(over) if config.qk_norm else []
    table += rows.glu_rows(dense) if dense else []
    if config.moe is not None:
        table += rows.expert_rows(meta, sparse)
    if config.moe is not None and config.moe.shared:
        table += rows.shared_expert_rows(sparse)
        table += rows.layer_rows(sparse, ("ffn_gate_inp_shexp.weight", "mlp.shared_gate.w", "D -> D 1"))
    return Described(config, table, config.dims)


# ---- Gemma


def read_gemma(meta: Metadata) -> Described:
    """Reads Gemma 1."""
    sizes = read_sizes(meta)
    return _gemma(meta, sizes | {"rope": read_gguf_rope(meta, sizes["head_size"])}, rows.NORMS)


def read_gemma2(meta: Metadata) -> Described:
    """Reads Gemma 2. Local and global layers alternate, starting with a local one, and scores and logits are soft-capped."""
    sizes = read_sizes(meta)
    meta.must(PERIOD, 2)
    values: dict[str, Any] = {"window": meta.count(WINDOW, 4096), "pattern": "LG"}
    values |= {"score_cap": _cap(meta, "attn_logit_softcapping", 50.0)}
    values |= {"logit_cap": _cap(meta, "final_logit_softcapping", 30.0)}
    values |= {"query_scalar": _query_scalar(sizes, 46), "rope": read_gguf_rope(meta, sizes["head_size"])}
    return _gemma(meta, sizes | values, POST_NORMS)


def read_gemma3(meta: Metadata) -> Described:
    """Reads Gemma 3 (text). Five local layers are followed by a global one, and the two kinds have different rotary bases."""
    sizes = read_sizes(meta)
    rope, window = read_gguf_rope(meta, sizes["head_size"]), meta.some(WINDOW)
    meta.must(PERIOD, 6)
    values: dict[str, Any] = {"window": window, "pattern": "LLLLLG" if window else None, "rope": rope, "qk_norm": True}
    values |= {"local_rope": {"base": meta.number("rope.freq_base_swa", 10_000.0)} if window else rope}
    values |= {"query_scalar": _query_scalar(sizes, 62), "logit_cap": _cap(meta, "final_logit_softcapping", None)}
    return _gemma(meta, sizes | values, POST_NORMS)


POST_NORMS = rows.NORMS | {"post_attn_norm": "post_attention_norm", "post_mlp_norm": "post_ffw_norm"}


def _cap(meta: Metadata, key: str, otherwise: float | None) -> float | None:
    """Reads the limit of a soft cap; None if there is no cap, for which files store 0. `otherwise`: llama.cpp's default, for files
    without the key."""
    values = f"{meta.kind}.{key}" in meta.file.meta
    return (meta.number(key) if meta.get(key) else None) if values else otherwise


def _query_scalar(sizes: dict[str, Any], largest: int) -> int:
    """Returns the number whose square root divides the scores: the head size, except in the 27B models. No key says so. As in
    llama.cpp, these models are recognized by their number of layers, `largest`."""
    return sizes["width"] // sizes["heads"] if sizes["layers"] == largest else sizes["head_size"]


def _gemma(meta: Metadata, values: dict[str, Any], norms: dict[str, str]) -> Described:
    bias = meta.has("blk.0.attn_q.bias")
    config = GemmaConfig(**values, attention_bias=bias, post_norms=norms is POST_NORMS)
    over = range(config.layers)
    table = rows.end_rows(config.tied) + rows.norm_rows(over, norms) + rows.attention_rows(over, bias=bias, out_bias=bias)
    table += rows.glu_rows(over) + (rows.head_norm_rows(over) if config.qk_norm else [])
    return Described(config, table, config.dims, raised=True)


# ---- Phi, gpt-oss


def read_phi3(meta: Metadata) -> Described:
    """Reads Phi 3 and 4, whose projections are fused as on the Hub. A window as long as the context means no window."""
    sizes, window = read_sizes(meta), meta.some(WINDOW)
    window = None if window is None or window >= sizes["context"] else window
    config = PhiConfig(**sizes, window=window, rope=read_gguf_rope(meta, sizes["head_size"], partial=True))
    over = range(config.layers)
    qkv, up = ("attn.q.w", "attn.k.w", "attn.v.w"), ("mlp.gate.w", "mlp.up.w")
    table = rows.end_rows(config.tied) + rows.norm_rows(over, rows.NORMS)
    table.append(fused_row(over, "attn_qkv.weight", qkv, "((N|K|K) H) D -> D N H, D K H, D K H"))
    table.append(fused_row(over, "ffn_up.weight", up, "(F|F) D -> D F, D F"))
    table += rows.layer_rows(over, ("attn_output.weight", "attn.o.w", "D (N H) -> N H D"))
    table += rows.layer_rows(over, ("ffn_down.weight", "mlp.down.w", "D F -> F D"))
    return Described(config, table, config.dims)


def read_gpt_oss(meta: Metadata) -> Described:
    """Reads gpt-oss. Local and global layers alternate, starting with a local one. The limit of SwiGLU is that of the released models,
    because no key stores it."""
    sizes = read_sizes(meta)
    rope = read_gguf_rope(meta, sizes["head_size"], truncate=False)
    meta.must("rope.freq_base_swa", rope.base)
    meta.must(PERIOD, 2)
    width = meta.count("expert_feed_forward_length", sizes["ffn"])
    moe = read_experts(meta, width, score="softmax_chosen", normalized=True)
    bias = meta.has("blk.0.attn_q.bias")
    values: dict[str, Any] = {"window": meta.count(WINDOW, 128), "pattern": "LG", "rope": rope, "ffn": width}
    config = GptOssConfig(**sizes | values, moe=moe, attention_bias=bias)
    over = range(config.layers)
    table = rows.end_rows(config.tied) + rows.attention_rows(over, bias=bias, out_bias=bias) + rows.expert_rows(meta, over)
    table += rows.norm_rows(over, {"attn_norm": "attn_norm", "mlp_norm": "post_attention_norm"})
    table += rows.layer_rows(
        over,
        ("attn_sinks.weight", "attn.sinks", "N -> N"),
        ("ffn_gate_inp.bias", "mlp.router.b", "E -> E"),
        ("ffn_gate_exps.bias", "mlp.gate.b", "E M -> E M"),
        ("ffn_up_exps.bias", "mlp.up.b", "E M -> E M"),
        ("ffn_down_exps.bias", "mlp.down.b", "E D -> E D"),
    )
    return Described(config, table, config.dims)
