"""A batch, the fields it holds, and the iterator that makes batches.

A batch is a dict of numpy arrays: this process's rows of the global batch. It holds the fields that were asked for and no
others. Language modeling asks for four fields, over B rows of T tokens:

    tokens    int32    [B T]   input
    targets   int32    [B T]   the token after each input
    segments  int32    [B T]   1, 2, ... for the documents of a row; 0 is padding
    mask      float32  [B T]   weight of each target in the loss; 0 where the target is padding, belongs to another document
                               than its input, or is not to be learned

By default (`Field.at`), other per-token fields are aligned with the targets, as `mask` is. Entry t belongs to `targets[t]`, and is 0 if
this target lies outside the document of the input at t.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from argosy.core.errors import BadInput, UserError
from argosy.data.summary import CorpusSummary

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Field:
    """One array of a batch, as its objective declares it.

    axes: the letters of the axes, such as "B T" for B rows of T tokens (`core.dims`). Other letters are sizes that only this field has.
    dtype: the numpy type of the entries.
    per: what an entry belongs to. A "token" field is packed like the tokens. A "row" field has one entry per row. A "group" field has
        one entry per group of rows (a preference pair, the samples of one prompt), so its first axis is B / (rows per group).
    at: whether entry t of a "token" field belongs to the target or to the input at t.
    """

    axes: str
    dtype: Any = np.int32
    per: Literal["token", "row", "group"] = "token"
    at: Literal["target", "input"] = "target"


Fields = Mapping[str, Field]
# Name -> string, number, bool or None: everything that decides the rows and their order.
Fingerprint = dict[str, Any]

LANGUAGE_MODELING: Fields = {
    "tokens": Field("B T"),
    "targets": Field("B T"),
    "segments": Field("B T"),
    "mask": Field("B T", np.float32),
}


def check_fields(required: Fields, provided: Fields) -> None:
    """Checks that the data provides all fields that an objective reads.

    Raises:
        BadInput: the data lacks a field, its `per` or its number of axes differs from what the objective reads, or its type does not
            convert.
    """
    for name, field in required.items():
        if name not in provided:
            listed = ", ".join(f"`{other}`" for other in provided)
            raise BadInput(f"this data has no field `{name}`", where="read by the objective", hint=f"it has {listed}")
        has = provided[name]
        if field.per != has.per or len(field.axes.split()) != len(has.axes.split()):
            raise BadInput(
                f"the field `{name}` is [{has.axes}] per {has.per} in this data, and the objective reads [{field.axes}] per "
                f"{field.per}"
            )
        if not np.can_cast(has.dtype, field.dtype, "same_kind"):
            types = f"{np.dtype(has.dtype).name} in this data, and the objective reads {np.dtype(field.dtype).name}"
            raise BadInput(f"the field `{name}` is {types}")


class Batches(ABC):
    """An iterator of batches whose position can be saved and restored.

    `state()` counts the batches handed out, and never those that were prefetched. So the state saved with the weights of step n
    belongs to step n. The state includes a fingerprint of the data, since a position means nothing in other data.
    """

    fingerprint: Fingerprint
    tokens_per_batch: int  # of the global batch, padding included
    # UTF-8 bytes of text for each token that is learned; None where there is no text.
    bytes_per_token: float | None
    # The sizes of the axes that belong to single fields, by letter.
    sizes: Mapping[str, int] = MappingProxyType({})
    # The same sizes for each bucket, if batches have several sizes. `sizes` is then that of the first bucket, which is the largest.
    buckets: tuple[Mapping[str, int], ...] = ()
    # Whether `advance` computes with the training state, so that each step has to end before the next batch is made.
    depends: bool = False

    def __iter__(self) -> "Batches":
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """Returns this process's rows of the next global batch.

        Raises:
            StopIteration: the epochs are over.
        """

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Returns the position where the next batch begins, as a JSON object."""

    @abstractmethod
    def seek(self, position: dict[str, Any]) -> None:
        """Moves to a position that `position` returned for the same data. An empty dict is the start.

        Raises:
            UserError: the position cannot be honored here, for instance under another number of processes.
        """

    @abstractmethod
    def close(self) -> None:
        """Stops the threads that read ahead. Idempotent."""

    def advance(self, state: Any) -> None:  # noqa: B027
        """Receives the training state before each batch is made.

        Batches that depend on the model (rollouts) read the weights here. They must not keep the state, because the next update donates
        its buffers. The default does nothing.
        """

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the position that are too large for JSON, by name. A checkpoint stores them beside `state()`."""
        return {}

    def take(self, arrays: dict[str, np.ndarray]) -> None:
        """Continues with the arrays that `arrays` returned. Called after `seek`."""
        if arrays:
            raise BadInput("this data keeps no arrays in a checkpoint", where="the saved position")

    def summary(self, steps: int | None = None) -> CorpusSummary:
        """The contents of the data in numbers.

        Args:
            steps: the number of batches in the run, from which the number of epochs follows; None: unknown.
        """
        return CorpusSummary(source="unknown")

    def example(self) -> Batch | None:
        """The first record as a batch, for display; None if the data has no records, or nothing has been read yet."""
        return None

    def rewind(self) -> None:
        """Moves back to the first batch, so that every evaluation reads the same rows."""
        self.seek({})

    def state(self) -> dict[str, Any]:
        """The position and the fingerprint, as a JSON object for `restore`."""
        return {"position": self.position(), "fingerprint": self.fingerprint}

    def restore(self, state: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
        """Moves to the position at which `state()` and `arrays()` returned these values.

        Raises:
            UserError: the state belongs to other data. The message names the differences.
        """
        if not isinstance(state, dict) or not isinstance(state.get("fingerprint"), dict):
            raise BadInput("not the state of a data pipeline", hint="it holds `position` and `fingerprint`")
        check_same(state["fingerprint"], self.fingerprint)
        self.seek(state["position"])
        self.take(arrays or {})


class BatchWrapper(Batches):
    """The base of batches that wrap other batches, for instance to add fields. The position is that of the wrapped batches."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.fingerprint, self.tokens_per_batch = inner.fingerprint, inner.tokens_per_batch
        self.bytes_per_token, self.sizes, self.buckets = inner.bytes_per_token, inner.sizes, inner.buckets

    def position(self) -> dict[str, Any]:
        return self.inner.position()

    def seek(self, position: dict[str, Any]) -> None:
        self.inner.seek(position)

    def summary(self, steps: int | None = None) -> CorpusSummary:
        return self.inner.summary(steps)

    def example(self) -> Batch | None:
        return self.inner.example()

    def close(self) -> None:
        self.inner.close()


def check_same(saved: Fingerprint, now: Fingerprint) -> None:
    """Checks that the fingerprint of a saved state is that of the current data.

    Raises:
        UserError: the fingerprints differ. The message names every differing key with both values.
    """
    keys = [key for key in sorted(saved.keys() | now.keys()) if saved.get(key) != now.get(key)]
    if not keys:
        return
    differences = "; ".join(f"{key} was {_short(saved.get(key))}, is {_short(now.get(key))}" for key in keys)
    raise UserError(
        f"the data is not what the saved position belongs to: {', '.join(keys)}",
        where=differences,
        hint="give the same data settings and files again, or start a new run with `dir=NEW`",
    )


def _short(value: Any) -> str:
    """A value as text of at most 20 characters. The first characters are enough to distinguish hashes."""
    text = str(value)
    return text if len(text) <= 20 else text[:17] + "..."
