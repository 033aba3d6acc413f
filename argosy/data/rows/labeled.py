"""Texts that are scored or embedded as a whole: converts records to tokens in their tokenizer's frame, and tokens to rows.

Beside what every row of sequences holds (`data.rows.sequences`), a batch has for each slot

    label     float32  [B s z]  the index of the class, 0 or 1 for each class, or the regression target
    second    float32  [B s]    the index where the second text of a pair begins; 0: there is none

No token is a target: all are inputs, and the label is learned. A text that a record lacks, such as its third negative, has an empty
slot.
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

# The names of a record's values: the numbers of its label, where its second text begins, how many tokens end it, whether it has the
# text at all, and how many tokens there are up to the end of its prompt.
LABEL, SECOND, CLOSING, PRESENT, PROMPT = "label_", "second", "closing", "present", "prompt_length"


class LabeledEncoder(DocumentEncoder):
    """Encodes records of texts. Its counts cover the records so far.

    read: number of records.
    unanswered: number of records without any token of a text.
    surplus: number of negatives beyond those of a record.
    absent: number of negatives that records lack.
    """

    counted = (*DocumentEncoder.counted, "read", "unanswered", "surplus", "absent")

    def __init__(self, encoding: Encoding, format: str):
        """Raises:
        BadInput: tokens are to be learned, or a prompt is for a column that records do not have.
        """
        if encoding.learn != "answers":
            problem = f"data.learn={encoding.learn} is for fine-tuning: of `{format}` records no token is learned"
            raise BadInput(problem, hint="leave `data.learn` out")
        super().__init__(encoding)
        self.frame, self.labels = frame_of(encoding.tokenizer, encoding.bos), encoding.labels
        self.read = self.unanswered = self.surplus = self.absent = 0
        # The texts of a record that may have fewer.
        self.most = 2 + encoding.negatives if format == NEGATIVES else None
        # Blanks around texts that become vectors are left out, as when they are embedded.
        self.strips = format in COMPARED
        # What is before each text of a record and before all further ones; and its tokens.
        columns = COMPARED.get(format, ("text",))
        if unknown := [name for name in encoding.prompts if name not in columns]:
            problem = f"data.prompts.{unknown[0]}, and `{format}` records have no such text"
            raise BadInput(problem, hint=f"their texts are {', '.join(columns)}")
        self.prompts = [encoding.prompts.get(name, "") for name in columns] if encoding.prompts else []
        self.before = [self.tokenizer.encode(text) for text in self.prompts]

    def encode(self, documents: list[Document]) -> Iterator[Encoded]:
        """The encoded records in order: one text or pair each, with the texts that belong to it in `group`.

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
        """The text at a place in its record, after its prompt; an empty text stays empty."""
        text = self.prompts[min(place, len(self.prompts) - 1)] + text if self.prompts and text else text
        return text.strip() if self.strips else text

    def shortened(self, record: SourceRecord) -> SourceRecord:
        """A record without the texts that it has beyond those of every record."""
        if self.most is None or len(record.others) < self.most:
            return record
        self.surplus += len(record.others) - (self.most - 1)
        return replace(record, others=record.others[: self.most - 1])

    def missing(self) -> Encoded:
        """What stands in a corpus for a text that a record lacks: one token, which no row holds."""
        values = {SECOND: 0.0, CLOSING: 0.0, PRESENT: 0.0} | ({PROMPT: 0.0} if self.prompts else {})
        return Encoded(np.zeros(1, self.dtype), values=values)

    def skip(self, document: Document) -> None:
        """Skips a record; only names of special tokens in its texts are counted."""
        if document.record is not None:
            self._look_for_names(document.record.words, ends=True)

    def sequence(self, record: SourceRecord, ids: Iterator[list[int]], place: int) -> Encoded:
        """One text or pair, with the numbers of its record, where it stands at `place`."""
        text, pair = next(ids), None if record.completion is None else next(ids)
        if not text and not pair:
            return NOTHING
        tokens, second = frame_ids(self.frame, text, pair)
        values = {SECOND: float(second), CLOSING: float(len(self.frame.last))} | ({} if self.most is None else {PRESENT: 1.0})
        if self.prompts:
            # A token may belong to the end of a prompt and the beginning of its text: it is pooled.
            size = common_length(self.before[min(place, len(self.before) - 1)], text)
            values[PROMPT] = float(len(self.frame.first) + size if size else 0)
        if "label" in record.columns:
            numbers = label_numbers(record.columns["label"], self.labels, record.where)
            values |= {f"{LABEL}{i}": number for i, number in enumerate(numbers)}
        return Encoded(self._checked(tokens), values=values)


class LabeledRows(SequenceRows):
    """Rows of texts with their labels. A text that is cut keeps its final special tokens, as in inference."""

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
        """The number of tokens that count: all, since a text may be one token."""
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
