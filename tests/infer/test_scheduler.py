"""Who takes part in a step: budgets, order, preemption. A stand-in for the device draws token 7 each time, one step late."""

import numpy as np

from argosy.infer.pages import Pages
from argosy.infer.schedule import Plan, Scheduler, Sequence


def played(scheduler: Scheduler, most: int = 10_000) -> list[Plan]:
    """Steps until nothing is left; each plan is learned after the next one is made."""
    plans: list[Plan] = []
    flying: list[Plan] = []
    for _ in range(most):
        plan = scheduler.plan()
        if plan:
            plans.append(plan)
            flying.append(plan)
        if flying and (len(flying) > 1 or not plan):
            landed = flying.pop(0)
            for sequence in [*landed.decodes, *(p.sequence for p in landed.pieces if p.ends)]:
                if not sequence.done:
                    scheduler.learned(sequence, 7)
                    if len(sequence.tokens) - sequence.prompt == sequence.most:
                        scheduler.end(sequence)
        elif not plan:
            return plans
    raise AssertionError("it never ends")


def scheduler(pages: int = 100, slots: int = 4, budget: int = 64, beside: int = 16, row: int = 8, **how) -> Scheduler:
    return Scheduler(Pages(pages), 4, slots, budget, beside, row, **how)


def test_every_token_is_computed_once_and_every_answer_has_its_length():
    rng, s = np.random.default_rng(0), scheduler()
    wanted = [Sequence(rng.integers(0, 9, n).tolist(), most) for n, most in rng.integers(1, 60, (30, 2)).tolist()]
    for sequence in wanted:
        s.add(sequence)
    plans = played(s)
    for sequence in wanted:
        assert len(sequence.tokens) == sequence.prompt + sequence.most
        assert sequence.computed == len(sequence.tokens) - 1
        own = [p for plan in plans for p in plan.pieces if p.sequence is sequence]
        at = own[0].start
        for piece in own:
            assert piece.start == at
            at += len(piece.tokens)
        assert at == sequence.prompt
    assert s.pages.free == 100


def test_a_long_prompt_delays_decoding_by_no_more_than_a_piece():
    s = scheduler()
    first, long = Sequence([1] * 8, 20), Sequence([2] * 200, 1)
    s.add(first)
    s.plan()
    s.add(long)
    plans = played(s)
    mixed = [plan for plan in plans if plan.pieces and plan.decodes]
    assert mixed
    assert all(sum(len(piece.tokens) for piece in plan.pieces) <= 16 for plan in mixed)
    assert all(first in plan.decodes for plan in plans[: first.most - 2])


def test_answers_begin_in_the_order_of_requests_and_of_priority():
    s = scheduler(slots=2)
    wanted = [Sequence([i] * 20, 3, priority=priority) for i, priority in enumerate([1, 1, 0, 1])]
    for sequence in wanted:
        s.add(sequence)
    begun = []
    for plan in played(s):
        begun += [piece.sequence for piece in plan.pieces if piece.start == 0]
    assert begun == [wanted[2], wanted[0], wanted[1], wanted[3]]


def test_where_pages_run_out_the_last_comer_gives_its_own_up_and_ends_all_the_same():
    s = scheduler(pages=12, slots=4)
    wanted = [Sequence([i] * 6, 30) for i in range(4)]
    for sequence in wanted:
        s.add(sequence)
    played(s)
    assert s.preemptions > 0
    assert wanted[0].preemptions == 0, "the first one is never put back"
    assert all(len(sequence.tokens) == 36 for sequence in wanted)
    assert s.pages.free == 12


def test_common_beginnings_are_computed_once_but_never_the_last_token():
    s = scheduler()
    for _ in range(2):
        sequence = Sequence([3] * 16, 2)
        s.add(sequence)
        played(s)
    assert sequence.reused == 12, "of 16 tokens in pages of 4 the last page is computed: its last token draws"
    other = Sequence([3] * 16, 2, salt="somebody else")
    s.add(other)
    played(s)
    assert other.reused == 0


def test_a_sequence_that_is_taken_out_leaves_nothing():
    s = scheduler()
    running, waiting = Sequence([1] * 30, 9), Sequence([2] * 9, 9)
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
    s = scheduler(row=1, pieces=1)
    for i in range(3):
        s.add(Sequence([i] * 100, 2))
    assert all(len(plan.pieces) <= 1 for plan in played(s))
