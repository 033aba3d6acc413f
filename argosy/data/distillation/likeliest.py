"""Caches on disk a model's k most likely tokens at each target, for the rows of a table. The cache is filled row by row.

    NAME.bin    for each row: the number n of its targets (int64), k ids per target (uint16, or uint32 for larger vocabularies), k
                log-probabilities per target (float16), and per target the log-probability of all other tokens together (float32)
    NAME.npy    int64 [rows], the offset of each row in NAME.bin; -1 for rows that are not cached

Only targets that count in the loss are stored. float16 holds log-probabilities to one part in 2,000. The offset of a row is written
after the row has reached the disk, so a process that is killed at any time leaves only whole rows.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from argosy.core.caches import file_lock
from argosy.core.progress import Say
from argosy.data.batch import Batch

UNKNOWN = -1


class TopTokens(NamedTuple):
    """The k most likely tokens at n targets.

    ids: [n k], the token ids.
    logps: [n k], the log-probability of each id.
    rest: [n], the log-probability of all other tokens together.
    """

    ids: np.ndarray
    logps: np.ndarray
    rest: np.ndarray


def bytes_per_target(k: int, vocab: int) -> int:
    """The size of a target on disk, in bytes."""
    return k * (id_type(vocab).itemsize + 2) + 4


def id_type(vocab: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)


class Likeliest:
    """The cache of a table's rows.

    Args:
        path: the file of offsets, NAME.npy. NAME.bin is in the same folder.
        rows: the number of rows in the table.
        k: the number of tokens per target.
        vocab: the size of the vocabulary.
    """

    def __init__(self, path: Path, rows: int, k: int, vocab: int):
        self.path, self.rows, self.k, self.ids = path, rows, k, id_type(vocab)
        self.each = bytes_per_target(k, vocab)
        self.begins = np.full(rows, UNKNOWN, np.int64)
        self.records = np.zeros(0, np.uint8)
        self.load()

    def load(self) -> None:
        """Reads the offsets from disk."""
        self.begins = np.full(self.rows, UNKNOWN, np.int64)
        if self.path.exists() and self.path.stat().st_size == 128 + 8 * self.rows:
            self.begins = np.load(self.path)
        data = self.path.with_suffix(".bin")
        size = data.stat().st_size if data.exists() else 0
        self.records = np.memmap(data, np.uint8, "r") if size else np.zeros(0, np.uint8)
        # A file that lost its end has lost its last rows.
        for row in np.argsort(-self.begins, kind="stable").tolist():
            at = int(self.begins[row])
            if at < 0 or (at + 8 <= size and at + 8 + self.targets_at(at) * self.each <= size):
                break
            self.begins[row] = UNKNOWN

    def missing(self, rows: np.ndarray) -> np.ndarray:
        """Selects the row numbers that are not cached."""
        return rows[self.begins[rows] < 0]

    def read(self, row: int) -> TopTokens:
        """The cached tokens of a row.

        Raises:
            KeyError: the row is not cached.
        """
        at = int(self.begins[row])
        if at < 0:
            raise KeyError(row)
        n = self.targets_at(at)
        parts, at = [], at + 8
        for dtype, width in ((self.ids, self.k), (np.dtype(np.float16), self.k), (np.dtype(np.float32), 1)):
            size = n * width * dtype.itemsize
            # A copy, because a record may begin at any byte.
            parts.append(np.frombuffer(self.records[at : at + size].tobytes(), dtype).reshape(n, width))
            at += size
        return TopTokens(parts[0], parts[1], parts[2][:, 0])

    def targets_at(self, at: int) -> int:
        """The number of targets in the row that begins at this offset."""
        return int.from_bytes(self.records[at : at + 8].tobytes(), "little")

    def with_top_tokens(self, mask: np.ndarray, rows: np.ndarray) -> Batch:
        """The cached fields of a batch: `teacher_ids` and `teacher_logps` [B T k], and `teacher_rest` [B T]. Targets whose mask is 0
        hold zeros. So do rows with a negative number.

        Args:
            mask: [B T], the weights of targets.
            rows: [B], the numbers of rows in the table.
        """
        ids, logps = np.zeros((*mask.shape, self.k), np.int32), np.zeros((*mask.shape, self.k), np.float32)
        rest = np.zeros(mask.shape, np.float32)
        for place, row in enumerate(rows.tolist()):
            if row >= 0:
                targets, cached = mask[place] > 0, self.read(row)
                ids[place, targets], logps[place, targets], rest[place, targets] = cached
        return {"teacher_ids": ids, "teacher_logps": logps, "teacher_rest": rest}

    @contextmanager
    def writing(self, say: Say) -> Iterator["LikeliestWriter"]:
        """Yields a writer that adds rows. One process writes at a time. The rows that other processes have added are loaded first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(self.path.with_suffix(".lock"), say):
            self.load()
            writer = LikeliestWriter(self)
            try:
                yield writer
            finally:
                writer.flush()
                writer.file.close()
                self.load()


class LikeliestWriter:
    """Appends rows to the files of a `Likeliest`.

    store: the cache.
    targets: the number of targets that were added.
    offsets: the offset in the file of each row that was added since the last flush, by row number.
    """

    def __init__(self, store: Likeliest):
        self.store, self.targets = store, 0
        self.file = store.path.with_suffix(".bin").open("ab")
        self.offsets: dict[int, int] = {}

    def add(self, row: int, top: TopTokens) -> None:
        at, store = self.file.tell(), self.store
        self.file.write(len(top.ids).to_bytes(8, "little"))
        self.file.write(np.ascontiguousarray(top.ids, store.ids).tobytes())
        self.file.write(np.ascontiguousarray(top.logps, np.float16).tobytes())
        self.file.write(np.ascontiguousarray(top.rest, np.float32).tobytes())
        self.offsets[row], self.targets = at, self.targets + len(top.ids)

    def flush(self) -> None:
        """Writes the added rows to disk, and then their offsets, so that readers find them."""
        if not self.offsets:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        begins = self.store.begins
        begins[list(self.offsets)] = list(self.offsets.values())
        self.offsets = {}
        part = self.store.path.with_name(f"{self.store.path.name}.{os.getpid()}")
        with part.open("wb") as file:
            np.save(file, begins)
        part.replace(self.store.path)
