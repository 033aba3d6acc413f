"""Aligns two tokenizers on the same text: encodes rows of a student's tokens with the teacher's tokenizer, and finds the tokens of both
that stand for the same bytes.

A document is cut at the student's special tokens. The teacher's tokenizer encodes the text between them. Tokens of both are joined into
the smallest groups that end at the same byte in both. A special token is grouped with the teacher's special token of the same role
(beginning, end), or with the teacher's tokens for its name. Some tokenizers do not reproduce a text (unknown characters, joined
spaces). Then only the text before the first difference and after the last one is aligned.

These fields are added to those of language modeling. A row has room for U tokens of the teacher:

    teacher_tokens, teacher_segments   [B U]         the documents of the student's row in the teacher's tokens
    teacher_targets                    [B U]         the token after each of teacher_tokens
    group, teacher_group               [B T], [B U]  the number of the target's group within its row; 0: the target is in no group
    last                               [B T]         1 if the target is the last one of its group, else 0
    teacher_last                       [B T]         where `last` is 1, the index of the teacher's last target of the group
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from argosy.core.progress import Say
from argosy.core.sequences import common_length
from argosy.data.batch import Batch, Batches, BatchWrapper, Field, Fields

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer

FIELDS: Fields = {
    "teacher_tokens": Field("B U", np.int32),
    "teacher_targets": Field("B U", np.int32),
    "teacher_segments": Field("B U", np.int32),
    "group": Field("B T", np.int32),
    "teacher_group": Field("B U", np.int32),
    "last": Field("B T", np.int32),
    "teacher_last": Field("B T", np.int32),
}


class AlignedSpan(NamedTuple):
    """Half-open ranges of student and teacher tokens that stand for the same bytes."""

    student: tuple[int, int]
    teacher: tuple[int, int]


@dataclass
class Aligned:
    """A document of student tokens, aligned with the teacher's tokens.

    teacher: the ids of the teacher's tokens.
    groups: the aligned spans.
    unreadable: whether some of the student's tokens are not valid UTF-8 text.
    rewritten: whether the bytes of the teacher's tokens differ from the text of the student's.
    """

    teacher: list[int] = field(default_factory=list)
    groups: list[AlignedSpan] = field(default_factory=list)
    unreadable: bool = field(default=False, compare=False)
    rewritten: bool = field(default=False, compare=False)


class TeacherPrompt(NamedTuple):
    """A prompt in the teacher's tokens. The completion follows it directly.

    tokens: the ids.
    end: the teacher's token for the student's special token at the end of a completion; None: the teacher's token of the same role.
    """

    tokens: Sequence[int]
    end: int | None = None


def align(student: Sequence[int], teacher: Sequence[int]) -> list[AlignedSpan]:
    """Groups the tokens of two texts into the finest spans that end at the same byte in both.

    A token without bytes belongs to the next span to end, or to the last span if no span ends after it. Tokens beyond the shorter text
    belong to no span.

    Args:
        student: the number of bytes of each student token.
        teacher: the number of bytes of each teacher token.
    """
    ours, theirs = np.cumsum(student).tolist(), np.cumsum(teacher).tolist()
    groups, begin, i, j = [], (0, 0), 0, 0
    while i < len(ours) and j < len(theirs):
        if ours[i] < theirs[j]:
            i += 1
        elif ours[i] > theirs[j]:
            j += 1
        else:
            i, j = i + 1, j + 1
            groups.append(AlignedSpan((begin[0], i), (begin[1], j)))
            begin = (i, j)
    if groups and ours[-1] == theirs[-1] and begin != (len(ours), len(theirs)):
        (a, _), (b, _) = groups[-1]
        groups[-1] = AlignedSpan((a, len(ours)), (b, len(theirs)))
    return groups


class Across:
    """Aligns documents of a student's tokens with the tokens of a teacher's tokenizer."""

    def __init__(self, student: "Tokenizer", teacher: "Tokenizer"):
        self.student, self.teacher = student, teacher
        self.special: dict[int, list[int]] = {}

    def __call__(self, ids: Sequence[int]) -> Aligned:
        """Aligns a document of student tokens."""
        out = Aligned()
        if self.teacher.adds_bos and self.teacher.bos is not None and (not ids or ids[0] != self.student.bos):
            out.teacher.append(self.teacher.bos)
        self.follow(out, ids, 0)
        return out

    def answer(self, prompt: Sequence[int], answer: Sequence[int], teacher_prompt: TeacherPrompt | None = None) -> Aligned:
        """Aligns a completion. The spans cover only the completion. Their indices count from the beginning of the prompt.

        The prompt is encoded separately for the teacher, so no teacher token spans the boundary between prompt and completion.

        Args:
            prompt: the ids of the prompt in the student's tokens.
            answer: the ids of the completion in the student's tokens.
            teacher_prompt: the prompt in the teacher's tokens; None: the text of `prompt` is encoded.
        """
        out = Aligned(list(teacher_prompt.tokens if teacher_prompt is not None else self(prompt).teacher))
        self.follow(out, [*prompt, *answer], len(prompt), teacher_prompt.end if teacher_prompt is not None else None)
        return out

    def follow(self, out: Aligned, ids: Sequence[int], at: int, ends: int | None = None) -> None:
        """Aligns the student's tokens from index `at` on, and appends to `out`.

        Args:
            ends: the teacher's token for a special token at the end of `ids`; None: the teacher's token of the same role.
        """
        hidden, begin = self.student.hidden, at
        while at < len(ids):
            end = next((i for i in range(at, len(ids)) if ids[i] in hidden), len(ids))
            if end > at:
                self.stretch(out, ids, at, end, at == 0, at == begin > 0)
                at = end
                continue
            if teacher_ids := [ends] if ends is not None and at == len(ids) - 1 else self.role(ids[at]):
                out.groups.append(AlignedSpan((at, at + 1), (len(out.teacher), len(out.teacher) + len(teacher_ids))))
                out.teacher += teacher_ids
            at += 1

    def role(self, token: int) -> list[int]:
        """The teacher's tokens for a special token of the student; empty for a beginning that the teacher does not have."""
        if token not in self.special:
            ours, theirs = self.student, self.teacher
            roles = [(ours.eos, theirs.eos), (ours.bos, theirs.bos)]
            match = next((teacher_id for student_id, teacher_id in roles if student_id == token and teacher_id is not None), None)
            # A beginning-of-sequence token that the teacher lacks has no tokens. An end-of-sequence token becomes its name as text.
            text = "" if token == ours.bos else ours.piece(token, False).decode(errors="ignore")
            self.special[token] = [match] if match is not None else theirs.encode(text, special=True)
        return self.special[token]

    def stretch(self, out: Aligned, ids: Sequence[int], begin: int, end: int, first: bool, rest: bool = False) -> None:
        """Aligns the student's tokens from index `begin` to `end`, which are ordinary text, and appends to `out`.

        Args:
            first: whether the tokens begin a document.
            rest: whether the tokens continue the text before them.
        """
        pieces = [self.student.piece(ids[i], first and i == begin) for i in range(begin, end)]
        cut = whole_characters(pieces)
        a, b = cut or (0, len(pieces))
        text = b"".join(pieces[a:b]).decode(errors="replace")
        teacher_ids, at = self.teacher.encode_rest([text])[0] if rest else self.teacher.encode(text), len(out.teacher)
        out.teacher += teacher_ids
        # Some tokenizers put a space before a text, which is not in the text.
        ways = [
            [self.teacher.piece(token, alone and place == 0) for place, token in enumerate(teacher_ids)] for alone in (not rest, False)
        ]
        theirs = next((way for way in ways if b"".join(way) == text.encode()), ways[0])
        out.unreadable |= (a, b) != (0, len(pieces)) or cut is None
        out.rewritten |= b"".join(theirs) != text.encode()
        # After bytes that are not valid text, the teacher's tokens stand for other text.
        groups = same_bytes(pieces[a:b], theirs) if cut else beginning(pieces, theirs)
        for ours, others in groups:
            out.groups.append(AlignedSpan((begin + a + ours[0], begin + a + ours[1]), (at + others[0], at + others[1])))


def beginning(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[AlignedSpan]:
    """Aligns the common beginning of two sequences of tokens, given as the bytes of each token."""
    most = common_length(b"".join(student), b"".join(teacher))
    return align(_sizes_within(student, most), _sizes_within(teacher, most))


def same_bytes(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[AlignedSpan]:
    """Aligns two sequences of tokens, given as the bytes of each token. If their texts differ, for instance by joined spaces, only the
    common beginning and end are aligned.
    """
    ours, theirs = b"".join(student), b"".join(teacher)
    if ours == theirs:
        return align([len(piece) for piece in student], [len(piece) for piece in teacher])
    begin = common_length(ours, theirs)
    end = min(common_length(ours[::-1], theirs[::-1]), min(len(ours), len(theirs)) - begin)
    sides = [(student, teacher, begin), ([p[::-1] for p in reversed(student)], [p[::-1] for p in reversed(teacher)], end)]
    before, after = (align(*(_sizes_within(pieces, most) for pieces in (a, b))) for a, b, most in sides)
    n, m = len(student), len(teacher)
    return [*before, *(AlignedSpan((n - b, n - a), (m - d, m - c)) for (a, b), (c, d) in reversed(after))]


def _sizes_within(pieces: Sequence[bytes], most: int) -> list[int]:
    """The sizes of the first pieces, as many as fit in `most` bytes."""
    sizes = [len(piece) for piece in pieces]
    return sizes[: int(np.searchsorted(np.cumsum(sizes), most, side="right"))]


def whole_characters(pieces: Sequence[bytes]) -> tuple[int, int] | None:
    """The longest range of tokens that is valid UTF-8, found by dropping tokens at both ends, since rows may begin and end inside a
    character. None: there are other invalid bytes.
    """
    most = min(4, len(pieces))
    for dropped in range(2 * most):
        for a in range(max(0, dropped - most), min(dropped, most) + 1):
            b = len(pieces) - (dropped - a)
            try:
                b"".join(pieces[a:b]).decode()
            except UnicodeDecodeError:
                continue
            return (a, b) if a < b else None
    return None


class BothTokenizers(BatchWrapper):
    """Adds the teacher's tokens of the same text to batches.

    Args:
        inner: the batches of the student's tokens.
        across: aligns documents.
        places: U, the number of teacher tokens in a row. Further tokens are not aligned, which is reported once.
        say: called with that report.
    """

    def __init__(self, inner: Batches, across: Across, places: int, say: Say = lambda _: None):
        super().__init__(inner)
        self.across, self.places, self.say, self.complained = across, places, say, False
        self.sizes = {**inner.sizes, "U": places}

    def __next__(self) -> Batch:
        return self.aligned_batch(dict(next(self.inner)))

    def aligned_batch(self, batch: Batch) -> Batch:
        """Adds the fields of this module to a batch of language modeling."""
        return aligned_fields(batch, self.places, lambda row, places: self.across(_document(batch, row, places)), self.complain)

    def complain(self, tokens: int) -> None:
        if not self.complained:
            self.complained = True
            self.say(full(self.places, tokens))


def full(places: int, tokens: int) -> str:
    """The warning that a row has more teacher tokens than fit.

    Args:
        places: U, the number of teacher tokens in a row.
        tokens: the number of teacher tokens in the document that is cut.
    """
    return (
        f"the teacher's tokens of some rows are more than {places:,} (one document has {tokens:,}): beyond them the "
        "student does not learn from it, which `aligned` shows; objective.teacher_sequence=N has room for more"
    )


def _document(batch: Batch, row: int, places: np.ndarray) -> list[int]:
    """The tokens of a document at these positions of a row, and the target of the last one if the loss counts it."""
    ids = batch["tokens"][row, places].tolist()
    return [*ids, int(batch["targets"][row, places[-1]])] if batch["mask"][row, places[-1]] > 0 else ids


def aligned_fields(
    batch: Batch, places: int, aligned: Callable[[int, np.ndarray], Aligned], cut: Callable[[int], None]
) -> Batch:
    """Adds the fields of this module to a batch of language modeling.

    Args:
        places: U, the number of teacher tokens in a row.
        aligned: (row, the positions of a document in the row) -> the aligned document.
        cut: called for each document that does not fit in its row, with its number of teacher tokens.
    """
    rows, length = batch["tokens"].shape
    sizes = {"B": rows, "T": length, "U": places}
    fields = {name: np.zeros([sizes[a] for a in of.axes.split()], of.dtype) for name, of in FIELDS.items()}
    for row, segments in enumerate(batch["segments"]):
        at = number = 0
        for segment in range(1, int(segments.max(initial=0)) + 1):
            positions = np.flatnonzero(segments == segment)
            if not len(positions):
                continue
            alignment = aligned(row, positions)
            theirs = alignment.teacher[: places - at]
            if len(theirs) < len(alignment.teacher):
                cut(len(alignment.teacher))
            end = at + len(theirs)
            fields["teacher_tokens"][row, at:end] = theirs
            fields["teacher_targets"][row, at : max(end - 1, at)] = theirs[1:]
            fields["teacher_segments"][row, at:end] = segment
            for (a, b), (c, d) in alignment.groups:
                # The first token of a document has nothing before it that predicts it.
                if a < 1 or c < 1 or d > len(theirs):
                    continue
                ours = positions[0] + np.arange(a - 1, b - 1)
                if not (batch["mask"][row, ours] > 0).all():
                    continue
                number += 1
                fields["group"][row, ours] = number
                fields["teacher_group"][row, at + c - 1 : at + d - 1] = number
                fields["last"][row, ours[-1]], fields["teacher_last"][row, ours[-1]] = 1, at + d - 2
            at = end
    return batch | fields
