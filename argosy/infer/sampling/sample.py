"""Samples the next token from logits, each row with its own settings.

The settings apply in the usual order: bias, penalties, temperature, top-k, top-p, min-p, typical, draw. Each token comes with two
log-probabilities: that of the model, before all of these, and that in the distribution which the token was drawn from, after all.

    repetition    divides positive logits of tokens in prompt or completion, and multiplies negative ones (CTRL, arXiv:1909.05858)
    presence      is subtracted from the logits of tokens in the completion (the OpenAI API)
    frequency     is subtracted once for each occurrence of the token in the completion (the OpenAI API)
    top-p         keeps the fewest likeliest tokens whose probabilities sum to p (arXiv:1904.09751)
    min-p         keeps tokens whose probability is at least this share of the likeliest token's (arXiv:2407.01082)
    typical       keeps the fewest tokens with information nearest to the entropy whose probabilities sum to p (arXiv:2202.00666)

The vocabulary is never sorted: sorting 4 rows of 131,072 logits takes 110 ms on a CPU, finding their 256 likeliest 1.2 ms. These 256
are enough for top-k up to 256, and for top-p if their probabilities sum to p. Otherwise, and for typical sampling, the threshold is
found by bisection over the bits of a float32, in 32 passes. Min-p is itself a threshold.

A token is drawn in two steps (`infer.sampling.draw`) from the whole vocabulary, with the logits of excluded tokens at minus infinity.
So a row draws the same token whichever way its threshold was found, and therefore whatever other rows of the batch ask for.
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

# Number of likeliest tokens in which thresholds are searched before the whole vocabulary.
CANDIDATES = 256
# The 256 likeliest count as reaching p only if they exceed it by more than the rounding of a float32 sum over the vocabulary.
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


# The settings that the device has as arrays, with one number per row.
COLUMNS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip


def sampling_columns(rows: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """Turns the settings of rows into one array [rows] for each of `COLUMNS`. A further array, `tail`, is 1 - top_p, computed in
    float64: in float32, 1 - 0.999999 is 5 % off."""
    columns = {
        name: np.asarray([getattr(r, name) for r in rows], np.int32 if name == "top_k" else np.float32) for name in COLUMNS
    }
    # The device treats subnormal numbers as 0, which would mean no sampling.
    warm = columns["temperature"]
    columns["temperature"] = np.where([r.temperature > 0 for r in rows], np.maximum(warm, np.finfo(np.float32).tiny), warm)
    return columns | {"tail": np.asarray([1 - r.top_p for r in rows], np.float64).astype(np.float32)}


# ---------------------------------------------------------------- randomness


def random_streams(seed: Seed, rows: Sequence[int]) -> Any:
    """Returns a random key for each of these rows. Seed and row are folded in one after the other, never added, so row 1 of seed 0 has
    nothing in common with row 0 of seed 1.

    Args:
        seed: a whole number of up to 64 bits, all of which count; or several, such as a run's seed and a step.
        rows: indices of the rows, such as those of prompts in a batch.

    Raises:
        BadInput: the seed has more than 64 bits.
    """
    return _streams(np.asarray(seed_words(seed), np.uint32), np.asarray(rows, np.uint32))


def seed_words(seed: Any) -> list[int]:
    """Splits a seed into words of 32 bits, two for each number, the lower word first.

    Raises:
        BadInput: the seed has more than 64 bits, or is no whole number.
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
    """The data of the random keys of rows [rows 2]."""
    return jax.random.key_data(_row_keys(words, rows))


_streams, stream_data = jax.jit(_row_keys), Program(_data)


# ---------------------------------------------------------------- choosing


class NextTokens(NamedTuple):
    """The next token of each row.

    tokens: the token ids.
    logprobs: their log-probabilities by the model alone, before bias, mask, penalties, temperature and filters.
    drawn: their log-probabilities in the distributions that they were drawn from; 0 for a row at temperature 0.
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
    """Samples the next token of each row. All filters are in the compiled program, but those that no row asks for are not computed.

    Args:
        logits: the logits of the model.
        scored: the logits after bias, penalties and mask.
        settings: the columns of `sampling_columns`.
        keys: a random key for each row.
        live: the rows whose tokens are used; None: all. The other rows get arbitrary tokens.
        filtered: whether a row may have a filter (top-k, top-p, min-p, typical).
        conditional: whether the device skips what no row asks for (`jax.lax.cond`). If false, filters are always computed, and no row
            with a temperature above 0 may use `typical_p`.
    """
    hot = settings["temperature"] > 0 if live is None else live & (settings["temperature"] > 0)
    greedy = largest_token(scored)

    def by_chance() -> tuple[Array, Array]:
        # Logits are shifted before they are divided: at a temperature of 1e-10 a quotient is too large to add noise to in float32, and
        # at 1e-38 it is infinite.
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
    """Whether each row has a penalty [B] bool. The columns of `settings` may be JAX or NumPy arrays."""
    repetition, presence, frequency = (settings[f"{name}_penalty"] for name in ("repetition", "presence", "frequency"))
    return (repetition != 1) | (presence != 0) | (frequency != 0)


def token_logprobs(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Float[Array, "B"]:
    """The log-probability of each row's token, by softmax(logits)."""
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
    """Draws one token per row from the tokens that its filters leave. Returns the tokens and their log-probabilities in that
    distribution. Rows at temperature 0 get arbitrary values.

    Args:
        logits: the logits, divided by the temperature.
        settings, keys, conditional: as in `next_tokens`.
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

    # `draw_token` is called in one place only: a program with several calls takes longer to compile, and more memory.
    some = (draws & has_filter(settings)).any()
    return draw_token(jax.lax.cond(some, filtered, lambda: logits) if conditional else filtered(), keys)


def has_filter(settings: dict[str, Any]) -> Any:
    """Whether each row has a filter [B] bool. The columns of `settings` may be JAX or NumPy arrays."""
    top = (settings["top_k"] > 0) | (settings["top_p"] < 1)
    return top | (settings["min_p"] > 0) | (settings["typical_p"] < 1)


def typical_tokens(logits: Float[Array, "B V"], p: Float[Array, "B"]) -> Bool[Array, "B V"]:
    """Whether typical sampling keeps each token: the fewest tokens with information nearest to the entropy whose probabilities sum to
    p. If p is 1, all are kept."""
    logprobs = jax.nn.log_softmax(logits, -1)
    share = jnp.exp(logprobs)
    entropy = -jnp.where(share > 0, share * logprobs, 0.0).sum(-1, keepdims=True)
    near = jnp.where(share > 0, -jnp.abs(logprobs + entropy), -jnp.inf)
    stays = near >= lowest_by_bits(near, lambda above: jnp.where(above, share, 0.0).sum(-1) < p)[:, None]
    return (stays & (share > 0)) | (p >= 1)[:, None]


def likeliest(
    logits: Float[Array, "B V"], count: int = CANDIDATES
) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
    """The `count` largest logits of each row, descending, and their token ids."""
    top, ids = jax.lax.top_k(logits, min(count, logits.shape[-1]))
    # The barrier keeps values and ids together: if only one of them is used, XLA:CPU turns the top-k into a sort of the vocabulary.
    # It has a third operand because XLA drops a tuple of exactly these two, and then crashes on a top-k whose user is a barrier.
    top, ids, _ = jax.lax.optimization_barrier((top, ids, logits[:, :1]))
    return top, ids


def threshold(
    logits: Float[Array, "B V"], top: Float[Array, "B C"], settings: dict[str, Array]
) -> Float[Array, "B"]:
    """The smallest logit in each row that passes top-k, then top-p among the rest, then min-p. Minus infinity for rows without filters.

    Args:
        top: the largest logits of each row, from `likeliest`.
        settings: as in `next_tokens`.
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
    """The smallest logit in each row that passes top-k, then top-p among the rest, found by bisection over the whole vocabulary."""
    by_k = lowest_by_bits(logits, lambda above: above.sum(-1) < k)
    passing = logits >= by_k[:, None]
    mass = jnp.where(passing, jnp.exp(logits - jnp.max(logits, -1, keepdims=True)), 0.0)
    share = mass / mass.sum(-1, keepdims=True)
    p, tail = settings["top_p"], settings["tail"]

    def too_little(above: Bool[Array, "B V"]) -> Bool[Array, "B"]:
        # For a small p, the probabilities above are summed. For a p near 1 the rest is summed, because a float32 sum of those above has
        # no digits left for 1 - p.
        before, after = jnp.where(above, share, 0.0).sum(-1), jnp.where(above, 0.0, share).sum(-1)
        return (p >= 1) | jnp.where(p < 0.5, before < p, after > tail)

    return jnp.maximum(by_k, lowest_by_bits(logits, too_little))


def lowest_by_bits(
    values: Float[Array, "B V"], stays: Callable[[Bool[Array, "B V"]], Bool[Array, "B"]]
) -> Float[Array, "B"]:
    """The smallest value of each row that `stays` keeps, found by bisection over float32 bits, which have the order of the values if
    read as integers.

    Args:
        stays: returns whether a value of each row is kept, given a mask of the tokens with larger values. It must be monotonic: false
            for all values below one for which it is false. The largest value is always kept.
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
    """Finds the smallest logit that passes top-k and top-p among the largest logits only. Returns it for each row, and whether the
    probabilities of `ranked` within the top k sum to p for certain.

    The result is exact for a row if `ranked` is its whole vocabulary, contains its top k, or sums to p.

    Args:
        ranked: the largest logits of each row, descending.
        k: the top-k of each row; the vocabulary size for none.
        total: the sum of exp(logit - largest logit) over the vocabulary.
        settings: as in `next_tokens`.
    """
    C = ranked.shape[-1]
    inside = jnp.arange(C, dtype=jnp.int32)[None] < k[:, None]
    mass = jnp.where(inside, jnp.exp(ranked - ranked[:, :1]), 0.0)
    here = mass.sum(-1)
    all_k = (k <= C)[:, None]
    norm = jnp.where(all_k, here[:, None], total[:, None])
    outside = jnp.where(all_k, 0.0, jnp.maximum(total - here, 0.0)[:, None])
    share = mass / norm
    # A token stays if the sum before it is below p. For a small p the sum runs from the front. For a p near 1 it runs from the back,
    # because a float32 sum from the front has no digits left for 1 - p.
    before = jnp.cumsum(share, -1) - share
    after = jnp.cumsum(share[:, ::-1], -1)[:, ::-1] + outside / norm
    p, tail = settings["top_p"][:, None], settings["tail"][:, None]
    stays = (p >= 1) | jnp.where(p < 0.5, before < p, after > tail)
    stays = (inside & stays).at[:, 0].set(True)
    reached = here / total >= settings["top_p"] + MARGIN
    return jnp.min(jnp.where(stays, ranked, jnp.inf), -1), reached
