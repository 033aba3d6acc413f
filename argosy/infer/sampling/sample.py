"""From logits to the next token, each row by its own settings.

In the order of the field: bias, penalties, temperature, top-k, top-p, min-p, typical, draw. Log-probabilities are the model's own,
before any of these; a second one is that of the distribution that was drawn from, after all of them.

    repetition    logits above 0 divided, below 0 multiplied, of tokens in prompt or completion (CTRL, arXiv:1909.05858)
    presence, frequency    subtracted once, and once for each occurrence, of tokens in the completion (the OpenAI API)
    top-p         the likeliest tokens whose probabilities first sum to p (arXiv:1904.09751)
    min-p         tokens at least this share as likely as the likeliest (arXiv:2407.01082)
    typical       the tokens with information nearest to the entropy, whose probabilities first sum to p (arXiv:2202.00666)

The vocabulary is never sorted: sorting 4 rows of 131,072 logits takes 110 ms of CPU, their 256 likeliest 1.2 ms. These decide top-k
up to 256, and top-p where they reach p. Where they do not, and for typical sampling, the threshold is found by bisection over the
bits of a float32, in 32 passes. Min-p is a threshold as it is.

A token is drawn in two steps (`infer.sampling.draw`), from the whole vocabulary with what the filters exclude at minus infinity. So a
row draws the same token whether its candidates or a bisection decided what is left, and therefore whatever the rows beside it ask for.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.settings import Settings
from argosy.infer.sampling.draw import draw_token, largest_token
from argosy.ops.programs.programs import Program

# Likeliest tokens that are looked at before the whole vocabulary is.
CANDIDATES = 256
# The 256 likeliest reach p only if they do by more than the rounding of a float32 sum over the vocabulary.
MARGIN = 2e-6

Seed = int | Sequence[int]


class Sampling(Settings):
    """The settings of sampling."""

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
    typical_p: float = Field(1.0, gt=0, le=1)
    """Draws from the tokens whose information is nearest to the entropy and whose probabilities first sum to p; 1 means all."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Above 1, makes tokens that are in the prompt or the completion less likely."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens that are in the completion."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from a token's logit for each time it is in the completion."""
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Added to the logits of these token ids; -100 bans a token, 100 forces it."""
    allowed_tokens: tuple[int, ...] | None = None
    """The only token ids that may be in the completion, besides those that end it; None: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that may not be in the completion: the last id of each is banned after the others."""
    min_tokens: int = Field(0, ge=0)
    """Tokens before the completion may end by an end-of-sequence token, a stop token or a stop string."""


# The settings that are columns of numbers on the device.
COLUMNS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip


def sampling_columns(rows: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """Each of `COLUMNS` as one array over the rows; and `tail`, 1 - top_p, subtracted in float64: in float32, 1 - 0.999999 is 5 %
    off."""
    columns = {
        name: np.asarray([getattr(r, name) for r in rows], np.int32 if name == "top_k" else np.float32) for name in COLUMNS
    }
    # A number below the smallest normal one counts as 0 on the device.
    warm = columns["temperature"]
    columns["temperature"] = np.where([r.temperature > 0 for r in rows], np.maximum(warm, np.finfo(np.float32).tiny), warm)
    return columns | {"tail": np.asarray([1 - r.top_p for r in rows], np.float64).astype(np.float32)}


# ---------------------------------------------------------------- randomness


def random_streams(seed: Seed, rows: Sequence[int]) -> Any:
    """A random key for each of these rows. Seed and row are folded in one after the other, never added: row 1 of seed 0 has
    nothing in common with row 0 of seed 1.

    Args:
        seed: a whole number of up to 64 bits, all of which count; or several, such as the seed of a run and a step.

    Raises:
        BadInput: a seed of more than 64 bits.
    """
    return _streams(np.asarray(seed_words(seed), np.uint32), np.asarray(rows, np.uint32))


def seed_words(seed: Any) -> list[int]:
    """A seed in words of 32 bits, two for each number.

    Raises:
        BadInput: more than 64 bits, or no number.
    """
    words: list[int] = []
    numbers: Any = seed if isinstance(seed, tuple | list) and seed else [seed]
    for entry in numbers:
        try:
            number = operator.index(entry)
        except TypeError:
            raise BadInput(f"seed {entry!r} is no whole number") from None
        if not -(2**63) <= number < 2**64:
            raise BadInput(f"seed {number} has more than 64 bits", hint="give a smaller one")
        words += [number % 2**32, number // 2**32 % 2**32]
    return words


def _row_keys(words: Array, rows: Array) -> Any:
    key = jax.random.key(words[0])
    for i in range(1, len(words)):
        key = jax.random.fold_in(key, words[i])
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def _data(words: Array, rows: Array) -> Array:
    """The data of keys [rows 2]."""
    return jax.random.key_data(_row_keys(words, rows))


_streams, stream_data = jax.jit(_row_keys), Program(_data)


# ---------------------------------------------------------------- choosing


class NextTokens(NamedTuple):
    """The next token of each row.

    logprobs: the model's own.
    drawn: log-probability in the distribution that it was drawn from; 0 for a row at temperature 0.
    """

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    drawn: Float[Array, "B"]


def next_tokens(
    logits: Float[Array, "B V"],
    scored: Float[Array, "B V"],
    settings: dict[str, Array],
    keys: Any,
    live: Bool[Array, "B"] | None = None,
    *,
    filtered: bool = True,
    conditional: bool = True,
) -> NextTokens:
    """The next token of each row. A filter that no row asks for is not computed, and the first that does compiles nothing.

    Args:
        logits: the model's own. scored: with biases and penalties.
        settings: from `sampling_columns`.
        keys: a random key for each row.
        live: rows that count; others get a token of no meaning.
        filtered: whether a row may have a filter.
        conditional: whether the device decides what no row asks for, and leaves that out. Otherwise no row that
            draws may ask for `typical_p`.
    """
    hot = settings["temperature"] > 0 if live is None else live & (settings["temperature"] > 0)
    greedy = largest_token(scored)

    def by_chance() -> tuple[Array, Array]:
        # Shifted before they are divided: at 1e-10 a quotient has no digits left for what is added to it, at 1e-38 it is infinite.
        warm = (scored - _highest(scored)) / jnp.where(hot, settings["temperature"], 1.0)[:, None]
        hot_settings = settings | {"temperature": jnp.where(hot, settings["temperature"], 0.0)}
        tokens, chance = draw_filtered(warm, hot_settings, keys, conditional) if filtered else draw_token(warm, keys)
        return jnp.where(hot, tokens, greedy), jnp.where(hot, chance, 0.0)

    none = jnp.zeros(logits.shape[:1], jnp.float32)
    tokens, chance = jax.lax.cond(hot.any(), by_chance, lambda: (greedy, none)) if conditional else by_chance()
    return NextTokens(tokens, token_logprobs(logits, tokens), chance)


def _highest(logits: Float[Array, "B V"]) -> Float[Array, "B 1"]:
    """The largest logit of each row; 0 where it is infinite, because no token is allowed."""
    top = logits.max(-1, keepdims=True)
    return jnp.where(jnp.isfinite(top), top, 0.0)


def has_penalty(settings: dict[str, Any]) -> Any:
    """The rows with a penalty [B], of the device or of the host."""
    repetition, presence, frequency = (settings[f"{name}_penalty"] for name in ("repetition", "presence", "frequency"))
    return (repetition != 1) | (presence != 0) | (frequency != 0)


def token_logprobs(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Float[Array, "B"]:
    """The log-probabilities of these tokens."""
    return jnp.take_along_axis(logits, tokens[:, None], -1)[:, 0] - jax.nn.logsumexp(logits, -1)


def apply_penalties(
    logits: Float[Array, "B V"], settings: dict[str, Array], occurs: Bool[Array, "B V"], counts: Int[Array, "B V"]
) -> Float[Array, "B V"]:
    repetition = settings["repetition_penalty"][:, None]
    less = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(occurs, less, logits)
    times = counts.astype(jnp.float32)
    logits = logits - settings["frequency_penalty"][:, None] * times
    return logits - settings["presence_penalty"][:, None] * (counts > 0).astype(jnp.float32)


def draw_filtered(
    logits: Float[Array, "B V"], settings: dict[str, Array], keys: Any, conditional: bool = True
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """One token a row, drawn from what its filters leave, and its log-probability there. Rows at temperature 0 get values of no
    meaning.

    Args:
        conditional: as in `next_tokens`.
    """
    draws = settings["temperature"] > 0

    def filtered() -> Array:
        least = threshold(logits, likeliest(logits)[0], settings)
        filtered_logits = jnp.where(logits >= least[:, None], logits, -jnp.inf)
        if not conditional:
            return filtered_logits

        def near_the_entropy() -> Array:
            return jnp.where(typical_tokens(filtered_logits, settings["typical_p"]), filtered_logits, -jnp.inf)

        return jax.lax.cond((draws & (settings["typical_p"] < 1)).any(), near_the_entropy, lambda: filtered_logits)

    # Drawn from in one place: a program with several of them takes longer to compile and more memory.
    some = (draws & has_filter(settings)).any()
    return draw_token(jax.lax.cond(some, filtered, lambda: logits) if conditional else filtered(), keys)


def has_filter(settings: dict[str, Any]) -> Any:
    """The rows with a filter [B], of the device or of the host."""
    top = (settings["top_k"] > 0) | (settings["top_p"] < 1)
    return top | (settings["min_p"] > 0) | (settings["typical_p"] < 1)


def typical_tokens(logits: Float[Array, "B V"], p: Float[Array, "B"]) -> Bool[Array, "B V"]:
    """The tokens whose information is nearest to the entropy, the fewest whose probabilities sum to p; all where p is 1."""
    logprobs = jax.nn.log_softmax(logits, -1)
    share = jnp.exp(logprobs)
    entropy = -jnp.where(share > 0, share * logprobs, 0.0).sum(-1, keepdims=True)
    near = jnp.where(share > 0, -jnp.abs(logprobs + entropy), -jnp.inf)
    stays = near >= lowest_by_bits(near, lambda above: jnp.where(above, share, 0.0).sum(-1) < p)[:, None]
    return (stays & (share > 0)) | (p >= 1)[:, None]


def likeliest(
    logits: Float[Array, "B V"], count: int = CANDIDATES
) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
    """The largest logits of each row, descending, and their tokens."""
    top, ids = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    # The barrier keeps values and tokens together: where a use needs one of them, XLA:CPU makes a sort of the vocabulary of it.
    # A third operand, because XLA drops a tuple of exactly the two, and then dies of a top-k whose user is a barrier.
    top, ids, _ = jax.lax.optimization_barrier((top, ids, logits[:, :1]))
    return top, ids


def threshold(
    logits: Float[Array, "B V"], top: Float[Array, "B C"], settings: dict[str, Array]
) -> Float[Array, "B"]:
    """The smallest logit in each row that passes top-k, then top-p of the rest, then min-p; minus infinity without filters.

    Args:
        top: the largest logits, from `likeliest`.
    """
    V, C = logits.shape[-1], top.shape[-1]
    draws = settings["temperature"] > 0
    k = jnp.where((settings["top_k"] == 0) | (settings["top_k"] > V), V, settings["top_k"])
    some_k, some_p = k < V, settings["top_p"] < 1
    total = jnp.exp(logits - top[:, :1]).sum(-1)
    least, reached = lowest_of_ranked(top, k, total, settings)
    decided = ~draws | jnp.where(some_k, k <= C, ~some_p | reached) | (C == V)

    def by_bits() -> Array:
        return jnp.where(decided, least, lowest_of_all(logits, k, settings))

    least = jax.lax.cond(decided.all(), lambda: least, by_bits)
    least = jnp.where(some_k | some_p, least, -jnp.inf)
    return jnp.maximum(least, top[:, 0] + jnp.log(settings["min_p"]))


def lowest_of_all(
    logits: Float[Array, "B V"], k: Int[Array, "B"], settings: dict[str, Array]
) -> Float[Array, "B"]:
    """The smallest logit in each row that passes top-k, then top-p of the rest."""
    by_k = lowest_by_bits(logits, lambda above: above.sum(-1) < k)
    passing = logits >= by_k[:, None]
    mass = jnp.where(passing, jnp.exp(logits - jnp.max(logits, -1, keepdims=True)), 0.0)
    share = mass / mass.sum(-1, keepdims=True)
    p, tail = settings["top_p"], settings["tail"]

    def too_little(above: Bool[Array, "B V"]) -> Bool[Array, "B"]:
        # Summed over what is above for a small p, and over the rest for one near 1, where a sum in float32 of what is above has no
        # digits left for 1 - p.
        before, after = jnp.where(above, share, 0.0).sum(-1), jnp.where(above, 0.0, share).sum(-1)
        return (p >= 1) | jnp.where(p < 0.5, before < p, after > tail)

    return jnp.maximum(by_k, lowest_by_bits(logits, too_little))


def lowest_by_bits(
    values: Float[Array, "B V"], stays: Callable[[Bool[Array, "B V"]], Bool[Array, "B"]]
) -> Float[Array, "B"]:
    """The smallest value of each row that stays, found by bisection over float32 bits, whose order as integers is that of the
    values.

    Args:
        stays: whether a value stays, given the tokens with larger ones; false for every value below one for which it is false. The
            largest value stays anyway.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    largest = jnp.max(ordered, -1)

    def halved(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        # `low` does not stay, `high` does.
        low, high = ends
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        keeps = stays(ordered > middle[:, None])
        return jnp.where(keeps, low, middle), jnp.where(keeps, middle, high)

    low = jnp.full(largest.shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    _, high = jax.lax.fori_loop(0, 32, halved, (low, largest))
    least = jnp.min(jnp.where(ordered >= high[:, None], ordered, largest[:, None]), -1)
    return jax.lax.bitcast_convert_type(jnp.where(least < 0, least ^ jnp.int32(0x7FFFFFFF), least), jnp.float32)


def lowest_of_ranked(
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
