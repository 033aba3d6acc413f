"""Who owns which page, and what is found again."""

import numpy as np
import pytest

from argosy.infer.engine.pages import Pages, page_hashes


def test_a_page_is_known_by_all_tokens_up_to_its_end_and_by_the_salt():
    a, b = page_hashes([1, 2, 3, 4, 5], 2), page_hashes([1, 2, 9, 4, 5], 2)
    assert len(a) == len(b) == 2, "only full pages have a hash"
    assert a[0] == b[0]
    assert a[1] != b[1]
    assert page_hashes([1, 2], 2, salt="x") != a[:1]
    assert page_hashes([3, 4], 2, first=a[0]) == a[1:]


def test_pages_are_shared_by_count_and_kept_until_others_need_them():
    pages = Pages(4)
    one = pages.take(3)
    assert one is not None
    assert pages.take(2) is None
    assert pages.free == 1, "nothing is taken where not enough is free"
    hashes = page_hashes([1, 2, 3, 4, 5, 6], 2)
    for page, holds in zip(one, hashes):
        pages.publish(page, holds)
    shared = pages.found(hashes)
    assert shared == one
    two = pages.take(0, shared)
    assert two == one
    pages.give_back(one)
    assert pages.free == 1, "the other owner still has them"
    pages.give_back(two)
    assert pages.free == 4
    assert pages.found(hashes) == one, "free pages still hold what they held"
    taken = pages.take(2)
    assert one[2] in taken, "the end of a sequence goes before its beginning"
    assert pages.found(hashes) == one[:2]
    with pytest.raises(ValueError, match="no owner"):
        pages.give_back([one[0]])


def test_pages_of_random_histories_add_up():
    rng, pages, owned = np.random.default_rng(0), Pages(20), []
    for _ in range(2000):
        if owned and rng.random() < 0.5:
            pages.give_back(owned.pop(rng.integers(len(owned))))
        else:
            hashes = page_hashes(rng.integers(0, 2, 12).tolist(), 3)
            shared = pages.found(hashes)
            got = pages.take(4 - len(shared), shared)
            if got is not None:
                owned.append(got)
                for page, holds in zip(got, hashes):
                    pages.publish(page, holds)
        counts = np.bincount([p for some in owned for p in some], minlength=20)
        assert counts.tolist() == pages.owners
        assert pages.free == int((counts == 0).sum())
    for some in owned:
        pages.give_back(some)
    assert pages.free == 20


def test_new_weights_forget_what_pages_hold():
    pages = Pages(2)
    page = pages.take(1)
    pages.publish(page[0], b"x")
    pages.forget_all()
    assert pages.found([b"x"]) == []
    pages.give_back(page)
    assert pages.take(2) is not None
