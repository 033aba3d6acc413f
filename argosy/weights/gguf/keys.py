"""Derives the metadata of a GGUF file from a model's settings, the inverse of `families` and `metadata`.

Each function returns the architecture and the keys of one family, without the architecture's prefix. `frequencies` returns the tensors
of frequency factors. Settings without a key are left out here. `writer` therefore reads the keys back, and refuses a model whose
settings would change. Sources: gguf-py's constants.py for the names of keys, llama.cpp's conversion/ for the keys of each family.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from argosy.models.gemma import GemmaConfig
from argosy.models.gpt_oss import GptOssConfig
from argosy.models.llama import LlamaConfig
from argosy.models.mixtral import MixtralConfig
from argosy.models.phi import PhiConfig
from argosy.models.qwen import QwenConfig
from argosy.models.settings import Experts, LinearScaling, Llama3Scaling, LongRope, Rope, Yarn
from argosy.weights.gguf.metadata import ROPE_FREQS, ROPE_LONG, ROPE_SHORT

Keys = dict[str, Any]
WINDOW = "attention.sliding_window"


def describe_llama(config: LlamaConfig | MixtralConfig) -> tuple[str, Keys]:
    """Describes Llama, Mistral and Mixtral."""
    keys = _sizes(config)
    if config.window is not None:
        keys[WINDOW] = config.window
    return "llama", keys | _experts(config.experts)


def describe_qwen(config: QwenConfig) -> tuple[str, Keys]:
    """Describes Qwen 2, 2.5 and 3, with and without experts."""
    keys, moe = _sizes(config), config.moe
    if moe is not None:
        keys |= _experts(moe) | {"expert_feed_forward_length": moe.ffn}
        if moe.shared:
            keys["expert_shared_feed_forward_length"] = moe.shared
    return f"qwen{3 if config.qk_norm else 2}{'' if moe is None else 'moe'}", keys


def describe_gemma(config: GemmaConfig) -> tuple[str, Keys]:
    """Describes Gemma 1, 2 and 3."""
    keys = _sizes(config)
    if not config.post_norms:
        return "gemma", keys
    if config.window is not None:
        keys[WINDOW] = config.window
    if not config.qk_norm:
        # 0: no cap. Without the key the released models' would count.
        caps = {"attn_logit_softcapping": config.score_cap, "final_logit_softcapping": config.logit_cap}
        return "gemma2", keys | {key: float(cap or 0) for key, cap in caps.items()}
    if config.window is not None:
        keys["rope.freq_base_swa"] = float(config.rope_of_local_layers.base)
    return "gemma3", keys | ({"final_logit_softcapping": config.logit_cap} if config.logit_cap else {})


def describe_phi(config: PhiConfig) -> tuple[str, Keys]:
    """Describes Phi 3 and 4. A window of 0 means no window."""
    return "phi3", _sizes(config) | {WINDOW: config.window or 0}


def describe_gpt_oss(config: GptOssConfig) -> tuple[str, Keys]:
    """Describes gpt-oss."""
    keys = _sizes(config) | _experts(config.moe) | {"expert_feed_forward_length": config.moe.ffn}
    return "gpt-oss", keys | ({WINDOW: config.window} if config.window is not None else {})


def _sizes(config: Any) -> Keys:
    """Returns the keys that every decoder has."""
    keys = {
        "vocab_size": config.vocab,
        "context_length": config.context,
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.K,
        "attention.key_length": config.H,
        "attention.value_length": config.H,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.rope.rotated_size(config.H),
    }
    return keys | _rope(config.rope)


def _experts(moe: Experts | None) -> Keys:
    return {} if moe is None else {"expert_count": moe.count, "expert_used_count": moe.active}


def _rope(rope: Rope) -> Keys:
    keys: Keys = {"rope.freq_base": float(rope.base)}
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling | Yarn):
        keys |= {"rope.scaling.type": "yarn" if isinstance(scaling, Yarn) else "linear", "rope.scaling.factor": float(scaling.factor)}
    if isinstance(scaling, Yarn):
        keys |= {"rope.scaling.original_context_length": scaling.original}
        ends = {"fast": (scaling.fast, 32.0), "slow": (scaling.slow, 1.0)}
        keys |= {f"rope.scaling.yarn_beta_{key}": float(value) for key, (value, default) in ends.items() if value != default}
        keys |= {} if scaling.attention is None else {"rope.scaling.yarn_attn_factor": float(scaling.attention)}
    if isinstance(scaling, LongRope):
        keys |= {"rope.scaling.original_context_length": scaling.original}
        keys |= {"rope.scaling.attn_factor": float(scaling.attention)}
    return keys


def frequencies(config: Any) -> dict[str, np.ndarray]:
    """The divisors of the rotary frequencies, one for each rotary pair, by tensor name. Empty where a file has no such tensors."""
    rope, size = config.rope, config.rope.rotated_size(config.H)
    if isinstance(rope.scaling, LongRope):
        return {name: np.asarray(a, np.float32) for name, a in ((ROPE_LONG, rope.scaling.long), (ROPE_SHORT, rope.scaling.short))}
    if isinstance(rope.scaling, Llama3Scaling):
        plain = Rope(base=rope.base).frequencies(size)[0]
        return {ROPE_FREQS: np.asarray(plain / rope.frequencies(size)[0], np.float32)}
    return {}


DESCRIBERS: dict[type, Callable[[Any], tuple[str, Keys]]] = {
    LlamaConfig: describe_llama,
    MixtralConfig: describe_llama,
    QwenConfig: describe_qwen,
    GemmaConfig: describe_gemma,
    PhiConfig: describe_phi,
    GptOssConfig: describe_gpt_oss,
}
