"""Tokenizers of SentencePiece models: Llama 1 and 2, Mistral, Gemma, T5 (library `sentencepiece`).

The library encodes. Decoding is done here, piece by piece, and gives the same text. The library always finds user-defined pieces in a
text, but never control pieces (`<s>`). So a rendered chat is split at the names of special tokens first. Each part after a special
token begins with a space again, as the models were trained, unless the tokenizer's config says `legacy: false`
(huggingface/transformers#24565).

Most models add a space before every text. A part of a longer text must not get one, so a second copy of the model, without this space,
encodes parts.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from argosy.core.errors import Unsupported
from argosy.data.tokenizers import Span, Tokenizer, well_formed
from argosy.data.tokenizers.config import TokenizerConfig, damaged_file_error
from argosy.data.tokenizers.decoders import EACH_BYTE
from argosy.data.tokenizers.proto import (
    BYTE,
    CONTROL,
    NO_PREFIX,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    fields,
    read_model,
)

SPACE = "\u2581"
# Classes on the Hub that add `bos` by default.
BEGINNING = ("Llama", "CodeLlama", "Gemma")


class PieceTokenizer(Tokenizer):
    """The tokenizer of a SentencePiece model."""

    invalid = EACH_BYTE

    def __init__(self, data: bytes, config: TokenizerConfig, path: Path):
        """Args:
            data: the bytes of the model file.
            config: the configuration beside it.
            path: the file, for errors.

        Raises:
            Damaged: the file is no SentencePiece model.
            Unsupported: the model changes text after decoding.
        """
        self._data, self._path = data, path
        self.model = read_model(data, path)
        if self.model.denormalizes:
            raise Unsupported("a SentencePiece model with a denormalizer", where=f"in {path}")
        self._library = _processor(data, path)
        super().__init__(with_roles(config, self._library))
        size = len(self.model.pieces)
        self._added = {number: str(entry["content"]) for number, entry in config.added.items() if number >= size}
        self.vocab = max([size, *(number + 1 for number in self._added)])
        self.lasting, self.puts_space = self.model.trims, self.model.prefix or self.model.trims
        self.unknown = self._library.unk_id()
        self.bos, self.eos, self.pad = (self._id(f"{role}_token") for role in ("bos", "eos", "pad"))
        self.adds_bos = self.bos is not None and (self._begins(config) if config.adds_bos is None else config.adds_bos)
        self.ending = (self.eos,) if config.raw.get("add_eos_token") is True and self.eos is not None else ()
        self.hidden = frozenset(self._special.values()) - {
            n for n, t in self._added.items() if not is_special(config, n, t)
        }
        self._legacy = config.raw.get("legacy", True) is not False

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self._encoded(well_formed(text), special, self._library)

    def _encoded(self, text: str, special: bool, first: SentencePieceProcessor) -> list[int]:
        ids: list[int] = []
        for token, library, part in self._parts(text, special, first):
            ids += library.encode(part) if token is None else [token]
        return ids

    def _parts(
        self, text: str, special: bool, first: SentencePieceProcessor
    ) -> Iterator[tuple[int | None, SentencePieceProcessor, str]]:
        """Splits a text at special tokens. Yields (id of a special token or None, processor, text) for each part. The processor encodes
        the parts whose id is None.

        Args:
            first: the processor for the text before the first special token.
        """
        parts = self._splitting.split(text) if special and self._special else [text]
        for place, part in enumerate(parts):
            if part:
                library = first if not place else self._library if self._legacy else self._without_space
                yield (self._special.get(part) if len(parts) > 1 else None), library, part

    def encode_with_offsets(
        self, text: str, special: bool = False, rest: bool = False
    ) -> tuple[list[int], list[Span]]:
        ids, spans, at = [], [], 0
        first = self._continuing(text) if rest else self._library
        for token, library, part in self._parts(well_formed(text), special, first):
            if token is not None:
                pieces = [(token, 0, len(part))]
            else:
                pieces = _aligned(library.encode(part, out_type="serialized_proto"), part, self._path)
            ids += [number for number, _, _ in pieces]
            spans += [(at + begin, at + end) for _, begin, end in pieces]
            at += len(part)
        return ids, spans

    def encode_many(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        if special:
            return [self.encode(text, special) for text in texts]
        return self._library.encode([well_formed(text) for text in texts])  # on all cores

    def encode_rest(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        libraries = [self._continuing(text) for text in texts]
        if not special and len(set(map(id, libraries))) == 1:
            return libraries[0].encode([well_formed(text) for text in texts])  # on all cores
        return [self._encoded(well_formed(text), special, library) for text, library in zip(texts, libraries)]

    def blanks(self, special: bool) -> str:
        blanks = super().blanks(special)
        # A normalizer may turn line breaks into spaces.
        return blanks if " " in blanks else ""

    def _continuing(self, text: str) -> SentencePieceProcessor:
        """The processor for a text that continues another one. If the model trims the blank at the beginning of the text, the processor
        that adds a space restores it. Otherwise, the processor adds no space."""
        if self.model.trims and not self._library.encode(text[:1]):
            return self._with_space
        return self._without_space

    def piece(self, token: int, first: bool) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        if not 0 <= token < len(self.model.pieces):
            return b""
        text, kind = self.model.pieces[token]
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        if kind == CONTROL:
            return text.encode()
        if kind == UNKNOWN:
            return self.model.unknown.encode()
        if first and (self.model.prefix or self.model.trims):
            text = text.removeprefix(SPACE)
        return text.replace(SPACE, " ").encode()

    def scored_pieces(self) -> list[tuple[str, int, float]]:
        """The text, kind and score of each id, including added tokens. Unused ids have no text."""
        pieces = [(text, kind, score) for (text, kind), score in zip(self.model.pieces, self.model.scores, strict=True)]
        for number in range(len(pieces), self.vocab):
            kind = UNUSED if number not in self._added else CONTROL if number in self.hidden else USER_DEFINED
            pieces.append((self._added.get(number, ""), kind, 0.0))
        return pieces

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.model").write_bytes(self._data)
        self.config.save(folder, self.adds_bos, "LlamaTokenizer")

    def identity(self) -> bytes:
        """The model's bytes and the added tokens."""
        return self._data + json.dumps([sorted(self._added.items()), self.bos, self.eos]).encode()

    @cached_property
    def _special(self) -> dict[str, int]:
        """The ids of special tokens by their text: control pieces and added tokens."""
        control = {text: number for number, (text, kind) in enumerate(self.model.pieces) if kind == CONTROL and text}
        return control | {text: number for number, text in self._added.items()}

    @cached_property
    def _splitting(self) -> re.Pattern[str]:
        longest = sorted(self._special, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest))})")

    @cached_property
    def _without_space(self) -> SentencePieceProcessor:
        """A copy of the model that adds no space before a text."""
        return _processor(self._data + NO_PREFIX, self._path)

    @cached_property
    def _with_space(self) -> SentencePieceProcessor:
        """A copy of the model that adds a space before a text."""
        return _processor(self._data + PREFIX, self._path)

    def _id(self, role: str) -> int | None:
        text = self.special.get(role)
        numbers = {text: number for number, (text, _) in enumerate(self.model.pieces)} | {
            text: number for number, text in self._added.items()
        }
        return numbers.get(text) if text is not None else None

    def _begins(self, config: TokenizerConfig) -> bool:
        """Whether texts begin with `bos` if no file says so: as the tokenizer's class does, or else for BPE (Llama), but not for
        unigram models (T5)."""
        kind = config.raw.get("tokenizer_class")
        return kind.startswith(BEGINNING) if isinstance(kind, str) else self.model.bpe


def _aligned(answer: bytes, text: str, path: Path) -> list[tuple[int, int, int]]:
    """The (id, begin, end) of each piece in the library's answer (sentencepiece.proto). Offsets in bytes are converted to
    characters."""
    characters = [place for place, character in enumerate(text) for _ in character.encode()] + [len(text)]
    pieces = [dict(fields(bytes(value), path)) for number, value in fields(answer, path) if number == 2]
    return [(int(p.get(2, 0)), characters[int(p.get(4, 0))], characters[int(p.get(5, 0))]) for p in pieces]


def is_special(config: TokenizerConfig, number: int, text: str) -> bool:
    """Whether an added token is marked as special or has a role."""
    return bool(config.added[number].get("special")) or text in config.roles.values()


def _processor(data: bytes, path: Path) -> SentencePieceProcessor:
    """Loads a model into the library.

    Raises:
        Damaged: the library refuses the model.
    """
    library = SentencePieceProcessor()
    try:
        library.load_from_serialized_proto(data)
    except RuntimeError as error:
        problem = re.sub(r"^\w+: (src/\S+\(\d+\) )?", "", str(error))  # without the name of its source file
        raise damaged_file_error(path, problem.strip("[] ")[:160] or "it is not a SentencePiece model") from None
    return library


def with_roles(config: TokenizerConfig, library: SentencePieceProcessor) -> TokenizerConfig:
    """The config, in which missing roles have the names that the model gives them."""
    ids = {"bos_token": library.bos_id(), "eos_token": library.eos_id(), "pad_token": library.pad_id()}
    roles = {role: library.id_to_piece(number) for role, number in ids.items() if number >= 0}
    return config.filled(roles)
