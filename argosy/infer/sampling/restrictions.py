"""The next tokens that a request's sampling settings allow, given its completion so far. Host only: NumPy."""

from collections.abc import Sequence

import numpy as np

from argosy.core.errors import BadInput
from argosy.infer.sampling.sample import Sampling
from argosy.infer.tools.grammar import packed_bits

# The most tokens in one request's logit_bias. A slot keeps 8 bytes for each on the device. OpenAI's limit is 300.
MAX_BIASES = 1024


class Restrictions:
    """The restrictions of one request: allowed_tokens, bad_words, min_tokens, and tokens with a bias of minus infinity.

    Args:
        sampling: the sampling settings of the request.
        ends: token ids that end the completion. They are allowed in addition to `allowed_tokens`, and banned until the completion has
            `min_tokens` tokens.
        vocab: the model's vocabulary size.

    Raises:
        BadInput: ids are outside the vocabulary, `bad_words` has an empty sequence, there are too many biases, or no token is allowed.
    """

    def __init__(self, sampling: Sampling, ends: frozenset[int], vocab: int):
        self.ends = sorted(token for token in ends if 0 <= token < vocab)
        self.least = sampling.min_tokens if self.ends else 0
        self.words = [word for word in sampling.bad_words if len(word) > 1]
        allowed, biases = sampling.allowed_tokens, sampling.logit_bias
        ids = {*biases, *(allowed or ()), *(token for word in sampling.bad_words for token in word)}
        if wrong := sorted(token for token in ids if not 0 <= token < vocab):
            raise BadInput(f"token id {wrong[0]} is outside the model's vocabulary of {vocab}")
        if any(not word for word in sampling.bad_words):
            raise BadInput("an empty sequence in bad_words would ban everything")
        if len(biases) > MAX_BIASES:
            problem = f"logit_bias has {len(biases)} tokens, more than {MAX_BIASES}"
            raise BadInput(problem, hint="`allowed_tokens` and `bad_words` take any number")
        self._always = np.full(vocab, allowed is None)
        if allowed is not None:
            self._always[[*allowed, *self.ends]] = True
        self._always[[word[0] for word in sampling.bad_words if len(word) == 1]] = False
        self._always[[token for token, value in biases.items() if value == -np.inf]] = False
        if not (np.delete(self._always, self.ends) if self.least else self._always).any():
            raise BadInput("the request allows no token", hint="allowed_tokens, bad_words and min_tokens leave nothing")
        self._some = not self._always.all()

    @property
    def changes(self) -> bool:
        """Whether the allowed tokens depend on the completion."""
        return bool(self.least or self.words)

    def __bool__(self) -> bool:
        return self.changes or self._some

    def bits(self, completion: Sequence[int]) -> np.ndarray:
        """The mask of the tokens that may follow a completion: [ceil(vocab / 32)] int32, one bit per token, the lowest bit first. If
        bans that depend on the completion would leave no token, they are ignored."""
        allowed = self._after(completion)
        return packed_bits(allowed if allowed.any() else self._always)

    def leaves(self, allowed: np.ndarray, completion: Sequence[int]) -> bool:
        """Whether at least one token of `allowed` (bool, [vocab]) may follow a completion."""
        return bool((allowed & self._after(completion)).any())

    def _after(self, completion: Sequence[int]) -> np.ndarray:
        """Whether each token [vocab] may follow a completion."""
        banned = [*(self.ends if len(completion) < self.least else ())]
        banned += [word[-1] for word in self.words if tuple(completion[-len(word) + 1 :]) == word[:-1]]
        allowed = self._always.copy()
        allowed[banned] = False
        return allowed
