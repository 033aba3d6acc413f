"""Reads all files below a folder, or that a pattern matches, sorted by path. The content of each file chooses its reader. Records of
all files have the same format."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

from argosy.core.errors import BadInput
from argosy.core.input_files import InputFile, common_folder, files_below, matching_files
from argosy.data.sources import SOURCES, Document, Source, is_prepared
from argosy.data.sources.kinds import BY_NAME, MOSAIC_INDEX, file_kind, named_kind
from argosy.data.sources.opening import ENDINGS, UTF8, base_name, content_hash, modification_times
from argosy.data.sources.record_files import RecordFile, read_as
from argosy.data.sources.steps import RecordSteps
from argosy.data.sources.text import TextFile, encoded_as

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
# Names of files in which `datasets` and TFDS describe their data.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "features.json", "index.json")


class FileSet(Source):
    """All files of text or records below a folder, or all files that a glob matches, sorted by path."""

    def __init__(
        self,
        where: str | Path,
        *,
        documents: str = "whole",
        invalid: str = "error",
        format: str = "auto",
        columns: Mapping[str, str] | None = None,
        encoding: str = UTF8,
        steps: RecordSteps | None = None,
    ):
        root = InputFile(where)
        # A folder of data often holds a JSON file that describes it, so JSON files are read only if there is nothing else.
        self.paths = files_below(root, is_data) or files_below(root, is_json_file) if root.is_folder else matching_files(str(where))
        if not self.paths:
            if root.is_local and is_prepared(root.path.parent):
                problem = f"`{where}` is part of a prepared corpus"
                raise BadInput(problem, hint=f"name the whole of it: `data.source={root.path.parent}`")
            if root.is_folder and (index := next(iter(files_below(root, lambda name: name == MOSAIC_INDEX)), None)):
                hint = f"a folder of MDS shards is read by itself: `data.source={index.place.rpartition('/')[0]}`"
                raise BadInput(f"no files to read: `{where}`", hint=hint)
            searched = f"a folder is searched for {' '.join((*TEXT_SUFFIXES, *BY_NAME))}, also with {' '.join(ENDINGS)}"
            raise BadInput(f"no files to read: `{where}`", hint=searched)
        self.root = root.full_place.rstrip("/") if root.is_folder else common_folder(self.paths)
        self.split, self.invalid, self.asked, self.columns = documents, invalid, format, dict(columns or {})
        self.encoding, self.steps = encoding, steps or RecordSteps()
        self.size_bytes = self.disk_bytes = sum(path.size_bytes for path in self.paths)
        self.files = len(self.paths)
        self.kinds = {path: file_kind(path) for path in self.paths}
        if tokens := next((path for path, kind in self.kinds.items() if kind == "tokens"), None):
            raise BadInput("a file of token ids among other files", where=str(tokens), hint=f"`data.source={tokens}` reads it alone")
        self.records = [path for path, kind in self.kinds.items() if kind != "text"]
        self.has_columns = bool(self.records)
        if self.steps and (texts := [path for path, kind in self.kinds.items() if kind == "text"]):
            raise BadInput("data.map and data.filter are for records, and a file is text", where=str(texts[0]))
        self.unread: dict[str, None] = {}

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        options: dict[str, Any] = {"documents": settings.documents, "invalid": settings.invalid, "encoding": settings.encoding}
        return cls(argument, **options, format=settings.format, columns=settings.columns, steps=settings.steps)

    @cached_property
    def format(self) -> str:  # type: ignore[override]
        """The format of the first file of records, which all others must have; `text` if there are only texts."""
        record_format = self.record_file(self.records[0], self.asked).format if self.records else "text"
        if record_format != "text" and (texts := [path for path in self.paths if path not in self.records]):
            problem = f"a text file among files of `{record_format}` records"
            ending = PurePosixPath(base_name(self.records[0].name)).suffix or ".jsonl"
            raise BadInput(problem, where=str(texts[0]), hint=f"name the files of records alone: `data.source={self.root}/*{ending}`")
        return record_format

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(self.unread)

    def documents(self) -> Iterator[Document]:
        for path in self.paths:
            source = self.reader(path)
            yield from source.documents()
            self.unread |= dict.fromkeys(source.ignored)

    def reader(self, path: InputFile) -> Source:
        if path in self.records:
            return self.record_file(path, self.format)
        return TextFile(path, documents=self.split, invalid=self.invalid, encoding=self.encoding)

    def record_file(self, path: InputFile, format: str) -> RecordFile:
        options: dict[str, Any] = {"invalid": self.invalid, "columns": self.columns, "encoding": self.encoding, "steps": self.steps}
        return SOURCES[self.kinds[path]](path, format=format, **options)

    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint includes paths relative to the folder, because they decide the order. It does not include the folder's
        path."""
        digest = hashlib.sha256()
        for path in self.paths:
            relative = path.full_place.removeprefix(self.root).replace("\\", "/").lstrip("/")
            digest.update(f"{relative}\0{content_hash(path)}\n".encode())
        facts = {"source.files": len(self.paths), "source.documents": self.split, "source.invalid": self.invalid}
        facts |= encoded_as(self.encoding) | read_as(self.format, self.columns) | self.steps.fingerprint()
        return {"source": "folder", "source.sha256": digest.hexdigest()} | facts

    def modified(self) -> list[int]:
        return modification_times(self.paths)


def is_data(name: str) -> bool:
    """Whether a file of this name is read as data if it is below a folder."""
    return not base_name(name).endswith(".json") and (base_name(name).endswith(TEXT_SUFFIXES) or named_kind(name) is not None)


def is_json_file(name: str) -> bool:
    return name not in DESCRIPTIONS and base_name(name).endswith(".json")
