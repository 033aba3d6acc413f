"""What a request adds to the logits, as a function of the answer so far. Host only: NumPy."""

from collections.abc import Sequence

import numpy as np

from argosy.core.errors import BadInput
from argosy.infer.sampling.sample import Sampling


class Bias:
    """The bias of one request: logit_bias, allowed_tokens, bad_words and min_tokens.

    Args:
        ends: ids that end the answer. They are allowed besides `allowed_tokens`, and banned for `min_tokens`.

    Raises:
        BadInput: ids outside the vocabulary, an empty sequence, or nothing is allowed.
    """

    def __init__(self, sampling: Sampling, ends: frozenset[int], vocab: int):
        self.ends = sorted(token for token in ends if 0 <= token < vocab)
        self.least = sampling.min_tokens if self.ends else 0
        self.words = [word for word in sampling.bad_words if len(word) > 1]
        allowed = sampling.allowed_tokens
        ids = {*sampling.logit_bias, *(allowed or ()), *(token for word in sampling.bad_words for token in word)}
        if wrong := sorted(token for token in ids if not 0 <= token < vocab):
            raise BadInput(f"token id {wrong[0]} is outside the model's vocabulary of {vocab}")
        if any(not word for word in sampling.bad_words):
            raise BadInput("an empty sequence in bad_words would ban everything")
        self._always = np.zeros(vocab, np.float32)
        if allowed is not None:
            self._always[:] = -np.inf
            self._always[[*allowed, *self.ends]] = 0.0
        for token, value in sampling.logit_bias.items():
            self._always[token] += value
        self._always[[word[0] for word in sampling.bad_words if len(word) == 1]] = -np.inf
        if not np.isfinite(np.delete(self._always, self.ends) if self.least else self._always).any():
            raise BadInput("the request allows no token", hint="allowed_tokens, bad_words and min_tokens leave nothing")
        self._some = bool(self._always.any())
        self._last: tuple[int, ...] | None = None

    @property
    def changes(self) -> bool:
        """Whether it depends on the answer."""
        return bool(self.least or self.words)

    def __bool__(self) -> bool:
        return self.changes or self._some

    def forget(self) -> None:
        """The next call of `row` returns the bias even if it is the same, because the slot is a new one."""
        self._last = None

    def row(self, answer: Sequence[int]) -> np.ndarray | None:
        """The bias [V] of the token after this answer; None if it is that of the last call."""
        banned = self._banned(answer)
        if banned == self._last:
            return None
        self._last = banned
        row = self._always.copy()
        row[list(banned)] = -np.inf
        return row if np.isfinite(row).any() else self._always

    def leaves(self, allowed: np.ndarray, answer: Sequence[int]) -> bool:
        """Whether it bans less than all of the allowed tokens [V]."""
        row = self._always.copy()
        row[list(self._banned(answer))] = -np.inf
        return bool(np.isfinite(row[allowed]).any())

    def _banned(self, answer: Sequence[int]) -> tuple[int, ...]:
        ends = self.ends if len(answer) < self.least else []
        words = [word[-1] for word in self.words if tuple(answer[-len(word) + 1 :]) == word[:-1]]
        return tuple(sorted({*ends, *words}))
