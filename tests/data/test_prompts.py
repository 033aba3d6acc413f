"""What is known of prompts before they are used."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argosy.core.errors import BadInput
from argosy.data.encoding import Encoding
from argosy.data.order import Order
from argosy.data.rows import prompts as under_test
from argosy.data.rows.prompts import LOOKED_AT, Prompts, lengths_of, prompts_of
from argosy.data.settings import DataSettings
from argosy.data.sources import SourceRecord
from argosy.data.summary import CorpusSummary
from argosy.data.tokenizers.byte import ByteTokenizer

MORE = "more than 8 tokens (data.sequence - rollout.tokens) and so no room for an answer"


def sized_prompts(lengths: list[int]) -> Prompts:
    """Prompts of so many bytes, in an order of their own."""
    records = [SourceRecord(where=f"line {i}", prompt="x" * n) for i, n in enumerate(lengths)]
    return Prompts(records, Encoding(ByteTokenizer()), Order(len(records), 7), {"source": "test"})


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([3, 8, 8], ""),
        ([3, 9, 8], f"1 of 3 prompts has {MORE}: it is passed over"),
        ([30, 9, 8], f"2 of 3 prompts have {MORE}: they are passed over"),
    ],
)
def test_prompts_without_room_for_an_answer_are_counted(lengths: list[int], words: str):
    assert str(lengths_of(sized_prompts(lengths), len(lengths), 8, 60.0)) == words


def test_a_long_file_is_looked_at_for_a_while_and_says_so(monkeypatch: pytest.MonkeyPatch):
    seconds = iter([0.0, 1.0, 2.5])
    monkeypatch.setattr(under_test, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    lengths = lengths_of(sized_prompts([9] * 3 * LOOKED_AT), 3 * LOOKED_AT, 8, 2.0)
    assert (lengths.looked, lengths.long) == (LOOKED_AT, LOOKED_AT)
    assert str(lengths).endswith(f"passed over; the other {2 * LOOKED_AT} are looked at when they are reached")


def test_what_is_no_prompt_is_not_counted():
    """Distillation names a record with nothing to learn by its line, and has prompts with their answers."""
    rows = ["data.jsonl:1", *(SimpleNamespace(prompt=SimpleNamespace(tokens=[1] * n)) for n in (9, 1))]
    assert lengths_of(lambda first, count: rows[first : first + count], 3, 8, 60.0).long == 1


def test_prompts_that_a_template_has_rendered_elsewhere_are_counted_by_the_name_they_hold_first():
    tokenizer = ByteTokenizer()
    name = tokenizer.special["eos_token"]
    contents = [f"hi{name}", "hi", f"{name}{name}", None]
    chat = [{"role": "user", "content": name}]
    records = [SourceRecord(where="line", prompt=text, messages=None if text else chat) for text in contents]
    order = Order(len(records), 7)
    assert Prompts(records, Encoding(tokenizer), order, {}).special_names == {name: 2}
    assert Prompts(records, Encoding(tokenizer, special=True), order, {}).special_names == {}


def test_a_prompt_that_cannot_be_rendered_is_named_before_the_first_step():
    with pytest.raises(BadInput, match="an empty prompt") as caught:
        lengths_of(sized_prompts([3, 0, 3]), 3, 8, 60.0)
    assert caught.value.where == "line 1"


def chats(texts: list[str], template: str, columns: dict[str, str] | None = None, **more: Any) -> Prompts:
    """Prompts of one message each, by a template. more: what each message has beside its text."""
    records = [
        SourceRecord(where=f"line {i}", messages=[{"role": "user", "content": text, **more}], columns=columns or {})
        for i, text in enumerate(texts)
    ]
    return Prompts(records, Encoding(ByteTokenizer(), template=template), Order(len(records), 7), {"source": "test"})


@pytest.mark.parametrize(
    ("texts", "columns", "expected"),
    [
        (["Hi {name}, {n} + 1?", "{name}: 2?"], {}, ("name",)),
        (["Hi {name}"], {"name": "Ann"}, ("name",)),
        (["Hi {name}"], {}, ()),
        ([r"\frac{x}{y} and x_{i} and f'{{v}}'", r"\sqrt{x} + y_{i}^{x} and ${v}"], {}, ()),
        (['{"a": 1}', "{} and { b }"], {}, ()),
    ],
)
def test_a_text_to_fill_in_that_nothing_fills_is_warned_of(texts: list[str], columns: dict[str, str], expected: tuple[str, ...]):
    assert chats(texts, "zephyr", columns).placeholders == expected
    plain = [SourceRecord(where="line", prompt=text, columns=columns) for text in texts]
    assert Prompts(plain, Encoding(ByteTokenizer()), Order(len(plain), 7), {}).placeholders == expected
    warning = CorpusSummary("x", format="prompt", placeholders=expected).warning
    assert ("every prompt holds {name} as it stands" in warning) is bool(expected)


def test_what_a_template_leaves_out_of_prompts_is_said_as_in_fine_tuning(tmp_path: Path):
    prompts = chats(["Hi", "Ho"], "zephyr", name="Ann")
    assert prompts.ignored == ("name of messages",)
    records = [
        replace(record, tools=[{"type": "function"}], variables={"eos_token": "", "thinking": True}) for record in prompts.records
    ]
    assert replace(prompts, records=records).ignored == ("tools", "thinking of chat_template_kwargs", "name of messages")
    assert chats(["Hi"], "chatml").ignored == ()
    (tmp_path / "named.jinja").write_text("{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}")
    assert chats(["Hi"], str(tmp_path / "named.jinja"), name="Ann").ignored == ()


def test_prompts_of_several_files_are_mixed(tmp_path):
    for name in "xy":
        lines = [json.dumps({"prompt": f"{name} {number}", "answer": name}) for number in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    x, y = (str(tmp_path / f"{name}.jsonl") for name in "xy")
    by_size = DataSettings(source=[x, {"path": y, "epochs": 2}], held_out=0, epochs=2)
    prompts, held_out = prompts_of(by_size, ByteTokenizer(), 0)
    assert held_out is None
    assert Counter(prompt.content for prompt in prompts(0, 99)) == Counter(
        {f"x {n}": 2 for n in range(8)} | {f"y {n}": 4 for n in range(8)}
    )
    assert prompts(5, 7) == [*prompts(5, 3), *prompts(8, 4)]
    weighted, _ = prompts_of(DataSettings(source=[{"path": x, "weight": 3}, {"path": y, "weight": 1}], held_out=0), ByteTokenizer(), 0)
    counts = Counter(prompt.columns["answer"] for prompt in weighted(0, 4096))
    assert counts == {"x": 3072, "y": 1024}
    with pytest.raises(BadInput, match="weights by step"):
        prompts_of(DataSettings(source=[{"path": x, "weight": {0: 1, 5: 2}}, {"path": y, "weight": 1}]), ByteTokenizer(), 0)
