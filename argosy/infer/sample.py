"""From logits to the next token, each row by its own settings.

In the order of the field: penalties, temperature, top-k, top-p, min-p, draw. Log-probabilities are those of the model itself,
before any of them. What no row asks for costs nothing: `Need` is static, and a batch of greedy rows is one argmax.

    repetition    logits above 0 divided, below 0 multiplied, of tokens in prompt or answer (CTRL, arXiv:1909.05858)
    presence, frequency    subtracted once, and once for each occurrence, of tokens in the answer (the OpenAI API)
    top-p         the likeliest tokens whose sum first reaches p (arXiv:1904.09751)
    min-p         tokens at least this share as likely as the likeliest (arXiv:2407.01082)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from argosy.core.settings import Settings


class Sampling(Settings):
    """How tokens are chosen."""

    temperature: float = Field(0.0, ge=0)
    """At 0, the likeliest token each time."""
    top_k: int = Field(0, ge=0)
    """Only the k likeliest; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only the likeliest whose sum reaches p."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Only tokens this share as likely as the likeliest."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Above 1: tokens of prompt and answer become less likely."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from tokens that are in the answer."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from a token for each time it is in the answer."""


class Need(NamedTuple):
    """What at least one row asks for; fixes the program."""

    draws: bool
    filters: bool
    penalties: bool

    @classmethod
    def of(cls, rows: list[Sampling]) -> "Need":
        return cls(
            draws=any(r.temperature > 0 for r in rows),
            filters=any(r.temperature > 0 and (r.top_k or r.top_p < 1 or r.min_p) for r in rows),
            penalties=any(r.repetition_penalty != 1 or r.presence_penalty or r.frequency_penalty for r in rows),
        )


def table(rows: list[Sampling]) -> dict[str, np.ndarray]:
    """Each setting as one array over the rows."""
    return {
        name: np.asarray([getattr(r, name) for r in rows], np.int32 if name == "top_k" else np.float32)
        for name in Sampling.model_fields
    }


def choose(
    logits: Float[Array, "B V"],
    settings: dict[str, Array],
    keys: Any,
    need: Need,
    seen: Bool[Array, "B V"] | None = None,
    counts: Int[Array, "B V"] | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """The next token of each row, and its log-probability.

    Args:
        settings: from `table`.
        keys: a random key for each row.
        seen: tokens of prompt and answer. counts: times in the answer. Both only where `need.penalties`.
    """
    logits = logits.astype(jnp.float32)
    scored = logits
    if need.penalties and seen is not None and counts is not None:
        scored = penalised(logits, settings, seen, counts)
    tokens = jnp.argmax(scored, -1).astype(jnp.int32)
    if need.draws:
        warm = scored / jnp.maximum(settings["temperature"], 1e-6)[:, None]
        if need.filters:
            warm = filtered(warm, settings)
        drawn = jax.vmap(jax.random.categorical)(keys, warm).astype(jnp.int32)
        tokens = jnp.where(settings["temperature"] > 0, drawn, tokens)
    logprobs = jax.nn.log_softmax(logits, -1)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], -1)[:, 0]


def penalised(
    logits: Float[Array, "B V"], settings: dict[str, Array], seen: Bool[Array, "B V"], counts: Int[Array, "B V"]
) -> Float[Array, "B V"]:
    repetition = settings["repetition_penalty"][:, None]
    less = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, less, logits)
    times = counts.astype(jnp.float32)
    logits = logits - settings["frequency_penalty"][:, None] * times
    return logits - settings["presence_penalty"][:, None] * (counts > 0).astype(jnp.float32)


def filtered(logits: Float[Array, "B V"], settings: dict[str, Array]) -> Float[Array, "B V"]:
    """Minus infinity for what top-k, then top-p of what is left, then min-p rule out. One sort serves the three."""
    V = logits.shape[-1]
    ranked = -jnp.sort(-logits, -1)
    k = jnp.where(settings["top_k"] == 0, V, jnp.minimum(settings["top_k"], V))
    inside = jnp.arange(V)[None] < k[:, None]
    share = jax.nn.softmax(jnp.where(inside, ranked, -jnp.inf), -1)
    before = jnp.cumsum(share, -1) - share
    inside &= before < settings["top_p"][:, None]
    inside &= share >= settings["min_p"][:, None] * share[:, :1]
    lowest = jnp.min(jnp.where(inside, ranked, jnp.inf), -1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)
