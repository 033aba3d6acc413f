"""Reads tables of Apache Arrow and Parquet with pyarrow, in batches of rows. Only the columns that the format needs are read.

Files that `datasets` writes with `save_to_disk` and Feather files are Arrow files too. Text of any Arrow type is read. Lists,
structures and numbers become JSON values.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, ClassVar

from argosy.core.errors import BadInput, Damaged
from argosy.data.sources.opening import import_package
from argosy.data.sources.record_files import RecordFile, RecordSource, RowAt, plain

# Number of rows in a batch, which needs little memory and few calls.
BATCH_ROWS = 1024
# The end of an Arrow stream.
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowRows(RecordSource):
    """The base of sources whose records come in Arrow record batches."""

    @abstractmethod
    def tables(self) -> Iterator[tuple[int, Any]]:
        """Yields the record batches in order, each as (number of its first row, batch)."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The name of the file or data set, for errors."""

    def rows(self) -> Iterator[RowAt]:
        for row, batch in self.tables():
            if row == 0 and batch.num_rows:
                # The first row decides the format, and so which columns of the other rows are read.
                yield from self.batch_rows(batch.slice(0, 1), 0)
                yield from list(self.batch_rows(self.pruned(batch), 0))[1:]
            else:
                yield from self.batch_rows(self.pruned(batch), row)

    def columns_of(self, names: list[str]) -> list[str] | None:
        """The columns to read, of those with these names; None: all. The others are listed as ignored."""
        columns = self.reader.columns_read()
        # A function of the user may read any column. In pyarrow, names with dots are paths into structures.
        if columns is None or self.steps or any("." in name for name in names):
            return None
        self.reader.ignored |= dict.fromkeys(name for name in names if name not in columns)
        return [name for name in names if name in columns]

    def pruned(self, batch: Any) -> Any:
        names = self.columns_of(batch.schema.names)
        return batch if names is None else batch.select(names)

    def batch_rows(self, batch: Any, first: int) -> Iterator[RowAt]:
        # A damaged offset would make pyarrow read outside of the buffer.
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
    """Yields (number of its first row, batch) for each batch."""
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
        """Yields the record batches in order.

        Raises:
            Damaged: a stream has no end mark, so it is truncated.
        """
        ipc, head = import_package("pyarrow.ipc", "Arrow files"), raw.read(8)
        raw.seek(0)
        if head.startswith(b"FEA1"):
            yield from import_package("pyarrow.feather", "Feather files").read_table(raw).to_batches(BATCH_ROWS)
        elif head.startswith(b"ARROW1"):
            file = ipc.open_file(raw)
            yield from (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            # pyarrow does not notice if a stream is truncated between two batches.
            raw.seek(-len(END_MARK), 2)
            if raw.read() != END_MARK:
                raise Damaged("an Arrow stream without its end", where=str(self.path))
            raw.seek(0)
            yield from ipc.open_stream(raw)
