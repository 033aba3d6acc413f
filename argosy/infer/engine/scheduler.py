"""The scheduler: which sequences take part in the next step, and with how many tokens. No arrays and no jax.

Every sequence that decodes gets one token in each step. Prompts are prefilled in chunks under a token budget, those that have begun
before those that wait, first come first served within a priority. So a long prompt delays decoding by one chunk at most. If the
pages run out, the last sequence in that order is preempted: it gives up its pages, waits, and is computed again later.

A step is planned before the tokens of the previous step are known, so a sequence counts the tokens that are still being sampled
(`ahead`). With speculation the tokens of the previous step are known, and a decoding sequence may have drafts after them: the step
computes these too, and `verified` counts those that agree. Pages for drafts are taken only if they are free.

A prompt that is equal to an earlier one reuses all of it but its last token: its full pages are shared, the page in which it ends is
copied, and the last token is computed as a decoding one. So of equal prompts that come at once, the first is computed and the others
wait for the step after it.

Layers with a window have pools of their own (`Pool`). There a sequence keeps the pages that its next query sees, and gives the earlier
ones back. A prompt is found in the prefix cache up to where every pool still has the pages that its next token sees.
"""

import heapq
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from argosy.infer.engine.pages import Hash, Pages, page_hashes, tail_hash
from argosy.models.parts.cache import AttentionWindow


@dataclass(frozen=True)
class Pool:
    """The pages of layers with one window. most: pages that one sequence holds, at most."""

    window: AttentionWindow
    pages: Pages
    most: int


@dataclass(eq=False)
class Kept:
    """The pages of a sequence in a `Pool`: those of the page numbers from `first` on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


@dataclass(eq=False)
class Sequence:
    """One prompt and its answer.

    tokens: the known ids, of prompt and answer. prompt: number of prompt tokens. most: limit on the tokens of the answer. computed:
    tokens that dispatched steps wrote into the cache. ahead: tokens that dispatched steps sample and the host has not read yet.
    behind: tokens besides the last that the next decode step computes again, because recurrent states were rolled back.
    windows: its pages in the pools of windows. published: pages registered for prefix caching. reused: prompt tokens found in the
    prefix cache. copied: all but the last token of the prompt was found there. what: the caller's own data.
    """

    tokens: list[int]
    most: int
    prompt: int = 0
    priority: int = 0
    salt: str = ""
    order: int = 0
    computed: int = 0
    ahead: int = 0
    behind: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    windows: list[Kept] = field(default_factory=list)
    published: int = 0
    reused: int = 0
    copied: bool = False
    preemptions: int = 0
    done: bool = False
    what: Any = None

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)
        self._hashes: list[Hash] = []
        self._tail: tuple[int, Hash] | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and answer, including those still being sampled."""
        return len(self.tokens) + self.ahead

    @property
    def made(self) -> int:
        """Tokens of the answer, including those still being sampled."""
        return self.length - self.prompt

    @property
    def is_filling(self) -> bool:
        """Whether it is prefilled, the first time or after a preemption, and does not decode yet."""
        return self.computed + self.behind < self.length - 1 or (self.made == 0 and not self.copied)

    @property
    def last(self) -> int:
        """Position of the first token that its next decode step computes."""
        return self.length - 1 - self.behind

    def hashes(self, page: int) -> list[Hash]:
        """The hashes of its full pages of known tokens."""
        done = len(self._hashes)
        if len(self.tokens) // page > done:
            first = self._hashes[-1] if done else None
            self._hashes += page_hashes(self.tokens[done * page :], page, self.salt, first)
        return self._hashes

    def tail(self, page: int) -> Hash | None:
        """The hash of its known tokens but the last one; None if these end with a page."""
        known = len(self.tokens) - 1
        if known % page == 0:
            return None
        if self._tail is None or self._tail[0] != known:
            self._tail = known, tail_hash(self.tokens[:known], page, self.salt, self.hashes(page)[: known // page])
        return self._tail[1]


@dataclass(frozen=True)
class Piece:
    """A chunk of a prompt. ends: its last token is the last of the prompt, so the step samples the next token."""

    sequence: Sequence
    start: int
    tokens: list[int]
    ends: bool


@dataclass(frozen=True)
class Plan:
    """One step: the sequences that decode, and the chunks of prompts. room: the most drafts for each that decodes; empty without
    speculation. counts: tokens that are sampled for each that decodes, one after the other; empty if it is one. copies: pages that are
    copied before the step, each with the page that it is copied to."""

    decodes: list[Sequence]
    pieces: list[Piece]
    room: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.pieces)


def _rank(sequence: Sequence) -> tuple[int, int]:
    """The order of service: the smallest first."""
    return sequence.priority, sequence.order


class Scheduler:
    """The queue of waiting sequences, and the running ones.

    Args:
        page: tokens per page.
        slots: number of sequences that run at a time.
        budget: prompt tokens per step, if nothing decodes.
        beside: prompt tokens per step, if sequences decode too.
        row: prompts are computed in rows of this many tokens, each row of one sequence; both budgets count full rows.
        pieces: the most chunks in a step; None: no limit.
        pools: of layers with windows.
        copies: whether pages may be copied.
    """

    def __init__(
        self,
        pages: Pages,
        page: int,
        slots: int,
        budget: int,
        beside: int,
        row: int,
        pieces: int | None = None,
        pools: Many[Pool] = (),
        copies: bool = False,
    ):
        self.pages, self.page, self.row, self.pools = pages, page, row, pools
        self.budget, self.beside, self.most_pieces = budget, beside, pieces
        self.running: list[Sequence] = []
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._slots = list(range(slots))
        heapq.heapify(self._slots)
        self._order = itertools.count()
        self.preemptions = 0
        self.copies = copies and pages.reuse and not pools
        # Of the step that is being planned: the pages that are copied, and the prompts whose last page it writes.
        self._copies: list[tuple[int, int]] = []
        self._ending: dict[Hash, int] = {}

    # ---------------------------------------------------------------- coming and going

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue."""
        sequence.order = next(self._order)
        heapq.heappush(self._waiting, (sequence.priority, sequence.order, sequence))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used(self) -> float:
        """The share of pages with an owner, from 0 to 1, in the pool with the fewest left."""
        return max(pages.used for pages in self._all_pages())

    @property
    def is_empty(self) -> bool:
        """Whether no page has an owner."""
        return all(pages.free == pages.count for pages in self._all_pages())

    def forget_all(self) -> None:
        """Clears the prefix cache."""
        for pages in self._all_pages():
            pages.forget_all()

    def _all_pages(self) -> list[Pages]:
        return [self.pages, *(pool.pages for pool in self.pools)]

    def end(self, sequence: Sequence) -> None:
        """Removes a waiting or running sequence; the next step may use its pages."""
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
        """Preempts all running sequences and clears the prefix cache, because the weights have changed. No sampled token may be
        unread."""
        for sequence in list(self.running):
            self._preempt(sequence)
        self.forget_all()

    def _release(self, sequence: Sequence) -> None:
        self.pages.give_back(sequence.pages)
        for pool, kept in zip(self.pools, sequence.windows):
            _give_back(pool, kept.pages)
        heapq.heappush(self._slots, sequence.slot)
        sequence.pages, sequence.windows, sequence.slot, sequence.published = [], [], -1, 0

    # ---------------------------------------------------------------- a step

    def plan(self, drafts: Callable[[Sequence], int] | None = None, steps: int = 1) -> Plan:
        """The next step. Its tokens count as computed from here on, and those it samples as `ahead`.

        Args:
            drafts: the most drafts that a sequence may have; None: no speculation.
            steps: decode steps that may be one, if no prompt is computed.
        """
        decodes = self._decodes()
        self._copies, self._ending = [], {}
        pieces, more = self._pieces(self.beside if decodes else self.budget, decodes=bool(decodes))
        decodes += more
        for tail, page in self._ending.items():
            self.pages.publish_tail(page, tail)
        room = [] if drafts is None else [self._room(sequence, drafts(sequence)) for sequence in decodes]
        # Those that begin now take one: whether they may take several (`Engine._steps`) was asked of the running ones.
        counts = [] if pieces or steps == 1 else [1 if s in more else self._count(s, steps) for s in decodes]
        for sequence, count in zip(decodes, counts or [1] * len(decodes), strict=True):
            sequence.computed = sequence.length + count - 1
            sequence.ahead += count
        return Plan(decodes, pieces, room, counts if max(counts, default=1) > 1 else [], self._copies)

    def _count(self, sequence: Sequence, steps: int) -> int:
        """The number of tokens, at most so many, that are sampled for it in a step; nobody is preempted for more than one."""
        count = min(steps, sequence.most - sequence.made)
        return count if self._grow(sequence, sequence.length + count - 1, sequence.last) else 1

    def _room(self, sequence: Sequence, drafts: int) -> int:
        """The number of drafts, at most so many, that its pages hold; nobody is preempted for drafts."""
        self._grow(sequence, sequence.length + drafts, sequence.last)
        held = min([len(sequence.pages), *(kept.end for kept in sequence.windows)])
        return min(drafts, held * self.page - sequence.length)

    def _decodes(self) -> list[Sequence]:
        """The running sequences that decode. If the pages run out, the last sequence in order is preempted; if its sampled tokens
        are not read yet, it skips this step and is preempted in a later one."""
        chosen: list[Sequence] = []
        for sequence in sorted(self.running, key=_rank):
            if sequence.slot < 0 or sequence.is_filling or sequence.made >= sequence.most:
                continue
            while not self._grow(sequence, sequence.length, sequence.last):
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

    def _grow(self, sequence: Sequence, tokens: int, at: int) -> bool:
        """Allocates pages for this many tokens; returns whether the sequence has them. If a pool has too few, it takes none.

        Args:
            at: position of the first query that is not computed yet. What no window reaches from there is given back.
        """
        number = -(-tokens // self.page)
        owns = [(self.pages, sequence.pages, number - len(sequence.pages))]
        for pool, kept in zip(self.pools, sequence.windows, strict=True):
            self._slide(pool, kept, sequence, at)
            end = number
            if sequence.is_filling:
                # It keeps as many pages as it was admitted with: what it gives back here, nobody else can take from its next chunk.
                end = max(end, min(kept.first + pool.most, -(-len(sequence.tokens) // self.page)))
            owns.append((pool.pages, kept.pages, end - kept.end))
        if any(pages.free < lacking for pages, _, lacking in owns):
            return False
        for pages, own, lacking in owns:
            own += pages.take(max(lacking, 0)) or []
        return True

    def _slide(self, pool: Pool, kept: Kept, sequence: Sequence, at: int) -> None:
        """Gives back the pages that a query at `at` does not see."""
        passed = min(pool.window.first(at) // self.page - kept.first, len(kept.pages))
        if passed > 0:
            self.publish(sequence)
            _give_back(pool, kept.pages[:passed])
            kept.first, kept.pages = kept.first + passed, kept.pages[passed:]

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the pages of a sequence away and puts it back at its place in the queue."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.computed = sequence.behind = 0
        sequence.copied = False
        sequence.preemptions += 1
        self.preemptions += 1
        heapq.heappush(self._waiting, (sequence.priority, sequence.order, sequence))

    def _pieces(self, budget: int, *, decodes: bool) -> tuple[list[Piece], list[Sequence]]:
        """The chunks of prompts, and the sequences that begin to decode because their prompts are known already.

        Args:
            decodes: whether sequences decode in this step.
        """
        whole = budget
        pieces: list[Piece] = []
        known: list[Sequence] = []
        later: list[tuple[int, int, Sequence]] = []
        for sequence in sorted(self.running, key=_rank):
            if sequence.is_filling and not sequence.ahead and not self._full(pieces, budget):
                budget -= self._piece(sequence, budget, pieces)
        while self._waiting and self._slots and not self._full(pieces, budget):
            sequence = self._waiting[0][2]
            if self._ending and sequence.tail(self.page) in self._ending:
                # This step computes its prompt, and the next one may copy it.
                later.append(heapq.heappop(self._waiting))
                continue
            if not self._admit(sequence):
                break
            heapq.heappop(self._waiting)
            if sequence.copied:
                known.append(sequence)
            else:
                budget -= self._piece(sequence, budget, pieces)
        for item in later:
            heapq.heappush(self._waiting, item)
        # Beside more prompt tokens than that nothing decodes: then these begin with the next step.
        return pieces, known if decodes or whole - budget <= self.beside else []

    def _full(self, pieces: Many[Piece], budget: int) -> bool:
        return budget < self.row or (self.most_pieces is not None and len(pieces) >= self.most_pieces)

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a slot, and pages for its tokens: first those found in the prefix cache."""
        known = len(sequence.tokens)
        number = -(-known // self.page)
        found = self._found(sequence.hashes(self.page)[: (known - 1) // self.page]) if self.pages.reuse else _NOTHING
        asked = [(self.pages, found.pages, number - len(found.pages))]
        for pool, kept in zip(self.pools, found.windows or [Kept() for _ in self.pools], strict=True):
            asked.append((pool.pages, kept.pages, min(kept.first + pool.most, number) - kept.end))
        if not all(pages.can_take(new, shared) for pages, shared, new in asked):
            return False
        owned, *windows = [pages.take(new, shared) or [] for pages, shared, new in asked]
        sequence.pages, sequence.computed = owned, len(found.pages) * self.page
        self._copy(sequence, len(found.pages))
        firsts = [kept.first for kept in found.windows] or [0] * len(windows)
        sequence.windows = [Kept(first, own) for first, own in zip(firsts, windows, strict=True)]
        sequence.published = len(found.pages)
        sequence.reused = max(sequence.reused, min(sequence.computed, sequence.prompt))
        sequence.slot = heapq.heappop(self._slots)
        self.running.append(sequence)
        return True

    def _copy(self, sequence: Sequence, full: int) -> None:
        """Has the rest of a prompt copied, of which so many full pages were found, if it is known but for its last token."""
        known = len(sequence.tokens) - 1
        if not self.copies or known // self.page != full or known == 0:
            return
        if (tail := sequence.tail(self.page)) is not None:
            source = self.pages.tail(tail)
            if source is None:
                return
            self._copies.append((source, sequence.pages[full]))
        sequence.computed, sequence.copied = known, True

    def _found(self, hashes: list[Hash]) -> "_Found":
        """The longest beginning with these hashes of which every pool has what the next token sees."""
        pages = self.pages.found(hashes)
        there = [pool.pages.each(hashes[: len(pages)]) for pool in self.pools]
        # Of each pool, the number of pages in a row that end with each page.
        runs = [list(itertools.accumulate(own, lambda n, page: 0 if page is None else n + 1, initial=0)) for own in there]
        for count in range(len(pages), 0, -1):
            firsts = [pool.window.first(count * self.page) // self.page for pool in self.pools]
            if all(run[count] >= count - first for run, first in zip(runs, firsts, strict=True)):
                kept = [
                    Kept(first, [page for page in own[first:count] if page is not None])
                    for first, own in zip(firsts, there, strict=True)
                ]
                return _Found(pages[:count], kept)
        return _NOTHING

    def _piece(self, sequence: Sequence, budget: int, pieces: list[Piece]) -> int:
        start = sequence.computed
        count = min(len(sequence.tokens) - start, budget // self.row * self.row)
        grown = self._grow(sequence, start + count, start)
        assert grown, "a prompt holds the pages of its chunks from its admission on"
        ends = start + count == len(sequence.tokens)
        pieces.append(Piece(sequence, start, sequence.tokens[start : start + count], ends))
        sequence.computed += count
        # Found from here on: a step writes all of its keys and values before it reads any, and steps run in order.
        self.publish(sequence)
        sequence.ahead += ends
        if ends and self.copies and (tail := sequence.tail(self.page)) is not None:
            self._ending.setdefault(tail, sequence.pages[(len(sequence.tokens) - 1) // self.page])
        return -(-count // self.row) * self.row

    def verified(self, sequence: Sequence, tokens: int, *, rolled_back: bool) -> None:
        """A decode step samples this many tokens for a sequence, all but the last its drafts.

        Args:
            rolled_back: whether its states are as before the step, so that what the step computed is computed again.
        """
        sequence.ahead += tokens - 1
        if rolled_back:
            sequence.computed -= sequence.behind + 1
            sequence.behind += tokens
        else:
            sequence.computed += tokens - 1
            sequence.behind = 0

    def learned(self, sequence: Sequence, token: int) -> None:
        """Adds a token that a step sampled."""
        sequence.tokens.append(token)
        sequence.ahead -= 1
        self.publish(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Registers the pages of a sequence that have become full."""
        full = min(sequence.computed, len(sequence.tokens)) // self.page
        if not self.pages.reuse or not sequence.pages or full <= sequence.published:
            return
        hashes = sequence.hashes(self.page)
        for i in range(sequence.published, full):
            self.pages.publish(sequence.pages[i], hashes[i])
            for pool, kept in zip(self.pools, sequence.windows, strict=True):
                if kept.first <= i < kept.end:
                    pool.pages.publish(kept.pages[i - kept.first], hashes[i])
        sequence.published = full


@dataclass(frozen=True)
class _Found:
    """What the prefix cache has of a prompt."""

    pages: list[int] = field(default_factory=list)
    windows: list[Kept] = field(default_factory=list)


_NOTHING = _Found()


def _give_back(pool: Pool, pages: list[int]) -> None:
    """The last pages are allocated again last: a prompt that continues this sequence needs those, and those alone."""
    pool.pages.give_back(pages[::-1])
