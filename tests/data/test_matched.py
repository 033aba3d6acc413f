"""Tokens of two vocabularies that stand for the same bytes."""

import numpy as np
import pytest
from helpers import shared

from argosy.data.tokenizers.load import load_tokenizer
from argosy.data.tokenizers.matched import match_tokens

NAMES = ["byte", "tokenizers/smollm2", "models/stories260k", "tokenizers/mistral_v1.model"]


def tokenizer(name):
    return load_tokenizer("byte" if name == "byte" else shared(name))


@pytest.mark.parametrize("ours", NAMES)
@pytest.mark.parametrize("theirs", NAMES)
def test_pairs_are_the_same_bytes_and_none_is_missing(ours: str, theirs: str):
    student, teacher = tokenizer(ours), tokenizer(theirs)
    matches = match_tokens(student, teacher)
    ids, others = matches.ids
    assert len(ids) == len(others) == len(matches) == len(set(ids.tolist())) == len(set(others.tolist()))
    pairs = set(zip(ids.tolist(), others.tolist()))
    assert (student.eos, teacher.eos) in pairs
    pieces = [
        {of.piece(token, False) for token in range(of.vocab) if token not in of.hidden and token != of.unknown} - {b""}
        for of in (student, teacher)
    ]
    for a, b in pairs - {(student.eos, teacher.eos)}:
        assert student.piece(a, False) == teacher.piece(b, False) != b""
    assert len(matches) == len(pieces[0] & pieces[1]) + 1
    if ours == theirs:
        assert all(a == b for a, b in pairs)


def test_spaces_match_however_they_are_written():
    """SentencePiece writes them as U+2581, byte-level BPE as U+0120, so their names differ."""
    student, teacher = tokenizer("tokenizers/smollm2"), tokenizer("tokenizers/mistral_v1.model")
    (ours,), (theirs,) = student.encode_rest([" the"])[0], teacher.encode_rest([" the"])[0]
    assert (ours, theirs) in set(zip(*(ids.tolist() for ids in match_tokens(student, teacher).ids)))


def test_of_a_character_and_its_byte_the_one_that_is_written_matches():
    student, teacher = tokenizer("byte"), tokenizer("models/stories260k")
    ids, others = match_tokens(student, teacher).ids
    of = dict(zip(ids.tolist(), others.tolist()))
    (written_id,) = teacher.encode_rest(["e"])[0]
    assert of[ord("e")] == written_id
    twice = [token for token in range(teacher.vocab) if teacher.piece(token, False) == b"e"]
    assert len(twice) > 1, "a test that cannot fail"
    assert not np.isin([token for token in twice if token != written_id], others).any()
