"""The sampler's state on the device, and the programs that change it. Every array has a row per slot, so a request with other settings
compiles nothing. Engines on GPUs have three programs of the sampler (`SamplerFeatures`)."""

from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt16

from argosy.infer.sampling.restrictions import MAX_BIASES
from argosy.infer.sampling.sample import (
    NextTokens,
    Sampling,
    apply_penalties,
    has_filter,
    has_penalty,
    likeliest,
    next_tokens,
    sampling_columns,
)
from argosy.ops.programs.programs import Program

# Upper limit on the number of likeliest tokens that are returned with a token.
MOST_TOP = 20
# Counts of a token's occurrences stop here.
MAX_COUNT = 2**15 - 1


class Slots(NamedTuple):
    """The sampler's state, with a row for each slot.

    last: the token sampled last.
    sampled: number of tokens sampled so far.
    keys: the data of the random key.
    settings: the columns of `sample.sampling_columns`.
    top: number of likeliest tokens to return.
    history: twice the number of occurrences of each token in the completion, plus one if it is in the prompt. Counts stop at 32,767. It
        takes two bytes per token of the vocabulary, 0.3 MB a slot for a vocabulary of 152k.
    biased, biases: the tokens whose logits have a bias, and the biases. Unused entries have a token id beyond the vocabulary.
    mask: one bit for each token, the lowest bit first, set if the token is allowed. Read only if the slot has a mask.
    has_mask: whether the slot has a mask.
    """

    last: Int[Array, "N"]
    sampled: Int[Array, "N"]
    keys: Int[Array, "N 2"]
    settings: dict[str, Array]
    top: Int[Array, "N"]
    history: UInt16[Array, "N V"]
    biased: Int[Array, "N K"]
    biases: Float[Array, "N K"]
    mask: Int[Array, "N W"]
    has_mask: Bool[Array, "N"]


class SamplerOutput(NamedTuple):
    """The tokens that a step sampled, one for each row of the logits.

    tokens, logprobs, drawn: as in `sample.NextTokens`.
    likeliest: the largest log-probabilities of the model, descending; valid for rows whose requests ask for them.
    ids: the tokens with these log-probabilities.
    """

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    drawn: Float[Array, "B"]
    likeliest: Float[Array, "B C"]
    ids: Int[Array, "B C"]


def empty_slots(slots: int, vocab: int) -> Slots:
    """The initial state of slots without owners, as host arrays."""
    places = min(MAX_BIASES, vocab)
    plain: dict[str, Any] = {
        "last": np.zeros(slots, np.int32),
        "sampled": np.zeros(slots, np.int32),
        "keys": np.zeros((slots, 2), np.uint32),
        "settings": sampling_columns([Sampling()] * slots),
        "top": np.zeros(slots, np.int32),
        "history": np.zeros((slots, vocab), np.uint16),
        "biased": np.full((slots, places), vocab, np.int32),
        "biases": np.zeros((slots, places), np.float32),
        "mask": np.zeros((slots, -(-vocab // 32)), np.int32),
        "has_mask": np.zeros(slots, bool),
    }
    return Slots(**plain)


def slot_row(
    vocab: int,
    sampling: Sampling,
    key: np.ndarray,
    top: int,
    prompt: Sequence[int],
    completion: Sequence[int],
    mask: np.ndarray | None = None,
) -> Slots:
    """The row of the sampler's state for a slot's new owner, as host arrays without the slot axis.

    Args:
        vocab: the vocabulary size.
        key: the data of the request's random key [2].
        top: number of likeliest tokens to return.
        prompt: the token ids of the prompt.
        completion: the token ids of its completion so far, which a preempted request has.
        mask: the mask of the tokens that may follow, one bit per token; None: all may.
    """
    counts = np.bincount(np.asarray(completion, int), minlength=vocab)
    history = (2 * np.minimum(counts, MAX_COUNT)).astype(np.uint16)
    history[np.asarray(prompt)] |= np.uint16(1)
    places = min(MAX_BIASES, vocab)
    biased, biases = np.full(places, vocab, np.int32), np.zeros(places, np.float32)
    for i, (token, value) in enumerate(sampling.logit_bias.items()):
        biased[i], biases[i] = token, value
    plain: dict[str, Any] = {
        "last": np.int32([*prompt, *completion][-1]),
        "sampled": np.int32(len(completion)),
        "keys": key,
        "settings": {name: column[0] for name, column in sampling_columns([sampling]).items()},
        "top": np.int32(top),
        "history": history,
        "biased": biased,
        "biases": biases,
        "mask": np.zeros(-(-vocab // 32), np.int32) if mask is None else mask,
        "has_mask": np.bool_(mask is not None),
    }
    return Slots(**plain)


def _write_slot(slots: Slots, slot: Array, row: Slots) -> Slots:
    """The state after a slot got a new owner. Its `last` token is read if the prefilled chunks of a preempted request end before the
    last token, which a decode step then computes."""
    return jax.tree.map(lambda column, value: column.at[slot].set(value, mode="drop"), slots, row)


write_slot = Program(_write_slot, donate=0)


def _write_masks(slots: Slots, where: Int[Array, "B"], mask: Int[Array, "B W"]) -> Slots:
    """The state with new masks in the slots `where`. Slots out of range are ignored."""
    return slots._replace(
        mask=slots.mask.at[where].set(mask, mode="drop"), has_mask=slots.has_mask.at[where].set(True, mode="drop")
    )


write_masks = Program(_write_masks, donate=0)


def allowed_tokens(mask: Int[Array, "B W"], vocab: int) -> Bool[Array, "B V"]:
    """Unpacks masks of one bit per token into booleans."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(len(mask), -1)[:, :vocab] == 1


class SamplerFeatures(IntEnum):
    """The sampling settings that a program of the sampler handles.

    On a GPU the host waits for each condition (`jax.lax.cond`) that the device decides, and starts nothing meanwhile. Three conditions
    took 1.8 ms of a decode step of 3.9 ms (docs/guides/gpus.md). So engines on GPUs choose the smallest program that handles the
    settings of all requests in the step.
    """

    TEMPERATURE = 0
    """The temperature alone."""
    FILTERS = 1
    """top_k, top_p and min_p too."""
    ALL = 2
    """All settings, each computed only where some row has it."""

    @classmethod
    def by(cls, sampling: Sampling, top: int, *, mask: bool) -> "SamplerFeatures":
        """The smallest features that handle a request.

        Args:
            sampling: the request's sampling settings.
            top: number of likeliest tokens to return.
            mask: whether the request has a token mask.
        """
        columns = sampling_columns([sampling])
        draws = columns["temperature"][0] > 0
        if mask or top or sampling.logit_bias or has_penalty(columns)[0] or (draws and columns["typical_p"][0] < 1):
            return cls.ALL
        return cls.FILTERS if draws and has_filter(columns)[0] else cls.TEMPERATURE


def sample_rows(
    slots: Slots, logits: Float[Array, "B V"], owners: Int[Array, "B"], features: SamplerFeatures = SamplerFeatures.ALL
) -> tuple[Slots, SamplerOutput]:
    """Samples a token for each row that has an owner; other rows get arbitrary tokens. Returns the updated state and the tokens.

    Args:
        slots: the sampler's state.
        logits: the logits of the model.
        owners: the slot of each row; -1: none.
        features: the sampling settings that rows may use.
    """
    count, vocab = slots.history.shape
    rows = jnp.arange(len(owners), dtype=jnp.int32)
    live, mine = owners >= 0, jnp.clip(owners, 0, count - 1)
    settings = {name: column[mine] for name, column in slots.settings.items()}
    # Used entries come first, so the first one tells whether there is any.
    has_bias = slots.biased[mine, 0] < vocab

    has_mask, keys = slots.has_mask[mine], jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(slots.keys[mine]), slots.sampled[mine])

    def by_all_settings() -> NextTokens:
        def biased() -> Array:
            return logits.at[rows[:, None], slots.biased[mine]].add(slots.biases[mine], mode="drop")

        def changed() -> Array:
            history = slots.history[mine].astype(jnp.int32)
            return apply_penalties(scored, settings, history > 0, history >> 1)

        def allowed() -> Array:
            permitted = allowed_tokens(slots.mask[mine], vocab) | ~has_mask[:, None]
            return jnp.where(permitted, scored, -jnp.inf)

        scored = jax.lax.cond((live & has_bias).any(), biased, lambda: logits)
        scored = jax.lax.cond((live & has_penalty(settings)).any(), changed, lambda: scored)
        scored = jax.lax.cond((live & has_mask).any(), allowed, lambda: scored)
        return next_tokens(logits, scored, settings, keys, live)

    def by_temperature(**options: bool) -> NextTokens:
        return next_tokens(logits, logits, settings, keys, live, **options)

    # Rows that need more than a temperature. If there are none, the other path is taken, because each `cond` in `by_all_settings`
    # copies a result as large as the logits.
    some = live & (has_bias | has_mask | has_penalty(settings) | has_filter(settings) & (settings["temperature"] > 0))
    if features is SamplerFeatures.ALL:
        tokens, logprobs, drawn = jax.lax.cond(some.any(), by_all_settings, partial(by_temperature, filtered=False))
    else:
        tokens, logprobs, drawn = by_temperature(filtered=features is SamplerFeatures.FILTERS, conditional=False)
    C = min(MOST_TOP, logits.shape[-1])

    def best() -> tuple[Array, Array]:
        top, ids = likeliest(logits, C)
        return top - jax.nn.logsumexp(logits, -1, keepdims=True), ids.astype(jnp.int32)

    def none() -> tuple[Array, Array]:
        return jnp.zeros((len(owners), C), logits.dtype), jnp.zeros((len(owners), C), jnp.int32)

    top, ids = jax.lax.cond((live & (slots.top[mine] > 0)).any(), best, none) if features is SamplerFeatures.ALL else none()
    where, before = jnp.where(live, owners, count), slots.history[mine, tokens]
    slots = slots._replace(
        last=slots.last.at[where].set(tokens, mode="drop"),
        sampled=slots.sampled.at[where].add(1, mode="drop"),
        history=slots.history.at[where, tokens].set(jnp.where(before > 2 * MAX_COUNT - 1, before, before + 2), mode="drop"),
    )
    return slots, SamplerOutput(tokens, logprobs, drawn, top, ids)


sample = Program(sample_rows, donate=0, static=3)
