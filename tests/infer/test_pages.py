"""Who owns which page, and what is found again."""

import numpy as np
import pytest

from argosy.infer.engine.pages import PageKey, PagePool, page_hashes, tail_hash


def test_a_page_is_known_by_all_tokens_up_to_its_end_and_by_the_salt():
    a, b = page_hashes([1, 2, 3, 4, 5], 2), page_hashes([1, 2, 9, 4, 5], 2)
    assert len(a) == len(b) == 2, "only full pages have a hash"
    assert a[0] == b[0]
    assert a[1] != b[1]
    assert page_hashes([1, 2], 2, key=PageKey("x")) != a[:1]
    assert page_hashes([3, 4], 2, first=a[0]) == a[1:]


def test_what_stands_at_a_token_besides_its_id_counts_from_its_page_on():
    plain, first, other = (page_hashes([5] * 8, 2, PageKey(digests=digests)) for digests in ((), ((3, b"a"),), ((3, b"b"),)))
    assert plain[0] == first[0] == other[0], "the text before it is shared"
    assert len({hashes[i] for hashes in (plain, first, other) for i in (1, 2, 3)}) == 9
    assert page_hashes([5] * 4, 2, PageKey(digests=((3, b"a"),)), first[1], 4) == first[2:], "it counts once"
    tails = {tail_hash([5] * 5, 4, PageKey(digests=((4, digest),)), plain[:1]) for digest in (b"a", b"b")}
    assert len(tails) == 2


def test_pages_are_shared_by_count_and_kept_until_others_need_them():
    pages = PagePool(4)
    first = pages.allocate(3)
    assert first is not None
    assert pages.allocate(2) is None
    assert pages.free == 1, "nothing is taken where not enough is free"
    hashes = page_hashes([1, 2, 3, 4, 5, 6], 2)
    for page, holds in zip(first, hashes):
        pages.publish(page, holds)
    shared = pages.lookup(hashes)
    assert shared == first
    two = pages.allocate(0, shared)
    assert two == first
    pages.release(first)
    assert pages.free == 1, "the other owner still has them"
    pages.release(two)
    assert pages.free == 4
    assert pages.lookup(hashes) == first, "free pages still hold what they held"
    pages_taken = pages.allocate(2)
    assert first[2] in pages_taken, "the end of a sequence goes before its beginning"
    assert pages.lookup(hashes) == first[:2]
    with pytest.raises(ValueError, match="no owner"):
        pages.release([first[0]])


def test_pages_of_random_histories_add_up():
    rng, pages, owned = np.random.default_rng(0), PagePool(20), []
    for _ in range(2000):
        if owned and rng.random() < 0.5:
            pages.release(owned.pop(rng.integers(len(owned))))
        else:
            hashes = page_hashes(rng.integers(0, 2, 12).tolist(), 3)
            shared = pages.lookup(hashes)
            got = pages.allocate(4 - len(shared), shared)
            if got is not None:
                owned.append(got)
                for page, holds in zip(got, hashes):
                    pages.publish(page, holds)
        counts = np.bincount([p for some in owned for p in some], minlength=20)
        assert counts.tolist() == pages.owners
        assert pages.free == int((counts == 0).sum())
    for some in owned:
        pages.release(some)
    assert pages.free == 20


def test_new_weights_forget_what_pages_hold():
    pages = PagePool(2)
    page = pages.allocate(1)
    pages.publish(page[0], b"x")
    pages.clear()
    assert pages.lookup([b"x"]) == []
    pages.release(page)
    assert pages.allocate(2) is not None
