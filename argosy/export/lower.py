"""A forward pass as portable StableHLO bytes, and back as a function. The weights remain arguments.

The bytes stay readable as long as `jax.export` promises: six months backward, three weeks forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from argosy.models.parts.weight import Leaves, abstract, merge, split


def lower(model: Any, *, platforms: Sequence[str] = ("cpu", "cuda", "tpu")) -> bytes:
    """Exports the logits of whole sequences as a program (weights, tokens [B T], segments [B T]) -> [B T V]; of an encoder, its
    vectors [B T D].

    B and T are left open, so one program serves every shape.
    """
    graph, _ = split(model)

    def forward(weights: Leaves, tokens: Any, segments: Any) -> Any:
        return merge(graph, weights)(tokens, model.config.attend(segments))[0]

    B, T = export.symbolic_shape("B, T")
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
    # Several platforms at once, and an unknown T, need the reference implementation: kernels and blocks are specific to
    # one platform.
    exported = export.export(jax.jit(forward), platforms=list(platforms))(abstract(model), ids, ids)
    return bytes(exported.serialize())


def raise_again(program: bytes) -> Callable[..., Any]:
    """The function that `lower` exported."""
    return jax.jit(export.deserialize(bytearray(program)).call)
