"""The types in which an optimizer's state is stored between steps: float32, bfloat16, or 8 bits with one scale per block.

    code = nearest of 256 levels to x / scale;   scale = largest |x| of its block          Dettmers et al. 2021 (arXiv:2110.02861)

The levels are the paper's dynamic tree. The number of leading zeros is the exponent, and the bits after them are a linear fraction. So
small numbers of a block keep one or two digits over seven orders of magnitude. Numbers that are never negative (the mean of squared
gradients) have other levels, all of them positive. Differences from the paper: blocks run along the last axis of a weight, so a sharded
weight needs no communication; and a block has at most 256 numbers, as in bitsandbytes since 0.44.

In the state, averages {parameter name: x} become `Stored(codes={name: ...}, scales={name: ...})`.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

# Numbers that share a scale, and the fewest numbers of a layer's weight whose state is stored in 8 bits.
BLOCK, FEWEST = 256, 4096


class Stored(NamedTuple):
    """Averages in 8 bits.

    codes: the codes, by parameter name.
    scales: the scale of each block, by parameter name.
    """

    codes: Any
    scales: Any


@cache
def levels(signed: bool) -> Any:
    """Returns the 256 levels of bitsandbytes' `create_dynamic_map`, ascending, between -1 and 1 if `signed`, otherwise between 0 and
    1."""
    import numpy as np

    bits = 7
    out: list[float] = []
    for zeros in range(bits):
        exponent = 10.0 ** (zeros - bits + 1)
        # Signed ones spend a bit on the sign.
        count = (2**zeros if signed else 2 ** (zeros + 1)) + 1
        edges = np.linspace(0.1, 1, count, dtype=np.float32)
        means = (edges[:-1] + edges[1:]) / 2.0
        out += [*(exponent * means).tolist(), *((-exponent * means).tolist() if signed else [])]
    out += [0.0, 1.0]
    assert len(out) == 256, len(out)
    return np.sort(np.asarray(out, np.float32))


def encode_state(x: Any, signed: bool) -> tuple[Any, Any]:
    """Encodes an array [..., n] in 8 bits. Returns the codes [..., n] and the scales [..., blocks].

    Args:
        signed: whether numbers may be negative.
    """
    import jax.numpy as jnp

    n = x.shape[-1]
    blocks = math.ceil(n / BLOCK)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - n)]) if blocks > 1 else x
    parts = padded.reshape(*x.shape[:-1], blocks, -1)
    scales = jnp.max(jnp.abs(parts), -1)
    shares = parts / jnp.where(scales == 0, 1, scales)[..., None]
    table = levels(signed)
    codes = jnp.searchsorted(jnp.asarray((table[1:] + table[:-1]) / 2, x.dtype), shares).astype(jnp.uint8)
    return codes.reshape(padded.shape)[..., :n], scales.astype(jnp.float32)


def decode_state(codes: Any, scales: Any, signed: bool, dtype: Any) -> Any:
    """Decodes an array from its codes and scales."""
    import jax.numpy as jnp

    n = codes.shape[-1]
    each = jnp.repeat(scales, min(n, BLOCK), -1)[..., :n] if scales.shape[-1] > 1 else scales
    return (jnp.asarray(levels(signed))[codes] * each).astype(dtype)


def _numbers(x: Any, meaning: Any, stored: int) -> int:
    """Counts the numbers of one layer of a weight. Whether a state is stored in 8 bits depends on this count, so it does not depend on
    the layout of the layers."""
    return math.prod(x.shape[stored - len(meaning.letters) :])


def with_state_type(kind: str, rule: Any, meanings: Mapping[str, Any], nonnegative: frozenset[str], exact: frozenset[str]) -> Any:
    """Makes a rule store its averages of gradients in another type between steps. For float32, returns the rule unchanged.

    Args:
        kind: float32, bfloat16 or int8.
        meanings: the meanings of the weights. Their parameter names distinguish averages from other state.
        nonnegative: the names of fields of the state that are never negative.
        exact: the names of fields of the state that stay as they are.
    """
    if kind == "float32":
        return rule
    import jax
    import jax.numpy as jnp
    import optax

    def is_average(node: Any) -> bool:
        return isinstance(node, dict) and bool(node) and set(node) <= set(meanings)

    def is_packed(node: Any) -> bool:
        return isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], Stored)

    def field_of(path: Any) -> str:
        return next((key.name for key in reversed(path) if isinstance(key, jax.tree_util.GetAttrKey)), "")

    def pack(state: Any) -> Any:
        def packed(path: Any, node: Any) -> Any:
            field = field_of(path)
            if not is_average(node) or field in exact:
                return node
            if kind == "bfloat16":
                return {a: x.astype(jnp.bfloat16) for a, x in node.items()}
            few = {a: x for a, x in node.items() if _numbers(x, *meanings[a]) < FEWEST}
            pairs = {a: encode_state(x, field not in nonnegative) for a, x in node.items() if a not in few}
            return Stored({a: c for a, (c, _) in pairs.items()}, {a: s for a, (_, s) in pairs.items()}), few

        return jax.tree_util.tree_map_with_path(packed, state, is_leaf=is_average)

    def unpack(state: Any, params: Any) -> Any:
        def unpacked(path: Any, node: Any) -> Any:
            field = field_of(path)
            if is_packed(node):
                codes, scales = node[0]
                of = lambda a: decode_state(codes[a], scales[a], field not in nonnegative, params[a].dtype)  # noqa: E731
                return {a: of(a) if a in codes else node[1][a] for a in params if a in codes or a in node[1]}
            if kind == "bfloat16" and is_average(node) and field not in exact:
                return {a: x.astype(params[a].dtype) for a, x in node.items()}
            return node

        return jax.tree_util.tree_map_with_path(unpacked, state, is_leaf=lambda node: is_average(node) or is_packed(node))

    def update(updates: Any, state: Any, params: Any = None, **others: Any) -> Any:
        new_updates, new = optax.with_extra_args_support(rule).update(updates, unpack(state, params), params, **others)
        return new_updates, pack(new)

    return optax.GradientTransformationExtraArgs(lambda params: pack(rule.init(params)), update)
