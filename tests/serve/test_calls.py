"""Calls of tools in the text of answers, however it is cut into pieces."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.infer.calls import Calls, notation_of
from argosy.serve.chat import Completion
from argosy.serve.choice import Choice, Ending, Piece
from argosy.serve.fields import Chat
from argosy.serve.reading import Reader, Reading

ONE = '{"name": "weather", "arguments": {"city": "Köln"}}'
TWO = '{"name": "time", "arguments": {}}'
LLAMA = ONE.replace("arguments", "parameters")


def read(notation: str, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    calls = Calls(notation)
    said = "".join(calls.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, found = calls.end()
    return said + rest, [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "notation, text, said, names",
    [
        ("hermes", f"Let me see.<tool_call>\n{ONE}\n</tool_call>", "Let me see.", ["weather"]),
        ("hermes", f"<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>", "", ["weather", "time"]),
        ("hermes", f"<tool_call>{ONE}", "", ["weather"]),
        ("hermes", "1 < 2 and a <tool> is <tool_", "1 < 2 and a <tool> is <tool_", []),
        ("hermes", "<tool_call>{never closed", "<tool_call>{never closed", []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("hermes", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("llama3", LLAMA, "", ["weather"]),
        ("llama3", f"\n{LLAMA}; {TWO}", "", ["weather", "time"]),
        ("llama3", f"Here: {LLAMA}", f"Here: {LLAMA}", []),
        ("llama3", '{"some": "json"}', '{"some": "json"}', []),
        ("llama3", f"{LLAMA} and text", f"{LLAMA} and text", []),
        ("llama3", "{" * 5000, "{" * 5000, []),
    ],
)
def test_calls_are_found_and_text_stays_text(notation: str, text: str, said: str, names: list[str], size: int):
    found, calls = read(notation, text, size)
    assert found == said
    assert [name for name, _ in calls] == names
    assert all(arguments == {"city": "Köln"} for name, arguments in calls if name == "weather")


def test_text_before_a_call_is_not_held_back():
    calls = Calls("hermes")
    assert calls.push("Hello <to") == "Hello "
    assert calls.push("day") == "<today"
    assert Calls("llama3").push("Hello") == "Hello"


def test_the_notation_is_that_of_the_template():
    assert notation_of("... within <tool_call></tool_call> XML tags") == "hermes"
    assert notation_of('{"name": function name, "parameters": ...} {% if m.role == "ipython" %}') == "llama3"
    assert notation_of("{{ messages }}") is None


def test_a_call_ends_an_answer_with_its_own_reason():
    service: Any = SimpleNamespace(lm=SimpleNamespace(tokenizer=ByteTokenizer()))
    fields = Chat.of({"messages": [{"role": "user", "content": "hi"}]})
    choice = Choice(service.lm.tokenizer, [], Ending())
    choice.pieces, choice.finish = [f"Wait.<tool_call>{ONE}</tool_call>"], "stop"
    piece = Piece(choice.text, [], "stop")
    reader = Reader(Reading("hermes"))
    reader.push(piece)
    shape = Completion(service, fields, [], True)
    whole = shape.choice(0, choice, reader)
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Wait."
    call = whole["message"]["tool_calls"][0]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    reader = Reader(Reading("hermes"))
    pieces = Piece("Wait.<tool_call>"), Piece(f"{ONE}</tool_call>", [], "stop")
    first, last = [shape.chunk(0, choice, piece, reader.push(piece)) for piece in pieces]
    assert first["delta"] == {"content": "Wait."}
    assert last["delta"]["tool_calls"][0] | {"id": ""} == {"index": 0} | call | {"id": ""}
    assert last["finish_reason"] == "tool_calls"
    reader = Reader(Reading())
    reader.push(piece)
    assert Completion(service, fields, [], False).choice(0, choice, reader)["message"]["content"] == choice.text
