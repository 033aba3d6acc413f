"""gpt-oss: a window in every second layer, a learned attention sink per head, experts with biases and a clipped, shifted SwiGLU.

    h = x + Attention(RMSNorm(x))        y = h + MoE(RMSNorm(h))
    expert(x) = W_down ((up + 1) * gate * sigmoid(alpha gate)),  gate at most `limit`, up within +-limit

OpenAI 2025 (arXiv:2508.10925). Its expert weights are published in MXFP4: blocks of 32 with a common power of two.
B batch, T time, D width, N query heads, K key heads, H head size, V vocabulary, E experts, M expert ffn.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.keymap import Row
from argosy.models import hub_rows as hub
from argosy.models import parts
from argosy.models.family import DecoderConfig
from argosy.models.hub_config import SIZES, ConfigTable, read_pattern, read_rope, write_pattern, write_rope
from argosy.models.settings import Experts, Rope, Yarn


def block(config: "GptOssConfig", kind: str) -> "parts.Block":
    """One layer. All layers are of one kind."""
    from argosy.models.blocks.gpt_oss import clipped_swiglu

    bias = config.attention_bias
    attention = parts.Attention(config.dims, config.layers, bias=bias, out_bias=bias, sinks=True)
    act = partial(clipped_swiglu, limit=config.limit, alpha=config.alpha)
    moe = parts.MoE(config.dims, config.moe, act=act, bias=True)
    return parts.Block(attention, moe, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class GptOssConfig(DecoderConfig):
    """gpt-oss (arXiv:2508.10925). Every layer has experts, so `ffn` must equal their width, `moe.ffn`."""

    hub_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    hub_blocks: ClassVar[Mapping[str, str]] = {
        "E D (M (1|1)) -> E D M, E D M": "E (M (1|1)) D -> E D M, E D M",
        "E M D -> E M D": "E D M -> E M D",
    }
    make: ClassVar[Any] = block

    attention_bias: bool = True
    """Adds biases to the four projections of attention."""
    moe: Experts
    """The experts of every layer."""
    limit: float = Field(7.0, gt=0)
    """Bound to which gate and up are clipped."""
    alpha: float = 1.702
    """Factor inside the sigmoid of the gate."""

    @model_validator(mode="after")
    def _is_all_experts(self) -> "GptOssConfig":
        if self.ffn != self.moe.ffn:
            raise ValueError(
                f"ffn = {self.ffn}, moe.ffn = {self.moe.ffn}: must be equal, because every layer has experts"
            )
        if self.activation != "silu":
            raise ValueError(
                f"activation = {self.activation}: this family has a fixed activation, the clipped SwiGLU"
            )
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "ffn": 38, "heads": 4, "context": 200}
        chosen = {"ffn": 38, "score": "softmax_chosen"}
        scaled = Rope(base=150_000.0, scaling=Yarn(factor=8, original=16, truncate=False))
        return {
            "unbiased": cls(
                **odd, layers=3, head_size=14, attention_bias=False, limit=0.3, moe=Experts(count=5, active=3, **chosen)
            ),
            "plain": cls(
                **odd,
                layers=3,
                kv_heads=2,
                head_size=10,
                window=7,
                pattern="LG",
                rope=scaled,
                limit=0.5,
                moe=Experts(count=6, active=2, **chosen),
            ),
        }

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        over = range(self.layers)

        def both(theirs: str, kind: str, how: str) -> Row:
            """A row for gate and up, which are interleaved."""
            return Row(hub.LAYER + theirs, (f"layers.{{l}}.mlp.gate.{kind}", f"layers.{{l}}.mlp.up.{kind}"), how, over)

        rows = hub.attention(over, bias=self.attention_bias, out_bias=self.attention_bias)
        rows += hub.norms(over, hub.PRE_NORMS) + hub.ends(self.tied, scores=self.scores)
        rows += hub.of_layers(
            over,
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
    def from_hub(cls, config: dict[str, Any]) -> "GptOssConfig":
        read = TABLE.read(config)
        read["moe"] |= {"ffn": read["ffn"], "score": "softmax_chosen"}
        spans = ("LG" * read["layers"])[: read["layers"]]
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            config = config | {"rope_parameters": RELEASED}
        return cls(**read | read_pattern(config, read, spans), rope=Rope(**read_rope(config)))

    def to_hub(self) -> dict[str, Any]:
        """The config.json as transformers writes it."""
        written = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]} | TABLE.write(self)
        written |= {"num_key_value_heads": self.K, "head_dim": self.H, "experts_per_token": self.moe.active}
        return self.agreed(written | write_pattern(self.spans) | write_rope(self.rope))


# The rotary positions transformers assumes if config.json has none: those of the released models.
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
