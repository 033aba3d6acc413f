"""The base of files of records, one record per row: JSON lines, tables, and containers of examples.

A subclass reads the rows of one kind of file (`RecordFile.rows`). The first row decides the format, and so which columns are read
(`records.RecordReader`). A column that is null counts as absent. This module knows no kind of file.
"""

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from argosy.core.errors import BadInput
from argosy.core.input_files import InputFile
from argosy.data.sources import Document, Source, existing
from argosy.data.sources.opening import UTF8, content_hash, modification_times, text_encoding
from argosy.data.sources.records import RecordReader
from argosy.data.sources.steps import RecordSteps
from argosy.data.sources.text import encoded_as

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

# The columns of a record, and its place: file and line, or file and row.
RowAt = tuple[dict[str, Any], str]


class RecordSource(Source):
    """The base of sources with one record per row: texts, or records to fine-tune on."""

    has_columns = True
    kind: ClassVar[str]  # in the registry of sources

    def __init__(
        self, *, format: str = "auto", columns: Mapping[str, str] | None = None, steps: RecordSteps | None = None
    ):
        """Args:
            format, columns: as in `records.RecordReader`.
            steps: the user's functions that are applied to each record first.
        """
        self.asked, self.columns = format, dict(columns or {})
        self.steps = steps or RecordSteps()
        self.reader = RecordReader(format, columns)

    @abstractmethod
    def rows(self) -> Iterator[RowAt]:
        """Yields all records from the first on, with the column names of the file."""

    @property
    def format(self) -> str:
        if self.reader.format is None:
            next(self.documents(), None)
        return self.reader.format or "text"

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(self.reader.ignored)

    def documents(self) -> Iterator[Document]:
        for fields, where in self.rows():
            for row in self.steps(fields, where) if self.steps else (fields,):
                yield self.document(row, where)

    def document(self, fields: Mapping[str, Any], where: str) -> Document:
        if not self.reader.begun:
            self.reader.row(fields, where)  # decides the format
        if self.reader.format == "text":
            weights = self.reader.weights_of(fields, where)
            return Document(self.reader.text(fields, where), weights=weights, where=where if weights is not None else None)
        record = replace(self.reader.record(fields, where), weights=self.reader.weights_of(fields, where))
        return Document(record.text, record=record)

    def read_fingerprint(self) -> dict[str, Any]:
        """The part of the fingerprint that says how records are read."""
        return read_as(self.format, self.columns) | self.steps.fingerprint()


class RecordFile(RecordSource):
    """The base of single files of records."""

    def __init__(
        self,
        path: str | Path | InputFile,
        *,
        invalid: str = "error",
        format: str = "auto",
        columns: Mapping[str, str] | None = None,
        encoding: str = UTF8,
        steps: RecordSteps | None = None,
    ):
        super().__init__(format=format, columns=columns, steps=steps)
        self.path = existing(path)
        self.invalid, self.encoding = invalid, text_encoding(encoding)
        self.size_bytes = self.disk_bytes = self.path.size_bytes
        self.files = 1

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        options: dict[str, Any] = {"invalid": settings.invalid, "format": settings.format, "encoding": settings.encoding}
        return cls(argument, columns=settings.columns, steps=settings.steps, **options)

    def fingerprint(self) -> dict[str, Any]:
        fingerprint = {"source": self.kind, "source.sha256": content_hash(self.path), "source.invalid": self.invalid}
        return fingerprint | encoded_as(self.encoding) | self.read_fingerprint()

    def modified(self) -> list[int]:
        return modification_times([self.path])


def read_as(format: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """The part of a fingerprint that says how records are read. It is empty for text in the column `text`, so that older runs
    resume."""
    facts = {"source.format": format} if format != "text" else {}
    return facts | ({"source.columns": json.dumps(dict(columns), sort_keys=True)} if columns else {})


def plain(value: Any, where: str, column: str) -> Any:
    """Converts a value of a table to a JSON value: times to ISO 8601 texts, bytes to UTF-8 text, structures to objects without null
    fields.

    In a table, all structures of a column have the same fields, so a null field is one that the record did not have.

    Raises:
        BadInput: bytes are no text.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {name: plain(inner, where, f"{column}.{name}") for name, inner in value.items() if inner is not None}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            problem = f"`{column}` holds bytes that are not text"
            raise BadInput(problem, where=where, hint="leave that column out of the file") from None
    if isinstance(value, Sequence):
        return [plain(inner, where, column) for inner in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    return str(value)
