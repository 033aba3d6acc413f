"""Answers by a teacher's tokenizer: groups by another rule, the teacher's own template, and every way that a text does not survive."""

from typing import Any

import numpy as np
import pytest
from helpers import shared

from argosy.core.errors import BadInput
from argosy.data.distillation.across import Across
from argosy.data.rows.prompts import Prompt
from argosy.data.tokenizers.load import load_tokenizer
from argosy.rl.rollouts.completions import Trajectory
from argosy.rl.rollouts.packing import PartShape, pack_trajectories
from argosy.rl.rollouts.signals.teacher import with_mask
from argosy.rl.rollouts.signals.teacher_tokens import TeacherPrompts, TeacherTokens

NAMES = ["byte", "tokenizers/smollm2", "models/stories260k", "tokenizers/mistral_v1.model"]
ASKED, SAID = "There was a girl 12. Zoë's", " café sold crêpes, 日本語 and\n\ttea.\nShe was happy."
CHATS = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{{ bos_token }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def tokenizer(name: str) -> Any:
    return load_tokenizer("byte" if name == "byte" else shared(name))


def answer(
    of: Any, question: Any, ids_out: list[int], ended: bool, prompt: list[int] | None = None, where: str = "line 1"
) -> Trajectory:
    ids = prompt if prompt is not None else of.encode(question)
    tokens = [*ids_out, of.eos] if ended else ids_out
    return Trajectory(Prompt(question, ids, {}, where), tokens, [True] * len(tokens), [0.0] * len(tokens), ended, "")


@pytest.mark.parametrize("ours", NAMES)
@pytest.mark.parametrize("theirs", NAMES)
def test_groups_are_what_lies_between_the_ends_that_both_have(ours: str, theirs: str):
    """By sets of ends, where the code walks along both."""
    student, teacher = tokenizer(ours), tokenizer(theirs)
    sampled = answer(student, ASKED, student.encode_rest([SAID])[0], True)
    aligned = Across(student, teacher).answer(sampled.prompt.tokens, sampled.tokens)
    prompt_tokens = Across(student, teacher)(sampled.prompt.tokens).teacher
    assert aligned.teacher[: len(prompt_tokens)] == prompt_tokens, "the prompt as it would be fed"
    begin, there = len(sampled.prompt.tokens), aligned.teacher[len(prompt_tokens) : -1]
    assert aligned.teacher[-1] == teacher.eos
    assert aligned.groups[-1] == (
        (begin + len(sampled.tokens) - 1, begin + len(sampled.tokens)),
        (len(aligned.teacher) - 1, len(aligned.teacher)),
    )

    def ends(of: Any, ids: list[int]) -> list[int]:
        return np.cumsum([len(of.piece(token, False)) for token in ids]).tolist()

    first, second = ends(student, sampled.tokens[:-1]), ends(teacher, there)
    common = sorted(set(first) & set(second))
    assert common[-1] == len(SAID.encode()), "all of the answer"
    expected = []
    for low, high in zip([0, *common], common):
        a, c = ([i for i, end in enumerate(of) if low < end <= high] for of in (first, second))
        expected.append(((begin + a[0], begin + a[-1] + 1), (len(prompt_tokens) + c[0], len(prompt_tokens) + c[-1] + 1)))
    assert aligned.groups[:-1] == expected
    assert not aligned.unreadable
    assert not aligned.rewritten


def chat_tokenizer() -> Any:
    teacher = tokenizer("models/stories260k")
    teacher.chat_templates, teacher.special = {"default": CHATS}, {"eos_token": "</s>", "bos_token": "<s>"}
    return teacher


def test_a_conversation_is_asked_by_the_teachers_own_template():
    """Its end of a turn stands for the student's, whatever that is."""
    student, teacher = tokenizer("byte"), chat_tokenizer()
    asking = TeacherPrompts(teacher)
    assert asking.end == teacher.bos, "as this template has it"
    messages = [{"role": "user", "content": "a cat"}]
    trajectory = answer(student, messages, list(b" sat"), True, prompt=list(b"[user] a cat [bot]"))
    reread = TeacherTokens(Across(student, teacher), 64, asking)
    (aligned,) = reread([trajectory])
    prompt_tokens = teacher.encode("<u>a cat<s><a>", special=True)
    assert aligned.teacher[: len(prompt_tokens)] == prompt_tokens
    assert b"".join(teacher.piece(token, False) for token in aligned.teacher[len(prompt_tokens) :]) == b" sat<s>"
    assert aligned.groups[0].student[0] == len(trajectory.prompt.tokens)
    assert aligned.groups[-1] == ((22, 23), (len(aligned.teacher) - 1, len(aligned.teacher)))
    # Without it the teacher reads the student's markup.
    (plain,) = TeacherTokens(Across(student, teacher), 64, None)([trajectory])
    assert teacher.decode(plain.teacher) == "[user] a cat [bot] sat"
    teacher.chat_templates = {"default": "{{ raise_exception('no users here') }}"}
    with pytest.raises(BadInput, match="no users here"):
        TeacherPrompts(teacher)


def test_what_does_not_survive_is_counted_and_said():
    student, teacher = tokenizer("byte"), tokenizer("models/stories260k")
    reread, messages = TeacherTokens(Across(student, teacher), 24, None), []
    answers = [
        answer(student, "ask", list(b" she ran"), True),
        answer(student, "ask", [*b" she ran \xff and ran"], True, where="line 2"),
        answer(student, "ask", [*b" she", student.bos, *b" ran"], True, where="line 3"),
        answer(student, "ask", [255, 254, 253, 252, 251], False, where="line 4"),
        answer(student, "ask", list(b" she  ran"), True, where="line 5"),
        answer(student, "ask", list(b" one two three four five six seven"), True, where="line 6"),
    ]
    aligned = reread(answers)
    numbers = reread.numbers(answers, aligned, lambda text, kind: messages.append((kind, text)))
    shares = {name.partition("/")[2]: round(6 * share) for name, share in numbers.items()}
    assert shares == {"unreadable": 2, "rewritten": 1, "special": 1, "unaligned": 1, "crowded": int(len(aligned[5].teacher) > 24)}
    assert [kind for kind, _ in messages] == ["unreadable", "rewritten", "special", "unaligned"]
    assert messages[0][1].startswith("line 2: ")
    assert messages[-1][1].startswith("line 4: ")
    # Behind what is no text only the end is compared: the teacher reads U+FFFD there.
    covered = {i - 3 for (a, b), _ in aligned[1].groups for i in range(a, b)}
    assert set(range(8)) <= covered
    assert not covered & set(range(9, 17))


def test_rows_have_room_for_the_teachers_tokens_of_all_their_answers():
    """The student has one token where the teacher has one for each byte."""
    student, teacher = tokenizer("models/stories260k"), tokenizer("byte")
    texts = [f"once upon a time there was a girl {i}" for i in range(6)]
    answers = [answer(student, text, student.encode(" and a boy"), True) for text in texts]
    shape, messages = PartShape(2, 64, 16, teacher_sequence=96), []
    reread = TeacherTokens(Across(student, teacher), shape.teacher_sequence, None)
    aligned = reread(answers)
    room = reread.room(answers, aligned, shape.sequence)
    parts = pack_trajectories(answers, range(6), shape, room)
    assert len(parts) > len(pack_trajectories(answers, range(6), shape)), "fewer answers a row"
    seen = []
    for part in parts:
        batch = reread.aligned_batch(with_mask(part, answers), part, aligned, messages.append)
        assert ((batch["group"] > 0) == (batch["mask"] > 0)).all(), "everything is aligned"
        for row in batch["teacher_tokens"]:
            seen += [text for text in bytes(token if token < 256 else 10 for token in row[row > 0]).decode().split("\n") if text]
        for name in ("teacher_tokens", "teacher_segments"):
            assert batch[name].shape == (2, 96)
        at, last = batch["teacher_last"], batch["last"] > 0
        rows = np.nonzero(last)[0]
        for row, t, u in zip(rows, np.nonzero(last)[1], at[last]):
            assert batch["group"][row, t] == batch["teacher_group"][row, u] > 0
            ours, theirs = int(batch["targets"][row, t]), int(batch["teacher_targets"][row, u])
            ends = (ours, theirs) == (student.eos, teacher.eos)
            assert ends or student.piece(ours, False).endswith(teacher.piece(theirs, False))
    assert sorted(seen) == [f"{text} and a boy" for text in texts]
    assert not messages
    crowded = TeacherTokens(Across(student, teacher), 20, None)
    (part, *_) = pack_trajectories(answers, range(6), shape, crowded.room(answers, aligned, shape.sequence))
    cut = crowded.aligned_batch(with_mask(part, answers), part, aligned, messages.append)
    assert not (cut["group"] > 0).any()
    assert "are more than 20" in messages[0]
