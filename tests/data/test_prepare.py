"""Prepared corpora: what is written is what was given, whole or not at all, and damage is seen."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from helpers import shared

from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.data import prepare as module
from argosy.data.encoding import Encoding
from argosy.data.pack import Corpus
from argosy.data.prepare import HeldOut, open_prepared, prepare
from argosy.data.sources import Capped, Document, Source
from argosy.data.sources.text import TextFile, TextsInMemory
from argosy.data.tokenizers.byte import ByteTokenizer


class Bytes(ByteTokenizer):
    """Bytes as tokens, with an identity that can be told from the real one's."""

    fingerprint = "bytes"


def documents_of(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens[a:b].tolist() for a, b in zip(corpus.starts, corpus.starts[1:])]


def stories(count: int) -> list[str]:
    draw = random.Random(count)
    return ["".join(draw.choices("abcdé \n", k=draw.randint(1, 60))) for _ in range(count)]


def test_what_is_written_is_what_was_given(tmp_path):
    texts = stories(200)
    corpus = prepare(TextsInMemory(texts), Encoding(Bytes()), tmp_path / "corpus", held_out=0)
    assert documents_of(corpus.train) == [[*text.encode(), 257] for text in texts]
    assert corpus.train.tokens.dtype == np.uint16
    assert corpus.train.weights is None
    assert len(corpus.held_out.tokens) == 0
    corpus.verify()
    assert sorted(os.listdir(tmp_path)) == ["corpus"]


def test_bos_stands_before_every_document(tmp_path):
    corpus = prepare(TextsInMemory(["ab", "c"]), Encoding(Bytes(), bos=True), tmp_path / "corpus", held_out=0)
    assert documents_of(corpus.train) == [[256, 97, 98, 257], [256, 99, 257]]


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    class Wide(Bytes):
        vocab = 70_000

    corpus = prepare(TextsInMemory([Document(tokens=[69_999, 3])]), Encoding(Wide()), tmp_path / "corpus", held_out=0)
    assert corpus.train.tokens.dtype == np.uint32
    assert corpus.train.tokens.tolist() == [69_999, 3, 257]


@pytest.mark.parametrize("token", [258, -1])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path, token):
    with pytest.raises(BadInput, match=f"token {token} is outside"):
        prepare(TextsInMemory([Document(tokens=[1, token])]), Encoding(Bytes()), tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_spans_to_learn_are_kept(tmp_path):
    chat = [Document(tokens=list(b"askanswer"), learn=((3, 9),)), Document("all"), Document(tokens=[1, 2], learn=())]
    corpus = prepare(TextsInMemory(chat), Encoding(Bytes(), bos=True), tmp_path / "corpus", held_out=0)
    assert corpus.train.weights is not None
    assert corpus.train.weights.tolist() == [0] * 4 + [1] * 7 + [1] * 5 + [0] * 4
    with pytest.raises(BadInput, match="outside its document"):
        prepare(TextsInMemory([Document(tokens=[1, 2], learn=((1, 3),))]), Encoding(Bytes()), tmp_path / "other")


def test_a_document_in_pieces_is_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.data.sources.text.PIECE_BYTES", 1000)
    path = shared("text/names.txt")
    corpus = prepare(TextFile(path), Encoding(Bytes(), bos=True), tmp_path / "corpus", held_out=0)
    assert documents_of(corpus.train) == [[256, *path.read_bytes(), 257]]


def test_groups_do_not_show(tmp_path, monkeypatch):
    texts = stories(300)
    whole = prepare(TextsInMemory(texts), Encoding(Bytes()), tmp_path / "whole", held_out=0.1)
    monkeypatch.setattr(module, "GROUP_BYTES", 200)
    grouped = prepare(TextsInMemory(texts), Encoding(Bytes()), tmp_path / "grouped", held_out=0.1)
    assert whole.manifest == grouped.manifest


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_the_held_out_share_is_near_and_apart(tmp_path, share):
    texts = [f"{i} {text}" for i, text in enumerate(stories(3000))]
    corpus = prepare(TextsInMemory(texts), Encoding(Bytes()), tmp_path / "corpus", held_out=share)
    train, held_out = documents_of(corpus.train), documents_of(corpus.held_out)
    assert sorted(train + held_out) == sorted([*text.encode(), 257] for text in texts)
    total = len(corpus.train.tokens) + len(corpus.held_out.tokens)
    assert share / 2 <= len(corpus.held_out.tokens) / total <= 2 * share


def test_equal_documents_stay_on_one_side():
    chooser = HeldOut(0.2)
    decisions = [chooser.takes(Document(str(i % 50))) for i in range(2000)]
    # The first round may meet the cap on the share; from then on every text goes where its hash says.
    sides = [set(decisions[500 + i :: 50]) for i in range(50)]
    assert all(len(side) == 1 for side in sides)
    assert {True, False} == {side for [side] in sides}


def test_no_document_takes_the_corpus_away():
    for i in range(20):
        chooser = HeldOut(0.5)
        assert not chooser.takes(Document(f"the first, {i}"))
        assert not chooser.takes(Document(f"long {i}" * 100))
    chooser, texts = HeldOut(0.1), [f"{i}" * (1 + i % 40) for i in range(500)]
    lengths = [len(text) for text in texts if chooser.takes(Document(text))]
    assert len(lengths) > 10
    assert sum(lengths) <= 0.2 * sum(map(len, texts))


@pytest.mark.parametrize("texts", [["x" * 1000], ["a" * 400, "b" * 600]])
def test_few_documents_give_their_end(tmp_path, texts):
    corpus = prepare(TextsInMemory(texts), Encoding(Bytes()), tmp_path / "corpus", held_out=0.1)
    joined = [token for text in texts for token in [*text.encode(), 257]]
    assert [*corpus.train.tokens, *corpus.held_out.tokens] == joined
    assert len(corpus.held_out.tokens) == len(joined) // 10
    assert sum(corpus.manifest["splits"][split]["bytes"] for split in ("train", "held_out")) == 1000
    corpus.verify()


def test_a_tail_of_several_documents_keeps_their_borders(tmp_path):
    texts = [f"{i:09}" for i in range(40)]
    texts = [text for text in texts if not drawn_below(text, 0.25)]
    corpus = prepare(TextsInMemory(texts), Encoding(Bytes()), tmp_path / "corpus", held_out=0.25)
    assert len(corpus.held_out.tokens) == len(texts) * 10 // 4
    cut = len(corpus.train.tokens) % 10
    sizes = [len(document) for document in documents_of(corpus.held_out)]
    assert sizes == ([10 - cut] if cut else []) + [10] * (len(corpus.held_out.tokens) // 10)
    report = corpus.manifest["splits"]["held_out"]
    assert report["documents"] == len(sizes)


def drawn_below(text: str, share: float) -> bool:
    chooser = HeldOut(share)
    chooser.takes(Document("x" * 10_000))
    return chooser.takes(Document(text))


def test_bytes_per_token_counts_targets(tmp_path):
    corpus = prepare(TextsInMemory(stories(2000)), Encoding(Bytes()), tmp_path / "corpus", held_out=0.1)
    # n bytes are n + 1 tokens with the end, and n targets: the first token is none.
    assert corpus.bytes_per_token("train") == corpus.bytes_per_token("held_out") == 1.0


def test_an_empty_corpus_leaves_nothing(tmp_path):
    class Markless(Bytes):
        eos = None

    for texts in ([], [""]):
        with pytest.raises(BadInput, match="empty"):
            prepare(TextsInMemory(texts), Encoding(Markless()), tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_an_empty_file_is_named(tmp_path):
    class Markless(Bytes):
        eos = None

    (tmp_path / "nothing.txt").write_text("")
    source = TextFile(tmp_path / "nothing.txt")
    for empty_source in (source, Capped(source, 5)):
        with pytest.raises(BadInput, match="empty") as caught:
            prepare(empty_source, Encoding(Markless()), tmp_path / "corpus")
        assert caught.value.where == str(tmp_path / "nothing.txt")


def test_the_same_again_is_opened_and_other_data_refused(tmp_path):
    first = prepare(TextsInMemory(["a" * 100]), Encoding(Bytes()), tmp_path / "corpus")
    modified = (tmp_path / "corpus" / "manifest.json").stat().st_mtime_ns
    assert prepare(TextsInMemory(["a" * 100]), Encoding(Bytes()), tmp_path / "corpus").manifest == first.manifest
    assert (tmp_path / "corpus" / "manifest.json").stat().st_mtime_ns == modified
    with pytest.raises(BadInput, match=r"source\.sha256 differ"):
        prepare(TextsInMemory(["b" * 100]), Encoding(Bytes()), tmp_path / "corpus")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    with pytest.raises(BadInput, match="other files"):
        prepare(TextsInMemory(["a"]), Encoding(Bytes()), tmp_path / "other")
    assert (tmp_path / "other" / "precious").read_text() == "x"


def test_progress_tells_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_BYTES", 1000)
    progress = []
    prepare(
        TextsInMemory(["x" * 600] * 5),
        Encoding(Bytes()),
        tmp_path / "corpus",
        progress=lambda done, size: progress.append((done, size)),
    )
    assert progress == [(1200, 3000), (2400, 3000), (3000, 3000)]


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Of an endless supply of documents no more than a group is asked for ahead."""
    monkeypatch.setattr(module, "GROUP_BYTES", 1000)
    alive: list[int] = []
    writer_add = module.SplitWriter.add

    class Watched(Source):
        def documents(self):
            for i in range(200):
                alive.append(i)
                yield Document("x" * 100)

        def fingerprint(self):
            return {"source": "watched"}

    def add(self, *arguments):
        alive.pop()
        assert len(alive) < 12
        writer_add(self, *arguments)

    monkeypatch.setattr(module.SplitWriter, "add", add)
    prepare(Watched(), Encoding(Bytes()), tmp_path / "corpus")


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.SplitWriter, "put", full)
    with pytest.raises(ArgosyError, match="No space left") as e:
        prepare(TextsInMemory(["abc"]), Encoding(Bytes()), tmp_path / "corpus")
    assert e.value.exit_code == 1
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []


def test_a_killed_writer_leaves_nothing_that_counts(tmp_path):
    program = f"""
        import os, signal, sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
        from test_prepare import *
        module.GROUP_BYTES = 1000
        kill = lambda done, size: os.kill(os.getpid(), signal.SIGKILL)
        prepare(TextsInMemory(stories(500)), Encoding(Bytes()), sys.argv[1], progress=kill)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "corpus")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / ".corpus.partial" / "train" / "tokens.bin").exists()
    assert not module.is_prepared(tmp_path / "corpus")
    corpus = prepare(TextsInMemory(stories(500)), Encoding(Bytes()), tmp_path / "corpus")
    corpus.verify()
    assert sorted(os.listdir(tmp_path)) == ["corpus"]


def weighed_documents(count: int) -> list[Document]:
    """Documents some of whose tokens do not count, and from the middle on with weights."""
    draw = random.Random(count)
    plain = [Document(tokens=draw.choices(range(256), k=draw.randint(1, 60)), learn=((0, 1),)) for _ in range(count // 2)]
    return [*plain, *(Document(tokens=[1, 2, 3], weights=(0.5, 1.0, 0.0)) for _ in range(count - len(plain)))]


def pieces(count: int) -> list[Document]:
    """Documents that arrive in pieces."""
    return [Document(text, ends=i % 7 == 6) for i, text in enumerate(stories(count))]


@pytest.mark.parametrize("texts", [stories, weighed_documents, pieces])
def test_an_interrupted_writer_goes_on_with_the_same_result(tmp_path, monkeypatch, texts):
    monkeypatch.setattr(module, "GROUP_BYTES", 1000)
    monkeypatch.setattr(module, "JOURNAL_BYTES", 200)
    whole = prepare(TextsInMemory(texts(600)), Encoding(Bytes()), tmp_path / "whole")
    draw, messages, encoded = random.Random(0), list[str](), list[int]()

    def interrupt(done: int, size: int | None) -> None:
        encoded.append(done)
        if draw.random() < 0.3:
            raise KeyboardInterrupt

    attempts = 0
    while not module.is_prepared(tmp_path / "cut"):
        attempts += 1
        assert attempts < 100
        try:
            prepare(TextsInMemory(texts(600)), Encoding(Bytes()), tmp_path / "cut", progress=interrupt, say=messages.append)
        except KeyboardInterrupt:
            pass
    cut = open_prepared(tmp_path / "cut", verify=True)
    assert cut.manifest == whole.manifest
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["held_out", "manifest.json", "train"]
    assert attempts > 3
    assert any("goes on there" in message for message in messages)
    if texts is not weighed_documents:
        # Later attempts begin behind what earlier ones wrote.
        assert len(encoded) - len(set(encoded)) < len(encoded) / 2


def test_a_writer_that_is_asked_to_stop_notes_what_is_done(tmp_path, monkeypatch):
    """Long before the journal is due."""
    monkeypatch.setattr(module, "GROUP_BYTES", 1000)
    whole = prepare(TextsInMemory(stories(600)), Encoding(Bytes()), tmp_path / "whole")
    sizes, messages = list[int](), list[str]()

    def cut(stopped: Callable[[], bool]) -> None:
        seen = {"progress": lambda done, _: sizes.append(done), "say": messages.append}
        prepare(TextsInMemory(stories(600)), Encoding(Bytes()), tmp_path / "cut", **seen, stopping=lambda: nullcontext(stopped))

    with pytest.raises(module.WriterStopped) as caught:
        cut(lambda: len(sizes) > 3)
    assert caught.value.kept
    assert len(sizes) == 4
    cut(lambda: False)
    assert "goes on there" in messages[0]
    assert sizes == sorted(set(sizes))
    assert open_prepared(tmp_path / "cut", verify=True).manifest == whole.manifest


@pytest.mark.slow
def test_a_command_that_waits_for_another_writer_ends_at_once(tmp_path):
    text, lock = tmp_path / "text.txt", tmp_path / ".cut.lock"
    text.write_text("a story\n" * 10)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        words = [sys.executable, "-m", "argosy", "data", "prepare", str(text), str(tmp_path / "cut"), "tokenizer=byte"]
        with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            assert process.stderr is not None
            assert any("waiting for another process" in line for line in iter(process.stderr.readline, ""))
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_goes_on_after_a_signal(tmp_path, number):
    """A tokenizer of words takes seconds for 10 MB, and the journal is due after 32 MiB."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f"{json.dumps({'text': ' '.join([story] * 8)})}\n" for story in stories(40_000)))
    words = [sys.executable, "-m", "argosy", "data", "prepare", str(text)]
    tokenizer = f"tokenizer={shared('tokenizers/smollm2')}"

    def run(name: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*words, str(tmp_path / name), tokenizer], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with run("cut") as first:
        tokens = tmp_path / ".cut.partial" / "train" / "tokens.bin"
        until = time.monotonic() + 60
        while not tokens.exists() or not tokens.stat().st_size:
            assert time.monotonic() < until
            assert first.poll() is None
            time.sleep(0.01)
        first.send_signal(number)
        stderr = first.communicate(timeout=60)[1]
    assert first.returncode == 128 + number, stderr
    assert "the same command goes on from there" in stderr
    assert not (tmp_path / "cut").exists()
    done = json.loads((tmp_path / ".cut.partial" / module.JOURNAL).read_text())["documents"]
    assert 0 < done < 40_000
    for name in ("cut", "whole"):
        with run(name) as process:
            stderr = process.communicate(timeout=300)[1]
        assert process.returncode == 0, stderr
        assert (f"interrupted after {done:,} documents; it goes on there" in stderr) == (name == "cut")
    manifests = [open_prepared(tmp_path / name, verify=True).manifest for name in ("cut", "whole")]
    assert manifests[0] == manifests[1]


def test_a_journal_of_another_corpus_or_with_damage_starts_over(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_BYTES", 1000)
    monkeypatch.setattr(module, "JOURNAL_BYTES", 1500)

    def interrupted(count: int) -> None:
        def interrupt(done: int, size: int | None) -> None:
            if done > 9000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(TextsInMemory(stories(count)), Encoding(Bytes()), tmp_path / "corpus", progress=interrupt)

    interrupted(600)
    messages = list[str]()
    tokens = tmp_path / ".corpus.partial" / "train" / "tokens.bin"
    os.truncate(tokens, 10)
    prepare(TextsInMemory(stories(600)), Encoding(Bytes()), tmp_path / "corpus", say=messages.append).verify()
    assert "starts over" in messages[0]
    prepare(TextsInMemory(stories(600)), Encoding(Bytes()), tmp_path / "other").verify()
    shutil.rmtree(tmp_path / "corpus")
    interrupted(600)
    corpus = prepare(TextsInMemory(stories(500)), Encoding(Bytes()), tmp_path / "corpus", say=messages.append)
    assert "starts over" in messages[1]
    assert documents_of(corpus.train)[0] == [*stories(500)[0].encode(), 257]


def test_two_writers_wait_for_each_other(tmp_path):
    corpora: list[module.Prepared] = []
    start = lambda: corpora.append(prepare(TextsInMemory(stories(500)), Encoding(Bytes()), tmp_path / "corpus"))  # noqa: E731
    threads = [Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(corpora) == 4
    assert all(corpus.manifest == corpora[0].manifest for corpus in corpora)
    corpora[0].verify()
    assert sorted(os.listdir(tmp_path)) == ["corpus"]


@pytest.mark.parametrize("name", ["train/tokens.bin", "train/documents.bin", "held_out/tokens.bin", "train/learn.bin"])
@pytest.mark.parametrize("change", ["shorten", "lengthen", "remove"])
def test_wrong_sizes_are_seen_on_opening(tmp_path, name, change):
    texts = [Document(tokens=list(range(100)), learn=((0, 50),))] * 5
    path = prepare(TextsInMemory(texts), Encoding(Bytes()), tmp_path / "corpus", held_out=0.1).folder / name
    data = path.read_bytes()
    path.unlink()
    if change != "remove":
        path.write_bytes(data[:-1] if change == "shorten" else data + b"\0")
    with pytest.raises(Damaged, match="incomplete"):
        open_prepared(tmp_path / "corpus")


def test_a_flipped_bit_is_seen_by_verify(tmp_path):
    folder = prepare(TextsInMemory(stories(100)), Encoding(Bytes()), tmp_path / "corpus").folder
    data = bytearray((folder / "train" / "tokens.bin").read_bytes())
    data[17] ^= 4
    (folder / "train" / "tokens.bin").write_bytes(data)
    open_prepared(folder)
    with pytest.raises(Damaged, match="not what was written"):
        open_prepared(folder, verify=True)


def test_an_index_that_does_not_ascend_is_damage(tmp_path):
    folder = prepare(TextsInMemory(stories(100)), Encoding(Bytes()), tmp_path / "corpus").folder
    starts = np.fromfile(folder / "train" / "documents.bin", "<i8")
    starts[3] = 10**9
    starts.tofile(folder / "train" / "documents.bin")
    with pytest.raises(Damaged, match="index"):
        open_prepared(folder)


def test_hostile_manifests_are_answered(tmp_path):
    folder = prepare(TextsInMemory(stories(20)), Encoding(Bytes()), tmp_path / "corpus").folder
    good = (folder / "manifest.json").read_bytes()
    draw = random.Random(0)
    for _ in range(400):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = (
                draw.choice(b'0129{}[]",:-e ') if draw.random() < 0.8 else draw.randrange(256)
            )
        (folder / "manifest.json").write_bytes(data)
        try:
            open_prepared(folder)
        except ArgosyError:
            pass
    endless = good.replace(b'"tokens": ', b'"tokens": 1e999, "was": ')
    for wrong in (
        endless,
        b"",
        b"[]",
        b"null",
        b"[" * 100_000,
        good[:-30],
        json.dumps({"format": "argosy corpus"}).encode(),
    ):
        (folder / "manifest.json").write_bytes(wrong)
        with pytest.raises(Damaged):
            open_prepared(folder)


def test_no_corpus_there(tmp_path):
    with pytest.raises(BadInput, match="no prepared corpus"):
        open_prepared(tmp_path)
