"""Reads records of texts that a model scores or embeds, in the formats of transformers and sentence-transformers.

    classification   text, label                    a text with a label (`data.labels`); with `text_pair`, two texts
    pair             anchor, positive               two texts whose vectors should be near to each other
    triplet          anchor, positive, negative     a pair, and a text whose vector should be far from the anchor
    negatives        anchor, positive, negatives    a pair, and a list of any number of negatives; or columns negative_1,
                                                    negative_2 ..., as sentence-transformers' mine_hard_negatives writes them
    similarity       sentence1, sentence2, score    two texts, and a number that is larger the more similar they are
    rerank           anchor, positive, negative     a query, a document that answers it, and a document that does not

In `pair`, `triplet`, `negatives` and `similarity`, each text is a sequence. In `rerank` and `classification`, two texts are one
sequence.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from argosy.core.errors import BadInput
from argosy.data.sources import SourceRecord

Row = Mapping[str, Any]
# For each format in which each text is a sequence: the columns of the texts, in order.
SEQUENCES = {"pair": ("anchor", "positive"), "triplet": ("anchor", "positive", "negative"), "similarity": ("sentence1", "sentence2")}
# The name of the format with a list of negatives, and of its column. The list may also be numbered columns.
NEGATIVES = "negatives"
# The columns of texts whose vectors are compared, by format. The last column also stands for all further texts.
COMPARED = {**SEQUENCES, NEGATIVES: SEQUENCES["triplet"]}
NUMBERED = re.compile("negative_([0-9]{1,4})")


def classification_record(row: Row, where: str, kind: Any) -> SourceRecord:
    """A record of a text or a pair of texts, with the label as the file has it. `kind` describes a JSON value, for errors."""
    _check_texts(row, ("text", "text_pair"), where, kind)
    return SourceRecord(where=where, prompt=row["text"], completion=row.get("text_pair"), columns={"label": row["label"]})


def compared_record(row: Row, format: str, where: str, kind: Any) -> SourceRecord:
    """A record of the first text, with a record of each other text in `others`. In `similarity`, each has the score as its label."""
    names = SEQUENCES[format]
    _check_texts(row, names, where, kind)
    columns = {"label": score_of(row["score"], where, kind)} if format == "similarity" else {}
    first, *others = (SourceRecord(where=where, prompt=row[name], columns=columns) for name in names)
    return replace(first, others=tuple(others))


def with_negatives(fields: Row, column: str) -> Row:
    """The columns of a record, with numbered columns of negatives joined to one list, in the order of their numbers. Null is left out.

    Args:
        column: the name of the list in the file. A null list becomes an empty list.
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
    """A record of the anchor, with records of the positive and of the negatives in `others`. Empty negatives are left out."""
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
    """A record of the query with the document that answers it. In `others`, the query with the document that does not answer it."""
    _check_texts(row, ("anchor", "positive", "negative"), where, kind)
    right, wrong = (SourceRecord(where=where, prompt=row["anchor"], completion=row[name]) for name in ("positive", "negative"))
    return replace(right, others=(wrong,))


def score_of(value: Any, where: str, kind: Any) -> float:
    """The similarity of two texts, as a number.

    Raises:
        BadInput: the value is no finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise BadInput(f"`score` is {kind(value)}", where=where, hint="a number: the more similar two texts are, the larger")
    return float(value)


def _check_texts(row: Row, names: tuple[str, ...], where: str, kind: Any) -> None:
    for name in names:
        if name in row and not isinstance(row[name], str):
            raise BadInput(f"`{name}` is {kind(row[name])}, not a text", where=where)
