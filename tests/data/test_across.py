"""One text by two tokenizers: groups by hand, the bytes of every group equal, special tokens, rows that begin inside of a character."""

import numpy as np
import pytest
from helpers import shared

from argosy.data.distillation.across import Across, Aligned, AlignedSpan, BothTokenizers, align, whole_characters
from argosy.data.tokenizers.load import load_tokenizer

TEXT = "Once upon a time, Zoë's café sold 12,345 crêpes… 日本語 and\n\n  tabs\tx."
NAMES = ["byte", "tokenizers/smollm2", "models/stories260k", "tokenizers/mistral_v1.model"]


def tokenizer(name):
    return load_tokenizer("byte" if name == "byte" else shared(name))


def test_groups_by_hand():
    assert align([2, 3, 1], [2, 1, 2, 1]) == [((0, 1), (0, 1)), ((1, 2), (1, 3)), ((2, 3), (3, 4))]
    assert align([1, 1, 2], [4]) == [((0, 3), (0, 1))]
    # Pieces without bytes belong to what follows, at the end to what is before them.
    assert align([0, 2, 0], [2]) == [((0, 3), (0, 1))]
    assert align([2, 0, 1], [2, 1]) == [((0, 1), (0, 1)), ((1, 3), (1, 2))]
    assert align([], []) == []


@pytest.mark.parametrize("ours", NAMES)
@pytest.mark.parametrize("theirs", NAMES)
def test_every_group_is_the_same_bytes_and_no_group_could_be_cut(ours: str, theirs: str):
    student, teacher = tokenizer(ours), tokenizer(theirs)
    ids = student.encode(TEXT)
    aligned = Across(student, teacher)(ids)

    def pieces(of, ids):
        return [of.piece(token, place == 0) for place, token in enumerate(ids)]

    skip = int(teacher.adds_bos)
    first, second = pieces(student, ids), [b""] * skip + pieces(teacher, aligned.teacher[skip:])
    assert aligned.groups
    for (i, j), (k, m) in aligned.groups:
        assert b"".join(first[i:j]) == b"".join(second[k:m])
        ends = [set(np.cumsum([len(piece) for piece in some])[:-1].tolist()) for some in (first[i:j], second[k:m])]
        assert not ends[0] & ends[1], "a finer group"
    if theirs != "models/stories260k":
        assert sum(j - i for (i, j), _ in aligned.groups) == len(ids)
    if ours == theirs:
        assert all(j - i == m - k == 1 for (i, j), (k, m) in aligned.groups)


def test_special_tokens_are_groups_of_their_roles():
    student, teacher = tokenizer("byte"), tokenizer("models/stories260k")
    aligned = Across(student, teacher)([student.bos, *b"Once", student.eos])
    assert aligned.teacher[0] == teacher.bos
    assert aligned.teacher[-1] == teacher.eos
    assert aligned.teacher.count(teacher.bos) == 1
    assert aligned.groups[0] == AlignedSpan((0, 1), (0, 1))
    assert aligned.groups[-1] == AlignedSpan((5, 6), (len(aligned.teacher) - 1, len(aligned.teacher)))
    # Of a document without that token the teacher still reads its own.
    assert Across(student, teacher)([*b"Once"]).teacher[0] == teacher.bos
    # A name that the teacher has not as a token is text to it.
    chat = tokenizer("tokenizers/smollm2")
    token = chat.encode("<repo_name>", special=True)
    assert len(token) == 1
    back = Across(chat, student)([*token, *chat.encode("x")])
    assert bytes(back.teacher) == b"<repo_name>x"
    assert back.groups == [((0, 1), (0, 11)), ((1, 2), (11, 12))]


def test_a_row_may_begin_and_end_inside_of_a_character():
    pieces = [bytes([b]) for b in "ë日x語".encode()]
    assert whole_characters(pieces) == (0, len(pieces))
    assert whole_characters(pieces[1:]) == (1, len(pieces) - 1)
    assert whole_characters(pieces[3:-1]) == (2, 3)
    assert whole_characters([b"\xff"]) is None
    student, teacher = tokenizer("byte"), tokenizer("tokenizers/smollm2")
    aligned = Across(student, teacher)(list("é日 hello".encode()[1:]))
    assert teacher.decode(aligned.teacher) == "日 hello"
    assert aligned.groups[0].student[0] == 1
    assert Across(student, teacher)([255, 254, 253, 252, 251, 250, 249, 248, 247, 65]).groups == []


def test_rows_have_the_groups_of_all_documents_and_what_is_too_long_is_told():
    student, teacher = tokenizer("byte"), tokenizer("byte")
    messages: list[str] = []

    class Inner:
        fingerprint, tokens_per_batch, bytes_per_token, sizes, buckets = {}, 0, None, {}, ()

    both = BothTokenizers(Inner(), Across(student, teacher), 9, messages.append)  # type: ignore[arg-type]
    ids = np.array([[*b"abcd", *b"xyz", 0]], np.int32)
    batch = {
        "tokens": ids,
        "targets": np.roll(ids, -1, 1),
        "segments": np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32),
        "mask": np.array([[0, 1, 1, 0, 1, 1, 0, 0]], np.float32),
    }
    columns = both.aligned_batch(batch)
    assert columns["teacher_tokens"][0].tolist() == [*b"abcd", *b"xyz", 0, 0]
    assert columns["teacher_segments"][0].tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0]
    assert columns["group"][0].tolist() == [0, 1, 2, 0, 3, 4, 0, 0]
    assert columns["teacher_group"][0].tolist() == [0, 1, 2, 0, 3, 4, 0, 0, 0]
    assert columns["last"][0].tolist() == [0, 1, 1, 0, 1, 1, 0, 0]
    assert columns["teacher_last"][0].tolist() == [0, 1, 2, 0, 4, 5, 0, 0]
    assert not messages
    short = BothTokenizers(Inner(), Across(student, teacher), 6, messages.append)  # type: ignore[arg-type]
    cut = short.aligned_batch(batch)
    assert cut["group"][0].tolist() == [0, 1, 2, 0, 3, 0, 0, 0]
    assert "more than 6 (one document has 3)" in messages[0]


def test_text_that_a_teacher_cannot_write_is_not_aligned():
    class Lossy:
        hidden, adds_bos, bos, eos = frozenset[int](), False, None, None

        def encode(self, text, special=False):
            return list(text.upper().encode())

        def piece(self, token, first):
            return bytes([token])

    across = Across(tokenizer("byte"), Lossy())  # type: ignore[arg-type]
    assert across(list(b"ab")) == Aligned(list(b"AB"), [])
    # Only what is before the first difference and after the last one.
    assert across(list(b"1a2a3")).groups == [((0, 1), (0, 1)), ((4, 5), (4, 5))]


def test_a_teacher_that_joins_spaces_is_aligned_around_them():
    student, teacher = tokenizer("byte"), tokenizer("models/stories260k")
    aligned = Across(student, teacher)(list(b"one day  she saw"))
    covered = {i for (a, b), _ in aligned.groups for i in range(a, b)}
    assert {0, 1, 2, 3, 4, 5, 6} <= covered
    assert {12, 13, 14, 15} <= covered
    assert 8 not in covered
