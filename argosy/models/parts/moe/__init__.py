"""Mixtures of experts: a router scores the experts for each token, the best few are applied, and their outputs are summed.

    p = score(W_r x)        y = sum over the k best experts e of  w_e Expert_e(x)  (+ Shared(x))

How rows get to their experts is a strategy, `MoE.dispatch`, set from outside (`parts.moe.dispatch`): `Sorted`, without drops, or
`Capacity`. Each device sorts the rows that it has. An `expert` axis of the mesh splits the experts, and rows are sent to the
devices of their experts and back; the weights of the experts of a device are gathered over the other axes that split rows, as
FSDP does, and a `tensor` axis splits their features. Sequences never share a capacity, so results do not depend on batches,
accumulation or devices.

The router always computes in float32 at least: its choice is discrete, and bfloat16 would make ties. Tokens that are not
live go to no expert and are not counted.

Aux outputs of a layer: `load` [E], the number of assignments of each expert; `balance` and `router_z` [B], the unweighted aux
losses of each sequence; with a capacity, `dropped` [B], the share of assignments that were dropped.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from argosy.models.parts.einsum import Einsum
from argosy.models.parts.mlp import ACTIVATIONS, GLU, Activation
from argosy.models.parts.moe.dispatch import Act, Capacity, Dispatch, LocalExperts, Sorted
from argosy.models.parts.weight import Draw, Meaning, Moved, merge, split, variables, weight
from argosy.models.settings import Experts
from argosy.ops.precision import wide
from argosy.parallel.scope import activation_spec, axes_in, axis_sizes, constrain, weight_spec


def choose(
    logits: Float[Array, "B T E"], settings: Experts, bias: Float[Array, "E"] | None = None
) -> tuple[Float[Array, "B T k"], Int[Array, "B T k"]]:
    """Weights and indexes of the experts of each token, best first.

    Groups and experts are chosen by score + bias; weights come from the scores alone (DeepSeek-V3, arXiv:2412.19437). Without a
    bias the logits are compared instead of the scores: they have the same order, and stay distinct where a sigmoid is 1, in
    float32 from 17 on.
    """
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "softmax_chosen": lambda s: s}[settings.score](logits)
    rank = scores if bias is None else scores + bias
    if settings.groups == 1 and bias is None:
        rank = logits
    elif settings.groups > 1:
        rank = jnp.where(_in_best_groups(rank, settings), rank, -jnp.inf)
    indexes = jax.lax.top_k(rank, settings.active)[1]
    weights = jnp.take_along_axis(scores, indexes, -1)
    if settings.score == "softmax_chosen":
        weights = jax.nn.softmax(weights)
    elif settings.normalized:
        weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
    return weights * settings.scale, indexes


def _in_best_groups(rank: Float[Array, "B T E"], settings: Experts) -> Bool[Array, "B T E"]:
    groups = rank.reshape(*rank.shape[:-1], settings.groups, -1)
    strength = groups.max(-1) if settings.group_strength == "max" else jax.lax.top_k(groups, 2)[0].sum(-1)
    best = jax.lax.top_k(strength, settings.kept_groups)[1]
    in_best = jnp.any(best[..., None] == jnp.arange(settings.groups), -2)
    return jnp.repeat(in_best, groups.shape[-1], -1)


class MoE(nnx.Module):
    """Sends x [B T D] through the experts of each token.

    Args:
        dims: size of D.
        activation: of the gate, also in the shared expert.
        act: a function of gate and up that replaces activation(gate) * up.
        bias: adds biases to the router and to the experts' projections (gpt-oss).

    rotates: whether what `down` reads is rotated (`parts.rotations`); the shared expert has its own.
    """

    called = "experts"
    marks = ("experts",)
    rotates = False

    def __init__(
        self,
        dims: dict[str, int],
        settings: Experts,
        activation: Activation = "silu",
        *,
        act: Act | None = None,
        bias: bool = False,
    ):
        sizes = dims | {"E": settings.count, "M": settings.ffn, "F": settings.shared}
        self.settings, self.activation, self.act = settings, activation, act
        self.dispatch: Dispatch = Sorted()
        self.router = Einsum("BTD,DE->BTE", sizes, bias=bias)
        self.bias = weight((settings.count,), Meaning("E"), Draw("constant", 0.0), Moved) if settings.bias else None
        self.gate = Einsum("XD,EDM->XM", sizes, bias=bias)
        self.up = Einsum("XD,EDM->XM", sizes, bias=bias)
        self.down = Einsum("XM,EMD->XD", sizes, bias=bias)
        self.shared = GLU(sizes, activation) if settings.shared else None
        self.shared_gate = Einsum("BTD,DO->BTO", sizes | {"O": 1}) if settings.shared_gate else None

    def __call__(
        self, x: Float[Array, "B T D"], live: Bool[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        # Padding may contain NaN, and NaN times a weight of 0 is NaN.
        x = jnp.where(live[..., None], x, 0)
        # By default accelerators multiply float32 as bfloat16 or TF32.
        with jax.default_matmul_precision("highest"):
            logits = constrain(self.router(wide(x)), "B T E")
        weights, indexes = self.choices(logits)
        indexes = jnp.where(live[..., None], indexes, self.settings.count)
        y, passed = self.dispatched(x, weights, indexes)
        if self.shared is not None:
            z = self.shared(x)
            y = y + (z if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * z)
        return y, passed | router_aux(logits, indexes, live, self.settings)

    def choices(self, logits: Float[Array, "B T E"]) -> tuple[Float[Array, "B T k"], Int[Array, "B T k"]]:
        """`choose` on the devices of the tokens: XLA gathers the rows of all devices for a `top_k`."""
        bias = () if self.bias is None else (self.bias[...],)
        rows = activation_spec("B T", logits.shape[:2])
        if not axes_in(rows):
            return choose(logits, self.settings, *bias)
        three = PartitionSpec(*rows, None)
        specs = (three, *(PartitionSpec() for _ in bias))
        return jax.shard_map(
            lambda logits, *bias: choose(logits, self.settings, *bias), in_specs=specs, out_specs=three, check_vma=False
        )(logits, *bias)

    def dispatched(
        self, x: Float[Array, "B T D"], weights: Float[Array, "B T k"], indexes: Int[Array, "B T k"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, "B"]]]:
        """The weighted sum over the experts of each token, computed on the devices of the tokens; `indexes` is E for no expert."""
        rows = activation_spec("B T", x.shape[:2])
        if self.dispatch.whole:
            rows = PartitionSpec(rows[0], None)
        mine = axes_in(rows)
        mesh_axes = frozenset(axis for axis, size in axis_sizes().items() if size > 1)
        if not mesh_axes:
            alone = LocalExperts(self.gate, self.up, self.down, self.settings, self.acted, rotates=self.rotates)
            return self.dispatch(alone, x, weights, indexes)
        apart = {name: getattr(self, name).before_split() for name in ("gate", "up", "down")}
        stored, used = ({name: expert_specs(part, mesh_axes, rows) for name, part in apart.items()} for rows in (None, mine))
        graphs, leaves = {}, {}
        for name, part in apart.items():
            graphs[name], leaves[name] = split(part)
            if type(part) is Einsum:
                # Gathered, and their gradients summed, in the type that they are multiplied in: half the bytes.
                leaves[name]["w"] = leaves[name]["w"].astype(x.dtype)
        axis, features, _ = used["down"][next(a for a in ("w", "values", "of.w", "of.values") if a in used["down"])]

        def local(leaves: Any, x: Array, weights: Array, indexes: Array) -> Any:
            gate, up, down = (
                merge(graphs[name], {a: _gathered(leaf, stored[name][a], used[name][a]) for a, leaf in leaves[name].items()})
                for name in ("gate", "up", "down")
            )
            together = axis is not None and axis not in mine
            part = LocalExperts(gate, up, down, self.settings, self.acted, features, axis, together, self.rotates)
            y, passed = self.dispatch(part, x, weights, indexes)
            return (y if features is None else jax.lax.psum(y, features)), passed

        three = PartitionSpec(*rows, None)
        out = (three, PartitionSpec(rows[0]))
        return jax.shard_map(local, in_specs=(stored, three, three, three), out_specs=out, check_vma=False)(
            leaves, x, weights, indexes
        )

    def acted(self, gate: Float[Array, "X M"], up: Float[Array, "X M"]) -> Float[Array, "X M"]:
        return ACTIVATIONS[self.activation](gate) * up if self.act is None else self.act(gate, up)


def expert_specs(module: nnx.Module, mesh_axes: frozenset[str], rows: frozenset[str] | None) -> dict[str, PartitionSpec]:
    """How the arrays of one contraction over experts are split over the mesh axes `mesh_axes`, by address.

    Args:
        rows: mesh axes that split rows: the arrays as the products read them, split along the experts E, and along their features M
            where the axis does not split rows; a device has all of D of its rows. None: the arrays as they are stored.
    """
    out = {}
    for address, v in variables(module).items():
        names = v.get_metadata()["meaning"].axes
        spec = weight_spec(names, tuple(v.shape), mesh_axes)
        axes = [*spec, *[None] * (len(names) - len(spec))]
        if rows is not None:
            split = (name == "experts" or (name == "expert_ffn" and axis not in rows) for name, axis in zip(names, axes))
            axes = [axis if is_split else None for axis, is_split in zip(axes, split)]
        out[address] = PartitionSpec(*axes)
    return out


def _gathered(leaf: Array, stored: PartitionSpec, used: PartitionSpec) -> Array:
    """A device's share of an array of experts, gathered as products read it, inside a `shard_map`. So its gradient is summed and
    scattered, where that of an array which is whole inside would be summed whole on every device."""
    if leaf.shape[:1] == (1,) and stored[0] == used[0]:
        # XLA for TPUs scatters no axis behind one of size 1: it sums everywhere and cuts.
        return _gathered(leaf[0], PartitionSpec(*stored[1:]), PartitionSpec(*used[1:]))[None]
    for i, (stored_axis, used_axis) in enumerate(zip(stored, used)):
        if stored_axis != used_axis:
            leaf = jax.lax.all_gather(leaf, stored_axis, axis=i, tiled=True)
    return leaf


def with_capacity(model: nnx.Module) -> nnx.Module:
    """The model with the capacity of its settings, if they have one, in effect: for the training step."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MoE) and module.settings.capacity is not None:
            module.dispatch = Capacity(module.settings.capacity)
    return model


def router_aux(
    logits: Float[Array, "B T E"], indexes: Int[Array, "B T k"], live: Bool[Array, "B T"], settings: Experts
) -> dict[str, Array]:
    """Load and aux losses of one layer, over its live tokens."""
    real = live.astype(logits.dtype)
    counts = jnp.sum((indexes[..., None] == jnp.arange(settings.count)).astype(logits.dtype), (1, 2))  # [B E]; nothing is kept of it
    scores = jax.nn.sigmoid(logits) if settings.score == "sigmoid" else jax.nn.softmax(logits)
    shares = jnp.sum(real[..., None] * scores / jnp.sum(scores, -1, keepdims=True), 1)  # [B E]
    tokens = jnp.sum(real, 1, keepdims=True)  # [B 1]
    lse = jax.nn.logsumexp(logits, -1)
    f, P = counts, shares
    if settings.balance_over == "batch":
        f, P, divisor = jnp.sum(counts, 0, keepdims=True), jnp.sum(shares, 0, keepdims=True), jnp.sum(tokens)
    else:
        divisor = tokens
    divisor = jnp.maximum(divisor, 1.0)
    return {
        "load": jnp.sum(counts, 0),
        "balance": jnp.broadcast_to(settings.count * jnp.sum(f / divisor * (P / divisor), 1), real.shape[:1]),
        "router_z": jnp.sum(real * lse * lse, 1) / jnp.maximum(tokens[:, 0], 1.0),
    }
