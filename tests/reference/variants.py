"""The small reference models: for each family, its options both ways, in sizes that divide by nothing convenient.

    name: (model type, generation of config.json, what differs from BASE)

Keys with an underscore are not the config's: `_gain` scales matrices (12 unless told), `_embed` the embedding beside that (a
tied head over a loud one repeats its input); `_none` names keys that are set to None; `_means` moves vectors by the end of
their name (a delta net as transformers draws it forgets at once); `_pooler` is whether an encoder has one; `_mtp` adds the
tensors of a module that predicts further ahead.
"""

from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "max_position_embeddings": 200,
    "hidden_size": 42,
    "intermediate_size": 58,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
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
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
TIED = {"tie_word_embeddings": True}
QUIET = {"_embed": 0.2}
LOCAL, WHOLE = "sliding_attention", "full_attention"

LLAMA = {
    "llama-grouped": ("llama", "new", GROUPED),
    "llama-multi-query-tied": ("llama", "old", MULTI_QUERY | TIED | {"num_hidden_layers": 3}),
    "llama-multi-head-biased": ("llama", "new", MULTI_HEAD | {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-attention-bias": ("llama", "old", GROUPED | {"rope_parameters": LINEAR, "attention_bias": True}),
    "llama-linear-multi-query": ("llama", "new", MULTI_QUERY | {"rope_parameters": LINEAR}),
    "llama-llama3-mlp-bias-tied": ("llama", "new", MULTI_HEAD | TIED | {"rope_parameters": LLAMA3, "mlp_bias": True}),
    "llama-llama3-old": ("llama", "old", GROUPED | {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", "new", GROUPED | TIED | {"rope_parameters": YARN}),
    "llama-yarn-told": ("llama", "old", MULTI_HEAD | {"rope_parameters": YARN_TOLD, "attention_bias": True}),
    "mistral-window": ("mistral", "new", GROUPED | {"sliding_window": 7}),
    "mistral-window-tied": ("mistral", "old", MULTI_QUERY | TIED | {"sliding_window": 4}),
    "mistral-whole": (
        "mistral",
        "new",
        MULTI_HEAD | {"sliding_window": None, "rope_parameters": PLAIN | {"rope_theta": 1e6}},
    ),
    "ministral-pattern": (
        "ministral",
        "new",
        GROUPED | {"sliding_window": 6, "num_hidden_layers": 5, "layer_types": [LOCAL, LOCAL, WHOLE, LOCAL, LOCAL]},
    ),
}

QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3}
QWEN = {
    "qwen2-plain": ("qwen2", "new", MULTI_HEAD),
    "qwen2-tied": (
        "qwen2",
        "old",
        GROUPED | TIED | {"head_dim": None, "hidden_size": 48} | {"rope_parameters": PLAIN | {"rope_theta": 1e6}},
    ),
    "qwen2-windows": ("qwen2", "new", MULTI_QUERY | QWEN_WINDOWS),
    "qwen2-yarn": ("qwen2", "old", MULTI_QUERY | {"rope_parameters": YARN}),
    "qwen3-plain": ("qwen3", "new", GROUPED),
    "qwen3-tied-biased": ("qwen3", "old", GROUPED | TIED | {"attention_bias": True}),
    "qwen3-windows": ("qwen3", "new", MULTI_HEAD | {"head_dim": 18} | QWEN_WINDOWS),
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "num_hidden_layers": 3}
QWEN |= {
    "qwen2-moe": (
        "qwen2_moe",
        "new",
        MULTI_QUERY | EXPERTS | {"shared_expert_intermediate_size": 26, "norm_topk_prob": False},
    ),
    "qwen2-moe-mixed": (
        "qwen2_moe",
        "old",
        MULTI_HEAD
        | EXPERTS
        | {"shared_expert_intermediate_size": 30, "norm_topk_prob": True, "decoder_sparse_step": 2}
        | {"hidden_act": "gelu_pytorch_tanh"},
    ),
    "qwen2-moe-windows": (
        "qwen2_moe",
        "new",
        MULTI_QUERY
        | EXPERTS
        | {"shared_expert_intermediate_size": 26, "num_hidden_layers": 4, "use_sliding_window": True}
        | {"sliding_window": 6, "max_window_layers": 3},
    ),
    "qwen3-moe-windows": (
        "qwen3_moe",
        "new",
        GROUPED | EXPERTS | {"use_sliding_window": True, "sliding_window": 6},
    ),
    "qwen3-moe": ("qwen3_moe", "new", GROUPED | EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        "old",
        MULTI_QUERY
        | EXPERTS
        | {"head_dim": 14, "norm_topk_prob": False, "mlp_only_layers": [1], "attention_bias": True}
        | TIED,
    ),
}

MIXTRAL = {
    "mixtral-plain": ("mixtral", "new", GROUPED | {"num_local_experts": 5, "intermediate_size": 22}),
    "mixtral-window": (
        "mixtral",
        "old",
        MULTI_QUERY | TIED | {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 6},
    ),
}

GEMMA_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
BY_TYPE = {WHOLE: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, LOCAL: PLAIN}
GEMMA = {
    "gemma-plain": ("gemma", "new", GEMMA_HEADS | TIED | QUIET),
    "gemma-multi-query": (
        "gemma",
        "old",
        MULTI_QUERY | {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma2-plain": (
        "gemma2",
        "new",
        GEMMA_HEADS | TIED | QUIET | CAPS | {"sliding_window": 6, "query_pre_attn_scalar": 11, "num_hidden_layers": 3},
    ),
    "gemma2-uncapped": (
        "gemma2",
        "old",
        MULTI_HEAD | {"head_dim": 14, "sliding_window": 9, "query_pre_attn_scalar": 14, "attention_bias": True},
    ),
    "gemma3-plain": (
        "gemma3_text",
        "new",
        GEMMA_HEADS
        | TIED
        | {"sliding_window": 6, "query_pre_attn_scalar": 7, "num_hidden_layers": 8, "rope_parameters": BY_TYPE},
    ),
    "gemma3-other": (
        "gemma3_text",
        "old",
        MULTI_QUERY
        | {
            "final_logit_softcapping": 4.0,
            "head_dim": 12,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
        }
        | {"layer_types": [LOCAL, WHOLE, LOCAL], "attention_bias": True},
    ),
}
GEMMA["gemma2-uncapped"][2].update({"_none": ("attn_logit_softcapping", "final_logit_softcapping")})

OLMO = {
    "olmo2-grouped": ("olmo2", "new", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 60}),
    "olmo2-tied-biased": ("olmo2", "old", MULTI_HEAD | TIED | {"attention_bias": True}),
    "olmo3-yarn": (
        "olmo3",
        "new",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "hidden_size": 60,
            "num_hidden_layers": 5,
            "sliding_window": 6,
        }
        | {"rope_parameters": {WHOLE: YARN | {"attention_factor": 1.2}, LOCAL: PLAIN}},
    ),
    "olmo3-plain": (
        "olmo3",
        "old",
        MULTI_QUERY
        | TIED
        | {"num_hidden_layers": 3, "sliding_window": 9, "layer_types": [WHOLE, LOCAL, WHOLE], "attention_bias": True},
    ),
}

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.05, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 6.0, 12.0],
}
PHI = {
    "phi3-window": ("phi3", "new", MULTI_HEAD | {"sliding_window": 7}),
    "phi3-long": (
        "phi3",
        "new",
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 60, "original_max_position_embeddings": 8}
        | {"rope_parameters": LONG},
    ),
    "phi3-short": (
        "phi3",
        "old",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 60, "original_max_position_embeddings": 50}
        | {"rope_parameters": LONG | {"partial_rotary_factor": 0.5}}
        | TIED,
    ),
}

OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 22,
    "num_hidden_layers": 4,
    "sliding_window": 7,
}
GPT_OSS = {
    "gpt-oss-yarn": (
        "gpt_oss",
        "old",
        GROUPED
        | OSS
        | {"rope_parameters": YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}, "swiglu_limit": 0.7},
    ),
    "gpt-oss-plain": (
        "gpt_oss",
        "new",
        MULTI_HEAD
        | OSS
        | {
            "head_dim": 14,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "swiglu_limit": 2.0,
        }
        | {"attention_bias": False, "rope_parameters": PLAIN, "tie_word_embeddings": True}
        | {"layer_types": [WHOLE, LOCAL, LOCAL]},
    ),
}

LATENT = {
    "_gain": 22.0,  # scores are made of latents, which are normalised: 12 leaves attention near uniform
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "kv_lora_rank": 14,
    "q_lora_rank": 18,
    "moe_intermediate_size": 22,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
}
NO_QUERY_LATENT = {"q_lora_rank": None, "_none": ("q_lora_rank",)}
MSCALES = YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.3, "factor": 6.0}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
ONE_GROUP = {"n_routed_experts": 5, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
INDEX = {"index_n_heads": 9, "index_head_dim": 10, "index_topk": 7}
DEEPSEEK = {
    "deepseek_v3-groups": ("deepseek_v3", "new", LATENT | GROUPS),  # its config tells of a module that is not there
    "deepseek_v3-mtp": ("deepseek_v3", "old", LATENT | GROUPS | {"n_shared_experts": 2, "_mtp": True}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        "old",
        LATENT | GROUPS | {"rope_parameters": MSCALES, "attention_bias": True, "num_mtp_layers": 0},
    ),
    "deepseek_v3-no-query-latent": (
        "deepseek_v3",
        "new",
        LATENT
        | NO_QUERY_LATENT
        | ONE_GROUP
        | TIED
        | {"rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2, "num_hidden_layers": 4}
        | {"first_k_dense_replace": 2, "num_mtp_layers": 0},
    ),
    "deepseek_v32-plain": ("deepseek_v32", "new", LATENT | ONE_GROUP | INDEX | TIED | {"attention_bias": True}),
    "deepseek_v32-groups": (
        "deepseek_v32",
        "old",
        LATENT
        | GROUPS
        | INDEX
        | {"index_n_heads": 8, "index_head_dim": 13, "index_topk": 11, "rope_parameters": MSCALES}
        | {"n_shared_experts": 2, "num_hidden_layers": 4, "first_k_dense_replace": 2}
        | {"num_mtp_layers": 1, "_mtp": True},
    ),
    "deepseek_v2-groups": (
        "deepseek_v2",
        "new",
        LATENT | GROUPS | {"topk_method": "group_limited_greedy", "rope_parameters": MSCALES, "attention_bias": True},
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        "old",
        LATENT | NO_QUERY_LATENT | ONE_GROUP | TIED | {"num_attention_heads": 3, "num_key_value_heads": 3},
    ),
}

NEXT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 26,
    "num_hidden_layers": 4,
    "_means": {"A_log": -2.0},
    "_double": True,
    "_gain": 6.0,
}
RECURRENT = "linear_attention"
QWEN3_NEXT = {
    "qwen3-next-plain": ("qwen3_next", "new", GROUPED | NEXT),
    "qwen3-next-deep": (
        "qwen3_next",
        "old",
        MULTI_QUERY
        | TIED
        | NEXT
        | {"head_dim": 16, "num_hidden_layers": 8, "decoder_sparse_step": 2, "rope_parameters": PLAIN}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3}
        | {"rms_norm_eps": 1e-3},
    ),
    "qwen3-next-mixed": (
        "qwen3_next",
        "new",
        MULTI_HEAD
        | NEXT
        | {"head_dim": 14, "num_hidden_layers": 5, "mlp_only_layers": [1, 2], "norm_topk_prob": False}
        | {"layer_types": [WHOLE, RECURRENT, RECURRENT, WHOLE, RECURRENT], "attention_bias": True}
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 5}
        | {"rope_parameters": YARN | {"partial_rotary_factor": 0.6}},
    ),
}

LAYER_NORM = {"rms_norm_eps": None, "intermediate_size": None, "layer_norm_epsilon": 3e-5}
GPT2 = {
    "gpt2-tied": ("gpt2", "old", LAYER_NORM | TIED | {"num_attention_heads": 6, "n_inner": 58, "_embed": 0.2}),
    "gpt2-untied": (
        "gpt2",
        "new",
        LAYER_NORM | {"num_attention_heads": 3, "activation_function": "relu", "num_hidden_layers": 3},
    ),
}

ENCODER = {"rms_norm_eps": None, "tie_word_embeddings": None, "layer_norm_eps": 3e-5}
BERT = {
    "bert-pooler": ("bert", "new", ENCODER | {"num_attention_heads": 3}),
    "bert-no-pooler": (
        "bert",
        "old",
        ENCODER
        | {"num_attention_heads": 6, "hidden_act": "gelu_new", "type_vocab_size": 3, "num_hidden_layers": 3}
        | {"_pooler": False, "_gain": 16.0},
    ),
    "roberta-pooler": ("roberta", "old", ENCODER | {"num_attention_heads": 3, "pad_token_id": 1}),
    "xlm-roberta-no-pooler": (
        "xlm-roberta",
        "new",
        ENCODER | {"num_attention_heads": 3, "pad_token_id": 2, "type_vocab_size": 1, "_pooler": False},
    ),
}

FED = {"intermediate_size": 22, "intermediate_size_mlp": 58, "num_local_experts": 6, "attention_chunk_size": 7}
STEP = LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0}  # as Scout has it: no ramp between slow and fast
LLAMA4 = {
    "llama4-plain": ("llama4_text", "new", GROUPED | FED | {"rope_parameters": STEP, "num_hidden_layers": 5}),
    "llama4-interleaved": (
        "llama4_text",
        "old",
        MULTI_QUERY
        | FED
        | TIED
        | {"head_dim": 14, "num_local_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 4}
        | {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 0, 1], "floor_scale": 4, "attn_scale": 0.7}
        | {"use_qk_norm": False, "attention_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "llama4-untempered": (
        "llama4_text",
        "new",
        MULTI_HEAD
        | FED
        | {"head_dim": 18, "num_experts_per_tok": 3, "num_hidden_layers": 3, "moe_layers": [0, 1]}
        | {"no_rope_layer_interval": 2, "attn_temperature_tuning": False, "rope_parameters": YARN | {"factor": 6.0}},
    ),
}

MODELS = LLAMA | LLAMA4 | QWEN | MIXTRAL | GEMMA | OLMO | PHI | GPT_OSS | DEEPSEEK | QWEN3_NEXT | GPT2 | BERT

# Of a family that lies outside of the package: tests/fixtures/starcoder2.py.
STARCODER2 = {"rms_norm_eps": None, "norm_epsilon": 3e-5}
OUTSIDE = {
    "starcoder2-plain": (
        "starcoder2",
        "old",
        MULTI_QUERY | STARCODER2 | {"sliding_window": None, "use_bias": False, "hidden_act": "relu"},
    ),
    "starcoder2-window": ("starcoder2", "new", GROUPED | STARCODER2 | TIED | QUIET | {"sliding_window": 7}),
}
EVERY = MODELS | OUTSIDE
