"""Records of texts that a model scores or embeds, as users of transformers and sentence-transformers write them.

    classification   text, label                  with `text_pair` for two texts; label: `data.labels`
"""

from collections.abc import Mapping
from typing import Any

from argosy.core.errors import BadInput
from argosy.data.sources import SourceRecord

Row = Mapping[str, Any]


def classification_record(row: Row, where: str, kind: Any) -> SourceRecord:
    """A text, or a pair of texts, and its label as the file has it."""
    _check_texts(row, ("text", "text_pair"), where, kind)
    return SourceRecord(where=where, prompt=row["text"], completion=row.get("text_pair"), columns={"label": row["label"]})


def _check_texts(row: Row, names: tuple[str, ...], where: str, kind: Any) -> None:
    for name in names:
        if name in row and not isinstance(row[name], str):
            raise BadInput(f"`{name}` is {kind(row[name])}, not a text", where=where)
