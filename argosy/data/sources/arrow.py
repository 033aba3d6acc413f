"""Tables of Apache Arrow and Parquet, read by pyarrow in batches of rows; of the columns, only those that the format reads.

An Arrow file is also what `datasets` writes by `save_to_disk`, and Feather. Text of any Arrow type is read, and lists, structures and
numbers become what JSON has.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, ClassVar

from argosy.core.errors import BadInput, Damaged
from argosy.data.sources.opening import import_package
from argosy.data.sources.record_files import RecordFile, RecordSource, RowAt, plain

# Rows of a batch: little memory, and few calls.
BATCH_ROWS = 1024
# The end of an Arrow stream.
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowRows(RecordSource):
    """Records in batches of Arrow."""

    @abstractmethod
    def tables(self) -> Iterator[tuple[int, Any]]:
        """Record batches in order, each with the number of its first row."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The file or data set, for errors."""

    def rows(self) -> Iterator[RowAt]:
        for row, batch in self.tables():
            if row == 0 and batch.num_rows:
                # One row decides the format, and so the columns of the others.
                yield from self.batch_rows(batch.slice(0, 1), 0)
                yield from list(self.batch_rows(self.pruned(batch), 0))[1:]
            else:
                yield from self.batch_rows(self.pruned(batch), row)

    def columns_of(self, names: list[str]) -> list[str] | None:
        """The columns to read; None: all."""
        columns = self.reader.columns_read()
        # A function of the user's may read any. Names with points are paths into structures for pyarrow.
        if columns is None or self.steps or any("." in name for name in names):
            return None
        self.reader.ignored |= dict.fromkeys(name for name in names if name not in columns)
        return [name for name in names if name in columns]

    def pruned(self, batch: Any) -> Any:
        names = self.columns_of(batch.schema.names)
        return batch if names is None else batch.select(names)

    def batch_rows(self, batch: Any, first: int) -> Iterator[RowAt]:
        # An offset that was damaged would be read outside of the buffer.
        batch.validate(full=True)
        for number, fields in enumerate(batch.to_pylist(), first):
            where = f"{self.place}, row {number}"
            yield {name: plain(value, where, name) for name, value in fields.items()}, where


class ParquetFile(RecordFile, ArrowRows):
    """A Parquet file: texts, or records to fine-tune on."""

    kind: ClassVar[str] = "parquet"
    noun: ClassVar[str] = "Parquet"

    @property
    def place(self) -> str:
        return str(self.path)

    def rows(self) -> Iterator[RowAt]:
        lib = import_package("pyarrow", f"{self.noun} files")
        if not self.size_bytes:
            raise BadInput("the file is empty", where=self.place)
        where = self.place
        try:
            for fields, place in super().rows():
                where = place
                yield fields, place
        except (lib.ArrowException, OSError) as error:
            problem = f"a damaged {self.noun} file: {error}".splitlines()[0][:200]
            raise Damaged(problem, where=where if where == self.place else f"after {where}") from None
        except UnicodeDecodeError:
            raise Damaged(f"a damaged {self.noun} file: a text that is not UTF-8", where=where) from None

    def tables(self) -> Iterator[tuple[int, Any]]:
        with self.path.open() as raw:
            file = import_package("pyarrow.parquet", "Parquet files").ParquetFile(raw, page_checksum_verification=True)
            for batch in file.iter_batches(1):
                yield 0, batch
                break
            # Columns that are not needed are not read from the file either.
            batches = numbered_batches(file.iter_batches(BATCH_ROWS, columns=self.columns_of(file.schema_arrow.names)))
            for row, batch in batches:
                yield (row, batch) if row else (1, batch.slice(1))


def numbered_batches(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Batches with the number of their first row."""
    row = 0
    for batch in batches:
        yield row, batch
        row += batch.num_rows


class ArrowFile(ParquetFile):
    """An Arrow file or stream, or a Feather file: texts, or records to fine-tune on."""

    kind: ClassVar[str] = "arrow"
    noun: ClassVar[str] = "Arrow"

    def tables(self) -> Iterator[tuple[int, Any]]:
        with self.path.open() as raw:
            yield from numbered_batches(self.batches(raw))

    def batches(self, raw: BinaryIO) -> Iterator[Any]:
        """Record batches in order.

        Raises:
            Damaged: a stream without its end.
        """
        ipc, head = import_package("pyarrow.ipc", "Arrow files"), raw.read(8)
        raw.seek(0)
        if head.startswith(b"FEA1"):
            yield from import_package("pyarrow.feather", "Feather files").read_table(raw).to_batches(BATCH_ROWS)
        elif head.startswith(b"ARROW1"):
            file = ipc.open_file(raw)
            yield from (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            # pyarrow takes a stream that is cut between two batches for a whole one.
            raw.seek(-len(END_MARK), 2)
            if raw.read() != END_MARK:
                raise Damaged("an Arrow stream without its end", where=str(self.path))
            raw.seek(0)
            yield from ipc.open_stream(raw)
