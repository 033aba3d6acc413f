"""Reads scores and vectors of texts from a batch, for objectives over whole texts.

A batch has tokens and segments [B T]. For each slot of a row it has `live`, whether the slot holds a text; `second`, the position at
which the second text of a pair begins (0 without one); and the label."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from argosy.data.batch import Field, Fields
from argosy.models.parts.attention.attend import Bidirectional
from argosy.models.parts.stack import Aux
from argosy.models.parts.texts import pair_types, text_scores, text_vectors
from argosy.train.objectives.preferences.sequences import FIELDS, PER_SEQUENCE

TEXTS: Fields = {**{name: FIELDS[name] for name in ("tokens", "segments", "live")}, "second": PER_SEQUENCE}
# How many tokens of a text belong to its prompt.
PROMPT = "prompt_length"
LABELS = Field("B s z", np.float32, "row")


def batch_scores(model: Any, batch: dict[str, Array]) -> tuple[Float[Array, "B s Z"], Aux]:
    """Computes the scores of the texts of a batch, and the aux outputs of the layers."""
    segments = batch["segments"]
    types = None if model.config.causal else pair_types(model.config.attend(segments).positions, segments, batch["second"])
    return text_scores(model, batch["tokens"], segments, types, batch["live"].shape[1])


def vector_fields(include_prompt: bool) -> Fields:
    """Returns the fields of a batch that `batch_vectors` reads, by name.

    Args:
        include_prompt: whether the tokens of a text's prompt (instruction) are pooled too. If not, the batch must hold their number.
    """
    fields = {name: TEXTS[name] for name in ("tokens", "segments", "live")}
    return fields if include_prompt else fields | {PROMPT: PER_SEQUENCE}


def batch_vectors(model: Any, batch: dict[str, Array], pooling: str) -> tuple[Float[Array, "B s D"], Aux]:
    """Computes the vectors of the texts of a batch, and the aux outputs of the layers. If the batch holds the lengths of prompts, the
    tokens of prompts are not pooled."""
    after = batch[PROMPT].astype(jnp.int32) if PROMPT in batch else None
    return text_vectors(model, batch["tokens"], batch["segments"], pooling, batch["live"].shape[1], after)


def text_hashes(batch: dict[str, Array]) -> UInt32[Array, "B s"]:
    """Computes a hash of each text, which is equal for equal tokens. One in 4 billion pairs of different texts has equal hashes."""
    segments, slots = batch["segments"], batch["live"].shape[1]
    powers = np.cumprod(np.full(segments.shape[1], 0x9E3779B1, np.uint32), dtype=np.uint32)
    terms = (batch["tokens"].astype(jnp.uint32) + jnp.uint32(1)) * jnp.asarray(powers)[Bidirectional(segments).positions]
    mask = segments[:, :, None] == jnp.arange(1, slots + 1, dtype=segments.dtype)
    return jnp.sum(jnp.where(mask, terms[:, :, None], jnp.uint32(0)), 1, dtype=jnp.uint32)


def unit_rows(vectors: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
    """Divides vectors by their length. A vector of zeros stays."""
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors * vectors, -1, keepdims=True), 1e-12))
