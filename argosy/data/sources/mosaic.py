"""Reads data sets of MosaicML's streaming library: a folder with `index.json` and shards (MDS).

    shard     uint32, the number of samples; uint32 [samples + 1], the offset of each sample and of the end; the columns as JSON; the
              samples
    sample    uint32 for each column without a fixed size, its size in bytes; then the values of the columns, one after the other

See github.com/mosaicml/streaming, streaming/base/format/mds/. All numbers are little-endian. Shards may be compressed by Zstandard,
gzip or bzip2. A shard is read whole; the library writes shards of 64 MiB. Sizes are compared with the index, and so are hashes that
Python can compute. Columns of images and pickles are not read, and are listed as ignored.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from argosy.core.errors import BadInput, Damaged
from argosy.core.input_files import InputFile
from argosy.core.json_text import parse_json
from argosy.data.sources import existing
from argosy.data.sources.kinds import mosaic_index
from argosy.data.sources.opening import content_hash, modification_times, open_bytes
from argosy.data.sources.record_files import RecordSource, RowAt
from argosy.data.sources.steps import RecordSteps

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

VERSION = 2
# The supported compressions of shards.
PACKINGS = ("zstd", "gz", "bz2")
NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
# The types of arrays by their code in the data.
CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32", 64: "uint64",
         65: "int64", 66: "float64"}  # fmt: skip
SIZES = ("<u1", "<u2", "<u4", "<u8")
NUMBER = struct.Struct("<I")


@dataclass(frozen=True)
class MosaicShard:
    """A shard, as the index describes it.

    file: the file to read, compressed or not.
    samples: the number of samples.
    size_bytes: the uncompressed size of the shard.
    hashes: the hashes of the file, by algorithm.
    columns: (name, encoding, fixed size in bytes) of each column; the size is None if it varies.
    """

    file: InputFile
    samples: int
    size_bytes: int
    hashes: Mapping[str, str]
    columns: tuple[tuple[str, str, int | None], ...]


class MosaicDataset(RecordSource):
    """A folder of MDS shards: texts, or records to fine-tune on."""

    kind: ClassVar[str] = "mds"

    def __init__(
        self,
        place: str | Path | InputFile,
        *,
        format: str = "auto",
        columns: Mapping[str, str] | None = None,
        steps: RecordSteps | None = None,
    ):
        """place: the folder, or its index.

        Raises:
            BadInput: there is no index, a shard is missing, or its format or compression is not supported.
            Damaged: the index cannot be read, or a shard has another size.
        """
        super().__init__(format=format, columns=columns, steps=steps)
        self.path = existing(mosaic_index(InputFile(place)) or place)
        self.shards = read_mosaic_index(self.path)
        self.size_bytes = sum(shard.size_bytes for shard in self.shards)
        self.disk_bytes = sum(shard.file.size_bytes for shard in self.shards)
        self.files = len(self.shards)

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        return cls(argument, format=settings.format, columns=settings.columns, steps=settings.steps)

    def rows(self) -> Iterator[RowAt]:
        for shard in self.shards:
            data, offsets = read_shard(shard)
            for number in range(shard.samples):
                where = f"{shard.file}, sample {number}"
                yield self.sample(data[offsets[number] : offsets[number + 1]], shard, where), where

    def sample(self, data: memoryview, shard: MosaicShard, where: str) -> dict[str, Any]:
        """Decodes the columns of a sample that the format needs. Other columns are listed as ignored.

        Raises:
            Damaged: the sizes of the columns do not add up to that of the sample, or a value is not of its type.
        """
        columns = self.reader.columns_read() if self.reader.begun and not self.steps else None
        fields: dict[str, Any] = {}
        try:
            at = NUMBER.size * sum(size is None for _, _, size in shard.columns)
            stored_sizes = iter(struct.unpack_from(f"<{at // NUMBER.size}I", data))
            sizes = [next(stored_sizes) if size is None else size for _, _, size in shard.columns]
            if at + sum(sizes) != len(data):
                raise ValueError("the sizes of its columns are not those of the sample")
            for (name, encoding, _), size in zip(shard.columns, sizes):
                read = decoder(encoding) if columns is None or name in columns else None
                value = None if read is None else read(bytes(data[at : at + size]))
                at += size
                if value is None:
                    self.reader.ignored |= {name: None}
                else:
                    fields[name] = value
        except (ValueError, struct.error, IndexError, KeyError, RecursionError) as error:
            raise Damaged(f"a damaged MDS shard: {error}"[:200], where=where) from None
        return fields

    def fingerprint(self) -> dict[str, Any]:
        digest = hashlib.sha256("\n".join(content_hash(shard.file) for shard in self.shards).encode()).hexdigest()
        return {"source": self.kind, "source.sha256": digest, "source.files": self.files} | self.read_fingerprint()

    def modified(self) -> list[int]:
        return modification_times([shard.file for shard in self.shards])


def read_mosaic_index(index: InputFile) -> list[MosaicShard]:
    """Reads an index, and returns its shards.

    Raises:
        BadInput: a shard is missing, or its format or compression is not supported.
        Damaged: the index cannot be read, or a shard has another size.
    """
    where = str(index)
    try:
        with index.open() as file:
            content = json.load(file)
        shards = [mosaic_shard(shard, index) for shard in content["shards"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"an index of MDS shards that cannot be understood: {error}"[:200], where=where) from None
    if not shards:
        raise BadInput("an index of MDS shards that names none", where=where)
    return shards


def mosaic_shard(shard: Mapping[str, Any], index: InputFile) -> MosaicShard:
    """Reads the description of one shard in an index. If both files exist, the uncompressed one is used."""
    if (shard["format"], shard["version"]) != ("mds", VERSION):
        problem = f"shards of format {shard['format']}, version {shard['version']}"
        raise BadInput(problem, where=str(index), hint=f"read are those of format mds, version {VERSION}")
    raw, packed = shard["raw_data"], shard["zip_data"]
    file, entry = index.sibling(raw["basename"]), raw
    if not file.is_file and packed:
        kind = str(shard["compression"]).partition(":")[0]
        if kind not in PACKINGS:
            raise BadInput(f"a shard compressed by `{kind}`", where=str(index), hint=f"read are {', '.join(PACKINGS)}")
        file, entry = index.sibling(packed["basename"]), packed
    if not file.is_file:
        raise BadInput("a shard that the index names is missing", where=str(file), hint="copy the whole folder")
    if file.size_bytes != entry["bytes"]:
        raise Damaged(f"a shard of {file.size_bytes:,} bytes that has {entry['bytes']:,} in the index", where=str(file))
    columns = tuple(zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True))
    return MosaicShard(file, int(shard["samples"]), int(raw["bytes"]), dict(entry["hashes"]), columns)


def read_shard(shard: MosaicShard) -> tuple[memoryview, list[int]]:
    """Reads a shard. Returns its uncompressed bytes, and the offsets of the samples and of the end.

    Raises:
        Damaged: the shard is not what the index says.
    """
    where = str(shard.file)
    for name, digest in shard.hashes.items():
        if name in hashlib.algorithms_available and not name.startswith("shake"):
            with shard.file.open() as file:
                if hashlib.file_digest(file, name).hexdigest() != digest:  # type: ignore[arg-type]
                    raise Damaged(f"a damaged MDS shard: its {name} is not that of the index", where=where)
    with open_bytes(shard.file, text=False) as stream:
        data = stream.read(shard.size_bytes + 1)
    first = NUMBER.size * (shard.samples + 2)
    if len(data) != shard.size_bytes or len(data) < first or NUMBER.unpack_from(data)[0] != shard.samples:
        problem = f"a damaged MDS shard: {len(data):,} bytes, not {shard.size_bytes:,} of {shard.samples:,} samples"
        raise Damaged(problem, where=where)
    offsets = np.frombuffer(data, "<u4", shard.samples + 1, NUMBER.size).astype(np.int64)
    if offsets[0] < first or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
        raise Damaged("a damaged MDS shard: its samples do not follow each other", where=where)
    return memoryview(data), offsets.tolist()


def decoder(encoding: str) -> Callable[[bytes], Any] | None:
    """The function that decodes the bytes of a column to a JSON value; None for an encoding that is not read."""
    kind, _, layout = encoding.partition(":")
    if kind in NUMBERS:
        return lambda data: np.frombuffer(data, np.dtype(kind).newbyteorder("<"), 1)[0].item()
    if kind == "ndarray":
        return lambda data: array_of_bytes(data, layout).tolist()
    return DECODERS.get(encoding)


def array_of_bytes(data: bytes, layout: str) -> np.ndarray:
    """Decodes an array. The type and the shape are in `layout` (`int32:2,3`), or, if missing there, before the values in `data`."""
    name, _, sizes = layout.partition(":")
    if not name:
        name, data = CODES[data[0]], data[1:]
    if sizes:
        shape = [int(size) for size in sizes.split(",")]
    else:
        axes, width = data[0] >> 2, np.dtype(SIZES[data[0] & 3])
        shape = np.frombuffer(data, width, axes, 1).tolist()
        data = data[1 + axes * width.itemsize :]
    return np.frombuffer(data, np.dtype(name).newbyteorder("<")).reshape(shape)


def text_or_nothing(data: bytes) -> str | None:
    """Decodes bytes as UTF-8 text; None if they are no text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "str": lambda data: data.decode(),
    "bytes": text_or_nothing,
    "int": lambda data: int(np.frombuffer(data, "<i8", 1)[0]),
    "json": lambda data: parse_json(data.decode()),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: float(data.decode()),
}
