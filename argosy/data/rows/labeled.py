"""Encodes texts that are scored or embedded as a whole, with the tokenizer's special tokens around them, and makes rows of them.

A batch has the fields of rows of sequences (`data.rows.sequences`), and for each slot, which holds one text or pair:

    label     float32  [B s z]  the index of the class, 0 or 1 for each class, or the regression target
    second    float32  [B s]    the index where the second text of a pair begins; 0: there is none

No token is a target, because only the label is learned. A text that a record lacks, such as a third negative, leaves its slot empty.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.sequences import common_length
from argosy.data.batch import Batch, Field
from argosy.data.chat.conversations import NOTHING
from argosy.data.encode import DocumentEncoder
from argosy.data.encoding import Encoding
from argosy.data.framing import frame_ids, frame_of
from argosy.data.labels import label_numbers
from argosy.data.pack import Corpus, Encoded
from argosy.data.rows.sequences import SequenceRows
from argosy.data.sources import Document, SourceRecord
from argosy.data.sources.labeled import COMPARED, NEGATIVES

# The names of `Encoded.values`: the numbers of the label (with an index), the index where the second text begins, the number of special
# tokens at the end, whether the record has the text, and the number of tokens up to the end of the prompt.
LABEL, SECOND, CLOSING, PRESENT, PROMPT = "label_", "second", "closing", "present", "prompt_length"


class LabeledEncoder(DocumentEncoder):
    """Encodes records of labeled texts, and counts over the records so far.

    read: number of records.
    unanswered: number of records that are left out because a text has no tokens.
    surplus: number of negatives that are left out because records have more than `negatives`.
    absent: number of negatives that records lack to have `negatives`.
    """

    counted = (*DocumentEncoder.counted, "read", "unanswered", "surplus", "absent")

    def __init__(self, encoding: Encoding, format: str):
        """Raises:
        BadInput: `learn` is not `answers`, or a prompt is for a column that records of this format do not have.
        """
        if encoding.learn != "answers":
            problem = f"data.learn={encoding.learn} is for fine-tuning: of `{format}` records no token is learned"
            raise BadInput(problem, hint="leave `data.learn` out")
        super().__init__(encoding)
        self.frame, self.labels = frame_of(encoding.tokenizer, encoding.bos), encoding.labels
        self.read = self.unanswered = self.surplus = self.absent = 0
        # The number of texts of a record that may have fewer; None: every record has all texts.
        self.most = 2 + encoding.negatives if format == NEGATIVES else None
        # Blanks around texts that become vectors are stripped, as in inference.
        self.strips = format in COMPARED
        # The prompt before each text of a record, the last also before all further texts; and the tokens of each prompt.
        columns = COMPARED.get(format, ("text",))
        if unknown := [name for name in encoding.prompts if name not in columns]:
            problem = f"data.prompts.{unknown[0]}, and `{format}` records have no such text"
            raise BadInput(problem, hint=f"their texts are {', '.join(columns)}")
        self.prompts = [encoding.prompts.get(name, "") for name in columns] if encoding.prompts else []
        self.before = [self.tokenizer.encode(text) for text in self.prompts]

    def encode(self, documents: list[Document]) -> Iterator[Encoded]:
        """Encodes records, and yields one result each, in order: the first text or pair, with the record's other texts in `group`.

        Raises:
            BadInput: a label is not among the classes.
        """
        records = [self.shortened(document.record) for document in documents if document.record is not None]
        every = [
            (self.prompted(part.prompt or "", i), part.completion)
            for record in records
            for i, part in enumerate((record, *record.others))
        ]
        texts = [text for pair in every for text in pair if text is not None]
        for text in texts:
            self._look_for_names(text, ends=True)
        ids = iter(self.tokenizer.encode_many(texts, self.special))
        for record in records:
            self.read += 1
            each = [self.sequence(part, ids, i) for i, part in enumerate((record, *record.others))]
            if any(part is NOTHING for part in each):
                self.unanswered += 1
                yield NOTHING
                continue
            absent = max((self.most or 0) - len(each), 0)
            self.absent += absent
            each += [self.missing()] * absent
            yield Encoded(each[0].tokens, values=each[0].values, group=tuple(each[1:]))

    def prompted(self, text: str, place: int) -> str:
        """The text with its prompt before it. `place` is the index of the text in its record. An empty text stays empty."""
        text = self.prompts[min(place, len(self.prompts) - 1)] + text if self.prompts and text else text
        return text.strip() if self.strips else text

    def shortened(self, record: SourceRecord) -> SourceRecord:
        """The record without its surplus negatives, which are counted."""
        if self.most is None or len(record.others) < self.most:
            return record
        self.surplus += len(record.others) - (self.most - 1)
        return replace(record, others=record.others[: self.most - 1])

    def missing(self) -> Encoded:
        """The placeholder in a corpus for a text that a record lacks: one token, which is never written to a row."""
        values = {SECOND: 0.0, CLOSING: 0.0, PRESENT: 0.0} | ({PROMPT: 0.0} if self.prompts else {})
        return Encoded(np.zeros(1, self.dtype), values=values)

    def skip(self, document: Document) -> None:
        """Skips a record. Only names of special tokens in its texts are counted."""
        if document.record is not None:
            self._look_for_names(document.record.words, ends=True)

    def sequence(self, record: SourceRecord, ids: Iterator[list[int]], place: int) -> Encoded:
        """Encodes one text or pair, with its values.

        Args:
            ids: yields the ids of the next text.
            place: the index of the text or pair in its record.
        """
        text, pair = next(ids), None if record.completion is None else next(ids)
        if not text and not pair:
            return NOTHING
        tokens, second = frame_ids(self.frame, text, pair)
        values = {SECOND: float(second), CLOSING: float(len(self.frame.last))} | ({} if self.most is None else {PRESENT: 1.0})
        if self.prompts:
            # A token that belongs to the end of a prompt and the beginning of its text is pooled.
            size = common_length(self.before[min(place, len(self.before) - 1)], text)
            values[PROMPT] = float(len(self.frame.first) + size if size else 0)
        if "label" in record.columns:
            numbers = label_numbers(record.columns["label"], self.labels, record.where)
            values |= {f"{LABEL}{i}": number for i, number in enumerate(numbers)}
        return Encoded(self._checked(tokens), values=values)


class LabeledRows(SequenceRows):
    """Rows of texts with their labels. A text that is cut to the length of a row keeps its final special tokens, as in inference."""

    def __init__(self, corpus: Corpus, per_group: int, sequence: int, packing: str = "alone", too_long: str = "cut"):
        super().__init__(corpus, per_group, sequence, packing, too_long)
        self.numbers = sum(name.startswith(LABEL) for name in corpus.values)
        fields = {name: field for name, field in self.fields.items() if not name.startswith(LABEL)}
        label = {"label": Field("B s z", np.float32, "row")} if self.numbers else {}
        self.fields = fields | label

    @property
    def own_sizes(self) -> dict[str, int]:
        return {"s": self.slots, "z": max(self.numbers, 1)}

    def learned_of(self, sizes: np.ndarray) -> np.ndarray:
        """The number of tokens that count for keeping a text. All count, since a text may be a single token."""
        return sizes

    def gather(self, rows: np.ndarray) -> Batch:
        batch = super().gather(rows)
        if self.numbers:
            batch["label"] = np.stack([batch.pop(f"{LABEL}{i}") for i in range(self.numbers)], -1)
        return batch

    def write(self, batch: Batch, row: int, at: int, slot: int, group: int, place: int) -> int:
        document = group * self.per_group + place
        if (present := self.corpus.values.get(PRESENT)) is not None and not present[document]:
            return 0
        size = super().write(batch, row, at, slot, group, place)
        closing, stop = int(self.corpus.values[CLOSING][document]), int(self.corpus.starts[document + 1])
        if closing and size > closing:
            batch["tokens"][row, at + size - closing : at + size] = self.corpus.tokens[stop - closing : stop]
        return size
