"""The forward pass over whole sequences: logits, and the log-probability of each token."""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.core.progress import Say, telling
from argosy.infer.sample import of_tokens
from argosy.models.parts.attend import Packed
from argosy.models.parts.weight import Leaves, merge, split, variable

# The shortest length that programs are compiled for, in tokens.
SHORTEST = 32
# Tokens whose logits are in memory at a time while a sequence is scored: 128 MB for a vocabulary of 128k.
CHUNK = 256


def bucket(length: int) -> int:
    """The next length that programs are compiled for: powers of two and the midpoints between them."""
    size = SHORTEST
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


class Sequences:
    """One model over whole sequences. Its graph is fixed, its weights are read at each call.

    Args:
        model: a module, which is split here: 15 ms for 270 weights. `infer.held.Held` reuses this object while nothing changes.
        say: called with what is being compiled, if that takes longer than a second.
    """

    def __init__(self, model: Any, say: Say | None = None):
        self.say, self.dtype, self.context = say, model.dtype, model.config.context
        self.graph, weights = split(model)
        self.variables = {address: variable(model, address) for address in weights}
        self._sizes: set[tuple[str, tuple[int, ...]]] = set()

    def weights(self) -> Leaves:
        """The current weights."""
        return {address: v.get_value() for address, v in self.variables.items()}

    def padded(self, ids: Int[np.ndarray, "B T"]) -> tuple[np.ndarray, np.ndarray]:
        """The sequences at a length that a program is compiled for, and their segments."""
        T = ids.shape[1]
        width = ((0, 0), (0, max(T, min(bucket(T), self.context)) - T))
        return np.pad(ids.astype(np.int32), width), np.pad(np.ones_like(ids, np.int32), width)

    def logits(self, ids: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B T V"]:
        """Logits at every token, causal."""
        return np.asarray(self._run("logits", _logits(self.graph, self.dtype), ids))[:, : ids.shape[1]]

    def scores(self, ids: Int[np.ndarray, "B T"]) -> Float[np.ndarray, "B S"]:
        """The log-probability of each token given those before it, from the second token on: S is T - 1."""
        return np.asarray(self._run("scores", _scores(self.graph, self.dtype), ids))[:, : ids.shape[1] - 1]

    def _run(self, what: str, program: Any, ids: np.ndarray) -> Array:
        tokens, segments = self.padded(ids)
        if (what, tokens.shape) in self._sizes:
            return program(self.weights(), tokens, segments)
        with telling(self.say, f"compiling {what} of {tokens.shape[1]} tokens"):
            out = program(self.weights(), tokens, segments)
        self._sizes.add((what, tokens.shape))
        return out


@lru_cache(maxsize=64)
def _logits(graph: Any, dtype: Any) -> Any:
    """(weights, tokens [B T], segments [B T]) -> logits [B T V]."""

    def logits(weights: Leaves, tokens: Array, segments: Array) -> Array:
        model = merge(graph, weights)
        model.dtype = dtype
        return model(tokens, Packed(segments))[0]

    return jax.jit(logits)


@lru_cache(maxsize=64)
def _scores(graph: Any, dtype: Any) -> Any:
    """(weights, tokens [B T], segments [B T]) -> log-probabilities of the tokens that follow [B T]."""

    def scores(weights: Leaves, tokens: Array, segments: Array) -> Array:
        model = merge(graph, weights)
        model.dtype = dtype
        x = model.hidden(tokens, Packed(segments))[0]
        (B, T), following = tokens.shape, jnp.roll(tokens, -1, 1)
        chunks = -(-T // CHUNK)
        x = jnp.pad(x, ((0, 0), (0, chunks * CHUNK - T), (0, 0))).reshape(B * chunks, -1, x.shape[-1])
        following = jnp.pad(following, ((0, 0), (0, chunks * CHUNK - T))).reshape(B * chunks, -1)
        some = jax.lax.map(lambda part: of_tokens(model.unembed(part[0][None])[0], part[1]), (x, following))
        return some.reshape(B, -1)[:, :T]

    return jax.jit(scores)
