"""The interface of every tokenizer, and how ids become text: bytes first, characters after.

Decoding and streaming share one implementation. Each id stands for some bytes, and an incremental UTF-8 decoder turns them
into characters: a character split over several tokens appears once it is complete, and the parts of a stream always join
to `decode` of all ids.

A long text may be encoded in parts, in parallel or as it is read, without changing a token: `cut_pattern` finds places where
no token can span. The file formats are the other files of this folder; `data.tokenizers.load` chooses among them.
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
    """Turns ids into text one at a time, and never gives half a character.

    Args:
        marks: characters that stand for some tokens. The same ones spelled in ordinary tokens become U+FFFD.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool = True, marks: Mapping[int, str] | None = None):
        self._tokenizer, self._skip_special, self._marks = tokenizer, skip_special, marks or {}
        self._forged = {ord(mark): "\ufffd" for mark in self._marks.values() if len(mark) == 1}
        self._text = codecs.getincrementaldecoder("utf-8")(tokenizer.invalid)
        self._first, self._strip, self._held = True, tokenizer.strips, ""

    def begun(self) -> None:
        """The next token continues a text, though no text has come yet: it keeps its leading space."""
        self._first, self._strip = False, 0

    def push(self, token: int) -> str:
        """The characters that this token completes, perhaps none."""
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
        """The rest of the text: U+FFFD for a character that was never completed."""
        text = self._held + self._stripped(self._text.decode(b"", True))
        self._text.reset()
        return text[: max(len(text.rstrip(" ")), len(text) - self._tokenizer.trims)]

    def _held_back(self, text: str) -> str:
        """The text without trailing spaces that would be removed if it ended here."""
        if not self._tokenizer.trims:
            return text
        text = self._held + text
        self._held = text[len(text.rstrip(" ")) :]
        return text[: len(text) - len(self._held)]

    def _stripped(self, text: str) -> str:
        """The text without leading spaces that encoding had put there."""
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class Tokenizer(ABC):
    """Text to ids and back. Encoding never adds a special token.

    Attributes:
        vocab: every id is below it; a model's padded vocabulary may be larger.
        bos, eos, pad: ids, or None.
        adds_bos: the model was trained with `bos` in front of every text.
        ending: ids that the tokenizer's own files put after every text that is embedded or scored, such as `eos`.
        special: the texts of special tokens by their role (`bos_token` ...), for chat templates.
        chat_template: the default template in Jinja, or None.
        chat_templates: all templates by name.
        hidden: ids of special tokens, which decode to nothing unless asked for.
        strips, trims: number of spaces taken off the beginning and the end of a decoded text.
        lasting: after a token that decodes to nothing, the next one still counts as the first.
        invalid: name of the codecs error handler for bytes that are not UTF-8.
        unknown: id for text without a token; decoding it does not give that text. None if not known.
        puts_space: encoding adds a space in front of a text, so the rest of a longer text must be encoded differently.
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
        """sha256 of everything that decides ids, in hex."""
        return hashlib.sha256(self.identity()).hexdigest()

    @cached_property
    def missing_bytes(self) -> list[int]:
        """Bytes that no token stands for: encoding drops them without an error."""
        return []

    @abstractmethod
    def identity(self) -> bytes:
        """Everything that decides ids."""

    @abstractmethod
    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text. special: names of special tokens in it become those tokens, as rendered chats need;
        otherwise they are ordinary text."""

    @abstractmethod
    def encode_with_offsets(
        self, text: str, special: bool = False, rest: bool = False
    ) -> tuple[list[int], list[Span]]:
        """`encode`, and the half-open span of characters that each token stands for. Tokens that are bytes of one character
        have the same span; a token that stands for no character has an empty one. rest: the text continues a longer one, so
        no space is put in front of it."""

    @abstractmethod
    def piece(self, token: int, first: bool) -> bytes:
        """The bytes of a token; some lose their space where they come `first`. Unknown ids have none."""

    def id_of(self, name: str) -> int | None:
        """The id of the token that is called so in the vocabulary; None if there is none."""
        ids = self.encode(name, special=True)
        return ids[0] if len(ids) == 1 and self.piece(ids[0], True) == name.encode() else None

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Writes files from which `find_tokenizer` makes an equal tokenizer."""

    def encode_many(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """`encode` of each text, in parallel where the library can."""
        return [self.encode(text, special) for text in texts]

    def encode_rest(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """`encode_many` of texts that continue a longer one, each beginning where `cut_pattern` matches."""
        return self.encode_many(texts, special)

    def cut_pattern(self, special: bool = False) -> re.Pattern[str] | None:
        """Matches at places where a text can be cut: the tokens of the left part, then those of the right part by `encode_rest`,
        are the tokens of the whole. None where no such place is known.

        The places are blanks after a letter or digit. Every known way to split text into words begins a new one there; and
        where text is not split (SentencePiece), no token spans the place as long as the vocabulary has none with a letter
        or digit before that blank, which is looked up, as is that a few texts encode alike in parts.
        """
        if special not in self._cut_patterns:
            blanks = "".join(blank for blank in self.blanks(special) if self._splits_at(blank, special))
            self._cut_patterns[special] = re.compile(rf"(?<=[^\W_])[{blanks}]") if blanks else None
        return self._cut_patterns[special]

    def blanks(self, special: bool) -> str:
        """The space and the line break, if no token has them after a letter or digit. special: special tokens count too."""
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
        """Finds the names of special tokens in a text. None where there are none."""
        names = {self.piece(token, False).decode(errors="ignore").strip() for token in self.hidden}
        longest = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest))) if longest else None

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of some ids; U+FFFD for bytes that are not UTF-8."""
        stream = self.stream(skip_special)
        return "".join([stream.push(token) for token in ids]) + stream.end()

    def stream(self, skip_special: bool = True, marks: Mapping[int, str] | None = None) -> TextStream:
        """For ids that arrive one by one; without `marks`, the parts join to `decode` of all."""
        return TextStream(self, skip_special, marks)


def well_formed(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
