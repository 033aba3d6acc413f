"""GPT-2 on the Hub: config.json and tensor names (`models.gpt2` has the equations)."""

from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import ConfigTable


class GPT2Hub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    hub_ignore: ClassVar[tuple[str, ...]] = ("*h.*.attn.bias", "*h.*.attn.masked_bias")
    hub_prefixes: ClassVar[tuple[str, ...]] = ("transformer.",)

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        layers = range(self.layers)
        tied_to = "lm_head.weight" if self.tied and not self.scores else None
        qkv = [("attn.q", "attn.k", "attn.v"), "((N|K|K) H)"]
        rows = [
            KeyRow("transformer.wte.weight", "embed.w", "V D -> V D", tied_to=tied_to),
            KeyRow("transformer.wpe.weight", "positions.w", "A D -> A D"),
            KeyRow(f"{LAYER}attn.c_attn.weight", _layer_paths(qkv[0], "w"), f"D {qkv[1]} -> D N H, D K H, D K H", layers),
            KeyRow(f"{LAYER}attn.c_attn.bias", _layer_paths(qkv[0], "b"), f"{qkv[1]} -> N H, K H, K H", layers),
            KeyRow("transformer.ln_f.weight", "norm.scale", "D -> D"),
            KeyRow("transformer.ln_f.bias", "norm.b", "D -> D"),
        ]
        rows += hub.of_layers(
            layers,
            ("attn.c_proj.weight", "attn.o.w", "(N H) D -> N H D"),
            ("attn.c_proj.bias", "attn.o.b", "D -> D"),
            ("mlp.c_fc.weight", "mlp.up.w", "D F -> D F"),
            ("mlp.c_fc.bias", "mlp.up.b", "F -> F"),
            ("mlp.c_proj.weight", "mlp.down.w", "F D -> F D"),
            ("mlp.c_proj.bias", "mlp.down.b", "D -> D"),
            ("ln_1.weight", "attn_norm.scale", "D -> D"),
            ("ln_1.bias", "attn_norm.b", "D -> D"),
            ("ln_2.weight", "mlp_norm.scale", "D -> D"),
            ("ln_2.bias", "mlp_norm.b", "D -> D"),
            prefix=LAYER,
        )
        if self.scores:
            return [*rows, KeyRow("score.weight", "head.w", "Z D -> D Z")], self.dims
        return rows if self.tied else [*rows, KeyRow("lm_head.weight", "head.w", "V D -> D V")], self.dims

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        return cls(**{"ffn": 4 * read["width"]} | read)

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns config.json as transformers writes it."""
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]} | TABLE.write(self)
        if self.activation == "gelu_tanh":
            # Readers from 2019 know the activation by this name only.
            config["activation_function"] = "gelu_new"
        return self.agreed(config)


LAYER = "transformer.h.{l}."


def _layer_paths(names: tuple[str, ...], leaf: str) -> tuple[str, ...]:
    return tuple(f"layers.{{l}}.{name}.{leaf}" for name in names)


TABLE = ConfigTable(
    [
        ("vocab_size", "vocab"),
        ("n_embd", "width"),
        ("n_inner", "ffn"),
        ("n_layer", "layers"),
        ("n_head", "heads"),
        ("n_positions", "context"),
        ("layer_norm_epsilon", "norm_eps"),
        ("activation_function", "activation"),
        ("tie_word_embeddings", "tied"),
    ],
    defaults={"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
    fixed={
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    },
    harmless=frozenset(
        """attn_pdrop embd_pdrop resid_pdrop gradient_checkpointing n_ctx reorder_and_upcast_attn summary_activation
        summary_first_dropout summary_proj_to_labels summary_type summary_use_proj""".split()  # noqa: SIM905
    ),
)
