"""What a recurrent layer is given by the strategies of attention: the state of the previous call, and where sequences start."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool

from argosy.models.parts.attention.cache import Cache


class Carry(NamedTuple):
    """For a recurrent layer: the state after the last token of the previous call (None: there was none), where sequences start,
    and which tokens are real. Tokens that are not real must not change the state."""

    state: Cache | None
    starts: Bool[Array, "B T"]
    live: Bool[Array, "B T"]


Recurrence = Callable[[tuple[Array, ...], Carry], tuple[Array, Cache]]


class RowRecurrence:
    """The recurrence of strategies whose calls are rows [B T ...], each row one sequence or a part of it."""

    def recur(self: Any, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None) -> tuple[Array, Cache | None]:
        """A recurrence over the rows of a call.

        Args:
            step: of inputs [B T ...] and the `Carry` of these rows; gives [B T ...], and the state after the last token.
        """
        y, state = step(inputs, self.carry(cache))
        return y, self.keep(cache, state)
