"""What collections look at while a run trains."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from argosy.core.process import garbage


class Node:
    """In a cycle with itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def nothing_set_aside() -> Iterator[None]:
    """The suite itself sets aside what it has imported."""
    count = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if count:
        gc.freeze()


def test_collections_pass_over_what_exists_and_free_what_is_new():
    before = Node()
    old = weakref.ref(before)
    with garbage.frozen_garbage():
        assert gc.get_freeze_count() > 1000
        del before
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
        assert old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def test_garbage_from_before_is_freed_first():
    old = weakref.ref(Node())
    with garbage.frozen_garbage():
        assert old() is None


def test_what_the_program_has_set_aside_stays_so():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with garbage.frozen_garbage():
            assert gc.get_freeze_count() == count
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()
