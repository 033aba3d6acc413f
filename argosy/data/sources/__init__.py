"""The registry of data sources, and their interface.

    data.source=stdlib            a registered name
    data.source=corpus.parquet    a file, folder, glob or address: what the file holds chooses the reader (`sources.kinds`)
    data.source=text:server.log   a reader by name, and what it reads
    data.source=FILE.py:CLASS     a class of one's own that derives from `Source`

A source of documents yields the same documents in the same order every time. A source of rows makes any row from its
number. Neither knows the tokenizer: a source of conversations yields records, which `data.chat.conversations` renders.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from argosy.core.errors import BadInput
from argosy.core.input_files import InputFile
from argosy.core.registry import Registry

if TYPE_CHECKING:
    from argosy.data.pack import PackedRows
    from argosy.data.settings import DataSettings

SOURCES = Registry(
    "data source",
    {
        "text": "argosy.data.sources.text:TextFile",
        "jsonl": "argosy.data.sources.jsonl:JsonLines",
        "csv": "argosy.data.sources.separated:SeparatedValues",
        "parquet": "argosy.data.sources.arrow:ParquetFile",
        "arrow": "argosy.data.sources.arrow:ArrowFile",
        "tfrecord": "argosy.data.sources.tfrecord:TfRecords",
        "array_record": "argosy.data.sources.array_record:ArrayRecords",
        "bagz": "argosy.data.sources.bagz_files:BagzRecords",
        "mds": "argosy.data.sources.mosaic:MosaicDataset",
        "tar": "argosy.data.sources.tar_files:TarFile",
        "hf": "argosy.data.sources.hub:HubDataset",
        "tokens": "argosy.data.sources.token_files:TokenFile",
        "folder": "argosy.data.sources.folder:FileSet",
        "memory": "argosy.data.sources.text:TextsInMemory",
        "stdlib": "argosy.data.sources.stdlib:StandardLibrary",
        "docstrings": "argosy.data.sources.stdlib:Docstrings",
        "synthetic": "argosy.data.sources.synthetic:Synthetic",
        "clicks": "argosy.data.sources.clicks:Clicks",
        "arrays": "argosy.data.images.arrays:ImageArrays",
        "images": "argosy.data.images.folder:ImageFolder",
        "shards": "argosy.data.images.shards:ImageShards",
    },
)
SOURCES.add_installed("argosy.sources")


# The sources that need no path.
CORPORA = ("stdlib", "docstrings", "synthetic", "clicks")
# Sources without text.
TEXTLESS = ("synthetic", "clicks", "arrays", "images", "shards")


@dataclass(frozen=True)
class SourceRecord:
    """One example to fine-tune on: messages for a chat template, or a prompt and its completion. If it has both, their content is the
    same.

    where: the file and line, for errors.
    messages: the messages.
    learned: for each message of an assistant, whether it counts; None: all do.
    tools: JSON schemas of functions.
    variables: further variables of the template.
    prompt, completion: the texts.
    others: records that belong to this one, such as the rejected completion of a pair.
    prompt_messages: number of messages that are the prompt of a completion.
    values: numbers of the record.
    steps: texts of a completion's steps, and whether each is right.
    columns: other columns of a prompt, by name.
    weights: the weight in the loss of the record, of each of its messages, or of each of its tokens.
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
    weights: float | tuple[float, ...] | None = None

    @property
    def words(self) -> str:
        """Its content, without the names of roles and columns."""
        if self.messages is None:
            text = f"{self.prompt or ''}{self.completion or ''}"
        else:
            text = "\n".join(str(message["content"]) for message in self.messages)
        return "\n".join([text, *(other.words for other in self.others)])

    @property
    def text(self) -> str:
        """Everything that decides its tokens, as JSON."""
        content: list[Any] = [self.messages, self.learned, self.tools, self.variables, self.prompt, self.completion]
        # Left out where there is none, so that what is held out of older corpora stays the same.
        if self.others or self.values or self.steps:
            content += [[other.text for other in self.others], self.values, self.steps]
        if self.columns:
            content.append(self.columns)
        if self.weights is not None:
            content.append({"weights": self.weights})
        return json.dumps(content, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class Document:
    """Text, or tokens where the source already has them, or a record.

    learn: half-open spans of `tokens` that count in the loss; None means all of them.
    weights: the weight of each token in the loss, in place of `learn`; or one for all of them. Tokens that mark the beginning and the
        end are not counted.
    ends: False for a piece of a long document; the next Document continues it.
    record: the record to render; `text` is then its JSON, by which it is measured and held out.
    where: the file and row of a text with weights, for errors.
    """

    text: str = ""
    tokens: Sequence[int] | None = None
    learn: tuple[tuple[int, int], ...] | None = None
    ends: bool = True
    weights: Sequence[float] | float | None = None
    record: SourceRecord | None = None
    where: str | None = None

    def __post_init__(self) -> None:
        if self.learn is not None and self.tokens is None:
            raise ValueError("`learn` counts tokens: give the document's tokens too")
        if self.weights is not None and self.tokens is None and not self.ends:
            raise ValueError("`weights` count the tokens of a whole text, not of a piece")
        if self.learn is not None and self.weights is not None:
            raise ValueError("`learn` and `weights` are two ways to say the same: give one")


class DocumentOrigin(ABC):
    """Anything that `data.source` can name."""

    # Whether the setting `columns` applies, and for texts `format`: to files of records and arrays.
    has_columns: bool = False

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        """The source that `NAME:ARGUMENT` names; the argument is empty where there is none.

        Raises:
            BadInput: this source takes no argument, or not this one.
        """
        if argument:
            name = settings.single_source.partition(":")[0]
            raise BadInput(f"the data source `{name}` takes no argument", where=settings.source_name)
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
    # Documents that were left out because they occur before, as far as the source has been read.
    duplicates: int = 0
    # The limit on the text, if it cut some off; known once the text has been read.
    max_bytes: int | None = None
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


class DerivedSource(Source):
    """What is read of another source: a part of its documents, in their order."""

    def __init__(self, source: Source):
        self.source = source
        self.size_bytes, self.disk_bytes, self.files = source.size_bytes, source.disk_bytes, source.files
        self.has_columns = source.has_columns

    @property
    def format(self) -> str:
        return self.source.format

    @property
    def ignored(self) -> tuple[str, ...]:
        return self.source.ignored

    def modified(self) -> list[int]:
        return self.source.modified()


class Capped(DerivedSource):
    """The first `limit` bytes of another source's text; the document that crosses the limit is cut there."""

    def __init__(self, source: Source, limit: int):
        super().__init__(source)
        self.limit = limit
        self.size_bytes = limit if source.size_bytes is None else min(source.size_bytes, limit)

    def documents(self) -> Iterator[Document]:
        remaining, inside, self.max_bytes = self.limit, False, None
        for document in self.source.documents():
            size = len(document.text.encode())
            if size > remaining or not remaining:
                self.max_bytes = self.limit
                # A record is read whole or not at all, and so is a text whose weights count its tokens.
                if (remaining or inside) and document.record is None and not isinstance(document.weights, Sequence):
                    yield replace(document, text=document.text.encode()[:remaining].decode(errors="ignore"), ends=True)
                return
            remaining, inside = remaining - size, not document.ends
            yield document

    def fingerprint(self) -> dict[str, Any]:
        return self.source.fingerprint() | {"source.max_bytes": self.limit}

    @property
    def duplicates(self) -> int:  # type: ignore[override]
        return self.source.duplicates


def is_prepared(folder: Any) -> bool:
    """Whether `argosy data prepare` wrote the folder, good or damaged. A mixture is none."""
    if not isinstance(folder, str | Path):
        return False
    return (Path(folder).expanduser() / "manifest.json").is_file()


def existing(place: "str | Path | InputFile") -> InputFile:
    """The file, which must exist.

    Raises:
        BadInput: there is none, or it is a folder.
    """
    file = place if isinstance(place, InputFile) else InputFile(place)
    if file.is_folder:
        raise BadInput(f"`{file}` is a folder", hint=f"read it with `data.source={file}`")
    if not file.is_file:
        raise missing(file)
    return file


def missing(file: InputFile) -> BadInput:
    """The error for a source that is neither a name nor a file, with the nearest of both."""
    if not file.is_local:
        return BadInput("no such file", where=str(file), hint="check the address, and that its store may be read from here")
    path = file.path
    if not path.parent.is_dir():
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.suffix:
            fetched = f"`hf download {path} --repo-type dataset --local-dir {path.name}`"
            return BadInput(f"no folder `{path}`", hint=f"nothing is downloaded: {fetched}, then data.source={path.name}/FILE")
        return BadInput(f"no such data source: `{path}`", hint=f"there is no folder `{path.parent}`")
    # Names alone: with their folder in front, any two of its files are alike.
    siblings = {child.name: str(path.with_name(child.name)) for child in path.parent.iterdir() if child.name[0] != "."}
    near = get_close_matches(path.name, [*siblings, *SOURCES], n=1)
    close = [siblings.get(name, name) for name in near]
    return BadInput(
        f"no such data source: `{path}`",
        where="no such file or folder, and no registered name",
        # Any other file of the folder, such as LICENSE, is not what was meant.
        hint=f"did you mean `{close[0]}`?" if close else f"registered names are {', '.join(CORPORA)}",
    )
