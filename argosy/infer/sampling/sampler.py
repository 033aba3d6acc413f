"""The sampler's state on the device, and the programs that change it. Every array has a row per slot, so a request with other
settings compiles nothing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from argosy.infer.engine.programs import Program
from argosy.infer.sampling.sample import Chosen, Sampling, choose, filters, likeliest, penalized, penalizes, table

# Upper limit on the likeliest tokens that come with a token.
MOST_TOP = 20


class Slots(NamedTuple):
    """The state.

    last: the token sampled last. made: number of tokens sampled. keys: data of the random key. settings: from `sample.table`.
    top: number of likeliest tokens returned. seen: tokens in prompt or answer. counts: occurrences in the answer. bias: added to the
    logits, in slots that have one. mask: a bit for each token that is allowed, the lowest first, in slots that have one.
    """

    last: Int[Array, "N"]
    made: Int[Array, "N"]
    keys: Int[Array, "N 2"]
    settings: dict[str, Array]
    top: Int[Array, "N"]
    seen: Bool[Array, "N V"]
    counts: Int[Array, "N V"]
    bias: Float[Array, "N V"]
    has_bias: Bool[Array, "N"]
    mask: Int[Array, "N W"]
    has_mask: Bool[Array, "N"]


class Sampled(NamedTuple):
    """What a step sampled, by row of the logits. likeliest, ids: the likeliest tokens and their log-probabilities, descending, for
    rows that asked."""

    tokens: Int[Array, "B"]
    logprobs: Float[Array, "B"]
    drawn: Float[Array, "B"]
    likeliest: Float[Array, "B C"]
    ids: Int[Array, "B C"]


def fresh(slots: int, vocab: int) -> Slots:
    """The state of slots without an owner, as host arrays."""
    plain: dict[str, Any] = {
        "last": np.zeros(slots, np.int32),
        "made": np.zeros(slots, np.int32),
        "keys": np.zeros((slots, 2), np.uint32),
        "settings": table([Sampling()] * slots),
        "top": np.zeros(slots, np.int32),
        "seen": np.zeros((slots, vocab), bool),
        "counts": np.zeros((slots, vocab), np.int32),
        "bias": np.zeros((slots, vocab), np.float32),
        "has_bias": np.zeros(slots, bool),
        "mask": np.zeros((slots, -(-vocab // 32)), np.int32),
        "has_mask": np.zeros(slots, bool),
    }
    return Slots(**plain)


def ownership(
    vocab: int, slot: int, sampling: Sampling, key: np.ndarray, top: int, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[Any, ...]:
    """The arguments of `settled`, for a new owner of a slot whose answer has these tokens already."""
    seen, counts = np.zeros(vocab, bool), np.zeros(vocab, np.int32)
    seen[np.asarray([*prompt, *answer])] = True
    np.add.at(counts, np.asarray(answer, int), 1)
    row = {name: column[0] for name, column in table([sampling]).items()}
    last = np.int32([*prompt, *answer][-1])
    return np.int32(slot), last, row, key, np.int32(top), np.int32(len(answer)), seen, counts


def _settled(
    slots: Slots,
    slot: Array,
    last: Array,
    row: dict[str, Array],
    key: Array,
    top: Array,
    made: Array,
    seen: Array,
    counts: Array,
) -> Slots:
    """The state with a new owner of a slot, from `ownership`."""
    return slots._replace(
        # Read if chunks end before the last token of a preempted sequence: a decode step computes that one.
        last=slots.last.at[slot].set(last),
        made=slots.made.at[slot].set(made),
        keys=slots.keys.at[slot].set(key),
        settings={name: column.at[slot].set(row[name]) for name, column in slots.settings.items()},
        top=slots.top.at[slot].set(top),
        seen=slots.seen.at[slot].set(seen),
        counts=slots.counts.at[slot].set(counts),
        has_bias=slots.has_bias.at[slot].set(False),
        has_mask=slots.has_mask.at[slot].set(False),
    )


settled = Program(_settled, donate=0)


def _biased(slots: Slots, where: Int[Array, "B"], bias: Float[Array, "B V"]) -> Slots:
    """The state with other biases in these slots; a slot out of range is dropped."""
    return slots._replace(
        bias=slots.bias.at[where].set(bias, mode="drop"), has_bias=slots.has_bias.at[where].set(True, mode="drop")
    )


biased = Program(_biased, donate=0)


def _masked(slots: Slots, where: Int[Array, "B"], mask: Int[Array, "B W"]) -> Slots:
    """The state with other masks in these slots; a slot out of range is dropped."""
    return slots._replace(
        mask=slots.mask.at[where].set(mask, mode="drop"), has_mask=slots.has_mask.at[where].set(True, mode="drop")
    )


masked = Program(_masked, donate=0)


def unpacked(mask: Int[Array, "B W"], vocab: int) -> Bool[Array, "B V"]:
    """The bits of masks, one for each token."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(len(mask), -1)[:, :vocab] == 1


def sampled(slots: Slots, logits: Float[Array, "B V"], owners: Int[Array, "B"]) -> tuple[Slots, Sampled]:
    """Samples a token for each row that has an owner.

    Args:
        owners: the slot of each row, -1 for none.
    """
    count = slots.last.shape[0]
    live, mine = owners >= 0, jnp.clip(owners, 0, count - 1)
    settings = {name: column[mine] for name, column in slots.settings.items()}
    has_bias = slots.has_bias[mine]

    has_mask, keys = slots.has_mask[mine], jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(slots.keys[mine]), slots.made[mine])

    def by_all_settings() -> Chosen:
        def changed() -> Array:
            bias = jnp.where(has_bias[:, None], slots.bias[mine], 0.0)
            return penalized(logits + bias, settings, slots.seen[mine], slots.counts[mine])

        def allowed() -> Array:
            left = unpacked(slots.mask[mine], logits.shape[-1]) | ~has_mask[:, None]
            return jnp.where(left, scored, -jnp.inf)

        scored = jax.lax.cond((live & (has_bias | penalizes(settings))).any(), changed, lambda: logits)
        scored = jax.lax.cond((live & has_mask).any(), allowed, lambda: scored)
        return choose(logits, scored, settings, keys, live)

    def by_temperature() -> Chosen:
        return choose(logits, logits, settings, keys, live, filtered=False)

    # Where no row asks for more, because a `cond` copies a result as large as the logits.
    some = live & (has_bias | has_mask | penalizes(settings) | filters(settings) & (settings["temperature"] > 0))
    tokens, logprobs, drawn = jax.lax.cond(some.any(), by_all_settings, by_temperature)
    C = min(MOST_TOP, logits.shape[-1])

    def best() -> tuple[Array, Array]:
        top, ids = likeliest(logits, C)
        return top - jax.nn.logsumexp(logits, -1, keepdims=True), ids.astype(jnp.int32)

    def none() -> tuple[Array, Array]:
        return jnp.zeros((len(owners), C), logits.dtype), jnp.zeros((len(owners), C), jnp.int32)

    top, ids = jax.lax.cond((live & (slots.top[mine] > 0)).any(), best, none)
    where = jnp.where(live, owners, count)
    slots = slots._replace(
        last=slots.last.at[where].set(tokens, mode="drop"),
        made=slots.made.at[where].add(1, mode="drop"),
        seen=slots.seen.at[where, tokens].set(True, mode="drop"),
        counts=slots.counts.at[where, tokens].add(1, mode="drop"),
    )
    return slots, Sampled(tokens, logprobs, drawn, top, ids)


sample = Program(sampled, donate=0)
