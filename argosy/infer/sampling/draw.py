"""The largest of many numbers, and a token drawn from a distribution, each in two steps: a block of 128 tokens, then one of them.

`jnp.argmax` of 32 rows of 49,152 numbers takes 7.5 ms on one core, because XLA:CPU compares them one by one; by blocks 0.2. Random
bits for each token of these rows would take 80 ms, for each block and the tokens of one block 1.3.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

BLOCK = 128


def gumbel_noise(key: Any, ids: Int[Array, "N"]) -> Float[Array, "N"]:
    """Minus the log of an exponential variable for each id (a Gumbel variable), a function of the key and the id.

    The smallest exponential variable wins, and of many ids that one is small: so it comes from a uniform variable with 32 bits near
    0, where `jax.random.gumbel` has 23.
    """
    bits = jax.vmap(lambda token: jax.random.key_data(jax.random.fold_in(key, token))[..., 0])(ids)
    uniform = (bits.astype(jnp.float32) + 0.5) * np.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, np.float32(1 - 2**-24))))


def largest_token(values: Float[Array, "B V"]) -> Int[Array, "B"]:
    """The place of the largest value of each row, the first of equals."""
    blocks = _blocks(values)
    best = jnp.argmax(blocks.max(-1), -1)
    return best.astype(jnp.int32) * BLOCK + jnp.argmax(_at(blocks, best), -1).astype(jnp.int32)


def draw_token(logits: Float[Array, "B V"], keys: Any) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """One token per row, drawn from softmax(logits), and its log-probability.

    It uses the Gumbel-max trick: among exponential variables divided by weights, the smallest belongs to an item with a probability in
    proportion to its weight. A block is drawn first, by the blocks' sums, then a token of the block.

    Args:
        keys: a random key for each row. A row's token depends on its logits and its key alone.
    """
    blocks = _blocks(logits)
    top = logits.max(-1, keepdims=True)
    mass = _sums(jnp.exp(blocks - top[:, :, None]))
    numbers = jnp.arange(mass.shape[-1], dtype=jnp.int32)
    # Ids below 0, so that no block shares its variable with a token.
    block = jnp.argmax(jnp.log(mass) + jax.vmap(gumbel_noise, (0, None))(keys, -1 - numbers), -1).astype(jnp.int32)
    inside, ids = _at(blocks, block), block[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    place = jnp.argmax(inside + jax.vmap(gumbel_noise)(keys, ids), -1)[:, None]
    token, logit = (jnp.take_along_axis(a, place, -1)[:, 0] for a in (ids, inside))
    return token, logit - top[:, 0] - jnp.log(_sums(mass))


def _sums(values: Float[Array, "... N"]) -> Float[Array, "..."]:
    """The sums of the last axis, half and half: XLA:CPU adds in an order of its own, which depends on the number of rows."""
    while (size := values.shape[-1]) > 1:
        half = -(-size // 2)
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, size % 2)])
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _blocks(values: Float[Array, "B V"]) -> Float[Array, "B blocks 128"]:
    """The values, with minus infinity after the last of a row."""
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[-1] % BLOCK)), constant_values=-jnp.inf)
    return padded.reshape(values.shape[0], -1, BLOCK)


def _at(blocks: Float[Array, "B blocks 128"], which: Int[Array, "B"]) -> Float[Array, "B 128"]:
    return jnp.take_along_axis(blocks, which[:, None, None], 1)[:, 0]
