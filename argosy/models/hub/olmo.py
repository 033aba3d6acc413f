"""OLMo on the Hub: config.json and tensor names (`models.olmo` has the equations)."""

from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import SIZES, ConfigTable, read_pattern, read_rope, write_pattern, write_rope
from argosy.models.settings import Rope


class OlmoHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("olmo2", "olmo3")

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        layers = range(self.layers)
        rows = hub.attention_key_rows(layers, bias=self.attention_bias, out_bias=self.attention_bias) + hub.glu(layers)
        rows += hub.norms(layers, POST_NORMS)
        rows += hub.of_layers(
            layers,
            ("self_attn.q_norm.weight", "attn.q_norm.scale", "(N H) -> N H"),
            ("self_attn.k_norm.weight", "attn.k_norm.scale", "(K H) -> K H"),
        )
        return rows + hub.ends(self.tied, scores=self.scores), self.dims

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        kind = config["model_type"]
        read = TABLES[kind].read(config)
        if kind == "olmo2":
            return cls(**read, rope=Rope(**read_rope(config)))
        spans = "".join("L" if (i + 1) % 4 else "G" for i in range(read["layers"]))
        full = Rope(**read_rope(config, 5e5, layer_type="full_attention"))
        by_type = "sliding_attention" in (config.get("rope_parameters") or {})
        local = Rope(**read_rope(config, 5e5, layer_type="sliding_attention")) if by_type else Rope(base=full.base)
        return cls(**read | read_pattern(config, read, spans), rope=full, local_rope=local)

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns the config.json of OLMo 3 if there is a window, otherwise of OLMo 2."""
        kind = "olmo3" if self.window or self.local_rope else "olmo2"
        config = {"model_type": kind, "architectures": [kind.replace("olmo", "Olmo") + "ForCausalLM"]}
        config |= TABLES[kind].write(self) | {"num_key_value_heads": self.K} | write_rope(self.rope)
        if kind == "olmo2":
            return self.agreed(config)
        local = write_rope(self.local_rope or self.rope)["rope_parameters"]
        both = {"full_attention": config["rope_parameters"], "sliding_attention": local}
        return self.agreed(config | write_pattern(self.spans) | {"rope_parameters": both})


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
