"""DeepSeek V2, V2-Lite, V3, R1 and V3.2, and Kimi K2: latent attention, experts in groups beside a shared one, an index that
picks what is attended to, and a module that predicts a token further ahead.

    h = x + LatentAttention(RMSNorm(x))        y = h + MoE(RMSNorm(h)), in the first layers h + SwiGLU(RMSNorm(h))

V2 scores experts by softmax and judges a group by its best; V3 scores by sigmoid, judges a group by its best two, and a bias
moved by load keeps experts even. V3 is published in FP8, a scale for each 128 x 128 values. V3.2 has the
index (`parts.indexer`).

DeepSeek-AI 2024 (arXiv:2405.04434, 2412.19437), 2025 (arXiv:2501.12948, 2512.02556), Moonshot AI 2025 (arXiv:2507.20534).
B batch, T time, D width, F feed-forward, N heads, H plain and P rotary part of a head, C both, U value size, R and Q ranks of
the latents of keys and of queries, I and J heads and size of the index, V vocabulary, E experts, M expert ffn.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.errors import BadInput
from argosy.core.keymap import Row
from argosy.models import hub_rows as hub
from argosy.models import parts
from argosy.models.family import FamilyConfig
from argosy.models.hub_config import SIZES, ConfigTable, read_rope, write_rope
from argosy.models.settings import Activation, Experts, Index, Rope, Yarn


def block(config: "DeepSeekConfig", kind: str) -> "parts.PreNorm":
    """One layer. kind: "dense" or "experts"."""
    d, bias = config.dims, config.attention_bias
    attention = parts.LatentAttention(d, config.layers, scale=config.scale, bias=bias, index=config.index)
    experts = kind == "experts"
    mlp = parts.MoE(d, config.moe, config.activation) if experts else parts.GLU(d, config.activation)
    return parts.PreNorm(attention, mlp, partial(parts.RMSNorm, config.width, config.norm_eps))


class DeepSeekConfig(FamilyConfig):
    """DeepSeek V2, V3, R1, V3.2 (arXiv:2405.04434, 2412.19437, 2501.12948, 2512.02556) and Kimi K2 (arXiv:2507.20534)."""

    hub_types: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
    moe_parts: ClassVar[frozenset[str]] = frozenset(["shared", "bias"])

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
    index: Index | None = None
    """Picks the tokens that are attended to; all that are seen unless told."""
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
        if self.index is not None and self.query_rank is None:
            raise ValueError("index asks with the latent of queries: set query_rank")
        if self.index is not None and self.index.size < self.rope_size:
            raise ValueError(f"index.size = {self.index.size}: of its heads rope_size = {self.rope_size} features turn")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "ffn": 70, "heads": 4, "context": 200}
        sizes: dict[str, Any] = {"head_size": 10, "rope_size": 6, "value_size": 9, "latent_rank": 14}
        grouped: dict[str, Any] = {"normalized": False, "groups": 3, "kept_groups": 2, "group_strength": "max"}
        yarn = Yarn(factor=8, original=16, mscale=0.707, mscale_all_dim=1.3)
        sigmoid: dict[str, Any] = {"score": "sigmoid", "bias": True, "scale": 2.5, "groups": 4, "kept_groups": 2}
        third: dict[str, Any] = {
            **odd | sizes | {"heads": 3, "latent_rank": 8},
            "query_rank": 15,
            "attention_bias": True,
            "mtp": 1,
            "moe": Experts(count=8, active=3, ffn=26, shared=26, **sigmoid),
        }
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
            "3": cls(**third, layers=5, dense=2, rope=Rope(scaling=yarn)),
            "3.2": cls(
                **third,
                layers=3,
                rope=Rope(pairs="interleaved", scaling=yarn),
                index=Index(heads=7, size=11, topk=9),
            ),
        }

    @property
    def dims(self) -> dict[str, int]:
        sizes = {"D": self.width, "F": self.ffn, "N": self.heads, "H": self.head_size, "P": self.rope_size}
        sizes |= {"C": self.head_size + self.rope_size, "U": self.value_size, "R": self.latent_rank, "V": self.vocab}
        sizes |= {"E": self.moe.count, "M": self.moe.ffn, "shared": self.moe.shared, "twice": 2 * self.width}
        sizes |= {} if self.query_rank is None else {"Q": self.query_rank}
        return sizes if self.index is None else sizes | {"I": self.index.heads, "J": self.index.size}

    @property
    def scale(self) -> float:
        """Of the scores: 1/sqrt(C), times the square of YaRN's sharpening where that is told to act on all of a head."""
        yarn = self.rope.scaling if isinstance(self.rope.scaling, Yarn) else None
        sharper = yarn.sharpening(yarn.mscale_all_dim) if yarn and yarn.mscale_all_dim else 1.0
        return (self.head_size + self.rope_size) ** -0.5 * sharper**2

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """The module. The first layers are dense, the others have experts."""
        from argosy.models.blocks.deepseek import DeepSeek

        return DeepSeek(self, partial(block, self), partial(parts.RMSNorm, self.width, self.norm_eps), run)

    def parameters(self, active: bool = False) -> int:
        """Those of `mtp` among them, unless it is asked what a token meets on its way to logits."""
        return super().parameters(active) if not (active and self.mtp) else self._alone().parameters(active)

    def flops(self, tokens: int) -> int:
        """As of every family; without `mtp`."""
        return self._alone().flops(tokens) if self.mtp else super().flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        met = self.heads * (self.head_size + self.rope_size + self.value_size)
        return 2 * tokens * tokens * met * self.layers + self._index_flops(tokens)

    def choosing_flops(self, tokens: int) -> int:
        if self.index is None:
            return 0
        how, d = self.index, self.dims
        weights = d["Q"] * how.heads * how.size + self.width * (how.size + how.heads)
        return 2 * tokens * weights * self.layers + self._index_flops(tokens)

    def _index_flops(self, tokens: int) -> int:
        """Of its scores, which a row no longer than what is picked does without."""
        if self.index is None or tokens <= self.index.topk:
            return 0
        return 2 * tokens * tokens * self.index.heads * (self.index.size + 1) * self.layers

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
        return rows + (self._index_rows(over) if self.index else [])

    def _index_rows(self, over: range) -> list[Row]:
        return hub.of_layers(
            over,
            ("self_attn.indexer.wq_b.weight", "attn.index.q.w", "(I J) Q -> Q I J"),
            ("self_attn.indexer.wk.weight", "attn.index.k.w", "J D -> D J"),
            ("self_attn.indexer.k_norm.weight", "attn.index.k_norm.scale", "J -> J"),
            ("self_attn.indexer.k_norm.bias", "attn.index.k_norm.b", "J -> J"),
            ("self_attn.indexer.weights_proj.weight", "attn.index.weigh.w", "I D -> D I"),
        )

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
        read |= _layers_told(config, read["layers"])
        pairs = "halves" if said.get("rope_interleave") is False else "interleaved"
        return cls(**read | {"moe": moe}, rope=Rope(**read_rope(config), pairs=pairs))

    def to_hub(self) -> dict[str, Any]:
        """V2 if experts are scored by softmax, V3.2 if there is an index, else V3."""
        kind = "deepseek_v2" if self.moe.score == "softmax" else "deepseek_v32" if self.index else "deepseek_v3"
        said = {"model_type": kind, "architectures": [ARCHITECTURES[kind]]} | TABLES[kind].write(self)
        said |= {"num_key_value_heads": self.heads, "n_shared_experts": self.moe.shared // self.moe.ffn or None}
        said |= {"moe_layer_freq": 1, "head_dim": self.rope_size}
        if kind == "deepseek_v2":
            method = "greedy" if self.moe.groups == 1 else "group_limited_greedy"
            return self.agreed(said | {"topk_method": method, "scoring_func": "softmax"} | write_rope(self.rope))
        said |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_mtp_layers": self.mtp}
        if kind == "deepseek_v3":
            said |= {"rope_interleave": self.rope.pairs == "interleaved"}
        return self.agreed(said | write_rope(self.rope))


def _layers_told(config: dict[str, Any], layers: int) -> dict[str, int]:
    """What transformers' lists of kinds of layers say: that all have the index, and which of them have experts."""
    attention, mlp = (config.get(name) for name in ("layer_types", "mlp_layer_types"))
    if attention is not None and not _is(attention, layers, [INDEXED]):
        raise BadInput(f"config.json: `layer_types`: only {layers} times {INDEXED} is built")
    if mlp is None:
        return {}
    if not _is(mlp, layers, ["dense", "sparse"]):
        raise BadInput(f"config.json: `mlp_layer_types`: only dense layers and then sparse ones, {layers}, are built")
    return {"dense": mlp.count("dense")}


def _is(kinds: Any, layers: int, order: list[str]) -> bool:
    """Whether this lists so many layers, of these kinds in this order."""
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in order for kind in kinds):
        return False
    return kinds == sorted(kinds, key=order.index)


INDEXED = "indexed_attention"
ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
}
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
V32 = ConfigTable(
    [*V3.rows, ("index_n_heads", "index.heads"), ("index_head_dim", "index.size"), ("index_topk", "index.topk")],
    {
        **V3.defaults,
        "max_position_embeddings": 163840,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    # The index turns in halves, attention in neighbours.
    {**V3.fixed, "mlp_bias": (False, None), "rope_interleave": (True, None), "indexer_rope_interleave": (False, None)},
    HARMLESS | {"mlp_layer_types", "layer_types"},
)
TABLES = {"deepseek_v2": V2, "deepseek_v3": V3, "deepseek_v32": V32, "kimi_k2": V3}
# What no key of config.json tells, because the architecture fixes it.
SIGMOID: dict[str, Any] = {"score": "sigmoid", "group_strength": "top2", "bias": True}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"score": "softmax", "normalized": False, "group_strength": "max"},
    "deepseek_v3": SIGMOID,
    "deepseek_v32": SIGMOID,
    "kimi_k2": SIGMOID,
}
