"""Rematerialization: what the backward pass recomputes instead of keeping (Chen et al. 2016, arXiv:1604.06174).

XLA:CPU drops optimization barriers before it merges equal instructions. In unrolled layers it therefore merges the recomputation with
the forward pass and keeps everything: `jax.checkpoint` alone saved 14 % of the temporaries of 12 layers. On CPUs, the recomputation of
unrolled layers is therefore a branch of a conditional. XLA cannot decide its predicate, which depends on the incoming gradient, so the
recomputation can be neither merged nor moved ahead (162 MB -> 28 MB; scanned layers 197 -> 28). Scanned layers do not need this,
because loop bodies are compiled separately. Other platforms keep barriers.

The residuals of an attention kernel's own backward pass are always kept (`ops.attention.KEPT`): the output, and a float32 for each
query and head. This takes the memory of one more activation per layer. Otherwise the kernel would run twice.
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

# What a layer recomputes. A tuple adds checkpoint names whose values are kept as well: ("full", "attention").
Remat = Literal["none", "dots", "full"] | tuple[str, ...]
NAMES: tuple[str, ...] = get_args(Kept)
# The checkpoint name of layers' inputs, where these are marked.
INPUT = "layer_input"
# The operations that take a layer's weight from an array of several layers, or from the host's memory, to its product.
PICKING = frozenset(
    (
        "device_put", "dynamic_slice", "slice", "squeeze", "reshape", "transpose", "broadcast_in_dim", "convert_element_type",
        "sharding_constraint",
    )
)  # fmt: skip


def rematerialize(function: Callable[..., Any], remat: Remat, unrolled: bool = False) -> Callable[..., Any]:
    """Wraps a layer so that its backward pass recomputes what `remat` does not keep.

    Args:
        remat: "none" keeps everything that the backward pass needs. "dots" keeps products with weights, including those of experts.
            "full" keeps only the input. The latter two also keep the residuals of attention kernels, and the values of the names that
            follow in a tuple.
        unrolled: whether the layer is in a program with other layers, not in a loop's body.
    """
    if remat == "none":
        return function
    again = jax.checkpoint(function, policy=_policy(remat))
    return _backward_in_branch(again) if unrolled and platform() == "cpu" else again


def _policy(remat: Remat, *more: str) -> Callable[..., bool]:
    """Returns the checkpoint policy of "dots" or "full", which also keeps the values of these names."""
    kind, *saved = (remat,) if isinstance(remat, str) else remat
    names = jax.checkpoint_policies.save_only_these_names(KEPT, *saved, *more, *([PRODUCT] if kind == "dots" else []))

    def keeps(primitive: Any, *args: Any, **params: Any) -> Any:
        return primitive.name in KEPT_PRIMITIVES or names(primitive, *args, **params)

    return keeps


def on_picked_weights(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Wraps a part of a loop's body that reads its weights from a stacked array in each iteration.

    The backward pass reads the weights again, where it would otherwise keep a copy of those of every iteration. Apart from that, it
    keeps what `rematerialize` keeps for this `remat`. The part's layers must mark their inputs as `INPUT`.
    """
    if remat != "none":
        return jax.checkpoint(function, policy=_policy(remat, INPUT), prevent_cse=False)
    return jax.checkpoint(function, prevent_cse=False, policy=lambda primitive, *_, **__: primitive.name not in PICKING)


def check_kept(model: nnx.Module, names: Iterable[str]) -> None:
    """Checks that a layer of the model marks values with each of these checkpoint names. A module's `marks` are the names it uses.

    Raises:
        BadInput: no layer uses a name, so keeping it would change nothing.
    """
    marked = {name for _, module in nnx.iter_modules(model) for name in getattr(module, "marks", ())}
    if missing := [name for name in names if name not in marked]:
        problem = f"execution.keep: no layer of this model has {' or '.join(missing)}"
        raise BadInput(problem, hint=f"it has {', '.join(name for name in NAMES if name in marked) or 'none of the names'}")


def _backward_in_branch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that its backward pass, with the recomputation, runs in a branch of a conditional."""

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
    """Returns true in a way that XLA cannot fold: the last bit of a number is less than 2."""
    bits = jax.lax.bitcast_convert_type(x[(0,) * x.ndim].astype(jnp.float32), jnp.uint32)
    return (bits & jnp.uint32(1)) < jnp.uint32(2)
