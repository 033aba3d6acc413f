"""BERT and RoBERTa on the Hub: config.json and tensor names (`models.bert` has the equations)."""

from collections.abc import Collection
from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import ConfigTable


class BertHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("bert", "roberta", "xlm-roberta")
    hub_ignore: ClassVar[tuple[str, ...]] = ("*embeddings.position_ids", "*embeddings.token_type_ids")
    hub_prefixes: ClassVar[tuple[str, ...]] = ("bert.", "roberta.")
    hub_unsaid: ClassVar[frozenset[str]] = frozenset(["pooler"])
    hub_left_out: ClassVar[tuple[str, ...]] = ("cls.*", "lm_head.*")
    hub_old_ends: ClassVar[dict[str, str]] = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        # In folders with a head of scores, the encoder's names have a prefix.
        encoder = "" if not self.scores else "roberta." if self.first else "bert."
        ends = (
            ("embeddings.word_embeddings.weight", "embed.w", "V D -> V D"),
            ("embeddings.position_embeddings.weight", "positions.w", "A D -> A D"),
            ("embeddings.token_type_embeddings.weight", "types.w", "Y D -> Y D"),
            ("embeddings.LayerNorm.weight", "embed_norm.scale", "D -> D"),
            ("embeddings.LayerNorm.bias", "embed_norm.b", "D -> D"),
        )
        rows = [KeyRow(encoder + theirs, ours, reading) for theirs, ours, reading in ends]
        rows += hub.of_layers(
            range(self.layers),
            ("attention.self.query.weight", "attn.q.w", "(N H) D -> D N H"),
            ("attention.self.query.bias", "attn.q.b", "(N H) -> N H"),
            ("attention.self.key.weight", "attn.k.w", "(K H) D -> D K H"),
            ("attention.self.key.bias", "attn.k.b", "(K H) -> K H"),
            ("attention.self.value.weight", "attn.v.w", "(K H) D -> D K H"),
            ("attention.self.value.bias", "attn.v.b", "(K H) -> K H"),
            ("attention.output.dense.weight", "attn.o.w", "D (N H) -> N H D"),
            ("attention.output.dense.bias", "attn.o.b", "D -> D"),
            ("attention.output.LayerNorm.weight", "attn_norm.scale", "D -> D"),
            ("attention.output.LayerNorm.bias", "attn_norm.b", "D -> D"),
            ("intermediate.dense.weight", "mlp.up.w", "F D -> D F"),
            ("intermediate.dense.bias", "mlp.up.b", "F -> F"),
            ("output.dense.weight", "mlp.down.w", "D F -> F D"),
            ("output.dense.bias", "mlp.down.b", "D -> D"),
            ("output.LayerNorm.weight", "mlp_norm.scale", "D -> D"),
            ("output.LayerNorm.bias", "mlp_norm.b", "D -> D"),
            prefix=f"{encoder}encoder.layer.{{l}}.",
        )
        if self.projects:
            pooler = "classifier.dense" if self.scores and self.first else f"{encoder}pooler.dense"
            rows += [KeyRow(f"{pooler}.weight", "pooler.w", "O D -> D O"), KeyRow(f"{pooler}.bias", "pooler.b", "O -> O")]
        if self.scores:
            head = "classifier.out_proj" if self.first else "classifier"
            rows += [KeyRow(f"{head}.weight", "head.w", "Z O -> O Z"), KeyRow(f"{head}.bias", "head.b", "Z -> Z")]
        return rows, self.dims

    def fitted(self: Any, names: Collection[str]) -> Any:
        """Returns the config with a pooler if the folder has one, otherwise without."""
        return self.model_copy(update={"pooler": any(name.endswith("pooler.dense.weight") for name in names)})

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        if config["model_type"] == "bert":
            return cls(**read)
        first = config.get("pad_token_id", 1) + 1
        return cls(**read | {"first": first, "context": read["context"] - first})

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns config.json as transformers writes it, plus `has_pooler`, which in transformers is an argument of the class."""
        config = {"model_type": "bert", "architectures": ["BertModel"]} | TABLE.write(self)
        if self.first:
            config |= {"model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": self.first - 1}
            config |= {"max_position_embeddings": self.first + self.context}
        return self.agreed(config)


TABLE = ConfigTable(
    [
        ("vocab_size", "vocab"),
        ("hidden_size", "width"),
        ("intermediate_size", "ffn"),
        ("num_hidden_layers", "layers"),
        ("num_attention_heads", "heads"),
        ("max_position_embeddings", "context"),
        ("type_vocab_size", "types"),
        ("layer_norm_eps", "norm_eps"),
        ("hidden_act", "activation"),
        ("has_pooler", "pooler"),
    ],
    defaults={
        "vocab_size": 30522,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
    },
    fixed={
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
        "add_cross_attention": (False, None),
    },
    harmless=frozenset(
        """attention_probs_dropout_prob classifier_dropout directionality gradient_checkpointing hidden_dropout_prob
        pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
        tie_word_embeddings""".split()  # noqa: SIM905
    ),
)
