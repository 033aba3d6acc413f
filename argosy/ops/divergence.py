"""How far a student's next-token distribution is from a teacher's, from the logits of both.

With t and s the two distributions at a temperature, softmax(logits / T):

    forward    KL(t || s) = sum t log(t / s)              Hinton et al. 2015, arXiv:1503.02531: the student covers all of t
    reverse    KL(s || t) = sum s log(s / t)              Gu et al. 2023 (MiniLLM), arXiv:2306.08543: the student seeks modes of t
    jsd        beta KL(t || m) + (1 - beta) KL(s || m)    Agarwal et al. 2023 (GKD), arXiv:2306.13649, equation 1,
               with m = beta t + (1 - beta) s

`jsd` itself goes to 0 at both ends of beta; divided by beta it becomes `forward` at 0, divided by 1 - beta `reverse` at 1. TRL's
`generalized_jsd_loss` means these by beta = 0 and beta = 1; here they have names. A token to which one side gives probability 0 adds
nothing where its share is 0 by that side, and makes the divergence infinite where the other side has some.

A teacher may be known by k tokens with their log-probabilities and the rest of the mass alone. `top` makes these of logits, and
`coarse` the student's distribution over the same k + 1 outcomes. A divergence over joined outcomes is at most that over all of them.
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
    """The likeliest tokens, in falling order, their log-probabilities, and that of all other tokens together."""

    ids: Int[Array, "*R k"]
    logps: Float[Array, "*R k"]
    rest: Float[Array, "*R"]

    @property
    def outcomes(self) -> Float[Array, "*R j"]:
        """Log-probabilities of the k tokens and of the rest."""
        return jnp.concatenate([self.logps, self.rest[..., None]], -1)


def log_probs(logits: Float[Array, "*R V"], temperature: float = 1.0) -> LogProbs:
    """log softmax(logits / temperature), float32 at least."""
    return jax.nn.log_softmax(wide(logits) / temperature, -1)


def _expected(log_p: LogProbs, log_ratio: LogProbs) -> Each:
    """sum p log_ratio, where outcomes of probability 0 add nothing, to the gradient either."""
    possible = log_p > -jnp.inf
    return jnp.sum(jnp.where(possible, jnp.exp(log_p) * jnp.where(possible, log_ratio, 0.0), 0.0), -1)


def forward(student: LogProbs, teacher: LogProbs, beta: float = 0.0) -> Each:
    """KL(teacher || student), nats."""
    return _expected(teacher, teacher - student)


def reverse(student: LogProbs, teacher: LogProbs, beta: float = 1.0) -> Each:
    """KL(student || teacher), nats."""
    return _expected(student, student - teacher)


def jsd(student: LogProbs, teacher: LogProbs, beta: float = 0.5) -> Each:
    """The generalized Jensen-Shannon divergence, nats; 0 < beta < 1."""
    mixture = jnp.logaddexp(student + jnp.log1p(-beta), teacher + jnp.log(beta))
    return beta * _expected(teacher, teacher - mixture) + (1 - beta) * _expected(student, student - mixture)


DIVERGENCES: Mapping[str, Callable[..., Each]] = {"forward": forward, "reverse": reverse, "jsd": jsd}


def resize_vocab(logits: Float[Array, "*R U"], vocab: int) -> Float[Array, "*R V"]:
    """Logits over another number of tokens: those beyond it are left out, those that are missing get probability 0.

    Vocabularies are padded to round numbers (49,152 and 49,280 for one tokenizer), so ids at the end stand for no token."""
    missing = vocab - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab]
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)


def top(logits: Float[Array, "*R V"], k: int, temperature: float = 1.0) -> Top:
    """The k likeliest tokens of each row, k < V."""
    logps = log_probs(logits, temperature)
    best, ids = jax.lax.top_k(logps, k)
    return Top(ids, best, jax.nn.logsumexp(_without_ids(logps, ids), -1))


def coarse(logits: Float[Array, "*R V"], ids: Int[Array, "*R k"], temperature: float = 1.0) -> Float[Array, "*R j"]:
    """The log-probabilities of these tokens and of all others together. The rest is summed, not 1 minus the others: that would lose
    its digits, and its gradient, where the student has little of it."""
    scaled = wide(logits) / temperature
    rest = jax.nn.logsumexp(_without_ids(scaled, ids), -1, keepdims=True)
    return jax.nn.log_softmax(jnp.concatenate([jnp.take_along_axis(scaled, ids, -1), rest], -1), -1)


def _without_ids(values: Float[Array, "*R V"], ids: Int[Array, "*R k"]) -> Float[Array, "*R V"]:
    """The values, -inf at these ids."""
    return jnp.put_along_axis(values, ids, -jnp.inf, axis=-1, inplace=False)
