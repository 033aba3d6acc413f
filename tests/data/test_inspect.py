"""Rendered batches: what counts, where documents meet, and nothing that could harm a terminal."""

import re

import numpy as np
import pytest
from test_prepare import Bytes

from argosy.data.inspect import render
from argosy.data.pack import Encoded, FitRows, SplitRows, corpus_of


def batch_of(texts: list[str], kind=SplitRows, sequence: int = 12, learn: list[list[int]] | None = None):
    weights = learn or [[1] * (len(text.encode()) + 1) for text in texts]
    pieces = [
        Encoded(np.array([*text.encode(), 257], np.uint16), np.array(weight, np.uint8))
        for text, weight in zip(texts, weights)
    ]
    rows = kind(corpus_of(pieces), sequence)
    return rows.gather(np.arange(len(rows)))


def test_two_documents_in_a_row_of_the_stream():
    assert render(batch_of(["hé", "worlds"]), Bytes()) == (
        "row 0: 11 tokens, 9 learned, 1 padding\n"
        "-- segment 1: 4 tokens --\n"
        "⟦h⟧é<eos>\n"
        "-- segment 2: 7 tokens --\n"
        "⟦w⟧orlds<eos>\n"
    )


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("kind", [SplitRows, FitRows])
def test_every_learned_token_is_shown_as_such(kind, color):
    texts = ["askanswer", "x", "nothing"]
    learn = [[0] * 3 + [1] * 7, [1, 1], [0] * 8]
    rendered = render(batch_of(texts, kind, 32, learn), Bytes(), color)
    if color:
        learned = re.findall("\x1b\\[32m(.*?)\x1b\\[0m", rendered)
        dim = re.findall("\x1b\\[2m(.*?)\x1b\\[0m", rendered)
    else:
        learned = [re.sub("⟦.*?⟧", "", line) for line in rendered.splitlines() if line[:3] not in ("row", "-- ")]
        dim = re.findall("⟦(.*?)⟧", rendered)
    assert [text for text in learned if text] == ["answer<eos>", "<eos>"]
    assert [text.removesuffix("<eos>") for text in dim if text] == ["ask", "x", "nothing"]


def test_no_control_character_reaches_the_terminal():
    text = render(batch_of(["a\x1b]0;x\x07\x9b2J\r\tb\n"], sequence=40), Bytes())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert r"\x1b]0;x\x07\x9b2J\x0d" in text


def test_some_rows_and_no_tokenizer():
    batch = batch_of(["a" * 100])
    assert render(batch, Bytes(), rows=2).count("row ") == 2
    assert render(batch, Bytes()).count("row ") == len(batch["tokens"])
    assert "⟦97 ⟧97 97" in render(batch, None, rows=1)
