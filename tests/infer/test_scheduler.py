"""Who takes part in a step: budgets, order, preemption. A stand-in for the device draws token 7 each time, one step late."""

from collections.abc import Callable

import numpy as np
import pytest

from argosy.infer.engine.pages import PageKey, PagePool
from argosy.infer.engine.scheduled import ScheduledRequest
from argosy.infer.engine.scheduler import Scheduler, StepPlan, WindowPool
from argosy.models.parts.attention.cache import AttentionWindow


def run_to_end(
    scheduler: Scheduler, most: int = 10_000, watch: Callable[[StepPlan], object] = lambda _: None
) -> list[StepPlan]:
    """Steps until nothing is left; each plan is append_token after the next one is made.

    Args:
        watch: sees each plan when it is made.
    """
    plans: list[StepPlan] = []
    flying: list[StepPlan] = []
    for _ in range(most):
        plan = scheduler.plan()
        if plan:
            watch(plan)
            plans.append(plan)
            flying.append(plan)
        if flying and (len(flying) > 1 or not plan):
            landed = flying.pop(0)
            for sequence in [*landed.decodes, *(p.request for p in landed.chunks if p.ends)]:
                if not sequence.done:
                    scheduler.append_token(sequence, 7)
                    if len(sequence.tokens) - sequence.prompt == sequence.max_tokens:
                        scheduler.end(sequence)
        elif not plan:
            return plans
    raise AssertionError("it never ends")


def scheduler(pages: int = 100, slots: int = 4, budget: int = 64, mixed_budget: int = 16, row: int = 8, **options) -> Scheduler:
    return Scheduler(PagePool(pages), 4, slots, budget, mixed_budget, row, **options)


def test_every_token_is_computed_once_and_every_answer_has_its_length():
    rng, s = np.random.default_rng(0), scheduler()
    requests = [ScheduledRequest(rng.integers(0, 9, n).tolist(), most) for n, most in rng.integers(1, 60, (30, 2)).tolist()]
    for sequence in requests:
        s.add(sequence)
    plans = run_to_end(s)
    for sequence in requests:
        assert len(sequence.tokens) == sequence.prompt + sequence.max_tokens
        assert sequence.computed == len(sequence.tokens) - 1
        chunks = [p for plan in plans for p in plan.chunks if p.request is sequence]
        at = chunks[0].start
        for chunk in chunks:
            assert chunk.start == at
            at += len(chunk.tokens)
        assert at == sequence.prompt
    assert s.pages.free == 100


def test_a_long_prompt_delays_decoding_by_no_more_than_a_piece():
    s = scheduler()
    first, long = ScheduledRequest([1] * 8, 20), ScheduledRequest([2] * 200, 1)
    s.add(first)
    s.plan()
    s.add(long)
    plans = run_to_end(s)
    mixed = [plan for plan in plans if plan.chunks and plan.decodes]
    assert mixed
    assert all(sum(len(chunk.tokens) for chunk in plan.chunks) <= 16 for plan in mixed)
    assert all(first in plan.decodes for plan in plans[: first.max_tokens - 2])


def test_answers_begin_in_the_order_of_requests_and_of_priority():
    s = scheduler(slots=2)
    requests = [ScheduledRequest([i] * 20, 3, priority=priority) for i, priority in enumerate([1, 1, 0, 1])]
    for sequence in requests:
        s.add(sequence)
    begun = []
    for plan in run_to_end(s):
        begun += [chunk.request for chunk in plan.chunks if chunk.start == 0]
    assert begun == [requests[2], requests[0], requests[1], requests[3]]


def test_where_pages_run_out_the_last_comer_gives_its_own_up_and_ends_all_the_same():
    s = scheduler(pages=12, slots=4)
    requests = [ScheduledRequest([i] * 6, 30) for i in range(4)]
    for sequence in requests:
        s.add(sequence)
    run_to_end(s)
    assert s.preemptions > 0
    assert requests[0].preemptions == 0, "the first one is never put back"
    assert all(len(sequence.tokens) == 36 for sequence in requests)
    assert s.pages.free == 12


def test_common_beginnings_are_computed_once_but_never_the_last_token():
    s = scheduler()
    for _ in range(2):
        sequence = ScheduledRequest([3] * 16, 2)
        s.add(sequence)
        run_to_end(s)
    assert sequence.reused == 12, "of 16 tokens in pages of 4 the last page is computed: its last token draws"
    other = ScheduledRequest([3] * 16, 2, key=PageKey("somebody else"))
    s.add(other)
    run_to_end(s)
    assert other.reused == 0


def test_a_beginning_is_shared_within_the_step_that_computes_it():
    s = scheduler()
    same = [ScheduledRequest([3] * 18, 2) for _ in range(3)]
    for sequence in same:
        s.add(sequence)
    plan = s.plan()
    assert [(chunk.start, len(chunk.tokens)) for chunk in plan.chunks] == [(0, 18), (16, 2), (16, 2)]
    assert same[0].pages[:4] == same[1].pages[:4] == same[2].pages[:4]
    assert len({sequence.pages[4] for sequence in same}) == 3, "the last page is everyone's own"
    for sequence in same:
        s.end(sequence)
    assert s.is_empty


def test_a_sequence_that_is_taken_out_leaves_nothing():
    s = scheduler()
    running, waiting = ScheduledRequest([1] * 30, 9), ScheduledRequest([2] * 9, 9)
    s.add(running)
    s.plan()
    s.add(waiting)
    s.end(waiting)
    s.end(running)
    s.end(running)
    assert s.waiting == 0
    assert not s.running
    assert s.pages.free == 100
    assert not s.plan()


def test_one_row_a_sequence_takes_one_piece_a_step():
    s = scheduler(row=1, chunks=1)
    for i in range(3):
        s.add(ScheduledRequest([i] * 100, 2))
    assert all(len(plan.chunks) <= 1 for plan in run_to_end(s))


class Memory:
    """What a device would have written: of each token in a page, all tokens up to it. Reads what each query sees."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler, self.page, self.written = scheduler, scheduler.page, {}

    def compute(self, plan: StepPlan) -> None:
        for request in plan.decodes:
            self._compute(request, request.computed - 1, [*request.tokens, 7][: request.computed])
        for chunk in plan.chunks:
            self._compute(chunk.request, chunk.start, chunk.request.tokens[: chunk.start + len(chunk.tokens)])

    def _compute(self, sequence: ScheduledRequest, start: int, tokens: list[int]) -> None:
        pools = [(None, 0, sequence.pages)]
        pools += [(pool.window, window.first, window.pages) for pool, window in zip(self.scheduler.pools, sequence.windows)]
        for number, (window, first, pages) in enumerate(pools):
            place = [(number, pages[at // self.page - first], at % self.page) for at in range(first * self.page, len(tokens))]
            for at in range(start, len(tokens)):
                self.written[place[at - first * self.page]] = tuple(tokens[: at + 1])
            for at in range(start, len(tokens)):
                for seen in range(0 if window is None else window.first(at), at + 1):
                    assert self.written[place[seen - first * self.page]] == tuple(tokens[: seen + 1])


@pytest.mark.parametrize("window", [AttentionWindow(10), AttentionWindow(8, chunked=True)])
def test_windows_keep_what_queries_see_and_give_back_the_rest(window: AttentionWindow):
    rng, filling = np.random.default_rng(0), window.pages(32, 4)
    pools = [WindowPool(window, PagePool(40), filling), WindowPool(AttentionWindow(3), PagePool(30), AttentionWindow(3).pages(32, 4))]
    s = Scheduler(PagePool(60), 4, 6, 32, 16, 8, None, pools)
    memory, begun = Memory(s), rng.integers(0, 9, 70).tolist()
    requests = [
        ScheduledRequest([*begun[:shared], *rng.integers(0, 9, prompt_length).tolist()], most)
        for shared, prompt_length, most in rng.integers((0, 1, 1), (70, 60, 50), (60, 3)).tolist()
    ]
    for sequence in requests:
        s.add(sequence)
    def watch(plan: StepPlan) -> None:
        memory.compute(plan)
        for request in [*plan.decodes, *(chunk.request for chunk in plan.chunks)]:
            assert all(len(window_pages.pages) <= pool.most for pool, window_pages in zip(pools, request.windows, strict=True))

    run_to_end(s, watch=watch)
    assert s.is_empty
    assert s.preemptions > 0
    assert sum(sequence.reused for sequence in requests) > 300
    assert all(len(sequence.tokens) == sequence.prompt + sequence.max_tokens for sequence in requests)


def test_a_sequence_that_decodes_keeps_the_pages_of_its_window_alone():
    window, page_counts = AttentionWindow(10), []
    s = Scheduler(PagePool(100), 4, 2, 32, 16, 8, None, [WindowPool(window, PagePool(20), window.pages(32, 4))])
    s.add(ScheduledRequest([1] * 100, 60))
    run_to_end(s, watch=lambda plan: page_counts.extend(len(request.windows[0].pages) for request in plan.decodes))
    assert max(page_counts) == window.pages(1, 4) == 4, "ten tokens in pages of four"
    assert s.is_empty


def test_a_prompt_is_found_where_every_pool_still_has_what_its_next_token_sees():
    pool = WindowPool(AttentionWindow(10), PagePool(20), AttentionWindow(10).pages(32, 4))
    s = Scheduler(PagePool(100), 4, 2, 32, 16, 8, None, [pool])
    first = ScheduledRequest([3] * 100, 4)
    s.add(first)
    run_to_end(s)
    again = ScheduledRequest([*first.tokens, 5], 2)
    s.add(again)
    run_to_end(s)
    assert again.reused == 100
    other = ScheduledRequest(first.tokens[:60], 2)
    s.add(other)
    run_to_end(s)
    assert other.reused == 56, "its window is there too: 56 tokens are 14 pages"
    pool.pages.allocate(20)
    assert s._lookup(again.hashes(4)).pages == [], "others have taken the pages of its window"
