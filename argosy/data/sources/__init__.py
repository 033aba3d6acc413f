"""Where data comes from: the registry of sources, and the interface of each.

    data.source=stdlib            a registered name
    data.source=corpus.jsonl      a file, folder or glob: the suffix chooses the reader
    data.source=text:server.log   a reader by name, and what it reads

A source of documents yields the same documents in the same order every time. A source of rows makes any row from its
number. Neither knows the tokenizer: a source of conversations yields records, which `data.chat.conversations` renders.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from argosy.core.errors import BadInput
from argosy.core.registry import Registry

if TYPE_CHECKING:
    from argosy.data.pack import PackedRows
    from argosy.data.settings import DataSettings

SOURCES = Registry(
    "data source",
    {
        "text": "argosy.data.sources.text:TextFile",
        "jsonl": "argosy.data.sources.text:JsonLines",
        "folder": "argosy.data.sources.text:TextFolder",
        "memory": "argosy.data.sources.text:TextsInMemory",
        "stdlib": "argosy.data.sources.stdlib:StandardLibrary",
        "docstrings": "argosy.data.sources.stdlib:Docstrings",
        "synthetic": "argosy.data.sources.synthetic:Synthetic",
    },
)


# The sources that need no path.
CORPORA = ("stdlib", "docstrings", "synthetic")


@dataclass(frozen=True)
class SourceRecord:
    """One example to fine-tune on: messages for a chat template, or a prompt and its completion. With both, they say the same.

    where: the file and line, for errors. learned: for each message, whether it counts where it is an assistant's; None: all do.
    tools: JSON schemas of functions. variables: of the template.
    others: what belongs together with it, such as the rejected answer of a pair. prompt_messages: how many messages are the prompt of a
    completion. values: numbers of the record. steps: texts of a completion, and whether each is right. columns: what else the file says
    of a prompt, under its own names.
    """

    where: str
    messages: Sequence[Mapping[str, Any]] | None = None
    learned: tuple[bool, ...] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    completion: str | None = None
    others: "tuple[SourceRecord, ...]" = ()
    prompt_messages: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[tuple[str, bool], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """What is said in it, without the names of roles and columns."""
        if self.messages is None:
            own = f"{self.prompt or ''}{self.completion or ''}"
        else:
            own = "\n".join(str(message["content"]) for message in self.messages)
        return "\n".join([own, *(other.words for other in self.others)])

    @property
    def text(self) -> str:
        """Everything that decides its tokens, as JSON."""
        said: list[Any] = [self.messages, self.learned, self.tools, self.variables, self.prompt, self.completion]
        # Left out where there is none, so that what is held out of older corpora stays the same.
        if self.others or self.values or self.steps:
            said += [[other.text for other in self.others], self.values, self.steps]
        if self.columns:
            said.append(self.columns)
        return json.dumps(said, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class Document:
    """Text, or tokens where the source already has them, or a record.

    learn: half-open spans of `tokens` that count in the loss; None means all of them.
    weights: of each of `tokens` in the loss, in place of `learn`.
    ends: False for a piece of a long document; the next Document continues it.
    record: what to render; `text` is then its JSON, by which it is measured and held out.
    """

    text: str = ""
    tokens: Sequence[int] | None = None
    learn: tuple[tuple[int, int], ...] | None = None
    ends: bool = True
    weights: Sequence[float] | None = None
    record: SourceRecord | None = None

    def __post_init__(self) -> None:
        if (self.learn is not None or self.weights is not None) and self.tokens is None:
            raise ValueError("`learn` and `weights` count tokens: give the document's tokens too")
        if self.learn is not None and self.weights is not None:
            raise ValueError("`learn` and `weights` are two ways to say the same: give one")


class DocumentOrigin(ABC):
    """Anything that `data.source` can name."""

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        """The source that `NAME:ARGUMENT` names; the argument is empty where there is none.

        Raises:
            BadInput: this source takes no argument, or not this one.
        """
        if argument:
            name = settings.source.partition(":")[0]
            raise BadInput(f"the data source `{name}` takes no argument", where=settings.source)
        return cls()

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the data: `source` (a name) and `source.*`. No paths, so that a corpus can be moved."""


class Source(DocumentOrigin):
    """Documents, the same ones in the same order every time."""

    # That will be read, where known beforehand.
    size_bytes: int | None = None
    disk_bytes: int | None = None  # of all files, read or not
    files: int | None = None
    # The limit on the text, if it cut some off; known once the text has been read.
    max_bytes: int | None = None
    # Whether the settings `format` and `columns` apply: to JSONL.
    has_columns: bool = False

    @property
    def format(self) -> str:
        """One of `records.FORMATS`. Any other than `text` yields records."""
        return "text"

    @property
    def ignored(self) -> tuple[str, ...]:
        """Columns that were found and not read, as far as the source has been read."""
        return ()

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """All documents, from the first."""

    def modified(self) -> list[int]:
        """Times of modification, in ns, of the files that the fingerprint only samples. The cache of tokenized corpora includes
        them, so that an edit between samples is seen; a run does not, so that its corpus can be copied."""
        return []


class RowSource(DocumentOrigin):
    """Rows of tokens made from their number, with no corpus behind them."""

    @abstractmethod
    def rows(self, *, sequence: int, vocab: int, seed: int, held_out: bool = False) -> "PackedRows":
        """The rows to train on, or others to evaluate on."""


class Capped(Source):
    """The first `limit` bytes of another source's text; the document that crosses the limit is cut there."""

    def __init__(self, source: Source, limit: int):
        self.source, self.limit = source, limit
        self.size_bytes = limit if source.size_bytes is None else min(source.size_bytes, limit)
        self.disk_bytes, self.files, self.has_columns = source.disk_bytes, source.files, source.has_columns

    @property
    def format(self) -> str:
        return self.source.format

    @property
    def ignored(self) -> tuple[str, ...]:
        return self.source.ignored

    def documents(self) -> Iterator[Document]:
        left, inside, self.max_bytes = self.limit, False, None
        for document in self.source.documents():
            size = len(document.text.encode())
            if size > left or not left:
                self.max_bytes = self.limit
                # A record is read whole or not at all.
                if (left or inside) and document.record is None:
                    yield Document(document.text.encode()[:left].decode(errors="ignore"))
                return
            left, inside = left - size, not document.ends
            yield document

    def fingerprint(self) -> dict[str, Any]:
        return self.source.fingerprint() | {"source.max_bytes": self.limit}

    def modified(self) -> list[int]:
        return self.source.modified()


def find_source(settings: "DataSettings") -> Source | RowSource:
    """The source that `settings.source` names.

    Raises:
        BadInput: no such name, file or folder (with the nearest name), or nothing there to read.
    """
    name, _, argument = settings.source.partition(":")
    if name in SOURCES:
        source = SOURCES[name].from_settings(argument, settings)
    else:
        source = SOURCES[reader_of(settings.source)].from_settings(settings.source, settings)
    check_described(source, settings)
    if settings.max_bytes is not None and isinstance(source, Source):
        return Capped(source, settings.max_bytes)
    return source


def check_described(source: DocumentOrigin, settings: "DataSettings") -> None:
    """Checks that the settings about records say nothing of a source that has none.

    Raises:
        BadInput: they do, since they would be ignored.
    """
    has_columns = isinstance(source, Source) and source.has_columns
    if not has_columns and (settings.format not in ("auto", "text") or settings.columns):
        name = "columns" if settings.columns else f"format={settings.format}"
        hint = "such a file ends in .jsonl, .ndjson or .json, or is named as `jsonl:FILE`"
        raise BadInput(f"data.{name} is for JSONL, and this source is not", where=f"data.source={settings.source}", hint=hint)
    # A run that resumes has the defaults among its settings, so `learn=answers` cannot be told from saying nothing.
    if settings.template is not None and not (isinstance(source, Source) and source.format != "text"):
        what = "data.template is for conversations, and this data is text: every token is learned"
        raise BadInput(what, where=f"data.source={settings.source}", hint="leave `data.template` out")


def check_readable(settings: "DataSettings") -> None:
    """Checks that there is something to read and that the beginning of a text can be read, without tokenizing it.

    Raises:
        UserError: there is no such source, or its first document cannot be read.
    """
    name, _, _ = settings.source.partition(":")
    if name in CORPORA or is_prepared(settings.source):
        return
    source = find_source(settings)
    if isinstance(source, Source):
        next(source.documents(), None)


def is_prepared(folder: str | Path) -> bool:
    """Whether `argosy data prepare` wrote the folder, good or damaged."""
    return (Path(folder).expanduser() / "manifest.json").is_file()


def reader_of(spec: str) -> str:
    """Which source reads a path: by what is there, then by its suffix. A file with any other suffix is text."""
    path = Path(spec).expanduser()
    if path.is_dir() or (not path.exists() and any(c in spec for c in "*?[")):
        return "folder"
    if not path.exists():
        raise missing(path)
    refuse_table(path)
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return "jsonl" if suffixes and suffixes[-1] in (".jsonl", ".ndjson", ".json") else "text"


def refuse_table(path: Path) -> None:
    """Checks that a file is no table of separated values, whose lines would train as text. `text:FILE` reads it as text all the same.

    Raises:
        BadInput: it is, by its name.
    """
    if path.name.lower().removesuffix(".gz").endswith((".csv", ".tsv")):
        hint = "convert it to JSON lines, an object a row: pandas reads it, and `.to_json(FILE, orient='records', lines=True)` writes"
        raise BadInput("tables of separated values (CSV, TSV) are not read yet", where=str(path), hint=hint)


def missing(path: Path) -> BadInput:
    """The error for a source that is neither a name nor a file, with the nearest of both."""
    if not path.parent.is_dir():
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.suffix:
            fetched = f"`hf download {path} --repo-type dataset --local-dir {path.name}`"
            return BadInput(f"no folder `{path}`", hint=f"nothing is downloaded: {fetched}, then data.source={path.name}/FILE")
        return BadInput(f"no such data source: `{path}`", hint=f"there is no folder `{path.parent}`")
    # Names alone: with their folder in front, any two of its files are alike.
    beside = {child.name: str(path.with_name(child.name)) for child in path.parent.iterdir() if child.name[0] != "."}
    near = get_close_matches(path.name, [*beside, *SOURCES], n=1)
    close = [beside.get(name, name) for name in near]
    return BadInput(
        f"no such data source: `{path}`",
        where="no such file or folder, and no registered name",
        # Any other file of the folder, such as LICENSE, is not what was meant.
        hint=f"did you mean `{close[0]}`?" if close else f"registered names are {', '.join(CORPORA)}",
    )
