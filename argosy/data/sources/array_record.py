"""ArrayRecord files, read by the package of that name, which Grain brings where it installs.

A record is a tf.Example (as MaxText and TFDS write them), a JSON object, or UTF-8 text.
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, ClassVar

from argosy.core.errors import BadInput, Damaged
from argosy.core.json_text import parse_json
from argosy.data.sources.opening import needed
from argosy.data.sources.record_files import RecordFile, RowAt
from argosy.data.sources.tfrecord import tf_example

# Records read at once: their chunks are then unpacked once.
BATCH_RECORDS = 1024


class ArrayRecords(RecordFile):
    """An ArrayRecord file: texts, or records to fine-tune on."""

    kind: ClassVar[str] = "array_record"

    def rows(self) -> Iterator[RowAt]:
        if not self.path.is_local:
            hint = "copy the file to this machine, or write Parquet"
            raise BadInput("ArrayRecord files are read from this machine's disk", where=str(self.path), hint=hint)
        library, number = needed("array_record.python.array_record_module", "ArrayRecord files"), 0
        try:
            with closing(library.ArrayRecordReader(str(self.path))) as reader:
                count = reader.num_records()
                # The index is at the end: without it, the library finds nothing and says nothing.
                if not count and self.size_bytes:
                    raise Damaged("an ArrayRecord file without an index: it is cut off, or holds no record", where=str(self.path))
                while number < count:
                    for data in reader.read(list(range(number, min(number + BATCH_RECORDS, count)))):
                        where = f"{self.path}, record {number}"
                        yield record_columns(data, where), where
                        number += 1
        except (RuntimeError, IndexError, ValueError) as error:
            what = f"a damaged ArrayRecord file: {error}".splitlines()[0][:200]
            raise Damaged(what, where=f"{self.path}, record {number}") from None


def record_columns(data: bytes, where: str) -> dict[str, Any]:
    """The columns of a record.

    Raises:
        BadInput: it is neither a tf.Example nor text.
    """
    # A tf.Example begins with its only field, of number 1; a text may begin with a line break too.
    if data.startswith(b"\n"):
        with suppress(BadInput):
            return tf_example(data, where)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise BadInput("a record that is neither a tf.Example nor text", where=where) from None
    try:
        found = parse_json(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"text": text}
