"""Gemma on the Hub: config.json and tensor names (`models.gemma` has the equations)."""

from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import SIZES, ConfigTable, read_pattern, read_rope, text_config, write_pattern, write_rope
from argosy.models.settings import Rope


class GemmaHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("gemma", "gemma2", "gemma3_text", "gemma3")
    hub_prefixes: ClassVar[tuple[str, ...]] = ("language_model.",)
    hub_left_out: ClassVar[tuple[str, ...]] = ("vision_tower.*", "multi_modal_projector.*")

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        layers = range(self.layers)
        rows = hub.attention_key_rows(layers, bias=self.attention_bias, out_bias=self.attention_bias) + hub.glu(layers)
        rows += hub.norms(layers, POST_NORMS if self.post_norms else hub.PRE_NORMS)
        rows += hub.head_norms(layers) if self.qk_norm else []
        return rows + hub.ends(self.tied, scores=self.scores), self.dims

    @classmethod
    def hub_text(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Returns `text_config` of models with a vision tower, such as Gemma 3 from 4B on."""
        return text_config(config, "gemma3", {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]})

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        kind = config["model_type"]
        read = TABLES[kind].read(config)
        # In Gemma's config.json, "gelu" has always meant the tanh approximation.
        if kind == "gemma":
            read["activation"] = "gelu_tanh"
            return cls(**read, rope=Rope(**read_rope(config)))
        every = config.get("sliding_window_pattern") or (2 if kind == "gemma2" else 6)
        spans = "".join("L" if (i + 1) % every else "G" for i in range(read["layers"]))
        read |= {"post_norms": True, "qk_norm": kind == "gemma3_text"} | read_pattern(config, read, spans)
        if kind == "gemma2":
            return cls(**read, rope=Rope(**read_rope(config)))
        by_type = "full_attention" in (config.get("rope_parameters") or {})
        local = (
            read_rope(config, layer_type="sliding_attention")
            if by_type
            else {"base": config.get("rope_local_base_freq", 1e4)}
        )
        return cls(**read, rope=Rope(**read_rope(config, 1e6, layer_type="full_attention")), local_rope=Rope(**local))

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns the config.json of the generation of Gemma that has these options."""
        kind = "gemma" if not self.post_norms else "gemma3_text" if self.qk_norm else "gemma2"
        config = {"model_type": kind, "architectures": [ARCHITECTURES[kind]]} | TABLES[kind].write(self)
        config |= {"num_key_value_heads": self.K, "head_dim": self.H}
        if kind == "gemma":
            config |= {"hidden_activation": config["hidden_act"]}
        else:
            config |= {"query_pre_attn_scalar": self.query_scalar or self.H} | write_pattern(self.spans)
        if kind != "gemma3_text":
            config |= write_rope(self.rope)
        else:
            whole, local = write_rope(self.rope), write_rope(self.local_rope or self.rope)
            config |= {"rope_theta": whole["rope_theta"], "rope_scaling": whole["rope_scaling"]}
            config |= {"rope_local_base_freq": local["rope_theta"]}
            both = {"full_attention": whole["rope_parameters"], "sliding_attention": local["rope_parameters"]}
            config |= {"rope_parameters": both, "attn_logit_softcapping": self.score_cap}
        return self.agreed(config)


POST_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
ARCHITECTURES = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
DEFAULTS = {
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
LATER = [(("hidden_activation" if theirs == "hidden_act" else theirs), ours) for theirs, ours in SIZES] + [
    ("attention_bias", "attention_bias"),
    ("query_pre_attn_scalar", "query_scalar"),
    ("sliding_window", "window"),
    ("attn_logit_softcapping", "score_cap"),
    ("final_logit_softcapping", "logit_cap"),
]
PLAIN = {"use_bidirectional_attention": (None, False)}
TABLES = {
    "gemma": ConfigTable(
        [*SIZES, ("attention_bias", "attention_bias")],
        DEFAULTS | {"hidden_act": "gelu_pytorch_tanh"},
        PLAIN | {"hidden_activation": (None, "gelu_pytorch_tanh"), "hidden_act": ("gelu", "gelu_pytorch_tanh")},
    ),
    "gemma2": ConfigTable(
        LATER,
        DEFAULTS
        | {"query_pre_attn_scalar": 256, "sliding_window": 4096}
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        PLAIN,
        frozenset(["layer_types", "cache_implementation", "hidden_act", "sliding_window_size"]),
    ),
    "gemma3_text": ConfigTable(
        [row for row in LATER if row[1] != "score_cap"],
        DEFAULTS
        | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "max_position_embeddings": 131072}
        | {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
        | {"num_attention_heads": 8, "num_key_value_heads": 4},
        # Gemma 3 normalizes queries and keys instead, and transformers ignores the cap.
        PLAIN | {"attn_logit_softcapping": (None,)},
        frozenset(
            """layer_types sliding_window_pattern _sliding_window_pattern rope_local_base_freq cache_implementation
            hidden_act""".split()  # noqa: SIM905
        ),
    ),
}
