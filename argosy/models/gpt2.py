"""GPT-2: learned positions, LayerNorm, biases everywhere.

    h = x + Attention(LayerNorm(x))        y = h + MLP(LayerNorm(h))

Radford et al. 2019 (Language models are unsupervised multitask learners). On the Hub its matrices are [in, out], queries, keys
and values are fused, and names may begin with `transformer.`.
B batch, T time, D width, F feed-forward, N heads, H head size, V vocabulary, A positions.
"""

from functools import partial
from typing import Any, ClassVar

from argosy.core.keymap import Row
from argosy.models import hub_rows as hub
from argosy.models import parts
from argosy.models.family import AbsoluteConfig
from argosy.models.hub_config import ConfigTable
from argosy.models.settings import Activation, Reach


def block(config: "GPT2Config", kind: str) -> "parts.Block":
    """One layer. All layers are of one kind."""
    attention = parts.Attention(config.dims, config.layers, bias=True, out_bias=True)
    mlp = parts.MLP(config.dims, config.activation)
    return parts.Block(attention, mlp, pre=partial(parts.LayerNorm, config.width, config.norm_eps))


class GPT2Config(AbsoluteConfig):
    """GPT-2 (Radford et al. 2019)."""

    hub_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    hub_ignore: ClassVar[tuple[str, ...]] = ("*h.*.attn.bias", "*h.*.attn.masked_bias")
    hub_prefixes: ClassVar[tuple[str, ...]] = ("transformer.",)
    make: ClassVar[Any] = block

    tied: bool = True
    """Uses the embedding as the output head (tied embeddings)."""
    activation: Activation = "gelu_tanh"
    """Activation of the feed-forward layer."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "layers": 3, "ffn": 70, "heads": 4, "context": 90}
        return {"tied": cls(**odd), "untied": cls(**{**odd, "width": 42, "heads": 3}, tied=False, activation="relu")}

    def build(self, run: "parts.Execution | None" = None) -> "parts.Decoder":
        """The module. All layers are equal, without rotary positions."""
        plan = [parts.Layer("block", Reach())] * self.layers
        norm = parts.LayerNorm(self.width, self.norm_eps)
        return parts.Decoder(self, plan, self.make, norm, run, positions=True)

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        over = range(self.layers)
        qkv = [("attn.q", "attn.k", "attn.v"), "((N|K|K) H)"]
        rows = [
            Row("transformer.wte.weight", "embed.w", "V D -> V D", tied_to="lm_head.weight" if self.tied else None),
            Row("transformer.wpe.weight", "positions.w", "A D -> A D"),
            Row(f"{LAYER}attn.c_attn.weight", _each(qkv[0], "w"), f"D {qkv[1]} -> D N H, D K H, D K H", over),
            Row(f"{LAYER}attn.c_attn.bias", _each(qkv[0], "b"), f"{qkv[1]} -> N H, K H, K H", over),
            Row("transformer.ln_f.weight", "norm.scale", "D -> D"),
            Row("transformer.ln_f.bias", "norm.b", "D -> D"),
        ]
        rows += hub.of_layers(
            over,
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
        return rows if self.tied else [*rows, Row("lm_head.weight", "head.w", "V D -> D V")], self.dims

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "GPT2Config":
        read = TABLE.read(config)
        return cls(**{"ffn": 4 * read["width"]} | read)

    def to_hub(self) -> dict[str, Any]:
        """The config.json as transformers writes it."""
        written = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]} | TABLE.write(self)
        if self.activation == "gelu_tanh":
            # The only name that readers from 2019 know.
            written["activation_function"] = "gelu_new"
        return self.agreed(written)


LAYER = "transformer.h.{l}."


def _each(names: tuple[str, ...], what: str) -> tuple[str, ...]:
    return tuple(f"layers.{{l}}.{name}.{what}" for name in names)


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
