"""Which sequences take part in the next step, and with how many tokens. Host bookkeeping alone: no array and no jax.

Every step has a budget of tokens. Sequences that decode come first, one token each; what is left goes to prompts, in pieces, those
that have begun before those that wait. So a long prompt delays nobody by more than a piece of it, and answers begin in the order
in which they were asked for (or of their priority). Where pages run out, the sequence that came last gives up its own and waits;
its tokens are computed again later (preemption by recomputing).

The plan of a step is made before the tokens of the step before it are known: a sequence counts what is on its way (`ahead`).
"""

import heapq
import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from argosy.infer.pages import Hash, Pages, page_hashes


@dataclass(eq=False)
class Sequence:
    """One prompt and its answer, as the scheduler knows it.

    tokens: known ids, the prompt and what was made. prompt: how many of them are the prompt. most: the most tokens of the answer.
    computed: tokens whose entries a dispatched step wrote into the cache. ahead: tokens that dispatched steps draw, and the host
    does not know yet.
    """

    tokens: list[int]
    most: int
    prompt: int = 0
    priority: int = 0
    salt: str = ""
    order: int = 0
    computed: int = 0
    ahead: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    reused: int = 0
    preemptions: int = 0
    done: bool = False
    what: Any = None

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)
        self._hashes: list[Hash] = []

    @property
    def length(self) -> int:
        """Tokens of the sequence, those on their way included."""
        return len(self.tokens) + self.ahead

    @property
    def made(self) -> int:
        """Tokens of the answer, those on their way included."""
        return self.length - self.prompt

    @property
    def is_filling(self) -> bool:
        """Whether more than the last token is still to be computed: a prompt, or what was given up."""
        return self.computed < self.length - 1 or self.made == 0

    def hashes(self, page: int) -> list[Hash]:
        """Of its full pages of known tokens."""
        done = len(self._hashes)
        if len(self.tokens) // page > done:
            first = self._hashes[-1] if done else None
            self._hashes += page_hashes(self.tokens[done * page :], page, self.salt, first)
        return self._hashes


@dataclass(frozen=True)
class Piece:
    """Tokens of a prompt to be computed. ends: the last of them draws the next token."""

    sequence: Sequence
    start: int
    tokens: list[int]
    ends: bool


@dataclass(frozen=True)
class Plan:
    """One step: sequences that decode a token each, and pieces of prompts."""

    decodes: list[Sequence]
    pieces: list[Piece]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.pieces)

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(len(piece.tokens) for piece in self.pieces)


def _rank(sequence: Sequence) -> tuple[int, int]:
    """What goes first is smallest."""
    return sequence.priority, sequence.order


class Scheduler:
    """Sequences that wait and sequences that run.

    Args:
        page: tokens of a page.
        slots: how many sequences run at a time.
        budget: tokens of a step where prompts have it to themselves.
        beside: tokens of prompts in a step that also decodes: what an answer under way waits for.
        pieces: the most sequences whose prompts take part in a step; None: any number.
        row: prompts are computed in rows of this many tokens, each a piece of one sequence. budget counts whole rows.
    """

    def __init__(
        self, pages: Pages, page: int, slots: int, budget: int, beside: int, row: int, pieces: int | None = None
    ):
        self.pages, self.page, self.row = pages, page, row
        self.budget, self.beside, self.most_pieces = budget, beside, pieces
        self.running: list[Sequence] = []
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._slots = list(range(slots))
        heapq.heapify(self._slots)
        self._order = itertools.count()
        self.preemptions = 0

    # ---------------------------------------------------------------- coming and going

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue."""
        sequence.order = next(self._order)
        heapq.heappush(self._waiting, (sequence.priority, sequence.order, sequence))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def end(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its pages are free for the next step."""
        if sequence.done:
            return
        sequence.done = True
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting = [item for item in self._waiting if item[2] is not sequence]
            heapq.heapify(self._waiting)

    def begin_anew(self) -> None:
        """Has everything computed again, what pages hold for others included: the weights have changed. Nothing may be on its
        way."""
        for sequence in list(self.running):
            self._preempt(sequence)
        self.pages.forget_all()

    def _release(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence.pages)
        heapq.heappush(self._slots, sequence.slot)
        sequence.pages, sequence.slot = [], -1

    # ---------------------------------------------------------------- a step

    def plan(self) -> Plan:
        """What the next step computes; everything in it counts as computed and drawn from here on."""
        decodes = self._decodes()
        pieces = self._pieces(self.beside if decodes else self.budget)
        for sequence in decodes:
            sequence.computed += 1
            sequence.ahead += 1
        return Plan(decodes, pieces)

    def _decodes(self) -> list[Sequence]:
        """The running sequences that draw a token now. Where pages run out, the one that came last gives its own up, as soon as
        what it has on its way is known: until then it rests."""
        chosen: list[Sequence] = []
        for sequence in sorted(self.running, key=_rank):
            if sequence.slot < 0 or sequence.is_filling or sequence.made >= sequence.most:
                continue
            while not self._grow(sequence, sequence.computed + 1):
                last = max(self.running, key=_rank)
                if last in chosen:
                    chosen.remove(last)
                if last.ahead:
                    break
                self._preempt(last)
                if last is sequence:
                    break
            else:
                chosen.append(sequence)
        return chosen

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence has pages for so many tokens now."""
        lacking = -(-tokens // self.page) - len(sequence.pages)
        if lacking <= 0:
            return True
        fresh = self.pages.take(lacking)
        if fresh is None:
            return False
        sequence.pages += fresh
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Gives up what a sequence has computed; it waits in its old place."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        heapq.heappush(self._waiting, (sequence.priority, sequence.order, sequence))

    def _pieces(self, budget: int) -> list[Piece]:
        pieces: list[Piece] = []
        for sequence in sorted(self.running, key=_rank):
            if sequence.is_filling and not sequence.ahead and not self._full(pieces, budget):
                budget -= self._piece(sequence, budget, pieces)
        while self._waiting and self._slots and not self._full(pieces, budget):
            sequence = self._waiting[0][2]
            if not self._admit(sequence):
                break
            heapq.heappop(self._waiting)
            budget -= self._piece(sequence, budget, pieces)
        return pieces

    def _full(self, pieces: Many[Piece], budget: int) -> bool:
        return budget < self.row or (self.most_pieces is not None and len(pieces) >= self.most_pieces)

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a slot and pages for its prompt, those that hold its beginning already among them."""
        known = len(sequence.tokens)
        shared = self.pages.found(sequence.hashes(self.page)[: (known - 1) // self.page]) if self.pages.reuse else []
        owned = self.pages.take(-(-known // self.page) - len(shared), shared)
        if owned is None:
            return False
        sequence.pages, sequence.computed = owned, len(shared) * self.page
        sequence.reused = max(sequence.reused, min(sequence.computed, sequence.prompt))
        sequence.slot = heapq.heappop(self._slots)
        self.running.append(sequence)
        return True

    def _piece(self, sequence: Sequence, budget: int, pieces: list[Piece]) -> int:
        start = sequence.computed
        count = min(len(sequence.tokens) - start, budget // self.row * self.row)
        ends = start + count == len(sequence.tokens)
        pieces.append(Piece(sequence, start, sequence.tokens[start : start + count], ends))
        sequence.computed += count
        sequence.ahead += ends
        return -(-count // self.row) * self.row

    def learned(self, sequence: Sequence, token: int) -> None:
        """A token that was on its way is known."""
        sequence.tokens.append(token)
        sequence.ahead -= 1
        self.publish(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Makes the full pages of a sequence known to others."""
        full = min(sequence.computed, len(sequence.tokens)) // self.page
        if not self.pages.reuse or not sequence.pages:
            return
        for page, holds in list(zip(sequence.pages, sequence.hashes(self.page)))[:full]:
            if self.pages._hash_of.get(page) != holds:
                self.pages.publish(page, holds)
