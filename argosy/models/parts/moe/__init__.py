"""Mixtures of experts: a router scores the experts for each token, the best few are applied, and their outputs are summed.

    p = score(W_r x)        y = sum over the k best experts e of  w_e Expert_e(x)  (+ Shared(x))

A strategy, `MoE.dispatch`, brings rows to their experts (`parts.moe.dispatch`): `Sorted`, which drops nothing, or `Capacity`. Each
device sorts the rows that it has. A mesh axis `expert` splits the experts, and rows are sent to the devices of their experts and back.
The weights of a device's experts are gathered over the other mesh axes that split rows, as in FSDP. A mesh axis `tensor` splits the
experts' features. Sequences never share a capacity, so results do not depend on batch size, gradient accumulation or devices.

The router always computes in float32 at least, because its choice is discrete and bfloat16 would make ties. Tokens that are not live go
to no expert and are not counted.

Aux outputs of a layer:

    load [E]          the number of assignments of each expert
    balance [B]       the unweighted load-balancing loss of each sequence
    router_z [B]      the unweighted z-loss of each sequence
    dropped [B]       with a capacity, the share of assignments that were dropped
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
    """Chooses the experts of each token. Returns their weights and indexes, best first.

    Groups and experts are chosen by score + bias. Weights come from the scores alone (DeepSeek-V3, arXiv:2412.19437). Without a bias,
    logits are compared instead of scores. They have the same order, and remain distinct where a float32 sigmoid is exactly 1, which is
    so for logits from 17 on.
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
        dims: the size of D.
        activation: the activation of the gate, also in the shared expert.
        act: a function of gate and up that replaces activation(gate) * up.
        bias: whether the router and the experts' projections have biases (gpt-oss).

    rotates: whether the input of the experts' `down` is rotated (`parts.rotations`). The shared expert has its own attribute.
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
        # Padding may hold NaN, and NaN times a weight of 0 is NaN.
        x = jnp.where(live[..., None], x, 0)
        # By default, accelerators multiply float32 numbers in bfloat16 or TF32.
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
        """Runs `choose` on the devices of the tokens, in a `shard_map`. Otherwise XLA would gather all rows for `top_k`."""
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
        """Computes the weighted sum over each token's experts, on the devices of the tokens. Also returns aux outputs.

        Args:
            indexes: the experts of each token. E stands for no expert.
        """
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
                # Weights are gathered, and their gradients summed, in the dtype of the products: half the bytes.
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
    """Returns how the arrays of one contraction over experts are split over the mesh axes `mesh_axes`, by address.

    Args:
        rows: the mesh axes that split rows. The result is then for the arrays as products read them: split along the experts E, and
            along the features M over axes that do not split rows, never along D. None: the result is for the arrays as they are stored.
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
    """Gathers a device's shard of an array of experts, inside a `shard_map`, from the stored split to the split that products read.

    The gradient is then reduce-scattered. If the array entered the `shard_map` gathered, every device would sum the whole gradient.
    """
    if leaf.shape[:1] == (1,) and stored[0] == used[0]:
        # XLA for TPUs does not reduce-scatter an axis that follows an axis of size 1. It would sum the whole array and slice it.
        return _gathered(leaf[0], PartitionSpec(*stored[1:]), PartitionSpec(*used[1:]))[None]
    for i, (stored_axis, used_axis) in enumerate(zip(stored, used)):
        if stored_axis != used_axis:
            leaf = jax.lax.all_gather(leaf, stored_axis, axis=i, tiled=True)
    return leaf


def with_capacity(model: nnx.Module) -> nnx.Module:
    """Sets the dispatch of every MoE whose settings have a capacity to `Capacity`, in place. For training steps. Returns the model."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MoE) and module.settings.capacity is not None:
            module.dispatch = Capacity(module.settings.capacity)
    return model


def router_aux(
    logits: Float[Array, "B T E"], indexes: Int[Array, "B T k"], live: Bool[Array, "B T"], settings: Experts
) -> dict[str, Array]:
    """Computes the expert loads and the aux losses of one layer, over live tokens."""
    real = live.astype(logits.dtype)
    counts = jnp.sum((indexes[..., None] == jnp.arange(settings.count)).astype(logits.dtype), (1, 2))  # [B E]; nothing of it is kept
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
