"""How attention strategies run a recurrent layer: they hand it the state of the previous call, and where sequences start."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool

from argosy.models.parts.attention.cache import Cache


class Carry(NamedTuple):
    """The input of a recurrent layer that the strategy supplies.

    state: the state after the last token of the previous call. None: there was no previous call.
    starts: whether a token is the first of its sequence.
    live: whether a token is real. Tokens that are not must not change the state.
    """

    state: Cache | None
    starts: Bool[Array, "B T"]
    live: Bool[Array, "B T"]


Recurrence = Callable[[tuple[Array, ...], Carry], tuple[Array, Cache]]


class RowRecurrence:
    """A mixin for strategies whose inputs are rows [B T ...]. Carries the state of each row from call to call."""

    def recur(self: Any, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None) -> tuple[Array, Cache | None]:
        """Runs a recurrence over the rows of a call. Returns the output, and the cache with the new states.

        Args:
            step: a function of inputs [B T ...] and the `Carry` of these rows. It returns an output [B T ...], and the state after the
                last token.
        """
        y, state = step(inputs, self.carry(cache))
        return y, self.keep(cache, state)
