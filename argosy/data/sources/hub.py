"""Reads data sets of the Hub with the package `datasets` (an extra), which has its own cache.

    hf:NAME            the split `train`, or the only one          hf:NAME:SPLIT          hf:NAME:SUBSET:SPLIT
    hf:NAME@REVISION   a commit, branch or tag                     hf:FOLDER:SPLIT        a folder of files, or of `save_to_disk`

A data set is downloaded completely, as Arrow files that are memory-mapped. So its order is fixed, and a run resumes exactly. With
`data.online`, the data set is streamed, and nothing is stored. Its rows come in the order of the data set, so the position is the
number of a document here too. The shuffle buffer of `datasets` is not used, because it loses rows and repeats others when it resumes. A
single file is read directly from the Hub with `data.source=hf://datasets/NAME/FILE.parquet`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from argosy.core.command import install_extra
from argosy.core.errors import BadInput, Damaged, nearest
from argosy.core.hub.reach import unreachable_dataset, without_hub
from argosy.core.input_files import InputFile
from argosy.data.sources.arrow import BATCH_ROWS, ArrowRows, numbered_batches
from argosy.data.sources.opening import content_hash
from argosy.data.sources.steps import RecordSteps

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

SPEC = re.compile(r"(?P<name>[^:@]+)(@(?P<revision>[^:]+))?(:(?P<first>[^:]+))?(:(?P<second>[^:]+))?")

KINDS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")
FILE_ENDINGS = tuple(f"{kind}{packed}" for kind in KINDS for packed in ("", ".gz", ".zst"))


class HubDataset(ArrowRows):
    """One split of a data set on the Hub, or of a local folder.

    spec: what follows `hf:` in `data.source`.
    streams: whether the data set is streamed, and not downloaded.
    """

    kind = "hf"
    FILES = "a data set of the Hub is hf:OWNER/NAME; files and folders of this machine are data.source=PATH, without `hf:`"
    # An id of the contents of a stream; None: the data set is not streamed.
    version: str | None = None

    def __init__(
        self,
        spec: str,
        *,
        format: str = "auto",
        columns: Mapping[str, str] | None = None,
        steps: RecordSteps | None = None,
        streams: bool = False,
    ):
        super().__init__(format=format, columns=columns, steps=steps)
        if not (match := SPEC.fullmatch(spec)):
            raise BadInput(f"`hf:{spec}` names no data set", hint="hf:NAME, hf:NAME@REVISION or hf:NAME:SPLIT")
        self.spec, self.name, self.revision, self.streams = spec, match["name"], match["revision"], streams
        self.subset, self.split = (match["first"], match["second"]) if match["second"] else (None, match["first"])

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        return cls(argument, format=settings.format, columns=settings.columns, steps=settings.steps, streams=settings.online)

    @property
    def place(self) -> str:
        return f"hf:{self.spec}"

    @cached_property
    def dataset(self) -> Any:
        """Loads the split with `datasets`: as a stream if `streams` is set, unless `save_to_disk` wrote the folder.

        Raises:
            BadInput: `datasets` is not installed, or there is no such data set, subset or split.
        """
        try:
            import datasets
        except ImportError:
            problem = "data sets of the Hub are read by the package datasets, which is not installed"
            raise BadInput(problem, where=f"data.source={self.place}", hint=install_extra("hub")) from None
        folder = Path(self.name).expanduser()
        self._check_path(folder)
        unreachable = None if folder.is_dir() else unreachable_dataset(self.name, self.revision)
        try:
            if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
                loaded = datasets.load_from_disk(str(folder))
            else:
                with nullcontext() if unreachable is None else _cache_alone():
                    loaded = self._loaded(str(folder) if folder.is_dir() else self.name)
        except Exception as error:
            if unreachable is not None:
                problem = f"the data set `{self.name}` is not in the cache, and the Hub cannot be reached: {unreachable}"
                hint = f"{self.FILES}; HF_HOME says where the cache is"
                raise BadInput(problem, where=f"data.source={self.place}", hint=hint) from error
            message = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise BadInput(f"no data set `{self.name}`: {message}", where=f"data.source={self.place}") from error
        if not isinstance(loaded, dict):
            return loaded
        names = [str(name) for name in loaded]
        split = self.split or ("train" if "train" in names else names[0] if len(names) == 1 else None)
        if split not in names:
            problem = f"`{self.name}` has no split `{split}`" if split else f"`{self.name}` has several splits"
            hint = f"{nearest(split, names)}; " if split else ""
            raise BadInput(problem, where=f"data.source={self.place}", hint=f"{hint}hf:{self.name}:SPLIT, of {', '.join(names)}")
        return loaded[str(split)]

    def _loaded(self, path: str) -> Any:
        import datasets

        if not self.streams:
            return datasets.load_dataset(path, self.subset, revision=self.revision)
        builder = datasets.load_dataset_builder(path, self.subset, revision=self.revision)
        # The hash depends on the names, sizes and times of local files, or on the commit of a repository.
        self.version = f"{builder.config_id} {builder.hash}"
        return builder.as_streaming_dataset()

    def _check_path(self, path: Path) -> None:
        """Checks that the name may be that of a data set.

        Raises:
            BadInput: the name is a file, or it can only be a local path, and there is no such folder.
        """
        if path.is_file():
            raise BadInput(f"`{self.name}` is a file", where=f"data.source={self.place}", hint=f"data.source={self.name}")
        is_path = self.name.startswith((".", "/", "~")) or self.name.count("/") > 1 or path.name.endswith(FILE_ENDINGS)
        if is_path and not path.is_dir():
            problem = f"no {'file' if path.name.endswith(FILE_ENDINGS) else 'folder'} `{self.name}`"
            raise BadInput(problem, where=f"data.source={self.place}", hint=self.FILES)

    def tables(self) -> Iterator[tuple[int, Any]]:
        batches = self.dataset.with_format("arrow").iter(BATCH_ROWS)
        tables = batches if self.version is None else self._checked_stream(batches)
        yield from numbered_batches(batch for table in tables for batch in table.to_batches())

    def _checked_stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches of a stream.

        Raises:
            Damaged: the stream failed, after the retries of `datasets`.
        """
        try:
            yield from batches
        except Exception as error:
            message = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            hint = "if the network failed, the same command resumes; without `data.online` the data set is downloaded first"
            raise Damaged(f"the stream of the data set ended: {message}", where=f"data.source={self.place}", hint=hint) from error

    def fingerprint(self) -> dict[str, Any]:
        data = self.dataset
        if self.version is not None:
            return {"source": self.kind, "source.version": self.version} | self.read_fingerprint()
        files = [content_hash(InputFile(file["filename"])) for file in data.cache_files]
        fingerprint = {"source": self.kind, "source.sha256": " ".join(files) or str(data._fingerprint), "source.rows": len(data)}
        return fingerprint | self.read_fingerprint()


@contextmanager
def _cache_alone() -> Iterator[None]:
    """A context manager inside which `datasets` uses only its cache."""
    from datasets import config

    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        with without_hub():
            yield
    finally:
        config.HF_HUB_OFFLINE = before
