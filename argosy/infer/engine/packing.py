"""How the plan of a step becomes arrays of sizes that programs are compiled for."""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from argosy.infer.engine.forward import Sizes, Tables, blank, cut
from argosy.infer.engine.scheduler import Piece, Plan, Sequence
from argosy.infer.settings import ROW, EngineSettings


class Packed(NamedTuple):
    """A step as arrays. words: see `forward.cut`. due: the sequences that are sampled. picks: the place of the last token of each.
    owners: the slot of each. The last two are as long as the sampler is compiled for; what is left over has the owner -1.

    counts: tokens that are sampled for each of `due`, one after the other; empty if it is one.

    With drafts, there are picks for the last known token of each sequence, then for the first draft of each, and so on. drafts: as
    `speculate.verify` takes them; None without.
    """

    sizes: Sizes
    words: np.ndarray
    due: list[Sequence]
    picks: np.ndarray
    owners: np.ndarray
    drafts: np.ndarray | None = None
    counts: Many[int] = ()


@dataclass(frozen=True)
class Packing:
    """shares: whether several rows of one step may belong to one sequence."""

    settings: EngineSettings
    tables: Tables
    shares: bool

    def __call__(self, plan: Plan) -> Packed:
        """A plan as arrays; `words` is one array, for one transfer to the device. Decoding rows compute the token sampled last."""
        sizes, words, prompts = self._begun(plan, 1)
        d, _, _ = cut(words, sizes)
        for i, sequence in enumerate(plan.decodes):
            count = plan.counts[i] if plan.counts else 1
            d["slot"][i], d["length"][i] = sequence.slot, sequence.computed - count
            self.write_pages(d, i, sequence)
            if plan.counts:
                d["steps"][i] = count
        due = [*plan.decodes, *(sequence for sequence, _ in prompts)]
        places = [*range(len(plan.decodes)), *(place for _, place in prompts)]
        count = sampled_rows(len(due))
        picks, owners = np.zeros(count, np.int32), np.full(count, -1, np.int32)
        picks[: len(due)], owners[: len(due)] = places, [sequence.slot for sequence in due]
        return Packed(sizes, words, due, picks, owners, counts=plan.counts)

    def drafted(self, plan: Plan, starts: Many[int], rows: Many[Many[int]], drafts: Many[Many[int]], ahead: int) -> Packed:
        """A plan whose decoding sequences compute several tokens each.

        Args:
            starts: of each, the tokens computed before. rows: its tokens from there on. drafts: those of them that are drafts, the
                last ones.
            ahead: tokens of a row, in the program.
        """
        sizes, words, prompts = self._begun(plan, ahead)
        _, r, _ = cut(words, sizes)
        due = [*plan.decodes, *(sequence for sequence, _ in prompts)]
        count, deepest = sampled_rows(len(due)), ahead - 1
        picks, owners = np.zeros((ahead, count), np.int32), np.full(count, -1, np.int32)
        guesses = np.full((deepest, count), -1, np.int32)
        for i, (sequence, start, tokens, own) in enumerate(zip(plan.decodes, starts, rows, drafts, strict=True)):
            r["slot"][i], r["length"][i], r["new"][i] = sequence.slot, start, len(tokens)
            self.write_pages(r, i, sequence)
            r["tokens"][i, : len(tokens)] = tokens
            picks[:, i] = i * ahead + len(tokens) - 1
            picks[: len(own), i] -= np.arange(len(own), 0, -1)
            guesses[: len(own), i] = own
        picks[:, len(plan.decodes) : len(due)] = [place for _, place in prompts]
        owners[: len(due)] = [sequence.slot for sequence in due]
        return Packed(sizes, words, due, picks.reshape(-1), owners, guesses)

    def _begun(self, plan: Plan, ahead: int) -> tuple[Sizes, np.ndarray, list[tuple[Sequence, int]]]:
        """The arrays with the rows of prompts, and the prompts that end, each with the place of its last token."""
        rows = self._rows(plan)
        longest = max((len(piece.tokens) for piece in plan.pieces), default=0)
        width = ROW * (1 if self.shares else power(-(-longest // ROW), 4))
        decodes = self._decoding_rows(len(plan.decodes), alone=not rows)
        sizes = _sizes(decodes, _prompt_rows(len(rows), decodes), width if rows else 0, self.tables, ahead)
        sizes = sizes._replace(steps=self.settings.steps) if plan.counts else sizes
        words = blank(sizes)
        c, ended = cut(words, sizes)[2], []
        for i, (piece, at) in enumerate(rows):
            tokens, sequence = piece.tokens[at : at + width], piece.sequence
            c["slot"][i], c["length"][i], c["new"][i] = sequence.slot, piece.start + at, len(tokens)
            self.write_pages(c, i, sequence)
            c["tokens"][i, : len(tokens)] = tokens
            if piece.ends and at + len(tokens) == len(piece.tokens):
                ended.append((sequence, decodes * ahead + i * width + len(tokens) - 1))
        return sizes, words, ended

    def write_pages(self, part: dict[str, np.ndarray], i: int, sequence: Sequence) -> None:
        """Writes the page tables of row i, whose length is written already. In a window's table are the pages that the row sees."""
        part["table"][i, : len(sequence.pages)] = sequence.pages
        for number, (window, kept) in enumerate(zip(self.tables.windows, sequence.windows)):
            first = window.first(int(part["length"][i])) // self.tables.page
            table = part[f"window{number}"][i]
            assert first >= kept.first, "pages that the row sees were given back"
            seen = kept.pages[first - kept.first :][: len(table)]
            part[f"first{number}"][i], table[: len(seen)] = first, seen

    def decoding(self, rows: int) -> Sizes:
        """The sizes of a step of decoding rows alone."""
        return Sizes(self._decoding_rows(rows, alone=True), 0, 0, self.tables)

    def every(self, ahead: int = 1) -> Iterator[Packed]:
        """A step of every size there may be, without sequences. Args: as for `possible`."""
        for sizes, counts in self.possible(ahead).items():
            words = blank(sizes)
            for count in sorted(counts):
                drafts = None if ahead == 1 else np.full((ahead - 1, count), -1, np.int32)
                yield Packed(sizes, words, [], np.zeros(ahead * count, np.int32), np.full(count, -1, np.int32), drafts)

    def possible(self, ahead: int = 1) -> dict[Sizes, set[int]]:
        """The sizes of every step there may be, and for each the numbers of rows that the sampler may be called with.

        Args:
            ahead: tokens of a decoding row. More than one: as `drafted` packs them, and only those with decoding rows.
        """
        slots, tables = self.settings.slots, self.tables
        found: dict[Sizes, set[int]] = {}
        for n in range(1, slots + 1):
            sizes = _sizes(self._decoding_rows(n, alone=True), 0, 0, tables, ahead)
            for one in [sizes] if self.settings.steps == 1 else [sizes, sizes._replace(steps=self.settings.steps)]:
                found.setdefault(one, set()).add(sampled_rows(n))
        for n in range(int(ahead > 1), slots):
            decodes = self._decoding_rows(n, alone=False)
            budget = self.settings.beside if n else self.settings.budget
            most = budget // ROW if self.shares else 1
            for rows in range(1, most + 1):
                for width in {ROW} if self.shares else {ROW * power(k, 4) for k in range(1, -(-budget // ROW) + 1)}:
                    sizes = _sizes(decodes, _prompt_rows(rows, decodes), width, tables, ahead)
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


def _sizes(decodes: int, rows: int, width: int, tables: Tables, ahead: int) -> Sizes:
    return Sizes(decodes, rows, width, tables) if ahead == 1 else Sizes(0, rows, width, tables, decodes, ahead)


def _prompt_rows(n: int, decodes: int) -> int:
    """The number of rows of prompts that a step is compiled for: alone, where empty rows cost as much as full ones, 1, 2, 4 and so on;
    beside decoding rows 1, 4, 16, since each number there is compiled with several numbers of those."""
    return power(n, 4 if decodes else 2)


def sampled_rows(n: int) -> int:
    """The number of rows that the sampler is compiled for, which takes 3 CPU seconds: 1, 8, 32, 64 and so on."""
    return 1 if n <= 1 else 8 if n <= 8 else max(32, power(n, 2))


def power(n: int, base: int) -> int:
    """The next larger power of the base; 0 for 0."""
    size = min(n, 1)
    while size < n:
        size *= base
    return size
