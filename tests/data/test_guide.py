"""The commands and formats of the guide do what it says."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import shared
from test_encoder import CHAT

from argosy.core.settings import read_settings, words_layer
from argosy.data.chat.mask import encode_with_mask
from argosy.data.pack import Encoded, corpus_of
from argosy.data.pipeline import build, tokenizer_for
from argosy.data.settings import DataSettings
from argosy.data.sources.jsonl import JsonLines
from argosy.data.sources.records import ASKED_FOR, FORMATS


def first(tmp_path, *words: str) -> dict[str, np.ndarray]:
    data_words = [*words, f"cache={tmp_path / 'cache'}", "sequence=16", "batch=2", "shuffle=false"]
    settings = read_settings(DataSettings, words_layer(data_words)).value
    tokenizer = tokenizer_for(settings)
    assert tokenizer is not None
    return next(build(settings, tokenizer, vocab=tokenizer.vocab, seed=0))


@pytest.mark.parametrize(("name", "content", "words"), [
    ("my.txt", "A text.\n\nOf two paragraphs.", ["documents=paragraphs"]),
    ("corpus.jsonl", '{"text": "A text."}\n{"text": "Of two\\nlines.", "other": 1}\n', []),
])  # fmt: skip
def test_files(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    batch = first(tmp_path, f"source={tmp_path / name}", *words, "held_out=0")
    assert bytes(batch["tokens"][0, :7].astype(np.uint8)) == b"A text."
    assert batch["segments"][0, 8] == 2


def test_folders_and_globs(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.md").write_text("first text here, long enough")
    (folder / "b.bin").write_text("no text")
    for spec in (folder, f"{folder}/*.md"):
        assert (
            bytes(first(tmp_path, f"source={spec}", "held_out=0")["tokens"][0].astype(np.uint8)) == b"first text here,"
        )


def test_rendered_chats(tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"text": CHAT * 9}) + "\n")
    words = [f"source={tmp_path / 'chats.jsonl'}", f"tokenizer={shared('tokenizers/smollm2')}", "held_out=0"]
    assert first(tmp_path, *words, "special=true")["tokens"][0, 0] == 1
    assert first(tmp_path, *words)["tokens"][0, 0] != 1


def test_only_the_assistant_is_learned():
    from test_tokenize import tokenizer_of

    tokenizer = tokenizer_of("smollm2")
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    ids, mask = encode_with_mask(tokenizer, messages)
    corpus = corpus_of([Encoded(np.array(ids, np.uint32), np.array(mask, np.uint8))])
    settings = DataSettings(sequence=64, batch=1, packing="fit")
    batch = next(build(settings, None, vocab=tokenizer.vocab, seed=0, source=corpus))
    assert tokenizer.decode(batch["targets"][batch["mask"] > 0].tolist()) == "4"


PAGES = ("fine-tuning-data", "preferences", "reinforcement", "classification", "embeddings")


def test_every_record_of_the_fine_tuning_page_is_read(tmp_path):
    """The examples of the formats, one file each, with the columns in the tables of the pages."""
    guides = Path(__file__).parents[2] / "docs" / "guides"
    page = "\n".join((guides / f"{name}.md").read_text() for name in PAGES)
    lines = [line.strip() for line in page.splitlines() if line.startswith('    {"') and line.endswith("}")]
    assert len(lines) == 18
    formats = []
    for number, line in enumerate(lines):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(line + "\n")
        # Some formats are never detected.
        columns = set(json.loads(line)) - {"answer"}
        never = [name for name in ASKED_FOR if set(FORMATS[name][0]) <= columns <= {*FORMATS[name][0], *FORMATS[name][1]}]
        # The columns of `rerank` are those of `triplet`, which is detected.
        for format in (never or ["auto"]) if never != ["rerank"] else ["rerank", "auto"]:
            source = JsonLines(path, format=format)
            assert len(list(source.documents())) == 1
            formats.append(source.format)
    assert {*formats, "text"} == set(FORMATS)
    for name, (needs, may) in FORMATS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert all(f"`{column}`" in row for column in {*needs, *may} - {"chat_template_kwargs"})
