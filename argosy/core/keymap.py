"""The table of names between other people's tensors and ours, read in both directions.

A row is (their name or names, our path or paths, how):

    Row("model.embed_tokens.weight", "embed.w", "V D -> V D")
    Row("model.layers.{l}.self_attn.q_proj.weight", "layers.{l}.attn.q.w", "(N H) D -> D N H", over=range(32))

`how` gives the axes of each tensor, named by size, theirs on the left, ours on the right; (A B) is one axis of A times B
entries, B the inner one; 1 is an axis of one entry. Several tensors on one side, set apart by commas, are the pieces
along the axis of the one tensor on the other side that is written with bars:

    "((N|K|K) H) D -> D N H, D K H, D K H"      fused q, k, v; "(N H|K H|K H) D -> ..." says the same
    "(N (H|U)) R -> R N H, R N U"               cut inside each head: DeepSeek's kv_b
    "E D (M (1|1)) -> E D M, E D M"             interleaved gate and up: gpt-oss
    "F D, F D -> D (F|F)"                       two of theirs in one of ours
    "(N P two) D -> D N (two P)"                rotary pairs that llama.cpp keeps side by side, back to halves

`{e}` in their name says that they keep one tensor an expert where ours has the axis E: "M D -> E D M".

Notable: our side is per layer, and layers are never stacked on the way. What is read is a view where it can be.
Knows neither files nor families: tensors come from any `formats.Reader`, rows and sizes from `models`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from argosy.core.errors import BadInput, Unsupported
from argosy.core.formats import Entry, Reader, Shape, listed
from argosy.core.formats.quants import SCALED

IGNORED = ("*rotary_emb.inv_freq",)  # a buffer that follows from the config, in folders written before 2023

_TOKEN = re.compile(r"[A-Za-z_]\w*|[()|1]")

Cut = tuple[tuple[str, ...], ...]  # the pieces of an axis, each a product of names
Names = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    over      the layers that `{l}` in the names runs over
    optional  their tensors may be absent, all of them together; ours then are not filled
    tied_to   a second name under which the same tensor may stand, byte for byte equal
    scales    theirs are one tensor in parts, a value and its scales, read by this function of `quants.SCALED`; read only
    """

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    how: str
    over: Iterable[int] | None = None
    optional: bool = False
    tied_to: str | None = None
    scales: str | None = None


# ---- the grammar


class Axes(NamedTuple):
    """One tensor's axes: each a product of names, one of which may be a `Cut`."""

    axes: tuple[tuple[str | Cut, ...], ...]

    @property
    def leaves(self) -> tuple[str | Cut, ...]:
        return tuple(leaf for axis in self.axes for leaf in axis)

    @property
    def cut(self) -> Cut | None:
        return next((leaf for leaf in self.leaves if isinstance(leaf, tuple)), None)

    def names(self, piece: int = 0) -> Names:
        """Flat, with one piece in place of the cut."""
        return tuple(name for leaf in self.leaves for name in (leaf[piece] if isinstance(leaf, tuple) else (leaf,)))

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        return tuple(math.prod(_size(leaf, sizes) for leaf in axis) for axis in self.axes)

    def flat(self, sizes: Mapping[str, int]) -> Shape:
        return tuple(_size(leaf, sizes) for leaf in self.leaves)


def _size(leaf: str | Cut, sizes: Mapping[str, int]) -> int:
    if isinstance(leaf, str):
        return sizes[leaf]
    return sum(math.prod(sizes[name] for name in piece) for piece in leaf)


def _axes(text: str) -> Axes:
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()):
        raise ValueError(f"`{text}` holds more than names, 1, ( ) and |")
    axes = []
    while tokens:
        axes.append(tuple(_axis(tokens)))
    parsed = Axes(tuple(axes))
    if sum(isinstance(leaf, tuple) for leaf in parsed.leaves) > 1:
        raise ValueError(f"`{text}` cuts two axes")
    return parsed


def _axis(tokens: list[str]) -> list[str | Cut]:
    """The next axis, its parentheses resolved."""
    token = tokens.pop(0)
    if token in ")|":
        raise ValueError(f"`{token}` outside of parentheses")
    if token != "(":
        return [] if token == "1" else [token]
    pieces: list[list[str | Cut]] = [[]]
    while tokens and tokens[0] != ")":
        if tokens[0] == "|":
            tokens.pop(0)
            pieces.append([])
        else:
            pieces[-1] += _axis(tokens)
    if not tokens:
        raise ValueError("a parenthesis is not closed")
    tokens.pop(0)
    if len(pieces) == 1:
        return pieces[0]
    cut = tuple(tuple(name for name in piece if isinstance(name, str)) for piece in pieces)
    if any(len(flat) < len(piece) for flat, piece in zip(cut, pieces)):
        raise ValueError("a cut inside a cut")
    return [cut]


class How(NamedTuple):
    """Both sides of a reading. One side is a single tensor; the other's tensors are its pieces."""

    theirs: tuple[Axes, ...]
    ours: tuple[Axes, ...]


def _how(text: str) -> How:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError("no `->`")
    how = How(tuple(map(_axes, left.split(","))), tuple(map(_axes, right.split(","))))
    whole, parts = (how.theirs, how.ours) if len(how.theirs) == 1 else (how.ours, how.theirs)
    if len(whole) > 1:
        raise ValueError("several tensors on both sides")
    if any(part.cut for part in parts) or len(whole[0].cut or [()]) != len(parts):
        raise ValueError("as many pieces on one side as tensors on the other")
    return how


def _check_names(how: How) -> None:
    """Each piece has the same names on both sides, none of them twice."""
    whole, parts = (how.theirs[0], how.ours) if len(how.theirs) == 1 else (how.ours[0], how.theirs)
    for i, part in enumerate(parts):
        a, b = whole.names(i), part.names()
        if len(set(a)) < len(a) or sorted(a) != sorted(b):
            raise ValueError(f"{' '.join(a)} on one side, {' '.join(b)} on the other")


def _move(arrays: Sequence[np.ndarray], source: Sequence[Axes], target: Sequence[Axes], i: int, sizes) -> np.ndarray:
    """The `i`-th tensor of the target side from all those of the source side. Either side may be the whole."""
    if len(source) == 1:
        return _piece(arrays[0], source[0], i, target[i], sizes)
    return _fused(arrays, source, target[0], sizes)


def _piece(array: np.ndarray, whole: Axes, i: int, part: Axes, sizes: Mapping[str, int]) -> np.ndarray:
    x = array.reshape(whole.flat(sizes))
    if cut := whole.cut:
        axis = whole.leaves.index(cut)
        start, end = _size(cut[:i], sizes), _size(cut[: i + 1], sizes)
        x = x[(slice(None),) * axis + (slice(start, end),)]
    names = whole.names(i)
    x = x.reshape([sizes[name] for name in names])
    return x.transpose([names.index(name) for name in part.names()]).reshape(part.shape(sizes))


def _fused(arrays: Sequence[np.ndarray], parts: Sequence[Axes], whole: Axes, sizes: Mapping[str, int]) -> np.ndarray:
    cut = whole.cut
    assert cut is not None
    axis = whole.leaves.index(cut)
    flat = whole.flat(sizes)
    pieces = []
    for i, (array, part) in enumerate(zip(arrays, parts)):
        names = part.names()
        x = array.reshape([sizes[name] for name in names]).transpose([names.index(name) for name in whole.names(i)])
        pieces.append(x.reshape(*flat[:axis], _size((cut[i],), sizes), *flat[axis + 1 :]))
    return np.concatenate(pieces, axis).reshape(whole.shape(sizes))


# ---- rows at one layer


@dataclass(frozen=True)
class _Group:
    """A row at one layer: tensors that are read and written together."""

    row: Row
    how: How  # of one expert, where theirs has one tensor an expert
    theirs: tuple[tuple[str, ...], ...]  # for each tensor of the left side, its name for each expert
    ours: Names
    tied: str | None
    axes: tuple[int, ...] | None  # where ours have the axis of experts

    @property
    def names(self) -> Names:
        return tuple(name for names in self.theirs for name in names)


def _groups(row: Row, sizes: Mapping[str, int]) -> Iterator[_Group]:
    theirs, ours = _tuple(row.theirs), _tuple(row.ours)
    try:
        how = _how(row.how)
        by_expert = "{e}" in "".join(theirs)
        how, axes = _without_experts(how) if by_expert else (how, None)
        _check_names(how)
        _check_row(row, theirs, ours, how, by_expert)
        for name in {name for side in how for part in side for leaf in part.leaves for name in _flat(leaf)}:
            if name not in sizes:
                raise ValueError(f"no size for {name}")
    except ValueError as error:
        raise ValueError(f"{row}: {error}") from None
    experts = range(sizes["E"]) if by_expert else (None,)
    for layer in (None,) if row.over is None else row.over:
        names = tuple(tuple(_filled(name, layer, e) for e in experts) for name in theirs)
        tied = _filled(row.tied_to, layer) if row.tied_to else None
        yield _Group(row, how, names, tuple(_filled(path, layer) for path in ours), tied, axes)


def _tuple(names: str | tuple[str, ...]) -> Names:
    return (names,) if isinstance(names, str) else tuple(names)


def _flat(leaf: str | Cut) -> Names:
    return (leaf,) if isinstance(leaf, str) else tuple(name for piece in leaf for name in piece)


def _filled(name: str, layer: int | None, expert: int | None = None) -> str:
    return name.replace("{l}", str(layer)).replace("{e}", str(expert))


def _without_experts(how: How) -> tuple[How, tuple[int, ...]]:
    """What happens to one expert, and which axis of each of ours counts them."""
    if any(("E",) not in part.axes for part in how.ours):
        raise ValueError("{e} on the left needs an axis E on the right")
    axes = tuple(part.axes.index(("E",)) for part in how.ours)
    ours = tuple(Axes(part.axes[:at] + part.axes[at + 1 :]) for part, at in zip(how.ours, axes))
    return How(how.theirs, ours), axes


def _check_row(row: Row, theirs: Names, ours: Names, how: How, by_expert: bool) -> None:
    layered = [("{l}" in name) for name in (*theirs, *ours)]
    if not (all(layered) if row.over is not None else not any(layered)):
        raise ValueError("{l} in every name, or no layers to run over")
    if by_expert and not all("{e}" in name for name in theirs):
        raise ValueError("{e} in every name of theirs, or in none")
    if row.scales is not None and row.scales not in SCALED:
        raise ValueError(f"no reader `{row.scales}` of scales, only {', '.join(SCALED)}")
    if len(how.ours) != len(ours) or (len(how.theirs) != len(theirs) and row.scales is None):
        raise ValueError("as many names as tensors")
    if row.scales is not None and len(how.theirs) > 1:
        raise ValueError("with scales, theirs are the parts of one tensor")
    if row.tied_to and (len(theirs) > 1 or by_expert):
        raise ValueError("only one whole tensor can be tied")


# ---- the table


class KeyMap:
    """Rows at given sizes. Every name of theirs is read once and every path of ours filled once, or it is a ValueError."""

    def __init__(self, rows: Iterable[Row], sizes: Mapping[str, int], ignore: Sequence[str] = IGNORED):
        self.sizes, self.ignore = dict(sizes), tuple(ignore)
        self._groups = [group for row in rows for group in _groups(row, self.sizes)]
        self._by_path: dict[str, tuple[_Group, int]] = {}
        self._by_name: dict[str, _Group] = {}
        self._tied: dict[str, _Group] = {}
        for group in self._groups:
            for name in group.names:
                _once(self._by_name, name, group)
            for i, path in enumerate(group.ours):
                _once(self._by_path, path, (group, i))
            if group.tied:
                _once(self._tied, group.tied, group)
        if both := self._tied.keys() & self._by_name.keys():
            raise ValueError(f"{sorted(both)} are tied and have a row of their own")

    @property
    def names(self) -> Names:
        """All of theirs, in the order of the rows."""
        return tuple(self._by_name)

    @property
    def paths(self) -> Names:
        """All of ours, in the order of the rows."""
        return tuple(self._by_path)

    def shape(self, path: str) -> Shape:
        """Of one of ours."""
        group, i = self._by_path[path]
        shape = group.how.ours[i].shape(self.sizes)
        if group.axes is None:
            return shape
        return (*shape[: group.axes[i]], self.sizes["E"], *shape[group.axes[i] :])

    def ours_of(self, names: Iterable[str]) -> dict[str, Names]:
        """For each of their names that has a row, the paths of ours that it goes into."""
        return {name: self._by_name[name].ours for name in names if name in self._by_name}

    def plan(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Shape]:
        """Our paths that these tensors of theirs fill, and their shapes.

        Raises:
            BadInput: everything missing, unexpected and misshapen at once.
        """
        tensors = [(group, self._their_shapes(group)) for group in self._groups]
        passed = set(self._tied) | {n for n in shapes if any(fnmatchcase(n, pattern) for pattern in self.ignore)}
        tied = [({group.tied: self._their_shapes(group)[group.names[0]]}, True) for group in self._tied.values()]
        groups = [(expected, group.row.optional) for group, expected in tensors] + tied
        _check_fit(groups, shapes, passed, "is config.json the one that belongs to these weights?")
        present = [group for group, expected in tensors if all(name in shapes for name in expected)]
        return {path: self.shape(path) for group in present for path in group.ours}

    def read(self, reader: Reader, path: str) -> np.ndarray:
        """One of ours, from theirs: a view where axes alone are permuted, else an array of its own.

        Raises:
            BadInput: tensors that are not there or have the wrong shape (`plan` tells all of them at once), parts of
                different types, a tied tensor that differs.
        """
        group, i = self._by_path[path]
        if group.tied in reader.names:
            _check_tied(reader, group)
        if group.axes is None:
            return _move(self._sources(reader, group, 0), *group.how, i, self.sizes)
        out = None
        for e in range(self.sizes["E"]):
            one = _move(self._sources(reader, group, e), *group.how, i, self.sizes)
            if out is None:
                out = np.empty(self.shape(path), one.dtype)
            np.moveaxis(out, group.axes[i], 0)[e] = one
        assert out is not None
        return out

    def inverse(self, ours: Reader) -> Iterator[Entry]:
        """Theirs, from ours, as entries for `safetensors.write_folder`; arrays of ours are read when their turn comes.

        Raises:
            BadInput: everything missing, unexpected and misshapen at once.
            Unsupported: rows with scales: they are read only.
        """
        groups = [({path: self.shape(path) for path in group.ours}, group.row.optional) for group in self._groups]
        shapes = {path: ours.shape(path) for path in ours.names}
        _check_fit(groups, shapes, set(), "is the config the one of this model?")
        present = [group for group in self._groups if group.ours[0] in shapes]
        if scaled := next((group for group in present if group.row.scales), None):
            raise Unsupported(f"`{scaled.names[0]}` and its scales are read only", hint="write plain weights")
        for group in present:
            yield from self._entries(ours, group)

    def _entries(self, ours: Reader, group: _Group) -> Iterator[Entry]:
        dtype = _one_dtype(ours, group.ours)
        held: list[np.ndarray] = []  # ours, read for the first of theirs and let go after the last

        def make(i: int, e: int, last: bool) -> np.ndarray:
            if not held:
                held.extend(ours.read(path) for path in group.ours)
            arrays = held if group.axes is None else [np.moveaxis(x, at, 0)[e] for x, at in zip(held, group.axes)]
            made = _move(arrays, group.how.ours, group.how.theirs, i, self.sizes)
            if last:
                held.clear()
            return made

        count = len(group.names)
        for i, names in enumerate(group.theirs):
            shape = group.how.theirs[i].shape(self.sizes)
            for e, name in enumerate(names):
                last = i * len(names) + e == count - 1
                yield Entry(name, shape, dtype, _bound(make, i, e, last))

    def _their_shapes(self, group: _Group) -> dict[str, Shape]:
        shapes = [part.shape(self.sizes) for part in group.how.theirs]
        if group.row.scales:
            shapes = SCALED[group.row.scales].shapes(shapes[0])
        return {name: shape for names, shape in zip(group.theirs, shapes, strict=True) for name in names}

    def _sources(self, reader: Reader, group: _Group, e: int) -> list[np.ndarray]:
        """Theirs for one expert, as the left side describes them."""
        names = [names[e] for names in group.theirs]
        expected = self._their_shapes(group)
        here = set(reader.names)
        shapes = {name: reader.shape(name) for name in names if name in here}
        _check_fit([({name: expected[name] for name in names}, False)], shapes, set(), None)
        arrays = [reader.read(name) for name in names]
        if group.row.scales:
            return [SCALED[group.row.scales].read(*arrays)]
        _one_dtype(reader, names)
        return arrays


def _bound(make: Callable[[int, int, bool], np.ndarray], i: int, e: int, last: bool) -> Callable[[], np.ndarray]:
    return lambda: make(i, e, last)


def _once(table: dict, key: str, value: object) -> None:
    if key in table:
        raise ValueError(f"`{key}` stands in two rows")
    table[key] = value


def _one_dtype(reader: Reader, names: Iterable[str]) -> np.dtype:
    dtypes = {name: reader.dtype(name) for name in names}
    if len(set(dtypes.values())) > 1:
        raise BadInput("parts of one tensor have different types: " + listed(f"`{n}` {d}" for n, d in dtypes.items()))
    return next(iter(dtypes.values()))


def _check_tied(reader: Reader, group: _Group) -> None:
    assert group.tied is not None
    a, b = reader.read(group.names[0]), reader.read(group.tied)
    if a.dtype != b.dtype or a.tobytes() != b.tobytes():
        raise BadInput(
            f"the config ties `{group.tied}` to `{group.names[0]}`, and they differ",
            hint="set tie_word_embeddings to false in config.json",
        )


def _check_fit(
    groups: Sequence[tuple[Mapping[str, Shape], bool]], shapes: Mapping[str, Sequence[int]], passed: set[str], hint: str | None
) -> None:
    """Raises BadInput with everything missing, unexpected and misshapen. An optional group may be absent as a whole."""
    missing, misshapen, known = [], [], set(passed)
    for expected, optional in groups:
        known |= expected.keys()
        absent = [name for name in expected if name not in shapes]
        if not (optional and len(absent) == len(expected)):
            missing += absent
        for name, shape in expected.items():
            if name in shapes and tuple(shapes[name]) != shape:
                misshapen.append(f"`{name}` is {list(shapes[name])}, expected {list(shape)}")
    unexpected = [name for name in shapes if name not in known]
    problems = misshapen + [f"`{name}` is missing" for name in missing] + [f"`{name}` has no place" for name in unexpected]
    if problems:
        counts = f"{len(missing)} missing, {len(unexpected)} unexpected, {len(misshapen)} misshapen"
        raise BadInput(f"the tensors do not fit the model: {counts}", where=listed(problems), hint=hint)
