"""The inputs of a prompt besides its token ids: embeddings that replace those of some tokens, and rotary positions with several axes.

The KV-cache pages of a sequence depend on both, so both enter its prefix-cache key (`PageKey`): sequences share a page only if its ids,
its embeddings and its rotary positions are equal. Rotary positions enter the key as their offsets from the token's index, and only
where the offset changes. So a longer prompt that repeats an image and its completion finds the pages of both.

Host only: no jax.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby

import numpy as np
from jaxtyping import Float, Int

from argosy.core.errors import BadInput

NO_PLACES: Int[np.ndarray, " P"] = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class PromptInputs:
    """The inputs of a prompt besides its token ids.

    places: indices in the prompt of the tokens whose embeddings are replaced, ascending. Their ids may be any of the vocabulary.
    embeddings: the embeddings that replace them, such as the vectors of an image's patches.
    positions: the rotary position of each prompt token on each axis (M-RoPE). Tokens of the completion count on from the largest
        position. None: each token's index, on every axis.
    """

    places: Int[np.ndarray, " P"] = field(default_factory=lambda: NO_PLACES)
    embeddings: Float[np.ndarray, "R D"] | None = None
    positions: Int[np.ndarray, "T A"] | None = None
    _digests: dict[int, tuple[tuple[int, bytes], ...]] = field(default_factory=dict, init=False, repr=False)

    def check(self, length: int, width: int, axes: Collection[int]) -> None:
        """Checks that these inputs fit a prompt and a model.

        Args:
            length: number of prompt tokens.
            width: the model's embedding width.
            axes: the numbers of axes that the model's rotary positions may have.

        Raises:
            BadInput: they do not fit.
        """
        if np.any(np.diff(self.places) <= 0) or np.any(self.places < 0) or np.any(self.places >= length):
            raise BadInput(f"embeddings at places that do not ascend from 0 to {length - 1}, the prompt's last token")
        shape = (0, width) if self.embeddings is None else self.embeddings.shape
        if shape != (len(self.places), width):
            raise BadInput(f"embeddings {shape} for {len(self.places)} tokens of a model of width {width}")
        if self.positions is None:
            return
        if self.positions.ndim != 2 or len(self.positions) != length:
            raise BadInput(f"positions {self.positions.shape} for a prompt of {length} tokens", hint="[tokens, axes]")
        if self.positions.shape[1] not in axes:
            raise BadInput(f"positions of {self.positions.shape[1]} axes", hint="as many as the model's `rope.sections`")

    @property
    def axes(self) -> int:
        """Number of axes of the rotary positions; 0 if there are none."""
        return 0 if self.positions is None else self.positions.shape[1]

    def rows(self, start: int, end: int) -> slice:
        """The rows of `embeddings` for the tokens with indices from `start` to `end` (exclusive)."""
        first, last = np.searchsorted(self.places, (start, end))
        return slice(int(first), int(last))

    def overlays(self, start: int, end: int) -> bool:
        """Whether embeddings of tokens with indices from `start` to `end` (exclusive) are replaced."""
        rows = self.rows(start, end)
        return rows.start < rows.stop

    def digests(self, page: int) -> tuple[tuple[int, bytes], ...]:
        """The digests of these inputs for `PageKey.digests`, at most one for each page of `page` tokens."""
        if page not in self._digests:
            entries = sorted([*self._embedded(), *self._offset_changes()])
            pages = [list(group) for _, group in groupby(entries, lambda entry: entry[0] // page)]
            self._digests[page] = tuple((group[0][0], _digest(group)) for group in pages)
        return self._digests[page]

    def _embedded(self) -> list[tuple[int, bytes]]:
        if self.embeddings is None:
            return []
        values = np.asarray(self.embeddings, np.float32)
        return [(int(place), b"embedding" + row.tobytes()) for place, row in zip(self.places, values, strict=True)]

    def _offset_changes(self) -> list[tuple[int, bytes]]:
        """The offsets of rotary positions from token indices, at each index where the offset changes. The last may be the first token
        of the completion."""
        if self.positions is None:
            return []
        length = len(self.positions)
        offsets = rotary_positions(self, 0, length + 1, self.axes) - np.arange(length + 1)[:, None]
        changed = np.any(np.diff(offsets, axis=0, prepend=0), axis=1)
        return [(int(at), b"positions" + offsets[at].astype(np.int64).tobytes()) for at in np.flatnonzero(changed)]


def rotary_positions(inputs: PromptInputs | None, start: int, end: int, axes: int) -> Int[np.ndarray, "T A"]:
    """The rotary positions of a sequence's tokens with indices from `start` to `end` (exclusive), which may be beyond the prompt."""
    at = np.repeat(np.arange(start, end)[:, None], axes, 1)
    if inputs is None or inputs.positions is None:
        return at
    prompt_positions = inputs.positions[start:end]
    at += int(inputs.positions.max()) + 1 - len(inputs.positions)
    at[: len(prompt_positions)] = prompt_positions
    return at


def _digest(entries: Sequence[tuple[int, bytes]]) -> bytes:
    content = blake2b(digest_size=16)
    for place, payload in entries:
        content.update(place.to_bytes(8, "little") + len(payload).to_bytes(8, "little") + payload)
    return content.digest()
