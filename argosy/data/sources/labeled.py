"""Records of texts that a model scores or embeds, as users of transformers and sentence-transformers write them.

    classification   text, label                    with `text_pair` for two texts; label: `data.labels`
    pair             anchor, positive               two texts whose vectors are to be near to one another
    triplet          anchor, positive, negative     and one whose vector is to be far
    negatives        anchor, positive, negatives    and a list of such texts, of any length; or columns negative_1,
                                                    negative_2 ..., as sentence-transformers' mine_hard_negatives writes them
    similarity       sentence1, sentence2, score    two texts, and a number: the more similar, the larger
    rerank           anchor, positive, negative     the pair of a query and a document that answers it, and one that does not

Each text of a pair, triplet, similarity or of negatives is a sequence of its own; in `rerank` and `classification` two texts make one.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from argosy.core.errors import BadInput
from argosy.data.sources import SourceRecord

Row = Mapping[str, Any]
# The texts of a record that are sequences of their own, in their order.
SEQUENCES = {"pair": ("anchor", "positive"), "triplet": ("anchor", "positive", "negative"), "similarity": ("sentence1", "sentence2")}
# The format with a list of texts, and its column. The list may be in columns of its own.
NEGATIVES = "negatives"
# The columns of texts whose vectors are compared, by format; the last is that of all further texts.
COMPARED = {**SEQUENCES, NEGATIVES: SEQUENCES["triplet"]}
NUMBERED = re.compile("negative_([0-9]{1,4})")


def classification_record(row: Row, where: str, kind: Any) -> SourceRecord:
    """A text, or a pair of texts, and its label as the file has it."""
    _check_texts(row, ("text", "text_pair"), where, kind)
    return SourceRecord(where=where, prompt=row["text"], completion=row.get("text_pair"), columns={"label": row["label"]})


def compared_record(row: Row, format: str, where: str, kind: Any) -> SourceRecord:
    """The first text of a record, with those that it is compared with. Each of a record of `similarity` has its score as the label."""
    names = SEQUENCES[format]
    _check_texts(row, names, where, kind)
    columns = {"label": score_of(row["score"], where, kind)} if format == "similarity" else {}
    first, *others = (SourceRecord(where=where, prompt=row[name], columns=columns) for name in names)
    return replace(first, others=tuple(others))


def with_negatives(fields: Row, column: str) -> Row:
    """The columns of a record, with its numbered negatives as one list in the order of their numbers; null ones are left out.

    Args:
        column: name of the list in the file; null is an empty list.
    """
    if column in fields:
        return fields if fields[column] is not None else {**fields, column: []}
    numbered = sorted((int(match[1]), name) for name in fields if (match := NUMBERED.fullmatch(name)))
    if not numbered:
        return fields
    names = [name for _, name in numbered]
    rest = {name: value for name, value in fields.items() if name not in names}
    return {**rest, column: [fields[name] for name in names if fields[name] is not None]}


def contrasted_record(row: Row, where: str, kind: Any) -> SourceRecord:
    """A text with the one that it belongs to, and those that it does not; empty ones are left out."""
    _check_texts(row, ("anchor", "positive"), where, kind)
    negatives = row[NEGATIVES]
    if not isinstance(negatives, list):
        raise BadInput(f"`{NEGATIVES}` is {kind(negatives)}, not a list of texts", where=where, hint='like ["one text", "another"]')
    if (wrong := next((text for text in negatives if not isinstance(text, str)), None)) is not None:
        raise BadInput(f"`{NEGATIVES}` has {kind(wrong)} among its texts", where=where, hint='like ["one text", "another"]')
    texts = (row["anchor"], row["positive"], *filter(str.strip, negatives))
    first, *others = (SourceRecord(where=where, prompt=text) for text in texts)
    return replace(first, others=tuple(others))


def reranking_record(row: Row, where: str, kind: Any) -> SourceRecord:
    """A query with a document that answers it; the same query with one that does not is among its others."""
    _check_texts(row, ("anchor", "positive", "negative"), where, kind)
    right, wrong = (SourceRecord(where=where, prompt=row["anchor"], completion=row[name]) for name in ("positive", "negative"))
    return replace(right, others=(wrong,))


def score_of(value: Any, where: str, kind: Any) -> float:
    """How similar two texts are.

    Raises:
        BadInput: it is no finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise BadInput(f"`score` is {kind(value)}", where=where, hint="a number: the more similar two texts are, the larger")
    return float(value)


def _check_texts(row: Row, names: tuple[str, ...], where: str, kind: Any) -> None:
    for name in names:
        if name in row and not isinstance(row[name], str):
            raise BadInput(f"`{name}` is {kind(row[name])}, not a text", where=where)
