"""Makes rows from groups of examples in memory, such as preference pairs or the samples of one prompt.

    pairs = [Group((Example(chosen), Example(rejected)), values={"margin": 0.5}), ...]
    batches = build(settings, None, vocab=..., seed=..., source=Examples(pairs), rows_per_group=2, fields=...)

One example is one row: nothing is packed. Groups are shuffled as a whole, and each process's share of a batch holds whole groups.
This module knows no losses. The caller and the objective agree on the meaning of columns.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.batch import LANGUAGE_MODELING, Batch, Field, Fields
from argosy.data.sources import RowSource


@dataclass(frozen=True)
class Example:
    """The content of one row.

    tokens: n ids, of which n - 1 are inputs.
    weights: [n], the weight of each token in the loss; None: all are 1. The first is not used, because the first token is no target.
    columns: further numbers per token, such as advantages, [n] for each name. In a batch, they are aligned with the targets.
    values: numbers or arrays of the row, such as a reward, one for each name.
    inputs: numbers or vectors per token, such as the embeddings of an image, [n ...] for each name. In a batch, they are aligned with
        the inputs.
    """

    tokens: Sequence[int]
    weights: Sequence[float] | None = None
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExampleGroup:
    """Examples that always stay together, in order.

    examples: the examples.
    values: numbers or arrays of the group, such as a margin, one for each name.
    """

    examples: Sequence[Example]
    values: Mapping[str, Any] = field(default_factory=dict)


class GroupRows:
    """Rows of `sequence` tokens, one example each. Row `g i + j` is example j of group i, where a group has g examples."""

    def __init__(self, groups: Sequence[ExampleGroup], sequence: int, vocab: int):
        """Raises:
        BadInput: groups have unequal sizes, an example is too long or too short or has a token outside the vocabulary, or names or
            shapes differ between examples.
        """
        sizes = {len(group.examples) for group in groups}
        if len(sizes) > 1 or 0 in sizes:
            raise BadInput(
                f"groups of {' and '.join(map(str, sorted(sizes)))} examples", hint="make all groups equally large"
            )
        self.groups, self.sequence, self.per_group = groups, sequence, max(sizes, default=1)
        self.fields: Fields = dict(LANGUAGE_MODELING)
        examples = [example for group in groups for example in group.examples]
        for number, example in enumerate(examples):
            self._check(example, f"example {number % self.per_group} of group {number // self.per_group}", vocab)
        self._tables = {
            "token": stack_rows([example.columns for example in examples], "column", tokens=True),
            "input": stack_rows([example.inputs for example in examples], "input", tokens=True),
            "row": stack_rows([example.values for example in examples], "value of a row"),
            "group": stack_rows([group.values for group in groups], "value of a group"),
        }
        for per, table in self._tables.items():
            for name, field_ in table.items():
                if name in self.fields:
                    raise BadInput(f"two fields are called `{name}`", hint="rename the column or the value")
                kind: Any = "token" if per == "input" else per
                self.fields[name] = Field(_axes_of(kind, field_), field_.dtype, kind, "input" if per == "input" else "target")

    def _check(self, example: Example, where: str, vocab: int) -> None:
        count = len(example.tokens)
        if not 2 <= count <= self.sequence + 1:
            problem = f"an example of {plural(count, 'token')}, where a row takes 2 to {self.sequence + 1}"
            raise BadInput(problem, where=where, hint="raise `data.sequence`, or cut the example")
        if wrong := next((token for token in example.tokens if not 0 <= token < vocab), None):
            raise BadInput(f"token {wrong} is outside the vocabulary of {vocab}", where=where)
        columns = {**example.columns, **example.inputs} | ({} if example.weights is None else {"weights": example.weights})
        for name, values in columns.items():
            if len(values) != count:
                raise BadInput(f"`{name}` has {plural(len(values), 'number')} for {plural(count, 'token')}", where=where)

    def __len__(self) -> int:
        return len(self.groups) * self.per_group

    def gather(self, rows: np.ndarray) -> Batch:
        """Returns the batch of the rows with these numbers, [B], which must be whole groups. Fields per row have B entries, and fields
        per group have B / per_group."""
        numbers = rows[:: self.per_group] // self.per_group
        if (rows != (numbers[:, None] * self.per_group + np.arange(self.per_group)).ravel()).any():
            raise ValueError("the rows asked for are not whole groups")
        batch: Batch = {}
        for name, field_ in self.fields.items():
            if field_.per == "token":
                shape = self._tables["input"][name].shape[1:] if name in self._tables["input"] else ()
                batch[name] = np.zeros((len(rows), self.sequence, *shape), field_.dtype)
        for at, row in enumerate(rows.tolist()):
            example = self.groups[row // self.per_group].examples[row % self.per_group]
            index = at, slice(0, len(example.tokens) - 1)
            batch["tokens"][index], batch["targets"][index] = example.tokens[:-1], example.tokens[1:]
            batch["segments"][index] = 1
            batch["mask"][index] = 1 if example.weights is None else example.weights[1:]
            for name in self._tables["token"]:
                batch[name][index] = example.columns[name][1:]
            for name in self._tables["input"]:
                batch[name][index] = np.asarray(example.inputs[name])[:-1]
        batch |= {name: table[rows] for name, table in self._tables["row"].items()}
        return batch | {name: table[numbers] for name, table in self._tables["group"].items()}


class Examples(RowSource):
    """Groups of examples in memory, for training and for evaluation."""

    def __init__(self, groups: Sequence[ExampleGroup], held_out: Sequence[ExampleGroup] = ()):
        self.groups, self.held_out = groups, held_out

    def rows(self, *, sequence: int, vocab: int, seed: int, held_out: bool = False) -> GroupRows:
        return GroupRows(self.held_out if held_out else self.groups, sequence, vocab)

    def fingerprint(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for group in self.groups:
            for example in group.examples:
                digest.update(f"row {_array_digest(example.tokens)} {_array_digest(example.weights)}".encode())
                digest.update(f"{_mapped(example.columns)} {_mapped(example.values)}".encode())
                digest.update(_mapped(example.inputs).encode())
            digest.update(f"group {_mapped(group.values)}".encode())
        return {"source": "examples", "source.sha256": digest.hexdigest()}


def stack_rows(items: Sequence[Mapping[str, Any]], noun: str, tokens: bool = False) -> dict[str, np.ndarray]:
    """Stacks the values of mappings with equal names to one array per name.

    Args:
        noun: the word for a value in error messages, such as "column".
        tokens: whether the values have one entry per token. Their lengths differ, so the result is then an empty array with the type
            and shape of an entry.

    Raises:
        BadInput: names or shapes differ.
    """
    names = list(items[0]) if items else []
    for number, item in enumerate(items):
        if set(item) != set(names):
            listed = ", ".join(f"`{name}`" for name in sorted(set(item) ^ set(names)))
            raise BadInput(f"only some have the {noun} {listed}", where=f"number 0 and number {number} differ")
    tables = {}
    for name in names:
        arrays = [number_array(item[name]) for item in items]
        if tokens:
            if len({array.shape[1:] for array in arrays}) > 1:
                raise BadInput(f"the {noun} `{name}` has entries of different shapes")
            tables[name] = np.zeros((0, *arrays[0].shape[1:]), np.result_type(*arrays))
        elif len({array.shape for array in arrays}) > 1:
            raise BadInput(f"the {noun} `{name}` has different shapes", hint="pad it to one shape")
        else:
            tables[name] = np.stack(arrays)
    return tables


def number_array(value: Any) -> np.ndarray:
    """Converts numbers to an array. Python numbers become float32 or int32, and numpy arrays keep their type."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    array = np.asarray(value)
    return array.astype({"f": np.float32, "i": np.int32}.get(array.dtype.kind, array.dtype))


def _axes_of(per: str, table: np.ndarray) -> str:
    """The letters of a field's axes (`Field.axes`): B or B T, then one lower-case letter for each further axis of `table`."""
    if per == "token":
        return " ".join(["B", "T", *"abcdef"[: table.ndim - 1]])
    return " ".join(["B", *"abcdef"[: table.ndim - 1]])


def _array_digest(values: Any) -> str:
    array = np.asarray(values if values is not None else [])
    return f"{array.dtype} {array.shape} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


def _mapped(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_array_digest(values[name])}" for name in sorted(values))
