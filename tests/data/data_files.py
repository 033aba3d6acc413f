"""The same rows as files of every kind, written by the libraries that others write them with."""

import bz2
import csv
import gzip
import io
import json
import lzma
import struct
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
from array_record.python.array_record_module import ArrayRecordWriter
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Rows = list[dict]


def jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def parquet(rows: Rows, **options) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


def parquet_images(path: Path, images: list[bytes], labels: list[int]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"image": images, "label": labels}), path, row_group_size=25)


def arrow(rows: Rows, *, stream: bool = False) -> bytes:
    table, sink = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=64)
    return sink.getvalue()


def feather(rows: Rows, version: int = 2) -> bytes:
    sink = io.BytesIO()
    pyarrow.feather.write_feather(pyarrow.Table.from_pylist(rows), sink, version=version)
    return sink.getvalue()


def csv_file(rows: Rows, delimiter: str = ",") -> bytes:
    sink = io.StringIO(newline="")
    writer = csv.DictWriter(sink, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


def message_types() -> dict[str, type]:
    """Example and the messages in it, from TensorFlow's published definition (example.proto, feature.proto)."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    repeated, of_message = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED, descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    for name, kind in (("BytesList", 12), ("FloatList", 2), ("Int64List", 3)):
        file.message_type.add(name=name).field.add(name="value", number=1, label=repeated, type=kind)
    feature = file.message_type.add(name="Feature")
    for number, name in enumerate(("BytesList", "FloatList", "Int64List"), 1):
        feature.field.add(name=name.lower(), number=number, label=1, type=of_message, type_name=f".t.{name}")
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=of_message, type_name=".t.Feature")
    features.field.add(name="feature", number=1, label=repeated, type=of_message, type_name=".t.Features.FeatureEntry")
    example = file.message_type.add(name="Example")
    example.field.add(name="features", number=1, label=1, type=of_message, type_name=".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"t.{name}")) for name in ("Example",)}


def example(row: dict) -> bytes:
    message = message_types()["Example"]()
    for name, value in row.items():
        values = value if isinstance(value, list) else [value]
        feature = message.features.feature[name]
        if isinstance(values[0], str):
            feature.byteslist.value.extend(value.encode() for value in values)
        elif isinstance(values[0], float):
            feature.floatlist.value.extend(values)
        else:
            feature.int64list.value.extend(values)
    return message.SerializeToString()


def crc32c(data: bytes) -> int:
    """Bit by bit (RFC 3720, appendix B.4)."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def record_frame(data: bytes) -> bytes:
    """A record of a TFRecord file."""
    masked = [((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF for value in map(crc32c, (struct.pack("<Q", len(data)), data))]
    return struct.pack("<QI", len(data), masked[0]) + data + struct.pack("<I", masked[1])


def tfrecord(rows: Rows) -> bytes:
    return b"".join(record_frame(example(row)) for row in rows)


def array_record(path: Path, records: list[bytes]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:8")
    for record in records:
        writer.write(record)
    writer.close()


def tar(rows: Rows) -> bytes:
    """As WebDataset has it: the text as `txt`, everything else as `json`, and a picture that no text model reads."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for number, row in enumerate(rows):
            rest = {name: value for name, value in row.items() if name != "text"}
            parts = {"txt": row["text"].encode(), "jpg": b"\xff\xd8\xff"} | ({"json": json.dumps(rest).encode()} if rest else {})
            for ending, data in parts.items():
                member = tarfile.TarInfo(f"part/{number:06d}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return sink.getvalue()


def write_bag(path: Path, records: list[bytes]) -> None:
    # Imported here: at the end of a process, bagz prints what it did not free.
    import bagz

    with bagz.Writer(str(path)) as writer:
        for record in records:
            writer.write(record)


def by_library(write: Callable[[Path, list[bytes]], None], rows: Rows, name: str) -> bytes:
    """The bytes of a file that a library writes at a path, of one JSON object a record."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, name), [json.dumps(row).encode() for row in rows])
        return Path(folder, name).read_bytes()


def mds(folder: Path, rows: Rows, *, per_shard: int = 200, packed: bool = False) -> None:
    """MDS shards of texts and numbers (github.com/mosaicml/streaming, streaming/base/format/mds/writer.py)."""
    names, encodings, sizes = ["id", "text"], ["int", "str"], [8, None]
    config = json.dumps({"column_names": names, "column_encodings": encodings, "column_sizes": sizes}).encode()
    folder.mkdir()
    shards = []
    for number, first in enumerate(range(0, len(rows), per_shard)):
        texts = [(row["id"], row["text"].encode()) for row in rows[first : first + per_shard]]
        samples = [struct.pack("<Iq", len(text), id) + text for id, text in texts]
        begins = np.cumsum([4 * (len(samples) + 2) + len(config), *map(len, samples)]).astype("<u4")
        data = struct.pack("<I", len(samples)) + begins.tobytes() + config + b"".join(samples)
        base, stored = f"shard.{number:05}.mds", zstd(data) if packed else data
        (folder / (f"{base}.zstd" if packed else base)).write_bytes(stored)
        zipped = {"basename": f"{base}.zstd", "bytes": len(stored), "hashes": {}} if packed else None
        shards.append({"format": "mds", "version": 2, "samples": len(samples), "column_names": names, "column_encodings": encodings,
                       "column_sizes": sizes, "compression": "zstd:3" if packed else None, "hashes": [], "size_limit": None,
                       "raw_data": {"basename": base, "bytes": len(data), "hashes": {}}, "zip_data": zipped})  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


# Name of the file -> its bytes.
KINDS: dict[str, Callable[[Rows], bytes]] = {
    "rows.jsonl": jsonl,
    "rows.json": lambda rows: json.dumps(rows).encode(),
    "rows.jsonl.gz": lambda rows: gzip.compress(jsonl(rows)),
    "rows.jsonl.bz2": lambda rows: bz2.compress(jsonl(rows)),
    "rows.jsonl.xz": lambda rows: lzma.compress(jsonl(rows)),
    "rows.jsonl.zst": lambda rows: zstd(jsonl(rows)),
    "zipped.jsonl": lambda rows: gzip.compress(jsonl(rows)),
    "rows": jsonl,
    "rows.csv": csv_file,
    "semicolons.csv": lambda rows: csv_file(rows, ";"),
    "rows.tsv": lambda rows: csv_file(rows, "\t"),
    "rows.csv.gz": lambda rows: gzip.compress(csv_file(rows)),
    "rows.parquet": parquet,
    "groups.parquet": lambda rows: parquet(rows, row_group_size=37, compression="zstd"),
    "parquet.txt": parquet,
    "rows.arrow": arrow,
    "stream.arrow": lambda rows: arrow(rows, stream=True),
    "rows.feather": feather,
    "rows.tfrecord": tfrecord,
    "rows.tfrecord.gz": lambda rows: gzip.compress(tfrecord(rows)),
    "rows.array_record": lambda rows: by_library(array_record, rows, "a.array_record"),
    "rows.bagz": lambda rows: by_library(write_bag, rows, "a.bagz"),
    "rows.bag": lambda rows: by_library(write_bag, rows, "a.bag"),
    "rows.tar": tar,
    "rows.tar.gz": lambda rows: gzip.compress(tar(rows)),
}


def megatron(path: Path, documents: list[list[int]], dtype: str = "<u2", code: int = 8) -> None:
    """NAME.bin and NAME.idx (megatron/core/datasets/indexed_dataset.py)."""
    lengths = np.array([len(ids) for ids in documents], "<i4")
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1].astype("<i8"))]) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    numbers = lengths.tobytes() + offsets.astype("<i8").tobytes() + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + numbers)
    path.write_bytes(np.concatenate([np.array(ids, dtype) for ids in documents]).tobytes())
