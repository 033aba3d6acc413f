"""DeepSeek V2, V2-Lite, V3, R1 and V3.2, and Kimi K2: latent attention, grouped experts beside a shared one, a sparse-attention
indexer, and multi-token prediction.

    h = x + LatentAttention(RMSNorm(x))        y = h + MoE(RMSNorm(h)), in the first layers h + SwiGLU(RMSNorm(h))

V2 scores experts by softmax, and a group of experts by its best expert. V3 scores experts by sigmoid, and a group by its best two
experts. V3 balances the load with a bias on the scores, which training adjusts by load. V3 is published in FP8, with one scale for each
128 x 128 values. V3.2 has the indexer (`parts.attention.indexer`).

DeepSeek-AI 2024 (arXiv:2405.04434, 2412.19437), 2025 (arXiv:2501.12948, 2512.02556), Moonshot AI 2025 (arXiv:2507.20534).
B batch, T time, D width, F feed-forward, N heads, H plain and P rotary part of a head, C both, U value size, R and Q ranks of
the latents of keys and of queries, I and J heads and size of the indexer, V vocabulary, E experts, M expert ffn.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.models import parts
from argosy.models.base.language import LanguageConfig
from argosy.models.hub.deepseek import DeepSeekHub
from argosy.models.settings import Activation, Experts, Index, Rope, Yarn


def block(config: "DeepSeekConfig", kind: str) -> "parts.Block":
    """Builds one layer. `kind` is "dense" or "experts"."""
    d, bias = config.dims, config.attention_bias
    attention = parts.LatentAttention(d, config.layers, scale=config.scale, bias=bias, index=config.index)
    experts = kind == "experts"
    mlp = parts.MoE(d, config.moe, config.activation) if experts else parts.GLU(d, config.activation)
    return parts.Block(attention, mlp, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class DeepSeekConfig(DeepSeekHub, LanguageConfig):
    """DeepSeek V2, V3, R1, V3.2 (arXiv:2405.04434, 2412.19437, 2501.12948, 2512.02556) and Kimi K2 (arXiv:2507.20534)."""

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
        sizes |= {"Z": self.scores} if self.scores else {}
        return sizes if self.index is None else sizes | {"I": self.index.heads, "J": self.index.size}

    @property
    def scale(self) -> float:
        """The factor on attention scores: 1/sqrt(C), times the square of YaRN's sharpening if `mscale_all_dim` is set."""
        yarn = self.rope.scaling if isinstance(self.rope.scaling, Yarn) else None
        sharper = yarn.sharpening(yarn.mscale_all_dim) if yarn and yarn.mscale_all_dim else 1.0
        return (self.head_size + self.rope_size) ** -0.5 * sharper**2

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module. The first layers are dense, the others have experts."""
        from argosy.models.blocks.deepseek import DeepSeekDecoder

        return DeepSeekDecoder(self, self.make, partial(parts.RMSNorm, self.width, self.norm_eps), run)

    def parameters(self, active: bool = False) -> int:
        """Counts parameters, including the `mtp` modules. With `active`, excludes the `mtp` modules, since logits do not use them."""
        return super().parameters(active) if not (active and self.mtp) else self._without_mtp().parameters(active)

    def flops(self, tokens: int) -> int:
        """Counts the FLOPs of one forward pass, without the `mtp` modules."""
        return self._without_mtp().flops(tokens) if self.mtp else super().flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        features = self.heads * (self.head_size + self.rope_size + self.value_size)
        return 2 * tokens * tokens * features * self.layers + self._index_flops(tokens)

    def choosing_flops(self, tokens: int) -> int:
        if self.index is None:
            return 0
        index, d = self.index, self.dims
        weights = d["Q"] * index.heads * index.size + self.width * (index.size + index.heads)
        return 2 * tokens * weights * self.layers + self._index_flops(tokens)

    def _index_flops(self, tokens: int) -> int:
        """Counts the FLOPs of the indexer's scores. Rows of at most `topk` tokens skip these."""
        if self.index is None or tokens <= self.index.topk:
            return 0
        return 2 * tokens * tokens * self.index.heads * (self.index.size + 1) * self.layers

    def _without_mtp(self) -> "DeepSeekConfig":
        return self.model_copy(update={"mtp": 0})
