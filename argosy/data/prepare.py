"""A corpus as tokens on disk: written once, in bounded memory, then mapped.

    FOLDER/manifest.json             fingerprint, settings, dtype, counts, sizes and sha256 of every file; written last
    FOLDER/tokenizer/                the tokenizer, where one was asked to be kept
    FOLDER/train/tokens.bin          uint16, or uint32 where the vocabulary is larger than 65,536; little-endian
    FOLDER/train/documents.bin       int64: where each document begins, then the number of tokens
    FOLDER/train/learn.bin           uint8 a token: 0 where it does not count in the loss; only if there are such tokens
    FOLDER/train/weights.bin         float32 a token in place of learn.bin, where some weight is neither 0 nor 1
    FOLDER/train/column.NAME.bin     float32 a token: further numbers, such as whether a step is right
    FOLDER/train/value.NAME.bin      float32 a document: numbers of records, such as margins
    FOLDER/held_out/                 the same

The folder appears under its name in one rename, complete or not at all. A writer that is killed leaves `.NAME.partial`
beside it; the next one says so and starts over. Two writers at once wait for each other. Rows, batches and seeds are no part
of it: any sequence length and either packing reads the same folder.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.caches import one_at_a_time
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.formats.files import sync
from argosy.data.batch import Fingerprint
from argosy.data.chat.conversations import nothing_to_learn, record_counts, record_identity
from argosy.data.encode import DocumentEncoder
from argosy.data.encoding import Encoding
from argosy.data.pack import Corpus, Encoded
from argosy.data.rows.sequences import encoder_for
from argosy.data.sources import Capped, Document, Source, is_prepared
from argosy.data.sources.records import GROUPS

if TYPE_CHECKING:
    pass

FORMAT, VERSION = "argosy corpus", 1
SPLITS = ("train", "held_out")
TOKENIZER = "tokenizer"
# Bytes of text tokenized at once: enough for all cores, and little memory.
GROUP_BYTES = 1 << 20
FLOAT = np.dtype("<f4")
DTYPES = {"learn.bin": np.dtype(np.uint8), "weights.bin": np.dtype("<f4")}
Say = Callable[[str], None]
# Called with the bytes of text done, and in all (None: unknown).
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Prepared:
    """An open prepared corpus; `train` and `held_out` are mapped, not read."""

    folder: Path
    manifest: dict[str, Any]
    train: Corpus
    held_out: Corpus

    @property
    def fingerprint(self) -> Fingerprint:
        return self.manifest["fingerprint"]

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer that it was made with, if that was kept."""
        folder = self.folder / TOKENIZER
        return folder if folder.is_dir() else None

    def bytes_per_token(self, split: str) -> float | None:
        """UTF-8 bytes of text for each token after its document's first, which is never a target."""
        counts = self.manifest["splits"][split]
        targets = counts["tokens"] - counts["documents"]
        return counts["bytes"] / targets if targets > 0 and counts["bytes"] else None

    def verify(self) -> None:
        """Reads every file and compares its sha256.

        Raises:
            Damaged: naming the first file that is not what was written.
        """
        for split in SPLITS:
            for name, written in self.manifest["splits"][split]["files"].items():
                if sha256(self.folder / split / name) != written["sha256"]:
                    raise Damaged("a prepared corpus is not what was written", where=str(self.folder / split / name))


class HeldOut:
    """Which documents are kept for evaluation: those whose hash falls below the share, so equal ones are on the same side.

    It decides document by document, from what came before, so the source is read once. A document in pieces is never held
    out, nor one that would bring the share above twice what was asked for, or leave nothing to train on.
    """

    def __init__(self, share: float):
        self.share, self.seen, self.held, self.inside = share, 0, 0, False

    def takes(self, document: Document) -> bool:
        data = document.text.encode() if document.tokens is None else np.asarray(document.tokens, "<i8").tobytes()
        alone, self.inside = document.ends and not self.inside, not document.ends
        self.seen += len(data)
        most = min(2 * self.share, (1 + self.share) / 2) * self.seen
        if not (alone and self.share and self.held + len(data) <= most):
            return False
        drawn = int.from_bytes(hashlib.sha256(data).digest()[:8], "big") / 2**64
        self.held += len(data) if drawn < self.share else 0
        return drawn < self.share


def prepare(
    source: Source,
    encoding: Encoding,
    folder: str | Path,
    *,
    held_out: float = 0.01,
    settings: Mapping[str, Any] | None = None,
    keep_tokenizer: bool = False,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> Prepared:
    """Tokenizes a source into `folder`, or opens what is there if it was made from the same.

    The share for evaluation is drawn by document (HeldOut). Where that gives less than half of it, as in a corpus of few
    documents, the rest is the end of the corpus.

    Args:
        settings: kept in the manifest, for whoever opens the folder.
        keep_tokenizer: save the tokenizer in the folder too.
        progress: gets the bytes of text done, after each group of documents.
        say: gets a sentence where an earlier writer was killed and its work starts over.

    Raises:
        BadInput: no documents, or the folder holds something else.
        ArgosyError: the disk is full; what was begun is removed.
    """
    folder = Path(folder).expanduser().absolute()
    fingerprint = corpus_identity(source, encoding, held_out)
    try:
        with _one_writer(folder, say) as partial:
            if is_prepared(folder):
                return _same(open_prepared(folder), fingerprint)
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise BadInput("the folder holds other files", where=str(folder), hint="choose a new or empty folder")
            if keep_tokenizer:
                encoding.tokenizer.save(partial / TOKENIZER)
            encoder = encoder_for(source, encoding)
            write(partial, source, encoder, held_out, fingerprint, settings or {}, progress)
            partial.rename(folder)
            sync(folder.parent)
    except OSError as e:
        other = "choose another folder (`data.cache=FOLDER` when training)"
        hint = f"free some space, or {other}" if e.errno in (errno.ENOSPC, errno.EDQUOT) else other
        raise ArgosyError(f"cannot write the prepared corpus: {e.strerror or e}", where=str(folder), hint=hint) from e
    return open_prepared(folder)


def corpus_identity(source: Source, encoding: Encoding, held_out: float) -> Fingerprint:
    """What decides the tokens. Keys that came later are left out where they change nothing, so that older runs resume."""
    made = {"tokenizer": encoding.tokenizer.fingerprint, "bos": encoding.puts_bos, "held_out": held_out}
    made |= {"special": True} if encoding.special else {}
    # Once, each MiB of a text began with a space of its own.
    made |= {"parts": "joined"} if encoding.tokenizer.puts_space else {}
    return source.fingerprint() | made | record_identity(source, encoding)


def _same(prepared: Prepared, fingerprint: Fingerprint) -> Prepared:
    """The corpus that is already there, if it is what was asked for."""
    was = prepared.fingerprint
    if keys := [key for key in sorted(was.keys() | fingerprint.keys()) if was.get(key) != fingerprint.get(key)]:
        what = f"the folder holds another prepared corpus: {', '.join(keys)} differ"
        raise BadInput(what, where=str(prepared.folder), hint="choose another folder, or remove this one")
    return prepared


def write(
    partial: Path,
    source: Source,
    encoder: DocumentEncoder,
    share: float,
    fingerprint: Fingerprint,
    settings: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    """Fills the partial folder: both splits, then the manifest."""
    chooser, done = HeldOut(share), 0
    with ExitStack() as files:
        writers = {split: files.enter_context(closing(SplitWriter(partial / split, encoder.dtype))) for split in SPLITS}
        for group in grouped(source.documents()):
            for document, encoded in zip(group, encoder.encode(group)):
                size_bytes = len(document.text.encode())
                # Records have no text whose bytes their tokens could be compared with.
                text_bytes = size_bytes if document.record is None else 0
                writers["held_out" if chooser.takes(document) else "train"].add(encoded, text_bytes)
                done += size_bytes
            if progress:
                progress(done, source.size_bytes)
        encoder.close()
    train, held_out = writers["train"], writers["held_out"]
    total = train.tokens + held_out.tokens
    if not total:
        hint = "is `data.source` the right file?"
        read = source.source if isinstance(source, Capped) else source
        where = str(getattr(read, "path", fingerprint["source"]))
        raise nothing_to_learn(encoder, where) or BadInput("the corpus is empty: no document holds any text", where=where, hint=hint)
    wanted = int(share * total) - held_out.tokens
    if source.format != "text":
        wanted = train.tail_of_documents(wanted, GROUPS.get(source.format, 1)) if share else 0
    if held_out.tokens < share * total / 2 and wanted > 1:  # a lone token has no target
        held_out.take_tail(train, wanted, encoder)
    splits = {split: writer.manifest() for split, writer in writers.items()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": np.dtype(encoder.dtype).name,
        "vocab": encoder.tokenizer.vocab,
        "fingerprint": fingerprint,
        "settings": dict(settings),
        "source": {"files": source.files, "disk_bytes": source.disk_bytes, "max_bytes": source.max_bytes},
        "special": {"documents": encoder.special_documents, "names": encoder.special_names},
        "records": record_counts(encoder, source),
        "splits": splits,
    }
    with (partial / "manifest.json").open("w") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    sync(partial)


def grouped(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about GROUP_BYTES."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        # 64, so that empty documents fill a group too.
        size += len(document.text) + 4 * len(document.tokens or ()) + 64
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


class SplitWriter:
    """One split's files, appended to as documents come. Weights are written from the first one on that is not 1."""

    def __init__(self, folder: Path, dtype: type):
        self.folder, self.dtype = folder, np.dtype(dtype).newbyteorder("<")
        self.tokens = self.documents = self.bytes = 0
        self.weights: str | None = None  # the name of the file
        folder.mkdir()
        self.files = {name: (folder / name).open("wb") for name in ("tokens.bin", "documents.bin")}

    def add(self, encoded: Encoded, size_bytes: int) -> None:
        self.bytes += size_bytes
        if not len(encoded.tokens):
            return
        for one in (encoded, *encoded.group):
            if one.begins:
                self.files["documents.bin"].write(np.array([self.tokens], "<i8").tobytes())
                self.documents += 1
            for name, value in encoded.values.items():
                self.number(f"value.{name}.bin", np.array([value]))
            for name, column in one.columns.items():
                self.number(f"column.{name}.bin", column)
            self.put(one.tokens, one.weights)

    def number(self, name: str, values: np.ndarray) -> None:
        """Adds numbers of documents or tokens. Every document has the same ones."""
        if name not in self.files:
            self.files[name] = (self.folder / name).open("wb")
        self.files[name].write(values.astype(FLOAT).tobytes())

    def put(self, tokens: np.ndarray, weights: np.ndarray | None) -> None:
        self.files["tokens.bin"].write(tokens.astype(self.dtype, copy=False).tobytes())
        if weights is not None and (weights != 1).any():
            self.need("learn.bin" if np.isin(weights, (0, 1)).all() else "weights.bin")
        if self.weights:
            given = np.ones(len(tokens)) if weights is None else weights
            self.files[self.weights].write(given.astype(DTYPES[self.weights]).tobytes())
        self.tokens += len(tokens)

    def need(self, name: str) -> None:
        """Opens a file of weights, and fills it with those of the tokens so far."""
        if self.weights in (name, "weights.bin"):
            return
        before, self.weights = self.weights, name
        if before:
            self.files.pop(before).close()
        self.files[name] = (self.folder / name).open("wb")
        for at in range(0, self.tokens, GROUP_BYTES):
            size = min(GROUP_BYTES, self.tokens - at)
            self.files[name].write(self.weights_at(at, size, before).astype(DTYPES[name]).tobytes())
        if before:
            (self.folder / before).unlink()

    def weights_at(self, at: int, size: int, name: str | None) -> np.ndarray:
        if name is None:
            return np.ones(size, np.uint8)
        return np.fromfile(self.folder / name, DTYPES[name], size, offset=at * DTYPES[name].itemsize)

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def take_tail(self, other: "SplitWriter", count: int, encoder: DocumentEncoder) -> None:
        """Moves the last `count` tokens of another split behind this one's; a document that is cut becomes two."""
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
        """How many tokens whole groups of documents at the end have: the fewest that are at least `count`, while one group stays."""
        starts = np.fromfile(self.folder / "documents.bin", "<i8")[::per_group]
        first = int(np.searchsorted(starts, self.tokens - count, side="right")) - 1
        return self.tokens - int(starts[max(first, 1)]) if len(starts) > 1 else 0

    def manifest(self) -> dict[str, Any]:
        """Ends the index, and describes the files once they are on the disk."""
        with (self.folder / "documents.bin").open("ab") as file:
            file.write(np.array([self.tokens], "<i8").tobytes())
        paths = sorted(self.folder.iterdir())
        for path in [*paths, self.folder]:
            sync(path)
        files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}
        return {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes, "files": files}


def open_prepared(folder: str | Path, *, verify: bool = False) -> Prepared:
    """Maps a prepared corpus. Sizes and the index are always checked; sha256 of every file where `verify` asks.

    Raises:
        BadInput: the folder was not written by `prepare`.
        Damaged: its files are not what the manifest says.
    """
    folder = Path(folder).expanduser()
    path = folder / "manifest.json"
    if not is_prepared(folder):
        hint = "write one with `argosy data prepare SOURCE FOLDER`"
        raise BadInput("no prepared corpus there", where=str(folder), hint=hint)
    try:
        manifest = json.loads(path.read_bytes()[: 1 << 20])
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            raise BadInput(f"a prepared corpus of version {manifest['version']}, not {VERSION}", where=str(path))
        dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[manifest["dtype"]]
        train, held_out = (open_split(folder / split, manifest["splits"][split], dtype) for split in SPLITS)
        prepared = Prepared(folder, manifest, train, held_out)
        dict(prepared.fingerprint)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise Damaged("the manifest of a prepared corpus cannot be understood", where=f"{path}: {e}"[:200]) from None
    if verify:
        prepared.verify()
    return prepared


def open_split(folder: Path, written: dict[str, Any], dtype: np.dtype) -> Corpus:
    """One split's corpus, after checks that read only the index."""
    tokens, documents = int(written["tokens"]), int(written["documents"])
    sizes = {"tokens.bin": tokens * dtype.itemsize, "documents.bin": (documents + 1) * 8}
    sizes |= {name: tokens * kind.itemsize for name, kind in DTYPES.items()}
    numbers = {name: {"value": documents, "column": tokens}.get(name.split(".")[0]) for name in written["files"]}
    sizes |= {name: count * FLOAT.itemsize for name, count in numbers.items() if count is not None}
    for name in {"tokens.bin", "documents.bin", *written["files"]}:
        path = folder / name
        if name not in sizes or not path.is_file() or path.stat().st_size != sizes[name]:
            found = path.stat().st_size if path.is_file() else "no file"
            what = f"a prepared corpus is incomplete: {sizes.get(name)} bytes expected, {found} found"
            raise Damaged(what, where=str(path))
    starts = _mapped(folder / "documents.bin", np.dtype("<i8"))
    if starts[0] != 0 or starts[-1] != tokens or (np.diff(starts) <= 0).any():
        raise Damaged("the index of a prepared corpus does not ascend", where=str(folder / "documents.bin"))
    weights = next((_mapped(folder / name, kind) for name, kind in DTYPES.items() if name in written["files"]), None)
    kinds = {kind: {n.split(".")[1]: _mapped(folder / n, FLOAT) for n in written["files"] if n.startswith(f"{kind}.")}
             for kind in ("column", "value")}  # fmt: skip
    return Corpus(_mapped(folder / "tokens.bin", dtype), starts, weights, kinds["column"], kinds["value"])


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The file as a plain read-only array over its pages: slices of np.memmap itself cost 5 times as much."""
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.zeros(0, dtype)


@contextmanager
def _one_writer(folder: Path, say: Say) -> Iterator[Path]:
    """An empty folder to write in, held by one process at a time; removed if writing fails.

    The lock is a file beside the folder, and is released when its process ends. It is removed once the folder stands, when
    nobody who waited for it has anything left to write.
    """
    partial, lock = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.lock")
    with one_at_a_time(lock, say):
        if partial.exists():
            say(f"tokenizing into {folder} was killed before it finished; it starts over")
            shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            lock.unlink(missing_ok=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
