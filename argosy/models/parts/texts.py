"""Where whole texts are read: the head of scores reads an encoder at the first token of a text, and a decoder at the last, as
transformers' ForSequenceClassification does; a vector is pooled of all tokens, or read at the first or the last, as in
sentence-transformers (Reimers and Gurevych 2019, arXiv:1908.10084).

Segments number the texts of a row from 1; 0 is padding. A row holds up to s texts, segment k in slot k - 1.
B batch, T time, s slots, D width, Z scores.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.models.parts.stack import Aux


def token_vectors(
    model: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"], types: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "B T D"], Any, Aux]:
    """The vector of each token, the strategy of attention, and the aux outputs of the layers.

    Args:
        types: which of two texts a token belongs to, 0 or 1; only encoders that tell them apart read it.
    """
    attend = model.config.attend(segments)
    if model.config.causal:
        x, _, aux = model.hidden(tokens, attend)
    else:
        # RoBERTa has one type, whatever the text.
        x, _, aux = model.hidden(tokens, attend, types=None if types is None else jnp.minimum(types, model.config.types - 1))
    return x, attend, aux


def pair_types(positions: Int[Array, "B T"], segments: Int[Array, "B T"], second: Array) -> Int[Array, "B T"]:
    """Which of two texts each token belongs to.

    Args:
        second: [B s] where the second text of each slot begins; 0: there is none.
    """
    begin = jnp.take_along_axis(second.astype(jnp.int32), jnp.maximum(segments - 1, 0), 1)
    return ((begin > 0) & (positions >= begin) & (segments > 0)).astype(jnp.int32)


def text_places(segments: Int[Array, "B T"], slots: int, *, last: bool) -> Int[Array, "B s"]:
    """The place of the first or the last token of each slot; 0 in empty slots."""
    return _ends(_of_slots(segments, slots, None), last=last)


def _ends(mask: Bool[Array, "B T s"], *, last: bool) -> Int[Array, "B s"]:
    if not last:
        return jnp.argmax(mask, 1).astype(jnp.int32)
    after = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], 1)
    return jnp.where(jnp.any(mask, 1), after, 0).astype(jnp.int32)


def _of_slots(segments: Int[Array, "B T"], slots: int, after: Int[Array, "B s"] | None) -> Bool[Array, "B T s"]:
    """Whether a token belongs to the text of a slot, and is not among its first `after` ones."""
    mask = segments[:, :, None] == jnp.arange(1, slots + 1, dtype=segments.dtype)
    return mask if after is None else mask & (jnp.cumsum(mask, 1, dtype=jnp.int32) > after[:, None])


def text_scores(
    model: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"], types: Int[Array, "B T"] | None = None, slots: int = 1
) -> tuple[Float[Array, "B s Z"], Aux]:
    """The scores of each text, and the aux outputs of the layers."""
    x, _, aux = token_vectors(model, tokens, segments, types)
    places = text_places(segments, slots, last=model.config.causal)
    return model.unembed(jnp.take_along_axis(x, places[:, :, None], 1)), aux


def text_vectors(
    model: Any,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    pooling: str,
    slots: int = 1,
    after: Int[Array, "B s"] | None = None,
) -> tuple[Float[Array, "B s D"], Aux]:
    """The vector of each text, and the aux outputs of the layers. A vector that is pooled as the model was trained for is also
    projected, where the model has a projection for that.

    Args:
        pooling: one of `weights.hub.sentence_steps.POOLINGS`.
        after: number of tokens at the beginning of each text, such as its prompt, that are read and not pooled; None: 0.
    """
    x, _, aux = model.hidden(tokens, model.config.attend(segments))
    vectors = pool_tokens(x.astype(jnp.float32), segments, pooling, slots, after)
    if pooling == model.config.pooling and hasattr(model, "project"):
        vectors = model.project(vectors.reshape(-1, vectors.shape[-1])).reshape(*vectors.shape[:2], -1)
    return vectors, aux


def pool_tokens(
    x: Float[Array, "B T D"], segments: Int[Array, "B T"], pooling: str, slots: int = 1, after: Int[Array, "B s"] | None = None
) -> Float[Array, "B s D"]:
    """Pools the vectors of each slot's tokens into one; 0 where there are none. `after` as in `text_vectors`."""
    mask = _of_slots(segments, slots, after)
    if pooling in ("cls", "last"):
        picked = jnp.take_along_axis(x, _ends(mask, last=pooling == "last")[:, :, None], 1)
        return jnp.where(jnp.any(mask, 1)[:, :, None], picked, 0.0)
    if pooling == "max":
        largest = [jnp.max(jnp.where(mask[:, :, k, None], x, -jnp.inf), 1) for k in range(slots)]
        return jnp.where(jnp.any(mask, 1)[:, :, None], jnp.stack(largest, 1), 0.0)
    share = mask.astype(x.dtype)
    return jnp.einsum("BTD,BTs->BsD", x, share) / jnp.maximum(share.sum(1), 1)[:, :, None]
