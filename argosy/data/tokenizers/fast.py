"""Tokenizers of the `tokenizers` library: a tokenizer.json, or another format converted to one.

The library encodes. Decoding is done here, from the bytes of each token (`decoders`), so that text can be streamed. Names of special
tokens in a text stay text unless the caller sets `special`. Added tokens that are not special are always found, as in every other
program.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Library
from tokenizers.models import WordPiece

from argosy.core.errors import Damaged
from argosy.data.tokenizers import Span, Tokenizer, well_formed
from argosy.data.tokenizers.byte import byte_names
from argosy.data.tokenizers.config import TokenizerConfig, damaged_file_error, parse_object
from argosy.data.tokenizers.decoders import decoding


class FastTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json."""

    def __init__(self, text: str, config: TokenizerConfig, path: Path):
        """Args:
            text: the content of the tokenizer.json.
            config: the configuration beside it.
            path: the file, for errors.

        Raises:
            Damaged: the library refuses the content, or an added token gets another id than the config says.
            Unsupported: the decoder is not known.
        """
        super().__init__(config)
        self._path = path
        self._library = parse(text, path)
        self._text = self._library.to_str() if add(self._library, config, path) else text
        # In the library, this means that names of special tokens are encoded as text.
        self._library.encode_special_tokens = True
        added = self._library.get_added_tokens_decoder()
        self.hidden = frozenset(number for number, token in added.items() if token.special)
        self.vocab = max(self._library.get_vocab().values(), default=-1) + 1
        self.bos, self.eos, self.pad = (self._id(f"{role}_token") for role in ("bos", "eos", "pad"))
        self.adds_bos = self.bos is not None and (self._puts_bos() if config.adds_bos is None else config.adds_bos)
        self.ending = self._ending(config.raw.get("add_eos_token"))
        decoder = self._library.decoder
        self._decoding = decoding(None if decoder is None else json.loads(decoder.__getstate__()), path)
        self.strips, self.trims, self.invalid = self._decoding[1:]
        self._pieces: dict[tuple[int, bool], bytes] = {}
        normalizer = self._library.normalizer
        self.puts_space = normalizer is not None and b'"Prepend"' in normalizer.__getstate__()
        self._libraries: dict[tuple[bool, bool], Library] = {(False, False): self._library}

    def encode(self, text: str, special: bool = False) -> list[int]:
        with refusals(self._path):
            return self._finding(special).encode(well_formed(text), add_special_tokens=False).ids

    def encode_with_offsets(
        self, text: str, special: bool = False, rest: bool = False
    ) -> tuple[list[int], list[Span]]:
        with refusals(self._path):
            encoding = self._finding(special, rest=rest and self.puts_space).encode(well_formed(text), add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_many(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        return self._batch(self._finding(special), texts)

    def encode_rest(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        return self._batch(self._finding(special, rest=self.puts_space), texts)

    def _batch(self, library: Library, texts: Sequence[str]) -> list[list[int]]:
        """Encodes all texts on all cores. The library releases the GIL."""
        with refusals(self._path):
            encodings = library.encode_batch_fast([well_formed(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def id_of(self, name: str) -> int | None:
        return self._library.token_to_id(name)

    def piece(self, token: int, first: bool) -> bytes:
        key = token, first
        if key not in self._pieces:
            name = self._library.id_to_token(token) if 0 <= token < self.vocab else None
            self._pieces[key] = b"" if name is None else self._decoding.piece(name, first)
        return self._pieces[key]

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._text, encoding="utf-8")
        # In transformers, BERT gets token types (which of two texts a token belongs to) only with its own tokenizer class.
        pieces = isinstance(self._library.model, WordPiece)
        self.config.save(folder, self.adds_bos, *(["BertTokenizer"] if pieces else []))

    @property
    def content(self) -> dict[str, Any]:
        """The parsed tokenizer.json."""
        # The library accepts some text that is not JSON.
        return parse_object(self._text, self._path)

    def identity(self) -> bytes:
        """The content that decides ids. It does not depend on the order of keys, on blanks, or on the form of merges."""
        content = self.content
        model = content["model"]
        model["merges"] = [m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges") or []]
        parts = [content.get("added_tokens"), content.get("normalizer"), content.get("pre_tokenizer"), model]
        return json.dumps([*parts, self.bos, self.eos], sort_keys=True).encode()

    @cached_property
    def missing_bytes(self) -> list[int]:
        cutting = self._library.pre_tokenizer
        if cutting is None or b'"ByteLevel"' not in cutting.__getstate__():
            return []
        return sorted(byte for byte, name in byte_names().items() if self._library.token_to_id(name) is None)

    def _finding(self, special: bool, rest: bool = False) -> Library:
        """The instance of the library for one way to encode. There are several, because the switch for special tokens applies to all
        threads that use an instance.

        Args:
            special: whether names of special tokens become those tokens.
            rest: whether the normalizer adds no space before a text.
        """
        if (special, rest) not in self._libraries:
            library = parse(without_prepend(self._text, self._path) if rest else self._text, self._path)
            library.encode_special_tokens = not special
            self._libraries[special, rest] = library
        return self._libraries[special, rest]

    def _id(self, role: str) -> int | None:
        return self._library.token_to_id(self.special[role]) if role in self.special else None

    def _ending(self, adds_eos: Any) -> tuple[int, ...]:
        """The ids that are added after every text: those of the file's post-processor, with or without `eos` if the config says so."""
        alone, framed = list[int](), list[int]()
        # A vocabulary may have neither this letter nor an unknown token.
        with suppress(Damaged), refusals(self._path):
            alone, framed = (self._library.encode("a", add_special_tokens=special).ids for special in (False, True))
        starts = [at for at in range(len(framed)) if alone and framed[at : at + len(alone)] == alone]
        after = tuple(framed[starts[0] + len(alone) :]) if starts else ()
        if adds_eos is True and self.eos is not None and self.eos not in after:
            return (*after, self.eos)
        return after if adds_eos is not False else tuple(token for token in after if token != self.eos)

    def _puts_bos(self) -> bool:
        """Whether the file's post-processor adds `bos` before a text."""
        with refusals(self._path):
            return self._library.encode("").ids[:1] == [self.bos]


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """A context manager that turns errors of the library into `Damaged`. It catches BaseException, because a hostile regular expression
    makes the library panic, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise damaged_file_error(path, " ".join(str(error).split())[:160]) from None


def parse(text: str, path: Path) -> Library:
    """Parses a tokenizer.json. Truncation and padding are switched off.

    Raises:
        Damaged: the library refuses the text.
    """
    with refusals(path):
        library = Library.from_str(text)
    library.no_truncation()
    library.no_padding()
    return library


def add(library: Library, config: TokenizerConfig, path: Path) -> bool:
    """Adds the added tokens of the config to the library, and marks the texts of its roles as special. Returns whether anything was
    added or marked.

    Raises:
        Damaged: a token gets another id than the config says.
    """
    existing = library.get_added_tokens_decoder()
    special = {token.content for token in existing.values() if token.special}
    new = {number: token for number, token in sorted(config.added.items()) if number not in existing}
    for number, entry in new.items():
        flags = {name: bool(entry.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        library.add_tokens([AddedToken(entry["content"], **flags)])
        if library.token_to_id(entry["content"]) != number:
            raise damaged_file_error(path, f"the added token {entry['content'][:40]!r} cannot have the id {number}")
    markup = [
        text for role, text in config.roles.items() if role != "unk_token"
    ]  # an unknown token in a text stays text
    markup += config.more
    roles = [text for text in markup if text not in special and library.token_to_id(text) is not None]
    library.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in dict.fromkeys(roles)])
    return bool(new or roles)


def without_prepend(text: str, path: Path) -> str:
    """The tokenizer.json without the normalizer step that adds a space before a text, which Llama 2's has, for instance."""
    content = parse_object(text, path)
    normalizer = content["normalizer"]
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    remaining = [step for step in steps if step["type"] != "Prepend"]
    content["normalizer"] = {"type": "Sequence", "normalizers": remaining} if remaining else None
    return json.dumps(content, ensure_ascii=False)
