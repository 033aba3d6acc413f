"""Rematerialization: what the backward pass recomputes instead of keeping (Chen et al. 2016, arXiv:1604.06174).

XLA:CPU drops optimization barriers before it merges equal instructions. So in unrolled layers it finds that the recomputation
equals the forward pass and keeps everything: `jax.checkpoint` alone saved 14 % of the temporaries of 12 layers. There the
recomputation is put in a branch of a conditional whose predicate XLA cannot decide and which depends on the incoming gradient, so
it can be neither merged nor moved ahead (162 MB -> 28 MB; scanned layers 197 -> 28). Loop bodies are compiled separately, so
scanned layers do not need this, and other platforms keep barriers.

What an attention kernel leaves for its own backward pass is always kept (`ops.attention.KEPT`): an output and a float32 for each
query and head. Otherwise the kernel would run twice, for the memory of one more activation of each layer.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from argosy.core.errors import BadInput
from argosy.models.parts.einsum import PRODUCT
from argosy.models.settings import Kept
from argosy.ops.attention import KEPT, KEPT_PRIMITIVES
from argosy.parallel.scope import platform

# How a layer recomputes; with names behind it, what carries them is kept too: ("full", "attention").
Remat = Literal["none", "dots", "full"] | tuple[str, ...]
NAMES: tuple[str, ...] = get_args(Kept)
# The input of a layer, where it is marked.
INPUT = "layer_input"
# What a weight goes through on its way from an array of several layers, or from the host's memory, into a product.
PICKING = frozenset(
    (
        "device_put", "dynamic_slice", "slice", "squeeze", "reshape", "transpose", "broadcast_in_dim", "convert_element_type",
        "sharding_constraint",
    )
)  # fmt: skip


def rematerialize(function: Callable[..., Any], remat: Remat, unrolled: bool = False) -> Callable[..., Any]:
    """A layer whose backward pass recomputes.

    Args:
        remat: none keeps everything the backward pass needs; dots keeps the products with weights, including those of experts;
            full keeps only the input. Both keep what attention kernels leave, and what carries the names behind them.
        unrolled: whether the layer is in a program with other layers, not in a loop's body.
    """
    if remat == "none":
        return function
    again = jax.checkpoint(function, policy=_policy(remat))
    return _backward_in_branch(again) if unrolled and platform() == "cpu" else again


def _policy(remat: Remat, *more: str) -> Callable[..., bool]:
    """The policy of `dots` or `full`, with more names."""
    kind, *saved = (remat,) if isinstance(remat, str) else remat
    names = jax.checkpoint_policies.save_only_these_names(KEPT, *saved, *more, *([PRODUCT] if kind == "dots" else []))

    def keeps(primitive: Any, *args: Any, **params: Any) -> Any:
        return primitive.name in KEPT_PRIMITIVES or names(primitive, *args, **params)

    return keeps


def on_picked_weights(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A part of a loop which picks its weights anew in each step, and whose layers mark their inputs as `INPUT`. The backward pass
    picks them again, where it would keep those of every step; else it keeps what `rematerialize` layers keep."""
    if remat != "none":
        return jax.checkpoint(function, policy=_policy(remat, INPUT), prevent_cse=False)
    return jax.checkpoint(function, prevent_cse=False, policy=lambda primitive, *_, **__: primitive.name not in PICKING)


def check_kept(model: nnx.Module, names: Iterable[str]) -> None:
    """Checks that a layer of the model marks each name. What marks names lists them in its class, as `marks`.

    Raises:
        BadInput: none does, so keeping it would change nothing.
    """
    marked = {name for _, module in nnx.iter_modules(model) for name in getattr(module, "marks", ())}
    if missing := [name for name in names if name not in marked]:
        problem = f"execution.keep: no layer of this model has {' or '.join(missing)}"
        raise BadInput(problem, hint=f"it has {', '.join(name for name in NAMES if name in marked) or 'none of the names'}")


def _backward_in_branch(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with its backward pass, including the recomputation, in a branch of a conditional."""

    def called(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
        floats = [leaf for leaf, yes in zip(leaves, is_float) if yes]
        others = [leaf for leaf, yes in zip(leaves, is_float) if not yes]

        def of_floats(floats: list[Array], others: list[Array]) -> Any:
            rest, moving = iter(others), iter(floats)
            return function(*jax.tree.unflatten(tree, [next(moving if yes else rest) for yes in is_float]))

        @jax.custom_vjp
        def run(floats: list[Array], others: list[Array]) -> Any:
            return of_floats(floats, others)

        def forward(floats: list[Array], others: list[Array]) -> tuple[Any, Any]:
            return jax.vjp(lambda floats: of_floats(floats, others), floats)

        def backward(pull: Any, gradient: Any) -> tuple[Any, None]:
            incoming, shape = jax.tree.flatten(gradient)
            moving = [i for i, leaf in enumerate(incoming) if leaf.dtype != jax.dtypes.float0]

            def pull_back(pull: Any, leaves: list[Array]) -> Any:
                all_inputs = list(incoming)
                for i, leaf in zip(moving, leaves):
                    all_inputs[i] = leaf
                return pull(jax.tree.unflatten(shape, all_inputs))[0]

            def never(pull: Any, leaves: list[Array]) -> Any:
                return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in floats_like]

            leaves = [incoming[i] for i in moving]
            floats_like = jax.eval_shape(pull_back, pull, leaves)
            return jax.lax.cond(_always(leaves[0]), pull_back, never, pull, leaves), None

        run.defvjp(forward, backward)
        return run(floats, others)

    return called


def _always(x: Array) -> Array:
    """True, but XLA cannot know: the last bit of a number is less than 2."""
    bits = jax.lax.bitcast_convert_type(x[(0,) * x.ndim].astype(jnp.float32), jnp.uint32)
    return (bits & jnp.uint32(1)) < jnp.uint32(2)
