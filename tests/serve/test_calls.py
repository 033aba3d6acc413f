"""Calls of tools in the text of answers, however it is cut into pieces."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import shared

from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.infer.tools.calls import Calls, InText
from argosy.infer.tools.notations import notation_of, taught_by
from argosy.infer.tools.notations.deepseek import DeepSeek
from argosy.infer.tools.notations.gemma import Gemma
from argosy.infer.tools.notations.gpt_oss import GptOss
from argosy.infer.tools.notations.hermes import Hermes
from argosy.infer.tools.notations.kimi import Kimi
from argosy.infer.tools.notations.llama3 import Llama3
from argosy.infer.tools.notations.mistral import Mistral
from argosy.infer.tools.notations.qwen_xml import QwenXml
from argosy.serve.openai.chat import Completion
from argosy.serve.openai.fields import Chat
from argosy.serve.response.choice import Choice, Ending, Piece
from argosy.serve.response.parsing import Reader, Reading

ONE = '{"name": "weather", "arguments": {"city": "Köln"}}'
TWO = '{"name": "time", "arguments": {}}'
LLAMA = ONE.replace("arguments", "parameters")
TWICE = f'{LLAMA[:-1]}, "arguments": {{}}}}'


def read(notation: type[InText], text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    calls = Calls(notation(""))
    said = "".join(calls.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, found = calls.end()
    return said + rest, [(one.name, json.loads(one.arguments)) for one in found]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "notation, text, said, names",
    [
        (Hermes, f"Let me see.<tool_call>\n{ONE}\n</tool_call>", "Let me see.", ["weather"]),
        (Hermes, f"<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>", "", ["weather", "time"]),
        (Hermes, f"<tool_call>{ONE}", "", ["weather"]),
        (Hermes, "1 < 2 and a <tool> is <tool_", "1 < 2 and a <tool> is <tool_", []),
        (Hermes, "<tool_call>{never closed", "<tool_call>{never closed", []),
        (Hermes, '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        (Hermes, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (Llama3, LLAMA, "", ["weather"]),
        (Llama3, f"\n{LLAMA}; {TWO}", "", ["weather", "time"]),
        (Llama3, f"Here: {LLAMA}", f"Here: {LLAMA}", []),
        (Llama3, '{"some": "json"}', '{"some": "json"}', []),
        (Llama3, f"{LLAMA} and text", f"{LLAMA} and text", []),
        (Llama3, '{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}', []),
        (Llama3, '{"name": "Alice"}', '{"name": "Alice"}', []),
        (Llama3, f'{LLAMA}; {{"name": "Alice"}}', f'{LLAMA}; {{"name": "Alice"}}', []),
        (Llama3, '{"type": "function", "name": "time", "parameters": {}}', "", ["time"]),
        (Hermes, '<tool_call>{"name": "time"}</tool_call>', "", ["time"]),
        (Hermes, '<tool_call>{"name": "time", "age": 3}</tool_call>', '<tool_call>{"name": "time", "age": 3}</tool_call>', []),
        (Hermes, f"<tool_call>{TWICE}</tool_call>", f"<tool_call>{TWICE}</tool_call>", []),
        (Llama3, "{" * 5000, "{" * 5000, []),
    ],
)
def test_calls_are_found_and_text_stays_text(notation: type[InText], text: str, said: str, names: list[str], size: int):
    found, calls = read(notation, text, size)
    assert found == said
    assert [name for name, _ in calls] == names
    assert all(arguments == {"city": "Köln"} for name, arguments in calls if name == "weather")


def test_text_before_a_call_is_not_held_back():
    calls = Calls(Hermes(""))
    assert calls.push("Hello <to") == "Hello "
    assert calls.push("day") == "<today"
    assert Calls(Llama3("")).push("Hello") == "Hello"


@pytest.mark.parametrize(
    "file, kind",
    [
        ("Qwen-Qwen2.5-7B-Instruct", Hermes),
        ("Qwen-Qwen3-0.6B", Hermes),
        ("Qwen3.5-4B", QwenXml),
        ("meta-llama-Llama-3.1-8B-Instruct", Llama3),
        ("meta-llama-Llama-3.2-3B-Instruct", Llama3),
        ("mistralai-Mistral-Nemo-Instruct-2407", Mistral),
        ("Kimi-K2-Instruct", Kimi),
        ("google-gemma-2-2b-it", None),
        ("google-gemma-4-31B-it", Gemma),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", DeepSeek),
        # Its marks must be special tokens, and a tokenizer of bytes has none.
        ("openai-gpt-oss-120b", None),
    ],
)
def test_the_notation_is_that_of_the_template(file: str, kind: Any):
    found = notation_of(shared(f"chat_templates/{file}.jinja").read_text(), ByteTokenizer())
    assert type(found) is (kind or type(None))


def test_which_notation_a_template_teaches():
    assert taught_by(shared("chat_templates/openai-gpt-oss-120b.jinja").read_text()) is GptOss
    assert taught_by("{{ messages }}") is None
    assert taught_by("<tool_call>f<arg_key>a</arg_key>") is None, "GLM"


def test_a_call_ends_an_answer_with_its_own_reason():
    service: Any = SimpleNamespace(lm=SimpleNamespace(tokenizer=ByteTokenizer()))
    fields = Chat.of({"messages": [{"role": "user", "content": "hi"}]})
    choice = Choice(service.lm.tokenizer, [], Ending())
    choice.pieces, choice.finish = [f"Wait.<tool_call>{ONE}</tool_call>"], "stop"
    piece = Piece(choice.text, [], "stop")
    reader = Reader(Reading(Hermes("")))
    reader.push(piece)
    shape = Completion(service, fields, [], True)
    whole = shape.choice(0, choice, reader)
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Wait."
    call = whole["message"]["tool_calls"][0]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    reader = Reader(Reading(Hermes("")))
    pieces = Piece("Wait.<tool_call>"), Piece(f"{ONE}</tool_call>", [], "stop")
    first, last = [shape.chunk(0, choice, piece, reader.push(piece)) for piece in pieces]
    assert first["delta"] == {"content": "Wait."}
    assert last["delta"]["tool_calls"][0] | {"id": ""} == {"index": 0} | call | {"id": ""}
    assert last["finish_reason"] == "tool_calls"
    reader = Reader(Reading())
    reader.push(piece)
    assert Completion(service, fields, [], False).choice(0, choice, reader)["message"]["content"] == choice.text
