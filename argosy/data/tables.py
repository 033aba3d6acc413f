"""Makes a table of rows from the data settings: finds the source, prepares its corpus if necessary, and packs it.

Mistakes in the data are reported here, before a batch is made.
"""

import hashlib
import json
import shutil
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.caches import cache_home
from argosy.core.errors import BadInput, Damaged
from argosy.data.batch import Fingerprint
from argosy.data.chat.conversations import with_template
from argosy.data.encoding import Encoding
from argosy.data.order import of_records, of_sequences, packing_of, too_long_of
from argosy.data.pack import Corpus, FitRows, PackedRows, corpus_of, counts_of, rows_of
from argosy.data.prepare import (
    HeldOut,
    Prepared,
    Progress,
    corpus_identity,
    document_groups,
    open_prepared,
    prepare,
)
from argosy.data.rows.encoders import encoder_for, sequence_rows
from argosy.data.settings import MADE_WITH, DataSettings
from argosy.data.sources import RowSource, Source, is_prepared
from argosy.data.sources.find import find_source, is_textless
from argosy.data.summary import CorpusSummary

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer

# Larger corpora must be prepared beforehand, not when a run starts.
CORPUS_BYTES = 10**9
# Number of packings that are kept in memory. A run builds its data twice, each time for training and evaluation.
PLANS = 4
KEPT: OrderedDict[tuple[str, str, str, int, str], PackedRows] = OrderedDict()
ENDLESS = sys.maxsize

# Values of settings that leave the choice to the data, so they fit every prepared corpus.
UNDECIDED = {"bos": None, "format": "auto"}

Data = Source | RowSource | Prepared | Corpus


@dataclass(frozen=True)
class RowTable:
    """The rows of one split.

    rows: the rows.
    identity: the fingerprint of the corpus.
    bytes_per_token: UTF-8 bytes of text per target; None: there is no text.
    summary: the contents of the corpus in numbers.
    """

    rows: PackedRows
    identity: Fingerprint
    bytes_per_token: float | None
    summary: CorpusSummary


def find(settings: DataSettings) -> Source | RowSource | Prepared:
    """Finds the source that `settings.source` names. A folder written by `prepare` is opened.

    Raises:
        BadInput: there is no such source, or the settings differ from those that the corpus was prepared with.
    """
    place = settings.single_source
    if not is_prepared(place):
        return find_source(settings)
    if settings.online:
        raise BadInput("a prepared corpus is not read online", where=place, hint="leave `data.online` off")
    prepared = open_prepared(place)
    check_prepared(prepared, settings)
    return prepared


def check_prepared(prepared: Prepared, settings: DataSettings) -> None:
    """Checks that the settings that were set explicitly are those that a corpus was prepared with.

    Raises:
        BadInput: a setting differs. It cannot be changed in a prepared corpus.
    """
    fingerprint = prepared.fingerprint
    stored = {
        "held_out": fingerprint.get("held_out"), "max_bytes": fingerprint.get("source.max_bytes"), "bos": fingerprint.get("bos"),
        "documents": fingerprint.get("source.documents", "whole"), "invalid": fingerprint.get("source.invalid", "error"),
        "encoding": fingerprint.get("source.encoding", "utf-8"),
        "special": fingerprint.get("special", False), "format": fingerprint.get("source.format", "text"),
        "columns": json.loads(fingerprint.get("source.columns", "{}")),
        "learn": fingerprint.get("learn", "answers" if "labels" in fingerprint else "all"),
        "labels": json.loads(str(fingerprint.get("labels", "[]"))), "negatives": fingerprint.get("negatives", settings.negatives),
        "prompts": json.loads(str(fingerprint.get("prompts", "{}"))),
    }  # fmt: skip
    stored_settings = prepared.manifest.get("settings") or {}
    stored |= {"map": stored_settings.get("map"), "filter": stored_settings.get("filter")}
    stored |= {"deduplicate": fingerprint.get("source.deduplicate", "no")}
    check_template(prepared, settings)
    for name in (name for name in MADE_WITH if name in stored and name in settings.model_fields_set):
        value = getattr(settings, name)
        if value != stored[name] and value != UNDECIDED.get(name, stored[name]):
            raise BadInput(
                f"the corpus was prepared with data.{name}={stored[name]}, not {value}",
                where=str(prepared.folder),
                hint=f"leave `data.{name}` out, or prepare the corpus again with `{name}={value}`",
            )


def check_template(prepared: Prepared, settings: DataSettings) -> None:
    """Checks that the chat template is the one that a corpus was rendered with. The template may be a file that has changed.

    Raises:
        BadInput: the template differs, or the corpus is text without a template.
    """
    if settings.template is None or prepared.tokenizer is None:
        return
    from argosy.data.tokenizers.load import load_tokenizer

    template_hash = prepared.fingerprint.get("template")
    if template_hash is None or Encoding(load_tokenizer(prepared.tokenizer), template=settings.template).template_hash != template_hash:
        stored = (prepared.manifest.get("settings") or {}).get("template") or ("the tokenizer's" if template_hash else "none")
        raise BadInput(
            f"the corpus was prepared with another chat template than data.template={settings.template}: {stored}",
            where=str(prepared.folder),
            hint=f"leave `data.template` out, or prepare the corpus again with `template={settings.template}`",
        )


def tokenizer_for(settings: DataSettings) -> "Tokenizer | None":
    """Loads the tokenizer of the data: `data.tokenizer` if set, else the tokenizer that a prepared corpus stores. Returns None for data
    without text, such as synthetic tokens. `data.template` becomes the tokenizer's chat template, so the trained model has it too.

    Raises:
        UserError: there is no such tokenizer or template.
    """
    from argosy.data.tokenizers.load import load_tokenizer

    if is_textless(settings.source):
        return None
    places = [settings.source] if isinstance(settings.source, str) else [mixed.path for mixed in settings.source]
    first = next((place for place in places if is_prepared(place)), None)
    if "tokenizer" not in settings.model_fields_set and first is not None:
        stored = open_prepared(first).tokenizer
        return with_template(load_tokenizer(stored or settings.tokenizer), settings.template)
    return with_template(load_tokenizer(settings.tokenizer), settings.template)


def holds_out(settings: DataSettings, source: Data) -> bool:
    """Whether some of the data is held out for evaluation."""
    if isinstance(source, Prepared):
        return bool(len(source.held_out.tokens))
    return not isinstance(source, Corpus) and settings.held_out > 0


def fitting(tokenizer: "Tokenizer | None", settings: DataSettings, vocab: int) -> "Tokenizer":
    """Returns the tokenizer, after a check that there is one and that its vocabulary is not larger than the model's.

    Raises:
        BadInput: the check fails.
    """
    if tokenizer is None:
        raise BadInput("text needs a tokenizer", where=f"data.source={settings.source_name}", hint="set `data.tokenizer`")
    if tokenizer.vocab > vocab:
        problem = f"the tokenizer has {tokenizer.vocab:,} tokens, the model only {vocab:,}"
        raise BadInput(problem, where=f"data.tokenizer={settings.tokenizer}", hint=f"set `model.vocab={tokenizer.vocab}`")
    return tokenizer


def table_of(
    source: Data,
    split: str,
    settings: DataSettings,
    tokenizer: "Tokenizer | None",
    vocab: int,
    seed: int,
    progress: Progress | None,
    limit: int | None = None,
) -> RowTable:
    """Makes the table of the rows of a split, `train` or `held_out`. Text is tokenized first, unless it is in the cache.

    Args:
        limit: the number of batches to read, for the held-out split of online data; None: no limit.
    """
    if isinstance(source, RowSource):
        rows = source.rows(sequence=settings.sequence, vocab=vocab, seed=seed, held_out=split == "held_out")
        _check_not_empty(rows, split, settings)
        identity = source.fingerprint()
        # A position is JSON, which has no tuples.
        spaces = vocab if isinstance(vocab, int) else " ".join(map(str, vocab))
        unreadable = len(getattr(source, "unreadable", ()))
        stretched = len(getattr(source, "stretched", ()))
        summary = summarize_corpus(identity["source"], settings, rows=rows, unreadable=unreadable, stretched=stretched)
        return RowTable(rows, identity | {"vocab": spaces}, None, summary)
    if isinstance(source, Corpus):
        return table_in_memory(source, split, settings, vocab)
    tokenizer = fitting(tokenizer, settings, vocab)
    if isinstance(source, Source) and settings.online:
        return held_out_online(source, settings, tokenizer, limit)
    prepared = source if isinstance(source, Prepared) else cached_corpus(source, settings, tokenizer, progress)
    if prepared.fingerprint.get("tokenizer") != tokenizer.fingerprint:
        remedy = f"leave it out, or set `data.tokenizer={prepared.tokenizer}`" if prepared.tokenizer else "set that one"
        problem = f"the corpus was prepared with another tokenizer than `{settings.tokenizer}`"
        raise BadInput(problem, where=str(prepared.folder), hint=f"{remedy}; or prepare the corpus again")
    rows = _check_not_empty(rows_of_split(prepared, split, settings), split, settings)
    return RowTable(rows, prepared.fingerprint, prepared.bytes_per_token(split), summary_of(prepared, settings, rows))


def table_in_memory(corpus: Corpus, split: str, settings: DataSettings, vocab: int) -> RowTable:
    """Makes the table of the rows of a corpus in memory.

    Raises:
        BadInput: the split is `held_out`, a token is outside the vocabulary, or there are no rows.
    """
    if split == "held_out":
        raise BadInput("a corpus in memory holds nothing out", hint="build batches from a second corpus to evaluate on")
    if len(corpus.tokens) and int(corpus.tokens.max()) >= vocab:
        raise BadInput(f"token {corpus.tokens.max()} is outside the model's vocabulary of {vocab}")
    digest = hashlib.sha256()
    for name, array in {"tokens": corpus.tokens, "starts": corpus.starts, **corpus.target_arrays}.items():
        digest.update(f"{name} {array.dtype}".encode() + np.ascontiguousarray(array).tobytes())
    identity: Fingerprint = {"source": "corpus in memory", "source.sha256": digest.hexdigest()}
    rows = _check_not_empty(packed_rows(corpus, settings, identity), split, settings)
    return RowTable(rows, identity, None, summarize_corpus("in memory", settings, corpus, rows))


def packed_rows(corpus: Corpus, settings: DataSettings, identity: Fingerprint) -> PackedRows:
    """Packs a corpus into rows as the settings say. `identity` is the fingerprint of the corpus, which holds its format."""
    layout = settings.sequence, packing_of(settings, identity), too_long_of(settings, identity)
    if together := of_sequences(identity):
        return sequence_rows(corpus, str(identity["source.format"]), together, *layout)
    return rows_of(corpus, layout[1], layout[0], layout[2])


def rows_of_split(prepared: Prepared, split: str, settings: DataSettings) -> PackedRows:
    """Packs a split into rows. The last PLANS packings are kept in memory, because a run builds its data more than once, and packing
    takes 2 s for a million documents."""
    corpus = prepared.train if split == "train" else prepared.held_out
    files = json.dumps(prepared.manifest["splits"][split]["files"], sort_keys=True)
    fingerprint = prepared.fingerprint
    key = (str(prepared.folder), files, packing_of(settings, fingerprint), settings.sequence, too_long_of(settings, fingerprint))
    if key not in KEPT:
        KEPT[key] = packed_rows(corpus, settings, fingerprint)
        while len(KEPT) > PLANS:
            KEPT.popitem(last=False)
    return KEPT[key]


def summarize_corpus(
    name: str,
    settings: DataSettings,
    corpus: Corpus | None = None,
    rows: PackedRows | None = None,
    identity: Fingerprint | None = None,
    **more: Any,
) -> CorpusSummary:
    """Summarizes a corpus and its rows.

    Args:
        name: the name of the source.
        corpus: the tokens; None: unknown.
        rows: the packed rows; None: unknown.
        identity: the fingerprint of the corpus.
        more: further fields of the summary.
    """
    identity = identity or {}
    together = of_sequences(identity)
    if corpus is not None and together:
        more |= {"documents": corpus.documents // together, "tokens": len(corpus.tokens)}
    elif corpus is not None:
        short = int((np.diff(corpus.starts) < 2).sum()) if packing_of(settings, identity) != "split" else 0
        more |= {"documents": corpus.documents, "tokens": len(corpus.tokens), "short_documents": short}
    if of_records(identity):
        more |= {"format": identity["source.format"], "packing": packing_of(settings, identity)}
        more |= {"chosen_packing": settings.packing is None, "too_long": too_long_of(settings, identity)}
    if rows is not None and (of_records(identity) or settings.too_long not in (None, "continue")):
        done = counts_of(rows)
        more |= {"cut": done.cut, "dropped": done.dropped, "unlearned": done.unlearned, "targets": done.targets}
        more |= {"parted": done.parted if of_records(identity) else 0, "learned": done.learned}
    if isinstance(rows, FitRows) and len(rows):
        more |= {"padding": 1 - int(rows.size.sum()) / (len(rows) * settings.sequence)}
    if together and "held_out_documents" in more:
        more["held_out_documents"] //= together
    if together and rows is not None and settings.packing == "fit":
        more |= {"slots": rows.own_sizes["s"]}  # type: ignore[attr-defined]
    count = None if rows is None else len(rows)
    return CorpusSummary(source=name, rows=count, sequence=settings.sequence, batch=settings.batch, **more)


def summary_of(prepared: Prepared, settings: DataSettings, rows: PackedRows | None = None) -> CorpusSummary:
    """Summarizes a prepared corpus, and its rows if they are given."""
    source, special = prepared.manifest.get("source", {}), prepared.manifest.get("special", {})
    records = prepared.manifest.get("records", {})
    train, held_out = (prepared.manifest["splits"][split] for split in ("train", "held_out"))
    return summarize_corpus(
        settings.source_name, settings, prepared.train, rows, prepared.fingerprint,
        ignored=tuple(records.get("ignored", ())), unanswered=records.get("unanswered", 0), rendered=records.get("rendered"),
        learn=records.get("learn"), endless=records.get("endless", 0), identical=records.get("identical", 0),
        surplus=records.get("surplus", 0), absent=records.get("absent", 0),
        bytes=train["bytes"], held_out_documents=held_out["documents"], held_out_tokens=held_out["tokens"],
        files=source.get("files"), source_bytes=source.get("disk_bytes"), max_bytes=source.get("max_bytes"),
        duplicates=source.get("duplicates", 0),
        special_documents=special.get("documents", 0), special_names=tuple(special.get("names", ())),
    )  # fmt: skip


def _check_not_empty(rows: PackedRows, split: str, settings: DataSettings) -> PackedRows:
    """Returns the rows. Raises BadInput if there are none."""
    if not len(rows):
        purpose, hint = ("train", "") if split == "train" else ("evaluate", "raise `data.held_out`, or ")
        counts = counts_of(rows)
        if counts.dropped or counts.unlearned:
            problem = f"nothing to {purpose} on is left: every record is longer than a row of {settings.sequence} tokens, or has no "
            problem += "answer within it"
            raise BadInput(problem, where=settings.source_name, hint="raise `data.sequence`")
        raise BadInput(f"the corpus holds nothing to {purpose} on", where=settings.source_name, hint=f"{hint}give more text")
    return rows


def cached_corpus(source: Source, settings: DataSettings, tokenizer: "Tokenizer", progress: Progress | None) -> Prepared:
    """Opens the prepared corpus of a source in the cache. Writes the corpus first if the cache does not have it.

    Raises:
        BadInput: the source has more than CORPUS_BYTES, which is too much to tokenize while a run starts.
    """
    fingerprint = source_identity(source, tokenizer, settings)
    modified = source.modified()
    identity = fingerprint | {"modified": modified} if modified else fingerprint
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = corpus_cache(settings) / f"{fingerprint['source']}-{key}"
    if is_prepared(folder):
        try:
            return open_prepared(folder)
        except Damaged:
            shutil.rmtree(folder)  # a cache is made again
    if (source.size_bytes or 0) > CORPUS_BYTES:
        raise BadInput(
            f"{source.size_bytes or 0:,} bytes of text are too many to tokenize while a run starts",
            where=f"data.source={settings.source_name}",
            hint=f"run `argosy data prepare {settings.source_name} FOLDER`, then train with `data.source=FOLDER`",
        )
    encoding = Encoding.of_settings(tokenizer, settings)
    return prepare(source, encoding, folder, held_out=settings.held_out, progress=progress)


def source_identity(source: Source, tokenizer: "Tokenizer", settings: DataSettings) -> Fingerprint:
    """The settings and the source's fingerprint, which decide the tokens."""
    return corpus_identity(source, Encoding.of_settings(tokenizer, settings), settings.held_out)


def corpus_cache(settings: DataSettings) -> Path:
    if settings.cache is not None:
        return Path(settings.cache).expanduser()
    if (home := cache_home()) is None:
        raise BadInput("there is no home directory to keep tokenized text in", hint="set data.cache, or XDG_CACHE_HOME")
    return home / "corpora"


def held_out_online(source: Source, settings: DataSettings, tokenizer: "Tokenizer", limit: int | None) -> RowTable:
    """Reads the held-out documents of online data into memory, and packs them.

    Args:
        limit: the number of batches after which reading stops; None: the whole source is read.

    Raises:
        BadInput: no document is held out, for instance because all the text is one document.
    """
    chooser, encoder = HeldOut(settings.held_out), encoder_for(source, Encoding.of_settings(tokenizer, settings))
    enough = ENDLESS if limit is None else limit * settings.batch * settings.sequence + 1
    encoded, tokens, size_bytes = [], 0, 0
    for group in document_groups(document for document in source.documents() if chooser.takes(document)):
        for document, piece in zip(group, encoder.encode(group)):
            if tokens < enough:
                encoded.append(piece)
                text_bytes = len(document.text.encode()) if document.record is None else 0
                tokens, size_bytes = tokens + len(piece.tokens), size_bytes + text_bytes
        if tokens >= enough:
            break
    corpus = corpus_of(encoded)
    identity = source_identity(source, tokenizer, settings)
    rows = packed_rows(corpus, settings, identity)
    if not len(rows):
        raise BadInput(
            "data.online holds out whole documents, and none of this source was",
            where=settings.source_name,
            hint="`data.documents=paragraphs`, a larger `data.held_out`, or `data.held_out=0` to train without evaluation",
        )
    bytes_per_token = size_bytes / (len(corpus.tokens) - corpus.documents) if size_bytes else None
    return RowTable(rows, identity, bytes_per_token, summarize_corpus(settings.source_name, settings, corpus, rows, identity))
