"""Reads and checks task files: JSON lines in one of a few layouts.

A file may be compressed (`.gz`). Every row must have the fields of the layout. If a row lacks one, this is an error with its line,
because a score over the remaining rows would be that of another task.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.formats.recognize import HEAD_BYTES, refuse_binary
from argosy.core.json_text import parse_json
from argosy.data.sources import SourceRecord
from argosy.data.sources.records import FORMATS, RecordReader

Fields = dict[str, Any]

# Layout -> its fields and the kind of each. A file has the first of these layouts whose fields its first row has.
LAYOUTS: dict[str, dict[str, str]] = {
    "instructions": {"prompt": "text", "instruction_id_list": "texts", "kwargs": "objects"},
    "options": {"context_options": "choices", "continuation": "text", "gold": "place"},
    "choices": {"query": "text", "choices": "choices", "gold": "place"},
    "letters": {"question": "text", "choices": "choices", "gold": "place"},
    "continuation": {"context": "text", "continuation": "text"},
    "input-target": {"input": "text", "target": "text"},
    "question-answer": {"question": "text", "answer": "text"},
    "context-answer": {"context": "text", "answer": "text"},
    "scored-pairs": {"sentence1": "sentence", "sentence2": "sentence", "score": "number"},
    "labeled-pairs": {"sentence1": "sentence", "sentence2": "sentence", "label": "class"},
    "text": {"text": "text"},
}
# The formats of training data whose records have one answer, so that its loss can be evaluated.
ANSWERED = ("completion", "messages", "alpaca", "sharegpt")
HOLDS = {
    "text": "text",
    "sentence": "a text with something in it",
    "texts": "a list of texts",
    "choices": "a list of at least two texts",
    "objects": "a list of objects",
    "place": "the place of the right choice, from 0",
    "number": "a number",
    "class": "0 or 1",
}


def is_rows(path: Path) -> bool:
    """Whether the name of a file says that it holds JSON lines."""
    return path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def read_task_text(path: Path) -> str:
    """Reads the text of a file, which may be compressed by gzip.

    Raises:
        BadInput: the file cannot be read, holds something else than text, or is not UTF-8.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        refuse_binary(data[:HEAD_BYTES], str(path))
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text", where=f"byte {error.start}") from None
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise BadInput(f"{path} is not a whole .gz file") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None


def read_rows(path: Path) -> list[Fields]:
    """Reads the rows of a file of JSON lines. Blank lines are ignored.

    Raises:
        BadInput: the file cannot be read, a line is not a JSON object, or there are no rows.
    """
    rows = []
    for number, line in enumerate(read_task_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"a line that is not JSON: {error}", where=f"{path}, line {number}") from None
        if not isinstance(row, dict):
            raise BadInput("a line that is not a JSON object", where=f"{path}, line {number}")
        rows.append(row)
    if not rows:
        raise BadInput(f"{path} holds no rows", hint="one JSON object a line")
    return rows


def layout_of(path: Path, row: Mapping[str, Any]) -> str:
    """The layout of a file, from its first row.

    Raises:
        BadInput: the row fits no layout.
    """
    for name, fields in LAYOUTS.items():
        if all(field in row for field in fields):
            return name
    raise no_layout(path, row)


def no_layout(path: Path, row: Mapping[str, Any]) -> BadInput:
    """The error for a file whose first row fits no layout."""
    layouts = "; ".join(", ".join(fields) for fields in [*LAYOUTS.values(), *(FORMATS[name][0] for name in ANSWERED)])
    return BadInput(
        f"{path} has rows of no known layout", where=f"fields: {', '.join(map(str, row))}", hint=f"layouts are {layouts}"
    )


def answered_format(path: Path, row: Mapping[str, Any]) -> str | None:
    """The format of training records with answers (`data.sources.records`) that the first row of a file has; None: it has no such
    format.

    Raises:
        BadInput: the row fits several formats, or one in which records have not exactly one answer.
    """
    has = {name: value for name, value in row.items() if value is not None}
    fits = [name for name in RecordReader().fitting(has) if name != "text"]
    where = f"fields: {', '.join(map(str, row))}"
    if len(fits) > 1:
        raise BadInput(f"{path} could hold {' or '.join(f'`{name}`' for name in fits)} records", where=where)
    if not fits or fits[0] in ANSWERED:
        return fits[0] if fits else None
    raise BadInput(
        f"{path} holds `{fits[0]}` records, which have no loss of one answer to evaluate",
        where=where,
        hint="training with held-out records evaluates them; argosy eval reads records with one answer: "
        + "; ".join(", ".join(FORMATS[name][0]) for name in ANSWERED),
    )


def read_records(path: Path, rows: Sequence[Fields], format: str) -> list[SourceRecord]:
    """Converts rows to records of this format.

    Raises:
        BadInput: a row is not of the format. The message names the row.
    """
    reader = RecordReader(format)
    return [reader.record(row, f"{path}, row {i} of {len(rows)}") for i, row in enumerate(rows, 1)]


def check_task_rows(path: Path, rows: list[Fields], layout: str, task: str, more: Iterable[str] = ()) -> None:
    """Checks that every row has the fields of a layout.

    Args:
        task: the name of the task, for errors.
        more: the names of further fields that must be texts.

    Raises:
        BadInput: a field is missing or of another kind. The message names the first such row.
    """
    fields = LAYOUTS[layout] | dict.fromkeys((field for field in more if field not in LAYOUTS[layout]), "text")
    for number, row in enumerate(rows):
        where = f"{path}, row {number + 1} of {len(rows)}"
        for field, holds in fields.items():
            if field not in row:
                hint = f"rows of {task} have {', '.join(fields)}"
                raise BadInput(f"no field `{field}`", where=where, hint=hint)
            if not _holds(row[field], holds):
                raise BadInput(f"`{field}` should be {HOLDS[holds]}, not {_excerpt(row[field])}", where=where)
        options = row["context_options"] if layout == "options" else row.get("choices", ())
        if "gold" in LAYOUTS[layout] and not 0 <= row["gold"] < len(options):
            problem = f"gold = {row['gold']}, and there are {plural(len(options), 'choice')}"
            raise BadInput(problem, where=where, hint=f"0 to {len(options) - 1}")


def _holds(value: Any, kind: str) -> bool:
    if kind == "text":
        return isinstance(value, str)
    if kind == "sentence":
        return isinstance(value, str) and bool(value.strip())
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "class":
        return type(value) is int and value in (0, 1)
    if kind == "place":
        return isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, list) or len(value) < (2 if kind == "choices" else 1):
        return False
    return all(isinstance(item, dict if kind == "objects" else str) for item in value)


def _excerpt(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
