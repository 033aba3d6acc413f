"""Mixtral on the Hub: config.json and tensor names (`models.mixtral` has the equations)."""

from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import SIZES, ConfigTable, read_rope, write_rope
from argosy.models.settings import Rope


class MixtralHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("mixtral",)

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        layers = range(self.layers)
        rows = hub.attention_key_rows(layers) + hub.norms(layers, hub.PRE_NORMS) + hub.ends(self.tied, scores=self.scores)
        rows += hub.of_layers(
            layers,
            ("block_sparse_moe.gate.weight", "mlp.router.w", "E D -> D E"),
            ("block_sparse_moe.experts.{e}.w1.weight", "mlp.gate.w", "M D -> E D M"),
            ("block_sparse_moe.experts.{e}.w3.weight", "mlp.up.w", "M D -> E D M"),
            ("block_sparse_moe.experts.{e}.w2.weight", "mlp.down.w", "D M -> E M D"),
        )
        return rows, self.dims

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        return cls(**read | {"moe": read["moe"] | {"ffn": read["ffn"]}}, rope=Rope(**read_rope(config, 1e6)))

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns config.json as transformers writes it."""
        config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]} | TABLE.write(self)
        return self.agreed(config | {"head_dim": self.H, "num_key_value_heads": self.K} | write_rope(self.rope))


TABLE = ConfigTable(
    [
        *SIZES,
        ("sliding_window", "window"),
        ("num_local_experts", "moe.count"),
        ("num_experts_per_tok", "moe.active"),
        ("router_aux_loss_coef", "moe.balance"),
    ],
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    fixed={"router_jitter_noise": (0, 0.0)},
    harmless=frozenset(["output_router_logits"]),
)
