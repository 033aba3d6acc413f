"""Joins the tables of several sources to one table, in which the rows of the sources follow each other."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.batch import Batch, Field, Fields
from argosy.data.pack import PackCounts, PackedRows, counts_of


class MixedRows:
    """The rows of several tables. Batches have the fields that all tables have."""

    def __init__(self, tables: Sequence[PackedRows], names: Sequence[str]):
        """names: the names of the sources, for errors.

        Raises:
            BadInput: the sources differ in the number of rows in a group or in the sizes of axes, or images are in buckets.
        """
        self.tables, self.per_group = tables, tables[0].per_group
        self.own_sizes: dict[str, int] = dict(getattr(tables[0], "own_sizes", {}))
        shared = [name for name in tables[0].fields if all(name in table.fields for table in tables)]
        self.fields: Fields = {name: self._field(name) for name in shared}
        for table, name in zip(tables[1:], names[1:]):
            problem = f"`{names[0]}` and `{name}` cannot be mixed"
            if any(hasattr(other, "bucket_axes") for other in (tables[0], table)):
                hint = "leave data.image.buckets out"
                raise BadInput(f"{problem}: images in buckets come from one source", where="data.source", hint=hint)
            if table.per_group != self.per_group:
                raise BadInput(f"{problem}: their rows come in groups of {self.per_group} and {table.per_group}", where="data.source")
            if (sizes := dict(getattr(table, "own_sizes", {}))) != self.own_sizes:
                hint = "`data.packing=alone` gives each record a row"
                raise BadInput(f"{problem}: their rows have the sizes {self.own_sizes} and {sizes}", where="data.source", hint=hint)
        self.ends = np.cumsum([len(table) for table in tables])

    def _field(self, name: str) -> Field:
        first = self.tables[0].fields[name]
        dtype = np.result_type(*(np.dtype(table.fields[name].dtype) for table in self.tables))
        return Field(first.axes, dtype, first.per, first.at)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def gather(self, rows: np.ndarray) -> Batch:
        source = np.searchsorted(self.ends, rows, side="right")
        starts, batch = self.ends - [len(table) for table in self.tables], dict[str, Any]()
        for number in np.unique(source).tolist():
            places = np.flatnonzero(source == number)
            part = self.tables[number].gather(rows[places] - starts[number])
            for name, field in self.fields.items():
                # All rows of a group come from one source, and are together in `rows`.
                per_group = field.per == "group"
                whole = places, len(rows)
                at, count = (places[:: self.per_group] // self.per_group, len(rows) // self.per_group) if per_group else whole
                if name not in batch:
                    batch[name] = np.zeros((count, *part[name].shape[1:]), field.dtype)
                batch[name][at] = part[name]
        return batch

    @property
    def counts(self) -> PackCounts:
        each = [counts_of(table) for table in self.tables]
        total = {name: sum(getattr(part, name) for part in each) for name in ("cut", "dropped", "unlearned", "parted", "targets")}
        learned = sum(part.targets if part.learned is None else part.learned for part in each)
        return PackCounts(**total, learned=learned if any(part.learned is not None for part in each) else None)
