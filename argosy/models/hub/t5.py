"""T5's and UMT5's encoders on the Hub: config.json and tensor names (`models.t5` has the equations).

Folders with encoder and decoder can be read too. The decoder is ignored, with a warning.
"""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import ConfigTable

TABLE_OF = "layer.0.SelfAttention.relative_attention_bias.weight"
# The feed-forward layers that transformers knows, by name, and our settings of each.
FEED_FORWARDS = {
    "gated-gelu": (True, "gelu_tanh"),
    "gated-silu": (True, "silu"),
    "relu": (False, "relu"),
    "gelu": (False, "gelu"),
}


class T5Hub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("t5", "umt5")
    hub_left_out: ClassVar[tuple[str, ...]] = ("decoder.*", "lm_head.*")

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        rows = [
            KeyRow("shared.weight", "embed.w", "V D -> V D", tied_to="encoder.embed_tokens.weight"),
            KeyRow("encoder.final_layer_norm.weight", "norm.scale", "D -> D"),
        ]
        if self.shared_bias:
            rows.append(KeyRow(f"encoder.block.0.{TABLE_OF}", "bias.w", "A N -> A N"))
        bias_rows = [] if self.shared_bias else [(TABLE_OF, "bias.w", "A N -> A N")]
        up = [("wi_0", "gate"), ("wi_1", "up")] if self.gated else [("wi", "up")]
        rows += hub.of_layers(
            range(self.layers),
            ("layer.0.SelfAttention.q.weight", "attn.q.w", "(N H) D -> D N H"),
            ("layer.0.SelfAttention.k.weight", "attn.k.w", "(K H) D -> D K H"),
            ("layer.0.SelfAttention.v.weight", "attn.v.w", "(K H) D -> D K H"),
            ("layer.0.SelfAttention.o.weight", "attn.o.w", "D (N H) -> N H D"),
            ("layer.0.layer_norm.weight", "attn_norm.scale", "D -> D"),
            *((f"layer.1.DenseReluDense.{theirs}.weight", f"mlp.{ours}.w", "F D -> D F") for theirs, ours in up),
            ("layer.1.DenseReluDense.wo.weight", "mlp.down.w", "D F -> F D"),
            ("layer.1.layer_norm.weight", "mlp_norm.scale", "D -> D"),
            *bias_rows,
            prefix="encoder.block.{l}.",
        )
        return rows, self.dims

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        kind = config.get("feed_forward_proj", "relu")
        if kind not in FEED_FORWARDS:
            raise BadInput(f"config.json: `feed_forward_proj` = {kind!r} is not built", hint=f"built are {', '.join(FEED_FORWARDS)}")
        gated, activation = FEED_FORWARDS[kind]
        more = {"gated": gated, "activation": activation, "shared_bias": config["model_type"] == "t5"}
        return cls(**{"context": 512} | read | more)

    def to_hub(self: Any) -> dict[str, Any]:
        kinds = {feed_forward: name for name, feed_forward in FEED_FORWARDS.items()}
        kind, names = ("t5", "T5EncoderModel") if self.shared_bias else ("umt5", "UMT5EncoderModel")
        proj = kinds.get((self.gated, self.activation), f"{'gated-' * self.gated}{self.activation}")
        config = {"model_type": kind, "architectures": [names], "feed_forward_proj": proj}
        # The values that transformers writes for an encoder without a decoder.
        config["is_encoder_decoder"] = kind == "umt5"
        return self.agreed(config | TABLE.write(self))


TABLE = ConfigTable(
    [
        ("vocab_size", "vocab"),
        ("d_model", "width"),
        ("d_ff", "ffn"),
        ("d_kv", "head_size"),
        ("num_layers", "layers"),
        ("num_heads", "heads"),
        ("relative_attention_num_buckets", "buckets"),
        ("relative_attention_max_distance", "distance"),
        ("layer_norm_epsilon", "norm_eps"),
        ("n_positions", "context"),
    ],
    defaults={
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
    },
    harmless=frozenset(
        """classifier_dropout dense_act_fn dropout_rate feed_forward_proj initializer_factor is_gated_act num_decoder_layers
        scalable_attention tie_word_embeddings tokenizer_class output_past scale_decoder_outputs""".split()  # noqa: SIM905
    ),
)
