"""OLMo 2 and 3: norms after attention and feed-forward layer instead of before, and one norm over all query (and key) heads.

    h = x + norm(Attention(x))        y = h + norm(SwiGLU(h))

OLMo 3 has three local layers to each global one; only global layers scale their rotary positions.

OLMo team 2025 (arXiv:2501.00656, 2512.13961).
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary.
"""

from functools import partial
from typing import Any, ClassVar

from argosy.core.keymap import Row
from argosy.models import hub_rows as hub
from argosy.models import parts
from argosy.models.family import DecoderConfig
from argosy.models.hub_config import SIZES, ConfigTable, read_pattern, read_rope, write_pattern, write_rope
from argosy.models.settings import Rope, Yarn


def block(config: "OlmoConfig", kind: str) -> "parts.Block":
    """One layer. All layers are of one kind."""
    def over_all_heads(heads: int) -> "parts.RMSNorm":
        return parts.RMSNorm((heads, config.H), config.norm_eps, letters="NH" if heads == config.heads else "KH")

    bias = config.attention_bias
    attention = parts.Attention(config.dims, config.layers, bias=bias, out_bias=bias, norms=over_all_heads)
    mlp = parts.GLU(config.dims, config.activation)
    return parts.Block(attention, mlp, post=partial(parts.RMSNorm, config.width, config.norm_eps))


class OlmoConfig(DecoderConfig):
    """OLMo 2 and 3 (arXiv:2501.00656, 2512.13961)."""

    hub_types: ClassVar[tuple[str, ...]] = ("olmo2", "olmo3")
    make: ClassVar[Any] = block

    attention_bias: bool = False
    """Adds biases to the four projections of attention."""
    local_rope: Rope | None = None
    """Rotary positions of local layers, if they differ."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 48, "ffn": 70, "heads": 4, "context": 200}
        scaled = Rope(base=5e5, scaling=Yarn(factor=8, original=16))
        return {
            "2": cls(**odd, layers=3, kv_heads=2, attention_bias=True),
            "3": cls(**odd, layers=5, window=6, pattern="LLLG", rope=scaled, local_rope=Rope(base=5e5)),
        }

    @property
    def rope_of_local_layers(self) -> Rope:
        return self.local_rope or self.rope

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        over = range(self.layers)
        rows = hub.attention(over, bias=self.attention_bias, out_bias=self.attention_bias) + hub.glu(over)
        rows += hub.norms(over, POST_NORMS)
        rows += hub.of_layers(
            over,
            ("self_attn.q_norm.weight", "attn.q_norm.scale", "(N H) -> N H"),
            ("self_attn.k_norm.weight", "attn.k_norm.scale", "(K H) -> K H"),
        )
        return rows + hub.ends(self.tied, scores=self.scores), self.dims

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "OlmoConfig":
        kind = config["model_type"]
        read = TABLES[kind].read(config)
        if kind == "olmo2":
            return cls(**read, rope=Rope(**read_rope(config)))
        spans = "".join("L" if (i + 1) % 4 else "G" for i in range(read["layers"]))
        full = Rope(**read_rope(config, 5e5, layer_type="full_attention"))
        by_type = "sliding_attention" in (config.get("rope_parameters") or {})
        local = Rope(**read_rope(config, 5e5, layer_type="sliding_attention")) if by_type else Rope(base=full.base)
        return cls(**read | read_pattern(config, read, spans), rope=full, local_rope=local)

    def to_hub(self) -> dict[str, Any]:
        """OLMo 3 if there is a window, otherwise OLMo 2."""
        kind = "olmo3" if self.window or self.local_rope else "olmo2"
        written = {"model_type": kind, "architectures": [kind.replace("olmo", "Olmo") + "ForCausalLM"]}
        written |= TABLES[kind].write(self) | {"num_key_value_heads": self.K} | write_rope(self.rope)
        if kind == "olmo2":
            return self.agreed(written)
        local = write_rope(self.local_rope or self.rope)["rope_parameters"]
        both = {"full_attention": written["rope_parameters"], "sliding_attention": local}
        return self.agreed(written | write_pattern(self.spans) | {"rope_parameters": both})


POST_NORMS = {"post_attn_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
ROWS = [*(row for row in SIZES if row[0] != "head_dim"), ("attention_bias", "attention_bias")]
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
TABLES = {
    "olmo2": ConfigTable(ROWS, DEFAULTS, harmless=frozenset(["head_dim"])),
    "olmo3": ConfigTable(
        [*ROWS, ("sliding_window", "window")],
        DEFAULTS | {"sliding_window": 4096},
        harmless=frozenset(["head_dim", "layer_types"]),
    ),
}
