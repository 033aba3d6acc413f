"""Reads text files, and texts in memory.

Files of any size are read in pieces of about 1 MiB, so memory is bounded. `encode.DocumentEncoder` makes sure that the tokens of the
pieces are those of the whole text. Text is UTF-8, unless `data.encoding` names another encoding.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.input_files import InputFile
from argosy.data.sources import Document, Source, existing
from argosy.data.sources.opening import UTF8, content_hash, modification_times, open_bytes, text_encoding

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

PIECE_BYTES = 1 << 20
BLANK_LINES = re.compile(r"\n[ \t\r]*\n\s*")


class TextFile(Source):
    """A text file. It is one document, or, if `documents` is `paragraphs`, one document for each paragraph between blank lines."""

    def __init__(
        self, path: str | Path | InputFile, *, documents: str = "whole", invalid: str = "error", encoding: str = UTF8
    ):
        self.path = existing(path)
        self.split, self.invalid, self.encoding = documents, invalid, text_encoding(encoding)
        self.size_bytes = self.disk_bytes = self.path.size_bytes
        self.files = 1

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        return cls(argument, documents=settings.documents, invalid=settings.invalid, encoding=settings.encoding)

    def documents(self) -> Iterator[Document]:
        pieces = text_pieces(self.path, self.invalid, self.encoding)
        return paragraphs(pieces, self.path) if self.split == "paragraphs" else single_document(pieces)

    def fingerprint(self) -> dict[str, Any]:
        facts = {"source.documents": self.split, "source.invalid": self.invalid} | encoded_as(self.encoding)
        return {"source": "text", "source.sha256": content_hash(self.path)} | facts

    def modified(self) -> list[int]:
        return modification_times([self.path])


def encoded_as(encoding: str) -> dict[str, Any]:
    """The encoding as part of a fingerprint. Empty for UTF-8, so that older runs resume."""
    return {} if encoding == UTF8 else {"source.encoding": encoding}


class TextsInMemory(Source):
    """Texts or Documents in memory. `data.source=memory:TEXT` is one document with that text."""

    def __init__(self, texts: Sequence[str | Document]):
        self.held = [text if isinstance(text, Document) else Document(text) for text in texts]
        self.size_bytes = sum(len(document.text.encode()) for document in self.held)

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        return cls([argument])

    def documents(self) -> Iterator[Document]:
        return iter(self.held)

    def fingerprint(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for d in self.held:
            tokens = None if d.tokens is None else [int(token) for token in d.tokens]
            digest.update(json.dumps([d.text, tokens, d.learn, d.ends]).encode())
            if d.weights is not None:
                digest.update(json.dumps(np.asarray(d.weights, float).tolist()).encode())
        return {"source": "memory", "source.sha256": digest.hexdigest()}


def single_document(pieces: Iterator[str]) -> Iterator[Document]:
    """Yields the pieces of one document. `ends` is True only for the last piece."""
    previous = next(pieces, "")
    for piece in pieces:
        yield Document(previous, ends=False)
        previous = piece
    if previous:
        yield Document(previous)


def paragraphs(pieces: Iterator[str], path: InputFile) -> Iterator[Document]:
    """Yields a document for each paragraph between blank lines, without line breaks at its beginning and end.

    Raises:
        BadInput: a paragraph is longer than 4 MiB.
    """
    rest = ""
    for piece in pieces:
        *done, rest = BLANK_LINES.split(rest + piece)
        yield from (Document(text.strip("\r\n")) for text in done if text.strip())
        if len(rest) > 4 * PIECE_BYTES:
            raise BadInput("a paragraph longer than 4 MiB", where=str(path), hint="read it with `data.documents=whole`")
    if rest.strip():
        yield Document(rest.strip("\r\n"))


def text_pieces(path: InputFile, invalid: str, encoding: str = UTF8) -> Iterator[str]:
    """Yields the text of a file in pieces of about 1 MiB, without a byte-order mark."""
    with open_bytes(path, encoding=encoding, invalid=invalid) as stream:
        rest, offset = stream.read(PIECE_BYTES), 0
        if rest.startswith(b"\xef\xbb\xbf"):
            rest, offset = rest[3:], 3
        while block := stream.read(PIECE_BYTES):
            rest += block
            at = piece_end(rest)
            yield decode(rest[:at], offset, path, invalid)
            rest, offset = rest[at:], offset + at
        if rest:
            yield decode(rest, offset, path, invalid)


def piece_end(data: bytes) -> int:
    """The index at which to end a piece: after the last line break that is followed by a non-blank, else before the last character."""
    at = len(data)
    while (at := data.rfind(b"\n", 0, at)) >= 0:
        if data[at + 1 : at + 2].strip():
            return at + 1
    first = next((i for i in range(1, 5) if data[-i] & 0xC0 != 0x80), 1)
    return len(data) - first or len(data)


def decode(data: bytes, offset: int, path: InputFile, invalid: str) -> str:
    """Decodes UTF-8.

    Args:
        offset: the offset of `data` in the decompressed file, for errors.
        invalid: what happens to bytes that are not UTF-8: `error`, or `replace` by U+FFFD.

    Raises:
        BadInput: there are bytes that are not UTF-8. The message has the offset of the first.
    """
    if invalid == "replace":
        return data.decode(errors="replace")
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        place = offset + e.start
        raise BadInput(
            f"not UTF-8: byte 0x{data[e.start]:02x} at offset {place:,}",
            where=str(path),
            hint="text in another encoding: `data.encoding=NAME` (latin-1 ...); a text with damaged bytes: `data.invalid=replace`",
        ) from None
