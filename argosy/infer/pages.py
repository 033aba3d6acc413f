"""Who owns which pages of the cache, and which pages hold what tokens. Host bookkeeping alone: no array and no jax.

A full page is known by a hash of its tokens and of all before them (and of a salt: sequences of different salts share nothing),
so a prompt that begins like another one takes the pages that are there: the prefix cache of Kwon et al. 2023 (arXiv:2309.06180).
Pages are counted by owner. One that nobody owns keeps its tokens until it is given to somebody else, the longest unused first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

Hash = bytes


def page_hashes(tokens: Sequence[int], page: int, salt: str = "", first: Hash | None = None) -> list[Hash]:
    """A hash for each full page of a sequence.

    Args:
        page: tokens of a page.
        first: the hash of the page before these tokens, where they do not begin a sequence.
    """
    ids = np.asarray(tokens, np.int64)
    found, before = [], blake2b(salt.encode(), digest_size=16).digest() if first is None else first
    for start in range(0, len(ids) - page + 1, page):
        before = blake2b(before + ids[start : start + page].tobytes(), digest_size=16).digest()
        found.append(before)
    return found


class Pages:
    """The pages of a pool.

    Args:
        count: how many there are.
        reuse: keep what a page holds for prompts that begin alike.
    """

    def __init__(self, count: int, *, reuse: bool = True):
        self.count, self.reuse = count, reuse
        self.owners = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict((page, None) for page in range(count))  # the next one to give first
        self._hash_of: dict[int, Hash] = {}
        self._page_of: dict[Hash, int] = {}

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def used(self) -> float:
        """The share of the pages that somebody owns."""
        return 1 - self.free / self.count

    def found(self, hashes: Iterable[Hash]) -> list[int]:
        """The pages that hold these, in order, up to the first that is not there. They stay as free as they are: `take` them."""
        pages: list[int] = []
        for one in hashes:
            if (page := self._page_of.get(one)) is None:
                break
            pages.append(page)
        return pages

    def take(self, new: int, shared: Sequence[int] = ()) -> list[int] | None:
        """Pages for a sequence: these, which others may own too, then as many new ones. None, and nothing taken, where fewer
        than that are free."""
        revived = sum(self.owners[page] == 0 for page in shared)
        if new + revived > self.free:
            return None
        for page in shared:
            self._free.pop(page, None)
            self.owners[page] += 1
        fresh = []
        for _ in range(new):
            page, _none = self._free.popitem(last=False)
            self._forget(page)
            self.owners[page] = 1
            fresh.append(page)
        return [*shared, *fresh]

    def publish(self, page: int, holds: Hash) -> None:
        """Says what a full page holds. Where another page holds the same, that one stays the one to be found."""
        if self.reuse and holds not in self._page_of:
            self._forget(page)
            self._hash_of[page], self._page_of[holds] = holds, page

    def give_back(self, pages: Sequence[int]) -> None:
        """Ends one ownership of each page. The end of a sequence is given away before its beginning, which others may share."""
        for page in reversed(pages):
            if self.owners[page] <= 0:
                raise ValueError(f"page {page} has no owner")
            self.owners[page] -= 1
            if not self.owners[page]:
                self._free[page] = None
                if page not in self._hash_of:
                    self._free.move_to_end(page, last=False)

    def forget_all(self) -> None:
        """Nothing that pages hold is found again: the weights that made it have changed."""
        self._hash_of.clear()
        self._page_of.clear()

    def _forget(self, page: int) -> None:
        if (old := self._hash_of.pop(page, None)) is not None:
            del self._page_of[old]
