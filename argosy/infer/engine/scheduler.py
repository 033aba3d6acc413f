"""The scheduler: chooses the sequences of the next step, and how many tokens of each are computed. No arrays and no jax.

Every sequence that decodes gets one token in each step. Prompts are prefilled in chunks under a token budget. Prompts that have begun
go before waiting ones. Among each of these, lower priority numbers go first, then earlier arrivals. So a long prompt delays decoding by
one chunk at most. If the pages run out, the last sequence by priority and arrival is preempted: it gives up its pages, waits, and is
computed again later.

A step is planned before the tokens of the previous step are known, so a sequence counts the tokens that are still being sampled
(`pending`). With speculation the tokens of the previous step are known, and a decoding sequence may have drafts after them. The step
computes these too, and `accept_drafts` counts those that the model accepts. Pages for drafts are taken only if they are free.

A prompt that is equal to an earlier one reuses all of it but the last token: its full pages are shared, the page in which it ends is
copied, and the last token is computed in a decoding row. So if equal prompts arrive together, the first is computed, and the others
wait for the next step.

Layers with a sliding window have pools of their own (`WindowPool`). There a sequence keeps only the pages that its next query attends
to, and frees the earlier ones. So a prefix counts as cached only if every pool still has the pages that the token after it attends to.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from argosy.infer.engine.pages import PageHash, PagePool
from argosy.infer.engine.scheduled import ScheduledRequest, WindowPages
from argosy.models.parts.attention.cache import AttentionWindow


@dataclass(frozen=True)
class WindowPool:
    """The pages of the layers with one sliding window.

    window: the window.
    pages: the allocator of the pages.
    most: the most pages of one sequence.
    """

    window: AttentionWindow
    pages: PagePool
    most: int


@dataclass(frozen=True)
class PrefillChunk:
    """A chunk of a prompt that one step computes.

    request: the request with the prompt.
    start: position in the prompt of the chunk's first token.
    tokens: the token ids of the chunk.
    ends: whether the chunk ends the prompt, so that the step samples the next token.
    """

    request: ScheduledRequest
    start: int
    tokens: list[int]
    ends: bool


@dataclass(frozen=True)
class StepPlan:
    """The work of one step.

    decodes: the requests that decode.
    chunks: the chunks of prompts that are computed.
    draft_room: the most drafts for each request in `decodes`; empty without speculation.
    counts: number of tokens that are sampled for each request in `decodes`; empty if one for each.
    copies: (source, target) pairs of pages that are copied before the step.
    """

    decodes: list[ScheduledRequest]
    chunks: list[PrefillChunk]
    draft_room: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)


def _rank(request: ScheduledRequest) -> tuple[int, int]:
    """The sort key of the order of service. Requests with smaller keys come first."""
    return request.priority, request.order


class Scheduler:
    """The queue of waiting requests, and the running ones.

    Args:
        pages: the allocator of the pages of layers that attend to the whole sequence.
        page: tokens per page.
        slots: number of requests that run at a time.
        budget: the most prompt tokens per step, if nothing decodes.
        mixed_budget: the most prompt tokens per step, if requests decode too.
        row: prompts are computed in rows of this many tokens, each row of one request. Both budgets count full rows.
        chunks: the most chunks in a step; None: no limit.
        pools: the page pools of the layers with sliding windows.
        copies: whether pages may be copied. It has no effect without prefix caching, or with sliding windows.
    """

    def __init__(
        self,
        pages: PagePool,
        page: int,
        slots: int,
        budget: int,
        mixed_budget: int,
        row: int,
        chunks: int | None = None,
        pools: Sequence[WindowPool] = (),
        copies: bool = False,
    ):
        self.pages, self.page, self.row, self.pools = pages, page, row, pools
        self.budget, self.mixed_budget, self.max_chunks = budget, mixed_budget, chunks
        self.running: list[ScheduledRequest] = []
        self._waiting: list[tuple[int, int, ScheduledRequest]] = []
        self._slots = list(range(slots))
        heapq.heapify(self._slots)
        self._order = itertools.count()
        self.preemptions = 0
        self.copies = copies and pages.reuse and not pools
        # For the step being planned: the (source, target) pages that it copies, and the last page of each prompt that it ends.
        self._copies: list[tuple[int, int]] = []
        self._ending: dict[PageHash, int] = {}

    # ---------------------------------------------------------------- coming and going

    def add(self, request: ScheduledRequest) -> None:
        """Puts a request into the queue."""
        request.order = next(self._order)
        heapq.heappush(self._waiting, (request.priority, request.order, request))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used(self) -> float:
        """The largest share of pages with an owner, from 0 to 1, among all pools."""
        return max(pages.used for pages in self._all_pages())

    @property
    def is_empty(self) -> bool:
        """Whether no page has an owner."""
        return all(pages.free == pages.count for pages in self._all_pages())

    def clear_prefix_cache(self) -> None:
        """Clears the prefix cache."""
        for pages in self._all_pages():
            pages.clear()

    def _all_pages(self) -> list[PagePool]:
        return [self.pages, *(pool.pages for pool in self.pools)]

    def end(self, request: ScheduledRequest) -> None:
        """Removes a waiting or running request, and frees its pages for the next step."""
        if request.done:
            return
        request.done = True
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        else:
            self._waiting = [item for item in self._waiting if item[2] is not request]
            heapq.heapify(self._waiting)

    def restart_all(self) -> None:
        """Preempts all running requests and clears the prefix cache, because the weights have changed. The tokens of all dispatched
        steps must have been read before."""
        for request in list(self.running):
            self._preempt(request)
        self.clear_prefix_cache()

    def _release(self, request: ScheduledRequest) -> None:
        self.pages.release(request.pages)
        for pool, window_pages in zip(self.pools, request.windows):
            _give_back(pool, window_pages.pages)
        heapq.heappush(self._slots, request.slot)
        request.pages, request.windows, request.slot, request.published = [], [], -1, 0

    # ---------------------------------------------------------------- a step

    def plan(self, max_drafts: Callable[[ScheduledRequest], int] | None = None, steps: int = 1) -> StepPlan:
        """Plans the next step. From here on its tokens count as `computed`, and those that it samples as `pending`.

        Args:
            max_drafts: returns the most drafts that a request may have; None: no speculation.
            steps: the number of decode steps in one dispatch, if no prompt is computed.
        """
        decodes = self._decodes()
        self._copies, self._ending = [], {}
        chunks, more = self._chunks(self.mixed_budget if decodes else self.budget, decodes=bool(decodes))
        decodes += more
        for tail, page in self._ending.items():
            self.pages.publish_tail(page, tail)
        room = [] if max_drafts is None else [self._draft_room(request, max_drafts(request)) for request in decodes]
        # A request that begins now takes one step, because `Engine._steps` checked only the running requests for several steps.
        counts = [] if chunks or steps == 1 else [1 if s in more else self._count(s, steps) for s in decodes]
        for request, count in zip(decodes, counts or [1] * len(decodes), strict=True):
            request.computed = request.length + count - 1
            request.pending += count
        return StepPlan(decodes, chunks, room, counts if max(counts, default=1) > 1 else [], self._copies)

    def _count(self, request: ScheduledRequest, steps: int) -> int:
        """The number of tokens, at most `steps`, that one dispatch samples for a request. No other request is preempted to sample more
        than one."""
        count = min(steps, request.max_tokens - request.completion_length)
        return count if self._grow(request, request.length + count - 1, request.next_position) else 1

    def _draft_room(self, request: ScheduledRequest, drafts: int) -> int:
        """The number of drafts, at most `drafts`, that fit into the pages of a request. No other request is preempted for drafts."""
        self._grow(request, request.length + drafts, request.next_position)
        pages = min([len(request.pages), *(window_pages.end for window_pages in request.windows)])
        return min(drafts, pages * self.page - request.length)

    def _decodes(self) -> list[ScheduledRequest]:
        """The running requests that decode in this step. If the pages run out, the last request in the order of service is preempted.
        If its sampled tokens are not read yet, it skips this step and is preempted in a later one."""
        decodes: list[ScheduledRequest] = []
        for request in sorted(self.running, key=_rank):
            if request.slot < 0 or request.is_prefilling or request.completion_length >= request.max_tokens:
                continue
            while not self._grow(request, request.length, request.next_position):
                last = max(self.running, key=_rank)
                if last in decodes:
                    decodes.remove(last)
                if last.pending:
                    break
                self._preempt(last)
                if last is request:
                    break
            else:
                decodes.append(request)
        return decodes

    def _grow(self, request: ScheduledRequest, tokens: int, at: int) -> bool:
        """Allocates pages so that a request has room for `tokens` tokens. Returns whether it has. If a pool has too few pages, none are
        allocated in any pool.

        Args:
            at: position of the first token that is not computed yet. Pages that no sliding window reaches from there are freed.
        """
        number = -(-tokens // self.page)
        owns = [(self.pages, request.pages, number - len(request.pages))]
        for pool, window_pages in zip(self.pools, request.windows, strict=True):
            self._slide(pool, window_pages, request, at)
            end = number
            if request.is_prefilling:
                # The request keeps as many pages as it was admitted with, so that no other request takes the pages of its next chunk.
                end = max(end, min(window_pages.first + pool.most, -(-len(request.tokens) // self.page)))
            owns.append((pool.pages, window_pages.pages, end - window_pages.end))
        if any(pages.free < lacking for pages, _, lacking in owns):
            return False
        for pages, owned, lacking in owns:
            owned += pages.allocate(max(lacking, 0)) or []
        return True

    def _slide(self, pool: WindowPool, window_pages: WindowPages, request: ScheduledRequest, at: int) -> None:
        """Frees the pages that a query at position `at` does not attend to."""
        passed = min(pool.window.first(at) // self.page - window_pages.first, len(window_pages.pages))
        if passed > 0:
            self.publish(request)
            _give_back(pool, window_pages.pages[:passed])
            window_pages.first, window_pages.pages = window_pages.first + passed, window_pages.pages[passed:]

    def _preempt(self, request: ScheduledRequest) -> None:
        """Frees the pages of a running request and puts it back into the queue, by its priority and arrival."""
        self.running.remove(request)
        self._release(request)
        request.computed = request.recompute = 0
        request.copied = False
        request.preemptions += 1
        self.preemptions += 1
        heapq.heappush(self._waiting, (request.priority, request.order, request))

    def _chunks(self, budget: int, *, decodes: bool) -> tuple[list[PrefillChunk], list[ScheduledRequest]]:
        """The chunks of prompts for this step, and the requests that begin to decode because the prefix cache has their whole prompts.

        Args:
            budget: the most prompt tokens.
            decodes: whether running requests decode in this step.
        """
        whole = budget
        chunks: list[PrefillChunk] = []
        ready: list[ScheduledRequest] = []
        later: list[tuple[int, int, ScheduledRequest]] = []
        for request in sorted(self.running, key=_rank):
            if request.is_prefilling and not request.pending and not self._full(chunks, budget):
                budget -= self._chunk(request, budget, chunks)
        while self._waiting and self._slots and not self._full(chunks, budget):
            request = self._waiting[0][2]
            if self._ending and request.tail(self.page) in self._ending:
                # This step computes an equal prompt, whose pages the next step may copy.
                later.append(heapq.heappop(self._waiting))
                continue
            if not self._admit(request):
                break
            heapq.heappop(self._waiting)
            if request.copied:
                ready.append(request)
            else:
                budget -= self._chunk(request, budget, chunks)
        for item in later:
            heapq.heappush(self._waiting, item)
        # Nothing decodes beside more prompt tokens than `mixed_budget`. The ready requests then begin with the next step.
        return chunks, ready if decodes or whole - budget <= self.mixed_budget else []

    def _full(self, chunks: Sequence[PrefillChunk], budget: int) -> bool:
        return budget < self.row or (self.max_chunks is not None and len(chunks) >= self.max_chunks)

    def _admit(self, request: ScheduledRequest) -> bool:
        """Gives a waiting request a slot and pages for its tokens, as many as possible from the prefix cache. Returns whether there
        were enough pages; if not, nothing is changed."""
        length = len(request.tokens)
        number = -(-length // self.page)
        prefix = self._lookup(request.hashes(self.page)[: (length - 1) // self.page]) if self.pages.reuse else _NO_PREFIX
        needs = [(self.pages, prefix.pages, number - len(prefix.pages))]
        for pool, window_pages in zip(self.pools, prefix.windows or [WindowPages() for _ in self.pools], strict=True):
            needs.append((pool.pages, window_pages.pages, min(window_pages.first + pool.most, number) - window_pages.end))
        if not all(pages.can_allocate(new, shared) for pages, shared, new in needs):
            return False
        owned, *windows = [pages.allocate(new, shared) or [] for pages, shared, new in needs]
        request.pages, request.computed = owned, len(prefix.pages) * self.page
        self._copy(request, len(prefix.pages))
        firsts = [window_pages.first for window_pages in prefix.windows] or [0] * len(windows)
        request.windows = [WindowPages(first, allocated) for first, allocated in zip(firsts, windows, strict=True)]
        request.published = len(prefix.pages)
        request.reused = max(request.reused, min(request.computed, request.prompt))
        request.slot = heapq.heappop(self._slots)
        self.running.append(request)
        return True

    def _copy(self, request: ScheduledRequest, full: int) -> None:
        """Plans the copy of the page in which a prompt ends, if the prefix cache has all of the prompt but its last token. The request
        then begins to decode.

        Args:
            full: number of full pages that were found in the prefix cache.
        """
        length = len(request.tokens) - 1
        if not self.copies or length // self.page != full or length == 0 or request.ends_in_overlay:
            return
        if (tail := request.tail(self.page)) is not None:
            source = self.pages.tail(tail)
            if source is None:
                return
            self._copies.append((source, request.pages[full]))
        request.computed, request.copied = length, True

    def _lookup(self, hashes: list[PageHash]) -> "_CachedPrefix":
        """The longest cached prefix of the sequence with these page hashes. Every pool must have the pages that the token after the
        prefix attends to."""
        pages = self.pages.lookup(hashes)
        in_pools = [pool.pages.lookup_each(hashes[: len(pages)]) for pool in self.pools]
        # For each pool and each page, the number of consecutive cached pages that end with it.
        runs = [list(itertools.accumulate(cached, lambda n, page: 0 if page is None else n + 1, initial=0)) for cached in in_pools]
        for count in range(len(pages), 0, -1):
            firsts = [pool.window.first(count * self.page) // self.page for pool in self.pools]
            if all(run[count] >= count - first for run, first in zip(runs, firsts, strict=True)):
                windows = [
                    WindowPages(first, [page for page in cached[first:count] if page is not None])
                    for first, cached in zip(firsts, in_pools, strict=True)
                ]
                return _CachedPrefix(pages[:count], windows)
        return _NO_PREFIX

    def _chunk(self, request: ScheduledRequest, budget: int, chunks: list[PrefillChunk]) -> int:
        start = request.computed
        count = min(len(request.tokens) - start, budget // self.row * self.row)
        grown = self._grow(request, start + count, start)
        assert grown, "a prompt holds the pages of its chunks from its admission on"
        ends = start + count == len(request.tokens)
        chunks.append(PrefillChunk(request, start, request.tokens[start : start + count], ends))
        request.computed += count
        # Other requests find these pages from here on: a step writes all of its keys and values before it reads any, and steps run in
        # order.
        self.publish(request)
        request.pending += ends
        if ends and self.copies and (tail := request.tail(self.page)) is not None:
            self._ending.setdefault(tail, request.pages[(len(request.tokens) - 1) // self.page])
        return -(-count // self.row) * self.row

    def accept_drafts(self, request: ScheduledRequest, tokens: int, *, rolled_back: bool) -> None:
        """Updates the counts of a request after a step verified its drafts.

        Args:
            tokens: number of tokens that the step sampled. All but the last are accepted drafts.
            rolled_back: whether the recurrent states were rolled back to before the step, so that its tokens are computed again.
        """
        request.pending += tokens - 1
        if rolled_back:
            request.computed -= request.recompute + 1
            request.recompute += tokens
        else:
            request.computed += tokens - 1
            request.recompute = 0

    def append_token(self, request: ScheduledRequest, token: int) -> None:
        """Adds a sampled token, which the host has read, to a request."""
        request.tokens.append(token)
        request.pending -= 1
        self.publish(request)

    def publish(self, request: ScheduledRequest) -> None:
        """Registers the pages of a request that have become full for prefix caching."""
        full = min(request.computed, len(request.tokens)) // self.page
        if not self.pages.reuse or not request.pages or full <= request.published:
            return
        hashes = request.hashes(self.page)
        for i in range(request.published, full):
            self.pages.publish(request.pages[i], hashes[i])
            for pool, window_pages in zip(self.pools, request.windows, strict=True):
                if window_pages.first <= i < window_pages.end:
                    pool.pages.publish(window_pages.pages[i - window_pages.first], hashes[i])
        request.published = full


@dataclass(frozen=True)
class _CachedPrefix:
    """The cached prefix of a prompt: its full pages, and those in the pool of each sliding window."""

    pages: list[int] = field(default_factory=list)
    windows: list[WindowPages] = field(default_factory=list)


_NO_PREFIX = _CachedPrefix()


def _give_back(pool: WindowPool, pages: list[int]) -> None:
    """Frees pages of a sliding window. The last ones are allocated again last, because a prompt that continues this request needs only
    these."""
    pool.pages.release(pages[::-1])
