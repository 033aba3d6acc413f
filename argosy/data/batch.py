"""What every step eats, and the promise of whoever makes it.

A batch is a dict of numpy arrays, B rows of T tokens (this process's rows of the global batch):

    tokens     int32   [B T]   input
    targets    int32   [B T]   the token after each input
    segments   int32   [B T]   1, 2, ... for the documents within a row; 0 is padding
    positions  int32   [B T]   place within the segment, from 0
    mask       float32 [B T]   weight of each target in the loss; 0 where the target starts another document, is
                               padding, or is not to be learned

`Batches` is an iterator whose position can be saved and found again. It does not know what lies below it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from argosy.core.errors import BadInput, UserError

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Field:
    """One array of a batch, as the objective that reads it declares it.

    axes: letters of the legend, "B T": B rows, T tokens; other letters are sizes of the field's own. per: what one entry along
    the leading axes belongs to. A "token" field is packed like the tokens themselves, a "row" field has one entry a row, a
    "group" field one entry for every group of rows that belong together (a preference pair, the samples of one prompt): its
    first axis is then B divided by the rows of a group.
    """

    axes: str
    dtype: type = np.int32
    per: Literal["token", "row", "group"] = "token"


Fields = dict[str, Field]
Fingerprint = dict[str, Any]  # name -> string, number, bool or None: whatever decides which rows come in which order


class Batches(ABC):
    """An iterator of batches with a position.

    `state()` describes the batches handed out, never those made ahead of need, so that the state saved with the weights
    of step n is that of step n. The fingerprint goes with it: a position means something only in the same data.
    """

    fingerprint: Fingerprint
    tokens_per_batch: int  # of the global batch, padding included
    bytes_per_token: float | None  # UTF-8 bytes of text for each token that is learned; None where there is no text

    def __iter__(self) -> "Batches":
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """The next global batch's rows that belong to this process.

        Raises:
            StopIteration: the epochs asked for are over.
        """

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Where the next batch begins, as JSON."""

    @abstractmethod
    def seek(self, position: dict[str, Any]) -> None:
        """Goes to a position of the same data.

        Raises:
            UserError: the position cannot be honored here, for instance under another number of processes.
        """

    @abstractmethod
    def close(self) -> None:
        """Stops whatever works ahead. Idempotent."""

    def advance(self, state: Any) -> None:
        """Called before each batch with the training state it is for. Batches that depend on the model (rollouts) read its
        weights here; they must not keep it, since the next update takes its buffers."""

    def rewind(self) -> None:
        """Back to the first batch: an evaluation reads the same rows every time."""
        self.seek({})

    def state(self) -> dict[str, Any]:
        """Position and fingerprint, as JSON."""
        return {"position": self.position(), "fingerprint": self.fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken.

        Raises:
            UserError: the state was taken on other data; the differences are named.
        """
        if not isinstance(state, dict) or not isinstance(state.get("fingerprint"), dict):
            raise BadInput("not the state of a data pipeline", hint="it holds `position` and `fingerprint`")
        check_same(state["fingerprint"], self.fingerprint)
        self.seek(state["position"])


def check_same(was: Fingerprint, now: Fingerprint) -> None:
    """Compares the fingerprint of a saved state with that of the data at hand.

    Raises:
        UserError: they differ; the message names up to three keys with both values.
    """
    keys = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
    if not keys:
        return
    told = "; ".join(f"{key} was {short(was.get(key))}, is {short(now.get(key))}" for key in keys[:3])
    rest = f"; and {len(keys) - 3} more" if len(keys) > 3 else ""
    raise UserError(
        f"the data is not what the saved position belongs to: {', '.join(keys)}",
        where=told + rest,
        hint="give the same data settings and files again, or start a new run with `dir=NEW`",
    )


def short(value: Any) -> str:
    """A value in at most 20 characters: hashes are told apart by their heads."""
    text = str(value)
    return text if len(text) <= 20 else text[:17] + "..."
