"""Interfaces for containers of tensors: files that hold tensors with names, shapes and types.

Every container is read through one small interface, `TensorReader`, so readers of tensors do not depend on the file format. It is
written from descriptions of tensors, `TensorEntry`, so that only one tensor at a time is in memory. Files are memory-mapped, so that
opening 100 GB is fast. This module knows no models and no tensor names; `core.keymap` handles names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from argosy.core.errors import BadInput, Damaged

if TYPE_CHECKING:
    import numpy as np

Shape = tuple[int, ...]


@runtime_checkable
class TensorReader(Protocol):
    """Reads tensors by name. `read` may return a read-only view of a mapped file."""

    @property
    def names(self) -> KeysView[str]: ...

    def shape(self, name: str) -> Shape: ...

    def dtype(self, name: str) -> np.dtype: ...

    def read(self, name: str) -> np.ndarray: ...


@runtime_checkable
class Parted(Protocol):
    """A `TensorReader` that can also read single entries of a tensor's first axis, such as experts, without the others."""

    def read_part(self, name: str, i: int) -> np.ndarray: ...


@runtime_checkable
class Composed(Protocol):
    """A `TensorReader` that computes some tensors from several parts, so that they are larger in memory than in the file. `is_apart`
    tells whether a tensor is one of these."""

    def is_apart(self, name: str) -> bool: ...


def is_apart(reader: TensorReader, name: str) -> bool:
    """Whether a tensor should be read one entry of its first axis at a time, by `read_part`."""
    return isinstance(reader, Composed) and reader.is_apart(name)


def read_part(reader: TensorReader, name: str, i: int) -> np.ndarray:
    """Reads the `i`-th entry along the first axis of a tensor. If the reader cannot read parts, the complete tensor is read and
    sliced."""
    return reader.read_part(name, i) if isinstance(reader, Parted) else reader.read(name)[i]


class TensorEntry(NamedTuple):
    """A tensor to be written.

    name, shape, dtype: the name, the shape and the type of the tensor in the file.
    make: returns the tensor. It is called once, when the tensor is written.
    parts: called instead of `make`, if it is not None. It yields the entries of the first axis one after the other.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    parts: Callable[[], Iterator[np.ndarray]] | None = None


class TensorView:
    """The tensors of another reader under other names, in other types, or with other values.

    Args:
        reader: the other reader.
        names: new name -> name in the other reader; None: all names, unchanged.
        dtypes: the types, by new name, of tensors that are converted when they are read.
        change: called as change(name, read, part) instead of reading a tensor, and returns the new values. `read()` returns the tensor
            of the other reader, or, if `part` is not None, its `part`-th entry along the first axis.
    """

    def __init__(
        self,
        reader: TensorReader,
        *,
        names: Mapping[str, str] | None = None,
        dtypes: Mapping[str, np.dtype] | None = None,
        change: Callable[[str, Callable[[], np.ndarray], int | None], np.ndarray] | None = None,
    ):
        self.reader, self._names, self.dtypes, self.change = reader, names, dtypes or {}, change

    @property
    def names(self) -> KeysView[str]:
        return self.reader.names if self._names is None else self._names.keys()

    def shape(self, name: str) -> Shape:
        return self.reader.shape(self.source(name))

    def dtype(self, name: str) -> np.dtype:
        return self.dtypes.get(name) or self.reader.dtype(self.source(name))

    def read(self, name: str) -> np.ndarray:
        return self._changed(name, lambda: self.reader.read(self.source(name)), None)

    def read_part(self, name: str, i: int) -> np.ndarray:
        return self._changed(name, lambda: read_part(self.reader, self.source(name), i), i)

    def is_apart(self, name: str) -> bool:
        return is_apart(self.reader, self.source(name))

    def source(self, name: str) -> str:
        """The name of a tensor in the other reader."""
        return name if self._names is None else self._names[name]

    def _changed(self, name: str, read: Callable[[], np.ndarray], part: int | None) -> np.ndarray:
        array = read() if self.change is None else self.change(name, read, part)
        return array.astype(self.dtypes[name], copy=False) if name in self.dtypes else array


class OverlaidTensors:
    """The tensors of two readers. A tensor of `above` replaces the tensor of `reader` with the same name, and is converted to its
    type."""

    def __init__(self, reader: TensorReader, above: TensorReader):
        self.reader, self.above = reader, above

    @property
    def names(self) -> KeysView[str]:
        return (dict.fromkeys(self.reader.names) | dict.fromkeys(self.above.names)).keys()

    def shape(self, name: str) -> Shape:
        return self._reader_of(name).shape(name)

    def dtype(self, name: str) -> np.dtype:
        return (self.reader if name in self.reader.names else self.above).dtype(name)

    def read(self, name: str) -> np.ndarray:
        array = self._reader_of(name).read(name)
        return array.astype(self.dtype(name), copy=False) if name in self.above.names else array

    def read_part(self, name: str, i: int) -> np.ndarray:
        return self.read(name)[i] if name in self.above.names else read_part(self.reader, name, i)

    def is_apart(self, name: str) -> bool:
        return name not in self.above.names and is_apart(self.reader, name)

    def _reader_of(self, name: str) -> TensorReader:
        return self.above if name in self.above.names else self.reader


class Arrays:
    """A `TensorReader` of arrays in memory. jax arrays are copied to the host when they are read."""

    def __init__(self, arrays: Mapping[str, Any]):
        self.arrays = arrays

    @property
    def names(self) -> KeysView[str]:
        return self.arrays.keys()

    def shape(self, name: str) -> Shape:
        return tuple(self.arrays[name].shape)

    def dtype(self, name: str) -> np.dtype:
        import numpy as np

        return np.dtype(self.arrays[name].dtype)

    def read(self, name: str) -> np.ndarray:
        import numpy as np

        return np.asarray(self.arrays[name])


def map_file(path: Path) -> np.ndarray:
    """Maps the bytes of a file as a read-only uint8 array. The file must keep its length while the array exists.

    Raises:
        BadInput: there is no such file, no permission, or the path is a folder.
        Damaged: the file is empty.
    """
    import numpy as np

    try:
        if path.is_dir():
            raise BadInput(f"`{path}` is a folder, not a file")
        return np.memmap(path, np.uint8, "r").view(np.ndarray)
    except FileNotFoundError:
        raise BadInput(f"no file `{path}`") from None
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from None
    except ValueError:
        raise damaged_container(path, "it is empty") from None


def damaged_container(path: Path, problem: str) -> Damaged:
    """The error for a container whose bytes contradict each other."""
    return Damaged(f"`{path.name}` is damaged: {problem}", where=f"in {path}", hint="copy or download it again")


def quote_name(name: str, most: int = 120) -> str:
    """Quotes a name from an untrusted file for a line of an error: shortened, and with special characters escaped."""
    return f"`{name if len(name) <= most else name[:most] + '...'}`".encode("unicode_escape").decode("ascii")


def problem_list(items: Iterable[str], most: int = 20) -> str:
    """The first `most` problems as one line, and the number of further problems."""
    items = list(items)
    rest = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + rest
