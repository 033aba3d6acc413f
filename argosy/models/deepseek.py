"""DeepSeek V2, V2-Lite, V3 and R1, and Kimi K2: latent attention, experts in groups beside a shared one, and a module that
predicts a token further ahead.

    h = x + LatentAttention(RMSNorm(x))        y = h + MoE(RMSNorm(h)), in the first layers h + SwiGLU(RMSNorm(h))

V2 scores experts by softmax and judges a group by its best; V3 scores by sigmoid, judges a group by its best two, and a bias
moved by load keeps experts even. V3 is published in FP8, a scale for each 128 x 128 values.

DeepSeek-AI 2024 (arXiv:2405.04434, 2412.19437), 2025 (arXiv:2501.12948), Moonshot AI 2025 (arXiv:2507.20534).
B batch, T time, D width, F feed-forward, N heads, H plain and P rotary part of a head, C both, U value size, R and Q ranks of
the latents of keys and of queries, V vocabulary, E experts, M expert ffn.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field, model_validator

from argosy.core.errors import BadInput
from argosy.core.keymap import Row
from argosy.models import hub_rows as hub
from argosy.models.family import UNROLL, FamilyConfig
from argosy.models.hub_config import SIZES, ConfigTable, read_rope, write_rope
from argosy.models.parts.ahead import Ahead, Depth
from argosy.models.parts.attend import Attend
from argosy.models.parts.decoder import Decoder, PreNorm
from argosy.models.parts.heads import Reach
from argosy.models.parts.latent import LatentAttention
from argosy.models.parts.mlp import GLU, Activation
from argosy.models.parts.moe import Experts, MoE
from argosy.models.parts.norm import RMSNorm
from argosy.models.parts.rope import Rope, Yarn
from argosy.models.parts.stack import Layer, Run


class DeepSeekConfig(FamilyConfig):
    """DeepSeek V2, V3, R1 (arXiv:2405.04434, 2412.19437, 2501.12948) and Kimi K2 (arXiv:2507.20534)."""

    hub_types: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3", "kimi_k2")

    ffn: int = Field(gt=0)
    """Width of the feed-forward layer F, in the layers that have no experts."""
    heads: int = Field(gt=0)
    """Heads N."""
    head_size: int = Field(gt=0)
    """The part of a query or key head that carries no position, H."""
    rope_size: int = Field(gt=0, multiple_of=2)
    """The part that rotary positions turn, P; the keys of all heads share it."""
    value_size: int = Field(gt=0)
    """Size of a value head U."""
    latent_rank: int = Field(gt=0)
    """Size of the latent that keys and values come from, R."""
    query_rank: int | None = Field(None, gt=0)
    """Size of the latent that queries come from, Q; they come straight from the residual stream unless told."""
    attention_bias: bool = False
    """Biases on the projections down to latents and on the output."""
    rope: Rope = Rope(pairs="interleaved")
    """Rotary positions."""
    norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square in RMSNorm; norms over latents have 1e-6 whatever this is."""
    activation: Activation = "silu"
    """Of the gate, in the feed-forward layer and in experts."""
    moe: Experts
    """The experts."""
    dense: int = Field(1, ge=0)
    """How many of the first layers have a feed-forward layer in place of experts."""
    mtp: int = Field(0, ge=0, le=16)
    """Modules that predict further ahead, for a token more each. They train and draft; logits do without them."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "DeepSeekConfig":
        if self.dense >= self.layers:
            raise ValueError(f"dense = {self.dense} of {self.layers} layers leaves none with experts")
        if self.rope.part < 1:
            raise ValueError(f"rope.part = {self.rope.part}: the whole of rope_size turns")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "ffn": 70, "heads": 4, "context": 200}
        sizes: dict[str, Any] = {"head_size": 10, "rope_size": 6, "value_size": 9, "latent_rank": 14}
        grouped: dict[str, Any] = {"normalized": False, "groups": 3, "kept_groups": 2, "group_strength": "max"}
        yarn = Yarn(factor=8, original=16, mscale=0.707, mscale_all_dim=1.3)
        return {
            "2": cls(
                **odd,
                **sizes,
                layers=3,
                query_rank=18,
                rope=Rope(pairs="interleaved", scaling=yarn),
                moe=Experts(count=9, active=2, ffn=22, shared=44, scale=1.7, **grouped),
            ),
            "2-lite": cls(
                **odd,
                **sizes,
                layers=3,
                attention_bias=True,
                dense=0,
                moe=Experts(count=5, active=2, ffn=22, score="softmax", normalized=False, group_strength="max"),
            ),
            "3": cls(
                **{**odd, "heads": 3},
                **{**sizes, "latent_rank": 8},
                layers=5,
                query_rank=15,
                attention_bias=True,
                dense=2,
                mtp=1,
                rope=Rope(scaling=yarn),
                moe=Experts(
                    count=8,
                    active=3,
                    ffn=26,
                    shared=26,
                    score="sigmoid",
                    groups=4,
                    kept_groups=2,
                    bias=True,
                    scale=2.5,
                ),
            ),
        }

    @property
    def dims(self) -> dict[str, int]:
        sizes = {"D": self.width, "F": self.ffn, "N": self.heads, "H": self.head_size, "P": self.rope_size}
        sizes |= {"C": self.head_size + self.rope_size, "U": self.value_size, "R": self.latent_rank, "V": self.vocab}
        sizes |= {"E": self.moe.count, "M": self.moe.ffn, "shared": self.moe.shared, "twice": 2 * self.width}
        return sizes if self.query_rank is None else sizes | {"Q": self.query_rank}

    @property
    def scale(self) -> float:
        """Of the scores: 1/sqrt(C), times the square of YaRN's sharpening where that is told to act on all of a head."""
        yarn = self.rope.scaling if isinstance(self.rope.scaling, Yarn) else None
        sharper = yarn.sharpening(yarn.mscale_all_dim) if yarn and yarn.mscale_all_dim else 1.0
        return (self.head_size + self.rope_size) ** -0.5 * sharper**2

    def build(self, run: Run = UNROLL) -> "DeepSeek":
        """Its module; layers differ in what stands behind attention."""
        d = self.dims

        def norm() -> RMSNorm:
            return RMSNorm(self.width, self.norm_eps)

        def block(kind: str) -> PreNorm:
            attention = LatentAttention(d, self.layers, scale=self.scale, bias=self.attention_bias)
            return PreNorm(
                attention, MoE(d, self.moe, self.activation) if kind == "experts" else GLU(d, self.activation), norm
            )

        return DeepSeek(self, block, norm, run)

    def parameters(self, active: bool = False) -> int:
        """Those of `mtp` among them, unless it is asked what a token meets on its way to logits."""
        return super().parameters(active) if not (active and self.mtp) else self._alone().parameters(active)

    def flops(self, tokens: int) -> int:
        """As of every family; without `mtp`."""
        return self._alone().flops(tokens) if self.mtp else super().flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        return 2 * tokens * tokens * self.heads * (self.head_size + self.rope_size + self.value_size) * self.layers

    def _alone(self) -> "DeepSeekConfig":
        return self.model_copy(update={"mtp": 0})

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        every, experts = range(self.layers), range(self.dense, self.layers)
        rows = self._attention_rows(every) + self._expert_rows(experts)
        rows += hub.glu(range(self.dense)) if self.dense else []
        for d in range(self.mtp):
            rows += self._mtp_rows(d)
        copies = [f"model.layers.{self.layers + d}." for d in range(self.mtp)]
        embed, *others = hub.ends(self.tied)
        rows.append(replace(embed, copies=tuple(f"{at}embed_tokens.weight" for at in copies)))
        heads = tuple(f"{at}shared_head.head.weight" for at in copies)
        return rows + [replace(row, copies=heads) if row.ours == "head.w" else row for row in others], self.dims

    def _attention_rows(self, over: range) -> list[Row]:
        def both(theirs: str, ours: tuple[str, str], how: str) -> Row:
            return Row(f"{hub.LAYER}self_attn.{theirs}", tuple(f"layers.{{l}}.attn.{o}" for o in ours), how, over)

        rows = hub.norms(over, hub.PRE_NORMS)
        rows += [
            both("kv_a_proj_with_mqa.weight", ("kv_down.w", "k_rope.w"), "(R|P) D -> D R, D P"),
            both("kv_b_proj.weight", ("k_up.w", "v_up.w"), "(N (H|U)) R -> R N H, R N U"),
        ]
        rows += hub.of_layers(
            over,
            ("self_attn.kv_a_layernorm.weight", "attn.kv_norm.scale", "R -> R"),
            ("self_attn.o_proj.weight", "attn.o.w", "D (N U) -> N U D"),
        )
        if self.query_rank is None:
            rows += hub.of_layers(over, ("self_attn.q_proj.weight", "attn.q.w", "(N C) D -> D N C"))
        else:
            rows += hub.of_layers(
                over,
                ("self_attn.q_a_proj.weight", "attn.q_down.w", "Q D -> D Q"),
                ("self_attn.q_a_layernorm.weight", "attn.q_norm.scale", "Q -> Q"),
                ("self_attn.q_b_proj.weight", "attn.q_up.w", "(N C) Q -> Q N C"),
            )
        if self.attention_bias:
            rows.append(both("kv_a_proj_with_mqa.bias", ("kv_down.b", "k_rope.b"), "(R|P) -> R, P"))
            rows += hub.of_layers(over, ("self_attn.o_proj.bias", "attn.o.b", "D -> D"))
        if self.attention_bias and self.query_rank:
            rows += hub.of_layers(over, ("self_attn.q_a_proj.bias", "attn.q_down.b", "Q -> Q"))
        return rows

    def _expert_rows(self, over: range) -> list[Row]:
        rows = hub.of_layers(over, ("mlp.gate.weight", "mlp.router.w", "E D -> D E")) + hub.experts(over)
        if self.moe.bias:
            rows += hub.of_layers(over, ("mlp.gate.e_score_correction_bias", "mlp.bias", "E -> E"))
        return rows + (hub.glu(over, "mlp.shared_experts", "mlp.shared", "shared") if self.moe.shared else [])

    def _mtp_rows(self, d: int) -> list[Row]:
        """They count it among the layers, after the last."""
        theirs = f"model.layers.{self.layers + d}."

        def renamed(row: Row) -> Row:
            paths = (row.ours,) if isinstance(row.ours, str) else row.ours
            paths = tuple(path.replace("layers.{l}", f"mtp.{d}.block") for path in paths)
            return replace(row, theirs=str(row.theirs).replace(hub.LAYER, theirs), ours=paths, over=None)

        once = range(1)
        return [
            Row(f"{theirs}enorm.weight", f"mtp.{d}.embed_norm.scale", "D -> D"),
            Row(f"{theirs}hnorm.weight", f"mtp.{d}.hidden_norm.scale", "D -> D"),
            Row(f"{theirs}eh_proj.weight", f"mtp.{d}.proj.w", "D twice -> twice D"),
            Row(f"{theirs}shared_head.norm.weight", f"mtp.{d}.norm.scale", "D -> D"),
            *map(renamed, self._attention_rows(once) + self._expert_rows(once)),
        ]

    def fitted(self, names: Collection[str]) -> "DeepSeekConfig":
        """transformers writes the key of `mtp` and not its tensors."""
        there = any(name.startswith(f"model.layers.{self.layers}.") for name in names)
        return self if there else self._alone()

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "DeepSeekConfig":
        kind = config["model_type"]
        if "num_mtp_layers" in config:  # transformers 5 writes this name, and reads both
            config = {"num_nextn_predict_layers": config["num_mtp_layers"]} | config
        read = TABLES[kind].read(config)
        if config.get("num_key_value_heads") not in (None, read["heads"]):
            raise BadInput("config.json: latent attention has as many `num_key_value_heads` as `num_attention_heads`")
        said = dict(TABLES[kind].defaults) | config
        moe = read["moe"] | EXPERTS[kind] | {"shared": (said["n_shared_experts"] or 0) * read["moe"]["ffn"]}
        if said.get("topk_method") == "greedy":
            moe |= {"groups": 1, "kept_groups": 1}
        pairs = "halves" if said.get("rope_interleave") is False else "interleaved"
        return cls(**read | {"moe": moe}, rope=Rope(**read_rope(config), pairs=pairs))

    def to_hub(self) -> dict[str, Any]:
        """V2 if experts are scored by softmax, else V3."""
        kind = "deepseek_v2" if self.moe.score == "softmax" else "deepseek_v3"
        said = {"model_type": kind, "architectures": [ARCHITECTURES[kind]]} | TABLES[kind].write(self)
        said |= {"num_key_value_heads": self.heads, "n_shared_experts": self.moe.shared // self.moe.ffn or None}
        said |= {"moe_layer_freq": 1, "head_dim": self.rope_size}
        if kind == "deepseek_v2":
            method = "greedy" if self.moe.groups == 1 else "group_limited_greedy"
            return self.agreed(said | {"topk_method": method, "scoring_func": "softmax"} | write_rope(self.rope))
        said |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_mtp_layers": self.mtp}
        return self.agreed(said | {"rope_interleave": self.rope.pairs == "interleaved"} | write_rope(self.rope))


class DeepSeek(Decoder):
    """A `Decoder` that may also predict further ahead."""

    def __init__(
        self, config: DeepSeekConfig, block: Callable[[str], PreNorm], norm: Callable[[], nnx.Module], run: Run
    ):
        reach = Reach(None, config.rope)
        plan = [Layer("dense" if i < config.dense else "experts", reach) for i in range(config.layers)]
        super().__init__(config, plan, block, norm(), run)
        self.mtp = Ahead(config.mtp, lambda: Depth(config.width, block("experts"), reach, norm)) if config.mtp else None

    def ahead(
        self, depth: int, x: Float[Array, "B T D"], tokens: Int[Array, "B T"], attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, dict[str, Array]]:
        """What the head reads to predict the token `depth` + 1 after each: as `hidden`, but what one layer told.

        Args:
            depth: from 1 to `config.mtp`.
            x: what the head reads for a token less: from `hidden`, or from `ahead` of the depth before.
            tokens: for each of x, the token `depth` after it.
        """
        return getattr(self.mtp, str(depth - 1))(x, self.embedded(tokens, attend), attend, cache)


ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
ROWS = [
    *(row for row in SIZES if row[1] not in ("kv_heads", "head_size")),
    ("qk_nope_head_dim", "head_size"),
    ("qk_rope_head_dim", "rope_size"),
    ("v_head_dim", "value_size"),
    ("kv_lora_rank", "latent_rank"),
    ("q_lora_rank", "query_rank"),
    ("attention_bias", "attention_bias"),
    ("first_k_dense_replace", "dense"),
    ("n_routed_experts", "moe.count"),
    ("num_experts_per_tok", "moe.active"),
    ("moe_intermediate_size", "moe.ffn"),
    ("routed_scaling_factor", "moe.scale"),
    ("n_group", "moe.groups"),
    ("topk_group", "moe.kept_groups"),
]
# Read above (the first three), follow from other sizes, tell how it was trained and on how many devices.
HARMLESS = frozenset(
    """num_key_value_heads n_shared_experts topk_method head_dim qk_head_dim num_local_experts output_router_logits ep_size
    aux_loss_alpha seq_aux num_mtp_layers""".split()  # noqa: SIM905
)
V2 = ConfigTable(
    ROWS,
    {
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "q_lora_rank": 1536,
        "topk_method": "greedy",
    },
    # transformers never reads norm_topk_prob, DeepSeek's own code does; no published V2 sets it.
    {
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "moe_layer_freq": (1,),
        "mlp_bias": (False, None),
        "num_nextn_predict_layers": (0, None),
    },
    HARMLESS,
)
V3 = ConfigTable(
    [*ROWS, ("norm_topk_prob", "moe.normalized"), ("num_nextn_predict_layers", "mtp")],
    {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
    },
    {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    HARMLESS | {"rope_interleave"},
)
TABLES = {"deepseek_v2": V2, "deepseek_v3": V3, "kimi_k2": V3}
# What no key of config.json tells, because the architecture fixes it.
SIGMOID: dict[str, Any] = {"score": "sigmoid", "group_strength": "top2", "bias": True}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"score": "softmax", "normalized": False, "group_strength": "max"},
    "deepseek_v3": SIGMOID,
    "kimi_k2": SIGMOID,
}
