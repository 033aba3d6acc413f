"""The interface of every tokenizer, and the decoding of ids to text: ids to bytes, then bytes to characters.

Decoding and streaming share one implementation. Each id stands for some bytes, and an incremental UTF-8 decoder turns them into
characters. A character that is split over several tokens appears when it is complete. The parts of a stream always join to `decode` of
all ids.

A long text may be encoded in parts, in parallel or while it is read, with the same tokens. `cut_pattern` finds positions that no token
can span. The file formats are the other files of this folder, and `data.tokenizers.load` chooses among them.
"""

import codecs
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from argosy.data.tokenizers.config import DEFAULT, TokenizerConfig

Span = tuple[int, int]


class TextStream:
    """Decodes ids one at a time. Never returns part of a character.

    Args:
        skip_special: whether special tokens decode to nothing.
        marks: token id -> text that stands for this token in the output. A mark of one character that comes from ordinary tokens
            becomes U+FFFD.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool = True, marks: Mapping[int, str] | None = None):
        self._tokenizer, self._skip_special, self._marks = tokenizer, skip_special, marks or {}
        self._forged = {ord(mark): "\ufffd" for mark in self._marks.values() if len(mark) == 1}
        self._text = codecs.getincrementaldecoder("utf-8")(tokenizer.invalid)
        self._first, self._strip, self._held = True, tokenizer.strips, ""

    def begun(self) -> None:
        """Tells the stream that its first token continues an earlier text, so that the token keeps its leading space."""
        self._first, self._strip = False, 0

    def push(self, token: int) -> str:
        """Decodes the next token. Returns the characters that it completes, which may be none."""
        if (mark := self._marks.get(token)) is not None:
            cut = self._stripped(self._text.decode(b"", True))
            self._text.reset()
            return self._held_back(cut + mark)
        if self._skip_special and token in self._tokenizer.hidden:
            return ""
        piece = self._tokenizer.piece(token, self._first)
        self._first = self._first and self._tokenizer.lasting and not piece
        text = self._text.decode(piece)
        return self._held_back(self._stripped(text.translate(self._forged) if self._forged else text))

    def end(self) -> str:
        """Ends the stream. Returns the rest of the text, with U+FFFD for an incomplete character."""
        text = self._held + self._stripped(self._text.decode(b"", True))
        self._text.reset()
        return text[: max(len(text.rstrip(" ")), len(text) - self._tokenizer.trims)]

    def _held_back(self, text: str) -> str:
        """Buffers trailing spaces that would be removed if the text ended here, and returns the text before them."""
        if not self._tokenizer.trims:
            return text
        text = self._held + text
        self._held = text[len(text.rstrip(" ")) :]
        return text[: len(text) - len(self._held)]

    def _stripped(self, text: str) -> str:
        """The text without the leading spaces that encoding has added."""
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class Tokenizer(ABC):
    """Encodes text to ids, and decodes ids to text. Encoding never adds a special token.

    Attributes:
        vocab: the size of the vocabulary. Every id is below it. A model's padded vocabulary may be larger.
        bos, eos, pad: the ids of the beginning-of-sequence, end-of-sequence and padding tokens, or None.
        adds_bos: whether the model was trained with `bos` before every text.
        ending: the ids that the tokenizer's own files add after every text that is embedded or scored, such as `eos`.
        special: the texts of special tokens by role (`bos_token` ...), for chat templates.
        chat_template: the default chat template, in Jinja, or None.
        chat_templates: all chat templates, by name.
        hidden: the ids of special tokens, which decode to nothing unless `skip_special` is False.
        strips, trims: the number of spaces that are removed from the beginning and from the end of a decoded text.
        lasting: whether, after a token that decodes to nothing, the next token still counts as the first of the text.
        invalid: the name of the codecs error handler for bytes that are not UTF-8.
        unknown: the id of the token for text outside the vocabulary, or None. Decoding does not restore that text.
        puts_space: whether encoding adds a space before a text. The rest of a longer text must then be encoded by `encode_rest`.
    """

    vocab: int
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    adds_bos: bool = False
    ending: tuple[int, ...] = ()
    strips: int = 0
    trims: int = 0
    lasting: bool = False
    invalid: str = "replace"
    hidden: frozenset[int] = frozenset()
    puts_space: bool = False
    unknown: int | None = None

    def __init__(self, config: TokenizerConfig):
        self.config = config
        self.special = dict(config.roles)
        self.chat_templates = dict(config.templates)
        self.chat_template = config.templates.get(DEFAULT)

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of `identity`, in hex."""
        return hashlib.sha256(self.identity()).hexdigest()

    @cached_property
    def missing_bytes(self) -> list[int]:
        """The bytes that no token stands for. Encoding drops them without an error."""
        return []

    @abstractmethod
    def identity(self) -> bytes:
        """Everything that decides the ids of a text, as bytes."""

    @abstractmethod
    def encode(self, text: str, special: bool = False) -> list[int]:
        """Encodes a text.

        Args:
            special: whether names of special tokens in the text become those tokens, as rendered chats need. If not, they are ordinary
                text.
        """

    @abstractmethod
    def encode_with_offsets(
        self, text: str, special: bool = False, rest: bool = False
    ) -> tuple[list[int], list[Span]]:
        """Encodes a text. Returns the ids, and the half-open span of characters that each token stands for.

        Tokens for single bytes of one character have the same span. A token that stands for no character has an empty span.

        Args:
            special: as in `encode`.
            rest: whether the text continues a longer one, so that no space is added before it.
        """

    @abstractmethod
    def piece(self, token: int, first: bool) -> bytes:
        """The bytes of a token; empty for ids outside the vocabulary. `first`: whether it is the first token of a text, in which some
        tokens lose their leading space."""

    def id_of(self, name: str) -> int | None:
        """The id of the token with this name in the vocabulary; None: there is no such token."""
        ids = self.encode(name, special=True)
        return ids[0] if len(ids) == 1 and self.piece(ids[0], True) == name.encode() else None

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Writes files to a folder from which `find_tokenizer` loads an equal tokenizer."""

    def encode_many(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Encodes each text, in parallel if the library can."""
        return [self.encode(text, special) for text in texts]

    def encode_rest(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Encodes texts that are parts of longer texts. Each begins where `cut_pattern` matches."""
        return self.encode_many(texts, special)

    def cut_pattern(self, special: bool = False) -> re.Pattern[str] | None:
        """A pattern that matches where a text can be cut: the tokens of the left part, followed by those of the right part by
        `encode_rest`, are the tokens of the whole text. None: no such positions are known.

        The positions are blanks after a letter or digit. Every known way to split text into words begins a new word there. If text is
        not split into words (SentencePiece), no token may span such a position. So a blank is used only if the vocabulary has no token
        with a letter or digit before this blank, and if a few sample texts give the same tokens in parts.
        """
        if special not in self._cut_patterns:
            blanks = "".join(blank for blank in self.blanks(special) if self._splits_at(blank, special))
            self._cut_patterns[special] = re.compile(rf"(?<=[^\W_])[{blanks}]") if blanks else None
        return self._cut_patterns[special]

    def blanks(self, special: bool) -> str:
        """The blanks of " \\n" that no token has after a letter or digit. `special`: whether special tokens are checked too."""
        ids = (token for token in range(self.vocab) if token != self.unknown and (special or token not in self.hidden))
        pieces = [self.piece(token, False).decode(errors="replace") for token in ids]
        return "".join(blank for blank in " \n" if not any(re.search(rf"[^\W_]{blank}", text) for text in pieces))

    def _splits_at(self, blank: str, special: bool) -> bool:
        rests = [f"{blank}b", f"{blank}{blank} b", f"{blank}\n12", f"{blank}.", f"{blank}日 a"]
        for head in ("a", "in 12", "\n日本"):
            parts = self.encode_rest(rests, special)
            if any(
                self.encode(head + rest, special) != self.encode(head, special) + ids for rest, ids in zip(rests, parts)
            ):
                return False
        return True

    @cached_property
    def _cut_patterns(self) -> dict[bool, re.Pattern[str] | None]:
        return {}

    @cached_property
    def special_names(self) -> re.Pattern[str] | None:
        """A pattern that finds the names of special tokens in a text; None: there are no special tokens."""
        names = {self.piece(token, False).decode(errors="ignore").strip() for token in self.hidden}
        longest = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest))) if longest else None

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decodes ids. Bytes that are not UTF-8 become U+FFFD. `skip_special`: whether special tokens are left out."""
        stream = self.stream(skip_special)
        return "".join([stream.push(token) for token in ids]) + stream.end()

    def stream(self, skip_special: bool = True, marks: Mapping[int, str] | None = None) -> TextStream:
        """A decoder for ids that arrive one by one. Without `marks`, the parts join to `decode` of all ids."""
        return TextStream(self, skip_special, marks)


def well_formed(text: str) -> str:
    """Replaces lone surrogates by U+FFFD. JSON can encode lone surrogates, and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
