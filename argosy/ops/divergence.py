"""Divergences between a student's and a teacher's next-token distributions, from the logits of both.

t is the teacher's and s the student's distribution, softmax(logits / T), at a temperature T:

    forward    KL(t || s) = sum t log(t / s)              Hinton et al. 2015, arXiv:1503.02531: the student covers all of t
    reverse    KL(s || t) = sum s log(s / t)              Gu et al. 2023 (MiniLLM), arXiv:2306.08543: the student seeks modes of t
    jsd        beta KL(t || m) + (1 - beta) KL(s || m)    Agarwal et al. 2023 (GKD), arXiv:2306.13649, equation 1,
               with m = beta t + (1 - beta) s

`jsd` goes to 0 as beta goes to 0 or 1. `jsd` / beta becomes `forward` at beta = 0, and `jsd` / (1 - beta) becomes `reverse` at
beta = 1. TRL's `generalized_jsd_loss` computes these two for beta = 0 and beta = 1; here they have names. In KL(p || q), a token with
p = 0 adds nothing, and a token with p > 0 and q = 0 makes the divergence infinite.

Of a teacher, only the log-probabilities of k tokens and the rest of the probability mass may be known. `top` computes them from logits,
and `coarse` computes the student's distribution over the same k + 1 outcomes. A divergence over these outcomes is at most the
divergence over all tokens.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.ops.precision import wide

LogProbs = Float[Array, "*R V"]
Each = Float[Array, "*R"]


class Top(NamedTuple):
    """The most probable tokens of a distribution.

    ids: the k most probable tokens, in descending order.
    logps: their log-probabilities.
    rest: the log-probability of all other tokens together.
    """

    ids: Int[Array, "*R k"]
    logps: Float[Array, "*R k"]
    rest: Float[Array, "*R"]

    @property
    def outcomes(self) -> Float[Array, "*R j"]:
        """The log-probabilities of the k tokens, then of the rest: j = k + 1 outcomes."""
        return jnp.concatenate([self.logps, self.rest[..., None]], -1)


def log_probs(logits: Float[Array, "*R V"], temperature: float = 1.0) -> LogProbs:
    """Computes log softmax(logits / temperature), in float32 at least."""
    return jax.nn.log_softmax(wide(logits) / temperature, -1)


def _expected(log_p: LogProbs, log_ratio: LogProbs) -> Each:
    """Computes sum p log_ratio. Outcomes of probability 0 add nothing, neither to the sum nor to the gradient."""
    possible = log_p > -jnp.inf
    return jnp.sum(jnp.where(possible, jnp.exp(log_p) * jnp.where(possible, log_ratio, 0.0), 0.0), -1)


def forward(student: LogProbs, teacher: LogProbs, beta: float = 0.0) -> Each:
    """Computes KL(teacher || student), in nats. `beta` is not read."""
    return _expected(teacher, teacher - student)


def reverse(student: LogProbs, teacher: LogProbs, beta: float = 1.0) -> Each:
    """Computes KL(student || teacher), in nats. `beta` is not read."""
    return _expected(student, student - teacher)


def jsd(student: LogProbs, teacher: LogProbs, beta: float = 0.5) -> Each:
    """Computes the generalized Jensen-Shannon divergence, in nats, for 0 < beta < 1."""
    mixture = jnp.logaddexp(student + jnp.log1p(-beta), teacher + jnp.log(beta))
    return beta * _expected(teacher, teacher - mixture) + (1 - beta) * _expected(student, student - mixture)


DIVERGENCES: Mapping[str, Callable[..., Each]] = {"forward": forward, "reverse": reverse, "jsd": jsd}


def resize_vocab(logits: Float[Array, "*R U"], vocab: int) -> Float[Array, "*R V"]:
    """Changes the vocabulary size of logits to `vocab`. Further logits are dropped, and missing ones get probability 0.

    Vocabularies are padded to round numbers (49,152 and 49,280 for one tokenizer), so ids at the end stand for no token."""
    missing = vocab - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab]
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)


def top(logits: Float[Array, "*R V"], k: int, temperature: float = 1.0) -> Top:
    """Finds the k most probable tokens of each row, for k < V."""
    logps = log_probs(logits, temperature)
    best, ids = jax.lax.top_k(logps, k)
    return Top(ids, best, jax.nn.logsumexp(_without_ids(logps, ids), -1))


def coarse(logits: Float[Array, "*R V"], ids: Int[Array, "*R k"], temperature: float = 1.0) -> Float[Array, "*R j"]:
    """Computes the log-probabilities of these tokens, and of all other tokens together: j = k + 1 outcomes.

    The rest is a sum over all other tokens. As 1 minus the probabilities of these tokens, a small rest would lose its digits and its
    gradient.
    """
    scaled = wide(logits) / temperature
    rest = jax.nn.logsumexp(_without_ids(scaled, ids), -1, keepdims=True)
    return jax.nn.log_softmax(jnp.concatenate([jnp.take_along_axis(scaled, ids, -1), rest], -1), -1)


def _without_ids(values: Float[Array, "*R V"], ids: Int[Array, "*R k"]) -> Float[Array, "*R V"]:
    """Returns a copy of the values with -inf at these ids."""
    return jnp.put_along_axis(values, ids, -jnp.inf, axis=-1, inplace=False)
