"""What every tokenizer does, and how ids become text: bytes first, characters after.

Notable: decoding and streaming are one machine. Each id stands for some bytes, and an incremental UTF-8 decoder turns
them into characters, so that a character split over tokens appears once it is whole, and the parts of a stream always
join to `decode` of all. Knows no file format: each kind is a file of this folder, `data.tokenize` chooses among them.
"""

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from argosy.data.tokenizers.facts import DEFAULT, Facts

Span = tuple[int, int]


class Stream:
    """Ids in, text out, one at a time; never half a character."""

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._text = codecs.getincrementaldecoder("utf-8")(tokenizer.invalid)
        self._first, self._strip, self._held = True, tokenizer.strips, ""

    def push(self, token: int) -> str:
        """The characters that this token completes, perhaps none."""
        if self._skip_special and token in self._tokenizer.hidden:
            return ""
        piece = self._tokenizer.piece(token, self._first)
        self._first = self._first and self._tokenizer.lasting and not piece
        return self._held_back(self._stripped(self._text.decode(piece)))

    def end(self) -> str:
        """What was left: U+FFFD for a character that never became whole."""
        text = self._held + self._stripped(self._text.decode(b"", True))
        self._text.reset()
        return text[: max(len(text.rstrip(" ")), len(text) - self._tokenizer.trims)]

    def _held_back(self, text: str) -> str:
        """Without the spaces that the text as a whole must not end with, should it end here."""
        if not self._tokenizer.trims:
            return text
        text = self._held + text
        self._held = text[len(text.rstrip(" ")) :]
        return text[: len(text) - len(self._held)]

    def _stripped(self, text: str) -> str:
        """Without the spaces that the text as a whole must not begin with."""
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class Tokenizer(ABC):
    """Text to ids and back. No special token is ever added.

    Attributes:
        vocab: every id is below it; a model's padded vocabulary may be larger.
        bos, eos, pad: ids, or None.
        adds_bos: the model was trained with `bos` in front of every text.
        special: the texts of special tokens by their role (`bos_token` ...), for chat templates.
        chat_template: Jinja, or None. chat_templates: all of them by name.
        hidden: ids that decode to nothing unless asked for.
        strips, trims: so many spaces are taken off the beginning and the end of a decoded text.
        lasting: a token that decodes to nothing leaves the next one the first.
        invalid: codecs error handler of bytes that are not UTF-8.
    """

    vocab: int
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    adds_bos: bool = False
    strips: int = 0
    trims: int = 0
    lasting: bool = False
    invalid: str = "replace"
    hidden: frozenset[int] = frozenset()

    def __init__(self, facts: Facts):
        self.facts = facts
        self.special = dict(facts.roles)
        self.chat_templates = dict(facts.templates)
        self.chat_template = facts.templates.get(DEFAULT)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of all that decides ids, in hex."""
        return hashlib.sha256(self.identity()).hexdigest()

    @cached_property
    def missing_bytes(self) -> list[int]:
        """Those that no token stands for, so that encoding loses them without a word."""
        return []

    @abstractmethod
    def identity(self) -> bytes:
        """All that decides ids."""

    @abstractmethod
    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text. special: names of special tokens in it become those tokens, as rendered chats need;
        otherwise they are text like any other."""

    @abstractmethod
    def encode_with_offsets(self, text: str, special: bool = False) -> tuple[list[int], list[Span]]:
        """`encode`, and which characters each token stands for: begin and end. Tokens that share a character, as its bytes
        do, have the same; one that stands for none has an empty span."""

    @abstractmethod
    def piece(self, token: int, first: bool) -> bytes:
        """What a token stands for; `first` in a text, some lose their space. Unknown ids stand for nothing."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Writes files from which `find_tokenizer` makes an equal one."""

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of some ids; U+FFFD for bytes that are not UTF-8."""
        stream = self.stream(skip_special)
        return "".join([stream.push(token) for token in ids]) + stream.end()

    def stream(self, skip_special: bool = True) -> Stream:
        """For text that arrives token by token; its parts join to `decode` of all."""
        return Stream(self, skip_special)


def whole(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
