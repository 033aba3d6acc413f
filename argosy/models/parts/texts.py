"""Scores and embeddings of whole texts, from the hidden states of their tokens.

A score is read at the first token of a text in encoders and at the last token in decoders, as in transformers'
ForSequenceClassification. An embedding is pooled over all tokens, or read at the first or the last token, as in sentence-transformers
(Reimers and Gurevych 2019, arXiv:1908.10084).

Segments number the texts of a row from 1, and 0 is padding. A row holds up to s texts. Segment k is in slot k - 1.
B batch, T time, s slots, D width, Z scores.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy.models.parts.stack import Aux


def token_vectors(
    model: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"], types: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "B T D"], Any, Aux]:
    """Computes the hidden state of each token. Also returns the attention strategy, and the aux outputs of the layers.

    Args:
        types: the token types, 0 for the first text of a pair and 1 for the second. Only encoders read them. Default: 0.
    """
    attend = model.config.attend(segments)
    if model.config.causal:
        x, _, aux = model.hidden(tokens, attend)
    else:
        # RoBERTa has one token type only, which both texts of a pair get.
        x, _, aux = model.hidden(tokens, attend, types=None if types is None else jnp.minimum(types, model.config.types - 1))
    return x, attend, aux


def pair_types(positions: Int[Array, "B T"], segments: Int[Array, "B T"], second: Array) -> Int[Array, "B T"]:
    """Computes token types: 0 for tokens of the first text of a pair and for padding, 1 for tokens of the second text.

    Args:
        positions: the position of each token within its segment.
        second: [B s], the position at which the second text of each slot begins. 0 if the slot has one text only.
    """
    begin = jnp.take_along_axis(second.astype(jnp.int32), jnp.maximum(segments - 1, 0), 1)
    return ((begin > 0) & (positions >= begin) & (segments > 0)).astype(jnp.int32)


def text_places(segments: Int[Array, "B T"], slots: int, *, last: bool) -> Int[Array, "B s"]:
    """Returns the index along T of the first or the last token of each slot's text; 0 for empty slots."""
    return _ends(_of_slots(segments, slots, None), last=last)


def _ends(mask: Bool[Array, "B T s"], *, last: bool) -> Int[Array, "B s"]:
    if not last:
        return jnp.argmax(mask, 1).astype(jnp.int32)
    after = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], 1)
    return jnp.where(jnp.any(mask, 1), after, 0).astype(jnp.int32)


def _of_slots(segments: Int[Array, "B T"], slots: int, after: Int[Array, "B s"] | None) -> Bool[Array, "B T s"]:
    """Whether a token belongs to the text of a slot and is not one of the first `after` tokens of that text."""
    mask = segments[:, :, None] == jnp.arange(1, slots + 1, dtype=segments.dtype)
    return mask if after is None else mask & (jnp.cumsum(mask, 1, dtype=jnp.int32) > after[:, None])


def text_scores(
    model: Any, tokens: Int[Array, "B T"], segments: Int[Array, "B T"], types: Int[Array, "B T"] | None = None, slots: int = 1
) -> tuple[Float[Array, "B s Z"], Aux]:
    """Computes the scores of each text. Also returns the aux outputs of the layers. `types` as in `token_vectors`."""
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
    """Computes an embedding of each text. Also returns the aux outputs of the layers.

    If the model has a projection and `pooling` is the one that it was trained with, the pooled vector is projected.

    Args:
        pooling: one of `weights.hub.sentence_steps.POOLINGS`.
        after: how many tokens at the beginning of each text, such as a prompt, are excluded from pooling. The model still reads them.
            None: 0.
    """
    x, _, aux = model.hidden(tokens, model.config.attend(segments))
    vectors = pool_tokens(x.astype(jnp.float32), segments, pooling, slots, after)
    if pooling == model.config.pooling and hasattr(model, "project"):
        vectors = model.project(vectors.reshape(-1, vectors.shape[-1])).reshape(*vectors.shape[:2], -1)
    return vectors, aux


def pool_tokens(
    x: Float[Array, "B T D"], segments: Int[Array, "B T"], pooling: str, slots: int = 1, after: Int[Array, "B s"] | None = None
) -> Float[Array, "B s D"]:
    """Pools the vectors of each slot's tokens into one vector; 0 for empty slots. `pooling` and `after` are as in `text_vectors`."""
    mask = _of_slots(segments, slots, after)
    if pooling in ("cls", "last"):
        picked = jnp.take_along_axis(x, _ends(mask, last=pooling == "last")[:, :, None], 1)
        return jnp.where(jnp.any(mask, 1)[:, :, None], picked, 0.0)
    if pooling == "max":
        largest = [jnp.max(jnp.where(mask[:, :, k, None], x, -jnp.inf), 1) for k in range(slots)]
        return jnp.where(jnp.any(mask, 1)[:, :, None], jnp.stack(largest, 1), 0.0)
    share = mask.astype(x.dtype)
    return jnp.einsum("BTD,BTs->BsD", x, share) / jnp.maximum(share.sum(1), 1)[:, :, None]
