"""Opens data files: decompresses them, as their first bytes say (gzip, bzip2, xz, Zstandard), and converts text to UTF-8.

Damaged archives, bytes that are no text, and unreadable files are errors that name the file.
"""

import bz2
import codecs
import gzip
import hashlib
import io
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, BinaryIO, cast

from argosy.core.command import install_extra
from argosy.core.errors import BadInput, Damaged, nearest
from argosy.core.formats.recognize import HEAD_BYTES, refuse_binary
from argosy.core.input_files import InputFile, reading

PIECE_BYTES = 1 << 20
# Of larger files, only 64 samples are hashed, so that a terabyte is not read twice.
HASHED_BYTES = 64 << 20
UTF8, UTF16 = "utf-8", (b"\xff\xfe", b"\xfe\xff")
# A bzip2 file begins with its block size, and then the mark of a block or of the end. BZh alone may also begin a text.
BZIP2 = tuple(b"BZh%d%s" % (size, block) for size in range(1, 10) for block in (b"1AY&SY", b"\x17\x72\x45\x38"))
PACKED = {"gzip": (b"\x1f\x8b",), "bzip2": BZIP2, "xz": (b"\xfd7zXZ\0",), "Zstandard": (b"\x28\xb5\x2f\xfd",)}
ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".zstd")
COMMON = ("utf-8", "utf-16", "utf-32", "latin-1", "cp1252", "cp1251", "gb18030", "shift_jis", "euc_kr", "big5", "koi8-r", "iso-8859-15")


def import_package(package: str, readers: str, extra: str = "data") -> Any:
    """Imports a package of an extra.

    Args:
        readers: what the package reads, such as "Parquet files", for the error.
        extra: the name of the extra.

    Raises:
        BadInput: the package is not installed.
    """
    try:
        return import_module(package)
    except ImportError:
        problem = f"{readers} are read by the package {package.partition('.')[0]}, which is not installed"
        raise BadInput(problem, hint=install_extra(extra)) from None


def base_name(name: str) -> str:
    """A file's name in lower case, without the ending of a compressed file."""
    name = name.lower()
    return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)


def packed_as(head: bytes) -> str | None:
    """The compression of a file that begins with these bytes; None: it is not compressed."""
    return next((kind for kind, marks in PACKED.items() if head.startswith(marks)), None)


def decompress_stream(raw: BinaryIO, kind: str) -> BinaryIO:
    """Wraps a compressed stream in a stream of the decompressed bytes. `kind` is a key of PACKED.

    Raises:
        BadInput: Python is older than 3.14, and pyarrow, which also reads Zstandard, is not installed.
    """
    if kind == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if kind == "bzip2":
        return cast(BinaryIO, bz2.BZ2File(raw))
    if kind == "xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if sys.version_info >= (3, 14):
        return import_module("compression.zstd").ZstdFile(raw)
    return io.BufferedReader(ZstandardStream(import_package("pyarrow", "Zstandard files").CompressedInputStream(raw, "zstd")))


class ZstandardStream(io.RawIOBase):
    """Adapts a stream of pyarrow to the interface that Python's buffered readers need."""

    def __init__(self, inner: Any):
        self.inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Transcoded(io.RawIOBase):
    """Converts a stream of text in another encoding to UTF-8.

    Bytes that are invalid in that encoding are replaced by U+FFFD if `invalid` is `replace`. Otherwise they raise an error with their
    offset.
    """

    def __init__(self, inner: BinaryIO, encoding: str, invalid: str, where: str):
        self.inner, self.encoding, self.where = inner, encoding, where
        self.decoder = codecs.getincrementaldecoder(encoding)("replace" if invalid == "replace" else "strict")
        self.offset, self.pending, self.over = 0, b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.pending and not self.over:
            data = self.inner.read(1 << 16)
            self.over = not data
            waiting = len(self.decoder.getstate()[0])
            try:
                self.pending = self.decoder.decode(data, final=self.over).encode()
            except UnicodeDecodeError as error:
                place = self.offset - waiting + error.start
                problem = f"not {self.encoding}: {error.reason} at offset {place:,}"
                hint = "`data.encoding=NAME` names another; `data.invalid=replace` reads on"
                raise BadInput(problem, where=self.where, hint=hint) from None
            self.offset += len(data)
        size = min(len(buffer), len(self.pending))
        buffer[:size], self.pending = self.pending[:size], self.pending[size:]
        return size


def text_encoding(name: str) -> str:
    """The canonical name of a text encoding.

    Raises:
        BadInput: Python knows no such encoding.
    """
    try:
        codec = codecs.lookup(name)
        "".encode(codec.name)
    except LookupError:
        raise BadInput(f"no text encoding `{name}`", where="data.encoding", hint=nearest(name, COMMON)) from None
    return "utf-8" if codec.name in ("utf-8", "utf-8-sig", "ascii") else codec.name


@contextmanager
def open_bytes(
    file: InputFile, *, encoding: str = UTF8, invalid: str = "error", text: bool = True
) -> Iterator["io.BufferedReader[Any]"]:
    """Opens a file, and yields a stream of its decompressed bytes, converted to UTF-8 if it is text.

    Args:
        encoding: the encoding of the text.
        invalid: what happens to bytes that are invalid in the encoding: `error` or `replace`.
        text: whether the file must be text.

    Raises:
        BadInput: the file is no text, although `text` is set, or it cannot be read.
        Damaged: a compressed file is truncated or damaged.
    """
    kind = None
    with ExitStack() as stack:
        raw = stack.enter_context(file.open())
        try:
            with reading(str(file)):
                head = raw.read(HEAD_BYTES)
                raw.seek(0)
            kind = packed_as(head)
            stream = buffered_reader(decompress_stream(raw, kind) if kind else raw)
            head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
            if text and encoding != UTF8:
                stream = io.BufferedReader(Transcoded(cast(BinaryIO, stream), encoding, invalid, str(file)), PIECE_BYTES)
                head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
            if text and encoding == UTF8 and head.startswith(UTF16):
                hint = "`data.encoding=utf-16` reads it"
                raise BadInput("this is UTF-16 text, not text in UTF-8", where=str(file), hint=hint)
            if text:
                refuse_binary(head, str(file))
            yield stream
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            raise Damaged(f"a damaged {kind} file: {error}", where=str(file)) from None
        except OSError as error:
            if kind:
                raise Damaged(f"a damaged {kind} file: {error.strerror or error}", where=str(file)) from None
            raise BadInput(f"cannot read the file: {error.strerror or error}", where=str(file)) from None


def buffered_reader(stream: Any) -> "io.BufferedReader[Any]":
    """Wraps a stream in a buffered reader, which has `peek` and reads lines quickly."""
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream, PIECE_BYTES)


def modification_times(files: Sequence[InputFile]) -> list[int]:
    """The modification times, in ns, of the files of which `content_hash` hashes only samples."""
    return [file.modified_ns for file in files if file.size_bytes > HASHED_BYTES]


def content_hash(file: InputFile) -> str:
    """The sha256 of a file's bytes. For a file larger than HASHED_BYTES, that of its size and of 64 evenly spaced samples of 1 MiB."""
    size = file.size_bytes
    with reading(str(file)), file.open() as stream:
        if size <= HASHED_BYTES:
            return hashlib.file_digest(cast(Any, stream), "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for i in range(64):
            stream.seek((size - PIECE_BYTES) * i // 63)
            digest.update(stream.read(PIECE_BYTES))
        return digest.hexdigest()
