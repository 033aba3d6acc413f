"""gpt-oss on the Hub: config.json and tensor names (`models.gpt_oss` has the equations)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import SIZES, ConfigTable, read_pattern, read_rope, write_pattern, write_rope
from argosy.models.settings import Rope


class GptOssHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    hub_blocks: ClassVar[Mapping[str, str]] = {
        "E D (M (1|1)) -> E D M, E D M": "E (M (1|1)) D -> E D M, E D M",
        "E M D -> E M D": "E D M -> E M D",
    }

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        layers = range(self.layers)

        def both(theirs: str, kind: str, reading: str) -> KeyRow:
            """Returns a row for gate and up, which are interleaved in one tensor."""
            return KeyRow(hub.LAYER + theirs, (f"layers.{{l}}.mlp.gate.{kind}", f"layers.{{l}}.mlp.up.{kind}"), reading, layers)

        rows = hub.attention_key_rows(layers, bias=self.attention_bias, out_bias=self.attention_bias)
        rows += hub.norms(layers, hub.PRE_NORMS) + hub.ends(self.tied, scores=self.scores)
        rows += hub.of_layers(
            layers,
            ("self_attn.sinks", "attn.sinks", "N -> N"),
            ("mlp.router.weight", "mlp.router.w", "E D -> D E"),
            ("mlp.router.bias", "mlp.router.b", "E -> E"),
            ("mlp.experts.down_proj", "mlp.down.w", "E M D -> E M D"),
            ("mlp.experts.down_proj_bias", "mlp.down.b", "E D -> E D"),
        )
        rows.append(both("mlp.experts.gate_up_proj", "w", "E D (M (1|1)) -> E D M, E D M"))
        rows.append(both("mlp.experts.gate_up_proj_bias", "b", "E (M (1|1)) -> E M, E M"))
        return rows, self.dims

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        read["moe"] |= {"ffn": read["ffn"], "score": "softmax_chosen"}
        spans = ("LG" * read["layers"])[: read["layers"]]
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            config = config | {"rope_parameters": RELEASED}
        return cls(**read | read_pattern(config, read, spans), rope=Rope(**read_rope(config)))

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns config.json as transformers writes it."""
        config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]} | TABLE.write(self)
        config |= {"num_key_value_heads": self.K, "head_dim": self.H, "experts_per_token": self.moe.active}
        return self.agreed(config | write_pattern(self.spans) | write_rope(self.rope))


# The rotary positions of the released models, which transformers uses if config.json has none.
RELEASED = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
TABLE = ConfigTable(
    [
        *SIZES[:-2],
        ("tie_word_embeddings", "tied"),
        ("attention_bias", "attention_bias"),
        ("sliding_window", "window"),
        ("num_local_experts", "moe.count"),
        ("num_experts_per_tok", "moe.active"),
        ("router_aux_loss_coef", "moe.balance"),
        ("swiglu_limit", "limit"),
        ("swiglu_alpha", "alpha"),
    ],
    {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "attention_bias": True,
    },
    {"hidden_act": ("silu",)},
    frozenset(["layer_types", "output_router_logits", "experts_per_token", "initial_context_length"]),
)
