"""Encodes sequences that are compared or labeled, and makes rows of them: preference pairs, completions labeled good or bad, and
completions in steps.

A preference record has two sequences: chosen and rejected. A KTO record has two: its own, and its prompt with the completion of another
prompt. The sequences of a record form a group, which is kept or dropped as a whole. Each sequence includes the prompt, because the
log-probability of a completion depends on it. All encode the prompt in the same way, as in inference.

A row holds one sequence, or several sequences by best fit (`data.packing=fit`). Groups of per_group rows belong together: row j holds
sequence j of each of its records, and all rows of the group hold the same records in the same slots. Nothing here knows losses.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.batch import Batch, Field, Fields
from argosy.data.chat.conversations import NOTHING, ConversationEncoder, says_something
from argosy.data.chat.mask import encode_all, encode_cut
from argosy.data.encoding import Encoding
from argosy.data.pack import Corpus, Encoded, PackCounts, best_fit_decreasing
from argosy.data.rows.mismatched import MismatchedRecords
from argosy.data.sources import Document, Source, SourceRecord


class SequenceEncoder(ConversationEncoder):
    """Encodes records of sequences, and counts over the records so far.

    read, endless: as in `ConversationEncoder`.
    unanswered: number of records that are left out because in one of their sequences no token is learned.
    identical: number of pairs that are left out because their completions are equal.
    """

    # Completions of other prompts are read ahead, which `state` does not store.
    resumes = False

    def __init__(
        self,
        encoding: Encoding,
        format: str,
        source: Source | None = None,
    ):
        """Args:
            source: the source of the documents, from which KTO takes completions of other prompts; None: they are taken from the
                documents of the same call of `encode`.

        Raises:
            BadInput: as in `ConversationEncoder`, or `learn` is not `answers`.
        """
        if encoding.learn != "answers":
            problem = f"data.learn={encoding.learn} is for fine-tuning: of `{format}` records only the answers count"
            raise BadInput(problem, hint="leave `data.learn` out")
        super().__init__(encoding)
        self.format, self.identical = format, 0
        self.others = None if source is None else MismatchedRecords(lambda: records_of(source.documents()))

    def encode(self, documents: list[Document]) -> Iterator[Encoded]:
        """Encodes records, and yields one result each, in order: the first sequence, with the other sequences in `group`. The result
        is empty for a record that is left out.

        Raises:
            BadInput: as in `ConversationEncoder`, or all KTO records have the same prompt.
        """
        records = list(records_of(documents))
        others = self.others or MismatchedRecords(lambda: records)
        groups = [self.rows_of(record, others) for record in records]
        flat = [row for group in groups for row in group]
        chats = encode_all(self.tokenizer, [self.conversation(row) for row in flat if self.is_chat(row)], self.way)
        for record, group in zip(records, groups):
            self.read += 1
            if not group:
                self.identical += 1
                yield NOTHING
                continue
            before = self.special_documents
            encodings = [next(chats) if self.is_chat(row) else self.completion(row) for row in group]
            if error := next((encoding for encoding in encodings if isinstance(encoding, BadInput)), None):
                where = f"{record.where}: {error.where}" if error.where else record.where
                raise BadInput(error.what, where=where, hint=error.hint)
            self.special_documents = before + (self.special_documents > before)
            if not all(says_something(row) for row in group):
                self.unanswered += 1
                yield NOTHING
                continue
            unanswered, endless = self.unanswered, self.endless
            each = [self.sequence(row, ids) for row, ids in zip(group, encodings)]
            self.endless = endless + (self.endless > endless)
            if self.unanswered > unanswered:
                self.unanswered = unanswered + 1
                yield NOTHING
                continue
            yield replace(each[0], group=tuple(each[1:]), values=record.values)

    def skip(self, document: Document) -> None:
        super().skip(document)
        if self.format == "kto" and self.others is not None and document.record is not None:
            self.others.of(document.record)

    def rows_of(self, record: SourceRecord, mismatched: MismatchedRecords) -> list[SourceRecord]:
        """The sequences of a record, each as a record; empty if the completions are equal."""
        if self.format == "kto":
            return [record, answered_by(record, mismatched.of(record))]
        others = list(record.others)
        same = any((record.messages, record.prompt, record.completion) == (o.messages, o.prompt, o.completion) for o in others)
        return [] if same else [record, *others]

    def completion(self, record: SourceRecord) -> Any:
        return super().completion(record) if not record.steps else self.in_steps(record)

    def in_steps(self, record: SourceRecord) -> tuple[list[int], list[bool]]:
        """Encodes a prompt and its steps. Returns the token ids, and for each token whether it is the last one of a step. Steps are
        encoded separately, so that the tokens of a step do not depend on later steps.
        """
        text, cuts = record.prompt or "", []
        for step, _ in record.steps:
            cuts.append(len(text))
            text += f"{step}\n"
        self._look_for_names(text, ends=True)
        ids, places = encode_cut(self.tokenizer, text, [cut for cut in cuts if cut], self.special)
        mask, begins = [False] * len(ids), np.array([begin for begin, _ in places])
        for stop in [*cuts[1:], len(text)]:
            mask[int(np.searchsorted(begins, stop)) - 1] = True
        return ids, mask

    def sequence(self, record: SourceRecord, content: Any) -> Encoded:
        """Makes one sequence from encoded content: adds the special tokens and the weight of each token."""
        if not record.steps:
            return self.finished(content, self.is_chat(record))
        encoded, right = self.finished(content, False, ends=False), np.zeros(0, np.float32)
        if encoded.weights is not None:
            right = np.zeros(len(encoded.tokens), np.float32)
            right[np.flatnonzero(encoded.weights)] = [label for _, label in record.steps]
        return replace(encoded, columns={"right": right})


def records_of(documents: Iterable[Document]) -> Iterator[SourceRecord]:
    return (document.record for document in documents if document.record is not None)


def answered_by(record: SourceRecord, other: SourceRecord) -> SourceRecord:
    """A record's prompt with another record's completion."""
    if record.messages is None:
        return SourceRecord(where=record.where, prompt=record.prompt, completion=other.completion)
    messages = [*record.messages[: record.prompt_messages], *(other.messages or ())[other.prompt_messages :]]
    learned = (*[False] * record.prompt_messages, *(other.learned or ())[other.prompt_messages :])
    return replace(record, messages=messages, learned=learned, values={})


class SequenceRows:
    """Rows of `sequence` positions with whole sequences. A row has s slots, each for one sequence. A batch has the fields of language
    modeling, the columns of the corpus for each token, and for each slot:

        live       float32  [B s]  1 if the slot holds a sequence, else 0
        document   int32    [B s]  the number of the sequence in the corpus; -1 in an empty slot
        NAME       float32  [B s]  the values of records, by name

    All tokens of a sequence are inputs. The last token has no target.

    dropped: number of groups that are left out because a sequence is longer than a row.
    cut: number of groups in which a sequence was cut, at its end or at the beginning of the prompt.
    unlearned: number of groups that are left out because no completion token is within the row.
    """

    def __init__(self, corpus: Corpus, per_group: int, sequence: int, packing: str = "alone", too_long: str = "drop"):
        """Args:
            per_group: the number of sequences per record.
            sequence: the number of tokens in a row.
            packing: `alone` or `fit`.
            too_long: what happens to a group with a sequence longer than a row: `drop`, `cut`, `cut_prompt`, or `error`.

        Raises:
            BadInput: a sequence is longer than a row, and `too_long` is `error`.
        """
        self.corpus, self.per_group, self.sequence = corpus, per_group, sequence
        sizes = np.diff(corpus.starts).reshape(-1, per_group)
        long = np.any(sizes > sequence, axis=1).reshape(-1)
        if too_long == "error" and long.any():
            are = "is" if long.sum() == 1 else "are"
            problem = f"{long.sum():,} of {plural(len(long), 'record')} {are} longer than a row of {sequence:,} tokens"
            where = f"the longest sequence has {sizes.max():,} tokens (data.too_long=error)"
            raise BadInput(problem, where=where, hint="raise `data.sequence`, or set `data.too_long=cut_prompt`, `cut` or `drop`")
        # [groups] the number of tokens that are left out at the beginning of each sequence of a group.
        self.skipped = np.zeros(len(sizes), np.int64)
        fits = ~long if too_long == "drop" else np.ones(len(long), bool)
        if too_long == "cut_prompt":
            # All sequences of a group lose as many tokens, so that they keep the same prompt. At least one token of it is left.
            more = np.maximum(sizes.max(1) - sequence, 0)
            fits = ~long | (more < self.prompts(sizes).min(1))
            self.skipped = np.where(fits, more, 0)
            sizes = sizes - self.skipped[:, None]
        sizes = np.minimum(sizes, sequence)
        learns = (self.learned_of(sizes) > 0).all(1)
        self.dropped = int((~fits).sum())
        self.unlearned = int((fits & ~learns).sum())
        self.cut = int((fits & learns & long).sum())
        # [groups kept] the numbers of the groups; [groups, per_group] the number of tokens of each sequence.
        self.groups, self.sizes = np.flatnonzero(fits & learns), sizes
        needed = sizes[self.groups].max(1, initial=0)
        row_of = best_fit_decreasing(needed, sequence) if packing == "fit" else np.arange(len(needed))
        order = np.argsort(row_of, kind="stable")
        self.order, counts = self.groups[order], np.bincount(row_of)
        self.offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.slots = int(counts.max(initial=1))
        types = {"live": np.float32, "document": np.int32, **dict.fromkeys(corpus.values, np.float32)}
        self.stored: Fields = {**corpus.fields, **{name: Field("B s", dtype, "row") for name, dtype in types.items()}}
        self.fields: Fields = self.stored

    @property
    def counts(self) -> PackCounts:
        """Counts of what packing did to groups, and the number of targets."""
        sizes = self.sizes[self.groups]
        learned = int(self.learned_of(self.sizes)[self.groups].sum())
        return PackCounts(self.cut, self.dropped, self.unlearned, 0, int((sizes - 1).sum()), learned)

    @property
    def own_sizes(self) -> dict[str, int]:
        """The sizes of the axes that belong to single fields, by letter."""
        return {"s": self.slots}

    def learned_of(self, sizes: np.ndarray) -> np.ndarray:
        """The number of targets of each sequence that count in the loss, if `sizes` tokens are kept; both [groups, per_group]."""
        begin = self.corpus.starts[:-1].reshape(sizes.shape) + self.skipped[:, None]
        if self.corpus.weights is None:
            return np.maximum(sizes - 1, 0)
        edges = np.concatenate([[0], np.cumsum(np.asarray(self.corpus.weights) != 0, dtype=np.int64)])
        return edges[begin + sizes] - edges[np.minimum(begin + 1, begin + sizes)]

    def prompts(self, sizes: np.ndarray) -> np.ndarray:
        """The number of tokens of each sequence before its completion, [groups, per_group]."""
        begin, weights = self.corpus.starts[:-1], self.corpus.weights
        if weights is None:
            return np.zeros_like(sizes)
        learned = np.append(np.flatnonzero(weights), len(weights))
        first = learned[np.searchsorted(learned, begin)] - begin
        return np.minimum(first.reshape(sizes.shape), sizes)

    def __len__(self) -> int:
        return (len(self.offsets) - 1) * self.per_group

    def gather(self, rows: np.ndarray) -> Batch:
        batch: Batch = {}
        sizes = {"T": self.sequence, "s": self.slots}
        for name, field in self.stored.items():
            shape = (len(rows), *(sizes[axis] for axis in field.axes.split()[1:]))
            batch[name] = np.full(shape, -1 if name == "document" else 0, field.dtype)
        for row, number in enumerate(rows.tolist()):
            bundle, place = divmod(number, self.per_group)
            at = 0
            for slot, group in enumerate(self.order[self.offsets[bundle] : self.offsets[bundle + 1]].tolist()):
                at += self.write(batch, row, at, slot, group, place)
        return batch

    def write(self, batch: Batch, row: int, at: int, slot: int, group: int, place: int) -> int:
        """Writes a sequence into a batch, in place. Returns the number of positions that it takes.

        Args:
            row: the row of the batch.
            at: the first position in the row.
            slot: the slot in the row.
            group: the number of the group.
            place: the index of the sequence in its group.
        """
        document, corpus = group * self.per_group + place, self.corpus
        begin, size = int(corpus.starts[document] + self.skipped[group]), int(self.sizes[group, place])
        tokens = corpus.tokens[begin : begin + size]
        inputs, targets = (row, slice(at, at + size)), (row, slice(at, at + size - 1))
        batch["tokens"][inputs], batch["targets"][targets] = tokens, tokens[1:]
        batch["segments"][inputs] = slot + 1
        batch["mask"][targets] = 1
        for name, column in corpus.target_arrays.items():
            batch[name][targets] = column[begin + 1 : begin + size]
        batch["live"][row, slot], batch["document"][row, slot] = 1, document
        for name, values in corpus.values.items():
            batch[name][row, slot] = values[document]
        return size
