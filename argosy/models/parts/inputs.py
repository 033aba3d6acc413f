"""What enters a language model: token ids, embeddings in place of those of some tokens, and positions with several axes.

    model.hidden(ids, attend)                                   text
    model.hidden(Inputs(ids, Overlay(values, where)), attend)   text and images: `where` says at which tokens a tower's vectors stand

A text model never sees the difference: without an overlay, and with positions of one axis, the program is that of plain ids.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.data.batch import Field, Fields


class Overlay(NamedTuple):
    """Embeddings that replace those of some tokens, such as the vectors of an image's patches.

    values: the embeddings; anything where they are not used.
    where: the tokens whose embeddings they replace.
    """

    values: Float[Array, "B T D"]
    where: Bool[Array, "B T"]

    def onto(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The embeddings of the tokens, with these in place of some."""
        return jnp.where(self.where[..., None], self.values.astype(x.dtype), x)


class Inputs(NamedTuple):
    """The inputs of a language model.

    ids: token ids; at tokens of the overlay, any id of the vocabulary.
    overlay: embeddings in place of those of some tokens; None: there are none.
    positions: rotary positions with several axes (M-RoPE, arXiv:2409.12191): time, height and width of a patch. None: the positions
        that the strategy of attention gives, for every axis.
    """

    ids: Int[Array, "B T"]
    overlay: Overlay | None = None
    positions: Int[Array, "B T A"] | None = None


def as_inputs(tokens: Int[Array, "B T"] | Inputs) -> Inputs:
    """Inputs from plain token ids."""
    return tokens if isinstance(tokens, Inputs) else Inputs(tokens)


def overlay_fields(axes: int = 0) -> Fields:
    """The arrays of a batch that `batch_inputs` reads beside `tokens`.

    Args:
        axes: number of axes of rotary positions; 0 for those of the strategy of attention.
    """
    fields = {"overlay": Field("B T D", float, at="input"), "overlay_where": Field("B T", bool, at="input")}
    return fields | ({"rotary_positions": Field("B T A", int, at="input")} if axes else {})


def batch_inputs(batch: Mapping[str, Array]) -> Int[Array, "B T"] | Inputs:
    """The inputs of a training batch: its `tokens`, with an overlay and rotary positions where it has them."""
    overlay = Overlay(batch["overlay"], batch["overlay_where"]) if "overlay" in batch else None
    positions = batch.get("rotary_positions")
    return batch["tokens"] if overlay is None and positions is None else Inputs(batch["tokens"], overlay, positions)
