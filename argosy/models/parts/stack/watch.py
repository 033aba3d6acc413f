"""A strategy that records what passes through the layers: their outputs, and the queries, keys and values of their attention.

    model.hidden(tokens, Watched(Packed(segments), heads=True)) -> x, cache, aux
    model.layers.layer_aux(aux) -> the recorded values of each layer, and the other aux outputs

Recorded values are aux outputs, so they also leave scanned and rematerialized layers. Scanned layers hold the values of all layers in
memory at once. For unrolled layers, XLA keeps only the values that are used.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Bool, Int

from argosy.models.parts.attention.attend import HEADS, Angled, Attend, Read
from argosy.models.parts.attention.cache import Cache
from argosy.models.parts.attention.recurrence import Recurrence
from argosy.ops.attention import Score

# The prefix of the names of these aux outputs. OUTPUT is the name of the residual stream after a layer.
TOLD = "told."
OUTPUT, QUERIES, KEYS, VALUES = (f"{TOLD}{name}" for name in ("output", "q", "k", "v"))


@dataclass(frozen=True)
class WatchedAttend:
    """An attention strategy whose layers record values.

    of: the strategy that computes.
    outputs: whether layers record the residual stream after them, [B T D].
    heads: whether attention layers record queries [B T N H], keys [B T K H] and values [B T K U]. They are recorded as attention reads
        them: after norms and RoPE, and in expanded form (`Read`). Only for strategies whose keys are the tokens of the call (`Packed`).
    """

    of: Attend
    outputs: bool = False
    heads: bool = False
    angles: Angled = None

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.of.positions

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.of.live

    def __call__(self, q: Array, entries: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        return self.of(q, entries, cache, read, score=score)

    def recur(self, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None) -> tuple[Array, Cache | None]:
        return self.of.recur(step, inputs, cache)


jax.tree_util.register_dataclass(WatchedAttend, ["of", "angles"], ["outputs", "heads"])


class Listening:
    """A watched strategy during the call of one layer. `told` holds the values that the layer records, tracers of that call."""

    def __init__(self, of: WatchedAttend):
        self.of, self.told = of, dict[str, Array]()

    @property
    def positions(self) -> Int[Array, "B T"]:
        return self.of.positions

    @property
    def live(self) -> Bool[Array, "B T"]:
        return self.of.live

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def __call__(self, q: Array, entries: Cache, cache: Cache | None, read: Read = HEADS, *, score: Score) -> Any:
        if self.of.heads:
            if self.told:
                raise ValueError("a layer attends twice: its queries cannot be told apart")
            k, v = read.expand(entries)
            self.told |= {QUERIES: q, KEYS: k, VALUES: v}
        return self.of(q, entries, cache, read, score=score)

    def recur(self, step: Recurrence, inputs: tuple[Array, ...], cache: Cache | None) -> tuple[Array, Cache | None]:
        return self.of.recur(step, inputs, cache)
