"""Settings that families share. This file does not import jax, so that mistakes in settings are reported before jax is imported.

The settings are implemented in `parts.attention.rope`, `parts.moe`, `parts.attention.heads`, `parts.attention.indexer` and `parts.mlp`.
"""

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from argosy.core.registry import Registry
from argosy.core.settings import Also, Choice, Settings

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]
# The data that can be rotated by Hadamard matrices while a model runs (`parts.rotations`).
Rotation = Literal["ffn", "heads", "keys"]
# The checkpoint names of values in layers, by which rematerialization can keep these values (`parts.stack.remat`).
Kept = Literal["qkv", "attention", "attention_out", "ffn", "experts"]


class LinearScaling(Settings):
    """Divides every position by `factor`. Chen et al. 2023 (arXiv:2306.15595)."""

    factor: float = Field(gt=0)
    """The context in relation to the one the model was trained for."""

    def apply(self, freq: Any, base: float) -> tuple[Any, float]:
        return freq / self.factor, 1.0


class Llama3Scaling(Settings):
    """Divides low frequencies by `factor`, keeps high ones, and interpolates between. Llama 3.1 (arXiv:2407.21783)."""

    factor: float = Field(8.0, gt=0)
    """The context in relation to the one the model was trained for."""
    low: float = 1.0
    """Frequencies with fewer rotations than this over the original context are divided."""
    high: float = 4.0
    """Frequencies with more rotations than this are kept."""
    original: int = 8192
    """The original context, in tokens."""

    def apply(self, freq: Any, base: float) -> tuple[Any, float]:
        import numpy as np

        turns = self.original * freq / (2 * math.pi)
        # In Llama 4 Scout, low and high are both 1, so there is no ramp.
        ramp = max(self.high - self.low, 1e-9)
        unscaled = np.clip((turns - self.low) / ramp, 0, 1)
        return freq * unscaled + freq / self.factor * (1 - unscaled), 1.0


class Yarn(Settings):
    """Scales frequencies by parts, and sharpens attention. Peng et al. 2023 (arXiv:2309.00071)."""

    factor: float = Field(gt=0)
    """The context in relation to the one the model was trained for."""
    original: int
    """The original context, in tokens."""
    fast: float = 32.0
    """Frequencies with more rotations than this over the original context are kept (`beta_fast`)."""
    slow: float = 1.0
    """Frequencies with fewer rotations than this are divided (`beta_slow`)."""
    truncate: bool = True
    """Rounds the ends of the ramp to whole dimensions."""
    attention: float | None = None
    """Factor on cosine and sine. None: 0.1 ln(factor) + 1."""
    mscale: float | None = None
    """With `mscale_all_dim`: the factor is the ratio of 0.1 mscale ln(factor) + 1 for the two (DeepSeek, arXiv:2405.04434)."""
    mscale_all_dim: float | None = None
    """See `mscale`; latent attention also multiplies its scores by the square of 0.1 mscale_all_dim ln(factor) + 1."""

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
    """Divides the frequency of each pair by its own number, from one list for the original context and another for longer ones. Ding et
    al. 2024 (arXiv:2402.13753).

    The list is chosen once per model (`decided`), as in vLLM, and not per sequence, as in transformers: keys rotated by one list
    do not match queries rotated by the other, and a rollout that may become long must agree with the training step that sees how
    long it became.
    """

    short: tuple[float, ...]
    """Divisors for sequences within the original context, one per pair."""
    long: tuple[float, ...]
    """Divisors for longer sequences, one per pair."""
    original: int = Field(gt=1)
    """The original context, in tokens."""
    attention: float = 1.0
    """Factor on cosine and sine, at any length."""
    table: Literal["auto", "short", "long"] = "auto"
    """The divisors to use. auto: the long ones if the model's context is longer than the original. transformers uses the short
    ones for every sequence within the original context, so set `short` to reproduce it on short texts."""

    def apply(self, freq: Any, base: float) -> tuple[Any, float]:
        import numpy as np

        if self.table == "auto":
            raise ValueError("longrope: choose one of its tables first (`Rope.decided`)")
        for divisors in (self.short, self.long):
            if len(divisors) != len(freq):
                raise ValueError(f"{len(divisors)} divisors for {len(freq)} rotary pairs")
        return freq / np.asarray(self.short if self.table == "short" else self.long), self.attention


SCALINGS = Registry("rope scaling", {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": Yarn, "longrope": LongRope})


class Rope(Settings):
    """Rotary positions."""

    base: Annotated[float, Also("rope_theta", "rope_base", "rope_max_timescale")] = Field(10_000.0, gt=1)
    """Base of the frequencies: the slowest pair rotates once in about 2 pi times this many tokens."""
    scaling: Annotated[Annotated[Any, Choice(SCALINGS, tag="kind")] | None, Also("rope_scaling")] = None
    """How frequencies are changed for a context longer than the original. None: not at all."""
    pairs: Literal["halves", "interleaved"] = "halves"
    """Which features form a pair: i and i + H/2 (halves), or 2i and 2i + 1 (interleaved)."""
    part: float = Field(1.0, gt=0, le=1)
    """Share of a head with rotary positions: its first features. The others have no position."""
    sections: Annotated[tuple[int, ...] | None, Also("mrope_section")] = None
    """Pairs that turn by each axis of a position, in their order (M-RoPE, arXiv:2409.12191: time, height, width). They add up to half
    of the rotated features. None: positions have one axis."""

    def sections_for(self, size: int, axes: int) -> tuple[int, ...]:
        """Returns how many pairs each axis of positions rotates, for `size` rotated features.

        Raises:
            ValueError: the sections do not fit the features or the axes.
        """
        if self.sections is None or len(self.sections) != axes or sum(self.sections) != size // 2:
            problem = f"positions with {axes} axes need as many sections of {size // 2} pairs in all"
            raise ValueError(f"rope.sections = {self.sections}: {problem}")
        return self.sections

    def decided(self, context: int) -> "Rope":
        """Returns the settings for a model with this context, in tokens. If LongRoPE may choose between two tables, one is chosen."""
        scaling = self.scaling
        if not isinstance(scaling, LongRope) or scaling.table != "auto":
            return self
        table = "long" if context > scaling.original else "short"
        return self.model_copy(update={"scaling": scaling.model_copy(update={"table": table})})

    def rotated_size(self, size: int) -> int:
        """Returns the number of features with rotary positions, for heads of this size."""
        return int(size * self.part)

    def key(self, size: int) -> str:
        """Returns a name for the table of angles, which is unique for these settings and this number of rotated features."""
        return f"{size} {self!r}"

    def frequencies(self, size: int) -> tuple[Any, float]:
        """Returns the frequency of each of the size / 2 pairs in radians per token, and the factor on cosine and sine."""
        import numpy as np

        freq = self.base ** -(np.arange(0, size, 2, dtype=np.float64) / size)
        if self.scaling is None:
            return freq, 1.0
        return self.scaling.apply(freq, self.base)


class Temper(Settings):
    """Queries are multiplied by 1 + scale log(1 + (position + 1) // floor), which keeps attention sharp over long contexts. Nakanishi
    2025 (arXiv:2501.19399); stepwise, as in Llama 4."""

    floor: int = Field(8192, gt=0)
    """Tokens per step; queries do not grow before the first step."""
    scale: float = 0.1
    """Factor on the logarithm of the step."""


class Reach(NamedTuple):
    """The attention settings of one layer.

    window: the number of tokens that a query attends to, including its own. None: all earlier tokens.
    rope: the rotary positions of queries and keys. None: the layer has none.
    chunked: whether a query attends only to its own chunk of `window` tokens (`Score`).
    unit: an epsilon. If set, each head of queries and keys is divided by its RMS after RoPE, with this added to the mean square.
    temper: how queries grow with their position. None: they do not.
    """

    window: int | None = None
    rope: Rope | None = None
    chunked: bool = False
    unit: float | None = None
    temper: Temper | None = None


class Experts(Settings):
    """A mixture of experts: their number, their routing, and the balance of their load."""

    count: Annotated[int, Also("num_experts", "n_experts", "num_local_experts", "n_routed_experts")] = Field(gt=0)
    """Number of routed experts E."""
    active: Annotated[int, Also("num_experts_per_tok", "top_k", "moe_top_k")] = Field(gt=0)
    """Number of experts chosen for each token (top-k)."""
    ffn: int = Field(gt=0)
    """Width of one expert M."""
    shared: int = Field(0, ge=0)
    """Width of the shared expert, which every token passes through; 0: there is none."""
    shared_gate: bool = False
    """Multiplies the shared expert's output by the sigmoid of a learned score."""
    score: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax"
    """How scores become weights: a softmax over all experts, a sigmoid of each, or a softmax over the chosen ones."""
    normalized: bool = True
    """Divides the weights of the chosen experts by their sum."""
    scale: float = Field(1.0, gt=0)
    """Factor on the weights of the routed experts."""
    weigh: Literal["output", "input"] = "output"
    """Whether an expert's weight multiplies its output or its input (Llama 4)."""
    groups: int = Field(1, gt=0)
    """Number of groups of experts; experts are chosen only from the best groups."""
    kept_groups: int = Field(1, gt=0)
    """Number of groups from which experts are chosen."""
    group_strength: Literal["max", "top2"] = "top2"
    """The score of a group: its best score, or the sum of its best two."""
    bias: bool = False
    """Adds a number to each score when experts are chosen, but not to their weights. It is adjusted by load, instead of an
    auxiliary loss (Wang et al. 2024, arXiv:2408.15664)."""
    bias_rate: float = Field(1e-3, ge=0)
    """How much a training step adjusts that number."""
    balance: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss E sum f P, which is `active` at perfect balance (Fedus et al. 2021, arXiv:2101.03961,
    in transformers' scaling)."""
    balance_over: Literal["sequence", "batch"] = "sequence"
    """Where the shares f and P of the balance loss are computed. sequence: over each row of the batch, as in DeepSeek-V3; the
    loss then does not depend on how the batch is split. batch: over all rows computed together, as in transformers; exact over
    devices, but changed by `accumulate`, because a product of means is not a mean of products."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the router's squared log partition function (Zoph et al. 2022, arXiv:2202.08906: 1e-3)."""
    capacity: float | None = Field(None, gt=0)
    """The most tokens of a sequence that one expert processes, as a multiple of an even load. None: no limit. Applies to training
    only: in evaluation, sampling and loaded models no token is dropped."""

    @model_validator(mode="after")
    def _consistent(self) -> "Experts":
        if self.active > self.count:
            raise ValueError(f"active = {self.active} is more than count = {self.count} experts")
        if self.count % self.groups:
            raise ValueError(f"count = {self.count} experts do not divide into groups = {self.groups}")
        if self.shared_gate and not self.shared:
            raise ValueError("shared_gate: there is no shared expert")
        if self.groups == self.count > 1 and self.group_strength == "top2":
            raise ValueError(f"groups = {self.groups} of one expert each have no best two: set group_strength = max")
        if self.kept_groups > self.groups or self.active > self.kept_groups * (self.count // self.groups):
            raise ValueError(
                f"kept_groups = {self.kept_groups} of {self.groups} groups have fewer than active = {self.active} experts"
            )
        return self


class Index(Settings):
    """The indexer of sparse attention, which selects the tokens that attention reads."""

    heads: int = Field(64, gt=0)
    """Number of heads I."""
    size: int = Field(128, gt=0)
    """Head size J. The first features have rotary positions, as many as in attention."""
    topk: int = Field(2048, gt=0)
    """Number of tokens a query attends to; all earlier tokens if there are fewer."""
