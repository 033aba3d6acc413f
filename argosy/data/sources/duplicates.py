"""Leaves out documents that occur before in the same source.

    exact      the same text, compared by a 128-bit hash
    minhash    nearly the same words: MinHash of 5-grams (Broder 1997) in 14 bands of 8, as in FineWeb (arXiv:2406.17557). Documents
               whose sets of 5-grams have the Jaccard similarity s agree in some band with probability 1 - (1 - s^8)^14.

The first of equal documents is kept. Both methods keep the hashes of all documents in memory: about 90 bytes per document for `exact`,
and 14 times as much for `minhash`. Documents that come in pieces (longer than about 1 MiB) are always kept.
"""

import hashlib
import re
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from argosy.data.sources import DerivedSource, Document, Source
from argosy.data.sources.synthetic import splitmix

WORDS_OF_GRAM, BANDS, ROWS_OF_BAND = 5, 14, 8
WORD = re.compile(r"\w+")


class Deduplicated(DerivedSource):
    """The documents of another source, without those that occur before.

    method: `exact` or `minhash`.
    """

    def __init__(self, source: Source, method: str):
        super().__init__(source)
        self.method = method

    def documents(self) -> Iterator[Document]:
        seen: set[bytes] = set()
        inside, self.duplicates = False, 0
        for document in self.source.documents():
            whole, inside = document.ends and not inside, not document.ends
            if whole:
                keys = exact_keys(document) if self.method == "exact" else near_keys(document)
                if not seen.isdisjoint(keys):
                    self.duplicates += 1
                    continue
                seen.update(keys)
            yield document

    def fingerprint(self) -> dict[str, Any]:
        return self.source.fingerprint() | {"source.deduplicate": self.method}


def exact_keys(document: Document) -> list[bytes]:
    data = document.text.encode() if document.tokens is None else np.asarray(document.tokens, "<i8").tobytes()
    return [hashlib.blake2b(data, digest_size=16).digest()]


def near_keys(document: Document) -> list[bytes]:
    """A hash for each band of the signature. Records are compared by their words, without the names of columns and roles."""
    text = document.text if document.record is None else document.record.words
    bands = signature(text).reshape(BANDS, ROWS_OF_BAND)
    return [hashlib.blake2b(band.tobytes(), digest_size=12, salt=bytes([number])).digest() for number, band in enumerate(bands)]


def signature(text: str) -> np.ndarray:
    """The MinHash signature of a text, uint64 [BANDS * ROWS_OF_BAND]: for each hash function, the smallest hash of a 5-gram."""
    words = np.fromiter((zlib.crc32(word.encode()) for word in WORD.findall(text.lower())), np.uint64)
    # A text of fewer words is padded to one 5-gram.
    words = np.pad(words, (0, max(0, WORDS_OF_GRAM - len(words))))
    grams = np.zeros(len(words) - WORDS_OF_GRAM + 1, np.uint64)
    for place in range(WORDS_OF_GRAM):
        grams = splitmix(np.zeros(1, np.uint64), grams ^ words[place : place + len(grams)])
    minima = np.full(BANDS * ROWS_OF_BAND, np.iinfo(np.uint64).max)
    factors, offsets = hash_functions()
    # In parts, so that a long text needs little memory.
    for at in range(0, len(grams), 4096):
        hashes = grams[None, at : at + 4096] * factors + offsets
        minima = np.minimum(minima, (hashes >> np.uint64(32)).min(axis=1))
    return minima


@cache
def hash_functions() -> tuple[np.ndarray, np.ndarray]:
    """The odd factors and the offsets of multiply-shift hashing, uint64 [BANDS * ROWS_OF_BAND, 1] each."""
    numbers = splitmix(np.array([1], np.uint64), np.arange(2 * BANDS * ROWS_OF_BAND, dtype=np.uint64)).reshape(2, -1, 1)
    return numbers[0] | np.uint64(1), numbers[1]
