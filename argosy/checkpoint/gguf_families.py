"""What llama.cpp's architectures with heads of keys and values are here: a config from the metadata, rows for the tensors.

What llama.cpp fixes in code and no key tells stands here: which layers are local, how experts are weighed, how Gemma's scores
are scaled. Where it leaves a model's own definition (windows of Phi 3, gpt-oss's ramp of YaRN), the definition counts.
Sources: llama.cpp's convert_hf_to_gguf.py and llama-model.cpp.
"""

from typing import Any

from argosy.checkpoint import gguf_rows as rows
from argosy.checkpoint.gguf_meta import Metadata, read_experts, read_rope, read_sizes
from argosy.checkpoint.gguf_rows import Model, fused
from argosy.models.gemma import GemmaConfig
from argosy.models.gpt_oss import GptOssConfig
from argosy.models.llama import LlamaConfig
from argosy.models.mixtral import MixtralConfig
from argosy.models.phi import PhiConfig
from argosy.models.qwen import QwenConfig

WINDOW, PERIOD = "attention.sliding_window", "attention.sliding_window_pattern"


def read_llama(meta: Metadata) -> Model:
    """Llama, Mistral, Mixtral, and whatever has their shape."""
    sizes = read_sizes(meta)
    sizes |= {"window": meta.some(WINDOW), "rope": read_rope(meta, sizes["head_size"])}
    over = range(sizes["layers"])
    table = rows.ends(sizes["tied"]) + rows.norms(over, rows.NORMS)
    halves = {"P": sizes["head_size"] // 2, "two": 2}
    if meta.said("expert_count"):
        sizes["ffn"] = meta.count("expert_feed_forward_length", sizes["ffn"])
        config = MixtralConfig(**sizes, moe=read_experts(meta, sizes["ffn"], score="softmax", normalized=True))
        table += rows.attention(over, paired=True) + rows.experts(meta, over)
        return Model(config, table, config.dims | halves)
    bias, mlp_bias = meta.has("blk.0.attn_q.bias"), meta.has("blk.0.ffn_gate.bias")
    config = LlamaConfig(**sizes, attention_bias=bias, mlp_bias=mlp_bias)
    table += rows.attention(over, paired=True, bias=bias, out_bias=bias) + rows.glu(over, bias=mlp_bias)
    return Model(config, table, config.dims | halves)


def read_qwen2(meta: Metadata) -> Model:
    """Qwen 2 and 2.5."""
    return _qwen(meta, read_sizes(meta))


def read_qwen3(meta: Metadata) -> Model:
    """Qwen 3, which normalises queries and keys over each head."""
    return _qwen(meta, read_sizes(meta) | {"qk_norm": True})


def read_qwen2moe(meta: Metadata) -> Model:
    """Qwen 1.5 and 2 with experts, beside a shared one with a gate."""
    sizes, dense = _with_experts(meta)
    width, shared = _expert_width(meta, dense), meta.count("expert_shared_feed_forward_length", sizes["ffn"])
    moe = read_experts(meta, width, score="softmax", normalized=False, shared=shared, shared_gate=True)
    return _qwen(meta, sizes | {"moe": moe, "dense": dense})


def read_qwen3moe(meta: Metadata) -> Model:
    """Qwen 3 with experts."""
    sizes, dense = _with_experts(meta)
    moe = read_experts(meta, _expert_width(meta, dense), score="softmax", normalized=True)
    return _qwen(meta, sizes | {"moe": moe, "dense": dense, "qk_norm": True})


def _with_experts(meta: Metadata) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Sizes, and the layers that have no experts."""
    return read_sizes(meta), meta.without("blk.{l}.ffn_gate_inp.weight")


def _expert_width(meta: Metadata, dense: tuple[int, ...]) -> int:
    """In files before August 2024 only the tensors tell."""
    first = next((i for i in range(meta.layers) if i not in dense), 0)
    return meta.some("expert_feed_forward_length") or meta.axis(f"blk.{first}.ffn_gate_exps.weight", 1)


def _qwen(meta: Metadata, said: dict[str, Any]) -> Model:
    bias, out_bias = meta.has("blk.0.attn_q.bias"), meta.has("blk.0.attn_output.bias")
    rope = read_rope(meta, said["head_size"])
    config = QwenConfig(**said, rope=rope, qkv_bias=bias, out_bias=out_bias)
    over = range(config.layers)
    dense, sparse = ([i for i in over if config.kinds[i] == kind] for kind in ("dense", "experts"))
    table = rows.ends(config.tied) + rows.norms(over, rows.NORMS)
    table += rows.attention(over, bias=bias, out_bias=out_bias)
    table += rows.head_norms(over) if config.qk_norm else []
    table += rows.glu(dense) if dense else []
    if config.moe is not None:
        table += rows.experts(meta, sparse)
    if config.moe is not None and config.moe.shared:
        table += rows.shared_expert(sparse)
        table += rows.blocks(sparse, ("ffn_gate_inp_shexp.weight", "mlp.shared_gate.w", "D -> D 1"))
    return Model(config, table, config.dims)


# ---- Gemma


def read_gemma(meta: Metadata) -> Model:
    """Gemma 1."""
    sizes = read_sizes(meta)
    return _gemma(meta, sizes | {"rope": read_rope(meta, sizes["head_size"])}, rows.NORMS)


def read_gemma2(meta: Metadata) -> Model:
    """Gemma 2: a local layer, then a global one; scores and logits capped."""
    sizes = read_sizes(meta)
    meta.must(PERIOD, 2)
    said: dict[str, Any] = {"window": meta.count(WINDOW, 4096), "pattern": "LG"}
    said |= {"score_cap": _cap(meta, "attn_logit_softcapping", 50.0)}
    said |= {"logit_cap": _cap(meta, "final_logit_softcapping", 30.0)}
    said |= {"query_scalar": _query_scalar(sizes, 46), "rope": read_rope(meta, sizes["head_size"])}
    return _gemma(meta, sizes | said, POST_NORMS)


def read_gemma3(meta: Metadata) -> Model:
    """Gemma 3, text: five local layers, then a global one, each kind with a rotary base of its own."""
    sizes = read_sizes(meta)
    rope, window = read_rope(meta, sizes["head_size"]), meta.some(WINDOW)
    meta.must(PERIOD, 6)
    said: dict[str, Any] = {"window": window, "pattern": "LLLLLG" if window else None, "rope": rope, "qk_norm": True}
    said |= {"local_rope": {"base": meta.number("rope.freq_base_swa", 10_000.0)} if window else rope}
    said |= {"query_scalar": _query_scalar(sizes, 62), "logit_cap": _cap(meta, "final_logit_softcapping", None)}
    return _gemma(meta, sizes | said, POST_NORMS)


POST_NORMS = rows.NORMS | {"post_attn_norm": "post_attention_norm", "post_mlp_norm": "post_ffw_norm"}


def _cap(meta: Metadata, key: str, otherwise: float | None) -> float | None:
    """llama.cpp's default where the key is missing; 0 is no cap."""
    said = f"{meta.kind}.{key}" in meta.file.meta
    return (meta.number(key) if meta.said(key) else None) if said else otherwise


def _query_scalar(sizes: dict[str, Any], largest: int) -> int:
    """No key tells: llama.cpp knows the 27B models, which divide scores otherwise, by their number of layers."""
    return sizes["width"] // sizes["heads"] if sizes["layers"] == largest else sizes["head_size"]


def _gemma(meta: Metadata, said: dict[str, Any], norms: dict[str, str]) -> Model:
    bias = meta.has("blk.0.attn_q.bias")
    config = GemmaConfig(**said, attention_bias=bias, post_norms=norms is POST_NORMS)
    over = range(config.layers)
    table = rows.ends(config.tied) + rows.norms(over, norms) + rows.attention(over, bias=bias, out_bias=bias)
    table += rows.glu(over) + (rows.head_norms(over) if config.qk_norm else [])
    return Model(config, table, config.dims, raised=True)


# ---- Phi, gpt-oss


def read_phi3(meta: Metadata) -> Model:
    """Phi 3 and 4: projections fused as on the Hub. A window as long as the context is none."""
    sizes, window = read_sizes(meta), meta.some(WINDOW)
    window = None if window is None or window >= sizes["context"] else window
    config = PhiConfig(**sizes, window=window, rope=read_rope(meta, sizes["head_size"], partial=True))
    over = range(config.layers)
    qkv, up = ("attn.q.w", "attn.k.w", "attn.v.w"), ("mlp.gate.w", "mlp.up.w")
    table = rows.ends(config.tied) + rows.norms(over, rows.NORMS)
    table.append(fused(over, "attn_qkv.weight", qkv, "((N|K|K) H) D -> D N H, D K H, D K H"))
    table.append(fused(over, "ffn_up.weight", up, "(F|F) D -> D F, D F"))
    table += rows.blocks(over, ("attn_output.weight", "attn.o.w", "D (N H) -> N H D"))
    table += rows.blocks(over, ("ffn_down.weight", "mlp.down.w", "D F -> F D"))
    return Model(config, table, config.dims)


def read_gpt_oss(meta: Metadata) -> Model:
    """gpt-oss: a local layer, then a global one; the limit of its SwiGLU is that of the released models."""
    sizes = read_sizes(meta)
    rope = read_rope(meta, sizes["head_size"], truncate=False)
    meta.must("rope.freq_base_swa", rope.base)
    meta.must(PERIOD, 2)
    width = meta.count("expert_feed_forward_length", sizes["ffn"])
    moe = read_experts(meta, width, score="softmax_chosen", normalized=True)
    bias = meta.has("blk.0.attn_q.bias")
    said: dict[str, Any] = {"window": meta.count(WINDOW, 128), "pattern": "LG", "rope": rope, "ffn": width}
    config = GptOssConfig(**sizes | said, moe=moe, attention_bias=bias)
    over = range(config.layers)
    table = rows.ends(config.tied) + rows.attention(over, bias=bias, out_bias=bias) + rows.experts(meta, over)
    table += rows.norms(over, {"attn_norm": "attn_norm", "mlp_norm": "post_attention_norm"})
    table += rows.blocks(
        over,
        ("attn_sinks.weight", "attn.sinks", "N -> N"),
        ("ffn_gate_inp.bias", "mlp.router.b", "E -> E"),
        ("ffn_gate_exps.bias", "mlp.gate.b", "E M -> E M"),
        ("ffn_up_exps.bias", "mlp.up.b", "E M -> E M"),
        ("ffn_down_exps.bias", "mlp.down.b", "E D -> E D"),
    )
    return Model(config, table, config.dims)
