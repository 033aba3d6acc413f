"""Qwen3-Next on the Hub: config.json and tensor names (`models.qwen3_next` has the equations)."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.base.language import shortest_pattern
from argosy.models.hub import rows as hub
from argosy.models.hub.config import SIZES, ConfigTable, read_dense, read_rope, write_rope
from argosy.models.settings import Rope


class Qwen3NextHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    # The modules for multi-token prediction, which config.json does not mention.
    hub_left_out: ClassVar[tuple[str, ...]] = ("mtp.*",)

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows, and the size of each axis in them. Lower-case letters are axes of the delta net."""
        layers = range(self.layers)
        recurrent, full = ([i for i in layers if self.spans[i] == span] for span in "RG")
        dense, sparse = ([i for i in layers if (i in self.dense) == is_dense] for is_dense in (True, False))
        rows = hub.norms(layers, hub.PRE_NORMS) + _attention(full, self.attention_bias) + _delta_net(recurrent)
        rows += hub.glu(dense) + hub.experts(sparse) + hub.glu(sparse, "mlp.shared_expert", "mlp.shared", "shared")
        rows += hub.of_layers(
            sparse,
            ("mlp.gate.weight", "mlp.router.w", "E D -> D E"),
            ("mlp.shared_expert_gate.weight", "mlp.shared_gate.w", "1 D -> D 1"),
        )
        sizes = self.dims | {letter.lower(): size for letter, size in self.delta.dims.items()}
        return rows + hub.ends(self.tied, scores=self.scores), sizes

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        read["moe"] |= {"shared_gate": True}
        rope = Rope(**read_rope(config, partial=0.25))
        return cls(
            **read,
            dense=read_dense(config, read["layers"]),
            rope=rope,
            pattern=shortest_pattern(_spans(config, read["layers"])),
        )

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns config.json as transformers writes it, always with the share of a head that rotary positions apply to."""
        config = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]} | TABLE.write(self)
        config |= {"num_key_value_heads": self.K, "head_dim": self.H} | write_rope(self.rope)
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(self.dense)}
        config |= {"partial_rotary_factor": self.rope.part}
        config["rope_parameters"] |= {"partial_rotary_factor": self.rope.part}
        names = {span: kind for kind, span in KINDS.items()}
        return self.agreed(config | {"layer_types": [names[span] for span in self.spans]})


def _spans(config: dict[str, Any], layers: int) -> str:
    """Reads R (recurrent) or G (attention) for each layer, from `layer_types`. Without that list, every n-th layer is G."""
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.get("full_attention_interval", 4)
        return "".join("R" if (i + 1) % every else "G" for i in range(layers))
    if unknown := sorted(set(map(str, kinds)) - set(KINDS)):
        raise BadInput(f"config.json: layers of kind {', '.join(unknown)} are not built for this family")
    if len(kinds) != layers:
        raise BadInput(f"config.json: {len(kinds)} layer_types for {layers} layers")
    return "".join(KINDS[kind] for kind in kinds)


def _attention(layers: list[int], bias: bool) -> list[KeyRow]:
    """Returns the rows of gated attention. In their tensor, each query head is followed by its output gate."""

    def both(theirs: str, kind: str, reading: str) -> KeyRow:
        return KeyRow(hub.LAYER + theirs, (f"layers.{{l}}.attn.q.{kind}", f"layers.{{l}}.attn.gate.{kind}"), reading, layers)

    rows = [row for row in hub.attention_key_rows(layers, bias=bias, out_bias=bias) if not str(row.paths).startswith(QUERY)]
    rows += [both("self_attn.q_proj.weight", "w", "(N (H|H)) D -> D N H, D N H"), *hub.head_norms(layers)]
    return rows + ([both("self_attn.q_proj.bias", "b", "(N (H|H)) -> N H, N H")] if bias else [])


def _delta_net(layers: list[int]) -> list[KeyRow]:
    """Returns the rows of a delta net. Their tensors are fused by key head: its query, its key, and the values and gates of its value
    heads."""

    def fused(theirs: str, ours: tuple[str, ...], reading: str) -> KeyRow:
        return KeyRow(hub.LAYER + theirs, tuple(f"layers.{{l}}.attn.{name}" for name in ours), reading, layers)

    return [
        fused(
            "linear_attn.in_proj_qkvz.weight",
            ("q.w", "k.w", "v.w", "z.w"),
            "(k (h|h|g u|g u)) D -> D k h, D k h, D k g u, D k g u",
        ),
        fused("linear_attn.in_proj_ba.weight", ("b.w", "a.w"), "(k (g|g)) D -> D k g, D k g"),
        fused(
            "linear_attn.conv1d.weight",
            ("q_taps", "k_taps", "v_taps"),
            "(k h|k h|k g u) 1 w -> k h w, k h w, k g u w",
        ),
        *hub.of_layers(
            layers,
            ("linear_attn.A_log", "attn.a_log", "(k g) -> k g"),
            ("linear_attn.dt_bias", "attn.dt", "(k g) -> k g"),
            ("linear_attn.norm.weight", "attn.norm.scale", "u -> u"),
            ("linear_attn.out_proj.weight", "attn.o.w", "D (k g u) -> k g u D"),
        ),
    ]


KINDS = {"linear_attention": "R", "full_attention": "G"}
QUERY = "layers.{l}.attn.q."
TABLE = ConfigTable(
    [
        *SIZES,
        ("attention_bias", "attention_bias"),
        ("linear_num_key_heads", "delta.key_heads"),
        ("linear_num_value_heads", "delta.value_heads"),
        ("linear_key_head_dim", "delta.key_size"),
        ("linear_value_head_dim", "delta.value_size"),
        ("linear_conv_kernel_dim", "delta.taps"),
        ("num_experts", "moe.count"),
        ("num_experts_per_tok", "moe.active"),
        ("moe_intermediate_size", "moe.ffn"),
        ("shared_expert_intermediate_size", "moe.shared"),
        ("norm_topk_prob", "moe.normalized"),
        ("router_aux_loss_coef", "moe.balance"),
    ],
    {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    {"hidden_act": ("silu",), "use_sliding_window": (False, None)},
    frozenset(
        [
            "decoder_sparse_step",
            "full_attention_interval",
            "layer_types",
            "mlp_only_layers",
            "output_router_logits",
            "sliding_window",
        ]
    ),
)
