"""Recognizes binary files by their first bytes, so that an error about a table or archive can name its kind.

The signatures are from the specification of each format. File names do not matter: a Parquet file called `data.txt` is recognized too.
"""

from argosy.core.errors import BadInput

# The number of bytes that is enough for every signature.
HEAD_BYTES = 512
TABLE = "convert it to JSON lines, an object a row: pandas reads it, and `.to_json(FILE, orient='records', lines=True)` writes"
UNPACK = "unpack it first"
NO_TEXT = "data is read from text, JSON lines and JSON, which may be compressed as .gz"
# (offset, bytes at this offset, kind of the file, hint)
SIGNATURES: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"PAR1", "a Parquet file", TABLE),
    (0, b"ARROW1", "an Arrow file", TABLE),
    (0, b"FEA1", "a Feather file", TABLE),
    (0, b"ORC", "an ORC file", TABLE),
    (0, b"Obj\x01", "an Avro file", TABLE),
    (0, b"\xff\xff\xff\xff", "an Arrow stream", TABLE),
    (0, bytes.fromhex("83af70d10d884a3f"), "an ArrayRecord file", TABLE),
    (0, b"MMIDIDX\0\0", "an index of token ids (Megatron-LM)", NO_TEXT),
    (0, b"SQLite format 3\0", "an SQLite database", TABLE),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", NO_TEXT),
    (0, b"\x93NUMPY", "an array of numpy (.npy)", NO_TEXT),
    (0, b"GGUF", "a GGUF model", NO_TEXT),
    (0, b"\x1f\x8b", "a gzip archive", "a file of text that is compressed is read if its name ends in .gz"),
    (0, b"BZh", "a bzip2 archive", UNPACK),
    (0, b"\xfd7zXZ\0", "an xz archive", UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard archive", UNPACK),
    (0, b"\x04\x22\x4d\x18", "an LZ4 archive", UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", UNPACK),
    (257, b"ustar", "a tar archive", UNPACK),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image", NO_TEXT),
    (0, b"\xff\xd8\xff", "a JPEG image", NO_TEXT),
    (0, b"GIF8", "a GIF image", NO_TEXT),
    (8, b"WEBP", "a WebP image", NO_TEXT),
    (8, b"WAVE", "a WAV recording", NO_TEXT),
    (4, b"ftyp", "an MP4 video", NO_TEXT),
    (0, b"OggS", "an Ogg recording", NO_TEXT),
    (0, b"%PDF-", "a PDF document", NO_TEXT),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document", NO_TEXT),
    (0, b"\x7fELF", "a program", NO_TEXT),
    (0, b"\xff\xfe", "UTF-16 text", "convert it: `iconv -f UTF-16 -t UTF-8 FILE > NEW`"),
    (0, b"\xfe\xff", "UTF-16 text", "convert it: `iconv -f UTF-16 -t UTF-8 FILE > NEW`"),
)
# Signatures with which a text could begin by chance. They count only if the first bytes are no text.
WORDS = {b"ORC", b"BZh", b"GIF8", b"OggS", b"GGUF", b"FEA1", b"PAR1", b"ARROW1", b"WEBP", b"WAVE", b"ftyp", b"ustar"}
CONTROLS = {*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"}
PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def binary_kind(head: bytes) -> tuple[str, str] | None:
    """The kind of a binary file, and a hint what to do with it; None for a file that may be text.

    Args:
        head: the first HEAD_BYTES of the file, or all of a shorter file.
    """
    for at, mark, kind, hint in SIGNATURES:
        if head.startswith(mark, at) and (mark not in WORDS or not is_text(head)):
            return kind, hint
    if head.startswith(b"PK\x03\x04") or head.startswith(b"PK\x05\x06"):
        return archive_kind(head)
    if head.startswith(PICKLE):
        return "a Python pickle", f"pickles are never read; {NO_TEXT}"
    # A safetensors file begins with eight bytes of length, and then a JSON object.
    if head[8:9] == b"{" and len(head) > 8 and int.from_bytes(head[:8], "little") < 1 << 27 and b"\0" in head[:8]:
        return "a safetensors file", NO_TEXT
    if b"\0" in head and not is_utf8(head):
        return "a binary file of a kind that is not known here", NO_TEXT
    return None


def archive_kind(head: bytes) -> tuple[str, str]:
    """The kind of a zip archive, by the name of its first member, and a hint."""
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if name.endswith(b".npy"):
        return "an archive of numpy arrays (.npz)", NO_TEXT
    if name.startswith((b"[Content_Types]", b"_rels/", b"xl/", b"word/", b"docProps/")):
        return "an Office document", "save it as text, or its tables as JSON lines"
    if b"data.pkl" in name:
        return "a checkpoint of PyTorch", NO_TEXT
    return "a zip archive", UNPACK


def is_text(head: bytes) -> bool:
    """Whether the first bytes of a file are UTF-8 without control characters, except those of terminals and page breaks."""
    return is_utf8(head) and not CONTROLS & set(head)


def is_utf8(head: bytes) -> bool:
    """Whether the first bytes of a file are UTF-8. The last character may be incomplete."""
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def refuse_binary(head: bytes, where: str) -> None:
    """Checks that the first bytes of a file may be text.

    Raises:
        BadInput: the bytes belong to another kind of file, which the message names.
    """
    if (signature := binary_kind(head)) is not None:
        kind, hint = signature
        raise BadInput(f"this is {kind}, not text", where=where, hint=hint)
