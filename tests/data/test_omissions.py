"""What published templates leave out of a conversation is refused by name; what they write is not, whatever they make of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import DATA, shared

from argosy.core.errors import BadInput
from argosy.data.chat.omissions import Marks, Omitted, check_complete, with_known_roles
from argosy.data.chat.template import render

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "Now.", "parameters": {"type": "object", "properties": {}}}}
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM, DEVELOPER = {"role": "system", "content": "a"}, {"role": "developer", "content": "a"}
CALL: Any = {
    "role": "assistant", "content": "",
    "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": {}}}],
}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "f", "content": "b"}
# Templates that know tools, as their models' cards say.
WITH_TOOLS = {
    "Kimi-K2-Instruct", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3.5-4B",
    "google-gemma-4-31B-it", "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407", "openai-gpt-oss-120b",
}  # fmt: skip
NAMES = sorted(path.stem for path in (DATA / "chat_templates").glob("*.jinja")) or ["missing"]


def template_of(name: str) -> str:
    return Path(shared(f"chat_templates/{name}.jinja")).read_text(encoding="utf-8")


def check_prompt(template: str, messages: Sequence[Mapping[str, Any]], tools: Any = None, documents: Any = None) -> str:
    """A prompt with all that it was made from."""

    def rendered(**values: Any) -> str:
        return render(template, special=SPECIAL, add_generation_prompt=True, **values)

    text = rendered(messages=messages, tools=tools, documents=documents)
    check_complete(rendered, text, template, messages, tools, documents)
    return text


@pytest.mark.parametrize("name", NAMES)
def test_tools_are_in_the_prompt_or_refused(name: str):
    if name in WITH_TOOLS:
        assert "f" in check_prompt(template_of(name), [USER], [TOOL])
        return
    with pytest.raises(Omitted, match=r"leaves out the tool `f`") as error:
        check_prompt(template_of(name), [USER], [TOOL])
    assert error.value.param == "tools"


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_of_two_is_refused_by_no_template(name: str):
    check_prompt(template_of(name), [USER, ANSWER, USER])
    check_prompt(template_of(name), [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n b "}, USER])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("messages", [[SYSTEM, USER], [USER, SYSTEM, USER], [DEVELOPER, USER]], ids=["first", "later", "developer"])
def test_instructions_are_in_the_prompt_or_refused(name: str, messages: list[dict[str, str]]):
    """By hand: the text is a word that nothing else has."""
    template, word = template_of(name), "Zirkumflex"
    messages_of_case = with_known_roles([m | {"content": word if m["role"] != "user" else "a"} for m in messages], template)
    try:
        text = check_prompt(template, messages_of_case)
    except BadInput:
        # A text that is found elsewhere in the prompt is no less missing.
        with pytest.raises(BadInput, match=r"leaves out a message|refuses these messages"):
            check_prompt(template, with_known_roles(messages, template))
    else:
        assert word in text
        check_prompt(template, with_known_roles(messages, template))


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_results_are_in_the_prompt_or_refused(name: str):
    try:
        check_prompt(template_of(name), [USER, CALL, RESULT], [TOOL] if name in WITH_TOOLS else None)
    except BadInput:
        assert name not in WITH_TOOLS


def test_a_developers_message_is_the_systems_for_templates_without_that_role():
    template = template_of("Qwen-Qwen2.5-7B-Instruct")
    assert with_known_roles([DEVELOPER, USER], template) == [SYSTEM, USER]
    assert with_known_roles([SYSTEM, DEVELOPER, USER], template) == [{"role": "system", "content": "a\n\na"}, USER]
    assert with_known_roles([USER, DEVELOPER], template) == [USER, SYSTEM]
    assert with_known_roles([SYSTEM, SYSTEM, USER], template) == [SYSTEM, SYSTEM, USER], "as they were sent"
    assert with_known_roles([DEVELOPER, USER], template_of("openai-gpt-oss-120b")) == [DEVELOPER, USER]


def test_documents_and_what_stands_beside_calls():
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    with pytest.raises(Omitted, match=r"leaves out the documents") as error:
        check_prompt(plain, [USER], documents=[{"title": "t", "text": "u"}])
    assert error.value.param == "documents"
    check_prompt(plain + "{% for d in documents %}{{ d.title }}{% endfor %}", [USER], documents=[{"title": "t", "text": "u"}])
    with pytest.raises(Omitted, match=r"leaves out the call of `f`"):
        check_prompt(plain, [USER, CALL])
    with pytest.raises(Omitted, match="a message of role `tool`"):
        check_prompt("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}", [USER, RESULT])


def test_a_mark_is_in_no_text():
    marks = Marks("Kq7 and Kq7q")
    assert marks.prefix == "Kq7qq"
    assert (marks(" ", "it", "messages"), marks(3, "it", "messages"), marks.known) == (" ", 3, [])


def test_the_name_and_the_refusal_of_a_message_are_in_the_prompt_or_refused():
    """Kimi's template writes names; it is the only one of these that does."""
    messages = [USER | {"name": "Zirkumflex"}]
    assert "Zirkumflex" in check_prompt(template_of("Kimi-K2-Instruct"), messages)
    with pytest.raises(Omitted, match="leaves out the `name` of a message of role `user`"):
        check_prompt(template_of("Qwen-Qwen3-0.6B"), messages)
    refused = with_known_roles([USER, {"role": "assistant", "content": None, "refusal": "Zirkumflex"}, USER], "")
    assert "Zirkumflex" in check_prompt(template_of("Qwen-Qwen3-0.6B"), refused)
    with pytest.raises(Omitted, match="leaves out the `refusal` of a message of role `assistant`"):
        check_prompt(template_of("Qwen-Qwen3-0.6B"), [USER, ANSWER | {"refusal": "no"}, USER])
    check_prompt(template_of("Qwen-Qwen3-0.6B"), [USER | {"name": None}, ANSWER | {"refusal": None}, USER])
