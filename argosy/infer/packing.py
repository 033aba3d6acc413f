"""How the plan of a step becomes arrays of sizes that programs are compiled for."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from argosy.infer.forward import Sizes, cut
from argosy.infer.schedule import Piece, Plan, Sequence
from argosy.infer.settings import ROW, EngineSettings


class Packed(NamedTuple):
    """A step as arrays. words: see `forward.cut`. due: the sequences that are sampled. picks: the place of the last token of each.
    owners: the slot of each. The last two are as long as the sampler is compiled for; what is left over has the owner -1."""

    sizes: Sizes
    words: np.ndarray
    due: list[Sequence]
    picks: np.ndarray
    owners: np.ndarray


@dataclass(frozen=True)
class Packing:
    """pages: of one sequence, at most. shares: whether several rows of one step may belong to one sequence."""

    settings: EngineSettings
    pages: int
    shares: bool

    def __call__(self, plan: Plan) -> Packed:
        """A plan as arrays; `words` is one array, for one transfer to the device."""
        rows = self._rows(plan)
        longest = max((len(piece.tokens) for piece in plan.pieces), default=0)
        width = ROW * (1 if self.shares else power(-(-longest // ROW), 4))
        decodes = self._decoding_rows(len(plan.decodes), alone=not rows)
        sizes = Sizes(decodes, power(len(rows), 4), width if rows else 0, self.pages)
        words = np.zeros(sizes.words, np.int32)
        d, c = cut(words, sizes)
        d["slot"][:], d["table"][:], c["slot"][:], c["table"][:] = -1, -1, -1, -1
        places, due = list(range(len(plan.decodes))), list(plan.decodes)
        for i, sequence in enumerate(plan.decodes):
            d["slot"][i], d["length"][i] = sequence.slot, sequence.computed - 1
            d["table"][i, : len(sequence.pages)] = sequence.pages
        for i, (piece, at) in enumerate(rows):
            tokens, sequence = piece.tokens[at : at + width], piece.sequence
            c["slot"][i], c["length"][i], c["new"][i] = sequence.slot, piece.start + at, len(tokens)
            c["table"][i, : len(sequence.pages)] = sequence.pages
            c["tokens"][i, : len(tokens)] = tokens
            if piece.ends and at + len(tokens) == len(piece.tokens):
                places.append(decodes + i * width + len(tokens) - 1)
                due.append(sequence)
        count = sampled_rows(len(due))
        picks, owners = np.zeros(count, np.int32), np.full(count, -1, np.int32)
        picks[: len(due)], owners[: len(due)] = places, [sequence.slot for sequence in due]
        return Packed(sizes, words, due, picks, owners)

    def possible(self) -> dict[Sizes, set[int]]:
        """The sizes of every step there may be, and for each the numbers of rows that the sampler may be called with."""
        slots, P = self.settings.slots, self.pages
        found: dict[Sizes, set[int]] = {}
        for n in range(1, slots + 1):
            sizes = Sizes(self._decoding_rows(n, alone=True), 0, 0, P)
            found.setdefault(sizes, set()).add(sampled_rows(n))
        for n in range(slots):
            decodes = self._decoding_rows(n, alone=False)
            budget = self.settings.beside if n else self.settings.budget
            most = budget // ROW if self.shares else 1
            for rows in range(1, most + 1):
                for width in {ROW} if self.shares else {ROW * power(k, 4) for k in range(1, -(-budget // ROW) + 1)}:
                    sizes = Sizes(decodes, power(rows, 4), width, P)
                    ended = range(min(rows, slots - n) + 1)
                    found.setdefault(sizes, set()).update(sampled_rows(n + k) for k in ended)
        return found

    def _rows(self, plan: Plan) -> list[tuple[Piece, int]]:
        """The rows of the prompts: each piece, and the place in it where the row begins."""
        if not self.shares:
            return [(piece, 0) for piece in plan.pieces]
        return [(piece, at) for piece in plan.pieces for at in range(0, len(piece.tokens), ROW)]

    def _decoding_rows(self, n: int, *, alone: bool) -> int:
        """The number of decoding rows that a step is compiled for: alone 1, 4, 8, 16 and so on; beside prompts, where more rows cost
        little, 8 or all slots."""
        if n == 0:
            return 0
        if alone:
            return 4 if n == 2 else power(n, 2)
        most = power(self.settings.slots, 2)
        return min(8, most) if n <= 8 else most


def sampled_rows(n: int) -> int:
    """The number of rows that the sampler is compiled for, which takes 3 CPU seconds: 1, 8, 32, 64 and so on."""
    return 1 if n <= 1 else 8 if n <= 8 else max(32, power(n, 2))


def power(n: int, base: int) -> int:
    """The next larger power of the base; 0 for 0."""
    size = min(n, 1)
    while size < n:
        size *= base
    return size
