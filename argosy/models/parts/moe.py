"""Mixtures of experts: a router scores the experts for each token, the best few compute, their outputs are summed.

    p = score(W_r x)        y = sum over the k best experts e of  w_e Expert_e(x)  (+ Shared(x))

Dropless unless a capacity is set: rows are sorted by expert and meet their weights in grouped matrix products
(`ops.grouped`; Gale et al. 2022, arXiv:2211.15841). With a capacity (Lepikhin et al. 2020, arXiv:2006.16668) every expert
computes the same number of rows and the tokens beyond it pass by; first choices are served before second ones.

The router computes in float32 whatever the model does: a choice is discrete, and bfloat16 makes ties. Tokens that are not live
are sent to no expert and counted nowhere.

What a layer tells: `load`, the assignments of each expert; `balance` and `router_z`, the two auxiliary losses, unweighted;
with a capacity `dropped`, the share of assignments that it passed by.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field, model_validator

from argosy.core.settings import Settings
from argosy.models.parts.einsum import Einsum, Route
from argosy.models.parts.mlp import ACTIVATIONS, GLU, Activation
from argosy.models.parts.weight import Draw, Meaning, Moved, weight

Act = Callable[[Array, Array], Array]


class Experts(Settings):
    """A mixture of experts: how many, how they are chosen, how their load is kept even."""

    count: int = Field(gt=0)
    """Routed experts E."""
    active: int = Field(gt=0)
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
    z_loss: float = Field(0.0, ge=0)
    """Weight of the router's squared log partition function (Zoph et al. 2022, arXiv:2202.08906: 1e-3)."""
    capacity: float | None = Field(None, gt=0)
    """An expert computes at most this many times the rows of an even load; no limit unless told. In training alone:
    evaluated, sampled from or loaded, a model drops nothing."""

    def places(self, tokens: int) -> int:
        """Rows that an expert computes at most. It meets a token once."""
        return (
            tokens
            if self.capacity is None
            else min(tokens, math.ceil(self.capacity * tokens * self.active / self.count))
        )

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


def choose(
    logits: Float[Array, "X E"], how: Experts, bias: Float[Array, "E"] | None = None
) -> tuple[Float[Array, "X k"], Int[Array, "X k"]]:
    """Weights and indexes of the experts of each token, best first.

    Groups are judged and experts chosen by score + bias; weights come from the scores alone (DeepSeek-V3, arXiv:2412.19437).
    Where nothing is added, scores rank as their logits do, and logits stay apart where a sigmoid is 1: in float32 from 17 on.
    """
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "softmax_chosen": lambda s: s}[how.score](logits)
    rank = scores if bias is None else scores + bias
    if how.groups == 1 and bias is None:
        rank = logits
    elif how.groups > 1:
        rank = jnp.where(_looked_at(rank, how), rank, -jnp.inf)
    chosen = jax.lax.top_k(rank, how.active)[1]
    weights = jnp.take_along_axis(scores, chosen, -1)
    if how.score == "softmax_chosen":
        weights = jax.nn.softmax(weights)
    elif how.normalized:
        weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
    return weights * how.scale, chosen


def _looked_at(rank: Float[Array, "X E"], how: Experts) -> Bool[Array, "X E"]:
    groups = rank.reshape(rank.shape[0], how.groups, -1)
    strength = groups.max(-1) if how.group_strength == "max" else jax.lax.top_k(groups, 2)[0].sum(-1)
    best = jax.lax.top_k(strength, how.kept_groups)[1]
    kept = jnp.any(best[:, :, None] == jnp.arange(how.groups), 1)
    return jnp.repeat(kept, groups.shape[-1], -1)


class MoE(nnx.Module):
    """x [B T D] through the experts of each token.

    Args:
        dims: size of D.
        activation: of the gate, in the shared expert too.
        act: of gate and up, where that is another function than activation(gate) * up.
        bias: on the router and on the experts' projections (gpt-oss).
    """

    called = "experts"
    training = False
    """Whether a capacity counts: an answer must not hang on what else is in its batch, so it does in training alone."""

    def __init__(
        self,
        dims: dict[str, int],
        how: Experts,
        activation: Activation = "silu",
        *,
        act: Act | None = None,
        bias: bool = False,
    ):
        sizes = dims | {"E": how.count, "M": how.ffn, "F": how.shared}
        self.how, self.activation, self.act = how, activation, act
        self.router = Einsum("BTD,DE->BTE", sizes, bias=bias)
        self.bias = weight((how.count,), Meaning("E"), Draw("constant", 0.0), Moved) if how.bias else None
        self.gate = Einsum("XD,EDM->XM", sizes, bias=bias)
        self.up = Einsum("XD,EDM->XM", sizes, bias=bias)
        self.down = Einsum("XM,EMD->XD", sizes, bias=bias)
        self.shared = GLU(sizes, activation) if how.shared else None
        self.shared_gate = Einsum("BTD,DO->BTO", sizes | {"O": 1}) if how.shared_gate else None

    def __call__(
        self, x: Float[Array, "B T D"], live: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        alive = live.reshape(-1)
        x = jnp.where(live[..., None], x, 0)  # whatever lies there: NaN times a weight of 0 would be NaN
        with jax.default_matmul_precision("highest"):  # by default accelerators multiply float32 as bfloat16 or TF32
            logits = self.router(x.astype(jnp.float32)).reshape(-1, self.how.count)
        weights, chosen = choose(logits, self.how, None if self.bias is None else self.bias[...])
        rows = x.reshape(-1, x.shape[-1])
        through = self.dropping if self.drops else self.dropless
        y = through(rows, weights, jnp.where(alive[:, None], chosen, self.how.count)).reshape(x.shape)
        if self.shared is not None:
            z = self.shared(x)
            y = y + (z if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * z)
        return y, said(logits, chosen, alive, self.how, self.drops)

    @property
    def drops(self) -> bool:
        return self.training and self.how.capacity is not None

    def dropless(
        self, x: Float[Array, "X D"], weights: Float[Array, "X k"], chosen: Int[Array, "X k"]
    ) -> Float[Array, "X D"]:
        """Rows sorted by expert; `chosen` is E where a row goes to none."""
        k = chosen.shape[1]
        flat = chosen.reshape(-1)
        order = sorted_by(flat, self.how.count)
        sizes = jnp.bincount(flat, length=self.how.count).astype(jnp.int32)
        rows = x[order // k]
        if self.how.weigh == "input":
            rows, weights = rows * weights.reshape(-1)[order, None].astype(x.dtype), jnp.ones_like(weights)
        y = self.experts(rows, Route(sizes, jnp.minimum(flat[order], self.how.count - 1)))
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype)).reshape(chosen.shape)
        return gathered(y, jnp.where(chosen < self.how.count, weights, 0.0).astype(y.dtype), order, back)

    def dropping(
        self, x: Float[Array, "X D"], weights: Float[Array, "X k"], chosen: Int[Array, "X k"]
    ) -> Float[Array, "X D"]:
        """Each expert has the same number of places; who finds none is dropped."""
        E, (X, k) = self.how.count, chosen.shape
        places = self.how.places(X)
        ranked = chosen.T.reshape(-1)  # first choices first
        mine = ranked[:, None] == jnp.arange(E)
        place = jnp.sum(jnp.where(mine, jnp.cumsum(mine, 0) - 1, 0), 1)
        kept = (ranked < E) & (place < places)
        at = jnp.where(kept, ranked * places + place, E * places)
        rows = jnp.tile(x, (k, 1))
        if self.how.weigh == "input":
            rows, weights = rows * weights.T.reshape(-1, 1).astype(x.dtype), jnp.ones_like(weights)
        rows = jnp.zeros((E * places, x.shape[1]), x.dtype).at[at].set(rows, mode="drop")
        expert = jnp.repeat(jnp.arange(E), places, total_repeat_length=E * places)
        y = self.experts(rows, Route(jnp.full(E, places, jnp.int32), expert, even=True))
        picked = jnp.where(kept[:, None], y.at[at].get(mode="fill", fill_value=0), 0)
        return jnp.sum(picked.reshape(k, X, -1) * weights.T[..., None].astype(y.dtype), 0)

    def experts(self, rows: Float[Array, "X D"], route: Route) -> Float[Array, "X D"]:
        gate, up = self.gate(rows, route), self.up(rows, route)
        y = ACTIVATIONS[self.activation](gate) * up if self.act is None else self.act(gate, up)
        return self.down(y, route)


@jax.custom_vjp
def gathered(
    y: Float[Array, "A D"], weights: Float[Array, "X k"], order: Int[Array, "A"], back: Int[Array, "X k"]
) -> Float[Array, "X D"]:
    """The weighted sum of each token's k rows. Row a of y is assignment order[a], and assignment i of token x lies at back[x, i]:
    so the gradient gathers, too, where JAX's own scatters into all of y k times (3 % of a layer, forward and backward)."""
    first, *others = (y[back[:, i]] * weights[:, i, None] for i in range(back.shape[1]))
    return sum(others, first)


def _gathered(y: Array, weights: Array, order: Array, back: Array) -> tuple[Array, tuple[Array, ...]]:
    return gathered(y, weights, order, back), (y, weights, order, back)


def _spread(kept: tuple[Array, ...], g: Float[Array, "X D"]) -> tuple[Any, ...]:
    y, weights, order, back = kept
    rows = g[order // back.shape[1]]
    dweights = jnp.sum((y * rows).astype(jnp.float32), -1)[back].astype(weights.dtype)
    nothing = (np.zeros(indexes.shape, jax.dtypes.float0) for indexes in (order, back))
    return rows * weights.reshape(-1)[order, None], dweights, *nothing


gathered.defvjp(_gathered, _spread)


def sorted_by(expert: Int[Array, "X"], count: int) -> Int[Array, "X"]:
    """The order that sorts rows by expert, rows of one expert in their own. One sort of small numbers: XLA:CPU's argsort of
    16,384 takes 2.6 ms, this 1."""
    X = expert.shape[0]
    if not isinstance(X, int) or (count + 1) * X >= 2**31:
        return jnp.argsort(expert, stable=True)
    return jnp.sort(expert.astype(jnp.int32) * X + jnp.arange(X, dtype=jnp.int32)) % X


def said(
    logits: Float[Array, "X E"], chosen: Int[Array, "X k"], alive: Bool[Array, "X"], how: Experts, drops: bool
) -> dict[str, Array]:
    """Load and auxiliary losses of one layer, over its live tokens."""
    real = alive.astype(jnp.float32)
    tokens = jnp.maximum(jnp.sum(real), 1.0)
    load = jnp.zeros(how.count, jnp.float32).at[chosen.reshape(-1)].add(jnp.repeat(real, chosen.shape[1]))
    scores = jax.nn.sigmoid(logits) if how.score == "sigmoid" else jax.nn.softmax(logits)
    share = jnp.sum(real[:, None] * scores / jnp.sum(scores, -1, keepdims=True), 0) / tokens
    lse = jax.nn.logsumexp(logits, -1)
    dropped = {}
    if drops:
        over = jnp.maximum(load - how.places(alive.shape[0]), 0.0)
        dropped = {"dropped": jnp.sum(over) / jnp.maximum(jnp.sum(load), 1.0)}
    return dropped | {
        "load": load,
        "balance": how.count * jnp.sum(load / tokens * share),
        "router_z": jnp.sum(real * lse * lse) / tokens,
    }
