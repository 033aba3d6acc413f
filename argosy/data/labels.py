"""Finds the classes in a file of labeled records, and converts labels to numbers.

    "label": "good"              one class of several, by name or by number from 0
    "label": ["news", "sport"]   several classes at once, or none; also [0, 2], or a number for each class: [0.0, 1.0, 0.5]
    "label": 3.5                 no class but a number: regression

Columns and kinds of labels are those of transformers' examples for text classification. Class names are sorted, so that their order
does not depend on the order of the lines.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from argosy.core.counts import plural
from argosy.core.errors import BadInput, nearest

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

SINGLE, MULTIPLE, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
# More classes than any published set of texts: a column of this many names is probably an id.
MOST_CLASSES = 10_000


@dataclass(frozen=True)
class LabelSet:
    """The labels of a file.

    names: names of the classes; empty for regression.
    problem_type: the kind of labels, as transformers' `problem_type` names it.
    counts: number of records of each class.
    """

    names: tuple[str, ...]
    problem_type: str
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def scores(self) -> int:
        """The number of scores that a head outputs for these labels: one per class, or one for regression."""
        return len(self.names) or 1


def labels_of_source(settings: "DataSettings") -> LabelSet:
    """Reads a whole source of `classification` records, and returns its labels.

    Raises:
        BadInput: there are no labels, labels of several kinds, only one class, or more than MOST_CLASSES classes.
    """
    from argosy.data.sources import Source
    from argosy.data.sources.find import find_source

    source = find_source(settings.model_copy(update={"format": "classification"}))
    if not isinstance(source, Source):
        raise BadInput("this data has no labels", where=f"data.source={settings.source_name}")
    counts: Counter[Any] = Counter()
    kind, longest, first = "", 0, ""
    for document in source.documents():
        if (record := document.record) is None:
            continue
        raw, where = record.columns["label"], record.where
        current = label_kind(raw, where)
        # An empty list may be of any kind of several classes.
        current = kind if current == "none" and kind else current
        if kind not in ("", "none", current):
            problem = f"a label that is {current}, after labels that are {kind}"
            raise BadInput(problem, where=where, hint=f"{first} has the first; all labels of a file are of one kind")
        kind, first = current, first or where
        counts.update(raw if isinstance(raw, list) and current != "numbers for classes" else [] if isinstance(raw, list) else [raw])
        longest = max(longest, len(raw)) if isinstance(raw, list) else longest
        if len(counts) > MOST_CLASSES and current != "a number":
            problem = f"more than {MOST_CLASSES:,} classes"
            raise BadInput(problem, where=where, hint="is `label` the right column? data.columns.label=NAME reads another")
    if not kind:
        raise BadInput("no record has a label", where=f"data.source={settings.source_name}")
    return _label_set(kind, counts, longest, settings.source_name)


def _label_set(kind: str, counts: "Counter[Any]", longest: int, source: str) -> LabelSet:
    if kind == "a number":
        return LabelSet((), REGRESSION)
    problem = SINGLE if kind in ("a name", "a class") else MULTIPLE
    if kind == "numbers for classes":
        return LabelSet(_numbered_names(longest), problem)
    if kind in ("a name", "names"):
        names = tuple(sorted(counts))
        class_counts = {name: counts[name] for name in names}
    else:
        numbers = Counter({int(number): count for number, count in counts.items()})
        names = _numbered_names(max(numbers, default=-1) + 1)
        class_counts = {name: numbers.get(i, 0) for i, name in enumerate(names)}
    if len(names) == 1 and problem == SINGLE:
        hint = "is `label` the right column? data.columns.label=NAME reads another"
        raise BadInput(f"every record has the label {names[0]}", where=f"data.source={source}", hint=hint)
    return LabelSet(names, problem, class_counts)


def _numbered_names(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{i}" for i in range(count))


def label_kind(raw: Any, where: str) -> str:
    """The kind of a label, as a phrase such as "a name" or "numbers for classes".

    Raises:
        BadInput: the value is no label.
    """
    if isinstance(raw, str):
        return "a name"
    if isinstance(raw, bool) or (isinstance(raw, int) and raw >= 0):
        return "a class"
    if isinstance(raw, float) and abs(raw) < float("inf"):
        return "a number"
    if isinstance(raw, list):
        if not raw:
            return "none"
        if all(isinstance(label, str) for label in raw):
            return "names"
        if all(isinstance(label, int) and not isinstance(label, bool) and label >= 0 for label in raw):
            return "classes"
        if all(isinstance(label, float) and 0 <= label <= 1 for label in raw):
            return "numbers for classes"
    problem = f"`label` is {str(raw)[:40]}"
    raise BadInput(problem, where=where, hint='a name, the number of a class, a number with a point, or a list: "good", 1, 3.5, ["a"]')


def label_numbers(raw: Any, names: Sequence[str], where: str) -> list[float]:
    """Converts a label to numbers: the index of its class, 0 or 1 for each class if a text may have several, or the number itself for
    regression.

    Args:
        names: the names of the classes; empty for regression.
        where: the file and line of the record, for errors.

    Raises:
        BadInput: the class is not among the names, or the label is of another kind.
    """
    kind = label_kind(raw, where)
    if not names:
        if kind not in ("a number", "a class"):
            raise BadInput(f"a label that is {kind}, where numbers are learned", where=where)
        return [float(raw)]
    if kind == "a number":
        raise BadInput(f"a label that is a number, {raw}, where classes are learned", where=where, hint=f"classes are {_list(names)}")
    if kind == "numbers for classes":
        if len(raw) != len(names):
            raise BadInput(f"a label of {plural(len(raw), 'number')} for {len(names)} classes", where=where)
        return list(raw)
    if isinstance(raw, list):
        indexes = {_index(label, names, where) for label in raw}
        return [float(i in indexes) for i in range(len(names))]
    return [float(_index(raw, names, where))]


def _index(raw: Any, names: Sequence[str], where: str) -> int:
    if isinstance(raw, str):
        if raw not in names:
            raise BadInput(f"unknown class `{raw[:60]}`", where=where, hint=nearest(raw, names) or f"classes are {_list(names)}")
        return names.index(raw)
    if int(raw) >= len(names):
        raise BadInput(f"class {int(raw)}, and there are {len(names)} classes", where=where, hint="classes are numbered from 0")
    return int(raw)


def _list(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > 8 else ""
    return ", ".join(f"`{name}`" for name in names[:8]) + more
