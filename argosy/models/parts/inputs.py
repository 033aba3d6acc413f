"""The inputs of a language model: token ids, embeddings that replace those of some tokens, and positions with several axes.

    model.hidden(ids, attend)                                   text
    model.hidden(Inputs(ids, Overlay(values, where)), attend)   text and images: `where` marks the tokens that stand for image patches

Without an overlay, and with positions of one axis, the compiled program is the same as that of plain ids.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.data.batch import Field, Fields


class Overlay(NamedTuple):
    """Embeddings that replace the embeddings of some tokens, such as the vectors of an image's patches.

    values: the embeddings. They are not read where `where` is false.
    where: whether a token's embedding is replaced.
    """

    values: Float[Array, "B T D"]
    where: Bool[Array, "B T"]

    def onto(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns x, the embeddings of the tokens, with `values` in place of those that `where` marks."""
        return jnp.where(self.where[..., None], self.values.astype(x.dtype), x)


class Inputs(NamedTuple):
    """The inputs of a language model.

    ids: token ids. Where the overlay replaces a token, any id of the vocabulary will do.
    overlay: embeddings that replace those of some tokens. None: no embedding is replaced.
    positions: rotary positions with several axes (M-RoPE, arXiv:2409.12191): time, height and width of a patch. None: every axis has
        the positions of the attention strategy.
    """

    ids: Int[Array, "B T"]
    overlay: Overlay | None = None
    positions: Int[Array, "B T A"] | None = None


def as_inputs(tokens: Int[Array, "B T"] | Inputs) -> Inputs:
    """Wraps plain token ids in `Inputs`. `Inputs` are returned unchanged."""
    return tokens if isinstance(tokens, Inputs) else Inputs(tokens)


def overlay_fields(axes: int = 0) -> Fields:
    """The arrays of a batch that `batch_inputs` reads in addition to `tokens`.

    Args:
        axes: the number of axes of rotary positions. 0: the batch has no rotary positions, and the attention strategy's are used.
    """
    fields = {"overlay": Field("B T D", float, at="input"), "overlay_where": Field("B T", bool, at="input")}
    return fields | ({"rotary_positions": Field("B T A", int, at="input")} if axes else {})


def batch_inputs(batch: Mapping[str, Array]) -> Int[Array, "B T"] | Inputs:
    """Returns the model's inputs for a training batch: its `tokens`, with an overlay and rotary positions if the batch has them."""
    overlay = Overlay(batch["overlay"], batch["overlay_where"]) if "overlay" in batch else None
    positions = batch.get("rotary_positions")
    return batch["tokens"] if overlay is None and positions is None else Inputs(batch["tokens"], overlay, positions)
