"""Text files, JSON lines (text or records), folders of both, and texts in memory; `.gz` is read as what it wraps.

Files of any size are read in pieces of about 1 MiB, so memory is bounded. How a text in pieces gets the tokens of the whole
text is the business of `encode.DocumentEncoder`. Text must be UTF-8.
"""

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast

from argosy.core.errors import BadInput, Damaged
from argosy.core.formats.recognize import HEAD_BYTES, refuse_binary
from argosy.data.sources import Document, Source, is_prepared, missing, reader_of, refuse_table
from argosy.data.sources.records import RecordReader

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

PIECE_BYTES = 1 << 20
# Longer lines are refused: such a file is not JSONL.
LINE_BYTES = 64 << 20
# A larger JSON array is refused, since all of it is read at once.
ARRAY_BYTES = 1 << 30
# For larger files only 64 samples are hashed, so that a terabyte is not read twice.
HASHED_BYTES = 64 << 20
FOLDER_SUFFIXES = (".txt", ".text", ".md", ".rst", ".jsonl", ".ndjson")
BLANK_LINES = re.compile(r"\n[ \t\r]*\n\s*")


class TextFile(Source):
    """A file of text: one document, or one for each paragraph between blank lines."""

    def __init__(self, path: str | Path, *, documents: str = "whole", invalid: str = "error"):
        self.path = existing(path)
        self.split, self.invalid = documents, invalid
        self.size_bytes = self.disk_bytes = self.path.stat().st_size
        self.files = 1

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        return cls(argument, documents=settings.documents, invalid=settings.invalid)

    def documents(self) -> Iterator[Document]:
        pieces = text_pieces(self.path, self.invalid)
        return paragraphs(pieces, self.path) if self.split == "paragraphs" else one_document(pieces)

    def fingerprint(self) -> dict[str, Any]:
        how = {"source.documents": self.split, "source.invalid": self.invalid}
        return {"source": "text", "source.sha256": content_hash(self.path)} | how

    def modified(self) -> list[int]:
        return modified([self.path])


class JsonLines(Source):
    """One JSON object a line, or all of them in one array (`.json`): text, or records to fine-tune on."""

    has_columns = True

    def __init__(
        self, path: str | Path, *, invalid: str = "error", format: str = "auto", columns: Mapping[str, str] | None = None
    ):
        """format, columns: as `records.RecordReader`."""
        self.path = existing(path)
        self.invalid, self.asked, self.columns = invalid, format, dict(columns or {})
        self.reader = RecordReader(format, columns)
        self.size_bytes = self.disk_bytes = self.path.stat().st_size
        self.files = 1

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        return cls(argument, invalid=settings.invalid, format=settings.format, columns=settings.columns)

    @property
    def format(self) -> str:
        if self.reader.format is None:
            next(self.documents(), None)
        return self.reader.format or "text"

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(self.reader.ignored)

    def documents(self) -> Iterator[Document]:
        if self.path.name.removesuffix(".gz").endswith(".json"):
            for number, row in enumerate(array_of(self.path, self.invalid)):
                yield self.document(json.dumps(row, ensure_ascii=False), f"{self.path}, record {number}")
            return
        with _opened(self.path) as stream:
            offset = number = 0
            while line := stream.readline(LINE_BYTES + 1):
                number += 1
                if len(line) > LINE_BYTES:
                    raise BadInput(f"a line of JSON longer than {LINE_BYTES >> 20} MiB", where=f"{self.path}:{number}")
                text = decode(line, offset, self.path, self.invalid)
                text = text.removeprefix("\ufeff") if number == 1 else text
                if text.strip():
                    yield self.document(text, f"{self.path}:{number}")
                offset += len(line)

    def document(self, line: str, where: str) -> Document:
        if not self.reader.begun:
            self.reader.row(line, where)  # decides the format
        if self.reader.format == "text":
            return Document(self.reader.text(line, where))
        record = self.reader.record(line, where)
        return Document(record.text, record=record)

    def fingerprint(self) -> dict[str, Any]:
        made = {"source": "jsonl", "source.sha256": content_hash(self.path), "source.invalid": self.invalid}
        return made | read_as(self.format, self.columns)

    def modified(self) -> list[int]:
        return modified([self.path])


def array_of(path: Path, invalid: str) -> list[Any]:
    """The values of a file that is one JSON array.

    Raises:
        BadInput: it is too large to be read at once, or is no JSON array.
    """
    with _opened(path) as stream:
        data = stream.read(ARRAY_BYTES + 1)
    lines = "one object a line (.jsonl) is read in pieces: `jq -c '.[]' FILE.json > FILE.jsonl`"
    if len(data) > ARRAY_BYTES:
        raise BadInput(f"a JSON array of more than {ARRAY_BYTES >> 20} MiB", where=str(path), hint=lines)
    try:
        found = json.loads(decode(data, 0, path, invalid).removeprefix("\ufeff"))
    except (ValueError, RecursionError) as e:
        hint = f"one object a line ends in .jsonl; `data.source=text:{path}` reads the file as text"
        raise BadInput(f"not JSON: {e}"[:200], where=str(path), hint=hint) from None
    if not isinstance(found, list):
        raise BadInput("a .json file must be an array of objects", where=str(path), hint=lines)
    return found


def read_as(format: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """How records are read, for a fingerprint. Nothing for text in the column `text`, so that older runs resume."""
    made = {"source.format": format} if format != "text" else {}
    return made | ({"source.columns": json.dumps(dict(columns), sort_keys=True)} if columns else {})


class TextFolder(Source):
    """Every text and JSONL file below a folder, or whatever a glob matches, in the order of their paths."""

    def __init__(
        self,
        where: str | Path,
        *,
        documents: str = "whole",
        invalid: str = "error",
        format: str = "auto",
        columns: Mapping[str, str] | None = None,
    ):
        root = Path(where).expanduser()
        matched = readable_below(root) if root.is_dir() else map(Path, sorted(glob(str(root), recursive=True)))
        self.paths = [path for path in matched if path.is_file()]
        for path in self.paths:
            refuse_table(path)
        if not self.paths:
            if is_prepared(root.parent):
                what = f"`{where}` is part of a prepared corpus"
                raise BadInput(what, hint=f"name the whole of it: `data.source={root.parent}`")
            searched = f"a folder is searched for {' '.join(FOLDER_SUFFIXES)}, also with .gz"
            raise BadInput(f"no files to read: `{where}`", hint=searched)
        self.root = root if root.is_dir() else Path(os.path.commonpath([path.parent for path in self.paths]))
        self.split, self.invalid, self.asked, self.columns = documents, invalid, format, dict(columns or {})
        self.size_bytes = self.disk_bytes = sum(path.stat().st_size for path in self.paths)
        self.files = len(self.paths)
        self.lines = [path for path in self.paths if reader_of(str(path)) == "jsonl"]
        self.has_columns = bool(self.lines)
        self.unread: dict[str, None] = {}

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        how: dict[str, Any] = {"documents": settings.documents, "invalid": settings.invalid}
        return cls(argument, **how, format=settings.format, columns=settings.columns)

    @cached_property
    def format(self) -> str:  # type: ignore[override]
        """The format of the first JSONL file; all others must have it."""
        found = JsonLines(self.lines[0], invalid=self.invalid, format=self.asked, columns=self.columns).format if self.lines else "text"
        if found != "text" and (texts := [path for path in self.paths if path not in self.lines]):
            what = f"a text file among files of `{found}` records"
            raise BadInput(what, where=str(texts[0]), hint=f"name the JSONL files alone: `data.source={self.root}/*.jsonl`")
        return found

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(self.unread)

    def documents(self) -> Iterator[Document]:
        for path in self.paths:
            source = self.reader(path)
            yield from source.documents()
            self.unread |= dict.fromkeys(source.ignored)

    def reader(self, path: Path) -> Source:
        if path in self.lines:
            return JsonLines(path, invalid=self.invalid, format=self.format, columns=self.columns)
        return TextFile(path, documents=self.split, invalid=self.invalid)

    def fingerprint(self) -> dict[str, Any]:
        """Paths below the folder count, because they set the order; the folder's own place does not."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(f"{path.relative_to(self.root).as_posix()}\0{content_hash(path)}\n".encode())
        how = {"source.files": len(self.paths), "source.documents": self.split, "source.invalid": self.invalid}
        how |= read_as(self.format, self.columns)
        return {"source": "folder", "source.sha256": digest.hexdigest()} | how

    def modified(self) -> list[int]:
        return modified(self.paths)


class TextsInMemory(Source):
    """Texts or Documents that the caller holds in memory. `memory:TEXT` is one document of that text."""

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
                digest.update(json.dumps([float(weight) for weight in d.weights]).encode())
        return {"source": "memory", "source.sha256": digest.hexdigest()}


def one_document(pieces: Iterator[str]) -> Iterator[Document]:
    """One document, in its pieces."""
    held = next(pieces, "")
    for piece in pieces:
        yield Document(held, ends=False)
        held = piece
    if held:
        yield Document(held)


def paragraphs(pieces: Iterator[str], path: Path) -> Iterator[Document]:
    """A document for each paragraph between blank lines, without line breaks at its ends."""
    rest = ""
    for piece in pieces:
        *done, rest = BLANK_LINES.split(rest + piece)
        yield from (Document(text.strip("\r\n")) for text in done if text.strip())
        if len(rest) > 4 * PIECE_BYTES:
            raise BadInput("a paragraph longer than 4 MiB", where=str(path), hint="read it with `data.documents=whole`")
    if rest.strip():
        yield Document(rest.strip("\r\n"))


def text_pieces(path: Path, invalid: str) -> Iterator[str]:
    """The file's text, about 1 MiB at a time, without a byte-order mark."""
    with _opened(path) as stream:
        rest, offset = stream.read(PIECE_BYTES), 0
        if rest.startswith(b"\xef\xbb\xbf"):
            rest, offset = rest[3:], 3
        while block := stream.read(PIECE_BYTES):
            rest += block
            at = cut_at(rest)
            yield decode(rest[:at], offset, path, invalid)
            rest, offset = rest[at:], offset + at
        if rest:
            yield decode(rest, offset, path, invalid)


def cut_at(data: bytes) -> int:
    """Where to end a piece: after the last line break before a non-blank, else before the last character."""
    at = len(data)
    while (at := data.rfind(b"\n", 0, at)) >= 0:
        if data[at + 1 : at + 2].strip():
            return at + 1
    first = next((i for i in range(1, 5) if data[-i] & 0xC0 != 0x80), 1)
    return len(data) - first or len(data)


def decode(data: bytes, offset: int, path: Path, invalid: str) -> str:
    """UTF-8 to text.

    Raises:
        BadInput: bytes that are not UTF-8, with the offset of the first in the (unpacked) file.
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
            hint="text in another encoding: convert it (`iconv -t UTF-8`); a text with damaged bytes: `data.invalid=replace`",
        ) from None


def existing(path: str | Path) -> Path:
    """The path, which must be that of a file."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise BadInput(f"`{path}` is a folder", hint=f"read it with `data.source={path}`")
    if not path.exists():
        raise missing(path)
    return path


def readable_below(root: Path) -> list[Path]:
    """The files below a folder that are read, in the order of their relative paths; hidden ones are not."""
    found = (p for p in root.rglob("*") if p.name.removesuffix(".gz").endswith(FOLDER_SUFFIXES))
    seen = [p for p in found if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    return sorted(seen, key=lambda p: p.relative_to(root).as_posix())


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked. Errors while reading name the file.

    Raises:
        BadInput: it holds no text but something else, such as a table or an image; or it cannot be read.
        Damaged: a gzip file that is cut or wrong.
    """
    try:
        with cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as stream:
            refuse_binary(stream.read(HEAD_BYTES), str(path))
            stream.seek(0)
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise Damaged(f"a damaged gzip file: {e}", where=str(path)) from None
    except OSError as e:
        raise BadInput(f"cannot read the file: {e.strerror or e}", where=str(path)) from None


def modified(paths: Sequence[Path]) -> list[int]:
    """When each file was modified, in ns, of those whose `content_hash` is of samples."""
    stats = [path.stat() for path in paths]
    return [stat.st_mtime_ns for stat in stats if stat.st_size > HASHED_BYTES]


def content_hash(path: Path) -> str:
    """sha256 of a file's bytes; of its size and 64 spaced mebibytes where it is larger than HASHED_BYTES."""
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            if size <= HASHED_BYTES:
                return hashlib.file_digest(stream, "sha256").hexdigest()
            digest = hashlib.sha256(str(size).encode())
            for i in range(64):
                stream.seek((size - PIECE_BYTES) * i // 63)
                digest.update(stream.read(PIECE_BYTES))
            return digest.hexdigest()
    except OSError as e:
        raise BadInput(f"cannot read the file: {e.strerror or e}", where=str(path)) from None
