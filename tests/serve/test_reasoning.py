"""Thoughts are a part of their own: of whole answers and of streams, with structured output and calls behind them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serve.conftest import Says, inside, listening, serving

from argosy.core.errors import BadInput
from argosy.data.chat.template import render
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.infer.lm import LM
from argosy.infer.tools.grammar import Grammars, Structure, grammar_masks, read_structure
from argosy.infer.tools.notations.hermes import HermesNotation
from argosy.serve.app import App
from argosy.serve.response.choice import ChoicePiece, ScoredToken
from argosy.serve.response.parsing import CompletionFormat, CompletionReader
from argosy.serve.response.reasoning import Start, ThoughtSplitter, after_thoughts, parser_of, thinks, thought_start
from argosy.serve.service import Service

# As Qwen 3: the model opens its thoughts itself, and a switch writes an empty pair into the prompt.
QWEN = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{% if false %}<tool_call>{% endif %}{% if add_generation_prompt %}"
    "<assistant>\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As the later DeepSeek R1 and Qwen 3 Thinking: the prompt opens the thoughts.
OPENED = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}<assistant><think>\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
BARE = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TALK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def with_template(lm: LM, template: str) -> LM:
    return LM(lm.config, lm.module, ByteTokenizer(TokenizerConfig(templates={"default": template})))


@pytest.fixture(scope="module")
def qwen(lm: LM) -> Iterator[Service]:
    with serving(with_template(lm, QWEN), kind=Says) as service:
        yield service


@pytest.fixture(scope="module")
def opened(lm: LM) -> Iterator[Service]:
    with serving(with_template(lm, OPENED), kind=Says) as service:
        yield service


def say(service: Service, text: str, status: int = 200, **body: Any) -> dict[str, Any]:
    """The whole response of a model that says this."""
    front: Any = service.front
    front.said = text

    async def go(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/chat/completions", json=TALK | body)

    answer = inside(App(service).asgi, go)
    assert answer.status_code == status, answer.text
    return answer.json()


# ---------------------------------------------------------------- splitting


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    "start, text, thought, answer",
    [
        ("open", "<think>\nhm\n\nwell\n</think>\n\nHello\n", "hm\n\nwell", "Hello\n"),
        ("open", "\n <think>hm</think>Hello", "hm", "Hello"),
        ("open", "Hello <think>x</think>", "", "Hello <think>x</think>"),
        ("open", "\n\nHello", "", "\n\nHello"),
        ("open", "<thin", "", "<thin"),
        ("open", "<think>\n\n</think>\n\nHello", "", "Hello"),
        ("open", "<think>cut </thi", "cut </thi", ""),
        ("open", "<think>cut\n", "cut", ""),
        ("open", "", "", ""),
        ("inside", "hm\n</think>\n\nHello </think>", "hm", "Hello </think>"),
        ("inside", "<think>\nagain</think>Hello", "again", "Hello"),
        ("inside", "never closed < b", "never closed < b", ""),
        ("after", "\nHello <think>", "", "\nHello <think>"),
    ],
)
def test_thoughts_are_split_off_however_the_text_is_cut(start: Start, text: str, thought: str, answer: str, size: int):
    thoughts = ThoughtSplitter(start)
    parts = [thoughts.push(text[i : i + size]) for i in range(0, len(text), size)] + [thoughts.end()]
    assert "".join(part[0] for part in parts) == thought
    assert "".join(part[1] for part in parts) == answer


def test_thoughts_are_not_held_back():
    thoughts = ThoughtSplitter("inside")
    assert thoughts.push("Let me ") == ("Let me ", "")
    assert thoughts.push("see\n") == ("see", "")
    assert thoughts.push("that</") == ("\nthat", "")
    assert thoughts.push("b>") == ("</b>", "")


def test_tokens_of_thoughts_are_counted_and_those_of_the_answer_scored():
    reader = CompletionReader(CompletionFormat(start="open"))
    for i, text in enumerate(("<think>", "a", "b", "</think>", "\n\n", "c")):
        reader.push(ChoicePiece(text, [ScoredToken(i, 0.0)]))
    reader.push(ChoicePiece("", [ScoredToken(6, 0.0)], "stop"))
    assert (reader.thinking, [token.token for token in reader.tokens]) == (4, [4, 5, 6])
    # Tokens that might have begun a thought belong to the answer after all.
    plain = CompletionReader(CompletionFormat(start="open"))
    for i, text in enumerate(("<th", "ick", "")):
        plain.push(ChoicePiece(text, [ScoredToken(i, 0.0)], "stop" if i == 2 else None))
    assert (plain.thinking, [token.token for token in plain.tokens], plain.text) == (0, [0, 1, 2], "<thick")


# ---------------------------------------------------------------- which answers have thoughts


TEMPLATES = Path(__file__).parents[2] / "../shared/data/chat_templates"


@pytest.mark.parametrize(
    "name, variables, start",
    [
        ("Qwen-Qwen3-0.6B", {}, "open"),
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, "after"),
        ("Qwen3.5-4B", {}, "inside"),
        ("Qwen3.5-4B", {"enable_thinking": False}, "after"),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", {"enable_thinking": True}, "inside"),
        ("HuggingFaceTB-SmolLM3-3B", {}, "open"),
        ("HuggingFaceTB-SmolLM3-3B", {"enable_thinking": False}, "after"),
        ("Qwen-Qwen2.5-7B-Instruct", {}, None),
        ("meta-llama-Llama-3.1-8B-Instruct", {}, None),
    ],
)
def test_the_template_and_its_prompt_say_where_an_answer_starts(name: str, variables: dict[str, Any], start: Start | None):
    path = TEMPLATES / f"{name}.jinja"
    if not path.exists():
        pytest.skip("the published templates are not here")
    template, messages = path.read_text(), [{"role": "user", "content": "What does </think> mean? <think>"}]
    assert thinks("auto", template) == (start is not None)
    assert not thinks("none", template)
    if start is not None:
        text = render(template, messages, {"bos_token": "", "eos_token": ""}, add_generation_prompt=True, **variables)
        tokenizer = ByteTokenizer()
        assert thought_start("auto", tokenizer, tokenizer.encode(text), None) == start
        assert thought_start("deepseek_r1", tokenizer, tokenizer.encode(text), None) == ("inside" if start == "open" else start)


def test_a_message_that_is_continued_says_where_its_answer_starts():
    prompt = ByteTokenizer().encode("<assistant>")
    for content, start in (("<think>a", "inside"), ("<think>a</think>b", "after"), ("b", "after")):
        assert thought_start("auto", ByteTokenizer(), prompt, content) == start


def test_a_mark_that_is_a_special_token_is_no_text():
    class Special(ByteTokenizer):
        def encode(self, text: str, special: bool = False) -> list[int]:
            return [self.eos] if special and text == "</think>" else super().encode(text)

    assert parser_of("auto", Special()) == "none"
    assert parser_of("auto", ByteTokenizer()) == "auto"
    with pytest.raises(BadInput, match="special token"):
        parser_of("qwen3", Special())


# ---------------------------------------------------------------- responses


def test_an_answer_has_its_thoughts_apart_under_both_names(qwen: Service):
    reply = say(qwen, "<think>\nhm\n</think>\n\nHello")
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Hello", "hm", "hm")
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nhm\n</think>")}
    hidden = say(qwen, "<think>\nhm\n</think>\n\nHello", include_reasoning=False)
    assert "reasoning" not in hidden["choices"][0]["message"]
    assert hidden["usage"] == reply["usage"]
    cut = say(qwen, "<think>\nhm\n</think>\n\nHello", max_tokens=10)["choices"][0]
    assert (cut["message"]["content"], cut["message"]["reasoning"], cut["finish_reason"]) == (None, "hm", "length")


def test_thoughts_that_the_prompt_opens_end_with_the_closing_mark(opened: Service):
    message = say(opened, "hm\n</think>\n\nHello")["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Hello", "hm")


def test_a_prompt_that_closes_its_thoughts_is_answered_without(qwen: Service):
    for more in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        message = say(qwen, "Hello", **more)["choices"][0]["message"]
        assert message["content"] == "Hello"
        assert "reasoning" not in message
    # What is written there is what the model says, not what it thinks.
    assert say(qwen, "<think>", reasoning_effort="none")["choices"][0]["message"]["content"] == "<think>"


def test_an_effort_that_a_template_cannot_set_is_refused(opened: Service, lm: LM):
    for effort in ("none", "high"):
        assert say(opened, "", 400, reasoning_effort=effort)["error"]["param"] == "reasoning_effort"
    with serving(with_template(lm, "{{ messages[0].content }}"), kind=Says) as plain:
        assert say(plain, "Hello", reasoning_effort="none")["choices"][0]["message"]["content"] == "Hello"
        assert say(plain, "", 400, reasoning_effort="low")["error"]["param"] == "reasoning_effort"


def test_calls_come_after_the_thoughts(qwen: Service):
    choice = say(qwen, f"<think>a<b</think>\nOk{BARE}", tools=[TOOL])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("a<b", "Ok")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


def test_old_thoughts_reach_the_template_under_either_name(qwen: Service):
    lengths = set()
    for more in ({}, {"reasoning": "hm"}, {"reasoning_content": "hm"}):
        messages = [*TALK["messages"], {"role": "assistant", "content": "x"} | more, *TALK["messages"]]
        lengths.add((bool(more), say(qwen, "", messages=messages)["usage"]["prompt_tokens"]))
    assert len(lengths) == 2


def test_the_official_client_streams_thoughts(qwen: Service):
    front: Any = qwen.front
    front.said = "<think>\nhm, é\n</think>\n\nHello"
    with listening(qwen) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **TALK))
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert "".join(thoughts) == "hm, é"
    assert len(thoughts) > 3
    assert "".join(delta.content or "" for delta in deltas) == "Hello"
    last = max(i for i, delta in enumerate(deltas) if getattr(delta, "reasoning", None))
    assert last < min(i for i, delta in enumerate(deltas) if delta.content)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == len("<think>\nhm, e_\n</think>")


# ---------------------------------------------------------------- structured output


STRICT = TOOL | {"function": TOOL["function"] | {"parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}}}}
FREE_CALLS = HermesNotation(QWEN).grammar([STRICT], must=False, many=True)
MUST_CALL = HermesNotation(QWEN).grammar([STRICT], must=True, many=True)
OBJECT = read_structure({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}})


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(ByteTokenizer(), 258)


def state(grammars: Grammars, structure: Structure, text: str) -> str:
    """The state of an answer in a structure; `refused` if one of its bytes is not allowed."""
    matcher = grammars.get(structure).matcher({ByteTokenizer.eos})
    for byte in text.encode():
        allowed = grammar_masks([matcher])[0][0]
        if not int(allowed[byte // 32]) >> byte % 32 & 1:
            return "refused"
        matcher.push(byte)
    return grammar_masks([matcher])[1][0]


@pytest.mark.parametrize("start, mark", [("inside", ""), ("open", "<think>")])
@pytest.mark.parametrize(
    "structure, right, wrong",
    [
        (OBJECT, '{"a": 1}', '{"b'),
        (read_structure({"regex": "a[0-9]"}), "a1", "b"),
        (read_structure({"choice": ["yes", "no"]}), "yes", "m"),
        (read_structure({"grammar": 'root ::= "x" [0-9] thought\nthought ::= "!"'}), "x1!", "y"),
        (MUST_CALL, CALL, "Wait."),
        (FREE_CALLS, f"Wait.{CALL}", CALL.replace("Rome", "Oslo")),
    ],
)
def test_an_answer_is_free_in_its_thoughts_and_bound_behind_them(
    grammars: Grammars, structure: Structure, right: str, wrong: str, start: Start, mark: str
):
    whole = after_thoughts(structure, start)
    thought = f"{mark}\nhm <b> </thin\n</think>"
    assert state(grammars, whole, thought) != "refused"
    for blank in ("", "\n\n"):
        assert state(grammars, whole, thought + blank + right) in ("accepting", "complete")
        assert state(grammars, whole, thought + blank + wrong) == "refused"
    assert state(grammars, whole, right) == ("open" if start == "inside" else state(grammars, structure, right))
    assert after_thoughts(structure, "after") is structure


def test_a_request_is_bound_behind_its_thoughts(grammars: Grammars, qwen: Service):
    from argosy.serve.openai.chat import read_chat
    from argosy.serve.openai.fields import ChatFields

    body = TALK | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}}
    binding = read_chat(qwen, ChatFields.of(body)).wanted
    assert binding is not None
    assert state(grammars, binding.structure, "<think>hm</think>\n1") == "complete"
    switched_off = read_chat(qwen, ChatFields.of(body | {"reasoning_effort": "none"})).wanted
    assert switched_off is not None
    assert state(grammars, switched_off.structure, "<") == "refused"
