"""DeepSeek on the Hub: config.json and tensor names (`models.deepseek` has the equations)."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import SIZES, ConfigTable, read_rope, write_rope
from argosy.models.settings import Rope


class DeepSeekHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        every, experts = range(self.layers), range(self.dense, self.layers)
        rows = self._attention_rows(every) + self._expert_rows(experts)
        rows += hub.glu(range(self.dense)) if self.dense else []
        for d in range(self.mtp):
            rows += self._mtp_rows(d)
        copies = [f"model.layers.{self.layers + d}." for d in range(self.mtp)]
        embed, *others = hub.ends(self.tied, scores=self.scores)
        rows.append(replace(embed, copies=tuple(f"{at}embed_tokens.weight" for at in copies)))
        heads = () if self.scores else tuple(f"{at}shared_head.head.weight" for at in copies)
        return rows + [replace(row, copies=heads) if row.paths == "head.w" else row for row in others], self.dims

    def _attention_rows(self: Any, layers: range) -> list[KeyRow]:
        def both(theirs: str, ours: tuple[str, str], reading: str) -> KeyRow:
            return KeyRow(f"{hub.LAYER}self_attn.{theirs}", tuple(f"layers.{{l}}.attn.{o}" for o in ours), reading, layers)

        rows = hub.norms(layers, hub.PRE_NORMS)
        rows += [
            both("kv_a_proj_with_mqa.weight", ("kv_down.w", "k_rope.w"), "(R|P) D -> D R, D P"),
            both("kv_b_proj.weight", ("k_up.w", "v_up.w"), "(N (H|U)) R -> R N H, R N U"),
        ]
        rows += hub.of_layers(
            layers,
            ("self_attn.kv_a_layernorm.weight", "attn.kv_norm.scale", "R -> R"),
            ("self_attn.o_proj.weight", "attn.o.w", "D (N U) -> N U D"),
        )
        if self.query_rank is None:
            rows += hub.of_layers(layers, ("self_attn.q_proj.weight", "attn.q.w", "(N C) D -> D N C"))
        else:
            rows += hub.of_layers(
                layers,
                ("self_attn.q_a_proj.weight", "attn.q_down.w", "Q D -> D Q"),
                ("self_attn.q_a_layernorm.weight", "attn.q_norm.scale", "Q -> Q"),
                ("self_attn.q_b_proj.weight", "attn.q_up.w", "(N C) Q -> Q N C"),
            )
        if self.attention_bias:
            rows.append(both("kv_a_proj_with_mqa.bias", ("kv_down.b", "k_rope.b"), "(R|P) -> R, P"))
            rows += hub.of_layers(layers, ("self_attn.o_proj.bias", "attn.o.b", "D -> D"))
        if self.attention_bias and self.query_rank:
            rows += hub.of_layers(layers, ("self_attn.q_a_proj.bias", "attn.q_down.b", "Q -> Q"))
        return rows + (self._index_rows(layers) if self.index else [])

    def _index_rows(self: Any, layers: range) -> list[KeyRow]:
        return hub.of_layers(
            layers,
            ("self_attn.indexer.wq_b.weight", "attn.index.q.w", "(I J) Q -> Q I J"),
            ("self_attn.indexer.wk.weight", "attn.index.k.w", "J D -> D J"),
            ("self_attn.indexer.k_norm.weight", "attn.index.k_norm.scale", "J -> J"),
            ("self_attn.indexer.k_norm.bias", "attn.index.k_norm.b", "J -> J"),
            ("self_attn.indexer.weights_proj.weight", "attn.index.weigh.w", "I D -> D I"),
        )

    def _expert_rows(self: Any, layers: range) -> list[KeyRow]:
        rows = hub.of_layers(layers, ("mlp.gate.weight", "mlp.router.w", "E D -> D E")) + hub.experts(layers)
        if self.moe.bias:
            rows += hub.of_layers(layers, ("mlp.gate.e_score_correction_bias", "mlp.bias", "E -> E"))
        return rows + (hub.glu(layers, "mlp.shared_experts", "mlp.shared", "shared") if self.moe.shared else [])

    def _mtp_rows(self: Any, d: int) -> list[KeyRow]:
        """Returns the rows of module d of multi-token prediction. On the Hub, it is a layer after the last layer."""
        theirs = f"model.layers.{self.layers + d}."

        def renamed(row: KeyRow) -> KeyRow:
            paths = (row.paths,) if isinstance(row.paths, str) else row.paths
            paths = tuple(path.replace("layers.{l}", f"mtp.{d}.block") for path in paths)
            return replace(row, names=str(row.names).replace(hub.LAYER, theirs), paths=paths, layers=None)

        single = range(1)
        return [
            KeyRow(f"{theirs}enorm.weight", f"mtp.{d}.embed_norm.scale", "D -> D"),
            KeyRow(f"{theirs}hnorm.weight", f"mtp.{d}.hidden_norm.scale", "D -> D"),
            KeyRow(f"{theirs}eh_proj.weight", f"mtp.{d}.proj.w", "D twice -> twice D"),
            KeyRow(f"{theirs}shared_head.norm.weight", f"mtp.{d}.norm.scale", "D -> D"),
            *map(renamed, self._attention_rows(single) + self._expert_rows(single)),
        ]

    def fitted(self: Any, names: Collection[str]) -> Any:
        """Returns the config without multi-token prediction if its tensors are missing. transformers writes the key without tensors."""
        has_tensors = any(name.startswith(f"model.layers.{self.layers}.") for name in names)
        return self if has_tensors else self._without_mtp()

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        kind = config["model_type"]
        # transformers 5 writes `num_mtp_layers`, and reads the older key too.
        if "num_mtp_layers" in config:
            config = {"num_nextn_predict_layers": config["num_mtp_layers"]} | config
        read = TABLES[kind].read(config)
        if config.get("num_key_value_heads") not in (None, read["heads"]):
            raise BadInput("config.json: latent attention has as many `num_key_value_heads` as `num_attention_heads`")
        merged = dict(TABLES[kind].defaults) | config
        moe = read["moe"] | EXPERTS[kind] | {"shared": (merged["n_shared_experts"] or 0) * read["moe"]["ffn"]}
        if merged.get("topk_method") == "greedy":
            moe |= {"groups": 1, "kept_groups": 1}
        read |= _read_layer_lists(config, read["layers"])
        pairs = "halves" if merged.get("rope_interleave") is False else "interleaved"
        return cls(**read | {"moe": moe}, rope=Rope(**read_rope(config), pairs=pairs))

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns the config.json of V2 if experts are scored by softmax, of V3.2 if there is an indexer, otherwise of V3."""
        kind = "deepseek_v2" if self.moe.score == "softmax" else "deepseek_v32" if self.index else "deepseek_v3"
        config = {"model_type": kind, "architectures": [ARCHITECTURES[kind]]} | TABLES[kind].write(self)
        config |= {"num_key_value_heads": self.heads, "n_shared_experts": self.moe.shared // self.moe.ffn or None}
        config |= {"moe_layer_freq": 1, "head_dim": self.rope_size}
        if kind == "deepseek_v2":
            method = "greedy" if self.moe.groups == 1 else "group_limited_greedy"
            return self.agreed(config | {"topk_method": method, "scoring_func": "softmax"} | write_rope(self.rope))
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_mtp_layers": self.mtp}
        if kind == "deepseek_v3":
            config |= {"rope_interleave": self.rope.pairs == "interleaved"}
        return self.agreed(config | write_rope(self.rope))


def _read_layer_lists(config: dict[str, Any], layers: int) -> dict[str, int]:
    """Reads transformers' lists of layer kinds. Supported is only an indexer in all layers, and layers without experts before the
    others."""
    attention, mlp = (config.get(name) for name in ("layer_types", "mlp_layer_types"))
    if attention is not None and not _has_order(attention, layers, [INDEXED]):
        raise BadInput(f"config.json: `layer_types`: only {layers} times {INDEXED} is built")
    if mlp is None:
        return {}
    if not _has_order(mlp, layers, ["dense", "sparse"]):
        raise BadInput(f"config.json: `mlp_layer_types`: only {layers} layers, dense ones before sparse ones, are built")
    return {"dense": mlp.count("dense")}


def _has_order(kinds: Any, layers: int, order: list[str]) -> bool:
    """Whether `kinds` is a list of `layers` kinds that are sorted in this order."""
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
# The first three keys are read above. The others follow from other sizes, or describe training.
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
    # transformers never reads norm_topk_prob, but DeepSeek's own code does. No published V2 sets it.
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
    # Rotary pairs are halves in the indexer, and interleaved in attention.
    {**V3.fixed, "mlp_bias": (False, None), "rope_interleave": (True, None), "indexer_rope_interleave": (False, None)},
    HARMLESS | {"mlp_layer_types", "layer_types"},
)
TABLES = {"deepseek_v2": V2, "deepseek_v3": V3, "deepseek_v32": V32, "kimi_k2": V3}
# Settings that the architecture fixes, for which config.json has no key.
SIGMOID: dict[str, Any] = {"score": "sigmoid", "group_strength": "top2", "bias": True}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"score": "softmax", "normalized": False, "group_strength": "max"},
    "deepseek_v3": SIGMOID,
    "deepseek_v32": SIGMOID,
    "kimi_k2": SIGMOID,
}
