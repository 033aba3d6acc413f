"""Work ahead of its use: order, errors, results that are kept, and the end."""

import threading

import pytest

from argosy.rl.rollouts.prefetch import Prefetch


def test_pieces_are_done_in_order_by_one_thread():
    threads: list[int] = []
    work = Prefetch(lambda n: threads.append(threading.get_ident()) or n * n)
    for n in range(5):
        work.submit(n)
    assert len(work) == 5
    assert [work.take() for _ in range(5)] == [0, 1, 4, 9, 16]
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    work.close()


def test_what_is_settled_stays_and_what_is_put_back_comes_first():
    work: Prefetch[int, int] = Prefetch(lambda n: n + 1)
    work.put_back([10])
    work.submit(1)
    assert work.settled() == [10, 2] == work.settled()
    assert [work.take(), work.take()] == [10, 2]
    work.close()


def test_an_error_comes_with_its_piece_and_nothing_is_done_after_it():
    done: list[int] = []
    work = Prefetch(lambda n: done.append(n) or 1 // n)
    for n in (1, 0, 2):
        work.submit(n)
    assert work.settled() == [1]
    assert work.take() == 1
    with pytest.raises(ZeroDivisionError):
        work.take()
    with pytest.raises(RuntimeError, match="earlier piece failed"):
        work.take()
    assert done == [1, 0]
    work.close()


def test_closing_waits_for_the_piece_at_work_alone():
    begun, release = threading.Event(), threading.Event()
    done: list[int] = []

    def do(n: int) -> None:
        begun.set()
        assert release.wait(30)
        done.append(n)

    work = Prefetch(do)
    work.submit(1)
    work.submit(2)
    assert begun.wait(30)
    threading.Timer(0.1, release.set).start()
    work.close()
    assert done == [1]
