"""The engine's state of a request, from the moment that it is added."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from argosy.core.errors import BadInput
from argosy.infer.engine.pages import PageKey
from argosy.infer.engine.request import Request
from argosy.infer.engine.scheduled import ScheduledRequest
from argosy.infer.sampling.restrictions import Restrictions
from argosy.infer.tools.grammar import Matcher

if TYPE_CHECKING:
    from argosy.infer.engine.adapters import LoadedAdapter


@dataclass(eq=False)
class RequestState:
    """A request in the engine.

    request: the request as it was added.
    scheduled: the scheduler's state of the request.
    random_key: the data of its random key [2].
    restrictions: the tokens that it allows next, apart from its grammar.
    matcher: the state of its grammar; None: it has no grammar.
    adapter: its adapter; None: the model alone.
    slot: its slot and its number of preemptions when its row of the sampler's state was last written; None: never.
    mask: the token mask in that row, as bytes.
    """

    request: Request
    scheduled: ScheduledRequest
    random_key: np.ndarray
    restrictions: Restrictions
    matcher: Matcher | None = None
    adapter: "LoadedAdapter | None" = None
    slot: tuple[int, int] | None = None
    mask: bytes = b""

    @property
    def id(self) -> int:
        return self.scheduled.id

    @property
    def completion(self) -> list[int]:
        return self.scheduled.completion

    @property
    def needs_slot(self) -> bool:
        """Whether its row of the sampler's state must be written, because it got this slot since the last time."""
        return self.slot != (self.scheduled.slot, self.scheduled.preemptions)


def new_state(
    request: Request,
    id: int,
    key: PageKey,
    random_key: np.ndarray,
    adapter: "LoadedAdapter | None",
    *,
    vocab: int,
    context: int,
) -> RequestState:
    """Makes the state of a request that passed `Request.check`.

    Args:
        id: the id of the request in the engine.
        key: its prefix-cache key.
        random_key: the data of its random key [2].
        vocab: the model's vocabulary size.
        context: the most tokens of a sequence.

    Raises:
        BadInput: no token is allowed, or the grammar has another vocabulary.
    """
    restrictions, matcher = Restrictions(request.sampling, request.stop_tokens, vocab), None
    if request.grammar is not None:
        if request.grammar.vocab != vocab:
            raise BadInput(f"a grammar over {request.grammar.vocab} tokens for a model with {vocab}")
        matcher = request.grammar.matcher(request.stop_tokens)
    scheduled = ScheduledRequest(
        list(request.tokens),
        min(request.max_tokens, context - len(request.tokens)),
        id=id,
        priority=request.priority,
        key=key,
        inputs=request.inputs,
        stepwise=matcher is not None or restrictions.changes,
    )
    return RequestState(request, scheduled, random_key, restrictions, matcher, adapter)
