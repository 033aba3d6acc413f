"""Reads JSON lines: one JSON object per line, or one array of all objects (`.json`). Files may be compressed."""

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.input_files import InputFile
from argosy.data.sources.opening import base_name, open_bytes
from argosy.data.sources.record_files import RecordFile, RowAt
from argosy.data.sources.records import line_fields
from argosy.data.sources.text import decode

# Longer lines are refused: such a file is not JSONL.
LINE_BYTES = 64 << 20
# A larger JSON array is refused, since all of it is read at once.
ARRAY_BYTES = 1 << 30


class JsonLines(RecordFile):
    """A file of JSON lines, or of one JSON array of objects (`.json`): texts, or records to fine-tune on."""

    kind: ClassVar[str] = "jsonl"

    def rows(self) -> Iterator[RowAt]:
        if base_name(self.path.name).endswith(".json"):
            for number, row in enumerate(array_of(self.path, self.invalid, self.encoding)):
                where = f"{self.path}, record {number}"
                yield line_fields(json.dumps(row, ensure_ascii=False), where), where
            return
        for text, where in text_lines(self.path, self.invalid, self.encoding):
            if text.strip():
                yield line_fields(text, where), where


def text_lines(path: InputFile, invalid: str, encoding: str) -> Iterator[tuple[str, str]]:
    """Yields each line of a text file, with its place as FILE:LINE.

    Raises:
        BadInput: a line is longer than LINE_BYTES.
    """
    with open_bytes(path, encoding=encoding, invalid=invalid) as stream:
        offset = number = 0
        while line := stream.readline(LINE_BYTES + 1):
            number += 1
            if len(line) > LINE_BYTES:
                raise BadInput(f"a line of a record longer than {LINE_BYTES >> 20} MiB", where=f"{path}:{number}")
            text = decode(line, offset, path, invalid)
            yield text.removeprefix("\ufeff") if number == 1 else text, f"{path}:{number}"
            offset += len(line)


def array_of(path: InputFile, invalid: str, encoding: str) -> list[Any]:
    """Reads a file that is one JSON array.

    Raises:
        BadInput: the file is larger than ARRAY_BYTES, or is no JSON array.
    """
    with open_bytes(path, encoding=encoding, invalid=invalid) as stream:
        data = stream.read(ARRAY_BYTES + 1)
    lines = "one object a line (.jsonl) is read in pieces: `jq -c '.[]' FILE.json > FILE.jsonl`"
    if len(data) > ARRAY_BYTES:
        raise BadInput(f"a JSON array of more than {ARRAY_BYTES >> 20} MiB", where=str(path), hint=lines)
    try:
        values = json.loads(decode(data, 0, path, invalid).removeprefix("\ufeff"))
    except (ValueError, RecursionError) as e:
        hint = f"one object a line ends in .jsonl; `data.source=text:{path}` reads the file as text"
        raise BadInput(f"not JSON: {e}"[:200], where=str(path), hint=hint) from None
    if not isinstance(values, list):
        raise BadInput("a .json file must be an array of objects", where=str(path), hint=lines)
    return values
