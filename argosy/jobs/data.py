"""`argosy data`: tokenizes a corpus to disk, shows what a model will see of it, trains a vocabulary.

Preparing a corpus and training a vocabulary need only the data settings, neither a model nor jax.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.settings import dump, read_settings, words_layer
from argosy.data import pipeline
from argosy.data.chat.conversations import with_template
from argosy.data.encoding import Encoding
from argosy.data.prepare import Progress, Stopping, never_stopped, open_prepared
from argosy.data.settings import MADE_WITH, DataSettings
from argosy.data.sources import Source, is_prepared
from argosy.data.sources.find import find_source
from argosy.data.tokenizers.load import load_tokenizer
from argosy.run.settings.compose import compose
from argosy.run.settings.recipe_files import recipes

Say = Callable[[str], None]


def is_recipe(name: str) -> bool:
    """Whether a word names a recipe (by name or as a YAML file) rather than data."""
    return name in recipes() or name.endswith((".yml", ".yaml"))


def data_settings(name: str, words: Iterable[str]) -> DataSettings:
    """Returns the data settings of a recipe or of a source.

    Args:
        name: a recipe, or a source of data.
        words: `key=value` settings. For a recipe they are settings of the run, for a source settings of the data.

    Raises:
        UserError: there is a mistake in the settings.
    """
    if is_recipe(name):
        from argosy.run.settings.run import Run

        return compose(Run, name, words).value.data
    words = [word.removeprefix("data.") for word in words]
    if other := next((word for word in words if word.startswith("source=")), None):
        raise BadInput(f"`{name}` is the source, but data.source names another, `{other}`")
    layer = words_layer(words)
    return read_settings(DataSettings, words_layer([f"source={name}"]), layer).value


def documents_of(settings: DataSettings) -> Source:
    """Returns the source of text that the settings name.

    Raises:
        BadInput: the source has no text, or is already prepared.
    """
    if is_prepared(settings.source):
        origin = open_prepared(settings.single_source).manifest.get("settings", {}).get("source")
        hint = f"train on it: `argosy train tiny data.source={settings.source_name}`"
        hint += f"; the text it was made from is `{origin}`" if origin else "; here, name the text it was made from"
        raise BadInput(f"`{settings.source_name}` is already prepared", hint=hint)
    source = find_source(settings)
    if not isinstance(source, Source):
        raise BadInput(f"the data source `{settings.source_name}` has no documents", hint="its rows are made while training")
    return source


def prepare(
    settings: DataSettings, target: Path, say: Say, progress: Progress | None = None, stopping: Stopping = never_stopped
) -> dict[str, Any]:
    """Tokenizes a source into the folder `target`, with the tokenizer and the settings beside the tokens. Returns a summary.

    If this is stopped or killed, there is nothing under that name. The same command then continues and says so.

    Args:
        stopping: a context manager around the writing. The function that it yields is asked before each document whether to stop.

    Raises:
        WriterStopped: that function asked to stop.
        UserError: there is no such source or tokenizer, or the folder holds something else.
    """
    from argosy.data.prepare import SPLITS
    from argosy.data.prepare import prepare as write

    source, tokenizer = documents_of(settings), with_template(load_tokenizer(settings.tokenizer), settings.template)
    if missing := tokenizer.missing_bytes:
        say(f"the tokenizer `{settings.tokenizer}` has no token for {len(missing)} of the 256 bytes: text with them loses them")
    made_with = {name: value for name, value in dump(settings).items() if name in ("source", *MADE_WITH)}
    encoding = Encoding.of_settings(tokenizer, settings)
    options: dict[str, Any] = {"held_out": settings.held_out, "settings": made_with, "keep_tokenizer": True}
    prepared = write(source, encoding, target, **options, progress=progress, say=say, stopping=stopping)
    summary = pipeline.summary_of(prepared, settings)
    if summary.warning:
        say(summary.warning)
    totals = prepared.manifest["splits"]
    splits = {split: {name: totals[split][name] for name in ("documents", "tokens", "bytes")} for split in SPLITS}
    return {
        "target": str(target), "tokenizer": settings.tokenizer, "vocab": prepared.manifest["vocab"], **splits,
        "summary": summary.text,
    } | ({} if summary.format is None else {"format": summary.format})  # fmt: skip


def inspect(
    recipe: str, words: Iterable[str], rows: int, color: bool, say: Say
) -> tuple[str, list[dict[str, Any]]]:
    """Returns the first rows of a recipe's first batch, as text and as JSON. `say` is called with the contents of the corpus.

    Raises:
        UserError: the run could not start on its data.
    """
    from argosy.data import inspect
    from argosy.run.settings.run import Run

    run = compose(Run, recipe, words).value
    tokenizer = pipeline.tokenizer_for(run.data)
    together = run.objective.rows_per_group
    batches = pipeline.build(run.data, tokenizer, vocab=run.model.vocab, seed=run.seed, rows_per_group=together)
    try:
        batch = {name: array[:rows] for name, array in next(batches).items()}
        say(batches.summary().text)
    finally:
        batches.close()
    text = inspect.render(batch, tokenizer, color)
    count = len(batch["tokens"])
    document = [{name: array[row].tolist() for name, array in batch.items()} for row in range(count)]
    for row in document:
        row["text"] = inspect.words(row["tokens"], tokenizer)
    return text, document


def train_tokenizer(settings: DataSettings, vocab: int, target: Path) -> dict[str, Any]:
    """Trains a vocabulary on a source and writes it to the new folder `target`. Returns its size and facts about the text that was
    read.

    Raises:
        BadInput: the folder is not empty, the source has no text, or the vocabulary is too small.
    """
    from argosy.data.tokenizers.train import train

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"`{target}` is not empty", hint="name a new folder; nothing is ever overwritten")
    read = {"bytes": 0, "documents": 0}

    def texts() -> Iterator[str]:
        for document in documents_of(settings).documents():
            read["documents"] += 1
            text = document.text if document.record is None else document.record.words
            read["bytes"] += len(text.encode())
            yield text

    tokenizer = train(texts(), vocab)
    tokenizer.save(target)
    return {"target": str(target), "vocab": tokenizer.vocab, "fingerprint": tokenizer.fingerprint} | read
