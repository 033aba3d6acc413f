"""`argosy data` as a user meets it."""

import json
from pathlib import Path

import numpy as np
import pytest

from argosy.cli import main
from argosy.data.prepare import open_prepared
from argosy.data.tokenizers.load import load_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 400


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a text, and a cache of its own."""
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["data", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_vocabulary_a_corpus_and_a_look_at_it(here, capsys):
    code, out, err = run(capsys, "tokenizer", "text.txt", "words", "vocab=280", "--json")
    document = json.loads(out)
    tokenizer = load_tokenizer("words")
    assert (code, err) == (0, "")
    assert document["vocab"] == tokenizer.vocab == 280
    assert document["bytes"] == len(TEXT)
    assert document["fingerprint"] == tokenizer.fingerprint

    code, out, _ = run(capsys, "prepare", "text.txt", "corpus", "tokenizer=words", "held_out=0.1", "--json")
    document = json.loads(out)
    prepared = open_prepared("corpus", verify=True)
    assert code == 0
    assert document["train"]["bytes"] + document["held_out"]["bytes"] == len(TEXT)
    train = np.asarray(prepared.train.tokens).tolist()
    assert len(train) == document["train"]["tokens"]
    assert TEXT.startswith(tokenizer.decode(train))

    words = ["data.source=corpus", "data.tokenizer=words", "model.vocab=280", "data.shuffle=false"]
    code, out, err = run(capsys, "inspect", "tiny", *words, "--rows", "1")
    assert code == 0
    assert err.startswith("data corpus: ")
    assert out.startswith("row 0: 128 tokens, 128 learned, 0 padding")
    assert "quick brown fox" in out
    code, out, _ = run(capsys, "inspect", "tiny", *words, "--rows", "3", "--json")
    rows = json.loads(out)
    assert len(rows) == 3
    assert [len(row["tokens"]) for row in rows] == [128] * 3
    assert rows[0]["text"] == tokenizer.decode(rows[0]["tokens"]) == tokenizer.decode(train[:128])


def test_plain_words_for_people(here, capsys):
    code, out, err = run(capsys, "prepare", "text.txt", "corpus")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "corpus: tokens of `byte`, 258 in its vocabulary"
    assert "1 documents" in out
    code, out, err = run(capsys, "tokenizer", "text.txt", "words", "vocab=5000")
    assert code == 0
    assert "5000 were asked for" in err
    assert out.startswith("words: ")


def test_a_recipe_is_a_source_too(here, capsys):
    (here / "own.yml").write_text("extends: tiny\ndata:\n  source: text.txt\n")
    code, out, _ = run(capsys, "prepare", "own.yml", "corpus", "data.held_out=0", "--json")
    assert code == 0
    assert json.loads(out)["train"] == {"documents": 1, "tokens": len(TEXT) + 1, "bytes": len(TEXT)}


def test_data_prefixed_words_mean_the_same(here, capsys):
    assert run(capsys, "prepare", "text.txt", "corpus", "data.max_bytes=1k", "--json")[0] == 0
    assert open_prepared("corpus").manifest["splits"]["train"]["bytes"] <= 1000


def test_bytes_that_a_tokenizer_loses_are_reported(here, capsys):
    assert run(capsys, "tokenizer", "text.txt", "words", "vocab=258")[0] == 0
    path = Path("words/tokenizer.json")
    content = json.loads(path.read_text())
    del content["model"]["vocab"]["Ā"]  # the byte 0
    path.write_text(json.dumps(content))
    _, _, err = run(capsys, "prepare", "text.txt", "corpus", "tokenizer=words")
    assert "no token for 1 of the 256 bytes" in err


@pytest.mark.parametrize(("words", "problem"), [
    (["prepare", "text.tx", "corpus"], "text.txt"),
    (["prepare", "text.txt", "corpus", "tokenizer=nowhere"], "nowhere"),
    (["prepare", "text.txt", "corpus", "tokeniser=byte"], "did you mean `tokenizer`?"),
    (["prepare", "text.txt", "corpus", "source=other.txt"], "other.txt"),
    (["prepare", "synthetic", "corpus"], "no documents"),
    (["prepare", "text.txt", "."], "other files"),
    (["tokenizer", "text.txt", "words", "vocab=100"], "258"),
    (["tokenizer", "text.txt", ".", "vocab=300"], "not empty"),
    (["inspect", "tinny"], "did you mean `tiny`?"),
    (["inspect", "tiny", "data.tokenizer=text.txt"], "text.txt"),
    (["inspect", "tiny", "--rows", "0"], "rows"),
])  # fmt: skip
def test_mistakes_cost_nothing(here, capsys, words, problem):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert problem in err
    assert len(err.splitlines()) <= 5
    assert sorted(path.name for path in here.iterdir()) == ["text.txt"]


def test_a_prepared_corpus_in_place_of_a_text_is_told_what_to_type(here, capsys):
    assert run(capsys, "prepare", "text.txt", "corpus")[0] == 0
    trains = "train on it: `argosy train tiny data.source=corpus`; the text it was made from is `text.txt`"
    for words, hint in [
        (["prepare", "corpus", "again"], trains),
        (["tokenizer", "corpus", "words"], trains),
        (["inspect", "corpus"], "argosy train tiny data.source=corpus"),
        (["inspect", "text.txt"], "argosy train tiny data.source=text.txt"),
        (["inspect", "tiny", "data.source=corpus/train"], "`data.source=corpus`"),
        (["inspect", "tiny", "data.source=text:corpus"], "`data.source=corpus`"),
    ]:
        code, _, err = run(capsys, *words)
        assert code == 2
        assert hint in err
        assert len(err.splitlines()) <= 5


def test_making_a_vocabulary_imports_no_jax(here):
    import subprocess
    import sys

    program = (
        "import sys; from argosy.cli import main; code = main(sys.argv[1:]); sys.exit('jax' in sys.modules or code)"
    )
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", program, "data", "tokenizer", "text.txt", "words", "vocab=270"]
    assert subprocess.run(words, env={"PYTHONPATH": str(root)}, capture_output=True).returncode == 0
