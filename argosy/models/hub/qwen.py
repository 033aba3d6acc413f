"""Qwen on the Hub: config.json and tensor names (`models.qwen` has the equations)."""

from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import SIZES, ConfigTable, read_dense, read_pattern, read_rope, write_pattern, write_rope
from argosy.models.settings import Rope


class QwenHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
    # Text encoders of denoisers, and sentence encoders, are saved without a head, and without the prefix `model.`.
    hub_prefixes: ClassVar[tuple[str, ...]] = ("model.",)

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        layers = range(self.layers)
        dense, sparse = ([i for i in layers if self.kinds[i] == kind] for kind in ("dense", "experts"))
        rows = hub.attention_key_rows(layers, bias=self.qkv_bias, out_bias=self.out_bias) + hub.norms(layers, hub.PRE_NORMS)
        rows += hub.head_norms(layers) if self.qk_norm else []
        rows += hub.glu(dense) if dense else []
        if self.moe is not None:
            rows += hub.of_layers(sparse, ("mlp.gate.weight", "mlp.router.w", "E D -> D E")) + hub.experts(sparse)
            if self.moe.shared:
                rows += hub.glu(sparse, "mlp.shared_expert", "mlp.shared", "shared")
            if self.moe.shared_gate:
                rows += hub.of_layers(sparse, ("mlp.shared_expert_gate.weight", "mlp.shared_gate.w", "1 D -> D 1"))
        return rows + hub.ends(self.tied, scores=self.scores), self.dims

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        kind = config["model_type"]
        # transformers 5 writes `num_local_experts`, and reads the older key too.
        if kind == "qwen3_moe" and "num_local_experts" in config:
            config = {"num_experts": config["num_local_experts"]} | config
        read = TABLES[kind].read(config) | FIXED[kind]
        if "moe" in read:
            read["moe"] |= {"shared_gate": bool(read["moe"].get("shared"))}
            read["dense"] = read_dense(config, read["layers"])
        return cls(**read | windows(config, read), rope=Rope(**read_rope(config)))

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns the config.json of the generation of Qwen that has these options."""
        moe = self.moe
        kind = ("qwen3" if self.qk_norm else "qwen2") + ("_moe" if moe else "")
        config = {"model_type": kind, "architectures": [ARCHITECTURES[kind]]} | TABLES[kind].write(self)
        config |= {"num_key_value_heads": self.K} | write_rope(self.rope)
        config |= {} if kind == "qwen2" else {"head_dim": self.H}
        if moe:
            config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(self.dense)}
        if kind == "qwen3_moe" and moe:
            config |= {"num_local_experts": moe.count}
        config |= {"use_sliding_window": bool(self.window), "sliding_window": self.window}
        # Qwen3 with experts has windows in all layers or in none.
        if kind == "qwen3_moe":
            return self.agreed(config)
        first = {} if moe else {"max_window_layers": (self.spans + "L").find("L")}
        return self.agreed(config | first | write_pattern(self.spans))


def windows(config: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
    """Reads the settings `window` and `pattern`. Without `use_sliding_window`, no layer has a window.

    Without `layer_types`, the architecture decides which layers have a window: those from `max_window_layers` on (Qwen2 and Qwen3),
    every second layer before `max_window_layers` (Qwen2 with experts), or all layers (Qwen3 with experts).
    """
    if not config.get("use_sliding_window"):
        return {}
    kind, first = config["model_type"], config.get("max_window_layers", 28)
    if kind == "qwen3_moe":
        return {"window": config.get("sliding_window", 4096)}
    local = (lambda i: i % 2 == 0 and i < first) if kind == "qwen2_moe" else (lambda i: i >= first)
    spans = "".join("L" if local(i) else "G" for i in range(read["layers"]))
    return {"window": config.get("sliding_window", 4096)} | read_pattern(config, read, spans)


ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Qwen2.5 has this key. Positions of images and time (M-RoPE) belong to another architecture.
PLAIN = {"use_mrope": (False, None)}
WINDOWS = frozenset(["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"])
DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
MOE = [
    *SIZES,
    ("num_experts", "moe.count"),
    ("num_experts_per_tok", "moe.active"),
    ("moe_intermediate_size", "moe.ffn"),
    ("norm_topk_prob", "moe.normalized"),
    ("router_aux_loss_coef", "moe.balance"),
]
BIASES = [("attention_bias", "qkv_bias"), ("attention_bias", "out_bias")]
SHARED = [("shared_expert_intermediate_size", "moe.shared"), ("qkv_bias", "qkv_bias")]
SPARSE = frozenset(["decoder_sparse_step", "mlp_only_layers", "output_router_logits", "num_local_experts"])
TABLES = {
    "qwen2": ConfigTable([r for r in SIZES if r[0] != "head_dim"], DEFAULTS, PLAIN, WINDOWS | {"head_dim"}),
    "qwen3": ConfigTable([*SIZES, *BIASES], DEFAULTS | {"head_dim": 128}, harmless=WINDOWS),
    "qwen2_moe": ConfigTable(
        [*MOE, *SHARED], DEFAULTS | {"norm_topk_prob": False, "qkv_bias": True}, harmless=WINDOWS | SPARSE
    ),
    "qwen3_moe": ConfigTable([*MOE, *BIASES], DEFAULTS | {"norm_topk_prob": False}, harmless=WINDOWS | SPARSE),
}
# Settings that the architecture fixes, for which config.json has no key.
FIXED: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
}
