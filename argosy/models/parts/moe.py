"""Mixtures of experts: a router scores the experts for each token, the best few are applied, and their outputs are summed.

    p = score(W_r x)        y = sum over the k best experts e of  w_e Expert_e(x)  (+ Shared(x))

How rows get to their experts is a strategy, `MoE.dispatch`, set from outside:

    Sorted      dropless: rows are sorted by expert and multiplied in grouped matrix products (`ops.grouped`; Gale et al.
                2022, arXiv:2211.15841)
    Capacity    every expert processes the same number of tokens of each sequence, and tokens beyond it skip the expert; first
                choices are served before second ones (Lepikhin et al. 2020, arXiv:2006.16668). For training only: an answer
                must not depend on what else is in its sequence

Both work on the rows of one device. Nothing is sorted or gathered across devices: each device gathers the experts' weights, as
FSDP does, and a `tensor` axis splits their features. Sequences never share a capacity, so results do not depend on batches,
accumulation or devices.

The router always computes in float32 at least: its choice is discrete, and bfloat16 would make ties. Tokens that are not
live go to no expert and are not counted.

Aux outputs of a layer: `load` [E], the number of assignments of each expert; `balance` and `router_z` [B], the unweighted aux
losses of each sequence; with a capacity, `dropped` [B], the share of assignments that were dropped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from argosy.core.dims import LEGEND
from argosy.models.parts.einsum import Contraction, Einsum, Route
from argosy.models.parts.mlp import ACTIVATIONS, GLU, Activation
from argosy.models.parts.weight import Draw, Meaning, Moved, merge, split, variables, weight
from argosy.models.settings import Experts
from argosy.ops.precision import wide
from argosy.parallel.scope import activation_spec, axes_in, axis_sizes, weight_spec

Act = Callable[[Array, Array], Array]


def choose(
    logits: Float[Array, "B T E"], how: Experts, bias: Float[Array, "E"] | None = None
) -> tuple[Float[Array, "B T k"], Int[Array, "B T k"]]:
    """Weights and indexes of the experts of each token, best first.

    Groups and experts are chosen by score + bias; weights come from the scores alone (DeepSeek-V3, arXiv:2412.19437). Without a
    bias the logits are compared instead of the scores: they have the same order, and stay distinct where a sigmoid is 1, in
    float32 from 17 on.
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


def _looked_at(rank: Float[Array, "B T E"], how: Experts) -> Bool[Array, "B T E"]:
    groups = rank.reshape(*rank.shape[:-1], how.groups, -1)
    strength = groups.max(-1) if how.group_strength == "max" else jax.lax.top_k(groups, 2)[0].sum(-1)
    best = jax.lax.top_k(strength, how.kept_groups)[1]
    kept = jnp.any(best[..., None] == jnp.arange(how.groups), -2)
    return jnp.repeat(kept, groups.shape[-1], -1)


class MoE(nnx.Module):
    """Sends x [B T D] through the experts of each token.

    Args:
        dims: size of D.
        activation: of the gate, also in the shared expert.
        act: a function of gate and up that replaces activation(gate) * up.
        bias: adds biases to the router and to the experts' projections (gpt-oss).
    """

    called = "experts"

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
        self.dispatch: Dispatch = Sorted()
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
        # Padding may contain NaN, and NaN times a weight of 0 is NaN.
        x = jnp.where(live[..., None], x, 0)
        # By default accelerators multiply float32 as bfloat16 or TF32.
        with jax.default_matmul_precision("highest"):
            logits = self.router(wide(x))
        weights, chosen = choose(logits, self.how, None if self.bias is None else self.bias[...])
        chosen = jnp.where(live[..., None], chosen, self.how.count)
        y, passed = self.dispatched(x, weights, chosen)
        if self.shared is not None:
            z = self.shared(x)
            y = y + (z if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * z)
        return y, passed | router_aux(logits, chosen, live, self.how)

    def dispatched(
        self, x: Float[Array, "B T D"], weights: Float[Array, "B T k"], chosen: Int[Array, "B T k"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, "B"]]]:
        """The weighted sum over the experts of each token, computed on the devices of the tokens; `chosen` is E for no expert."""
        rows = activation_spec("B T", x.shape[:2])
        if self.dispatch.whole:
            rows = PartitionSpec(rows[0], None)
        mine = axes_in(rows)
        over = frozenset(axis for axis, size in axis_sizes().items() if size > 1)
        if not over:
            return self.dispatch(Local(self.gate, self.up, self.down, self.how, self.acted), x, weights, chosen)
        apart = {name: split(getattr(self, name)) for name in ("gate", "up", "down")}
        leaves = {name: own for name, (_, own) in apart.items()}
        specs = {name: expert_specs(getattr(self, name), over - mine) for name in apart}
        features = specs["down"][next(a for a in ("w", "values", "of.w", "of.values") if a in specs["down"])][1]

        def local(leaves: Any, x: Array, weights: Array, chosen: Array) -> Any:
            gate, up, down = (merge(apart[name][0], leaves[name]) for name in ("gate", "up", "down"))
            part = Local(gate, up, down, self.how, self.acted, features)
            y, passed = self.dispatch(part, x, weights, chosen)
            return (y if features is None else jax.lax.psum(y, features)), passed

        three = PartitionSpec(*rows, None)
        out = (three, PartitionSpec(rows[0]))
        return jax.shard_map(local, in_specs=(specs, three, three, three), out_specs=out, check_vma=False)(
            leaves, x, weights, chosen
        )

    def acted(self, gate: Float[Array, "X M"], up: Float[Array, "X M"]) -> Float[Array, "X M"]:
        return ACTIVATIONS[self.activation](gate) * up if self.act is None else self.act(gate, up)


def expert_specs(module: nnx.Module, over: frozenset[str]) -> dict[str, PartitionSpec]:
    """How the arrays of one contraction over experts are split over these mesh axes, by address: their features M at most, since
    a device has all experts and all of D of its rows."""
    out = {}
    for address, v in variables(module).items():
        letters = v.get_metadata()["meaning"].letters
        spec = weight_spec(tuple(str(LEGEND.get(a, a)) for a in letters), tuple(v.shape), over)
        axes = [*spec, *[None] * (len(letters) - len(spec))]
        out[address] = PartitionSpec(*(axis if letter == "M" else None for letter, axis in zip(letters, axes)))
    return out


class Local(NamedTuple):
    """The experts as one device has them. features: the mesh axis that splits their M features; their output must then be summed
    over it, and biases are added on its first device only."""

    gate: Contraction
    up: Contraction
    down: Contraction
    how: Experts
    acted: Act
    features: str | None = None

    def __call__(self, rows: Float[Array, "A D"], route: Route) -> Float[Array, "A D"]:
        y = self.down.product(self.acted(self.gate(rows, route), self.up(rows, route)), route)
        if self.features is None or self.down.bias is None:
            return self.down.biased(y, route)
        return jnp.where(jax.lax.axis_index(self.features) == 0, self.down.biased(y, route), y)


class Dispatch(Protocol):
    """How rows get to their experts: a frozen dataclass. `chosen` is E where a token goes to no expert. Also returns aux outputs
    [B]. whole: whether it needs whole sequences, where they are split over devices."""

    @property
    def whole(self) -> bool: ...

    def __call__(
        self,
        experts: Local,
        x: Float[Array, "B T D"],
        weights: Float[Array, "B T k"],
        chosen: Int[Array, "B T k"],
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, "B"]]]: ...


@dataclass(frozen=True)
class Sorted:
    """Dropless: rows sorted by expert."""

    whole = False

    def __call__(
        self, experts: Local, x: Float[Array, "B T D"], weights: Float[Array, "B T k"], chosen: Int[Array, "B T k"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, "B"]]]:
        E, k = experts.how.count, chosen.shape[-1]
        flat = chosen.reshape(-1)
        order = sorted_by(flat, E)
        sizes = jnp.bincount(flat, length=E).astype(jnp.int32)
        token = order // k
        rows = x.reshape(-1, x.shape[-1])[token]
        weights = weights.reshape(-1, k)
        if experts.how.weigh == "input":
            rows, weights = rows * weights.reshape(-1)[order, None].astype(x.dtype), jnp.ones_like(weights)
        y = experts(rows, Route(sizes, jnp.minimum(flat[order], E - 1), token=token))
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype)).reshape(-1, k)
        weights = jnp.where(chosen.reshape(-1, k) < E, weights, 0.0)
        return gathered(y, weights.astype(y.dtype), order, back).reshape(x.shape), {}


@dataclass(frozen=True)
class Capacity:
    """Each expert processes at most `factor` times an even load of each sequence; further tokens are dropped."""

    factor: float
    whole = True

    def places(self, tokens: int, how: Experts) -> int:
        """The most tokens of a sequence that an expert processes. A token counts once per expert."""
        return min(tokens, math.ceil(self.factor * tokens * how.active / how.count))

    def __call__(
        self, experts: Local, x: Float[Array, "B T D"], weights: Float[Array, "B T k"], chosen: Int[Array, "B T k"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, "B"]]]:
        (B, T, k), E = chosen.shape, experts.how.count
        places = self.places(T, experts.how)
        # First choices come first.
        ranked = chosen.swapaxes(1, 2).reshape(B, k * T)
        order = jax.vmap(lambda row: sorted_by(row, E))(ranked)
        sizes = jnp.sum(ranked[:, :, None] == jnp.arange(E), 1)  # [B E]; XLA fuses the comparison into the sum
        starts = jnp.cumsum(sizes, 1) - sizes
        back = jax.vmap(lambda o: jnp.zeros_like(o).at[o].set(jnp.arange(k * T, dtype=o.dtype)))(order)
        place = back - jnp.take_along_axis(starts, jnp.minimum(ranked, E - 1), 1)
        kept = (ranked < E) & (place < places)

        # Place p of expert e has the p-th row that chose it.
        p = jnp.arange(places)
        filled = p < sizes[:, :, None]  # [B E places]
        source = jnp.take_along_axis(order, jnp.where(filled, starts[:, :, None] + p, 0).reshape(B, -1), 1)
        rows = jnp.take_along_axis(x, (source % T)[:, :, None], 1)
        if experts.how.weigh == "input":
            scales = jnp.take_along_axis(weights.swapaxes(1, 2).reshape(B, k * T), source, 1)
            rows, weights = rows * scales[:, :, None].astype(x.dtype), jnp.ones_like(weights)
        rows = jnp.where(filled.reshape(B, -1, 1), rows, 0).reshape(B, E, places, -1).swapaxes(0, 1)
        expert = jnp.repeat(jnp.arange(E), B * places, total_repeat_length=E * B * places)
        route = Route(jnp.full(E, B * places, jnp.int32), expert, even=True)
        y = experts(rows.reshape(E * B * places, -1), route).reshape(E, B, places, -1)

        at = jnp.where(kept, jnp.minimum(ranked, E - 1) * places + place, 0)
        picked = jnp.take_along_axis(y.swapaxes(0, 1).reshape(B, E * places, -1), at[:, :, None], 1)
        picked = jnp.where(kept[:, :, None], picked, 0).reshape(B, k, T, -1)
        assigned = jnp.sum(ranked < E, 1).astype(jnp.float32)
        dropped = 1 - jnp.sum(kept, 1).astype(jnp.float32) / jnp.maximum(assigned, 1.0)
        y = jnp.sum(picked * weights.swapaxes(1, 2)[..., None].astype(y.dtype), 1)
        return y, {"dropped": jnp.where(assigned > 0, dropped, 0.0)}


def with_capacity(model: nnx.Module) -> nnx.Module:
    """The model with the capacity of its settings, if they have one, in effect: for the training step."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MoE) and module.how.capacity is not None:
            module.dispatch = Capacity(module.how.capacity)
    return model


@jax.custom_vjp
def gathered(
    y: Float[Array, "A D"], weights: Float[Array, "X k"], order: Int[Array, "A"], back: Int[Array, "X k"]
) -> Float[Array, "X D"]:
    """The weighted sum of each token's k rows. Row a of y is assignment order[a], and assignment i of token x is at back[x, i]:
    so the gradient is a gather too, where JAX's own is k scatters into all of y (3 % of a layer, forward and backward)."""
    first, *others = (y[back[:, i]] * weights[:, i, None] for i in range(back.shape[1]))
    return sum(others, first)


def _gathered(y: Array, weights: Array, order: Array, back: Array) -> tuple[Array, tuple[Array, ...]]:
    return gathered(y, weights, order, back), (y, weights, order, back)


def _spread(kept: tuple[Array, ...], g: Float[Array, "X D"]) -> tuple[Any, ...]:
    y, weights, order, back = kept
    rows = g[order // back.shape[1]]
    dweights = jnp.sum(wide(y * rows), -1)[back].astype(weights.dtype)
    nothing = (np.zeros(indexes.shape, jax.dtypes.float0) for indexes in (order, back))
    return rows * weights.reshape(-1)[order, None], dweights, *nothing


gathered.defvjp(_gathered, _spread)


def sorted_by(expert: Int[Array, "X"], count: int) -> Int[Array, "X"]:
    """The order that sorts rows by expert and keeps the order of one expert's rows. It sorts small numbers once: 16,384 rows take
    1 ms on XLA:CPU, with argsort 2.6."""
    X = expert.shape[0]
    if not isinstance(X, int) or (count + 1) * X >= 2**31:
        return jnp.argsort(expert, stable=True)
    return jnp.sort(expert.astype(jnp.int32) * X + jnp.arange(X, dtype=jnp.int32)) % X


def router_aux(
    logits: Float[Array, "B T E"], chosen: Int[Array, "B T k"], live: Bool[Array, "B T"], how: Experts
) -> dict[str, Array]:
    """Load and aux losses of one layer, over its live tokens."""
    real = live.astype(logits.dtype)
    counts = jnp.sum((chosen[..., None] == jnp.arange(how.count)).astype(logits.dtype), (1, 2))  # [B E]; nothing is kept of it
    scores = jax.nn.sigmoid(logits) if how.score == "sigmoid" else jax.nn.softmax(logits)
    shares = jnp.sum(real[..., None] * scores / jnp.sum(scores, -1, keepdims=True), 1)  # [B E]
    tokens = jnp.sum(real, 1, keepdims=True)  # [B 1]
    lse = jax.nn.logsumexp(logits, -1)
    f, P = counts, shares
    if how.balance_over == "batch":
        f, P, over = jnp.sum(counts, 0, keepdims=True), jnp.sum(shares, 0, keepdims=True), jnp.sum(tokens)
    else:
        over = tokens
    over = jnp.maximum(over, 1.0)
    return {
        "load": jnp.sum(counts, 0),
        "balance": jnp.broadcast_to(how.count * jnp.sum(f / over * (P / over), 1), real.shape[:1]),
        "router_z": jnp.sum(real * lse * lse, 1) / jnp.maximum(tokens[:, 0], 1.0),
    }
