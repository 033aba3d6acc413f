"""Generation as one program, from prompts to completions.

The prompt is prefilled at once. Then a loop decodes with a KV buffer until every row has ended. A row is greedy at temperature 0, and
samples from the whole distribution above it. Random numbers depend on the seed, the row and the position of a token, so a row does not
depend on the others. Filters (top-k, top-p), grammars and penalties exist only in `argosy serve`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.infer.sampling.draw import draw_token, largest_token
from argosy.models.parts.attention.attend import Contiguous
from argosy.models.parts.attention.cache import contiguous
from argosy.ops.precision import sums_in


def generate_tokens(
    model: Any,
    tokens: Int[Array, "B P"],
    mask: Int[Array, "B P"],
    temperature: Float[Array, "B"],
    seed: Any,
    max_tokens: Any,
    *,
    room: int,
    stops: Sequence[int],
) -> tuple[Int[Array, "B N"], Int[Array, "B"]]:
    """Generates completions. Returns them [B N], padded with 0, and the number of tokens of each [B]. The token that ends a completion
    is not part of it.

    Args:
        tokens: the token ids of the prompts.
        mask: 1 for tokens of the prompt, 0 for padding.
        temperature: the sampling temperature of each row. 0 decodes greedily.
        seed: the random seed, [] uint32.
        max_tokens: the limit of each completion in tokens, [] int32.
        room: N, the largest value of `max_tokens`.
        stops: the ids that end a completion.
    """
    B, P = tokens.shape
    # Tokens are moved before the padding, because transformers pads batches of prompts on the left.
    tokens = jnp.take_along_axis(tokens, jnp.argsort(mask == 0, axis=1, stable=True), 1)
    lengths = mask.sum(1, dtype=jnp.int32)
    rows = jnp.arange(B, dtype=jnp.int32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows)
    most = jnp.minimum(max_tokens, room)
    ends = np.asarray(sorted(stops), np.int32)

    def pick(hidden: Float[Array, "B 1 D"], at: Any) -> Int[Array, "B"]:
        logits = model.unembed(hidden)[:, 0]
        logits = logits.astype(sums_in(logits.dtype))

        def sample_tokens() -> Array:
            tiny = np.finfo(np.float32).tiny
            warm = jnp.where(temperature > 0, jnp.maximum(temperature, tiny), 1).astype(logits.dtype)
            # The largest logit becomes 0. At a temperature near 0, XLA may round the quotient of the same logit differently in two
            # uses.
            below = logits - logits.max(-1, keepdims=True)
            here = jax.vmap(jax.random.fold_in, (0, None))(keys, at)
            return jnp.where(temperature > 0, draw_token(below / warm[:, None], here)[0], largest_token(logits))

        return jax.lax.cond(jnp.any(temperature > 0), sample_tokens, lambda: largest_token(logits))

    def ended(token: Int[Array, "B"]) -> Any:
        return jnp.any(token[:, None] == ends[None, :], 1) if len(ends) else jnp.zeros_like(token, bool)

    cache = contiguous(model.layers.holds(), B, P + room, model.dtype)
    at = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
    hidden, cache, _ = model.hidden(tokens, Contiguous(at, at < lengths[:, None], fresh=True), cache)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    token = pick(jnp.take_along_axis(hidden, last, 1), np.int32(0))
    out = jnp.zeros((B, room), jnp.int32)

    def is_going(state: Any) -> Any:
        step, _, done, _, _, _ = state
        return (step < most) & ~jnp.all(done)

    def decode(state: Any) -> Any:
        step, token, done, out, count, cache = state
        out = out.at[:, step].set(jnp.where(done, 0, token))
        count = count + jnp.where(done, 0, 1).astype(jnp.int32)
        here = Contiguous((lengths + step)[:, None], ~done[:, None])
        hidden, cache, _ = model.hidden(token[:, None], here, cache)
        following = pick(hidden, step + 1)
        return step + 1, following, done | ended(following), out, count, cache

    # A prompt without tokens is a row that was added to fill the batch.
    start = (jnp.zeros((), jnp.int32), token, ended(token) | (lengths == 0), out, jnp.zeros_like(lengths), cache)
    _, _, _, out, count, _ = jax.lax.while_loop(is_going, decode, start)
    return out, count
