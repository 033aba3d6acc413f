"""BERT and RoBERTa, and the sentence encoders made from them: MiniLM, BGE, E5 and other folders of sentence-transformers.

    h = LayerNorm(x + Attention(x))        y = LayerNorm(h + MLP(h))

Every token attends to the whole sequence; no token is predicted. RoBERTa's positions begin after the row of its padding token.
Devlin et
al. 2018 (arXiv:1810.04805), Liu et al. 2019 (arXiv:1907.11692), Conneau et al. 2019 (arXiv:1911.02116), Wang et al. 2020
(MiniLM, arXiv:2002.10957), Reimers and Gurevych 2019 (arXiv:1908.10084). `argosy.load(FOLDER).embed(texts)`: infer.embed.
B batch, T time, D width, F feed-forward, N heads, H head size, V vocabulary, A positions, Y token types, O pooled.
"""

from collections.abc import Collection
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.keymap import Row
from argosy.models import hub_rows as hub
from argosy.models import parts
from argosy.models.family import AbsoluteConfig
from argosy.models.hub_config import ConfigTable
from argosy.models.settings import Reach


def block(config: "BertConfig", kind: str) -> "parts.Block":
    """One layer. All layers are of one kind."""
    attention = parts.Attention(config.dims, config.layers, bias=True, out_bias=True)
    mlp = parts.MLP(config.dims, config.activation)
    return parts.Block(attention, mlp, after=partial(parts.LayerNorm, config.width, config.norm_eps), cached=False)


class BertConfig(AbsoluteConfig):
    """BERT (arXiv:1810.04805) and RoBERTa (arXiv:1907.11692), encoders."""

    hub_types: ClassVar[tuple[str, ...]] = ("bert", "roberta", "xlm-roberta")
    hub_ignore: ClassVar[tuple[str, ...]] = ("*embeddings.position_ids", "*embeddings.token_type_ids")
    hub_prefixes: ClassVar[tuple[str, ...]] = ("bert.", "roberta.")
    hub_unsaid: ClassVar[frozenset[str]] = frozenset(["pooler"])
    hub_left_out: ClassVar[tuple[str, ...]] = ("cls.*", "lm_head.*")
    hub_old_ends: ClassVar[dict[str, str]] = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    causal: ClassVar[bool] = False
    make: ClassVar[Any] = block

    norm_eps: float = Field(1e-12, gt=0)
    """Added to the variance in LayerNorm."""
    types: int = Field(2, gt=0)
    """Number of token types Y."""
    first: int = Field(0, ge=0)
    """Row of the position embedding used for the first token; earlier rows are unused (RoBERTa: 2)."""
    pooler: bool = True
    """Whether there is BERT's projection of the first token; sentence encoders keep it without using it."""

    @model_validator(mode="after")
    def _no_head(self) -> "BertConfig":
        if self.tied:
            raise ValueError("tied = true: an encoder has no head")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "layers": 3, "ffn": 70, "heads": 4, "context": 90}
        return {
            "plain": cls(**odd, pooler=False, types=3, norm_eps=1e-5),
            "pooler": cls(**{**odd, "width": 42, "heads": 3}, first=2, activation="gelu_tanh"),
        }

    @property
    def dims(self) -> dict[str, int]:
        rows = {"A": self.first + self.context, "Y": self.types}
        return super().dims | rows | ({"O": self.width} if self.pooler else {})

    def build(self, run: "parts.Execution | None" = None) -> "parts.Encoder":
        """The module. All layers are equal, without rotary positions."""
        plan = [parts.Layer("block", Reach())] * self.layers
        norm = parts.LayerNorm(self.width, self.norm_eps)
        return parts.Encoder(self, plan, self.make, norm, run, first=self.first, pooler=self.pooler)

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        rows = [
            Row("embeddings.word_embeddings.weight", "embed.w", "V D -> V D"),
            Row("embeddings.position_embeddings.weight", "positions.w", "A D -> A D"),
            Row("embeddings.token_type_embeddings.weight", "types.w", "Y D -> Y D"),
            Row("embeddings.LayerNorm.weight", "embed_norm.scale", "D -> D"),
            Row("embeddings.LayerNorm.bias", "embed_norm.b", "D -> D"),
        ]
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
            prefix="encoder.layer.{l}.",
        )
        if self.pooler:
            rows += [
                Row("pooler.dense.weight", "pooler.w", "O D -> D O"),
                Row("pooler.dense.bias", "pooler.b", "O -> O"),
            ]
        return rows, self.dims

    def fitted(self, names: Collection[str]) -> "BertConfig":
        """The same config, with a pooler if the folder has one."""
        return self.model_copy(update={"pooler": "pooler.dense.weight" in names})

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "BertConfig":
        read = TABLE.read(config)
        if config["model_type"] == "bert":
            return cls(**read)
        first = config.get("pad_token_id", 1) + 1
        return cls(**read | {"first": first, "context": read["context"] - first})

    def to_hub(self) -> dict[str, Any]:
        """The config.json as transformers writes it, plus `has_pooler`, which in transformers is an argument of the class."""
        written = {"model_type": "bert", "architectures": ["BertModel"]} | TABLE.write(self)
        if self.first:
            written |= {"model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": self.first - 1}
            written |= {"max_position_embeddings": self.first + self.context}
        return self.agreed(written)


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
