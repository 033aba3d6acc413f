"""BERT and RoBERTa, and the sentence encoders made from them: MiniLM, BGE, E5 and other folders of sentence-transformers.

    h = LayerNorm(x + Attention(x))        y = LayerNorm(h + MLP(h))

Every token attends to the whole sequence, and no token is predicted. RoBERTa's positions begin after the row of the padding token. With
`scores`, a head reads the first token: W2 tanh(W1 y + b1) + b2. BERT calls the inner part, tanh(W1 y + b1), its pooler. To embed texts,
call `argosy.load(FOLDER).embed(texts)` (`infer.embed`).

Devlin et al. 2018 (arXiv:1810.04805), Liu et al. 2019 (arXiv:1907.11692), Conneau et al. 2019 (arXiv:1911.02116), Wang et al. 2020
(MiniLM, arXiv:2002.10957), Reimers and Gurevych 2019 (arXiv:1908.10084).
B batch, T time, D width, F feed-forward, N heads, H head size, V vocabulary, A positions, Y token types, O pooled,
Z scores.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.models import parts
from argosy.models.base.language import AbsoluteConfig
from argosy.models.hub.bert import BertHub
from argosy.models.settings import Reach


def block(config: "BertConfig", kind: str) -> "parts.Block":
    """Builds one layer. All layers are of one kind."""
    attention = parts.Attention(config.dims, config.layers, bias=True, out_bias=True)
    mlp = parts.MLP(config.dims, config.activation)
    return parts.Block(attention, mlp, after=partial(parts.LayerNorm, config.width, config.norm_eps), cached=False)


class BertConfig(BertHub, AbsoluteConfig):
    """BERT (arXiv:1810.04805) and RoBERTa (arXiv:1907.11692), encoders."""

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
            raise ValueError("tied = true: an encoder has no head over its vocabulary")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "layers": 3, "ffn": 70, "heads": 4, "context": 90}
        return {
            "plain": cls(**odd, pooler=False, types=3, norm_eps=1e-5),
            "pooler": cls(**{**odd, "width": 42, "heads": 3}, first=2, activation="gelu_tanh"),
        }

    @property
    def projects(self) -> bool:
        """Whether there is a projection of the first token: BERT's pooler, or the first layer of RoBERTa's head of scores."""
        return self.pooler or bool(self.scores)

    @property
    def dims(self) -> dict[str, int]:
        rows = {"A": self.first + self.context, "Y": self.types}
        return super().dims | rows | ({"O": self.width} if self.projects else {})

    def build(self, run: "parts.Execution | None" = None) -> "parts.TextEncoder":
        """Builds the module. All layers are equal, without rotary positions."""
        plan = [parts.Layer("block", Reach())] * self.layers
        norm = parts.LayerNorm(self.width, self.norm_eps)
        return parts.TextEncoder(self, plan, self.make, norm, run, first=self.first, pooler=self.projects)
