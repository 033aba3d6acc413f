"""A forward pass as portable StableHLO bytes, and back as a function. The weights remain arguments.

The bytes stay readable as long as `jax.export` promises: six months backward, three weeks forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from argosy.models.parts.weight import Leaves, abstract, merge, split


def lowered(
    model: Any, forward: Callable[..., Any], args: Sequence[Any], *, platforms: Sequence[str] = ("cpu", "cuda", "tpu")
) -> bytes:
    """Exports `forward(model, *args)` as a program (weights, *args) -> what it returns.

    Args:
        args: arrays, or their shapes and types, which may leave sizes open.
    """
    graph, _ = split(model)

    def program(weights: Leaves, *args: Any) -> Any:
        return forward(merge(graph, weights), *args)

    # Several platforms at once, and an unknown size, need the reference implementation: kernels and blocks are specific to one
    # platform.
    exported = export.export(jax.jit(program), platforms=list(platforms))(abstract(model), *args)
    return bytes(exported.serialize())


def lower(model: Any, *, platforms: Sequence[str] = ("cpu", "cuda", "tpu")) -> bytes:
    """Exports the logits of whole sequences as a program (weights, tokens [B T], segments [B T]) -> [B T V]; of an encoder, its
    vectors [B T D].

    B and T are left open, so one program serves every shape.
    """
    B, T = export.symbolic_shape("B, T")
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
    return lowered(model, lambda m, tokens, segments: m(tokens, m.config.attend(segments))[0], (ids, ids), platforms=platforms)


def raise_again(program: bytes) -> Callable[..., Any]:
    """The function that `lower` exported."""
    return jax.jit(export.deserialize(bytearray(program)).call)
