"""Reads and writes safetensors files and Hub folders of them, tensor by tensor.

A header is checked completely before anything is allocated, also for duplicate names, which the safetensors library accepts silently.
Tensors are views of the mapped file, also bfloat16 and float8. Writing needs memory for one slab of a tensor. A file is 8 bytes with
the length of the header, the header as JSON, and the bytes of the tensors without gaps (huggingface/safetensors). This module does not
know what the tensors are for.
"""

import json
import math
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, BadInput, Damaged, Unsupported
from argosy.core.formats import Shape, TensorEntry, damaged_container, map_file, problem_list, quote_name
from argosy.core.formats.files import File, Order, check_space, of_text, slabs, write_file

# The limit of the safetensors library.
MOST_HEADER_BYTES = 100_000_000
MOST_AXES = 32
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The beginnings of the names of weight files: those of transformers and of diffusers.
STEMS = MODEL, DIFFUSION = ("model", "diffusion_pytorch_model")

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Several values share a byte, so no numpy view exists.
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")


# ---- reading one file


class TensorSpan(NamedTuple):
    """The description of a stored tensor: its type, its shape, and the range of its bytes in the data after the header."""

    dtype: np.dtype
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True)
class SafeTensors:
    """An open file: a `TensorReader` whose tensors are read-only views of the mapped file."""

    path: Path
    metadata: dict[str, str]
    places: dict[str, TensorSpan]
    data: np.ndarray

    @staticmethod
    def open(path: str | Path) -> "SafeTensors":
        """Checks the header and maps the data.

        Raises:
            BadInput: there is no such file, or it cannot be read.
            Damaged: the header contradicts itself or the length of the file. The message names the tensor.
            Unsupported: a tensor has a type smaller than a byte.
        """
        path = Path(path)
        data = map_file(path)
        header, start = _header(data, path)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise damaged_container(path, "its metadata is not a map of texts")
        places = {name: _place(name, entry, path) for name, entry in header.items()}
        _check_tiling(places, len(data) - start, path)
        return SafeTensors(path, metadata, places, data[start:])

    @property
    def names(self) -> KeysView[str]:
        return self.places.keys()

    def shape(self, name: str) -> Shape:
        return self.places[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.places[name].dtype

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor: a view of the file, or a copy if its data is not aligned."""
        return self._view(self.places[name])

    def read_part(self, name: str, i: int) -> np.ndarray:
        """Reads the `i`-th entry along the first axis of a tensor, without the others."""
        place = self.places[name]
        n_bytes = (place.end - place.begin) // place.shape[0]
        begin = place.begin + i * n_bytes
        return self._view(place._replace(shape=place.shape[1:], begin=begin, end=begin + n_bytes))

    def _view(self, place: TensorSpan) -> np.ndarray:
        view = self.data[place.begin : place.end].view(place.dtype).reshape(place.shape)
        return np.require(view, requirements="A")


def _header(data: np.ndarray, path: Path) -> tuple[dict[str, Any], int]:
    """Reads the header, and returns it with the offset of the data."""
    if len(data) < 8:
        raise damaged_container(path, f"{len(data)} bytes are too few for a header")
    length = int(data[:8].view("<u8")[0])
    if length > MOST_HEADER_BYTES:
        raise damaged_container(path, f"a header of {length} bytes, over the limit of {MOST_HEADER_BYTES}")
    if length > len(data) - 8:
        raise damaged_container(path, f"a header of {length} bytes in a file of {len(data)}")
    header = _json(data[8 : 8 + length].tobytes(), path)
    return header, 8 + length


def _json(text: bytes, path: Path) -> dict[str, Any]:
    """Parses a JSON object strictly: UTF-8, no duplicate keys, no NaN."""
    if not text.lstrip(b" \t\r\n").startswith(b"{"):
        raise damaged_container(path, "its JSON is not an object")
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise damaged_container(path, "its JSON is nested too deeply") from None
    # Malformed JSON or UTF-8, a duplicate key, or an endless number.
    except ValueError as error:
        raise damaged_container(path, f"its JSON cannot be read: {str(error).splitlines()[0]:.200}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{quote_name(twice)} appears twice")
    return result


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def _place(name: str, entry: Any, path: Path) -> TensorSpan:
    def wrong(problem: str) -> Damaged:
        return damaged_container(path, f"tensor {quote_name(name)}: {problem}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("not described by dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if code in _PACKED:
        raise Unsupported(f"tensor {quote_name(name)}: values of type {code} share bytes", where=f"in {path}")
    if not isinstance(code, str) or code not in DTYPES:
        raise wrong(f"unknown dtype {quote_name(str(code))}")
    if not _counts(shape) or len(shape) > MOST_AXES:
        raise wrong(f"its shape is not a list of at most {MOST_AXES} sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong("its data_offsets are not a begin and an end")
    size = DTYPES[code].itemsize
    if math.prod(n for n in shape if n) * size >= 2**63:
        raise wrong("its shape overflows")
    if math.prod(shape) * size != offsets[1] - offsets[0]:
        raise wrong(f"shape {shape} of {code} needs {math.prod(shape) * size} bytes, it has {offsets[1] - offsets[0]}")
    return TensorSpan(DTYPES[code], tuple(shape), offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_tiling(places: Mapping[str, TensorSpan], size: int, path: Path) -> None:
    """Checks that the tensors cover all data without overlaps or gaps."""
    at = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != at:
            problem = "overlaps the one before" if place.begin < at else f"leaves a hole of {place.begin - at} bytes"
            raise damaged_container(path, f"tensor {quote_name(name)} {problem}")
        if place.end > size:
            raise damaged_container(path, f"tensor {quote_name(name)} ends at byte {place.end} of {size}: the file is cut short")
        at = place.end
    if at != size:
        raise damaged_container(path, f"{plural(size - at, 'byte', 'belongs', 'belong')} to no tensor")


# ---- reading a folder


@dataclass(frozen=True)
class SafetensorsFolder:
    """An open Hub folder, and a `TensorReader` of its tensors. They are in `model.safetensors`, or in shards with an index. In folders
    of diffusers, these files are called `diffusion_pytorch_model`.

    If there are a single file and an index, the single file is used, as in transformers.

    files: the open file of each tensor, by the name of the tensor.
    """

    path: Path
    files: dict[str, SafeTensors]

    @staticmethod
    def open(path: str | Path) -> "SafetensorsFolder":
        """Opens all files, and reports all problems together.

        Raises:
            BadInput: there are no weights, shards are missing, or the index does not match its shards.
            Damaged: the bytes of the index or of a shard contradict each other.
        """
        path = Path(path)
        if not path.is_dir():
            raise BadInput(f"no folder `{path}`")
        for stem in STEMS:
            if (path / f"{stem}.safetensors").exists():
                file = SafeTensors.open(path / f"{stem}.safetensors")
                return SafetensorsFolder(path, dict.fromkeys(file.names, file))
        indexes = (path / f"{stem}.safetensors.index.json" for stem in STEMS)
        index = next((file for file in indexes if file.exists()), None)
        if index is None:
            pickled = any(path.glob("*.bin")) or any(path.glob("*.pt*"))
            hint = "pickled weights are never read: save them as safetensors" if pickled else None
            raise BadInput(f"no `{SINGLE}` and no `{INDEX}`", where=f"in {path}", hint=hint)
        return SafetensorsFolder(path, _open_shards(index))

    @property
    def names(self) -> KeysView[str]:
        return self.files.keys()

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the first file."""
        return next((file.metadata for file in self.files.values()), {})

    def shape(self, name: str) -> Shape:
        return self.files[name].shape(name)

    def dtype(self, name: str) -> np.dtype:
        return self.files[name].dtype(name)

    def read(self, name: str) -> np.ndarray:
        return self.files[name].read(name)

    def read_part(self, name: str, i: int) -> np.ndarray:
        return self.files[name].read_part(name, i)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _json(map_file(index).tobytes(), index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise damaged_container(index, "`weight_map` is not a map from tensors to files")
    for file in weight_map.values():
        if file in ("", ".", "..") or any(c in file for c in "/\\:\0"):
            raise damaged_container(index, f"{quote_name(file)} is not the name of a file in the same folder")
    return weight_map


def _open_shards(index: Path) -> dict[str, SafeTensors]:
    weight_map, folder = _weight_map(index), index.parent
    shards: dict[str, SafeTensors] = {}
    problems: list[str] = []
    kind: type[ArgosyError] = BadInput
    for name in dict.fromkeys(weight_map.values()):
        try:
            shards[name] = SafeTensors.open(folder / name)
        except ArgosyError as error:
            problems.append(error.what)
            kind = type(error) if kind is BadInput else kind
    problems += _index_problems(weight_map, shards)
    if problems:
        count = f"{len(problems)} problems: " if len(problems) > 1 else ""
        raise kind(count + problem_list(problems), where=f"in {folder}", hint="copy or download the folder again")
    return {tensor: shards[file] for tensor, file in weight_map.items()}


def _index_problems(weight_map: Mapping[str, str], shards: Mapping[str, SafeTensors]) -> list[str]:
    """The differences between the index and the shards that could be opened, as phrases."""
    problems = []
    for tensor, file in weight_map.items():
        if file in shards and tensor not in shards[file].places:
            problems.append(f"{quote_name(tensor)} is not in {quote_name(file)}, where the index expects it")
    for file, shard in shards.items():
        for tensor in shard.names:
            place = weight_map.get(tensor)
            if place is None:
                problems.append(f"{quote_name(tensor)} of {quote_name(file)} is not in the index")
            elif place != file:
                problems.append(f"{quote_name(tensor)} is in {quote_name(file)} too, the index has it in {quote_name(place)}")
    return problems


# ---- writing


def folder_files(
    entries: Iterable[TensorEntry], shard_bytes: float = 5e9, metadata: Mapping[str, str] | None = None, stem: str = MODEL
) -> list[File]:
    """Describes the files of a folder with these tensors, in the given order: one file, or shards and then their index.

    Args:
        entries: the tensors.
        shard_bytes: the largest number of bytes of tensors in a shard. A larger tensor gets its own shard.
        metadata: the metadata of every file; None: {"format": "pt"}, which transformers requires.
        stem: the beginning of the names of the files, one of `STEMS`.

    Raises:
        Unsupported: a tensor has a type that safetensors does not have.
    """
    entries = list(entries)
    check_entries(entries)
    metadata = {"format": "pt"} if metadata is None else dict(metadata)
    shards = tensor_shards(entries, shard_bytes)
    if len(shards) == 1:
        return [tensors_file(f"{stem}.safetensors", shards[0], metadata)]
    names = [f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = [tensors_file(name, shard, metadata) for name, shard in zip(names, shards)]
    return [*files, of_text(f"{stem}.safetensors.index.json", _index(dict(zip(names, shards))))]


def write_folder(
    folder: str | Path,
    entries: Iterable[TensorEntry],
    shard_bytes: float = 5e9,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes tensors into a folder that holds no weights, with one slab in memory at a time. Returns the paths of the weight files.
    The arguments are as in `folder_files`.

    Raises:
        BadInput: the folder already holds weights, or there is too little space.
    """
    folder, files = Path(folder), folder_files(entries, shard_bytes, metadata)
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        raise BadInput(f"{folder} already contains weights", hint="name a new folder; nothing is ever overwritten")
    check_space(folder, sum(file.bytes for file in files))
    for file in files:
        write_file(folder / file.name, file)
    return [folder / file.name for file in files if file.name != INDEX]


def _bytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def check_entries(entries: Sequence[TensorEntry]) -> None:
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names) or "__metadata__" in names:
        raise ValueError("tensors to write must have different names")
    for entry in entries:
        if entry.dtype not in _CODES:
            raise Unsupported(f"safetensors files have no type for {entry.dtype}, of tensor `{entry.name}`")


def tensor_shards(entries: Sequence[TensorEntry], most: float) -> list[list[TensorEntry]]:
    """Divides tensors into shards of at most `most` bytes, in order. A larger tensor gets its own shard."""
    shards: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + _bytes(entry) > most:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += _bytes(entry)
    return shards


def tensors_file(name: str, entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> File:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for entry in entries:
        end = at + _bytes(entry)
        header[entry.name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text

    def parts(order: Order) -> Iterator[np.ndarray]:
        yield np.frombuffer(start, np.uint8)
        for entry in entries:
            yield from slabs(entry, order)

    return File(name, len(start) + at, parts)


def _index(shards: Mapping[str, Sequence[TensorEntry]]) -> str:
    """The text of the index of shards, as transformers writes it, sorted by tensor name."""
    weight_map = {entry.name: name for name, shard in shards.items() for entry in shard}
    entries = [entry for shard in shards.values() for entry in shard]
    total = {
        "total_parameters": sum(math.prod(entry.shape) for entry in entries),
        "total_size": sum(map(_bytes, entries)),
    }
    index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"
