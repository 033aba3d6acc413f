"""Encodes documents to tokens, and adds the special tokens that mark the beginning and the end of a document.

A long document arrives in pieces, and long texts are encoded in parts on all cores. The tokens are the same as those of the whole text,
because a text is cut only where no token spans the cut (`Tokenizer.cut_pattern`). The text after the last such position is buffered
until the next piece arrives.
"""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.encoding import Encoding
from argosy.data.pack import Encoded
from argosy.data.sources import Document

# Characters encoded at once: the 16 parts of a group of 1 MiB keep 8 cores busy.
PART_CHARACTERS = 1 << 16
# A text of this many characters without a place to cut is refused.
HELD_CHARACTERS = 64 << 20
NAMES_SHOWN = 3


class DocumentEncoder:
    """Encodes documents in order, and buffers the end of a document that arrives in pieces.

    special_documents: number of documents that contain the name of a special token as ordinary text.
    special_names: at most three of those names.
    """

    # The names of the attributes that `state` stores. Encoders of records add more.
    counted: ClassVar[tuple[str, ...]] = ("held", "begun", "opening", "named", "last", "special_documents", "special_names")
    # Whether `state` is enough to resume after an interruption.
    resumes: ClassVar[bool] = True

    def __init__(self, encoding: Encoding):
        """Raises:
        BadInput: `encoding.bos` is set, but the tokenizer has no beginning-of-sequence token.
        """
        tokenizer = encoding.tokenizer
        if encoding.bos and tokenizer.bos is None:
            raise BadInput("the tokenizer has no beginning-of-sequence token", hint="leave `data.bos` unset")
        self.encoding, self.tokenizer, self.special = encoding, tokenizer, encoding.special
        self.dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32
        self.before = [tokenizer.bos] if tokenizer.bos is not None and encoding.puts_bos else []
        self.after = [] if tokenizer.eos is None else [tokenizer.eos]
        # These describe the document that has not ended: its buffered text, whether any text was encoded, whether no token came
        # out yet, whether the text holds a name of a special token, and the last token.
        self.held, self.begun, self.opening, self.named = "", False, False, False
        self.last: int | None = None
        self.special_documents = 0
        self.special_names: list[str] = []

    def encode(self, documents: list[Document]) -> Iterator[Encoded]:
        """Encodes documents or pieces of them, and yields one result each, in order. All texts are tokenized in one call.

        Raises:
            BadInput: tokens or spans are out of range, or a long text cannot be cut.
        """
        begun = [self.begun]
        parts = []
        for document in documents:
            parts.append(self._ready_parts(document))
            begun.append(self.begun)
        whole = iter(
            self.tokenizer.encode_many([text for document_parts in parts for text, rest in document_parts if not rest], self.special)
        )
        rests = iter(
            self.tokenizer.encode_rest([text for document_parts in parts for text, rest in document_parts if rest], self.special)
        )
        for document, document_parts, has_begun in zip(documents, parts, begun):
            encoded = [next(rests if rest else whole) for _, rest in document_parts]
            # Nearly every document is one part, whose ids need no copy.
            body = encoded[0] if len(encoded) == 1 else list(chain.from_iterable(encoded))
            body = body if document.tokens is None else np.asarray(document.tokens).tolist()
            starts = not has_begun and (bool(document_parts) or document.ends or document.tokens is not None)
            before = self.before if starts and body[:1] != self.before else []
            self.last = body[-1] if body else self.last if has_begun else None
            after = self.after if document.ends and [self.last] != self.after else []
            ids = self._checked([*before, *body, *after])
            opening = starts or (has_begun and self.opening)
            self.opening = opening and not len(ids)
            yield Encoded(ids, weights_of(document, len(body), len(before), len(after)), begins=opening and len(ids) > 0)

    def skip(self, document: Document) -> None:
        """Skips a document or a piece of one. The next piece is encoded as if this one had been encoded too."""
        self._ready_parts(document)

    def state(self) -> dict[str, Any]:
        """The attributes that depend on the documents encoded so far (`counted`), as a JSON object."""
        fields = {name: getattr(self, name) for name in self.counted}
        return {name: sorted(value) if isinstance(value, set) else value for name, value in fields.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Sets the attributes to those that `state` returned."""
        for name, value in state.items():
            setattr(self, name, set(value) if isinstance(getattr(self, name), set) else value)

    def close(self) -> None:
        """Releases what encoding has started, such as processes. The encoder may be used again."""

    @property
    def inside(self) -> bool:
        """Whether a document has begun and not ended yet."""
        return self.begun or bool(self.held)

    def _ready_parts(self, document: Document) -> list[tuple[str, bool]]:
        """The parts of the text that can be encoded now, as pairs (part, whether it continues the part before). Buffers the rest."""
        if document.tokens is not None:
            self.begun = not document.ends
            return []
        text, begun = self.held + document.text, self.begun
        pattern = self.tokenizer.cut_pattern(self.special)
        cut = len(text) if document.ends else last_cut(text, pattern)
        self._look_for_names(text[:cut], document.ends)
        self.held, self.begun = text[cut:], not document.ends and (begun or cut > 0)
        if len(self.held) > HELD_CHARACTERS:
            raise BadInput(
                f"{plural(len(self.held), 'character')} of one document without a blank to cut the text at",
                hint="cut the text into documents, for instance with `data.documents=paragraphs`",
            )
        return [(part, begun or number > 0) for number, part in enumerate(_in_parts(text[:cut], pattern))]

    def _look_for_names(self, text: str, ends: bool) -> None:
        """Counts the document if its text holds the name of a special token that is encoded as ordinary text."""
        names = None if self.special or self.named else self.tokenizer.special_names
        if names is not None and (match := names.search(text)):
            self.named = True
            self.special_documents += 1
            if match[0] not in self.special_names[:NAMES_SHOWN]:
                self.special_names = [*self.special_names, match[0]][:NAMES_SHOWN]
        self.named = self.named and not ends

    def _checked(self, ids: list[int]) -> np.ndarray:
        tokens = np.array(ids, np.int64)
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.tokenizer.vocab):
            wrong = tokens[(tokens < 0) | (tokens >= self.tokenizer.vocab)][0]
            problem = f"token {wrong} is outside the tokenizer's vocabulary of {self.tokenizer.vocab}"
            raise BadInput(problem, hint="`data.tokenizer=NAME` is the tokenizer that made the tokens")
        return tokens.astype(self.dtype)


def last_cut(text: str, pattern: "re.Pattern[str] | None") -> int:
    """The last position where the text can be cut; 0 if there is none. The search begins near the end of the text."""
    if pattern is None:
        return 0
    for start in (max(0, len(text) - PART_CHARACTERS), 0):
        last = 0
        for match in pattern.finditer(text, start):
            last = match.start()
        if last:
            return last
    return 0


def _in_parts(text: str, pattern: "re.Pattern[str] | None") -> Iterator[str]:
    """Cuts a text into parts of at least PART_CHARACTERS. An empty text has no parts."""
    start = 0
    while pattern is not None and len(text) - start > 2 * PART_CHARACTERS:
        match = pattern.search(text, start + PART_CHARACTERS)
        if match is None:
            break
        yield text[start : match.start()]
        start = match.start()
    if start < len(text):
        yield text[start:]


def weights_of(document: Document, length: int, before: int, after: int) -> np.ndarray | None:
    """The weight of each token in the loss: uint8 if all weights are 0 or 1, else float32. None means that all are 1. The
    end-of-sequence token has the weight of the last token before it.

    Args:
        length: number of the document's tokens, without the special tokens around it.
        before: number of special tokens that were added before the document's tokens.
        after: number of special tokens that were added after them.

    Raises:
        BadInput: a span is outside the document, or the number of weights is not the number of tokens.
    """
    if document.weights is not None:
        inner = np.asarray(document.weights, np.float32)
        if inner.ndim and len(inner) != length:
            problem = f"{plural(len(inner), 'weight')} for a document of {plural(length, 'token')}"
            hint = "one for each token that `data.tokenizer` makes of the text, or one number for all of them"
            raise BadInput(problem, where=document.where, hint=hint)
        inner = np.broadcast_to(inner, length)
        return np.concatenate([np.zeros(before, np.float32), inner, np.repeat(inner[-1:], after)])
    if document.learn is None:
        return None
    learn = np.zeros(before + length + after, np.uint8)
    for start, stop in document.learn or ():
        if not 0 <= start <= stop <= length:
            raise BadInput(f"a span to learn, {start} to {stop}, lies outside its document of {plural(length, 'token')}")
        learn[before + start : before + stop + (after if stop == length else 0)] = 1
    return learn
