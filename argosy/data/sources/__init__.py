"""The registry of data sources, and their interface.

    data.source=stdlib            a registered name
    data.source=corpus.parquet    a file, folder, glob or URL; the content of the file chooses the reader (`sources.kinds`)
    data.source=text:server.log   the name of a reader, and the file that it reads
    data.source=FILE.py:CLASS     a class in a file of the user that derives from `Source`

A `Source` yields the same documents in the same order every time. A `RowSource` computes any row from its number. A `Source` does not
know the tokenizer. A source of conversations yields records, which `data.chat.conversations` renders.
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
    """One example for fine-tuning: messages for a chat template, or a prompt and its completion as texts. If a record has both, they
    have the same content.

    where: the file and line of the record, for errors.
    messages: the messages.
    learned: for each message, whether it counts in the loss if it is an assistant's; None: all messages of the assistant count.
    tools: the JSON schemas of functions.
    variables: further variables of the chat template.
    prompt, completion: the texts of the prompt and of the completion.
    others: further records of the same group, such as the rejected completion of a pair.
    prompt_messages: the number of messages that are the prompt of a completion.
    values: numbers of the record, by name, such as a margin.
    steps: (text, whether it is right) for each step of a completion.
    columns: the other columns of a prompt, by name; for labeled texts, the label.
    weights: the weight in the loss of the record, of each message, or of each token; None: 1.
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
        """The words of the record and of `others`, without the names of roles and columns."""
        if self.messages is None:
            text = f"{self.prompt or ''}{self.completion or ''}"
        else:
            text = "\n".join(str(message["content"]) for message in self.messages)
        return "\n".join([text, *(other.words for other in self.others)])

    @property
    def text(self) -> str:
        """Everything that decides the tokens of the record, as JSON text."""
        content: list[Any] = [self.messages, self.learned, self.tools, self.variables, self.prompt, self.completion]
        # Empty fields are left out, so that the held-out split of older corpora stays the same.
        if self.others or self.values or self.steps:
            content += [[other.text for other in self.others], self.values, self.steps]
        if self.columns:
            content.append(self.columns)
        if self.weights is not None:
            content.append({"weights": self.weights})
        return json.dumps(content, ensure_ascii=False, sort_keys=True)


@dataclass(frozen=True)
class Document:
    """One document, or a piece of a long document: a text, tokens if the source already has them, or a record.

    text: the text; for a record, its JSON text, whose hash decides whether the record is held out.
    tokens: the token ids, if the source already has them; None: the text is to be tokenized.
    learn: the half-open spans of `tokens` that count in the loss; None: all tokens count.
    ends: whether the document ends here. If not, the next Document continues it.
    weights: instead of `learn`, the weight of each token in the loss, or one weight for all. Special tokens that encoding adds at the
        beginning and the end have no entry.
    record: the record to render; None: the document is no record.
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
    """The base of everything that `data.source` can name."""

    # Whether `data.columns` applies to this source and, for a source of texts, `data.format` too.
    has_columns: bool = False

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        """Makes the source that `NAME:ARGUMENT` names. The argument is empty if only NAME is given.

        Raises:
            BadInput: this source takes no argument, or the argument is wrong.
        """
        if argument:
            name = settings.single_source.partition(":")[0]
            raise BadInput(f"the data source `{name}` takes no argument", where=settings.source_name)
        return cls()

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the data, under the keys `source` (a name) and `source.*`. It has no paths, so that files can be
        moved."""


class Source(DocumentOrigin):
    """A source of documents. It yields the same documents in the same order every time."""

    # The number of bytes that will be read, if it is known beforehand.
    size_bytes: int | None = None
    disk_bytes: int | None = None  # the size of all files, read or not
    files: int | None = None
    # The number of documents that were left out because they occur before, among those read so far.
    duplicates: int = 0
    # The limit on bytes of text, if the text is longer. It is known once the text has been read.
    max_bytes: int | None = None
    @property
    def format(self) -> str:
        """The format of the documents, a key of `records.FORMATS`. Sources of any format but `text` yield records."""
        return "text"

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of columns that nothing reads, among the documents read so far."""
        return ()

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yields all documents, from the first on."""

    def modified(self) -> list[int]:
        """The modification times, in ns, of large files, of which the fingerprint hashes only samples. The key of a tokenized corpus in
        the cache includes them, so that an edit between samples is noticed. The fingerprint of a run does not, so that files can be
        copied."""
        return []


class RowSource(DocumentOrigin):
    """A source of rows that are computed from their number, without a corpus of documents."""

    @abstractmethod
    def rows(self, *, sequence: int, vocab: int, seed: int, held_out: bool = False) -> "PackedRows":
        """The table of rows for training, or, with `held_out`, that for evaluation."""


class DerivedSource(Source):
    """The base of sources that yield some of the documents of another source, in the same order."""

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
    """The first `limit` bytes of another source's text. The document that crosses the limit is cut there, or left out if it is a
    record."""

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
    """Whether `argosy data prepare` wrote the folder, even if it is damaged. False for a mixture."""
    if not isinstance(folder, str | Path):
        return False
    return (Path(folder).expanduser() / "manifest.json").is_file()


def existing(place: "str | Path | InputFile") -> InputFile:
    """Returns the file, after a check that it exists.

    Raises:
        BadInput: there is no such file, or it is a folder.
    """
    file = place if isinstance(place, InputFile) else InputFile(place)
    if file.is_folder:
        raise BadInput(f"`{file}` is a folder", hint=f"read it with `data.source={file}`")
    if not file.is_file:
        raise missing(file)
    return file


def missing(file: InputFile) -> BadInput:
    """The error for a source that is neither a registered name nor a file. Its hint is the nearest name or file."""
    if not file.is_local:
        return BadInput("no such file", where=str(file), hint="check the address, and that its store may be read from here")
    path = file.path
    if not path.parent.is_dir():
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.suffix:
            fetched = f"`hf download {path} --repo-type dataset --local-dir {path.name}`"
            return BadInput(f"no folder `{path}`", hint=f"nothing is downloaded: {fetched}, then data.source={path.name}/FILE")
        return BadInput(f"no such data source: `{path}`", hint=f"there is no folder `{path.parent}`")
    # Only the names are compared, because with the common folder before them all paths would be similar.
    siblings = {child.name: str(path.with_name(child.name)) for child in path.parent.iterdir() if child.name[0] != "."}
    near = get_close_matches(path.name, [*siblings, *SOURCES], n=1)
    close = [siblings.get(name, name) for name in near]
    return BadInput(
        f"no such data source: `{path}`",
        where="no such file or folder, and no registered name",
        # A file with no similar name, such as LICENSE, would be no help.
        hint=f"did you mean `{close[0]}`?" if close else f"registered names are {', '.join(CORPORA)}",
    )
