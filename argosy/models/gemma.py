"""Gemma 1, 2 and 3 (text): embeddings scaled by sqrt(D), norms that store their scale minus one, a tied head.

    Gemma 1     h = x + Attention(norm(x))              y = h + GeGLU(norm(h))
    Gemma 2, 3  h = x + norm(Attention(norm(x)))        y = h + norm(GeGLU(norm(h)))

Gemma 2 alternates local and global layers and caps scores and logits. Gemma 3 has five local layers to a global one, normalises
queries and keys over each head, and local and global layers have different rotary positions.

Gemma team 2024, 2024, 2025 (arXiv:2403.08295, 2408.00118, 2503.19786).
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from argosy.core.keymap import Row
from argosy.models import hub_rows as hub
from argosy.models import parts
from argosy.models.family import DecoderConfig
from argosy.models.hub_config import SIZES, ConfigTable, read_pattern, read_rope, text_of, write_pattern, write_rope
from argosy.models.settings import Activation, Linear, Rope


def block(config: "GemmaConfig", kind: str) -> "parts.Block":
    """One layer. All layers are of one kind."""
    def head_norm(heads: int) -> "parts.RMSNorm":
        return parts.RMSNorm(config.H, config.norm_eps, offset=1.0, letters="H")

    attention = parts.Attention(
        config.dims,
        config.layers,
        scale=(config.query_scalar or config.H) ** -0.5,
        bias=config.attention_bias,
        out_bias=config.attention_bias,
        norms=head_norm if config.qk_norm else None,
        cap=config.score_cap,
    )
    norm = partial(parts.RMSNorm, config.width, config.norm_eps, offset=1.0)
    mlp = parts.GLU(config.dims, config.activation)
    return parts.Block(attention, mlp, pre=norm, post=norm if config.post_norms else None)


class GemmaConfig(DecoderConfig):
    """Gemma 1, 2 and 3, text (arXiv:2403.08295, 2408.00118, 2503.19786)."""

    hub_types: ClassVar[tuple[str, ...]] = ("gemma", "gemma2", "gemma3_text", "gemma3")
    hub_prefixes: ClassVar[tuple[str, ...]] = ("language_model.",)
    hub_left_out: ClassVar[tuple[str, ...]] = ("vision_tower.*", "multi_modal_projector.*")
    make: ClassVar[Any] = block

    tied: bool = True
    """Uses the embedding as the output head (tied embeddings)."""
    norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square in RMSNorm."""
    activation: Activation = "gelu_tanh"
    """Activation of the feed-forward gate."""
    attention_bias: bool = False
    """Adds biases to the four projections of attention."""
    query_scalar: int | None = Field(None, gt=0)
    """Scores are divided by the square root of this. None: of the head size."""
    post_norms: bool = False
    """Also normalizes the outputs of attention and feed-forward layer before they are added (Gemma 2 and 3)."""
    qk_norm: bool = False
    """Applies RMSNorm to each head of queries and keys (Gemma 3)."""
    score_cap: float | None = Field(None, gt=0)
    """Attention scores become cap * tanh(score / cap) (Gemma 2: 50)."""
    logit_cap: float | None = Field(None, gt=0)
    """Logits become cap * tanh(logit / cap) (Gemma 2: 30)."""
    local_rope: Rope | None = None
    """Rotary positions of local layers, if they differ (Gemma 3)."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "ffn": 70, "heads": 4, "context": 200, "head_size": 14}
        two = {"window": 7, "pattern": "LG", "score_cap": 3.0, "logit_cap": 4.0, "query_scalar": 11}
        three = {"window": 6, "pattern": "LLG", "qk_norm": True, "rope": Rope(base=1e6, scaling=Linear(factor=8))}
        return {
            "1": cls(**odd, layers=2, kv_heads=1, attention_bias=True),
            "2": cls(**odd, layers=4, kv_heads=2, post_norms=True, **two),
            "3": cls(**odd, layers=5, kv_heads=4, post_norms=True, local_rope=Rope(), **three, tied=False),
        }

    @property
    def rope_of_local_layers(self) -> Rope:
        return self.local_rope or self.rope

    def build(self, run: "parts.Execution | None" = None) -> "parts.Decoder":
        """The module. Layers differ in how far back they attend and in their rotary positions."""
        norm = parts.RMSNorm(self.width, self.norm_eps, offset=1.0)
        return parts.Decoder(self, self.plan(), self.make, norm, run, gain=self.width**0.5, logit_cap=self.logit_cap)

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        over = range(self.layers)
        rows = hub.attention(over, bias=self.attention_bias, out_bias=self.attention_bias) + hub.glu(over)
        rows += hub.norms(over, POST_NORMS if self.post_norms else hub.PRE_NORMS)
        rows += hub.head_norms(over) if self.qk_norm else []
        return rows + hub.ends(self.tied, scores=self.scores), self.dims

    @classmethod
    def hub_text(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Gemma 3 from 4B on is published with a vision tower; `text_config` describes the text model."""
        return text_of(config, "gemma3", {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]})

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "GemmaConfig":
        kind = config["model_type"]
        read = TABLES[kind].read(config)
        # "gelu" there has always meant the approximation.
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

    def to_hub(self) -> dict[str, Any]:
        """The config.json of the Gemma in transformers that has these options."""
        kind = "gemma" if not self.post_norms else "gemma3_text" if self.qk_norm else "gemma2"
        written = {"model_type": kind, "architectures": [ARCHITECTURES[kind]]} | TABLES[kind].write(self)
        written |= {"num_key_value_heads": self.K, "head_dim": self.H}
        if kind == "gemma":
            written |= {"hidden_activation": written["hidden_act"]}
        else:
            written |= {"query_pre_attn_scalar": self.query_scalar or self.H} | write_pattern(self.spans)
        if kind != "gemma3_text":
            written |= write_rope(self.rope)
        else:
            whole, local = write_rope(self.rope), write_rope(self.local_rope or self.rope)
            written |= {"rope_theta": whole["rope_theta"], "rope_scaling": whole["rope_scaling"]}
            written |= {"rope_local_base_freq": local["rope_theta"]}
            both = {"full_attention": whole["rope_parameters"], "sliding_attention": local["rope_parameters"]}
            written |= {"rope_parameters": both, "attn_logit_softcapping": self.score_cap}
        return self.agreed(written)

    def resolved(self) -> "GemmaConfig":
        """Gemma 1 has no separate query scale, and only Gemma 3 has two rotary bases."""
        local = (self.local_rope or self.rope) if self.qk_norm else None
        scalar = (self.query_scalar or self.H) if self.post_norms else self.query_scalar
        return super().resolved().model_copy(update={"local_rope": local, "query_scalar": scalar})


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
        # Gemma 3 normalizes instead, and transformers ignores the cap.
        PLAIN | {"attn_logit_softcapping": (None,)},
        frozenset(
            """layer_types sliding_window_pattern _sliding_window_pattern rope_local_base_freq cache_implementation
            hidden_act""".split()  # noqa: SIM905
        ),
    ),
}
