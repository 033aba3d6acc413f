"""The page allocator of the paged cache, with prefix caching. Host bookkeeping only: no arrays and no jax.

A full page is identified by a hash of its tokens and of all tokens before it, so a prompt that begins like an earlier one reuses
the earlier pages: automatic prefix caching, as in vLLM (Kwon et al. 2023, arXiv:2309.06180). A salt goes into the hash, and
sequences with different salts share nothing. Pages are reference-counted. A page without references keeps its tokens until it is
allocated again, least recently used first.

The page in which a prompt ends is usually not full, and its request writes the completion behind the prompt. A later, equal prompt
finds the page by a hash of all its tokens but the last, and copies it. The prompt's part of the page does not change until the page is
allocated again.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

PageHash = bytes


class PageKey(NamedTuple):
    """The facts that the pages of a sequence depend on besides its token ids.

    salt: sequences with different salts share no pages.
    digests: (position, digest) pairs in the order of positions. Each digest stands for an input that a token has besides its id, such
        as the embedding of an image patch. It enters the hashes of the page of its position and of all later pages, so earlier pages
        are shared.
    """

    salt: str = ""
    digests: tuple[tuple[int, bytes], ...] = ()

    def root(self) -> PageHash:
        """The hash before the first page."""
        return blake2b(self.salt.encode(), digest_size=16).digest()

    def within(self, start: int, end: int) -> bytes:
        """The digests at positions from `start` to `end` (exclusive), joined, for the hash of the page with these positions."""
        entries = self.digests[bisect_left(self.digests, (start,)) : bisect_left(self.digests, (end,))]
        return b"".join(at.to_bytes(8, "little") + digest for at, digest in entries)


NO_KEY = PageKey()


def page_hashes(
    tokens: Sequence[int], page: int, key: PageKey = NO_KEY, first: PageHash | None = None, start: int = 0
) -> list[PageHash]:
    """The hash of each full page of a sequence.

    Args:
        page: tokens per page.
        first: the hash of the page before these tokens; None if they are the beginning of the sequence.
        start: position of the first of these tokens.
    """
    ids = np.asarray(tokens, np.int64)
    hashes, before = [], key.root() if first is None else first
    for at in range(0, len(ids) - page + 1, page):
        digests = key.within(start + at, start + at + page) if key.digests else b""
        before = blake2b(before + ids[at : at + page].tobytes() + digests, digest_size=16).digest()
        hashes.append(before)
    return hashes


def tail_hash(tokens: Sequence[int], page: int, key: PageKey, full: Sequence[PageHash]) -> PageHash:
    """The hash of a sequence that ends within a page.

    Args:
        tokens: all tokens of the sequence.
        page: tokens per page.
        full: the hashes of the sequence's full pages, as `page_hashes` returns them.
    """
    before, start = full[-1] if full else key.root(), len(full) * page
    content = np.asarray(tokens[start:], np.int64).tobytes() + key.within(start, len(tokens))
    # 20 bytes, not 16 as the hash of a full page, so that the two kinds never collide.
    return blake2b(before + content, digest_size=20).digest()


class PagePool:
    """Allocates the pages of one pool, counts their owners, and finds them by hash.

    Args:
        count: number of pages.
        reuse: whether pages can be found by the hash of their tokens (prefix caching).
    """

    def __init__(self, count: int, *, reuse: bool = True):
        self.count, self.reuse = count, reuse
        self.owners = [0] * count
        # In the order in which pages are allocated.
        self._free: OrderedDict[int, None] = OrderedDict((page, None) for page in range(count))
        self._hash_of: dict[int, PageHash] = {}
        self._page_of: dict[PageHash, int] = {}
        # Pages in which a prompt ends, and their hashes (`tail_hash`).
        self._tail_of: dict[int, PageHash] = {}
        self._tails: dict[PageHash, int] = {}

    @property
    def free(self) -> int:
        """Number of pages without an owner."""
        return len(self._free)

    @property
    def used(self) -> float:
        """The share of pages with an owner, from 0 to 1."""
        return 1 - self.free / self.count

    def lookup(self, hashes: Iterable[PageHash]) -> list[int]:
        """The pages with these hashes, in order, up to the first that is missing. They get no new owner until `allocate`."""
        pages: list[int] = []
        for content in hashes:
            if (page := self._page_of.get(content)) is None:
                break
            pages.append(page)
        return pages

    def lookup_each(self, hashes: Iterable[PageHash]) -> list[int | None]:
        """For each of these hashes its page, or None if no page has it."""
        return [self._page_of.get(content) for content in hashes]

    def can_allocate(self, new: int, shared: Sequence[int] = ()) -> bool:
        """Whether `allocate` would succeed with these arguments."""
        return new + sum(self.owners[page] == 0 for page in shared) <= self.free

    def has(self, content: PageHash) -> bool:
        """Whether a page with this hash would be found. Any thread may call it."""
        return content in self._page_of

    def allocate(self, new: int, shared: Sequence[int] = ()) -> list[int] | None:
        """Allocates pages for a sequence: adds an owner to each of `shared`, then `new` fresh pages. Returns None and changes
        nothing if too few pages are free."""
        if not self.can_allocate(new, shared):
            return None
        for page in shared:
            self._free.pop(page, None)
            self.owners[page] += 1
        fresh = []
        for _ in range(new):
            page, _none = self._free.popitem(last=False)
            self._forget(page)
            if (tail := self._tail_of.pop(page, None)) is not None:
                del self._tails[tail]
            self.owners[page] = 1
            fresh.append(page)
        return [*shared, *fresh]

    def publish(self, page: int, content: PageHash) -> None:
        """Registers the hash of a full page. If another page has this hash already, `lookup` continues to find that other page."""
        if self.reuse and content not in self._page_of:
            self._forget(page)
            self._hash_of[page], self._page_of[content] = content, page

    def publish_tail(self, page: int, content: PageHash) -> None:
        """Registers the page in which a prompt ends, so that `tail` finds it. If a page is registered for this hash already, that page
        stays."""
        if self.reuse and content not in self._tails and page not in self._tail_of:
            self._tail_of[page], self._tails[content] = content, page

    def tail(self, content: PageHash) -> int | None:
        """The page in which the prompt with this hash ends, or None. It has to be copied before the next step."""
        return self._tails.get(content)

    def release(self, pages: Sequence[int]) -> None:
        """Removes one owner of each page. Later pages of a sequence are allocated again before earlier ones, because other prompts
        are more likely to share a beginning."""
        for page in reversed(pages):
            if self.owners[page] <= 0:
                raise ValueError(f"page {page} has no owner")
            self.owners[page] -= 1
            if not self.owners[page]:
                self._free[page] = None
                if page not in self._hash_of and page not in self._tail_of:
                    self._free.move_to_end(page, last=False)

    def clear(self) -> None:
        """Clears the prefix cache, because the weights have changed."""
        for table in (self._hash_of, self._page_of, self._tail_of, self._tails):
            table.clear()

    def _forget(self, page: int) -> None:
        if (old := self._hash_of.pop(page, None)) is not None:
            del self._page_of[old]
