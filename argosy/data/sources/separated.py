"""Reads tables of separated values (CSV, TSV). The first line names the columns, and every other line is a record.

Python's reader is used, because it keeps cells as texts. A reader that guesses types would turn a text of digits into a number. A cell
is parsed as JSON only in columns that hold no text: messages, labels, margins. An empty cell of such a column is null.
"""

import csv
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.json_text import parse_json
from argosy.data.sources.jsonl import LINE_BYTES, text_lines
from argosy.data.sources.opening import base_name
from argosy.data.sources.record_files import RecordFile, RowAt
from argosy.data.sources.records import WEIGHTS

# Columns of numbers, truth values, lists or objects; and columns that may be texts or lists of messages.
STRUCTURED = ("messages", "conversations", "history", "tools", "chat_template_kwargs", "completions", "labels", "label", "margin")
OF_MESSAGES = ("prompt", "completion", "chosen", "rejected")
# Truth values as pandas writes them.
WORDS = {"True": True, "False": False}
DELIMITERS = ",\t;|"


class SeparatedValues(RecordFile):
    """A table of separated values: texts, or records to fine-tune on."""

    kind: ClassVar[str] = "csv"

    def rows(self) -> Iterator[RowAt]:
        # This limit applies to the whole process. A cell is at most as long as a line.
        csv.field_size_limit(LINE_BYTES)
        place = [str(self.path)]

        def lines() -> Iterator[str]:
            for text, where in text_lines(self.path, self.invalid, self.encoding):
                place[0] = where
                yield text

        source = lines()
        first = next(source, "")
        table = csv.reader(_prepend(first, source), delimiter=self.delimiter(first), strict=True)
        names: list[str] = []
        try:
            for cells in table:
                if not names:
                    names = header(cells, place[0])
                elif cells:
                    yield self.record(names, cells, place[0]), place[0]
        except csv.Error as error:
            problem = (
                "a quoted cell that does not end" if "unexpected end" in str(error) else f"not a table of separated values: {error}"
            )
            raise BadInput(problem, where=place[0], hint=f"`data.source=text:{self.path}` reads the file as text") from None

    def delimiter(self, first: str) -> str:
        """The character between cells: a tab in `.tsv`, else the most frequent of DELIMITERS in the first line."""
        if base_name(self.path.name).endswith(".tsv"):
            return "\t"
        return max(DELIMITERS, key=first.count)

    def record(self, names: list[str], cells: list[str], where: str) -> dict[str, Any]:
        if len(cells) != len(names):
            problem = f"a row of {len(cells)} cells in a table of {len(names)} columns"
            raise BadInput(problem, where=where, hint="cells that hold a separator or a line break stand in double quotes")
        fields: dict[str, Any] = dict(zip(names, cells))
        for name in (*STRUCTURED, *([WEIGHTS] if self.reader.of_weights else [])):
            if (column := self.reader.named(name)) in fields:
                fields[column] = structured_value(fields[column])
        for name in OF_MESSAGES:
            if (cell := fields.get(self.reader.named(name), "")).startswith("["):
                fields[self.reader.named(name)] = messages_of(cell)
        return fields


def _prepend(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def header(cells: list[str], where: str) -> list[str]:
    """The names of the columns. A column without a name is called "column N".

    Raises:
        BadInput: a name occurs twice.
    """
    names = [cell.strip() for cell in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"two columns are called `{twice}`", where=where)
    # pandas writes its index as a column without a name.
    names = [name or f"column {number}" for number, name in enumerate(names)]
    return names


def structured_value(cell: str) -> Any:
    """Parses a cell of a column that holds no text: null if empty, a truth value, or JSON; else the cell itself."""
    if not cell:
        return None
    if cell in WORDS:
        return WORDS[cell]
    try:
        return parse_json(cell)
    except (ValueError, RecursionError):
        return cell


def messages_of(cell: str) -> Any:
    """The list of messages that a cell holds as JSON; the cell itself if it is a text."""
    content = structured_value(cell)
    is_message = lambda value: isinstance(value, Mapping) and {"role", "from"} & value.keys()  # noqa: E731
    is_list = isinstance(content, list) and content and all(map(is_message, content))
    return content if is_list else cell
