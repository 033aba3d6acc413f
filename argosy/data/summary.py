"""Summarizes a corpus in numbers and as one paragraph. Every run prints the paragraph before its first step."""

from dataclasses import asdict, dataclass, field
from typing import Any

from argosy.core.counts import plural
from argosy.data.sources.records import LABELED


@dataclass(frozen=True)
class MixedPart:
    """One source of a mixture, or one bucket of images.

    name: the path of the source, or the size of the images in the bucket.
    rows, tokens: the number of rows and tokens in one epoch of the source; None: unknown.
    text: the summary of the source, as a paragraph.
    share: the share of the run's rows that come from the source, from 0 to 1; None: unknown.
    epochs: the number of epochs over the source in the run; None: unknown.
    """

    name: str
    rows: int
    tokens: int | None
    text: str = ""
    share: float | None = None
    epochs: float | None = None


@dataclass(frozen=True)
class CorpusSummary:
    """The size of a corpus, and counts of what is left out. None means unknown, for instance because nothing has been read yet.

    source: the source as the settings name it.
    files: number of files that were read.
    source_bytes: the size of those files on disk, in bytes.
    bytes, documents, tokens: the size of the training data: UTF-8 bytes of text, documents, and tokens.
    rows: number of rows in one epoch.
    sequence: number of tokens in a row.
    batch: number of rows in a step.
    epochs: number of epochs in the run.
    held_out_documents, held_out_tokens: the size of the data held out for evaluation.
    max_bytes: the limit on bytes of text, if the text is longer.
    unreadable: number of image files that are damaged or too large.
    stretched: number of control images whose aspect ratio differs from that of their images.
    short_documents: number of documents of fewer than two tokens, which have no target. Only packing `split` keeps them.
    duplicates: number of documents that are left out because they occur before.
    tail_rows: number of rows at the end of the last epoch that are left out because they do not fill a batch.
    ends_short: whether rows may be left out at the end of the last epoch of online data, where their number is unknown.
    ends_after: number of batches in `data.epochs` epochs; None: no limit is set.
    special_documents: number of documents that hold the name of a special token, which is trained as ordinary text.
    special_names: some of those names.
    online: whether documents are tokenized while training.
    placeholders: names in braces that occur in every prompt.

    These fields are for records:

    format: the format of the records.
    rendered: a phrase that says how records become text.
    learn: which tokens count in the loss, as in `data.learn`.
    targets: number of tokens that are predicted in one epoch.
    learned: number of targets that count in the loss; None: all.
    packing: how records become rows, as in `data.packing`.
    padding: share of the positions of rows that hold no token, from 0 to 1, if whole documents are packed.
    chosen_packing: whether `packing` is the default, because the setting is None.
    unanswered: number of records that are left out because no token of them counts in the loss.
    too_long: what happens to records longer than a row, as in `data.too_long`.
    cut: number of records that are cut because they are longer than a row.
    dropped: number of records that are left out because they are longer than a row.
    unlearned: number of records that are left out because their answer begins after the end of a row.
    parted: number of records that continue in another row.
    ignored: names of columns that nothing reads.
    endless: number of records whose answer does not end with a special token.
    identical: number of pairs that are left out because both answers are equal.
    surplus: number of negatives that are left out because their records have more than `data.negatives`.
    absent: number of negatives that records lack to have `data.negatives`.
    slots: the largest number of sequences in a packed row.

    parts: the sources of a mixture.
    buckets: the aspect-ratio buckets of images.
    """

    source: str
    files: int | None = None
    source_bytes: int | None = None
    bytes: int | None = None
    documents: int | None = None
    tokens: int | None = None
    rows: int | None = None
    sequence: int | None = None
    batch: int | None = None
    epochs: float | None = None
    held_out_documents: int = 0
    held_out_tokens: int = 0
    max_bytes: int | None = None
    short_documents: int = 0
    duplicates: int = 0
    unreadable: int = 0
    stretched: int = 0
    tail_rows: int = 0
    ends_short: bool = False
    ends_after: int | None = None
    special_documents: int = 0
    special_names: tuple[str, ...] = ()
    online: bool = field(default=False)
    format: str | None = None
    rendered: str | None = None
    learn: str | None = None
    targets: int = 0
    learned: int | None = None
    packing: str | None = None
    padding: float | None = None
    chosen_packing: bool = False
    unanswered: int = 0
    too_long: str | None = None
    cut: int = 0
    dropped: int = 0
    unlearned: int = 0
    parted: int = 0
    ignored: tuple[str, ...] = ()
    endless: int = 0
    identical: int = 0
    surplus: int = 0
    absent: int = 0
    placeholders: tuple[str, ...] = ()
    slots: int | None = None
    parts: tuple[MixedPart, ...] = ()
    buckets: tuple[MixedPart, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All fields that are known and not zero, as a JSON object."""
        return {name: value for name, value in asdict(self).items() if value not in (None, 0, (), False)}

    @property
    def text(self) -> str:
        """The summary as one paragraph."""
        sentences = [self._source_sentence(), self._mixture_sentence(), self._bucket_sentence(), self._left_out_sentence()]
        sentences += [self._cut_sentence(), self._stretched_sentence(), self._ignored_sentence(), self.warning]
        return " ".join(sentence for sentence in sentences if sentence)

    def _source_sentence(self) -> str:
        parts = []
        if self.format:
            parts.append(f"`{self.format}` by {self.rendered}" if self.rendered else f"`{self.format}`")
        if self.files is not None:
            size = f" of {counted_bytes(self.source_bytes)}" if self.source_bytes is not None else ""
            parts.append(f"{plural(self.files, 'file')}{size}")
        if self.bytes:
            parts.append(f"{counted_bytes(self.bytes)} of text")
        if self.documents:
            parts.append(plural(self.documents, self.noun))
        if self.tokens:
            parts.append(plural(self.tokens, "token"))
        if self.format and self.targets and self.format not in LABELED:
            share = 1.0 if self.learned is None else self.learned / self.targets
            of = "in answers" if self.compared else f"learned (data.learn={self.learn})"
            parts.append(f"{100 * share:.3g} % of targets {of}")
        if self.rows:
            default = f" by data.packing={self.packing}" + (", the default for them" if self.chosen_packing else "")
            parts.append(f"{plural(self.rows, 'row')} of {self.sequence}{default if self.format else ''}")
        if self.padding is not None:
            parts.append(f"{100 * self.padding:.2g} % padding")
        if self.slots:
            parts.append(f"up to {plural(self.slots, 'sequence')} a row")
        if self.online:
            more = f"; data.learn={self.learn}, data.packing={self.packing}, data.too_long={self.too_long}" if self.format else ""
            parts.append(f"tokenized while training, so its size is not known beforehand{more}")
        if self.epochs is not None:
            parts.append(f"{self.epochs:.3g} epoch{'s' * (self.epochs != 1)} in this run")
        return f"data {self.source}: {', '.join(parts) or 'of unknown size'}."

    def _mixture_sentence(self) -> str:
        """A sentence that says how much of each source of a mixture the run reads."""
        each = [
            f"{100 * part.share:.3g} % {part.name} ({plural(part.rows, 'row')}, {part.epochs:.3g} epoch{'s' * (part.epochs != 1)})"
            for part in self.parts
            if part.share is not None and part.epochs is not None
        ]
        return f"Mixture: {'; '.join(each)}." if each else ""

    def _bucket_sentence(self) -> str:
        """Sentences about the buckets of images: their sizes, their epochs, and the images that the run does not reach."""
        if not self.buckets:
            return ""
        each, unseen, small = [], 0, []
        for part in self.buckets:
            passes = "" if part.epochs is None else f", {part.epochs:.3g} epoch{'s' * (part.epochs != 1)}"
            each.append(f"{part.name} ({plural(part.rows, 'image')}{passes})")
            unseen += 0 if part.epochs is None else max(0, part.rows - round(part.epochs * part.rows))
            small += [part.name] if part.rows < (self.batch or 0) else []
        text = f"Buckets: {'; '.join(each)}. A batch is of one bucket."
        if small:
            text += f" Fewer images than a batch of {self.batch}, so that a batch holds some of them again: {', '.join(small)}."
        if unseen:
            text += f" Not seen, because their buckets have no further batch in this run: {plural(unseen, 'image')}."
        return text

    def _left_out_sentence(self) -> str:
        parts = []
        if self.max_bytes is not None:
            of = f" of {counted_bytes(self.source_bytes)}" if self.source_bytes is not None else ""
            parts.append(f"everything after the first {counted_bytes(self.max_bytes)}{of} (data.max_bytes)")
        if self.format == "prompt" and self.held_out_documents:
            parts.append(f"{plural(self.held_out_documents, self.noun)} for evaluation (data.held_out)")
        if self.held_out_tokens:
            documents = f" in {plural(self.held_out_documents, self.noun)}" if self.held_out_documents else ""
            parts.append(f"{plural(self.held_out_tokens, 'token')}{documents} for evaluation (data.held_out)")
        if self.identical:
            parts.append(f"{plural(self.identical, self.noun)} whose rejected answer is the chosen one")
        if self.surplus:
            parts.append(f"{plural(self.surplus, 'negative')} beyond those of a record (data.negatives)")
        if self.absent:
            costs = "" if self.packing == "fit" else ": empty places, computed all the same (not with data.packing=fit)"
            parts.append(f"{plural(self.absent, 'negative')} that records lack{costs}")
        if self.unanswered:
            reason = "" if self.compared else " (data.learn=answers)"
            noun = "a word" if self.format in LABELED else "an answer"
            parts.append(f"{plural(self.unanswered, self.noun)} without {noun}{reason}")
        if self.dropped:
            reason = "whose answer leaves no room for its prompt" if self.too_long == "cut_prompt" else "longer than a row"
            parts.append(f"{plural(self.dropped, self.noun)} {reason} (data.too_long={self.too_long})")
        if self.unlearned:
            parts.append(f"{plural(self.unlearned, self.noun)} whose answer begins after the end of a row (data.sequence)")
        if self.unreadable:
            parts.append(f"{plural(self.unreadable, 'image file')} that cannot be read (data.image.invalid=drop)")
        if self.short_documents:
            parts.append(f"{plural(self.short_documents, 'document')} of fewer than two tokens")
        if self.duplicates:
            parts.append(f"{plural(self.duplicates, self.noun)} that occur before (data.deduplicate)")
        if self.tail_rows:
            rows = plural(self.tail_rows, "prompt" if self.format == "prompt" else "row")
            parts.append(f"the last {rows}, too few for a batch (data.epochs)")
        if self.online and self.ends_short:
            parts.append(f"what is left at the end of the last epoch, fewer than {plural(self.batch or 0, 'row')} (data.epochs)")
        return f"Left out: {'; '.join(parts)}." if parts else ""

    def _cut_sentence(self) -> str:
        if self.cut:
            where = ", at the beginning of the prompt" if self.too_long == "cut_prompt" else ""
            return f"Cut: {plural(self.cut, self.noun)} longer than a row of {self.sequence}{where} (data.too_long={self.too_long})."
        parted = f"Cut: {plural(self.parted, self.noun)} at the end of a row, to go on in the next one without what came before"
        return f"{parted} (data.packing=split)." if self.parted else ""

    def _stretched_sentence(self) -> str:
        many = plural(self.stretched, "control image")
        return f"Stretched: {many}, whose sides have another ratio than those of their images." if self.stretched else ""

    def _ignored_sentence(self) -> str:
        names = ", ".join(f"`{name}`" for name in self.ignored)
        return f"Ignored columns: {names}." if names else ""

    @property
    def compared(self) -> bool:
        """Whether records are pairs, labeled answers, completions in steps, or labeled texts."""
        return self.format in ("preference", "kto", "stepwise", *LABELED)

    @property
    def noun(self) -> str:
        """The noun for a document of this corpus, such as "conversation"."""
        if self.format in (None, "text"):
            return "document"
        if self.compared:
            return self.format if self.format in ("pair", "triplet") else "pair" if self.format == "preference" else "example"
        if self.format == "prompt":
            return "prompt"
        return "example" if self.format in ("completion", "alpaca") else "conversation"

    @property
    def warning(self) -> str:
        """A warning about a probable mistake in the data; empty if there is none."""
        if self.endless:
            return (
                f"Warning: the answers of {plural(self.endless, self.noun)} end with no special token, so the model does not learn to "
                "stop there; a template should end each turn with the end-of-sequence token, as data.template=zephyr does."
            )
        if self.placeholders:
            names = ", ".join(f"{{{name}}}" for name in self.placeholders)
            return f"Warning: every prompt holds {names} as it stands. Nothing fills it in: write the text itself into each record."
        if not self.special_documents:
            return ""
        names = ", ".join(self.special_names)
        least = "at least " if self.online else ""
        hold = "holds" if self.special_documents == 1 else "hold"
        return (
            f"Warning: {least}{plural(self.special_documents, self.noun)} {hold} names of special tokens ({names}), which train as "
            "plain text; data.special=true encodes them as special tokens."
        )


def counted_bytes(count: int | None) -> str:
    """A number of bytes as text, with three digits and the largest unit that fits (None: 0 bytes)."""
    count = count or 0
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return plural(count, "byte")
