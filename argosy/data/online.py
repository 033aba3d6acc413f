"""Batches of documents that are tokenized while training (`data.online`). Nothing is written to disk.

There is no table of rows. Each process has its own position, which is valid only for the same number of processes.
"""

import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.batch import LANGUAGE_MODELING, Batch, Batches, Fields, Fingerprint, check_fields
from argosy.data.encode import DocumentEncoder
from argosy.data.encoding import Encoding
from argosy.data.order import Order, order_fingerprint, select_fields, whole_numbers
from argosy.data.pack import PackedRows, corpus_of
from argosy.data.prepare import HeldOut, document_groups
from argosy.data.rows.encoders import encoder_for
from argosy.data.settings import DataSettings
from argosy.data.sources import Document, Source
from argosy.data.summary import CorpusSummary
from argosy.data.tables import packed_rows, source_identity, summarize_corpus

if TYPE_CHECKING:
    from grain.experimental import ThreadPrefetchDatasetIterator

    from argosy.data.tokenizers.load import Tokenizer


class OnlineBatches(Batches):
    """Batches of documents that are tokenized and packed in the order of the source, while training."""

    def __init__(
        self,
        source: Source,
        settings: DataSettings,
        tokenizer: "Tokenizer",
        seed: int,
        process: int,
        processes: int,
        fields: Fields = LANGUAGE_MODELING,
    ):
        from grain.experimental import ThreadPrefetchDatasetIterator

        if settings.epochs is not None and processes > 1:
            problem = "several processes cannot end online data together: `data.epochs` counts each one's own documents"
            raise BadInput(problem, hint="leave `data.epochs` out, or prepare the corpus (`data.online=false`)")
        check_fields(fields, LANGUAGE_MODELING)
        identity = source_identity(source, tokenizer, settings)
        self.fingerprint = order_fingerprint(identity, settings, seed)
        self.tokens_per_batch = settings.batch * settings.sequence
        self.bytes_per_token = None
        self.among = {"process": process, "processes": processes}
        encoding = Encoding.of_settings(tokenizer, settings)
        make = lambda: encoder_for(source, encoding)  # noqa: E731
        self.source, self.settings, self.make_encoder, self.identity = source, settings, make, identity
        windows = Windows(source, settings, identity, make, seed, process, processes, fields)
        self.held = [ThreadPrefetchDatasetIterator(windows, settings.prefetch)]
        # Grain's iterator closes itself when deleted, which prints a traceback once the interpreter shuts down.
        self.release = weakref.finalize(self, lambda iterators: iterators.pop().close(), self.held)

    def __next__(self) -> Batch:
        return next(self.iterator)

    @property
    def iterator(self) -> "ThreadPrefetchDatasetIterator":
        if not self.held:
            raise ValueError("these batches are closed")
        return self.held[0]

    def summary(self, steps: int | None = None) -> CorpusSummary:
        """Summarizes what is known without reading everything: the files, their bytes, and names of special tokens in the first MiB."""
        encoder, source = self.make_encoder(), self.source
        for document in next(document_groups(source.documents()), []):
            encoder.skip(document)
        limit = self.settings.max_bytes
        cut = limit is not None and (source.disk_bytes is None or source.disk_bytes > limit)
        facts: dict[str, Any] = {
            "files": source.files,
            "source_bytes": source.disk_bytes,
            "max_bytes": limit if cut else None,
        }
        facts |= {"special_documents": encoder.special_documents, "special_names": tuple(encoder.special_names)}
        if self.source.format != "text":
            rendered = encoder.encoding.rendering(self.source.format)
            facts |= {"rendered": rendered, "learn": self.settings.learn}
        facts |= {"ignored": self.source.ignored, "ends_short": self.settings.epochs is not None}
        return summarize_corpus(self.settings.source_name, self.settings, identity=self.identity, online=True, **facts)

    def position(self) -> dict[str, Any]:
        return self.iterator.get_state() | self.among

    def seek(self, position: dict[str, Any]) -> None:
        target = whole_numbers(position, Windows.POSITION)
        if position and any(position.get(name) != number for name, number in self.among.items()):
            raise BadInput(
                "the position in online data holds only for the same process of as many: "
                + "; ".join(f"`{name}` was {position.get(name)}, is {number}" for name, number in self.among.items()),
                hint="with a prepared corpus (`data.online=false`) a run resumes under any number of processes",
            )
        self.iterator.set_state(target)

    def close(self) -> None:
        self.release()


class Windows:
    """Iterates over windows of about 1 MiB of text. Each window is tokenized, packed and shuffled, and its rows are handed out.

    Process p of P takes every P-th document. A position holds the epoch, the first document of the current window, counted among the
    documents of this process, and the number of rows taken from the window. Seeking reads the source from its start, but tokenizes only
    one window.
    """

    POSITION = ("epoch", "document", "row")

    def __init__(
        self,
        source: Source,
        settings: DataSettings,
        identity: Fingerprint,
        make_encoder: Callable[[], DocumentEncoder],
        seed: int,
        process: int,
        processes: int,
        fields: Fields,
    ):
        self.source, self.settings, self.make_encoder, self.fields = source, settings, make_encoder, fields
        self.identity = identity
        self.seed, self.process, self.processes = seed, process, processes
        self.set_state(dict.fromkeys(self.POSITION, 0))

    def get_state(self) -> dict[str, int]:
        return dict(self.state)

    def set_state(self, state: dict[str, int]) -> None:
        self.state = dict(state)
        self.feed = self.rows_from(**state)

    def __iter__(self) -> "Windows":
        return self

    def __next__(self) -> Batch:
        rows = [next(self.feed) for _ in range(self.settings.batch // self.processes)]
        self.state = rows[-1][0]
        return {name: np.concatenate([row[name] for _, row in rows]) for name in rows[0][1]}

    def rows_from(self, epoch: int, document: int, row: int) -> Iterator[tuple[dict[str, int], Batch]]:
        """Yields batches of one row, starting at a position, each with the position after it."""
        while self.settings.epochs is None or epoch < self.settings.epochs:
            empty = document == 0
            for first, rows in self.windows(document):
                order = Order(len(rows), self.seed if self.settings.shuffle else None)
                window = select_fields(rows.gather(order(epoch * len(rows) + np.arange(len(rows)))), self.fields)
                for index in range(row, len(rows)):
                    batch = {name: array[index : index + 1] for name, array in window.items()}
                    yield {"epoch": epoch, "document": first, "row": index + 1}, batch
                row, empty = 0, False
            if empty:
                worker = f"process {self.process} of {self.processes}"
                raise BadInput(f"the corpus holds nothing to train on for {worker}", where=self.settings.source_name)
            epoch, document = epoch + 1, 0

    def windows(self, start: int) -> Iterator[tuple[int, PackedRows]]:
        """Yields the rows of each window from document `start` on, with the number of the window's first document."""
        encoder, documents = self.make_encoder(), self.own_documents()
        for document in islice(documents, start):
            encoder.skip(document)
        for group in document_groups(documents):
            rows = packed_rows(corpus_of(encoder.encode(group)), self.settings, self.identity)
            if len(rows):
                yield start, rows
            start += len(group)

    def own_documents(self) -> Iterator[Document]:
        """Yields this process's documents that are not held out. All pieces of a document go to one process."""
        chooser, number, inside = HeldOut(self.settings.held_out), -1, False
        for document in self.source.documents():
            number += not inside
            inside = not document.ends
            if not chooser.takes(document) and number % self.processes == self.process:
                yield document
