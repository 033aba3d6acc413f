"""Reads files of token ids that other trainers prepared. `data.tokenizer` is their tokenizer. An id outside its vocabulary is an error.

    Megatron-LM    NAME.bin of ids and NAME.idx: "MMIDIDX\\0\\0", version 1, type, counts, lengths, offsets, documents
                   (megatron/core/datasets/indexed_dataset.py)
    llm.c          256 int32 of header (20240520 version 1: uint16; 20240801 version 7: uint32; count), then the ids
                   (github.com/karpathy/llm.c, dev/data/data_common.py)
    nanoGPT        uint16 ids and nothing else; a document ends with the tokenizer's end-of-sequence token

All files are memory-mapped, so that large files need little memory.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np

from argosy.core.errors import BadInput, Damaged
from argosy.core.input_files import InputFile
from argosy.data.sources import Document, Source, existing
from argosy.data.sources.kinds import INDEX_MAGIC, megatron_index
from argosy.data.sources.opening import content_hash, modification_times

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

# The types of ids by their code in an index.
TYPES = dict(enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1))
# First number of a file of llm.c -> its version and the type of its ids.
LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
LLM_C_BYTES = 1024
# A longer document is handed out in pieces.
PIECE_TOKENS = 1 << 18


class TokenFile(Source):
    """A file of token ids. Its documents are those of its index, or, without an index, the ids between end-of-sequence tokens.

    eos: the end-of-sequence token of a file without an index; None: such a file is one document.
    """

    kind: ClassVar[str] = "tokens"

    def __init__(self, path: str | Path | InputFile, *, eos: int | None = None):
        """Raises:
        BadInput: the file is remote or empty.
        Damaged: the size of the file is not what its header or index says.
        """
        self.path, self.eos = existing(path), eos
        if not self.path.is_local:
            raise BadInput("files of token ids are read from this machine's disk", where=str(self.path), hint="copy the file")
        self.disk_bytes, self.files = self.path.size_bytes, 1
        self.ids, self.starts = self.layout()

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        from argosy.data.tokenizers.load import load_tokenizer

        path = existing(argument)
        has_index = path.is_local and (path.name.endswith(".idx") or megatron_index(path).is_file)
        return cls(path.path.with_suffix(".bin") if path.name.endswith(".idx") else path,
                   eos=None if has_index else load_tokenizer(settings.tokenizer).eos)  # fmt: skip

    def layout(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Maps the ids. Returns them, and the index of the first id of each document, then their number (None: there is no index)."""
        size, where = self.disk_bytes or 0, str(self.path)
        if not size:
            raise BadInput("the file is empty", where=where)
        if (index := megatron_index(self.path)).is_file:
            dtype, starts = read_index(index)
            if int(starts[-1]) * dtype.itemsize != size:
                problem = f"the index says {int(starts[-1]) * dtype.itemsize:,} bytes of token ids, and the file has {size:,}"
                raise Damaged(problem, where=where)
            return np.memmap(self.path.path, dtype, "r"), starts
        with self.path.open() as file:
            head = file.read(12)
        magic, version, count = struct.unpack("<3i", head) if len(head) == 12 else (0, 0, 0)
        if magic in LLM_C and size >= LLM_C_BYTES:
            expected, name = LLM_C[magic]
            dtype = np.dtype(name)
            if version != expected or LLM_C_BYTES + count * dtype.itemsize != size:
                problem = f"a file of llm.c, version {version}, of {count:,} token ids that has {size:,} bytes"
                raise Damaged(problem, where=where)
            return np.memmap(self.path.path, dtype, "r", LLM_C_BYTES), None
        if size % 2:
            raise Damaged("a file of 16-bit token ids has an odd number of bytes: it is cut off, or no such file", where=where)
        return np.memmap(self.path.path, "<u2", "r"), None

    def documents(self) -> Iterator[Document]:
        if self.starts is None:
            yield from self.stream()
            return
        for start, stop in zip(self.starts[:-1].tolist(), self.starts[1:].tolist()):
            for at in range(start, stop, PIECE_TOKENS):
                end = min(at + PIECE_TOKENS, stop)
                yield Document(tokens=cast(Any, self.ids[at:end]), ends=end == stop)

    def stream(self) -> Iterator[Document]:
        """Yields the documents of a file without an index, without end-of-sequence tokens. llm.c writes this token before each
        document, and nanoGPT after it. Encoding adds it at the end of each document again."""
        inside = False
        for at in range(0, len(self.ids), PIECE_TOKENS):
            block = np.asarray(self.ids[at : at + PIECE_TOKENS])
            begin = 0
            for end in np.flatnonzero(block == self.eos).tolist() if self.eos is not None else ():
                if end > begin or inside:
                    yield Document(tokens=cast(Any, block[begin:end]))
                begin, inside = end + 1, False
            last = at + PIECE_TOKENS >= len(self.ids)
            if begin < len(block) or (inside and last):
                yield Document(tokens=cast(Any, block[begin:]), ends=last)
                inside = not last

    def fingerprint(self) -> dict[str, Any]:
        fingerprint: dict[str, Any] = {"source": self.kind, "source.sha256": content_hash(self.path)}
        if self.starts is not None:
            return fingerprint | {"source.index": content_hash(megatron_index(self.path))}
        return fingerprint | {"source.eos": self.eos}

    def modified(self) -> list[int]:
        return modification_times([self.path])


def read_index(path: InputFile) -> tuple[np.dtype, np.ndarray]:
    """Reads an index of Megatron-LM. Returns the type of the ids, and the index of the first id of each document, then their number.

    Raises:
        Damaged: the file is no such index, or contradicts itself.
    """
    with path.open() as file:
        data = file.read()
    where, head = str(path), len(INDEX_MAGIC)
    if not data.startswith(INDEX_MAGIC) or len(data) < head + 25:
        raise Damaged("not an index of Megatron-LM", where=where)
    version, code, sequences, documents = struct.unpack_from("<QBQQ", data, head)
    if version != 1 or code not in TYPES or TYPES[code][1] == "f":
        raise Damaged(f"an index of version {version} with ids of type {code}", where=where)
    at = head + 25
    if len(data) != at + 12 * sequences + 8 * documents:
        raise Damaged(f"an index of {sequences:,} sequences and {documents:,} documents has {len(data):,} bytes", where=where)
    lengths = np.frombuffer(data, "<i4", sequences, at).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    firsts = np.frombuffer(data, "<i8", documents, at + 12 * sequences)
    if (lengths < 0).any() or not documents or firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise Damaged("an index whose documents contradict its sequences", where=where)
    return np.dtype(TYPES[code]), ends[firsts]
