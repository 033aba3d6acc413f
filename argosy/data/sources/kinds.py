"""Chooses the reader of a file by its first bytes, or else by its name. A Parquet file called `data.txt` is read as Parquet.

Text, JSON lines and separated values have no magic number, so they are recognized by name: `.jsonl .ndjson .json` and `.csv .tsv`. A
file without a usual ending of text is read as JSON lines if its first line is a JSON object. Endings of compressed files (`.gz`) are
ignored.
"""

from pathlib import Path
from typing import BinaryIO, cast

from argosy.core.errors import BadInput, Damaged
from argosy.core.formats.crc32c import masked_crc32c
from argosy.core.formats.recognize import HEAD_BYTES, binary_kind, is_text, refuse_binary
from argosy.core.input_files import InputFile, has_wildcards
from argosy.core.json_text import parse_json
from argosy.data.sources import missing
from argosy.data.sources.opening import base_name, open_bytes

# Riegeli files begin with this block header (github.com/google/riegeli, doc/riegeli_records_file_format.md).
RIEGELI = bytes.fromhex("83af70d10d884a3f")
INDEX_MAGIC = b"MMIDIDX\0\0"
MARKS = {"parquet": (b"PAR1",), "arrow": (b"ARROW1", b"FEA1", b"\xff\xff\xff\xff"), "array_record": (RIEGELI,)}
TAR_AT, TAR = 257, b"ustar"
BY_NAME = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow",
    ".feather": "arrow", ".tfrecord": "tfrecord", ".tfrecords": "tfrecord", ".array_record": "array_record",
    ".arrayrecord": "array_record", ".tar": "tar", ".bagz": "bagz", ".bag": "bagz",
}  # fmt: skip
OF_TEXT = ("jsonl", "csv")
# Kinds that can only be recognized by name.
BY_NAME_ALONE = ("bagz",)
MOSAIC_INDEX, MOSAIC_SHARD = "index.json", ".mds"
WHAT = {"parquet": "a Parquet file", "arrow": "an Arrow file", "tfrecord": "a TFRecord file", "array_record": "an ArrayRecord file",
        "tar": "a tar file", "bagz": "a Bagz file"}  # fmt: skip
TEXT_NAMES = (".txt", ".text", ".md", ".rst", ".log", ".html", ".xml", ".tex", ".py")
FIRST_LINE_BYTES = 1 << 20
INDEX_BYTES = 64 << 20
IMAGE_NAMES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


def reader_of(place: str) -> str:
    """The registered name of the source that reads a path or URL.

    Raises:
        BadInput: there is no such file or folder.
    """
    file = InputFile(place)
    if mosaic_index(file) is not None:
        return "mds"
    if file.is_folder or (has_wildcards(place) and not file.is_file):
        return "images" if file.is_local and file.is_folder and holds_images(file.path) else "folder"
    if not file.is_file:
        raise missing(file)
    return file_kind(file)


def mosaic_index(place: InputFile) -> InputFile | None:
    """The index of MDS shards in a folder, or the file itself if it is such an index; None if there is no index."""
    if place.is_folder:
        place = InputFile(f"{place.full_place.rstrip('/')}/{MOSAIC_INDEX}")
    if place.name != MOSAIC_INDEX or not place.is_file:
        return None
    with place.open() as file:
        return place if b'"shards"' in file.read(INDEX_BYTES) else None


def holds_images(folder: Path) -> bool:
    """Whether there are image files in a folder or in its direct subfolders. `folder:PATH` reads the texts of such a folder instead."""
    return any(path.suffix.lower() in IMAGE_NAMES for pattern in ("*", "*/*") for path in folder.glob(pattern))


def file_kind(file: InputFile) -> str:
    """The registered name of the source that reads a file.

    Raises:
        BadInput: the file is empty, a single MDS shard, or of another known format than its name says.
        Damaged: the file is not of the format that its name says, and of no other known format.
    """
    expected = named_kind(file.name)
    with file.open() as raw:
        head = raw.read(HEAD_BYTES)
    for kind, marks in MARKS.items():
        if head.startswith(marks) and not is_text(head):
            return kind
    if file.is_local and (head.startswith(INDEX_MAGIC) or (file.name.endswith(".bin") and megatron_index(file).is_file)):
        return "tokens"
    if file.name.lower().endswith(".npz"):
        return "arrays"
    if expected in BY_NAME_ALONE and head:
        return str(expected)
    if base_name(file.name).endswith(MOSAIC_SHARD):
        raise BadInput("an MDS shard alone", where=str(file), hint=f"name its folder, which has the `{MOSAIC_INDEX}` that describes it")
    with open_bytes(file, text=False) as stream:
        head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
        if head.startswith(TAR, TAR_AT) and not is_text(head):
            return "tar"
        if is_tfrecord(head):
            return "tfrecord"
        if expected is None or expected in OF_TEXT:
            if expected is None and file.name.endswith(".bin") and head and not is_text(head):
                return "tokens"
            return expected or ("jsonl" if holds_objects(file.name, cast(BinaryIO, stream)) else "text")
    if not head:
        raise BadInput("the file is empty", where=str(file))
    if binary_kind(head) is not None:
        refuse_binary(head, str(file))
    problem = f"its name says {WHAT[expected]}, and it does not begin like one"
    raise Damaged(problem, where=str(file), hint="text ends in .txt or .jsonl")


def named_kind(name: str) -> str | None:
    """The registered name of the source for a file's ending; None if the ending is not known."""
    name = base_name(name)
    # TFDS: NAME-train.tfrecord-00000-of-00001
    return next((kind for ending, kind in BY_NAME.items() if name.endswith(ending) or f"{ending}-0" in name), None)


def megatron_index(path: InputFile) -> InputFile:
    """The path that the index of a file of token ids has if Megatron-LM wrote it."""
    return InputFile(path.path.with_suffix(".idx"))


def is_tfrecord(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a TFRecord file: whether the checksum of the first length is right."""
    return len(head) >= 12 and masked_crc32c([head[:8]])[0] == int.from_bytes(head[8:12], "little")


def holds_objects(name: str, stream: BinaryIO) -> bool:
    """Whether a file without a known ending holds JSON lines: whether its first line is a JSON object."""
    if base_name(name).endswith(TEXT_NAMES):
        return False
    line = stream.readline(FIRST_LINE_BYTES).removeprefix(b"\xef\xbb\xbf").strip()
    if not line.startswith(b"{"):
        return False
    try:
        return isinstance(parse_json(line.decode()), dict)
    except (ValueError, RecursionError):
        return False
