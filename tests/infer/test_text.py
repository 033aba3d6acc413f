"""Tokens to text: whole characters, stop strings over the edges of tokens, and what follows the prompt."""

import random

import pytest

from argosy.core.errors import BadInput
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.infer.detokenize import Detokenizer

BYTES = ByteTokenizer()


def pieces(text: Detokenizer, words: str) -> list[str]:
    return [text.push(token) for token in BYTES.encode(words)]


def test_a_character_is_told_when_its_last_byte_is_there():
    text = Detokenizer(BYTES, [])
    assert pieces(text, "aé漢") == ["a", "", "é", "", "", "漢"]


def test_half_a_character_at_the_end_is_the_replacement_character():
    text = Detokenizer(BYTES, [])
    assert pieces(text, "é")[:1] == [""]
    text = Detokenizer(BYTES, [])
    text.push(BYTES.encode("é")[0])
    assert text.end() == "\ufffd"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_wherever_its_tokens_begin(include: bool):
    text = Detokenizer(BYTES, [], ["END", "NEVER"], include_stop=include)
    parts = pieces(text, "the ENEND of it")
    assert "".join(parts) == "the EN" + "END" * include
    assert text.stopped == "END"
    assert text.end() == ""


def test_the_stop_string_that_begins_first_counts():
    text = Detokenizer(BYTES, [], ["bc", "abc"])
    assert "".join(pieces(text, "xabcd")) == "x"
    assert text.stopped == "abc"


def test_the_beginning_of_a_stop_string_is_told_at_the_end():
    text = Detokenizer(BYTES, [], ["END"])
    assert pieces(text, "an EN")[-2:] == ["", ""]
    assert text.end() == "EN"
    assert text.stopped is None


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_text_cut_at_its_first_stop_string(seed: int):
    chance = random.Random(seed)
    words = "".join(chance.choices("abé", k=40))
    stop = ["".join(chance.choices("abé", k=chance.randint(1, 5))) for _ in range(3)]
    text = Detokenizer(BYTES, [], stop)
    parts = []
    for token in BYTES.encode(words):
        parts.append(text.push(token))
        if text.stopped:
            break
    parts.append(text.end())
    ends = [words.find(s) + len(s) for s in stop if s in words]
    shortest = words[: min(ends)] if ends else words
    cut = min((shortest.find(s) for s in stop if s in shortest), default=len(words))
    assert "".join(parts) == words[:cut]


def test_what_cannot_work_is_refused():
    with pytest.raises(BadInput, match="empty stop string"):
        Detokenizer(BYTES, [], [""])
    with pytest.raises(BadInput, match="need a tokenizer"):
        Detokenizer(None, [], ["x"])
    assert Detokenizer(None, []).push(3) == ""
