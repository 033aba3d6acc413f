"""Finds the source that the settings name, and checks that it can be read."""

import hashlib
from pathlib import Path

from argosy.core.errors import BadInput
from argosy.core.input_files import InputFile
from argosy.core.registry import from_file, is_file
from argosy.data.mixtures.settings import MixedSource
from argosy.data.settings import DataSettings
from argosy.data.sources import CORPORA, SOURCES, TEXTLESS, Capped, DocumentOrigin, RowSource, Source, is_prepared
from argosy.data.sources.kinds import reader_of


def find_source(settings: DataSettings) -> Source | RowSource:
    """Finds and opens the source that `settings.source` names, with `deduplicate` and `max_bytes` applied.

    Raises:
        BadInput: there is no such name, file or folder (the hint is the nearest name), or it holds nothing to read.
    """
    place = settings.single_source
    name, _, argument = place.partition(":")
    if is_file(place):
        source = source_in_file(place, settings)
    elif name in SOURCES and not argument.startswith("//"):
        source = SOURCES[name].from_settings(argument, settings)
    else:
        source = SOURCES[reader_of(place)].from_settings(place, settings)
    check_described(source, settings)
    if settings.deduplicate != "no" and isinstance(source, Source):
        # Imported here, because it needs numpy, which a check of settings does not need.
        from argosy.data.sources.duplicates import Deduplicated

        source = Deduplicated(source, settings.deduplicate)
    if settings.max_bytes is not None and isinstance(source, Source):
        return Capped(source, settings.max_bytes)
    return source


def source_in_file(place: str, settings: DataSettings) -> Source | RowSource:
    """Makes the source that FILE.py:CLASS names. Its fingerprint includes a hash of the file, so that a run does not resume with other
    code.

    Raises:
        BadInput: there is no such class, or it does not derive from `Source` or `RowSource`.
    """
    kind = from_file("data source", place)
    if not (isinstance(kind, type) and issubclass(kind, Source | RowSource)):
        problem = f"the data source `{place}` is no class of sources"
        raise BadInput(problem, hint="derive it from argosy.data.sources.Source, and define `documents` and `fingerprint`")
    source = kind.from_settings("", settings)
    base_fingerprint = source.fingerprint
    digest = hashlib.sha256(Path(place.rpartition(":")[0]).read_bytes()).hexdigest()
    source.fingerprint = lambda: base_fingerprint() | {"source.code": f"{kind.__name__} {digest}"}  # type: ignore[method-assign]
    return source


def check_described(source: DocumentOrigin, settings: DataSettings) -> None:
    """Checks that settings about records or documents are set only for sources that have them.

    Raises:
        BadInput: a setting would be ignored.
    """
    if not source.has_columns and (settings.format not in ("auto", "text") or settings.columns):
        name = "columns" if settings.columns else f"format={settings.format}"
        hint = "JSON lines, CSV, Parquet and the like have records; `jsonl:FILE` reads a file of any name as JSON lines"
        raise BadInput(f"data.{name} is for records, and this source has none", where=f"data.source={settings.source_name}", hint=hint)
    if settings.steps and not (isinstance(source, Source) and source.has_columns):
        problem, hint = "data.map and data.filter are for records, and this source has none", "`jsonl:FILE` reads a file as JSON lines"
        raise BadInput(problem, where=f"data.source={settings.source_name}", hint=hint)
    if settings.deduplicate != "no" and not isinstance(source, Source):
        raise BadInput("data.deduplicate is for documents", where=f"data.source={settings.source_name}", hint="leave it out")
    # `learn` is not checked: a resumed run stores the defaults as settings, so an explicit `learn=answers` cannot be recognized.
    if settings.template is not None and not (isinstance(source, Source) and source.format != "text"):
        problem = "data.template is for conversations, and this data is text: every token is learned"
        raise BadInput(problem, where=f"data.source={settings.source_name}", hint="leave `data.template` out")


def check_readable(settings: DataSettings) -> None:
    """Checks that the sources exist and that the first document of each can be read. Nothing is tokenized.

    Raises:
        UserError: there is no such source, or its first document cannot be read.
    """
    if isinstance(settings.source, list):
        for mixed in settings.source:
            check_readable(settings.model_copy(update={**mixed.overrides, "source": mixed.path}))
        return
    name, _, _ = settings.source.partition(":")
    if name in CORPORA or is_prepared(settings.source):
        return
    source = find_source(settings)
    if isinstance(source, Source):
        next(source.documents(), None)


def is_textless(spec: str | list[MixedSource]) -> bool:
    """Whether a source has no text and needs no tokenizer, such as synthetic rows or images. For a mixture, whether all sources do."""
    if isinstance(spec, list):
        return all(is_textless(mixed.path) for mixed in spec)
    name, _, argument = spec.partition(":")
    if is_file(spec):
        return False
    if name in SOURCES and not argument.startswith("//"):
        return name in TEXTLESS
    file = InputFile(spec)
    return file.is_local and file.path.exists() and not is_prepared(file.path) and reader_of(spec) in TEXTLESS
