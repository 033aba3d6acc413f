"""What a run says of its corpus, and the settings that belong to a prepared one."""

import json

import numpy as np
import pytest
from test_prepare import Bytes, stories
from test_tokenize import tokenizer_of

from argosy.core.errors import BadInput
from argosy.core.settings import read_settings, words_layer
from argosy.data import pack, tables
from argosy.data.encoding import Encoding
from argosy.data.pipeline import build, eval_batches, find, holds_out, tokenizer_for
from argosy.data.prepare import open_prepared, prepare
from argosy.data.settings import DataSettings
from argosy.data.sources import Document
from argosy.data.sources.folder import FileSet
from argosy.data.sources.text import TextFile, TextsInMemory
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.jobs.data import prepare as prepare_job


def settings(tmp_path, *words: str, **values) -> DataSettings:
    """As a user gives them: what is not said is known not to be said."""
    base = {"sequence": 16, "batch": 4, "cache": str(tmp_path / "cache")} | values
    return read_settings(DataSettings, words_layer([*(f"{k}={v}" for k, v in base.items()), *words])).value


def batches(settings, source=None, make=build, tokenizer=None):
    return make(settings, tokenizer or Bytes(), vocab=258, seed=0, source=source)


# ---- the summary


def test_the_summary_counts_what_is_there(tmp_path):
    for name, text in (("a.txt", "some text\n" * 30), ("b.txt", "x")):
        (tmp_path / name).write_text(text)
    summary = batches(settings(tmp_path, held_out=0, packing="fit"), FileSet(tmp_path)).summary(steps=10)
    assert (summary.files, summary.source_bytes, summary.bytes, summary.documents) == (2, 301, 301, 2)
    assert (summary.tokens, summary.rows, summary.sequence) == (303, 19, 16)  # 301 inputs in rows of 16
    assert summary.epochs == 10 * 4 / 19
    assert summary.text.startswith(
        "data stdlib: 2 files of 301 bytes, 301 bytes of text, 2 documents, 303 tokens, 19 rows of 16, 0.99 % padding, "
        "2.11 epochs in this run."
    )
    assert "Left out" not in summary.text
    json.dumps(summary.as_dict())


def test_the_summary_says_what_is_left_out_and_why(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 100)
    data_settings = settings(tmp_path, f"source={tmp_path / 'a.txt'}", max_bytes=500, held_out=0.1)
    text = batches(data_settings).summary(steps=1).text
    assert "everything after the first 500 bytes of 1 kB (data.max_bytes)" in text
    assert "50 tokens in 1 document for evaluation (data.held_out)" in text
    whole = batches(settings(tmp_path, f"source={tmp_path / 'a.txt'}", max_bytes=1000, held_out=0))
    assert "Left out" not in whole.summary(steps=1).text


def test_documents_without_a_target_are_counted_where_they_are_dropped(tmp_path):
    class Markless(ByteTokenizer):
        eos = None

    documents = TextsInMemory(["a", "bc", "d", "efg" * 30])
    data_settings = settings(tmp_path, held_out=0, packing="fit", batch=1)
    assert batches(data_settings, documents, tokenizer=Markless()).summary().short_documents == 2
    assert "2 documents of fewer than two tokens" in batches(data_settings, documents, tokenizer=Markless()).summary().text


def test_epochs_that_end_the_data_are_reported_with_their_tail(tmp_path):
    ten_rows = TextsInMemory([Document(tokens=list(range(160)))])
    stream = batches(settings(tmp_path, epochs=1, held_out=0), ten_rows)
    summary = stream.summary(steps=100)
    assert (summary.ends_after, summary.tail_rows, round(summary.epochs, 2)) == (2, 2, 0.8)
    assert "the last 2 rows, too few for a batch (data.epochs)" in summary.text
    assert stream.summary(steps=1).tail_rows == 0


@pytest.mark.parametrize("online", ["false", "true"])
def test_names_of_special_tokens_are_warned_of_once(tmp_path, online):
    chats = TextsInMemory(["<bos>user: hi", "plain", "also <bos> and <eos>"])
    summary = batches(settings(tmp_path, online=online, held_out=0), chats).summary(steps=1)
    assert summary.special_documents == 2
    assert summary.warning.startswith("Warning: ")
    assert "hold names of special tokens (<bos>" in summary.text
    assert "data.special=true" in summary.text
    silent = batches(settings(tmp_path, "special=true", online=online, held_out=0), chats)
    assert silent.summary(steps=1).warning == ""
    assert 256 in next(silent)["tokens"]


def test_special_is_part_of_what_the_corpus_is(tmp_path):
    chats = TextsInMemory(["<bos>user: hi" * 30])
    state = batches(settings(tmp_path, held_out=0), chats).state()
    with pytest.raises(Exception, match="special"):
        batches(settings(tmp_path, "special=true", held_out=0), chats).restore(state)


# ---- prepared folders


def prepare_corpus(tmp_path, *words: str):
    (tmp_path / "text.txt").write_text("\n\n".join(stories(60)))
    data_settings = settings(tmp_path, f"source={tmp_path / 'text.txt'}", *words)
    messages: list[str] = []
    prepare_job(data_settings, tmp_path / "corpus", messages.append)
    return tmp_path / "corpus", messages


@pytest.mark.parametrize("word, was", [
    ("bos=true", "bos=False"), ("held_out=0.3", "held_out=0.2"), ("max_bytes=1k", "max_bytes=None"),
    ("documents=whole", "documents=paragraphs"), ("invalid=replace", "invalid=error"), ("special=true", "special=False"),
])  # fmt: skip
def test_a_setting_that_a_prepared_folder_was_not_made_with_is_refused(tmp_path, word, was):
    folder, _ = prepare_corpus(tmp_path, "held_out=0.2", "documents=paragraphs")
    with pytest.raises(BadInput, match=f"prepared with data.{was}, not"):
        find(settings(tmp_path, f"source={folder}", word))
    same = ["held_out=0.2", "documents=paragraphs", "max_bytes=none", "bos=none", "special=false"]
    next(batches(settings(tmp_path, f"source={folder}", *same), tokenizer=ByteTokenizer()))


def test_a_prepared_folder_brings_its_tokenizer_and_settings(tmp_path):
    vocabulary = tmp_path / "words"
    tokenizer_of("stories260k").save(vocabulary)
    folder, _ = prepare_corpus(tmp_path, f"tokenizer={vocabulary}")
    data_settings = settings(tmp_path, f"source={folder}")
    tokenizer = tokenizer_for(data_settings)
    assert tokenizer.fingerprint == tokenizer_of("stories260k").fingerprint
    assert tokenizer_for(settings(tmp_path, f"source={folder}", "tokenizer=byte")).vocab == 258
    made_with = open_prepared(folder).manifest["settings"]
    assert made_with["tokenizer"] == str(vocabulary)
    assert made_with["source"] == str(tmp_path / "text.txt")
    next(build(data_settings, tokenizer, vocab=512, seed=0))
    with pytest.raises(BadInput, match="another tokenizer") as caught:
        build(settings(tmp_path, f"source={folder}", "tokenizer=byte"), Bytes(), vocab=512, seed=0)
    assert str(folder / "tokenizer") in str(caught.value)


def test_a_killed_prepare_starts_over_and_says_so(tmp_path):
    (tmp_path / ".corpus.partial").mkdir()
    (tmp_path / ".corpus.partial" / "half").write_text("")
    _, messages = prepare_corpus(tmp_path)
    assert len(messages) == 1
    assert "starts over" in messages[0]


def test_preparing_warns_of_names_of_special_tokens(tmp_path):
    (tmp_path / "chat.txt").write_text("<eos>hi")
    messages: list[str] = []
    prepare_job(settings(tmp_path, f"source={tmp_path / 'chat.txt'}"), tmp_path / "corpus", messages.append)
    assert len(messages) == 1
    assert "<eos>" in messages[0]


def test_whether_anything_is_held_out_is_asked_of_the_folder(tmp_path):
    source = TextsInMemory(stories(50))
    with_, without = (prepare(source, Encoding(Bytes()), tmp_path / f"c{share}", held_out=share) for share in (0.2, 0))
    assert holds_out(settings(tmp_path), with_)
    assert not holds_out(settings(tmp_path), without)
    assert holds_out(settings(tmp_path), source)
    assert not holds_out(settings(tmp_path, held_out=0), source)


# ---- training online


def test_online_data_is_evaluated_on_what_it_never_trains(tmp_path):
    texts = [f"{i:04} {text}" for i, text in enumerate(stories(300))]
    data_settings = settings(tmp_path, "online=true", held_out=0.2, epochs=1, packing="fit", batch=1, sequence=128)
    assert holds_out(data_settings, TextsInMemory(texts))
    evaluated = b"".join(bytes(b["tokens"].astype(np.uint8)) for b in batches(data_settings, TextsInMemory(texts), eval_batches))
    trained = b"".join(bytes(b["tokens"].astype(np.uint8)) for b in batches(data_settings, TextsInMemory(texts)))
    sides = [(text.encode() in evaluated, text.encode() in trained) for text in texts]
    assert set(sides) == {(True, False), (False, True)}


def test_online_evaluation_reads_no_further_than_its_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.data.prepare.GROUP_BYTES", 300)
    read = []

    class Watched(TextsInMemory):
        def documents(self):
            for document in super().documents():
                read.append(document)
                yield document

    data_settings = settings(tmp_path, "online=true", held_out=0.2)
    texts = [f"{i} {text}" for i, text in enumerate(stories(2000))]
    all_ = list(batches(data_settings, Watched(texts), eval_batches))
    assert len(read) == 2000
    read.clear()
    few = eval_batches(data_settings, Bytes(), vocab=258, seed=0, source=Watched(texts), limit=3)
    assert len(read) < 500
    for batch, other in zip(few, all_[:3], strict=True):
        np.testing.assert_array_equal(batch["tokens"], other["tokens"])


def test_online_data_of_one_document_says_why_it_cannot_be_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.data.sources.text.PIECE_BYTES", 100)
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    with pytest.raises(BadInput, match="holds out whole documents") as caught:
        batches(settings(tmp_path, "online=true"), TextFile(tmp_path / "a.txt"), eval_batches)
    assert "data.held_out=0" in str(caught.value)


# ---- once is enough


def test_a_run_packs_and_hashes_its_corpus_once(tmp_path, monkeypatch):
    """Building twice, as a fresh run does, and evaluation beside it: one plan for each split."""
    plans = []
    original = pack.best_fit_decreasing
    monkeypatch.setattr(pack, "best_fit_decreasing", lambda *sizes: plans.append(1) or original(*sizes))
    tables.KEPT.clear()
    data_settings = settings(tmp_path, packing="fit", held_out=0.2)
    for _ in range(2):
        source = TextsInMemory(stories(90))
        batches(data_settings, source)
        batches(data_settings, source, eval_batches)
    assert len(plans) == 2
    batches(data_settings.model_copy(update={"sequence": 8}), TextsInMemory(stories(90)))
    assert len(plans) == 3
    batches(data_settings, TextsInMemory(stories(91)))
    assert len(plans) == 4


# ---- a limit belongs to its source


class Run(DataSettings):
    data: DataSettings = DataSettings()


def read(*layers: list[str]) -> DataSettings:
    return read_settings(Run, *map(words_layer, layers)).value.data


def test_a_limit_of_a_recipe_does_not_outlive_its_source():
    recipe = ["data.source=stdlib", "data.max_bytes=1M", "data.documents=paragraphs", "data.invalid=replace"]
    settings_of_recipe = read(recipe, ["data.batch=2"])
    assert (settings_of_recipe.max_bytes, settings_of_recipe.documents, settings_of_recipe.invalid) == (10**6, "paragraphs", "replace")
    mine = read([*recipe, "data.held_out=0.2", "data.sequence=32"], ["data.source=mine.txt"])
    assert (mine.max_bytes, mine.documents, mine.invalid) == (None, "whole", "error")
    assert (mine.held_out, mine.sequence) == (0.2, 32)
    assert not {"max_bytes", "documents", "invalid"} & mine.model_fields_set


def test_a_limit_said_with_the_source_or_after_it_counts():
    assert read(["data.max_bytes=1M"], ["data.source=mine.txt", "data.max_bytes=2M"]).max_bytes == 2 * 10**6
    assert read(["data.max_bytes=1M"], ["data.source=mine.txt"], ["data.max_bytes=3M"]).max_bytes == 3 * 10**6
    assert read(["data.source=stdlib", "data.max_bytes=1M"], ["data.source=stdlib"]).max_bytes == 10**6
    assert read(["data.max_bytes=1M"], ["data.source=mine.txt"]).max_bytes is None  # said of the default source
