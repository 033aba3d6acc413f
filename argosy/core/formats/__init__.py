"""Containers of tensors: names, shapes, bytes. What they have in common.

Notable: every container is read through one small interface, so whoever wants tensors need not know where they lie, and
is written from descriptions, so that one tensor at a time is in memory. Files are mapped: opening 100 GB costs nothing.
Knows no model and no name of any tensor; `core.keymap` does names.
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
class Reader(Protocol):
    """Tensors by name. `read` may give a read-only view of a mapped file."""

    @property
    def names(self) -> KeysView[str]: ...

    def shape(self, name: str) -> Shape: ...

    def dtype(self, name: str) -> np.dtype: ...

    def read(self, name: str) -> np.ndarray: ...


@runtime_checkable
class Parted(Protocol):
    """A `Reader` that reads single entries of a tensor's first axis too, such as experts, without the others."""

    def read_part(self, name: str, i: int) -> np.ndarray: ...


@runtime_checkable
class Composed(Protocol):
    """A `Reader` some of whose tensors are put together of parts, and take more memory than what they are read from."""

    def is_apart(self, name: str) -> bool: ...


def is_apart(reader: Reader, name: str) -> bool:
    """Whether the tensor is better read part by part."""
    return isinstance(reader, Composed) and reader.is_apart(name)


def read_part(reader: Reader, name: str, i: int) -> np.ndarray:
    """The `i`-th entry along the first axis of a tensor, cut from all of it where the reader knows no other way."""
    return reader.read_part(name, i) if isinstance(reader, Parted) else reader.read(name)[i]


class Entry(NamedTuple):
    """A tensor about to be written: `make` is called once, when its turn has come.

    parts: called in its place, where there is one; gives the entries of the first axis, one after the other.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    parts: Callable[[], Iterator[np.ndarray]] | None = None


class Over:
    """A `Reader` through which another is read; what it changes is what it defines."""

    def __init__(self, reader: Reader):
        self.reader = reader

    @property
    def names(self) -> KeysView[str]:
        return self.reader.names

    def shape(self, name: str) -> Shape:
        return self.reader.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return self.reader.dtype(name)


class Arrays:
    """A mapping of arrays as a `Reader`; jax arrays too, copied to the host one by one."""

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
    """A file's bytes as a read-only uint8 array, mapped. The file must keep its length while the array lives.

    Raises:
        BadInput: no such file, no permission, not a file.
        Damaged: an empty file.
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
        raise damaged(path, "it is empty") from None


def damaged(path: Path, what: str) -> Damaged:
    """The error of a container whose bytes contradict each other."""
    return Damaged(f"`{path.name}` is damaged: {what}", where=f"in {path}", hint="copy or download it again")


def quoted(name: str, most: int = 120) -> str:
    """A name out of an untrusted file, fit for one line of an error."""
    return f"`{name if len(name) <= most else name[:most] + '...'}`".encode("unicode_escape").decode("ascii")


def listed(items: Iterable[str], most: int = 20) -> str:
    """The first of many problems in one line, and how many more there are."""
    items = list(items)
    rest = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + rest
