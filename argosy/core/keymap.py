"""Tables that map the tensors of other formats to the weights of Argosy models, for reading and for writing.

A row has the name or names, the path or paths, and the reading. "Their" tensors are those of a Hub folder or GGUF file, and "our"
tensors those of an Argosy model:

    KeyRow("model.embed_tokens.weight", "embed.w", "V D -> V D")
    KeyRow("model.layers.{l}.self_attn.q_proj.weight", "layers.{l}.attn.q.w", "(N H) D -> D N H", layers=range(32))

`reading` names the axes of each tensor, theirs on the left and ours on the right. (A B) is one axis of A times B entries, in which B
varies fastest. 1 is an axis of one entry. Several tensors on one side, separated by commas, are the pieces of the single tensor on the
other side. The axis along which it is cut is written with bars:

    "((N|K|K) H) D -> D N H, D K H, D K H"      fused q, k, v; "(N H|K H|K H) D -> ..." says the same
    "(N (H|U)) R -> R N H, R N U"               cut inside each head: DeepSeek's kv_b
    "E D (M (1|1)) -> E D M, E D M"             interleaved gate and up: gpt-oss
    "F D, F D -> D (F|F)"                       two of theirs in one of ours
    "(N P two) D -> D N (two P)"                rotary pairs that llama.cpp keeps side by side, back to halves

`{e}` in their name means that they store one tensor per expert, while our tensor has the axis E: "M D -> E D M".

Our tensors are per layer here, and layers are never stacked while reading. Tensors are read as views where possible. If E is the
leading axis of our tensor, a single expert can be read or written without the others, because all experts of one DeepSeek-V3 tensor
take 15 GB. This module knows neither files nor families: tensors come from any `formats.TensorReader`, and rows and sizes from
`models`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from argosy.core.axes import Axes, Names, Rearrangement, Sizes, move
from argosy.core.errors import BadInput, Unsupported
from argosy.core.formats import Parted, Shape, TensorEntry, TensorReader, problem_list, read_part

if TYPE_CHECKING:
    import numpy as np

# Patterns of their tensors that are ignored: a buffer that follows from the config, in folders written before 2023.
IGNORED = ("*rotary_emb.inv_freq",)

T = TypeVar("T")


@dataclass(frozen=True)
class KeyRow:
    """One line of the table.

    names: the names of the tensors in a Hub folder or GGUF file.
    paths: the paths of the weights in an Argosy model.
    reading: the axes of the tensors on both sides, in the grammar of this module.
    layers: the numbers of layers that replace `{l}` in names and paths; None: there is no `{l}`.
    optional: whether the tensors may be absent, all of them together. The weights are then not filled.
    tied_to: a second name under which the same tensor may be stored. If it is present, the bytes must be equal.
    copies: further names under which the same tensor is also written.
    scales: the key in `quants.SCALED` of the function that combines two tensors, values and scales, to the weight. Such rows can only
        be read.
    """

    names: str | tuple[str, ...]
    paths: str | tuple[str, ...]
    reading: str
    layers: Sequence[int] | None = None
    optional: bool = False
    tied_to: str | None = None
    copies: tuple[str, ...] = ()
    scales: str | None = None


# ---- rows at one layer


@dataclass(frozen=True, eq=False)
class _Group:
    """A row at one layer, which is the tensors that are read and written together.

    names: all their names.
    paths: the paths of our tensors.
    """

    row: KeyRow
    # The axes of the tensors of one expert, if they store one tensor per expert.
    reading: Rearrangement
    # For each tensor on the left, the names of the tensors of all experts, or its only name.
    sources: tuple[Names, ...]
    paths: Names
    # Further names under which the same tensor may be stored.
    tied: Names
    # The axis of each of our tensors that counts experts, if they store one tensor per expert.
    expert_axes: tuple[int, ...] | None

    @property
    def names(self) -> Names:
        return tuple(name for names in self.sources for name in names)

    @property
    def is_stacked(self) -> bool:
        """Whether experts are the leading axis of every tensor on both sides. One expert can then be read like a separate tensor."""
        sides = (*self.reading.left, *self.reading.right)
        lead = all(len(part.axes) > 2 and part.axes[0] == ("E",) for part in sides)
        return lead and self.expert_axes is None and not self.tied

    @property
    def is_apart(self) -> bool:
        """Whether one expert of our tensor can be read or written without the others."""
        return self.is_stacked if self.expert_axes is None else not any(self.expert_axes)

    def their_shapes(self, sizes: Sizes, e: int | None = None) -> dict[str, Shape]:
        """The shapes of their tensors by name: of all, or, if `e` is not None, only of those that hold expert `e`."""
        from argosy.core.formats.quants import SCALED

        shapes = [part.shape(sizes) for part in self.reading.left]
        if self.row.scales:
            shapes = SCALED[self.row.scales].shapes(shapes[0])
        at = slice(None) if e is None or self.expert_axes is None else slice(e, e + 1)
        return {name: shape for names, shape in zip(self.sources, shapes, strict=True) for name in names[at]}

    def our_shapes(self, sizes: Sizes) -> dict[str, Shape]:
        shapes = [list(part.shape(sizes)) for part in self.reading.right]
        for shape, axis in zip(shapes, self.expert_axes or ()):
            shape.insert(axis, sizes["E"])
        return {path: tuple(shape) for path, shape in zip(self.paths, shapes)}

    def of_expert(self, arrays: Sequence[np.ndarray], e: int) -> list[np.ndarray]:
        """The part of one expert in our tensors, which hold all experts."""
        import numpy as np

        return [np.moveaxis(x, axis, 0)[e] for x, axis in zip(arrays, self.expert_axes or ())]


def _groups(row: KeyRow, sizes: Sizes) -> Iterator[_Group]:
    theirs, ours = ((side,) if isinstance(side, str) else side for side in (row.names, row.paths))
    by_expert = any("{e}" in name for name in theirs)
    try:
        reading, expert_axes = Rearrangement.parse(row.reading), None
        if by_expert:
            reading, expert_axes = _one_expert(reading)
        reading.check(sizes)
        _check_row(row, theirs, ours, reading)
    except ValueError as error:
        raise ValueError(f"{row}: {error}") from None
    experts = range(sizes["E"]) if by_expert else (None,)
    for layer in (None,) if row.layers is None else row.layers:
        names = tuple(tuple(_filled(name, layer, e) for e in experts) for name in theirs)
        tied = tuple(_filled(name, layer) for name in ((row.tied_to,) if row.tied_to else ()) + row.copies)
        yield _Group(row, reading, names, tuple(_filled(path, layer) for path in ours), tied, expert_axes)


def _filled(name: str, layer: int | None, expert: int | None = None) -> str:
    return name.replace("{l}", str(layer)).replace("{e}", str(expert))


def _one_expert(reading: Rearrangement) -> tuple[Rearrangement, tuple[int, ...]]:
    """The reading for the tensors of one expert, and for each of our tensors the index of the axis E."""
    if any(("E",) not in part.axes for part in reading.right):
        raise ValueError("{e} on the left needs an axis E on the right")
    expert_axes = tuple(part.axes.index(("E",)) for part in reading.right)
    ours = tuple(Axes(part.axes[:at] + part.axes[at + 1 :]) for part, at in zip(reading.right, expert_axes))
    return Rearrangement(reading.left, ours), expert_axes


def _check_row(row: KeyRow, theirs: Names, ours: Names, reading: Rearrangement) -> None:
    from argosy.core.formats.quants import SCALED

    if {"{l}" in name for name in (*theirs, *ours)} != {row.layers is not None}:
        raise ValueError("{l} in every name, or no layers to run over")
    if len({"{e}" in name for name in theirs}) > 1:
        raise ValueError("{e} must be in every name on the left, or in none")
    if row.scales is not None and row.scales not in SCALED:
        raise ValueError(f"unknown kind of scales `{row.scales}`, only {', '.join(SCALED)}")
    if len(reading.right) != len(ours) or len(reading.left) != (1 if row.scales else len(theirs)):
        raise ValueError("there must be as many names as tensors")
    if row.scales and len(theirs) != 2:
        raise ValueError("scales need exactly two tensors, one of values and one of scales")
    if (row.tied_to or row.copies) and (len(theirs) > 1 or any("{e}" in name for name in theirs)):
        raise ValueError("only a row of one tensor on each side can be tied")


class MappedTensor(NamedTuple):
    """One of our tensors, as its row describes it.

    path: the path, with `{l}` for the layer.
    axes: the names of the axes.
    size: the number of entries in one layer.
    layers: the number of layers.
    """

    path: str
    axes: Names
    size: int
    layers: int


def filled_tensors(rows: Iterable[KeyRow], sizes: Sizes) -> Iterator[MappedTensor]:
    """Yields our tensors that rows fill, without expanding layers or experts, so that it is fast for the largest models too."""
    for row in rows:
        ours = (row.paths,) if isinstance(row.paths, str) else row.paths
        for path, part in zip(ours, Rearrangement.parse(row.reading).right, strict=True):
            yield MappedTensor(path, part.names(), math.prod(part.shape(sizes)), 1 if row.layers is None else len(row.layers))


# ---- the table


class KeyMap:
    """A table of rows for a model of given sizes.

    Args:
        rows: the rows.
        sizes: the sizes of the axes by name.
        ignore: patterns of their names that are ignored.

    Raises:
        ValueError: a row is invalid, or a name or path is in two rows.
    """

    def __init__(self, rows: Iterable[KeyRow], sizes: Sizes, ignore: Sequence[str] = IGNORED):
        self.sizes, self.ignore = dict(sizes), tuple(ignore)
        self._groups = [group for row in rows for group in _groups(row, self.sizes)]
        self._by_name = _unique((name, group) for group in self._groups for name in group.names)
        self._by_path = _unique((path, (group, i)) for group in self._groups for i, path in enumerate(group.paths))
        self._tied = _unique((name, group) for group in self._groups for name in group.tied)
        if both := self._tied.keys() & self._by_name.keys():
            raise ValueError(f"{sorted(both)} are tied and have a row of their own")

    @property
    def names(self) -> Names:
        """All their names, in the order of the rows."""
        return tuple(self._by_name)

    @property
    def paths(self) -> Names:
        """All our paths, in the order of the rows."""
        return tuple(self._by_path)

    def shape(self, path: str) -> Shape:
        """The shape of our tensor at `path`."""
        return self._by_path[path][0].our_shapes(self.sizes)[path]

    def is_scaled(self, path: str) -> bool:
        """Whether our tensor is computed from values and scales, so that it is float32."""
        return self._by_path[path][0].row.scales is not None

    def ours_of(self, names: Iterable[str]) -> dict[str, Names]:
        """For each of their names that is in a row, the paths of our tensors that are made from it."""
        return {name: self._by_name[name].paths for name in names if name in self._by_name}

    def plan(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
        """The shapes, by path, of our weights that their tensors fill.

        Args:
            shapes: the shapes of their tensors by name.

        Raises:
            BadInput: tensors are missing, unexpected or of a wrong shape. The message lists all of them.
        """
        expected = [(group.their_shapes(self.sizes), group.row.optional) for group in self._groups]
        tied = [({name: group.reading.left[0].shape(self.sizes)}, True) for name, group in self._tied.items()]
        ignored = {name for name in shapes if any(fnmatchcase(name, pattern) for pattern in self.ignore)}
        _check_fit(expected + tied, shapes, ignored, "is config.json the one that belongs to these weights?")
        present = [group for group in self._groups if group.names[0] in shapes]
        return {path: shape for group in present for path, shape in group.our_shapes(self.sizes).items()}

    def read(self, reader: TensorReader, path: str) -> np.ndarray:
        """Reads our tensor at `path` from theirs. The result is a view if axes are only permuted, otherwise a new array.

        Raises:
            BadInput: a tensor is missing or has a wrong shape (`plan` reports all such tensors together), pieces have different types,
                or a tied tensor differs.
        """
        import numpy as np

        group, i = self._by_path[path]
        _check_fit([(group.their_shapes(self.sizes), False)], _shapes(reader, group.names))
        for name in group.tied:
            if name in reader.names:
                _check_tied(reader, group.names[0], name)
        if group.expert_axes is None:
            return move(_sources(reader, group), *group.reading, i, self.sizes)
        first = self._expert(reader, group, i, 0)
        out = np.empty(self.shape(path), first.dtype)
        experts = np.moveaxis(out, group.expert_axes[i], 0)
        experts[0] = first
        for e in range(1, len(experts)):
            experts[e] = self._expert(reader, group, i, e)
        return out

    def is_apart(self, path: str) -> bool:
        """Whether `read_part` can read a single expert of our tensor at `path`."""
        return self._by_path[path][0].is_apart

    def read_part(self, reader: TensorReader, path: str, e: int) -> np.ndarray:
        """Reads expert `e` of our tensor at `path`, and only the data of this expert. `is_apart(path)` must be True. Raises as
        `read`."""
        group, i = self._by_path[path]
        expected = group.their_shapes(self.sizes, e)
        _check_fit([(expected, False)], _shapes(reader, expected))
        return self._expert(reader, group, i, e)

    def _expert(self, reader: TensorReader, group: _Group, i: int, e: int) -> np.ndarray:
        weight = move(_sources(reader, group, e), *group.reading, i, self.sizes | {"E": 1})
        return weight[0] if group.is_stacked else weight

    def inverse(self, weights: TensorReader) -> Iterator[TensorEntry]:
        """Yields their tensors, made from ours, as entries for `safetensors.write_folder`. Our tensors are read when an entry is
        written.

        Raises:
            BadInput: weights are missing, unexpected or of a wrong shape (the message lists all of them), or pieces have different
                types.
            Unsupported: a row has scales, so it can only be read.
        """
        expected = [(group.our_shapes(self.sizes), group.row.optional) for group in self._groups]
        shapes = {path: weights.shape(path) for path in weights.names}
        _check_fit(expected, shapes, hint="is this the config of these weights?")
        cache = _ReadCache(weights)
        for group in self._groups:
            if group.paths[0] not in shapes:
                continue
            if group.row.scales:
                raise Unsupported(
                    f"`{group.names[0]}` and its scales can be read but not written", hint="write plain weights"
                )
            dtype = _one_dtype(weights, group.paths)
            for e in range(len(group.sources[0])):
                for i, names in enumerate(group.sources):
                    yield self._entry(names[e], dtype, cache, group, i, e)
            for name in group.row.copies:
                yield self._entry(name, dtype, cache, group, 0, 0)

    def _entry(self, name: str, dtype: np.dtype, cache: "_ReadCache", group: _Group, i: int, e: int) -> TensorEntry:
        by_part = group.is_stacked and cache.is_parted
        return TensorEntry(
            name,
            group.reading.left[i].shape(self.sizes),
            dtype,
            partial(self._make, cache, group, i, e),
            partial(self._parts, cache, group, i) if by_part else None,
        )

    def _make(self, cache: "_ReadCache", group: _Group, i: int, e: int) -> np.ndarray:
        ours = cache.of(group) if group.expert_axes is None else cache.of_expert(group, e)
        return move(ours, group.reading.right, group.reading.left, i, self.sizes)

    def _parts(self, cache: "_ReadCache", group: _Group, i: int) -> Iterator[np.ndarray]:
        for e in range(self.sizes["E"]):
            ours = [x[None] for x in cache.of_expert(group, e)]
            yield move(ours, group.reading.right, group.reading.left, i, self.sizes | {"E": 1})[0]


class _ReadCache:
    """Caches our tensors of one group at a time, or of one expert if possible, so that a tensor that is cut into several of theirs is
    read once."""

    def __init__(self, ours: TensorReader):
        self.ours, self.is_parted = ours, isinstance(ours, Parted)
        self.key: tuple[_Group, int | None] | None = None
        self.arrays: list[np.ndarray] = []

    def of(self, group: _Group) -> list[np.ndarray]:
        return self._read(group, None)

    def of_expert(self, group: _Group, e: int) -> list[np.ndarray]:
        if self.is_parted and group.is_apart:
            return self._read(group, e)
        return group.of_expert(self._read(group, None), e)

    def _read(self, group: _Group, e: int | None) -> list[np.ndarray]:
        if self.key != (group, e):
            # The old arrays are freed before the next are read.
            self.key, self.arrays = None, []
            self.arrays = [self.ours.read(p) if e is None else read_part(self.ours, p, e) for p in group.paths]
            self.key = group, e
        return self.arrays


def _sources(reader: TensorReader, group: _Group, e: int | None = None) -> list[np.ndarray]:
    """Reads their tensors in the shapes of the left side of the row. With `e`, reads only those of one expert: its separate tensors, or
    its entry in stacked tensors."""
    from argosy.core.formats.quants import SCALED

    if e is not None and group.is_stacked:
        names = list(group.names)
        arrays = [read_part(reader, name, e)[None] for name in names]
    else:
        names = [names[e or 0] for names in group.sources]
        arrays = [reader.read(name) for name in names]
    if group.row.scales:
        return [SCALED[group.row.scales].read(*arrays)]
    _one_dtype(reader, names)
    return arrays


def _shapes(reader: TensorReader, names: Iterable[str]) -> dict[str, Shape]:
    """The shapes of the tensors with these names that exist."""
    return {name: reader.shape(name) for name in names if name in reader.names}


def _unique(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    table: dict[str, T] = {}
    for name, item in items:
        if name in table:
            raise ValueError(f"`{name}` is in two rows")
        table[name] = item
    return table


def _one_dtype(reader: TensorReader, names: Sequence[str]) -> np.dtype:
    dtypes = {name: reader.dtype(name) for name in names}
    if len(set(dtypes.values())) > 1:
        raise BadInput("parts of one tensor have different types: " + problem_list(f"`{n}` {d}" for n, d in dtypes.items()))
    return dtypes[names[0]]


def _check_tied(reader: TensorReader, name: str, tied: str) -> None:
    a, b = reader.read(name), reader.read(tied)
    if a.dtype != b.dtype or a.shape != b.shape or any(x.tobytes() != y.tobytes() for x, y in zip(a, b)):
        hint = "if it is a separate head, set tie_word_embeddings to false in config.json"
        raise BadInput(f"the config ties `{tied}` to `{name}`, but their values differ", hint=hint)


def _check_fit(
    groups: Sequence[tuple[Mapping[str, Shape], bool]],
    shapes: Mapping[str, Sequence[int]],
    ignored: Iterable[str] = (),
    hint: str | None = None,
) -> None:
    """Raises BadInput if tensors are missing, unexpected or of a wrong shape, with a list of them.

    Args:
        groups: (expected shapes by name, whether the group is optional). An optional group may be missing completely.
        shapes: the shapes of the existing tensors by name.
        ignored: the names of tensors that may exist.
    """
    missing, misshapen, known_names = [], [], set(ignored)
    for expected, optional in groups:
        known_names |= expected.keys()
        absent = [name for name in expected if name not in shapes]
        if not (optional and len(absent) == len(expected)):
            missing += [f"`{name}` is missing" for name in absent]
        for name, shape in expected.items():
            if name in shapes and tuple(shapes[name]) != shape:
                misshapen.append(f"`{name}` is {list(shapes[name])}, expected {list(shape)}")
    unexpected = [f"`{name}` has no place" for name in shapes if name not in known_names]
    if missing or unexpected or misshapen:
        counts = f"{len(missing)} missing, {len(unexpected)} unexpected, {len(misshapen)} misshapen"
        problems = problem_list([*misshapen, *missing, *unexpected])
        raise BadInput(f"the tensors do not fit the model: {counts}", where=problems, hint=hint)
