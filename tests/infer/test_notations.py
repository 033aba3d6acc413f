"""Calls in every notation: against the published chat templates, however an answer is cut, and against the grammars that force them."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from infer.marked import NAMES, VOCAB, template, tokenizer_with_marks

from argosy.core.errors import BadInput
from argosy.data.chat.template import render
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.infer.tools.calls import CallDelta, CallNotation, CallParser, TextNotation, ToolCall
from argosy.infer.tools.grammar import Grammars, Structure, grammar_masks, read_structure, unpacked_bits
from argosy.infer.tools.notations import find_notation
from argosy.infer.tools.notations.deepseek import DeepSeekNotation
from argosy.infer.tools.notations.gemma import GemmaNotation
from argosy.infer.tools.notations.hermes import HermesNotation
from argosy.infer.tools.notations.kimi import KimiNotation
from argosy.infer.tools.notations.llama3 import Llama3Notation
from argosy.infer.tools.notations.mistral import MistralNotation
from argosy.infer.tools.notations.qwen_xml import QwenXmlNotation
from argosy.infer.tools.notations.schemas import schema_types

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is it?"}]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "time", "description": "Now."}},
]  # fmt: skip
NUMBER = read_structure({"json": {"enum": [1, 2]}})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every mark is a special token."""
    return tokenizer_with_marks(tmp_path_factory.mktemp("marked"), NAMES, "")


def text_notation(name: str, tokenizer: Tokenizer) -> TextNotation:
    notation = find_notation(template(name), tokenizer)
    assert isinstance(notation, TextNotation)
    return notation


def as_read(notation: CallNotation, tokenizer: Tokenizer, text: str) -> str:
    """A text that the model says, as it is read: with marks."""
    stream = tokenizer.stream(marks=notation.marks)
    return "".join([stream.push(token) for token in tokenizer.encode(text, special=True)]) + stream.end()


def read_calls(notation: CallNotation, tokenizer: Tokenizer, text: str) -> CallDelta:
    return notation.read(as_read(notation, tokenizer, text))


# ---------------------------------------------------------------- as templates write them

texts = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=8)
values = st.recursive(texts | st.integers() | st.booleans() | st.none(), lambda inner: st.lists(inner, max_size=2))
arguments_ = st.dictionaries(texts, values, max_size=2)
calls_ = st.lists(st.tuples(st.sampled_from(["weather", "time", "a-b_c9"]), arguments_), min_size=1, max_size=3)


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", ["nemo", "v11", "v13", "kimi", "deepseek", "gemma", "qwen"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(expected=calls_)
def test_what_a_template_writes_is_read_and_written_again(tokenizer: Tokenizer, name: str, marks: bool, expected: Any):
    """The turn of a conversation with calls, as the published template writes it."""
    by = tokenizer if marks else ByteTokenizer()
    notation = text_notation(name, by)
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    # The prompts of DeepSeek R1 and Gemma 4 have a thought, which the templates drop.
    before = render(template(name), ASKED, special, add_generation_prompt=name not in ("deepseek", "gemma"))

    def turn(calls: Any) -> str:
        messages = type(notation).messages([*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}], template(name))
        whole = render(template(name), messages, special)
        assert whole.startswith(before)
        ends = [whole.rfind(end) for end in ("<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>", "<|tool_response>")]
        return whole[len(before) : max(ends)].removeprefix("<｜Assistant｜>").removeprefix("<|turn>model\n")

    if name == "gemma":
        # Nothing in a key is escaped there.
        expected = [(name, {f"k{i}": value for i, value in enumerate(arguments.values())}) for name, arguments in expected]
    functions = [{"name": name, "arguments": arguments} for name, arguments in expected]
    ids = [f"abcdefg{i:02d}" for i in range(len(expected))]
    text = turn([{"id": call_id, "type": "function", "function": function} for call_id, function in zip(ids, functions)])
    answer = read_calls(notation, by, text)
    assert answer.text == ""
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == expected
    entries = notation.written(answer.calls, [])
    if "abcdefg00" in text:
        assert [message["id"] for message in entries] == ids, "the model's own ids"
    again = [message | {"function": function} for message, function in zip(entries, functions)]
    assert turn(again) == text


# ---------------------------------------------------------------- what models make of it

ONE, TWO = '{"name": "weather", "arguments": {"city": "Köln"}}', '{"name": "time", "arguments": {}}'
LIST = f"[TOOL_CALLS][{ONE}, {TWO}]"
NAMED = '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]time[ARGS]{}'
SECTION, CLOSED = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI = '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Köln"}<|tool_call_end|>'
KIMI_TIME = "<|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"
XML_TIME = "<tool_call>\n<function=time>\n</function>\n</tool_call>"
R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
R1_WEATHER, R1_TIME = R1.format("weather", '{"city": "Köln"}'), R1.format("time", "{}")
V31 = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Köln"}<｜tool▁call▁end｜>'
TOOLS_BEGIN, TOOLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
GEMMA = '<|tool_call>call:weather{city:<|"|>Köln<|"|>}<tool_call|>'
GEMMA_TIME = "<|tool_call>call:time{}<tool_call|>"
BOTH = ["weather", "time"]
ANSWERS: list[tuple[type[TextNotation], str, str, list[str]]] = [
    (MistralNotation, LIST, "", BOTH),
    (MistralNotation, f"Let me see.{LIST}", "Let me see.", BOTH),
    # With SentencePiece a space follows the mark.
    (MistralNotation, f"[TOOL_CALLS] [{ONE}]", "", ["weather"]),
    (MistralNotation, f"[TOOL_CALLS]{ONE}", "", ["weather"]),
    (MistralNotation, f"[TOOL_CALLS][{ONE}][TOOL_CALLS][{TWO}]", "", BOTH),
    (MistralNotation, NAMED, "", BOTH),
    (MistralNotation, NAMED.replace("[ARGS]", "[CALL_ID]abcdefghi[ARGS]"), "", BOTH),
    (MistralNotation, NAMED.replace("[ARGS]", ""), "", BOTH),
    (MistralNotation, f"{LIST} Done.", "Done.", BOTH),
    # Cut short, and other JSON.
    (MistralNotation, LIST[:-3], LIST[:-3], []),
    (MistralNotation, NAMED[:-1], NAMED[:-1], []),
    (MistralNotation, "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    (MistralNotation, "[TOOL_CALLS]weather", "[TOOL_CALLS]weather", []),
    (MistralNotation, "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    (MistralNotation, '[TOOL_CALLS]f[ARGS]{"a": NaN}', '[TOOL_CALLS]f[ARGS]{"a": NaN}', []),
    (MistralNotation, f"A list: [{ONE}], [TOOL_", f"A list: [{ONE}], [TOOL_", []),
    (KimiNotation, SECTION + KIMI + KIMI_TIME + CLOSED, "", BOTH),
    (KimiNotation, f"Let me see.{SECTION}{KIMI}{CLOSED}", "Let me see.", ["weather"]),
    (KimiNotation, f"{SECTION}\n{KIMI}\n{KIMI_TIME}\n{CLOSED} Done.", "Done.", BOTH),
    (KimiNotation, KIMI + KIMI_TIME, "", BOTH),
    (KimiNotation, f"{SECTION}{KIMI}{CLOSED}{SECTION}{KIMI_TIME}{CLOSED}", "", BOTH),
    (KimiNotation, (SECTION + KIMI + KIMI_TIME).replace("functions.", "").replace(":1", ""), "", BOTH),
    (KimiNotation, SECTION + KIMI.removesuffix("<|tool_call_end|>"), "", ["weather"]),
    (KimiNotation, SECTION + KIMI[:-20], SECTION + KIMI[:-20], []),
    (KimiNotation, SECTION + "functions.weather:0", SECTION + "functions.weather:0", []),
    (KimiNotation, SECTION, SECTION, []),
    (KimiNotation, f"{SECTION}{KIMI}a", f"{SECTION}{KIMI}a", []),
    (KimiNotation, "<|tool_calls", "<|tool_calls", []),
    (DeepSeekNotation, f"{TOOLS_BEGIN}{R1_WEATHER}\n{R1_TIME}{TOOLS_END}", "", BOTH),
    (DeepSeekNotation, f"Let me see.{TOOLS_BEGIN}{V31}{TOOLS_END}", "Let me see.", ["weather"]),
    (DeepSeekNotation, V31 + R1_TIME, "", BOTH),
    (DeepSeekNotation, TOOLS_BEGIN + R1_WEATHER.replace("```<", "<"), TOOLS_BEGIN + R1_WEATHER.replace("```<", "<"), []),
    (DeepSeekNotation, TOOLS_BEGIN + V31[:-25], TOOLS_BEGIN + V31[:-25], []),
    (GemmaNotation, GEMMA + GEMMA_TIME, "", BOTH),
    (GemmaNotation, f"Let me see.{GEMMA}", "Let me see.", ["weather"]),
    (GemmaNotation, GEMMA.replace(":<", ' : <').replace("}", " }").removesuffix("<tool_call|>"), "", ["weather"]),
    (GemmaNotation, GEMMA.replace('<|"|>', ""), GEMMA.replace('<|"|>', ""), []),
    (GemmaNotation, GEMMA.replace("}", ",}"), GEMMA.replace("}", ",}"), []),
    (GemmaNotation, GEMMA.replace("}", "]"), GEMMA.replace("}", "]"), []),
    (GemmaNotation, GEMMA[:-20], GEMMA[:-20], []),
    (QwenXmlNotation, XML + "\n" + XML_TIME, "", BOTH),
    (QwenXmlNotation, f"Let me see.\n\n{XML}", "Let me see.\n\n", ["weather"]),
    (QwenXmlNotation, XML.replace("\n", ""), "", ["weather"]),
    (QwenXmlNotation, XML.removesuffix("\n</tool_call>"), "", ["weather"]),
    (QwenXmlNotation, XML[:-25], XML[:-25], []),
    (QwenXmlNotation, f"<tool_call>{ONE}</tool_call>", f"<tool_call>{ONE}</tool_call>", []),
    (HermesNotation, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}', '<tool_call>{"name": "f", "arguments": {"a": 1e999}}', []),
    (HermesNotation, f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>", "", BOTH),
    (HermesNotation, f"<tool_call>{ONE}}}</tool_call>", f"<tool_call>{ONE}}}</tool_call>", []),
]


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("kind, text, text_outside, names", ANSWERS)
def test_calls_are_read_and_what_is_none_stays_text(
    tokenizer: Tokenizer, kind: type[TextNotation], text: str, text_outside: str, names: list[str], size: int, marks: bool
):
    by = tokenizer if marks else ByteTokenizer()
    notation = kind("", by)
    calls, text = CallParser(notation), as_read(notation, by, text)
    read = "".join(calls.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, parsed = calls.end()
    assert read + rest == text_outside
    assert [call.name for call in parsed] == names
    assert all(json.loads(call.arguments) == {"city": "Köln"} for call in parsed if call.name == "weather")


TAGS = ["<function=f>", "<parameter=a>", "</parameter>", "</function>"]
PARTS = [*NAMES, ONE, TWO, "[", "]", "{", "f", " ", "functions.f:1", "{}", '{"a": "[TOOL_CALLS]"}', "é", *TAGS]


KINDS = [HermesNotation, Llama3Notation, MistralNotation, KimiNotation, DeepSeekNotation, GemmaNotation, QwenXmlNotation]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=9), data=st.data())
def test_an_answer_is_the_same_wherever_it_is_cut(kind: type[TextNotation], parts: list[str], data: Any):
    """Marks are their names here, which can be cut, too."""
    notation, text = kind("", None), "".join(parts)
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=5))})
    calls = CallParser(notation)
    read = "".join(calls.push(text[a:b]) for a, b in pairwise(cuts))
    rest, parsed = calls.end()
    assert notation.read(text) == CallDelta(read + rest, parsed, tried=calls.begun)
    if not parsed:
        assert read + rest == text, "nothing is lost"


def test_marks_that_are_spelled_in_ordinary_tokens_are_text(tokenizer: Tokenizer):
    for kind, text in ((MistralNotation, LIST), (KimiNotation, SECTION + KIMI + CLOSED), (HermesNotation,
    f"<tool_call>{ONE}</tool_call>")):
        notation = kind("", tokenizer)
        stream = tokenizer.stream(marks=notation.marks)
        plain = "".join(map(stream.push, tokenizer.encode(text))) + stream.end()
        assert notation.read(plain) == CallDelta(text, [])
        assert read_calls(notation, tokenizer, text).calls


def test_marks_inside_arguments_are_arguments():
    """Where marks are ordinary tokens, too."""
    for kind, text in (
        (MistralNotation, '[TOOL_CALLS][{"name": "f", "arguments": {"a": "[TOOL_CALLS][1]"}}]'),
        (MistralNotation, '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS][1]"}'),
        (HermesNotation, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'),
        (KimiNotation, SECTION + KIMI.replace("city", "a").replace("Köln", "<|tool_call_end|>") + CLOSED),
    ):
        (call,) = kind("").read(text).calls
        assert json.loads(call.arguments)["a"] in text


TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "none": {}, "count": {"type": "integer"}, "size": {"type": ["number", "null"]},
        "on": {"type": "boolean"}, "list": {"type": "array"}, "map": {"$ref": "#/$defs/map"},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "one": {"enum": ["a", "5"]},
    },
    "$defs": {"map": {"type": "object"}},
}  # fmt: skip
typed = {
    "text": texts | st.sampled_from(["5", "true", "null", " a\n", "\n", "{}", "</parameter>\n", "<parameter=a>", '"a"']), "none": texts,
    "count": st.integers(), "size": st.none() | st.floats(allow_nan=False, allow_infinity=False), "on": st.booleans(),
    "list": st.lists(values, max_size=2), "map": st.dictionaries(texts, values, max_size=2),
    "either": st.integers() | st.sampled_from(["a b", '"a"']),
    "one": st.sampled_from(["a", "5"]),
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(expected=st.lists(st.fixed_dictionaries({}, optional=typed), min_size=1, max_size=2))
def test_values_without_types_are_read_by_the_schema(expected: list[dict[str, Any]]):
    """As the template of Qwen 3.5 writes them."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": TYPED}}]
    notation = find_notation(template("qwen3.5"), None, tools)
    assert isinstance(notation, QwenXmlNotation)
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in expected]
    text = render(template("qwen3.5"), [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}], {}, tools=tools)
    turn = text[text.index("</think>") + len("</think>\n\n") :].removesuffix("<|im_end|>\n")
    answer = notation.read(turn)
    assert answer.text == ""
    assert [json.loads(call.arguments) for call in answer.calls] == expected


def test_a_schema_that_is_none_does_not_keep_calls_from_being_read():
    odd: Any = {"type": 5, "enum": 1, "anyOf": {}}
    for wrong in (None, 5, {"properties": 5}, {"properties": {"a": odd}}, {"properties": {"a": {"$ref": "#/a"}}}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": wrong}}]
        text = "<tool_call><function=f><parameter=a>5</parameter></function></tool_call>"
        (call,) = QwenXmlNotation("", None, tools).read(text).calls
        assert call.arguments == '{"a": "5"}'
    loop = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}}, "properties": {"a": {"$ref": "#/$defs/a"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": loop}}]
    (call,) = QwenXmlNotation("", None, tools).read("<tool_call><function=f><parameter=a>5</parameter></function></tool_call>").calls
    assert call.arguments == '{"a": 5}'


# ---------------------------------------------------------------- ids


def test_ids_are_those_that_templates_take():
    calls = [ToolCall("f", "{}", "abcdefghi"), ToolCall("f", "{}", "abcdefghi"), ToolCall("f", "{}", "no id"), ToolCall("g", "{}")]
    ids = [message["id"] for message in MistralNotation("").written(calls, [])]
    assert ids[0] == "abcdefghi"
    assert len(set(ids)) == 4
    assert all(len(call) == 9 and call.isalnum() and call.isascii() for call in ids)
    assert MistralNotation("").written(calls[:1], ["abcdefghi"])[0]["id"] != "abcdefghi", "it is taken"
    ids = [message["id"] for message in KimiNotation("").written(calls, ["", ""])]
    assert ids == ["functions.f:2", "functions.f:3", "functions.f:4", "functions.g:5"]
    assert [message["id"] for message in HermesNotation("").written(calls[:2], [], lambda i: f"c{i}")] == ["c0", "c1"]


def conversation(*ids: str) -> list[dict[str, Any]]:
    """Two calls in a turn, whose results come in the other order."""
    calls = [{"id": call_id, "type": "function", "function": {"name": "time", "arguments": {}}} for call_id in ids]
    results = [{"role": "tool", "tool_call_id": call_id, "content": f"of {call_id}"} for call_id in reversed(ids)]
    return [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def test_calls_of_other_models_get_ids_that_the_template_takes():
    chat = conversation("abcdefghi", "abcdefghj")
    assert MistralNotation.messages(chat, "") == chat
    messages = MistralNotation.messages(conversation("call_1", "call_2"), "")
    first, second = (message["id"] for message in messages[1]["tool_calls"])
    assert [message["tool_call_id"] for message in messages[2:]] == [second, first]
    text = render(template("nemo"), messages, {"bos_token": "", "eos_token": ""}, tools=TOOLS)
    assert f'[TOOL_RESULTS]{{"content": of call_2, "call_id": "{second}"}}[/TOOL_RESULTS]' in text
    with pytest.raises(BadInput, match="length 9"):
        render(template("nemo"), conversation("call_1", "call_2"), {"bos_token": "", "eos_token": ""}, tools=TOOLS)


def test_deepseek_reads_arguments_as_its_template_writes_them():
    """That of V3.1 takes them for a text, and those of V3 for an object."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    turns = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    own_template = "{{ messages[1].content }}{{ messages[1].tool_calls[0]['function']['arguments'] + '<｜tool▁call▁end｜>' }}"
    assert render(own_template, DeepSeekNotation.messages(turns, own_template), {}) == 'None{"a": "é"}<｜tool▁call▁end｜>'
    text = render(template("deepseek"), DeepSeekNotation.messages(turns, template("deepseek")), {})
    result = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>noon<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    assert text.endswith(f"{TOOLS_END}<｜end▁of▁sentence｜>{result}")


def test_kimi_counts_calls_and_reads_results_in_their_order():
    of_none = {"role": "tool", "content": "of none"}
    messages = KimiNotation.messages([*conversation("call_1", "call_2"), *conversation("call_3")[1:], of_none], "")
    assert [entry["id"] for i in (1, 4) for entry in messages[i]["tool_calls"]] == [f"functions.time:{i}" for i in range(3)]
    # What a client may send.
    odd = [{"id": [1], "function": {}}, {"function": {"name": "f"}}]
    ids = [entry["id"] for entry in KimiNotation.messages([{"role": "assistant", "tool_calls": odd}], "")[0]["tool_calls"]]
    assert ids == ["functions.None:0", "functions.f:1"]
    results = [(entry.get("tool_call_id"), entry["content"]) for entry in messages if entry["role"] == "tool"]
    assert results == [*((f"functions.time:{i}", f"of call_{i + 1}") for i in range(3)), (None, "of none")]


# ---------------------------------------------------------------- grammars

RIGHT = {
    "nemo": [
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
        '[TOOL_CALLS] [{"name": "time", "arguments": {}, "id": "a1b2c3d4e"}]',
        '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]',
    ],
    "v11": [
        '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo"}', "[TOOL_CALLS]time[ARGS]{}",
        "[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]time[ARGS]{}",
    ],
    "v13": ['[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', "[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]time[ARGS]{}"],
    "deepseek": [
        f"{TOOLS_BEGIN}{R1_WEATHER.replace('Köln', 'Oslo')}{TOOLS_END}", f"{TOOLS_BEGIN}{R1_TIME}\n{R1_TIME}{TOOLS_END}",
        f"{TOOLS_BEGIN}{R1_TIME}{R1_TIME}{TOOLS_END}",
    ],
    "gemma": [GEMMA.replace("Köln", "Oslo"), GEMMA_TIME, GEMMA_TIME + GEMMA_TIME],
    "qwen3.5": [XML.replace("Köln", "Oslo"), XML_TIME, f"{XML_TIME}\n{XML_TIME}"],
    "kimi": [SECTION + KIMI.replace("Köln", "Oslo") + CLOSED, SECTION + KIMI_TIME + KIMI_TIME + CLOSED],
}  # fmt: skip
WRONG = {
    "nemo": [
        '[TOOL_CALLS][{"name": "other", "arguments": {}}]', "[TOOL_CALLS][]", '[TOOL_CALLS][{"name": "time", "arguments": {}}',
        "[TOOL_CALLS]",
    ],
    "v11": ["[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]time[CALL_ID]abc[ARGS]{}", "[TOOL_CALLS]time{}"],
    "v13": ["[TOOL_CALLS]time[CALL_ID]a1b2c3d4e[ARGS]{}", "[TOOL_CALLS]time[ARGS]"],
    "deepseek": [TOOLS_BEGIN + TOOLS_END, TOOLS_BEGIN + R1_TIME, R1_TIME, TOOLS_BEGIN + R1.format("other", "{}") + TOOLS_END],
    "gemma": [GEMMA_TIME[:-1], GEMMA_TIME.replace("time", "other"), GEMMA_TIME.replace("}", "a:1}"), GEMMA.replace("Köln", "")],
    "qwen3.5": [XML_TIME[:-1], XML_TIME.replace("time", "other"), f"<tool_call>\n{TWO}\n</tool_call>", XML_TIME.replace("\n", "")],
    "kimi": [SECTION + CLOSED, SECTION + KIMI_TIME, KIMI_TIME, SECTION + KIMI_TIME.replace(":1", "") + CLOSED],
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> dict[bool, Grammars]:
    return {True: Grammars(tokenizer, VOCAB), False: Grammars(ByteTokenizer(), 258)}


def accepts(grammars: Grammars, structure: Structure, text: str) -> bool:
    matcher = grammars.get(structure).matcher([257])
    for token in [*grammars.tokenizer.encode(text, special=True), 257]:
        if not unpacked_bits(grammar_masks([matcher])[0][0], grammars.vocab)[token]:
            return False
        matcher.push(token)
    return True


def oslo(text: str) -> str:
    return text.replace("Oslo", "Bern")


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_grammar_allows_the_calls_that_are_read(grammars: dict[bool, Grammars], name: str, marks: bool):
    by = grammars[marks]
    notation = text_notation(name, by.tokenizer)
    right, wrong = RIGHT[name], [*WRONG[name], oslo(RIGHT[name][0])]
    several = [text for text in right if text.count("time") == 2]
    assert several
    must, may, single = (notation.grammar(TOOLS, must=m, many=n) for m, n in ((True, True), (False, True), (False, False)))
    either = notation.grammar(TOOLS, must=False, many=True, answer=NUMBER)
    texts = [*right, *wrong, "", "hello {", "1", f"a{right[0]}", f"{right[0]}a"]
    assert [text for text in texts if accepts(by, must, text)] == right
    assert [text for text in texts if accepts(by, may, text)] == [*right, "", "hello {", "1", f"a{right[0]}"]
    assert [text for text in texts if accepts(by, either, text)] == [*right, "1"]
    assert [text for text in right if not accepts(by, single, text)] == several
    for text in right:
        assert read_calls(notation, by.tokenizer, text).calls


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", [*RIGHT, "qwen", "llama"])
def test_whatever_a_grammar_makes_is_a_call(grammars: dict[bool, Grammars], name: str, marks: bool):
    """A model that draws any allowed token with the same probability."""
    by, rng = grammars[marks], np.random.default_rng(len(name))
    notation = text_notation(name, by.tokenizer)
    structure = notation.grammar(TOOLS, must=True, many=True)
    for _ in range(5):
        matcher, ids = by.get(structure).matcher([257]), []
        while True:
            allowed = np.flatnonzero(unpacked_bits(grammar_masks([matcher])[0][0], by.vocab))
            token = 257 if 257 in allowed else int(rng.choice(allowed))
            if token == 257:
                break
            ids.append(token)
            if matcher.push(token):
                break
        stream = by.tokenizer.stream(marks=notation.marks)
        answer = notation.read("".join(map(stream.push, ids)) + stream.end())
        assert answer.text == ""
        assert answer.calls
        for call in answer.calls:
            assert json.loads(call.arguments) in ([{}] if call.name == "time" else [{"city": "Oslo"}, {"city": "Rome"}])


def with_parameters(**parameters: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


def test_arguments_without_types_are_forced_one_by_one(grammars: dict[bool, Grammars]):
    """In the order of the schema, those that it requires."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": TYPED | {"required": ["count"]}}}]
    notation = find_notation(template("qwen3.5"), ByteTokenizer(), tools)
    assert notation is not None
    structure = notation.grammar(tools, must=True, many=False)
    right = [
        with_parameters(count="5"), with_parameters(text="a\nb </parameter>", count="-1", size="1.5", on="false", list="[1]", map="{}"),
        with_parameters(count="1", size="null", either="5 a", one="5"), with_parameters(text="", count="0"),
    ]  # fmt: skip
    wrong = [
        with_parameters(), with_parameters(count="a"), with_parameters(count="5", text="a"), with_parameters(count="5", on="yes"),
        with_parameters(count="5", other="5"), with_parameters(count="5", one="b"), with_parameters(count="5", map="[]"),
    ]  # fmt: skip
    assert [text for text in [*right, *wrong] if accepts(grammars[False], structure, text)] == right
    read = [json.loads(call.arguments) for text in right for call in notation.read(text).calls]
    assert read[0] == {"count": 5}
    assert read[1] == {"text": "a\nb </parameter>", "count": -1, "size": 1.5, "on": False, "list": [1], "map": {}}
    free = notation.grammar([replace_parameters(tools[0], {"type": "object"})], must=True, many=False)
    assert all(accepts(grammars[False], free, text) for text in [*right, *wrong])
    for parameters, said_ in (
        ({"type": "object", "minProperties": 1}, "`minProperties` of the arguments of `f`"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "b"}}}, "`pattern` of the text `a`"),
    ):
        with pytest.raises(BadInput, match=f"{said_} cannot be forced in the notation of Qwen 3.5"):
            notation.grammar([replace_parameters(tools[0], parameters)], must=True, many=False)


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "z": {"type": "integer", "minimum": 3}, "b": {"type": ["string", "null"]},
        "c": {"type": "array", "items": {"enum": ["x", 1, None]}},
        "A": {"$ref": "#/$defs/tree"}, "d": {"anyOf": [{"type": "boolean"}, {"type": "string"}]}, "e": {},
    },
    "required": ["b", "z"],
    "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}},
}  # fmt: skip


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "text"])
def test_a_grammar_of_gemma_follows_the_schema(grammars: dict[bool, Grammars], marks: bool):
    """Keys are sorted as the template sorts them, so that what a grammar allows is what the template writes."""
    by, tools = grammars[marks], [{"type": "function", "function": {"name": "f", "parameters": NESTED}}]
    notation = text_notation("gemma", by.tokenizer)
    structure = notation.grammar(tools, must=True, many=False)
    right: list[Any] = [
        {"b": "a{,:\n", "z": 3}, {"b": None, "z": 4}, {"A": {}, "b": "", "c": [], "d": True, "z": 5},
        {"A": {"left": {"left": {}}}, "b": "", "c": ["x", 1, None, 1], "d": "true", "e": {"k": [1, "l", {}], "m": 1.5}, "z": 30},
    ]  # fmt: skip
    wrong: list[Any] = [
        {"b": ""}, {"z": 3}, {"b": "", "z": 2}, {"b": 5, "z": 3}, {"b": "", "c": ["y"], "z": 3}, {"b": "", "y": 1, "z": 3},
    ]  # fmt: skip

    def write_call(arguments: Any) -> str:
        message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        text = render(template("gemma"), [*ASKED, message], {"bos_token": ""})
        return text[text.index("<|tool_call>") : text.rindex("<|tool_response>")].replace("None", "null")

    assert [text for text in [*right, *wrong] if accepts(by, structure, write_call(text))] == right
    assert [json.loads(read_calls(notation, by.tokenizer, write_call(text)).calls[0].arguments) for text in right] == right
    for inside in ({"type": "string", "minLength": 1}, {"type": "array", "maxItems": 1}, {"not": {}}):
        word = [*inside][-1]
        with pytest.raises(BadInput, match=f"`{word}` in the parameters of `f` cannot be forced in the notation of Gemma 4"):
            notation.grammar([replace_parameters(tools[0], {"properties": {"a": inside}})], must=True, many=False)


def test_a_tool_without_a_schema_is_refused():
    wrong = [replace_parameters(TOOLS[0], [1])]
    for kind in (MistralNotation, KimiNotation, HermesNotation, QwenXmlNotation, GemmaNotation):
        with pytest.raises(BadInput, match="schema"):
            kind("").grammar(wrong, must=True, many=True)


@pytest.mark.parametrize("kind", [QwenXmlNotation, GemmaNotation])
@pytest.mark.parametrize(
    "wrong",
    [
        {"properties": 5}, {"properties": {}, "required": 5}, {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {"type": "int"}}},
    ],
)  # fmt: skip
def test_a_schema_that_is_none_is_refused(grammars: dict[bool, Grammars], kind: type[TextNotation], wrong: Any):
    with pytest.raises(BadInput):
        grammars[False].get(kind("").grammar([replace_parameters(TOOLS[0], wrong)], must=True, many=True))


def replace_parameters(tool: dict[str, Any], parameters: Any) -> dict[str, Any]:
    return tool | {"function": tool["function"] | {"parameters": parameters}}


def test_a_schema_that_refers_to_itself_many_times_is_read_once():
    root = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50 + [{"type": "integer"}]}}}
    assert schema_types({"$ref": "#/$defs/a"}, root) == {"integer"}


def test_a_grammar_of_many_arguments_grows_no_faster_than_their_schema():
    sizes = []
    for n in (20, 200):
        parameters = {"type": "object", "properties": {f"k{i:03}": {"type": "integer"} for i in range(n)}}
        sizes.append(len(GemmaNotation("").grammar([{"function": {"name": "f", "parameters": parameters}}], must=True,
        many=False).lark))
    assert sizes[1] < 13 * sizes[0]
