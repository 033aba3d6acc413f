"""The commands of the guide about data, with files of the kinds that it names, and the first batch that each trains on."""

import re
import shlex
from pathlib import Path

import data_files
import pytest

from argosy.core.settings import read_settings, words_layer
from argosy.data.pipeline import build, find, tokenizer_for
from argosy.data.settings import DataSettings

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "data.md").read_text()
COMMAND = re.compile(r"^    \./run (?:train \w+|data inspect tiny) (.*data\.source=.*)$", re.M)
# What is not on this machine, and a prepared folder, whose test is that of `data prepare`.
ELSEWHERE = ("hf:", "https://", "data.source=corpus ")
TEXTS = [{"text": f"document {number} of the corpus"} for number in range(40)]
FILES = {
    "corpus.parquet": lambda: data_files.parquet(TEXTS),
    "corpus.jsonl": lambda: data_files.jsonl(TEXTS),
    "a.jsonl": lambda: data_files.jsonl(TEXTS),
    "b.parquet": lambda: data_files.parquet(TEXTS),
    "texts/2024-1.parquet": lambda: data_files.parquet(TEXTS),
    "table.csv": lambda: data_files.csv_file([{"body": row["text"]} for row in TEXTS]),
    "qa.parquet": lambda: data_files.parquet([{"q": f"{number}?", "a": str(number)} for number in range(40)]),
    "my.txt": lambda: b"A text.\n\nOf two paragraphs. " * 99,
    "mine.py": lambda: re.search(r"```python\n(def asked.*?)```", PAGE, re.S)[1].encode(),  # type: ignore[index]
}
COMMANDS = [words for words in COMMAND.findall(PAGE) if not any(place in f"{words} " for place in ELSEWHERE)]


def test_the_guide_has_commands():
    assert len(COMMANDS) >= 9


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_the_guide_gives_batches(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name, make in FILES.items():
        (tmp_path / name).write_bytes(make())
    data_words = [word.removeprefix("data.") for word in shlex.split(words.partition("#")[0]) if word.startswith("data.")]
    if any("chats" in word or word.startswith("tokenizer=") for word in data_words):
        pytest.skip("needs a tokenizer of its own; tests/data/test_guide.py has it")
    settings = read_settings(DataSettings, words_layer([*data_words, f"cache={tmp_path / 'cache'}", "sequence=32", "batch=2"])).value
    tokenizer = tokenizer_for(settings)
    assert tokenizer is not None
    batch = next(build(settings, tokenizer, vocab=258, seed=0, source=find(settings)))
    assert batch["mask"].sum() > 0
