"""Calls of tools in the text of answers, however it is cut into pieces."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import shared

from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.infer.tools.calls import CallParser, TextNotation
from argosy.infer.tools.notations import find_notation, template_notation
from argosy.infer.tools.notations.deepseek import DeepSeekNotation
from argosy.infer.tools.notations.gemma import GemmaNotation
from argosy.infer.tools.notations.gpt_oss import GptOssNotation
from argosy.infer.tools.notations.hermes import HermesNotation
from argosy.infer.tools.notations.kimi import KimiNotation
from argosy.infer.tools.notations.llama3 import Llama3Notation
from argosy.infer.tools.notations.mistral import MistralNotation
from argosy.infer.tools.notations.qwen_xml import QwenXmlNotation
from argosy.serve.openai.chat import ChatWriter
from argosy.serve.openai.fields import ChatFields
from argosy.serve.response.choice import ChoicePiece, CompletionChoice, StopConditions
from argosy.serve.response.parsing import CompletionFormat, CompletionReader

ONE = '{"name": "weather", "arguments": {"city": "Köln"}}'
TWO = '{"name": "time", "arguments": {}}'
LLAMA = ONE.replace("arguments", "parameters")
TWICE = f'{LLAMA[:-1]}, "arguments": {{}}}}'


def read(notation: type[TextNotation], text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    calls = CallParser(notation(""))
    prose = "".join(calls.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, found_calls = calls.end()
    return prose + rest, [(call.name, json.loads(call.arguments)) for call in found_calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "notation, text, prose, names",
    [
        (HermesNotation, f"Let me see.<tool_call>\n{ONE}\n</tool_call>", "Let me see.", ["weather"]),
        (HermesNotation, f"<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>", "", ["weather", "time"]),
        (HermesNotation, f"<tool_call>{ONE}", "", ["weather"]),
        (HermesNotation, "1 < 2 and a <tool> is <tool_", "1 < 2 and a <tool> is <tool_", []),
        (HermesNotation, "<tool_call>{never closed", "<tool_call>{never closed", []),
        (HermesNotation, '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        (HermesNotation, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (Llama3Notation, LLAMA, "", ["weather"]),
        (Llama3Notation, f"\n{LLAMA}; {TWO}", "", ["weather", "time"]),
        (Llama3Notation, f"Here: {LLAMA}", f"Here: {LLAMA}", []),
        (Llama3Notation, '{"some": "json"}', '{"some": "json"}', []),
        (Llama3Notation, f"{LLAMA} and text", f"{LLAMA} and text", []),
        (Llama3Notation, '{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}', []),
        (Llama3Notation, '{"name": "Alice"}', '{"name": "Alice"}', []),
        (Llama3Notation, f'{LLAMA}; {{"name": "Alice"}}', f'{LLAMA}; {{"name": "Alice"}}', []),
        (Llama3Notation, '{"type": "function", "name": "time", "parameters": {}}', "", ["time"]),
        (HermesNotation, '<tool_call>{"name": "time"}</tool_call>', "", ["time"]),
        (HermesNotation, '<tool_call>{"name": "time", "age": 3}</tool_call>', '<tool_call>{"name": "time", "age": 3}</tool_call>', []),
        (HermesNotation, f"<tool_call>{TWICE}</tool_call>", f"<tool_call>{TWICE}</tool_call>", []),
        (Llama3Notation, "{" * 5000, "{" * 5000, []),
    ],
)
def test_calls_are_found_and_text_stays_text(notation: type[TextNotation], text: str, prose: str, names: list[str], size: int):
    text_outside, calls = read(notation, text, size)
    assert text_outside == prose
    assert [name for name, _ in calls] == names
    assert all(arguments == {"city": "Köln"} for name, arguments in calls if name == "weather")


def test_text_before_a_call_is_not_held_back():
    calls = CallParser(HermesNotation(""))
    assert calls.push("Hello <to") == "Hello "
    assert calls.push("day") == "<today"
    assert CallParser(Llama3Notation("")).push("Hello") == "Hello"


@pytest.mark.parametrize(
    "file, kind",
    [
        ("Qwen-Qwen2.5-7B-Instruct", HermesNotation),
        ("Qwen-Qwen3-0.6B", HermesNotation),
        ("Qwen3.5-4B", QwenXmlNotation),
        ("meta-llama-Llama-3.1-8B-Instruct", Llama3Notation),
        ("meta-llama-Llama-3.2-3B-Instruct", Llama3Notation),
        ("mistralai-Mistral-Nemo-Instruct-2407", MistralNotation),
        ("Kimi-K2-Instruct", KimiNotation),
        ("google-gemma-2-2b-it", None),
        ("google-gemma-4-31B-it", GemmaNotation),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", DeepSeekNotation),
        # Its marks must be special tokens, and a tokenizer of bytes has none.
        ("openai-gpt-oss-120b", None),
    ],
)
def test_the_notation_is_that_of_the_template(file: str, kind: Any):
    notation = find_notation(shared(f"chat_templates/{file}.jinja").read_text(), ByteTokenizer())
    assert type(notation) is (kind or type(None))


def test_which_notation_a_template_teaches():
    assert template_notation(shared("chat_templates/openai-gpt-oss-120b.jinja").read_text()) is GptOssNotation
    assert template_notation("{{ messages }}") is None
    assert template_notation("<tool_call>f<arg_key>a</arg_key>") is None, "GLM"


def test_a_call_ends_an_answer_with_its_own_reason():
    service: Any = SimpleNamespace(lm=SimpleNamespace(tokenizer=ByteTokenizer()))
    fields = ChatFields.of({"messages": [{"role": "user", "content": "hi"}]})
    choice = CompletionChoice(service.lm.tokenizer, [], StopConditions())
    choice.pieces, choice.finish = [f"Wait.<tool_call>{ONE}</tool_call>"], "stop"
    piece = ChoicePiece(choice.text, [], "stop")
    reader = CompletionReader(CompletionFormat(HermesNotation("")))
    reader.push(piece)
    shape = ChatWriter(service, fields, [], True)
    whole = shape.choice(0, choice, reader)
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Wait."
    call = whole["message"]["tool_calls"][0]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    reader = CompletionReader(CompletionFormat(HermesNotation("")))
    pieces = ChoicePiece("Wait.<tool_call>"), ChoicePiece(f"{ONE}</tool_call>", [], "stop")
    first, last = [shape.chunk(0, choice, piece, reader.push(piece)) for piece in pieces]
    assert first["delta"] == {"content": "Wait."}
    assert last["delta"]["tool_calls"][0] | {"id": ""} == {"index": 0} | call | {"id": ""}
    assert last["finish_reason"] == "tool_calls"
    reader = CompletionReader(CompletionFormat())
    reader.push(piece)
    assert ChatWriter(service, fields, [], False).choice(0, choice, reader)["message"]["content"] == choice.text
