"""Writes the files of one split of a prepared corpus, in order. `data.prepare` describes the files.

The state of a writer is enough to continue after the process was killed.
"""

import hashlib
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.formats.files import sync
from argosy.data.encode import DocumentEncoder
from argosy.data.pack import Encoded

# Bytes of text tokenized at once: enough for all cores, and little memory.
GROUP_BYTES = 1 << 20
FLOAT = np.dtype("<f4")
# The attributes that a state holds, beside the sizes of files.
COUNTED = ("tokens", "documents", "bytes", "weights")
DTYPES = {"learn.bin": np.dtype(np.uint8), "weights.bin": np.dtype("<f4")}


class SplitWriter:
    """Appends documents to the files of one split. The file of weights is created with the first weight that is not 1.

    Args:
        folder: the folder of the split.
        dtype: the type of the token ids.
        state: what `state` returned. The files are truncated to the sizes that they had then. None: the folder is created.

    Raises:
        FileNotFoundError: a file that the state names is gone.
    """

    def __init__(self, folder: Path, dtype: type, state: dict[str, Any] | None = None):
        self.folder, self.dtype = folder, np.dtype(dtype).newbyteorder("<")
        self.tokens = self.documents = self.bytes = 0
        self.weights: str | None = None  # the name of the file
        if state is None:
            folder.mkdir()
            self.files = {name: (folder / name).open("wb") for name in ("tokens.bin", "documents.bin")}
            return
        self.tokens, self.documents, self.bytes, self.weights = (state[name] for name in COUNTED)
        for path in folder.iterdir():
            if path.name not in state["files"]:
                path.unlink()
        for name, size in state["files"].items():
            if (folder / name).stat().st_size < size:
                raise FileNotFoundError(name)
            os.truncate(folder / name, size)
        self.files = {name: (folder / name).open("ab") for name in state["files"]}

    def state(self) -> dict[str, Any]:
        """Flushes the files to disk, and returns their sizes and the counts so far, as a JSON object."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        sync(self.folder)
        sizes = {name: file.tell() for name, file in self.files.items()}
        return {name: getattr(self, name) for name in COUNTED} | {"files": sizes}

    def add(self, encoded: Encoded, size_bytes: int) -> None:
        self.bytes += size_bytes
        if not len(encoded.tokens):
            return
        for part in (encoded, *encoded.group):
            if part.begins:
                self.files["documents.bin"].write(np.array([self.tokens], "<i8").tobytes())
                self.documents += 1
            for name, value in (part.values or encoded.values).items():
                self.number(f"value.{name}.bin", np.array([value]))
            for name, column in part.columns.items():
                self.number(f"column.{name}.bin", column)
            self.put(part.tokens, part.weights)

    def number(self, name: str, values: np.ndarray) -> None:
        """Appends numbers per document or per token to the file `name`. All documents must have the same columns."""
        if name not in self.files:
            self.files[name] = (self.folder / name).open("wb")
        self.files[name].write(values.astype(FLOAT).tobytes())

    def put(self, tokens: np.ndarray, weights: np.ndarray | None) -> None:
        self.files["tokens.bin"].write(tokens.astype(self.dtype, copy=False).tobytes())
        if weights is not None and (weights != 1).any():
            self.need("learn.bin" if np.isin(weights, (0, 1)).all() else "weights.bin")
        if self.weights:
            values = np.ones(len(tokens)) if weights is None else weights
            self.files[self.weights].write(values.astype(DTYPES[self.weights]).tobytes())
        self.tokens += len(tokens)

    def need(self, name: str) -> None:
        """Makes sure that weights are written to the file `name`, or to weights.bin. A new file gets the weights of earlier tokens."""
        if self.weights in (name, "weights.bin"):
            return
        before, self.weights = self.weights, name
        if before:
            self.files.pop(before).close()
        self.files[name] = (self.folder / name).open("wb")
        for at in range(0, self.tokens, GROUP_BYTES):
            size = min(GROUP_BYTES, self.tokens - at)
            self.files[name].write(self.weights_at(at, size, before).astype(DTYPES[name]).tobytes())

    def weights_at(self, at: int, size: int, name: str | None) -> np.ndarray:
        if name is None:
            return np.ones(size, np.uint8)
        return np.fromfile(self.folder / name, DTYPES[name], size, offset=at * DTYPES[name].itemsize)

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def take_tail(self, other: "SplitWriter", count: int, encoder: DocumentEncoder) -> None:
        """Moves the last `count` tokens of another split to the end of this split. A document that is cut becomes two documents."""
        start = other.tokens - count
        starts = np.fromfile(other.folder / "documents.bin", "<i8")
        inside = starts[starts > start] - start + self.tokens
        head = np.append(starts[starts < start], start)
        self.files = {name: (self.folder / name).open("ab") for name in self.files}
        moved_bytes = 0
        with closing(self):
            self.files["documents.bin"].write(np.append(self.tokens, inside).astype("<i8").tobytes())
            for at in range(start, other.tokens, GROUP_BYTES):
                size = min(GROUP_BYTES, other.tokens - at)
                tokens = np.fromfile(other.folder / "tokens.bin", self.dtype, size, offset=at * self.dtype.itemsize)
                self.put(tokens, other.weights_at(at, size, other.weights) if other.weights else None)
                if other.bytes:
                    words = [token for token in tokens.tolist() if token not in (*encoder.before, *encoder.after)]
                    moved_bytes += len(encoder.tokenizer.decode(words).encode())
            for name in [name for name in other.files if name.startswith(("value.", "column."))]:
                first = start if name.startswith("column.") else len(head) - 1
                self.number(name, np.fromfile(other.folder / name, FLOAT, offset=first * FLOAT.itemsize))
                os.truncate(other.folder / name, first * FLOAT.itemsize)
        os.truncate(other.folder / "tokens.bin", start * self.dtype.itemsize)
        if other.weights:
            os.truncate(other.folder / other.weights, start * DTYPES[other.weights].itemsize)
        head[:-1].tofile(other.folder / "documents.bin")
        self.documents, self.bytes = self.documents + 1 + len(inside), self.bytes + moved_bytes
        other.tokens, other.documents, other.bytes = start, len(head) - 1, other.bytes - moved_bytes

    def tail_of_documents(self, count: int, per_group: int = 1) -> int:
        """The number of tokens in the last groups of documents: as few whole groups as have `count` tokens, but not all groups."""
        starts = np.fromfile(self.folder / "documents.bin", "<i8")[::per_group]
        first = int(np.searchsorted(starts, self.tokens - count, side="right")) - 1
        return self.tokens - int(starts[max(first, 1)]) if len(starts) > 1 else 0

    def manifest(self) -> dict[str, Any]:
        """Finishes the index of documents, flushes the files to disk, and returns their description for the manifest."""
        with (self.folder / "documents.bin").open("ab") as file:
            file.write(np.array([self.tokens], "<i8").tobytes())
        # The folder may still hold a file of weights that another file has replaced.
        for path in self.folder.iterdir():
            if path.name not in self.files:
                path.unlink()
        paths = sorted(self.folder.iterdir())
        for path in [*paths, self.folder]:
            sync(path)
        files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}
        return {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes, "files": files}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
