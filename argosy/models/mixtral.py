"""Mixtral: Mistral with eight experts in place of each feed-forward layer, two for each token.

    h = x + Attention(RMSNorm(x))        y = h + MoE(RMSNorm(h))

Jiang et al. 2024 (arXiv:2401.04088).
B batch, T time, D width, N query heads, K key heads, H head size, V vocabulary, E experts, M expert ffn.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import model_validator

from argosy.core.keymap import Row
from argosy.models import hub_rows as hub
from argosy.models import parts
from argosy.models.family import DecoderConfig
from argosy.models.hub_config import SIZES, ConfigTable, read_rope, write_rope
from argosy.models.settings import Experts, Rope


def block(config: "MixtralConfig", kind: str) -> "parts.Block":
    """One layer. All layers are of one kind."""
    attention = parts.Attention(config.dims, config.layers)
    moe = parts.MoE(config.dims, config.moe, config.activation)
    return parts.Block(attention, moe, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class MixtralConfig(DecoderConfig):
    """Mixtral (arXiv:2401.04088). Every layer has experts, so `ffn` must equal their width, `moe.ffn`."""

    hub_types: ClassVar[tuple[str, ...]] = ("mixtral",)
    make: ClassVar[Any] = block

    moe: Experts
    """The experts of every layer."""

    @model_validator(mode="after")
    def _is_all_experts(self) -> "MixtralConfig":
        if self.ffn != self.moe.ffn:
            raise ValueError(
                f"ffn = {self.ffn}, moe.ffn = {self.moe.ffn}: must be equal, because every layer has experts"
            )
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {
            "vocab": 113,
            "width": 44,
            "layers": 3,
            "ffn": 38,
            "heads": 4,
            "context": 200,
            "head_size": 10,
        }
        return {
            "plain": cls(**odd, kv_heads=2, moe=Experts(count=7, active=2, ffn=38)),
            "window": cls(**odd, kv_heads=1, window=7, tied=True, moe=Experts(count=4, active=3, ffn=38)),
        }

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        over = range(self.layers)
        rows = hub.attention(over) + hub.norms(over, hub.PRE_NORMS) + hub.ends(self.tied, scores=self.scores)
        rows += hub.of_layers(
            over,
            ("block_sparse_moe.gate.weight", "mlp.router.w", "E D -> D E"),
            ("block_sparse_moe.experts.{e}.w1.weight", "mlp.gate.w", "M D -> E D M"),
            ("block_sparse_moe.experts.{e}.w3.weight", "mlp.up.w", "M D -> E D M"),
            ("block_sparse_moe.experts.{e}.w2.weight", "mlp.down.w", "D M -> E M D"),
        )
        return rows, self.dims

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "MixtralConfig":
        read = TABLE.read(config)
        return cls(**read | {"moe": read["moe"] | {"ffn": read["ffn"]}}, rope=Rope(**read_rope(config, 1e6)))

    def to_hub(self) -> dict[str, Any]:
        """The config.json as transformers writes it."""
        written = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]} | TABLE.write(self)
        return self.agreed(written | {"head_dim": self.H, "num_key_value_heads": self.K} | write_rope(self.rope))


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
