"""Lessons over a small model: whose answers a batch has, what of a record is learned, positions, and settings that fit nothing."""

from typing import Any

import numpy as np
import pytest
from laws.families import CASES, noisy_model

from argosy.core.errors import ArgosyError, BadInput
from argosy.data.chat.conversations import ConversationEncoder
from argosy.data.encoding import Encoding
from argosy.data.order import Order
from argosy.data.rows.answered import Answered, AnsweredPrompts
from argosy.data.rows.prompts import Prompts
from argosy.data.sources import SourceRecord
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.lm import LM
from argosy.models.parts.stack import Unroll
from argosy.rl.rollouts.batches import RolloutBatches
from argosy.rl.rollouts.packing import PartShape
from argosy.rl.rollouts.records import StudentTrainer
from argosy.rl.rollouts.settings import Rollout
from argosy.rl.rollouts.signals.teacher import teacher_batches
from argosy.train.objectives.distillation.gkd import GKD

CASE = CASES["llama-plain"].model_copy(update={"vocab": 258, "context": 64})
TOKENS, EOS = 5, 257
ANSWERS = ["one", "", "longer than five", "x" * 5]
TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM(CASE, noisy_model(CASE, Unroll()), load_tokenizer("byte"))


def prompts(lm: LM, records: list[SourceRecord] | None = None, most: int | None = None, alone: bool = False) -> AnsweredPrompts:
    texts = [SourceRecord(where=f"line {i}", prompt=f"ask {i}", completion=ANSWERS[i % len(ANSWERS)]) for i in range(8)]
    of = Prompts(records or texts, Encoding(lm.tokenizer), Order(len(records or texts), None), {"source": "test"}, most=most)
    return AnsweredPrompts(of, None if alone else ConversationEncoder(Encoding(lm.tokenizer)))


def lessons(lm: LM, data: AnsweredPrompts | None = None, batch: int = 4, **settings: Any) -> RolloutBatches:
    rollout = Rollout(
        **{"completions": 1, "tokens": TOKENS} | {k: settings.pop(k) for k in list(settings) if k in Rollout.model_fields}
    )
    vocab = settings.get("vocab", 258)
    batches = teacher_batches(
        data or prompts(lm), None, GKD(teacher="x", **settings), rollout, batch, PartShape(2, 24, TOKENS), 7, vocab
    )
    batches.signal.trainer = StudentTrainer(lambda state: state, lambda weights: lm, lambda: lm, lambda state, parts: {})
    return batches


def targets_of(part: Any) -> list[list[int]]:
    """The targets that count, answer by answer of each row."""
    target_rows = []
    for row, segments, mask, targets in zip(part["tokens"], part["segments"], part["mask"], part["targets"], strict=True):
        for segment in range(1, segments.max() + 1):
            here = (segments == segment) & (mask > 0)
            assert (np.diff(np.flatnonzero(here)) == 1).all()
            assert targets[here][:-1].tolist() == row[np.flatnonzero(here)[:-1] + 1].tolist()
            target_rows.append(targets[here].tolist())
    return target_rows


def test_the_answers_of_the_data_are_learned_with_their_end_cut_at_the_limit(lm: LM):
    messages: list[str] = []
    batches = lessons(lm, student_fraction=0)
    batches.signal.say = messages.append
    batches.advance(None)
    batch = next(batches)
    assert sorted(map(bytes, ([i for i in ids if i < 256] for part in batch.parts for ids in targets_of(part)))) == sorted(
        [b"one", b"longe", b"xxxxx", b"one"]
    )
    assert sum(ids.count(EOS) for part in batch.parts for ids in targets_of(part)) == 2, "the others are cut"
    assert batch.numbers["answers/cut"] == 0.5
    assert batch.numbers["own"] == 0
    assert any("line 1: a record without an answer is passed over" in text for text in messages)
    assert any("line 2: an answer of 17 tokens is cut, as are others of more than 5 (rollout.tokens)" in text for text in messages)
    assert batches.place == 5, "the record without an answer was looked at too"


def test_of_a_conversation_the_last_answer_is_learned_after_the_prompt_of_inference(lm: LM):
    messages_in = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]
    record = SourceRecord(where="line 1", messages=[*messages_in, {"role": "assistant", "content": "no"}])
    tokenizer = load_tokenizer("byte")
    tokenizer.chat_templates = {"default": TEMPLATE}
    of = Prompts([record], Encoding(tokenizer), Order(1, None), {"source": "test"})
    answered = AnsweredPrompts(of, ConversationEncoder(Encoding(tokenizer)))(0, 1)[0]
    assert isinstance(answered, Answered)
    assert bytes(answered.prompt.tokens) == b"<u>hi</><a>yes</><u>so</><a>"
    assert list(answered.prompt.content) == messages_in, "without the answer"
    assert bytes(answered.answer or ()).startswith(b"no")
    alone = Prompts([SourceRecord(where="line 1", messages=messages_in, prompt_messages=3)], Encoding(tokenizer), Order(1, None), {})(
        0, 1
    )[0]
    assert list(answered.prompt.tokens) == list(alone.tokens)
    unlearned = SourceRecord(where="line 1", messages=record.messages, learned=(False, True, False, False), tools=[{"name": "f"}])
    encoding = Encoding(tokenizer)
    answered = AnsweredPrompts(Prompts([unlearned], encoding, Order(1, None), {}), ConversationEncoder(encoding))(0, 1)[0]
    assert isinstance(answered, Answered)
    assert list(answered.prompt.content) == messages_in[:1]
    assert bytes(answered.prompt.tokens) == b"<u>hi</><a>"
    assert answered.prompt.tools == [{"name": "f"}], "what another template reads beside messages"


def test_the_student_answers_with_its_end_and_every_token_is_learned(lm: LM):
    batches = lessons(lm, student_fraction=1, ignore_eos=True)
    batches.advance(None)
    batch = next(batches)
    assert batch.numbers["own"] == 1
    assert [len(ids) for part in batch.parts for ids in targets_of(part)] == [TOKENS] * 4
    again = lessons(lm, student_fraction=1, ignore_eos=True)
    again.advance(None)
    assert [targets_of(part) for part in next(again).parts] == [targets_of(part) for part in batch.parts]


def test_the_share_of_batches_is_drawn_from_the_seed(lm: LM):
    batches = lessons(lm, student_fraction=0.3)
    origins = [batches.signal.whose(number) for number in range(4000)]
    assert np.mean([origin == "own" for origin in origins]) == pytest.approx(0.3, abs=0.03)
    assert {batches.signal.whose(n) for n in range(100)} == {"own", "data"}
    batches.signal.seed = 8
    assert [batches.signal.whose(number) for number in range(4000)] != origins
    assert {lessons(lm, student_fraction=1).signal.whose(n) for n in range(100)} == {"own"}
    assert {lessons(lm, student_fraction=0, others="teacher").signal.whose(n) for n in range(100)} == {"teacher"}


def test_a_position_between_the_updates_of_a_rollout_goes_on_alike(lm: LM):
    whole = lessons(lm, student_fraction=0.5, epochs=2, minibatches=2)
    steps = []
    for _ in range(12):
        whole.advance(None)
        steps.append(next(whole))
    first = lessons(lm, student_fraction=0.5, epochs=2, minibatches=2)
    for _ in range(5):
        first.advance(None)
        next(first)
    second = lessons(lm, student_fraction=0.5, epochs=2, minibatches=2)
    second.restore(first.state(), first.arrays())
    for step in steps[5:]:
        second.advance(None)
        later = next(second)
        assert later.numbers.keys() == step.numbers.keys()
        assert later.numbers["tokens"] == step.numbers["tokens"]
        assert later.numbers["own"] == step.numbers["own"]
        for a, b in zip(later.parts, step.parts, strict=True):
            assert all(np.array_equal(a[name], b[name]) for name in b)


def test_epochs_end_where_too_few_prompts_are_left(lm: LM):
    batches = lessons(lm, prompts(lm, most=20, alone=True), student_fraction=1)
    assert batches.summary().ends_after == 5
    assert batches.summary(2).epochs == 1
    assert (batches.summary().tail_rows, batches.summary(2).tail_rows) == (0, 0)
    short = lessons(lm, prompts(lm, most=18, alone=True), student_fraction=1).summary(100)
    assert (short.ends_after, short.tail_rows) == (4, 2)
    count = 0
    while True:
        batches.advance(None)
        if next(batches, None) is None:
            break
        count += 1
    assert count == 5
    # The data has one answer to a prompt, the student gives two.
    mixed = lessons(lm, prompts(lm, most=20), student_fraction=0.5, completions=2)
    counts = [2 if mixed.signal.whose(n) == "own" else 4 for n in range(20)]
    assert mixed.summary().ends_after == int(np.sum(np.cumsum(counts) <= 20))


def test_the_teachers_tokens_must_be_the_students(lm: LM):
    batches = lessons(lm, student_fraction=0, others="teacher")
    batches.signal.vocab = 3
    with pytest.raises(ArgosyError, match="the teacher answered with token"):
        batches.advance(None)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"student_fraction": 0.5, "alone": True}, "this data has prompts alone"),
        ({"tokens": 24}, "no room for a prompt"),
        ({"batch": 6, "completions": 4}, "groups of 4"),
        ({"most": 3}, "fewer than the 4"),
        ({"student_fraction": 0, "top_k": 3}, "nothing is sampled"),
        ({"student_fraction": 0, "completions": 2}, "nothing is sampled"),
        ({"resample": 1}, "rollout.resample is for objectives that learn from rewards"),
        ({"overlong": 1}, "rollout.overlong is for"),
        ({"workers": 1}, "rollout.workers is for"),
        ({"keep_cut": False}, "rollout.keep_cut"),
        ({"ahead": 1, "devices": 1}, "rollout.ahead is not built"),
    ],
)
def test_settings_that_fit_nothing_are_refused(lm: LM, settings: dict[str, Any], problem: str):
    data = prompts(lm, alone=bool(settings.pop("alone", False)), most=settings.pop("most", None))
    with pytest.raises(BadInput, match=problem):
        lessons(lm, data, **settings)


def test_records_that_never_fit_are_an_error(lm: LM):
    long = [SourceRecord(where="line 1", prompt="x" * 30, completion="y"), SourceRecord(where="line 2", prompt="a", completion="")]
    with pytest.raises(BadInput, match="no prompt to learn from has at most 19 tokens"):
        lessons(lm, prompts(lm, long), student_fraction=0).advance(None)
