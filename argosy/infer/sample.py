"""From logits to the next token, each row by its own settings.

In the order of the field: penalties, temperature, top-k, top-p, min-p, draw. Log-probabilities are the model's own, before any
of these.

    repetition    logits above 0 divided, below 0 multiplied, of tokens in prompt or answer (CTRL, arXiv:1909.05858)
    presence, frequency    subtracted once, and once for each occurrence, of tokens in the answer (the OpenAI API)
    top-p         the likeliest tokens whose probabilities first sum to p (arXiv:1904.09751)
    min-p         tokens at least this share as likely as the likeliest (arXiv:2407.01082)

The vocabulary is almost never sorted: sorting 4 rows of 131,072 logits takes 110 ms of CPU, their 256 likeliest 1.2 ms. These
decide top-k up to 256, and top-p where they reach p; the device falls back to the sort where they do not. Min-p is a threshold.

Each token of the vocabulary has random bits of its own, a function of the row's key and the token's id, and the token whose
exponential clock rings first is drawn (the Gumbel-max trick). So a row draws the same token whether its candidates or the whole
vocabulary take part, and therefore whatever the rows beside it ask for.
"""

import operator
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.settings import Settings

# Likeliest tokens that are looked at before the vocabulary is sorted.
CANDIDATES = 256
# The 256 likeliest reach p only if they do by more than the rounding of a float32 sum over the vocabulary.
MARGIN = 2e-6

Seed = int | Sequence[int]


class Sampling(Settings):
    """How tokens are chosen."""

    elsewhere: ClassVar = {
        "max_new_tokens": "did you mean `max_tokens`?",
        "max_length": "did you mean `max_tokens`? it does not count the prompt",
        "do_sample": "temperature=0 takes the likeliest token, above 0 draws",
        "num_return_sequences": "give the prompt several times: generate([prompt] * N)",
        "n": "give the prompt several times: generate([prompt] * N)",
    }

    temperature: float = Field(0.0, ge=0)
    """Divides the logits before a token is drawn; at 0 the likeliest token is taken and nothing is drawn."""
    top_k: int = Field(0, ge=0)
    """Draws from the k likeliest tokens only; 0 means all. Tokens tied with the last of them stay."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draws from the likeliest tokens whose probabilities first sum to p; 1 means all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draws from tokens at least this share as likely as the likeliest; 0 means all."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Above 1, makes tokens that are in the prompt or the answer less likely."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens that are in the answer."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from a token's logit for each time it is in the answer."""


class Need(NamedTuple):
    """What at least one row asks for. Static: a batch of greedy rows is one argmax. Filters are no part of it, since the device
    finds out for nothing whether a row has one, and a first `top_p` then compiles nothing."""

    draws: bool
    penalties: bool

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> "Need":
        return cls(
            draws=any(r.temperature > 0 for r in rows),
            penalties=any(r.repetition_penalty != 1 or r.presence_penalty or r.frequency_penalty for r in rows),
        )


def table(rows: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """Each setting as one array over the rows; and `tail`, 1 - top_p, subtracted in float64: in float32, 1 - 0.999999 is 5 %
    off."""
    columns = {
        name: np.asarray([getattr(r, name) for r in rows], np.int32 if name == "top_k" else np.float32)
        for name in Sampling.model_fields
    }
    return columns | {"tail": np.asarray([1 - r.top_p for r in rows], np.float64).astype(np.float32)}


# ---------------------------------------------------------------- randomness


def streams(seed: Seed, rows: Sequence[int]) -> Any:
    """A random key for each of these rows. Seed and row are folded in one after the other, never added: row 1 of seed 0 has
    nothing in common with row 0 of seed 1.

    Args:
        seed: a whole number of up to 64 bits, all of which count; or several, such as the seed of a run and a step.

    Raises:
        BadInput: a seed of more than 64 bits.
    """
    return _streams(np.asarray(words_of(seed), np.uint32), np.asarray(rows, np.uint32))


def words_of(seed: Any) -> list[int]:
    """A seed in words of 32 bits, two for each number.

    Raises:
        BadInput: more than 64 bits, or no number.
    """
    words: list[int] = []
    numbers: Any = seed if isinstance(seed, tuple | list) and seed else [seed]
    for one in numbers:
        try:
            number = operator.index(one)
        except TypeError:
            raise BadInput(f"seed {one!r} is no whole number") from None
        if not -(2**63) <= number < 2**64:
            raise BadInput(f"seed {number} has more than 64 bits", hint="give a smaller one")
        words += [number % 2**32, number // 2**32 % 2**32]
    return words


@jax.jit
def _streams(words: Array, rows: Array) -> Any:
    key = jax.random.key(words[0])
    for i in range(1, len(words)):
        key = jax.random.fold_in(key, words[i])
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def clocks(key: Any, tokens: Int[Array, "N"]) -> Float[Array, "N"]:
    """Minus the log of an exponential variable for each token (a Gumbel variable), by the token's id.

    The smallest wins, and of a vocabulary of 128k that is near 2^-17: so it comes from a uniform variable with 32 bits near 0,
    where `jax.random.gumbel` has 23.
    """
    bits = jax.vmap(lambda token: jax.random.key_data(jax.random.fold_in(key, token))[..., 0])(tokens)
    uniform = (bits.astype(jnp.float32) + 0.5) * np.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, np.float32(1 - 2**-24))))


# ---------------------------------------------------------------- choosing


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
        scored = penalized(logits, settings, seen, counts)
    tokens = jnp.argmax(scored, -1).astype(jnp.int32)
    if need.draws:
        warm = scored / jnp.maximum(settings["temperature"], 1e-6)[:, None]
        tokens = jnp.where(settings["temperature"] > 0, drawn(warm, settings, keys), tokens)
    own = jnp.take_along_axis(logits, tokens[:, None], -1)[:, 0]
    return tokens, own - jax.nn.logsumexp(logits, -1)


def penalized(
    logits: Float[Array, "B V"], settings: dict[str, Array], seen: Bool[Array, "B V"], counts: Int[Array, "B V"]
) -> Float[Array, "B V"]:
    repetition = settings["repetition_penalty"][:, None]
    less = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, less, logits)
    times = counts.astype(jnp.float32)
    logits = logits - settings["frequency_penalty"][:, None] * times
    return logits - settings["presence_penalty"][:, None] * (counts > 0).astype(jnp.float32)


def drawn(logits: Float[Array, "B V"], settings: dict[str, Array], keys: Any) -> Int[Array, "B"]:
    """One token a row, drawn from what its filters leave. Rows at temperature 0 get a token of no meaning."""
    everything = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    draws = settings["temperature"] > 0

    def from_all(least: Array) -> Array:
        race = logits + jax.vmap(clocks, (0, None))(keys, everything)
        return jnp.argmax(jnp.where(logits >= least[:, None], race, -jnp.inf), -1).astype(jnp.int32)

    def from_some() -> Array:
        top, ids = likeliest(logits)
        least = threshold(logits, top, settings)
        # Tied tokens can make more of them than there are candidates.
        few = ~draws | ((logits >= least[:, None]).sum(-1) <= top.shape[-1])

        def from_candidates() -> Array:
            race = jnp.where(top >= least[:, None], top + jax.vmap(clocks)(keys, ids), -jnp.inf)
            return jnp.take_along_axis(ids, jnp.argmax(race, -1)[:, None], -1)[:, 0]

        return jax.lax.cond(few.all(), from_candidates, lambda: from_all(least))

    filters = (settings["top_k"] > 0) | (settings["top_p"] < 1) | (settings["min_p"] > 0)
    free = jnp.full(logits.shape[:1], -jnp.inf, logits.dtype)
    return jax.lax.cond((draws & filters).any(), from_some, lambda: from_all(free))


def likeliest(logits: Float[Array, "B V"]) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
    """The largest logits of each row, descending, and their tokens."""
    top, ids = jax.lax.top_k(logits, min(CANDIDATES, logits.shape[-1]))
    # The barrier keeps values and tokens together: where a use needs one of them, XLA:CPU makes a sort of the vocabulary of it.
    # A third operand, because XLA drops a tuple of exactly the two, and then dies of a top-k whose user is a barrier.
    top, ids, _ = jax.lax.optimization_barrier((top, ids, logits[:, :1]))
    return top, ids


def threshold(
    logits: Float[Array, "B V"], top: Float[Array, "B C"], settings: dict[str, Array]
) -> Float[Array, "B"]:
    """The smallest logit that top-k, then top-p of what is left, then min-p leave in each row: minus infinity where there is no
    filter.

    Args:
        top: from `likeliest`.
    """
    V, C = logits.shape[-1], top.shape[-1]
    draws = settings["temperature"] > 0
    k = jnp.where((settings["top_k"] == 0) | (settings["top_k"] > V), V, settings["top_k"])
    some_k, some_p = k < V, settings["top_p"] < 1
    total = jnp.exp(logits - top[:, :1]).sum(-1)
    least, reached = lowest(top, k, total, settings)
    decided = ~draws | jnp.where(some_k, k <= C, ~some_p | reached) | (C == V)

    def by_sort() -> Array:
        return jnp.where(decided, least, lowest(-jnp.sort(-logits, -1), k, total, settings)[0])

    least = jax.lax.cond(decided.all(), lambda: least, by_sort)
    least = jnp.where(some_k | some_p, least, -jnp.inf)
    return jnp.maximum(least, top[:, 0] + jnp.log(settings["min_p"]))


def lowest(
    ranked: Float[Array, "B C"], k: Int[Array, "B"], total: Float[Array, "B"], settings: dict[str, Array]
) -> tuple[Float[Array, "B"], Bool[Array, "B"]]:
    """The smallest of these logits that top-k and top-p leave, and whether these, all within the k, sum to p for certain.

    Args:
        ranked: the largest logits of each row, descending: all of them, or at least its k unless they sum to p.
        total: the sum of exp(logit - largest) over the vocabulary.
    """
    C = ranked.shape[-1]
    inside = jnp.arange(C, dtype=jnp.int32)[None] < k[:, None]
    mass = jnp.where(inside, jnp.exp(ranked - ranked[:, :1]), 0.0)
    here = mass.sum(-1)
    all_k = (k <= C)[:, None]
    norm = jnp.where(all_k, here[:, None], total[:, None])
    outside = jnp.where(all_k, 0.0, jnp.maximum(total - here, 0.0)[:, None])
    share = mass / norm
    # A token stays if the sum before it is below p: summed from the front for a small p, and from the back for one near 1, where
    # a sum in float32 from the front has no digits left for 1 - p.
    before = jnp.cumsum(share, -1) - share
    after = jnp.cumsum(share[:, ::-1], -1)[:, ::-1] + outside / norm
    p, tail = settings["top_p"][:, None], settings["tail"][:, None]
    stays = (p >= 1) | jnp.where(p < 0.5, before < p, after > tail)
    stays = (inside & stays).at[:, 0].set(True)
    reached = here / total >= settings["top_p"] + MARGIN
    return jnp.min(jnp.where(stays, ranked, jnp.inf), -1), reached
