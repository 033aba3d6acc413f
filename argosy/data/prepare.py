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

The folder appears under its name in one rename, complete or not at all. A writer that is killed or interrupted leaves `.NAME.partial`
beside it, with a journal of how far it was: the next one reads past what was done and goes on there, with the same result. Two writers
at once wait for each other. Rows, batches and seeds are no part
of it: any sequence length and either packing reads the same folder.
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
# What a writer that was killed had done, in its unfinished folder; written anew after so many bytes of text and tokens.
JOURNAL, JOURNAL_BYTES = "journal.json", 32 << 20
Say = Callable[[str], None]
# Called with the bytes of text done, and in all (None: unknown).
Progress = Callable[[int, int | None], None]
# A context around the writing of a corpus: what it gives says whether to stop.
Stopping = Callable[[], AbstractContextManager[Callable[[], bool]]]


def never_stopped() -> AbstractContextManager[Callable[[], bool]]:
    """A context in which nobody asks for a stop."""
    return nullcontext(lambda: False)


class WriterStopped(KeyboardInterrupt):
    """A writer of a prepared corpus was asked to stop.

    kept: whether the next one goes on from what it had written, or starts over.
    """

    kept = False


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
        """The folder of the corpus's tokenizer, if it was stored."""
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
            Damaged: a file differs from what was written; the message names the first.
        """
        for split in SPLITS:
            for name, entry in self.manifest["splits"][split]["files"].items():
                if sha256(self.folder / split / name) != entry["sha256"]:
                    raise Damaged("a prepared corpus is not what was written", where=str(self.folder / split / name))


class HeldOut:
    """Selects the documents for evaluation: those whose hash falls below the share, so that equal documents are on the same side.

    It decides document by document, so the source is read only once. A document in pieces is never held out, nor one that would bring
    the share above twice its setting, or leave no training data.
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

    The share for evaluation is drawn by document (`HeldOut`). If that gives less than half of it, as in a corpus of few documents, the
    rest is taken from the end of the corpus.

    Args:
        settings: stored in the manifest, for readers of the folder.
        keep_tokenizer: whether the tokenizer is saved in the folder too.
        progress: called with the bytes of text so far, after each group of documents.
        say: called with a sentence if an earlier writer was killed and its work goes on, or starts over.
        stopping: a context around the writing; what it gives is asked before each document whether to stop.

    Raises:
        WriterStopped: it said so. The same call goes on where this one was.
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
    """The settings that decide the tokens. Keys that were added later are left out at their defaults, so that older runs resume."""
    identity = {"tokenizer": encoding.tokenizer.fingerprint, "bos": encoding.puts_bos, "held_out": held_out}
    identity |= {"special": True} if encoding.special else {}
    # Once, each MiB of a text began with a space of its own.
    identity |= {"parts": "joined"} if encoding.tokenizer.puts_space else {}
    return source.fingerprint() | identity | record_identity(source, encoding)


def _check_same(prepared: Prepared, fingerprint: Fingerprint) -> Prepared:
    """The corpus that is already there, if it is what was asked for."""
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
        WriterStopped: `stopping` said so.
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
            # What an earlier writer has done is read again, since what is held out and left out may depend on it, and not encoded.
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
            # It is raised between groups, when all of them are written.
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
    """The documents.

    Raises:
        WriterStopped: `stopped` said so before one of them.
    """
    for document in documents:
        if stopped():
            raise WriterStopped
        yield document


def document_groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about GROUP_BYTES."""
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
    """Maps a prepared corpus. Sizes and the index are always checked.

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
    """One split's corpus, after checks that read only the index."""
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
    """The file as a plain read-only array over its pages: slices of np.memmap itself cost 5 times as much."""
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.zeros(0, dtype)


class Journal:
    """How far the writer of an unfinished folder is.

    state: of the writer that was killed; empty for a new folder.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, state: dict[str, Any]):
        self.path, self.fingerprint, self.state = folder / JOURNAL, fingerprint, state

    @classmethod
    def opened(cls, folder: Path, fingerprint: Fingerprint, encoder: DocumentEncoder, say: Say) -> "Journal":
        """The journal of a folder, and its encoder where the journal says that it was. What another corpus or a damaged journal left
        is removed."""
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
        """Replaces it, once what it says is on disk."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(state | {"fingerprint": self.fingerprint}))
        sync(part)
        part.replace(self.path)

    def remove(self) -> None:
        """Removes it from a finished folder."""
        self.path.unlink(missing_ok=True)


@contextmanager
def _one_writer(folder: Path, say: Say) -> Iterator[Path]:
    """A folder to write in, held by one process at a time. It is removed if writing fails, and stays, with its journal, if the
    process is interrupted.

    The lock is a file beside the folder, and is released when its process ends. It is removed once the folder stands, when
    nobody who waited for it has anything left to write.
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
