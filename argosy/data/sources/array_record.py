"""Reads ArrayRecord files with the package `array_record`, which is a dependency of Grain on platforms that have it.

A record is a tf.Example (as MaxText and TFDS write them), a JSON object, or UTF-8 text.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, ClassVar

from argosy.core.errors import BadInput, Damaged
from argosy.core.json_text import parse_json
from argosy.data.sources.opening import import_package
from argosy.data.sources.record_files import RecordFile, RowAt
from argosy.data.sources.tfrecord import tf_example

# Number of records that are read in one call, so that each chunk is decompressed only once.
BATCH_RECORDS = 1024


class RecordContainer(RecordFile):
    """The base of files whose records a library reads by number. `noun` is the name of the format, for errors."""

    noun: ClassVar[str]

    @abstractmethod
    def batches(self) -> Iterator[Sequence[bytes]]:
        """Yields the records in order, in batches of about BATCH_RECORDS."""

    def rows(self) -> Iterator[RowAt]:
        if not self.path.is_local:
            hint = "copy the file to this machine, or write Parquet"
            raise BadInput(f"{self.noun} files are read from this machine's disk", where=str(self.path), hint=hint)
        if not self.size_bytes:
            raise BadInput("the file is empty", where=str(self.path))
        number = 0
        try:
            for batch in self.batches():
                for data in batch:
                    where = f"{self.path}, record {number}"
                    yield record_columns(data, where), where
                    number += 1
        except (RuntimeError, IndexError, ValueError) as error:
            message = str(error).strip() or "it is cut off, or bytes of it are wrong"
            problem = f"a damaged {self.noun} file: {message}".splitlines()[0][:200]
            raise Damaged(problem, where=f"{self.path}, record {number}") from None


class ArrayRecords(RecordContainer):
    """An ArrayRecord file: texts, or records to fine-tune on."""

    kind: ClassVar[str] = "array_record"
    noun: ClassVar[str] = "ArrayRecord"

    def batches(self) -> Iterator[Sequence[bytes]]:
        library = import_package("array_record.python.array_record_module", "ArrayRecord files")
        with closing(library.ArrayRecordReader(str(self.path))) as reader:
            count = reader.num_records()
            # The index is at the end of the file. If it is missing, the library reports no records and no error.
            if not count:
                raise Damaged("an ArrayRecord file without an index: it is cut off, or holds no record", where=str(self.path))
            for first in range(0, count, BATCH_RECORDS):
                yield reader.read(list(range(first, min(first + BATCH_RECORDS, count))))


def record_columns(data: bytes, where: str) -> dict[str, Any]:
    """The columns of a record. A text that is no JSON object becomes the column `text`.

    Raises:
        BadInput: the record is neither a tf.Example nor text.
    """
    # A tf.Example begins with the tag of field 1, which is also the line break. So it may also be a text.
    if data.startswith(b"\n"):
        with suppress(BadInput):
            return tf_example(data, where)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise BadInput("a record that is neither a tf.Example nor text", where=where) from None
    try:
        columns = parse_json(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        columns = None
    return columns if isinstance(columns, dict) else {"text": text}
