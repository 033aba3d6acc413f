"""Settings that parts of models share, without jax: a mistake in one is answered before anything heavy is imported.

What they do is in the part of the same name: `parts.rope`, `parts.moe`, `parts.heads`, `parts.indexer`, `parts.mlp`.
"""

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from argosy.core.registry import Registry
from argosy.core.settings import Also, Choice, Settings

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


class Linear(Settings):
    """Every position divided by `factor`. Chen et al. 2023 (arXiv:2306.15595)."""

    factor: float = Field(gt=0)
    """Longer by this factor than the model was trained for."""

    def apply(self, freq: Any, base: float) -> tuple[Any, float]:
        return freq / self.factor, 1.0


class Llama3(Settings):
    """Slow rotations divided by `factor`, fast ones kept, a ramp between. Llama 3.1 (arXiv:2407.21783)."""

    factor: float = Field(8.0, gt=0)
    """Longer by this factor than the model was trained for."""
    low: float = 1.0
    """Fewer turns than this over the original context: divided."""
    high: float = 4.0
    """More turns than this: kept."""
    original: int = 8192
    """The original context, in tokens."""

    def apply(self, freq: Any, base: float) -> tuple[Any, float]:
        import numpy as np

        turns = self.original * freq / (2 * math.pi)
        ramp = max(self.high - self.low, 1e-9)  # Llama 4 Scout has none: low and high are 1
        kept = np.clip((turns - self.low) / ramp, 0, 1)
        return freq * kept + freq / self.factor * (1 - kept), 1.0


class Yarn(Settings):
    """By parts, and sharper attention. Peng et al. 2023 (arXiv:2309.00071)."""

    factor: float = Field(gt=0)
    """Longer by this factor than the model was trained for."""
    original: int
    """The original context, in tokens."""
    fast: float = 32.0
    """More turns than this over the original context: kept (`beta_fast`)."""
    slow: float = 1.0
    """Fewer turns than this: divided (`beta_slow`)."""
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions."""
    attention: float | None = None
    """Factor on cosine and sine; 0.1 ln(factor) + 1 unless told."""
    mscale: float | None = None
    """With `mscale_all_dim`: the factor is the ratio of 0.1 mscale ln(factor) + 1 of the two (DeepSeek, arXiv:2405.04434)."""
    mscale_all_dim: float | None = None
    """See `mscale`; latent attention also multiplies its scores by the square of this one's."""

    def sharpening(self, mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def apply(self, freq: Any, base: float) -> tuple[Any, float]:
        import numpy as np

        half = len(freq)

        def dimension(turns: float) -> float:
            return half * math.log(self.original / (turns * 2 * math.pi)) / math.log(base)

        low, high = dimension(self.fast), dimension(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        high = high + 0.001 if low == high else high
        divided = np.clip((np.arange(half) - low) / (high - low), 0, 1)
        sharper = self.attention
        if sharper is None and self.mscale and self.mscale_all_dim:
            sharper = self.sharpening(self.mscale) / self.sharpening(self.mscale_all_dim)
        elif sharper is None:
            sharper = self.sharpening()
        return freq * (1 - divided) + freq / self.factor * divided, sharper


class LongRope(Settings):
    """A divisor of its own for each pair, from one list up to the original context and from another beyond.
    Ding et al. 2024 (arXiv:2402.13753).

    Which list is decided once for a model (`decided`), as vLLM does, and not for each sequence, as transformers does: keys turned
    by one list cannot meet queries turned by the other, and a rollout that may become long must agree with the training step
    that sees how long it became.
    """

    short: tuple[float, ...]
    """Divisors of sequences within the original context, one for each pair."""
    long: tuple[float, ...]
    """Divisors of longer ones."""
    original: int = Field(gt=1)
    """The original context, in tokens."""
    attention: float = 1.0
    """Factor on cosine and sine, at any length."""
    table: Literal["auto", "short", "long"] = "auto"
    """Which divisors: auto takes the long ones where the model's context is longer than the original. transformers takes the
    short ones for any sequence within the original context, so set `short` to reproduce it on short texts."""

    def apply(self, freq: Any, base: float) -> tuple[Any, float]:
        import numpy as np

        if self.table == "auto":
            raise ValueError("longrope: decide between the tables first (`Rope.decided`)")
        for divisors in (self.short, self.long):
            if len(divisors) != len(freq):
                raise ValueError(f"{len(divisors)} divisors for {len(freq)} rotary pairs")
        return freq / np.asarray(self.short if self.table == "short" else self.long), self.attention


SCALINGS = Registry("rope scaling", {"linear": Linear, "llama3": Llama3, "yarn": Yarn, "longrope": LongRope})


class Rope(Settings):
    """Rotary positions."""

    base: Annotated[float, Also("rope_theta", "rope_base", "rope_max_timescale")] = Field(10_000.0, gt=1)
    """The slowest pair turns once in about 2 pi times this many tokens."""
    scaling: Annotated[Annotated[Any, Choice(SCALINGS, tag="kind")] | None, Also("rope_scaling")] = None
    """How a longer context than the original is reached."""
    pairs: Literal["halves", "interleaved"] = "halves"
    """Feature i turns with i + H/2 (halves), or 2i with 2i + 1."""
    part: float = Field(1.0, gt=0, le=1)
    """The share of a head that turns: its first features. The others carry no position."""

    def decided(self, context: int) -> "Rope":
        """These positions for a model of this context, with one table of frequencies where the scaling has two."""
        scaling = self.scaling
        if not isinstance(scaling, LongRope) or scaling.table != "auto":
            return self
        table = "long" if context > scaling.original else "short"
        return self.model_copy(update={"scaling": scaling.model_copy(update={"table": table})})

    def turned(self, size: int) -> int:
        """How many features of a head of this size turn."""
        return int(size * self.part)

    def key(self, size: int) -> str:
        """What names its table of angles for features of this size."""
        return f"{size} {self!r}"

    def frequencies(self, size: int) -> tuple[Any, float]:
        """Radians per token of each of the size/2 pairs, and the factor on cosine and sine."""
        import numpy as np

        freq = self.base ** -(np.arange(0, size, 2, dtype=np.float64) / size)
        if self.scaling is None:
            return freq, 1.0
        return self.scaling.apply(freq, self.base)


class Temper(Settings):
    """Queries grow with their position, so that attention stays as sharp as more is seen: 1 + scale log(1 + (position + 1) //
    floor). Nakanishi 2025 (arXiv:2501.19399), in the steps of Llama 4."""

    floor: int = Field(8192, gt=0)
    """Tokens from a step to the next; before the first nothing grows."""
    scale: float = 0.1
    """How much the logarithm of the steps counts."""


class Reach(NamedTuple):
    """What is fixed about one layer's attention.

    window: how far back it sees; None: everything. chunked: of that, its own chunk only (`Score`).
    rope: how positions turn its queries and keys; None: they do not.
    unit: each head of them is divided by its RMS after it turns, with this added to the mean square.
    temper: how its queries grow with their position.
    """

    window: int | None = None
    rope: Rope | None = None
    chunked: bool = False
    unit: float | None = None
    temper: Temper | None = None


class Experts(Settings):
    """A mixture of experts: how many, how they are chosen, how their load is kept even."""

    count: Annotated[int, Also("num_experts", "n_experts", "num_local_experts", "n_routed_experts")] = Field(gt=0)
    """Routed experts E."""
    active: Annotated[int, Also("num_experts_per_tok", "top_k", "moe_top_k")] = Field(gt=0)
    """Experts that each token goes through."""
    ffn: int = Field(gt=0)
    """Width of one expert M."""
    shared: int = Field(0, ge=0)
    """Width of the expert that every token goes through; 0: there is none."""
    shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a learned score."""
    score: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax"
    """How scores become weights: over all experts, each for itself, or over the chosen ones."""
    normalized: bool = True
    """The weights of the chosen experts are divided by their sum."""
    scale: float = Field(1.0, gt=0)
    """Factor on the weights of the routed experts."""
    weigh: Literal["output", "input"] = "output"
    """What an expert's weight is multiplied onto (input: Llama 4)."""
    groups: int = Field(1, gt=0)
    """Experts lie in so many groups, of which only the best are looked at."""
    kept_groups: int = Field(1, gt=0)
    """How many groups are looked at."""
    group_strength: Literal["max", "top2"] = "top2"
    """What a group is judged by: its best score, or the sum of its best two."""
    bias: bool = False
    """A number added to each score when experts are chosen, not when they are weighed: moved by load instead of an auxiliary
    loss (Wang et al. 2024, arXiv:2408.15664)."""
    bias_rate: float = Field(1e-3, ge=0)
    """How far a step of training moves that number."""
    balance: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss E sum f P, which is `active` at perfect balance (Fedus et al. 2021, arXiv:2101.03961,
    in transformers' scaling)."""
    balance_over: Literal["sequence", "batch"] = "sequence"
    """What the shares f and P of the balance loss are taken over. sequence: each row of the batch, as DeepSeek-V3 does; exact
    however the batch is split. batch: all rows that are computed together: exact over devices, but `accumulate` changes it,
    since a product of means is not a mean of products. transformers takes the batch."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the router's squared log partition function (Zoph et al. 2022, arXiv:2202.08906: 1e-3)."""
    capacity: float | None = Field(None, gt=0)
    """The most tokens of a sequence that one expert computes, as a multiple of an even load; none: no limit. It holds in
    training alone: evaluated, sampled from or loaded, a model drops nothing."""

    @model_validator(mode="after")
    def _consistent(self) -> "Experts":
        if self.active > self.count:
            raise ValueError(f"active = {self.active} of count = {self.count} experts")
        if self.count % self.groups:
            raise ValueError(f"count = {self.count} experts do not divide into groups = {self.groups}")
        if self.shared_gate and not self.shared:
            raise ValueError("shared_gate: there is no shared expert")
        if self.groups == self.count > 1 and self.group_strength == "top2":
            raise ValueError(f"groups = {self.groups} of one expert each have no best two: group_strength = max")
        if self.kept_groups > self.groups or self.active > self.kept_groups * (self.count // self.groups):
            raise ValueError(
                f"kept_groups = {self.kept_groups} of {self.groups} hold fewer than active = {self.active} experts"
            )
        return self


class Index(Settings):
    """An index that picks the tokens attention reads."""

    heads: int = Field(64, gt=0)
    """Heads I."""
    size: int = Field(128, gt=0)
    """Size of a head J; its first features turn with positions, as many as those of attention."""
    topk: int = Field(2048, gt=0)
    """Tokens that a query attends to; all that it sees where those are fewer."""
