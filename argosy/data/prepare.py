"""Writes a corpus of tokens to disk, once and in bounded memory, and maps it for reading.

    FOLDER/manifest.json             fingerprint, settings, dtype, counts, sizes and sha256 of every file; written last
    FOLDER/tokenizer/                the tokenizer, if `keep_tokenizer` is set
    FOLDER/train/tokens.bin          uint16, or uint32 if the vocabulary is larger than 65,536; little-endian
    FOLDER/train/documents.bin       int64: the first token of each document, then the number of tokens
    FOLDER/train/learn.bin           uint8 per token: 0 if it does not count in the loss; only if there are such tokens
    FOLDER/train/weights.bin         float32 per token, instead of learn.bin, if some weight is neither 0 nor 1
    FOLDER/train/column.NAME.bin     float32 per token: further numbers, such as whether a step is right
    FOLDER/train/value.NAME.bin      float32 per document: numbers of records, such as margins
    FOLDER/held_out/                 the same files for the held-out split

One rename puts the finished folder under its name, so it is complete or absent. A writer that is killed or interrupted leaves the
folder `.NAME.partial` beside it, with a journal of its progress. The next writer skips the documents that were written and continues
from there, with the same result. If two processes write at once, one waits for the other. Rows, batches and seeds are not part of the
folder: every sequence length and packing reads the same folder.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.caches import file_lock
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.formats.files import sync
from argosy.data.batch import Fingerprint
from argosy.data.chat.conversations import nothing_to_learn, record_counts, record_identity
from argosy.data.encode import DocumentEncoder
from argosy.data.encoding import Encoding
from argosy.data.order import of_sequences
from argosy.data.pack import Corpus
from argosy.data.rows.encoders import encoder_for
from argosy.data.sources import Capped, Document, Source, is_prepared
from argosy.data.split_writer import DTYPES, FLOAT, GROUP_BYTES, SplitWriter, sha256

FORMAT, VERSION = "argosy corpus", 1
SPLITS = ("train", "held_out")
TOKENIZER = "tokenizer"
# The file in an unfinished folder that tells how far its writer was. It is rewritten after this many bytes of text and tokens.
JOURNAL, JOURNAL_BYTES = "journal.json", 32 << 20
Say = Callable[[str], None]
# Called with the number of bytes of text done, and their total (None: unknown).
Progress = Callable[[int, int | None], None]
# Makes a context manager around the writing of a corpus. It yields a function that tells whether to stop.
Stopping = Callable[[], AbstractContextManager[Callable[[], bool]]]


def never_stopped() -> AbstractContextManager[Callable[[], bool]]:
    """A context manager whose function never asks to stop."""
    return nullcontext(lambda: False)


class WriterStopped(KeyboardInterrupt):
    """A writer of a prepared corpus was asked to stop.

    kept: whether the next writer continues after what was written; if not, it starts over.
    """

    kept = False


@dataclass(frozen=True)
class Prepared:
    """An open prepared corpus. `train` and `held_out` are memory-mapped."""

    folder: Path
    manifest: dict[str, Any]
    train: Corpus
    held_out: Corpus

    @property
    def fingerprint(self) -> Fingerprint:
        return self.manifest["fingerprint"]

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer inside the corpus; None if no tokenizer was stored."""
        folder = self.folder / TOKENIZER
        return folder if folder.is_dir() else None

    def bytes_per_token(self, split: str) -> float | None:
        """UTF-8 bytes of text per target, which is every token but the first of each document; None if the split holds no text."""
        counts = self.manifest["splits"][split]
        targets = counts["tokens"] - counts["documents"]
        return counts["bytes"] / targets if targets > 0 and counts["bytes"] else None

    def verify(self) -> None:
        """Reads every file, and compares its sha256 with that in the manifest.

        Raises:
            Damaged: a file has changed. The message names the first such file.
        """
        for split in SPLITS:
            for name, entry in self.manifest["splits"][split]["files"].items():
                if sha256(self.folder / split / name) != entry["sha256"]:
                    raise Damaged("a prepared corpus is not what was written", where=str(self.folder / split / name))


class HeldOut:
    """Selects the documents that are held out for evaluation: those whose hash, as a number from 0 to 1, is below `share`.

    So equal documents are in the same split. `takes` decides about one document at a time, so the source is read only once. A document
    that comes in pieces is never held out. Neither is a document that would bring the held-out share above twice the setting, or leave
    no training data.
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
        draw = int.from_bytes(hashlib.sha256(data).digest()[:8], "big") / 2**64
        self.held += len(data) if draw < self.share else 0
        return draw < self.share


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
    stopping: Stopping = never_stopped,
) -> Prepared:
    """Tokenizes a source into `folder`, or opens the folder if it was made from the same source and settings.

    The share for evaluation is drawn by document (`HeldOut`). If less than half of the share is drawn, as in a corpus of few documents,
    the rest is taken from the end of the corpus.

    Args:
        held_out: the share of the corpus for evaluation.
        settings: settings to store in the manifest, for readers of the folder.
        keep_tokenizer: whether the tokenizer is saved in the folder too.
        progress: called with the bytes of text so far, after each group of documents.
        say: called with a sentence if an earlier writer was killed, which tells whether this one continues or starts over.
        stopping: makes a context manager around the writing. Its function is called before each document, and tells whether to stop.

    Raises:
        WriterStopped: the function of `stopping` returned True. The same call continues if `kept` is set.
        BadInput: there are no documents, or the folder holds something else.
        ArgosyError: the disk is full; unfinished files are removed.
    """
    folder = Path(folder).expanduser().absolute()
    fingerprint = corpus_identity(source, encoding, held_out)
    try:
        with _one_writer(folder, say) as partial:
            if is_prepared(folder):
                return _check_same(open_prepared(folder), fingerprint)
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise BadInput("the folder holds other files", where=str(folder), hint="choose a new or empty folder")
            encoder = encoder_for(source, encoding)
            journal = Journal.opened(partial, fingerprint, encoder, say)
            if keep_tokenizer:
                shutil.rmtree(partial / TOKENIZER, ignore_errors=True)
                encoding.tokenizer.save(partial / TOKENIZER)
            write(partial, source, encoder, held_out, fingerprint, settings or {}, progress, journal, stopping)
            journal.remove()
            partial.rename(folder)
            sync(folder.parent)
    except OSError as e:
        other = "choose another folder (`data.cache=FOLDER` when training)"
        hint = f"free some space, or {other}" if e.errno in (errno.ENOSPC, errno.EDQUOT) else other
        raise ArgosyError(f"cannot write the prepared corpus: {e.strerror or e}", where=str(folder), hint=hint) from e
    return open_prepared(folder)


def corpus_identity(source: Source, encoding: Encoding, held_out: float) -> Fingerprint:
    """The settings that decide the tokens of a corpus. Newer keys are left out at their defaults, so that older runs resume."""
    identity = {"tokenizer": encoding.tokenizer.fingerprint, "bos": encoding.puts_bos, "held_out": held_out}
    identity |= {"special": True} if encoding.special else {}
    # In older corpora, the tokenizer added a space before each MiB of a text.
    identity |= {"parts": "joined"} if encoding.tokenizer.puts_space else {}
    return source.fingerprint() | identity | record_identity(source, encoding)


def _check_same(prepared: Prepared, fingerprint: Fingerprint) -> Prepared:
    """Returns a corpus that exists already, after a check that its fingerprint is the requested one."""
    stored = prepared.fingerprint
    if keys := [key for key in sorted(stored.keys() | fingerprint.keys()) if stored.get(key) != fingerprint.get(key)]:
        problem = f"the folder holds another prepared corpus: {', '.join(keys)} differ"
        raise BadInput(problem, where=str(prepared.folder), hint="choose another folder, or remove this one")
    return prepared


def write(
    partial: Path,
    source: Source,
    encoder: DocumentEncoder,
    share: float,
    fingerprint: Fingerprint,
    settings: Mapping[str, Any],
    progress: Progress | None,
    journal: "Journal",
    stopping: Stopping,
) -> None:
    """Writes the unfinished folder: both splits, then the manifest.

    Raises:
        WriterStopped: the function of `stopping` returned True.
    """
    chooser, state = HeldOut(share), journal.state
    read, done = state.get("documents", 0), state.get("bytes", 0)
    vars(chooser).update(state.get("chooser", {}))
    unsaved = 0
    with ExitStack() as files:
        stopped = files.enter_context(stopping())
        states = state.get("splits", {})
        split_writers = {split: SplitWriter(partial / split, encoder.dtype, states.get(split)) for split in SPLITS}
        writers = {split: files.enter_context(closing(writer)) for split, writer in split_writers.items()}

        def note() -> None:
            state = {"documents": read, "bytes": done, "chooser": vars(chooser), "encoder": encoder.state()}
            journal.write(state | {"splits": {split: writer.state() for split, writer in writers.items()}})

        try:
            # Documents that an earlier writer has written are read again, since later choices may depend on them, but not encoded.
            for group in document_groups(islice(until(stopped, source.documents()), read, None)):
                for document, encoded in zip(group, encoder.encode(group)):
                    size_bytes = len(document.text.encode())
                    # Records have no text whose bytes their tokens could be compared with.
                    text_bytes = size_bytes if document.record is None else 0
                    writers["held_out" if chooser.takes(document) else "train"].add(encoded, text_bytes)
                    done += size_bytes
                    unsaved += size_bytes + len(encoded.tokens)
                read += len(group)
                if progress:
                    progress(done, source.size_bytes)
                if encoder.resumes and unsaved >= JOURNAL_BYTES:
                    note()
                    unsaved = 0
        except WriterStopped as stop:
            # The exception is raised between groups, when all groups so far are written.
            if encoder.resumes and unsaved:
                note()
            stop.kept = journal.path.exists()
            raise
        encoder.close()
    train, held_out = writers["train"], writers["held_out"]
    total = train.tokens + held_out.tokens
    if not total:
        hint = "is `data.source` the right file?"
        read = source.source if isinstance(source, Capped) else source
        where = str(getattr(read, "path", fingerprint["source"]))
        raise nothing_to_learn(encoder, where) or BadInput("the corpus is empty: no document holds any text", where=where, hint=hint)
    missing = int(share * total) - held_out.tokens
    if source.format != "text":
        missing = train.tail_of_documents(missing, of_sequences(fingerprint) or 1) if share else 0
    if held_out.tokens < share * total / 2 and missing > 1:  # a lone token has no target
        held_out.take_tail(train, missing, encoder)
    splits = {split: writer.manifest() for split, writer in writers.items()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": np.dtype(encoder.dtype).name,
        "vocab": encoder.tokenizer.vocab,
        "fingerprint": fingerprint,
        "settings": dict(settings),
        "source": {"files": source.files, "disk_bytes": source.disk_bytes, "max_bytes": source.max_bytes,
                   "duplicates": source.duplicates},
        "special": {"documents": encoder.special_documents, "names": encoder.special_names},
        "records": record_counts(encoder, source),
        "splits": splits,
    }
    with (partial / "manifest.json").open("w") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    sync(partial)


def until(stopped: Callable[[], bool], documents: Iterable[Document]) -> Iterator[Document]:
    """Yields documents until `stopped` returns True.

    Raises:
        WriterStopped: `stopped` returned True.
    """
    for document in documents:
        if stopped():
            raise WriterStopped
        yield document


def document_groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields the documents in lists of about GROUP_BYTES of text or tokens."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        # 64, so that empty documents fill a group too.
        size += len(document.text) + (0 if document.tokens is None else 4 * len(document.tokens)) + 64
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def open_prepared(folder: str | Path, *, verify: bool = False) -> Prepared:
    """Opens a prepared corpus, whose files are memory-mapped. File sizes and the index of documents are always checked.

    Args:
        verify: whether the sha256 of every file is checked too.

    Raises:
        BadInput: the folder was not written by `prepare`.
        Damaged: its files differ from the manifest.
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


def open_split(folder: Path, manifest: dict[str, Any], dtype: np.dtype) -> Corpus:
    """Maps the corpus of one split. Checks the sizes of files, and reads the index of documents."""
    tokens, documents = int(manifest["tokens"]), int(manifest["documents"])
    sizes = {"tokens.bin": tokens * dtype.itemsize, "documents.bin": (documents + 1) * 8}
    sizes |= {name: tokens * kind.itemsize for name, kind in DTYPES.items()}
    numbers = {name: {"value": documents, "column": tokens}.get(name.split(".")[0]) for name in manifest["files"]}
    sizes |= {name: count * FLOAT.itemsize for name, count in numbers.items() if count is not None}
    for name in {"tokens.bin", "documents.bin", *manifest["files"]}:
        path = folder / name
        if name not in sizes or not path.is_file() or path.stat().st_size != sizes[name]:
            actual = path.stat().st_size if path.is_file() else "no file"
            problem = f"a prepared corpus is incomplete: {sizes.get(name)} bytes expected, {actual} found"
            raise Damaged(problem, where=str(path))
    starts = _mapped(folder / "documents.bin", np.dtype("<i8"))
    if starts[0] != 0 or starts[-1] != tokens or (np.diff(starts) <= 0).any():
        raise Damaged("the index of a prepared corpus does not ascend", where=str(folder / "documents.bin"))
    weights = next((_mapped(folder / name, kind) for name, kind in DTYPES.items() if name in manifest["files"]), None)
    kinds = {kind: {n.split(".")[1]: _mapped(folder / n, FLOAT) for n in manifest["files"] if n.startswith(f"{kind}.")}
             for kind in ("column", "value")}  # fmt: skip
    return Corpus(_mapped(folder / "tokens.bin", dtype), starts, weights, kinds["column"], kinds["value"])


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """Maps a file as a plain read-only array, because slices of np.memmap itself cost 5 times as much."""
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.zeros(0, dtype)


class Journal:
    """The progress of the writer of an unfinished folder, as a file in the folder.

    state: what an earlier writer noted last; empty for a new folder.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, state: dict[str, Any]):
        self.path, self.fingerprint, self.state = folder / JOURNAL, fingerprint, state

    @classmethod
    def opened(cls, folder: Path, fingerprint: Fingerprint, encoder: DocumentEncoder, say: Say) -> "Journal":
        """Opens the journal of a folder, and restores the encoder from it. If the journal is damaged, missing or from another corpus,
        the folder is emptied."""
        content = cls._read(folder, fingerprint)
        if content is None:
            if any(folder.iterdir()):
                least = f"its first {JOURNAL_BYTES >> 20} MiB of text and tokens"
                say(f"writing {folder} was killed before {least} were noted, or was of other data; it starts over")
                shutil.rmtree(folder)
                folder.mkdir()
            return cls(folder, fingerprint, {})
        encoder.restore(content["encoder"])
        say(f"writing {folder} was interrupted after {content['documents']:,} documents; it goes on there")
        return cls(folder, fingerprint, content)

    @staticmethod
    def _read(folder: Path, fingerprint: Fingerprint) -> dict[str, Any] | None:
        try:
            content = json.loads((folder / JOURNAL).read_bytes())
            sizes = {split: content["splits"][split]["files"] for split in SPLITS}
            whole = all((folder / split / name).stat().st_size >= size for split in SPLITS for name, size in sizes[split].items())
            return content if whole and content["fingerprint"] == json.loads(json.dumps(fingerprint)) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, state: dict[str, Any]) -> None:
        """Replaces the journal on disk. The files that `state` describes must be on disk already."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(state | {"fingerprint": self.fingerprint}))
        sync(part)
        part.replace(self.path)

    def remove(self) -> None:
        """Removes the journal from a finished folder."""
        self.path.unlink(missing_ok=True)


@contextmanager
def _one_writer(folder: Path, say: Say) -> Iterator[Path]:
    """Yields the unfinished folder, for one process at a time. The folder is removed if writing fails. It stays, with its journal, if
    the process is interrupted.

    The lock is a file beside the folder, and is released when its process ends. The file is removed when the finished folder exists,
    because processes that waited for the lock then have nothing left to write.
    """
    partial, lock = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.lock")
    with file_lock(lock, say):
        partial.mkdir(exist_ok=True)
        try:
            yield partial
            lock.unlink(missing_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except BaseException:
            if not (partial / JOURNAL).exists():
                shutil.rmtree(partial, ignore_errors=True)
            raise
