"""Tokenizers of the `tokenizers` library: a tokenizer.json, or what is converted to one.

Notable: the library encodes; decoding is done here, from the bytes that each token stands for, so that text can be
streamed. It gives what the library gives, but for bytes that are not UTF-8 in a vocabulary with byte fallback: there the
library spoils the good characters beside a bad one, and this does not. Text that looks like a special token is text unless
the caller says otherwise; tokens that a file adds without calling them special are always found, as everywhere.
"""

import codecs
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from argosy.core.errors import ArgosyError, Damaged, Unsupported
from argosy.data.tokenizers import Tokenizer, whole
from argosy.data.tokenizers.byte import byte_names
from argosy.data.tokenizers.facts import DEFAULT, Facts, damaged, parse_object

BYTES = {name: byte for byte, name in byte_names().items()}
Step = Callable[[str, bool], str | bytes]

codecs.register_error("each_byte", lambda error: ("�" * (error.end - error.start), error.end))  # pyright: ignore


class FastTokenizer(Tokenizer):
    """A tokenizer.json in memory."""

    def __init__(self, text: str, facts: Facts, path: Path):
        """text: content of the tokenizer.json. facts: what stands beside it. path: for errors.

        Raises:
            Damaged: the library refuses the content.
        """
        self._facts, self._path = facts, path
        self._text = with_added(text, facts, path)
        self._library = parse(self._text, path)
        self._library.encode_special_tokens = True  # the library's words for: names of special tokens are text
        special = self._library.get_added_tokens_decoder()
        self.hidden = frozenset(number for number, token in special.items() if token.special)
        self.vocab = max(self._library.get_vocab().values(), default=-1) + 1
        self.special = dict(facts.roles)
        self.bos, self.eos, self.pad = (self._id(facts.roles.get(f"{role}_token")) for role in ("bos", "eos", "pad"))
        self.adds_bos = self._adds_bos() if facts.adds_bos is None else facts.adds_bos and self.bos is not None
        self.chat_templates = dict(facts.templates)
        self.chat_template = facts.templates.get(DEFAULT)
        self.piece = lru_cache(maxsize=None)(self._piece)

    def encode(self, text: str, special: bool = False) -> list[int]:
        library = self._parsing if special else self._library
        return library.encode(whole(text), add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._library.encode_batch_fast([whole(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._text, encoding="utf-8")
        self._facts.save(folder, self.adds_bos)

    @cached_property
    def fingerprint(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of the content, however it is written down: order of keys, blanks and either spelling of merges."""
        content = json.loads(self._text)
        model = content["model"]
        if isinstance(model.get("merges"), list):
            model["merges"] = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
        parts = [content.get("added_tokens"), content.get("normalizer"), content.get("pre_tokenizer"), model]
        text = json.dumps([*parts, self.bos, self.eos], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _parsing(self) -> Library:
        """A second one, that finds special tokens: the switch is global to one, and threads share it."""
        return parse(self._text, self._path)

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self._library.token_to_id(text)

    def _adds_bos(self) -> bool:
        """Whether the post-processor puts `bos` in front."""
        return self.bos is not None and self._library.encode("").ids[:1] == [self.bos]

    # ---------------------------------------------------------------- decoding

    def piece(self, token: int, first: bool) -> bytes: ...  # replaced by the cached `_piece` in `__init__`

    def _piece(self, token: int, first: bool) -> bytes:
        text = self._library.id_to_token(token) if 0 <= token < self.vocab else None
        if text is None:
            return b""
        value: str | bytes = text
        for step in self._decoding[0]:
            if isinstance(value, bytes):
                break
            value = step(value, first)
        return value if isinstance(value, bytes) else value.encode()

    @property
    def strips(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._decoding[1]

    @property
    def invalid(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "each_byte" if byte_fallback in self._decoding[0] else "replace"

    @cached_property
    def _decoding(self) -> tuple[list[Step], int]:
        decoder = self._library.decoder
        return decoding(None if decoder is None else json.loads(decoder.__getstate__()), self._path)


def parse(text: str, path: Path) -> Library:
    """A tokenizer.json's content, without the cutting and padding that it may ask for.

    Raises:
        Damaged: the library refuses it.
    """
    try:
        library = Library.from_str(text)
    except (Exception, BaseException) as error:  # a panic of the library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | ArgosyError):
            raise
        raise damaged(path, str(error)[:160]) from None
    library.no_truncation()
    library.no_padding()
    return library
