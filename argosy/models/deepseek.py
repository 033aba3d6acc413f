"""DeepSeek V2, V2-Lite, V3, R1 and V3.2, and Kimi K2: latent attention, grouped experts beside a shared one, a sparse-attention
indexer, and multi-token prediction.

    h = x + LatentAttention(RMSNorm(x))        y = h + MoE(RMSNorm(h)), in the first layers h + SwiGLU(RMSNorm(h))

V2 scores experts by softmax and a group by its best expert. V3 scores experts by sigmoid and a group by its best two, and a bias
adjusted by load balances experts. V3 is published in FP8, with one scale for each 128 x 128 values. V3.2 has the
indexer (`parts.indexer`).

DeepSeek-AI 2024 (arXiv:2405.04434, 2412.19437), 2025 (arXiv:2501.12948, 2512.02556), Moonshot AI 2025 (arXiv:2507.20534).
B batch, T time, D width, F feed-forward, N heads, H plain and P rotary part of a head, C both, U value size, R and Q ranks of
the latents of keys and of queries, I and J heads and size of the indexer, V vocabulary, E experts, M expert ffn.
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


def block(config: "DeepSeekConfig", kind: str) -> "parts.Block":
    """One layer. kind: "dense" or "experts"."""
    d, bias = config.dims, config.attention_bias
    attention = parts.LatentAttention(d, config.layers, scale=config.scale, bias=bias, index=config.index)
    experts = kind == "experts"
    mlp = parts.MoE(d, config.moe, config.activation) if experts else parts.GLU(d, config.activation)
    return parts.Block(attention, mlp, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class DeepSeekConfig(FamilyConfig):
    """DeepSeek V2, V3, R1, V3.2 (arXiv:2405.04434, 2412.19437, 2501.12948, 2512.02556) and Kimi K2 (arXiv:2507.20534)."""

    hub_types: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
    moe_parts: ClassVar[frozenset[str]] = frozenset(["shared", "bias"])
    make: ClassVar[Any] = block

    ffn: int = Field(gt=0)
    """Width of the feed-forward layer F, in layers without experts."""
    heads: int = Field(gt=0)
    """Heads N."""
    head_size: int = Field(gt=0)
    """Size of the part of a query or key head without rotary positions, H."""
    rope_size: int = Field(gt=0, multiple_of=2)
    """Size of the part with rotary positions, P; all key heads share it."""
    value_size: int = Field(gt=0)
    """Size of a value head U."""
    latent_rank: int = Field(gt=0)
    """Size of the latent from which keys and values are projected, R."""
    query_rank: int | None = Field(None, gt=0)
    """Size of the latent from which queries are projected, Q. None: they are projected from the residual stream."""
    attention_bias: bool = False
    """Adds biases to the projections to latents and to the output projection."""
    rope: Rope = Rope(pairs="interleaved")
    """Rotary positions."""
    norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square in RMSNorm. Norms over latents always use 1e-6."""
    activation: Activation = "silu"
    """Activation of the gate, in the feed-forward layer and in experts."""
    index: Index | None = None
    """The indexer that selects the tokens to attend to. None: attention is over all earlier tokens."""
    moe: Experts
    """The experts."""
    dense: int = Field(1, ge=0)
    """Number of first layers with a feed-forward layer instead of experts."""
    mtp: int = Field(0, ge=0, le=16)
    """Number of modules for multi-token prediction, each for one more token ahead. They are used in training and for drafting,
    and not for logits."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "DeepSeekConfig":
        if self.dense >= self.layers:
            raise ValueError(f"dense = {self.dense} of {self.layers} layers leaves none with experts")
        if self.rope.part < 1:
            raise ValueError(f"rope.part = {self.rope.part}: rotary positions must apply to all of rope_size")
        if self.index is not None and self.query_rank is None:
            raise ValueError("the indexer projects from the latent of queries: set query_rank")
        if self.index is not None and self.index.size < self.rope_size:
            raise ValueError(f"index.size = {self.index.size}: smaller than rope_size = {self.rope_size}")
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
        """Scale of the scores: 1/sqrt(C), times the square of YaRN's sharpening if `mscale_all_dim` is set."""
        yarn = self.rope.scaling if isinstance(self.rope.scaling, Yarn) else None
        sharper = yarn.sharpening(yarn.mscale_all_dim) if yarn and yarn.mscale_all_dim else 1.0
        return (self.head_size + self.rope_size) ** -0.5 * sharper**2

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """The module. The first layers are dense, the others have experts."""
        from argosy.models.blocks.deepseek import DeepSeek

        return DeepSeek(self, self.make, partial(parts.RMSNorm, self.width, self.norm_eps), run)

    def parameters(self, active: bool = False) -> int:
        """Includes the `mtp` modules, except for `active`: logits do not use them."""
        return super().parameters(active) if not (active and self.mtp) else self._alone().parameters(active)

    def flops(self, tokens: int) -> int:
        """As for every family; the `mtp` modules are not included."""
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
        """FLOPs of the indexer's scores, which are skipped for rows no longer than `topk`."""
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
        """Rows of one `mtp` module. The Hub stores it as a layer after the last."""
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
        """Without `mtp` if its tensors are missing: transformers writes its key, but not its tensors."""
        there = any(name.startswith(f"model.layers.{self.layers}.") for name in names)
        return self if there else self._alone()

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "DeepSeekConfig":
        kind = config["model_type"]
        # Transformers 5 writes this key and reads both.
        if "num_mtp_layers" in config:
            config = {"num_nextn_predict_layers": config["num_mtp_layers"]} | config
        read = TABLES[kind].read(config)
        if config.get("num_key_value_heads") not in (None, read["heads"]):
            raise BadInput("config.json: latent attention has as many `num_key_value_heads` as `num_attention_heads`")
        written = dict(TABLES[kind].defaults) | config
        moe = read["moe"] | EXPERTS[kind] | {"shared": (written["n_shared_experts"] or 0) * read["moe"]["ffn"]}
        if written.get("topk_method") == "greedy":
            moe |= {"groups": 1, "kept_groups": 1}
        read |= _read_layer_lists(config, read["layers"])
        pairs = "halves" if written.get("rope_interleave") is False else "interleaved"
        return cls(**read | {"moe": moe}, rope=Rope(**read_rope(config), pairs=pairs))

    def to_hub(self) -> dict[str, Any]:
        """V2 if experts are scored by softmax, V3.2 if there is an indexer, otherwise V3."""
        kind = "deepseek_v2" if self.moe.score == "softmax" else "deepseek_v32" if self.index else "deepseek_v3"
        written = {"model_type": kind, "architectures": [ARCHITECTURES[kind]]} | TABLES[kind].write(self)
        written |= {"num_key_value_heads": self.heads, "n_shared_experts": self.moe.shared // self.moe.ffn or None}
        written |= {"moe_layer_freq": 1, "head_dim": self.rope_size}
        if kind == "deepseek_v2":
            method = "greedy" if self.moe.groups == 1 else "group_limited_greedy"
            return self.agreed(written | {"topk_method": method, "scoring_func": "softmax"} | write_rope(self.rope))
        written |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_mtp_layers": self.mtp}
        if kind == "deepseek_v3":
            written |= {"rope_interleave": self.rope.pairs == "interleaved"}
        return self.agreed(written | write_rope(self.rope))


def _read_layer_lists(config: dict[str, Any], layers: int) -> dict[str, int]:
    """Reads transformers' lists of layer kinds: all layers have the indexer, and the first ones have no experts."""
    attention, mlp = (config.get(name) for name in ("layer_types", "mlp_layer_types"))
    if attention is not None and not _is(attention, layers, [INDEXED]):
        raise BadInput(f"config.json: `layer_types`: only {layers} times {INDEXED} is built")
    if mlp is None:
        return {}
    if not _is(mlp, layers, ["dense", "sparse"]):
        raise BadInput(f"config.json: `mlp_layer_types`: only {layers} layers, dense ones before sparse ones, are built")
    return {"dense": mlp.count("dense")}


def _is(kinds: Any, layers: int, order: list[str]) -> bool:
    """Whether this is a list of `layers` kinds in this order."""
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
# The first three are read above; the others follow from other sizes, or describe training.
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
    # The indexer's rotary pairs are halves, those of attention are interleaved.
    {**V3.fixed, "mlp_bias": (False, None), "rope_interleave": (True, None), "indexer_rope_interleave": (False, None)},
    HARMLESS | {"mlp_layer_types", "layer_types"},
)
TABLES = {"deepseek_v2": V2, "deepseek_v3": V3, "deepseek_v32": V32, "kimi_k2": V3}
# Facts that the architecture fixes and no key of config.json states.
SIGMOID: dict[str, Any] = {"score": "sigmoid", "group_strength": "top2", "bias": True}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"score": "softmax", "normalized": False, "group_strength": "max"},
    "deepseek_v3": SIGMOID,
    "deepseek_v32": SIGMOID,
    "kimi_k2": SIGMOID,
}
