"""Which published chat templates can be continued turn by turn, and the tokens between turns against whole renders by transformers."""

import json
import re
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from helpers import DATA
from rl.talking import CHAT

from argosy.core.errors import BadInput
from argosy.data.chat.template import render
from argosy.rl.rollouts.episodes.turns import HistoryRewritten, check_turn_template, turn_end

# That of the renders by transformers.
CLOCK = datetime(2025, 1, 2, 3, 4, 5)
FOLDER = DATA / "chat_templates"
NAMES = re.compile(r"<\|[a-zA-Z_]+\|>|</s>|<EOS>|<end_of_turn>|<turn\|>|<｜[^｜]*｜>")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}, "required": ["a"]}}}]  # fmt: skip
ASKED = [{"role": "user", "content": "What is it?"}]
NOT_WRITTEN, THOUGHTS, BEFORE, REFUSES = "does not write", "drops the thoughts", "changes what came before", "refuses these messages"
# What is said of replies of the user, and of tools; the variable `enable_thinking` false after the slash.
FOUND = {
    "Qwen-Qwen2.5-7B-Instruct": (None, None),
    "Qwen-Qwen3-0.6B": (THOUGHTS, None),
    "Qwen-Qwen3-0.6B/": (BEFORE, BEFORE),
    "Qwen3.5-4B": (BEFORE, None),
    "SmolLM2-135M-Instruct": (None, NOT_WRITTEN),
    "HuggingFaceTB-SmolLM3-3B": (None, NOT_WRITTEN),
    "Kimi-K2-Instruct": (None, None),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (BEFORE, BEFORE),
    "google-gemma-2-2b-it": (None, REFUSES),
    "google-gemma-4-31B-it": (BEFORE, BEFORE),
    "meta-llama-Llama-3.1-8B-Instruct": (None, None),
    "meta-llama-Llama-3.2-3B-Instruct": (None, None),
    "mistralai-Mistral-Nemo-Instruct-2407": (None, None),
    "openai-gpt-oss-120b": (THOUGHTS, None),
}
# Writes the system's message in front of the last one of the user, so a conversation with one cannot be continued.
MOVING = {"mistralai-Mistral-Nemo-Instruct-2407"}
there = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is absent")


@cache
def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def render_chat(name: str, messages: Any, tools: Any = None, **variables: Any) -> str:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    variables_of_turn: dict[str, Any] = {"add_generation_prompt": True, "now": CLOCK}
    return render(template(name) if name != "own" else CHAT, messages, special, tools=tools, **variables_of_turn, **variables)


@there
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", FOUND)
def test_templates_that_rewrite_turns_are_refused(name: str, tools: Any):
    family, off = name.rstrip("/"), {"enable_thinking": False} if name.endswith("/") else {}
    problem = FOUND[name][tools is not None]
    check = lambda: check_turn_template(  # noqa: E731
        lambda messages: render_chat(family, messages, tools, **off), ASKED, "tool" if tools else "user", tools, template(family), NAMES
    )
    if problem is None:
        return check()
    with pytest.raises((HistoryRewritten, BadInput), match=problem):
        check()


@there
def test_every_template_of_the_shared_data_is_known():
    assert {path.stem for path in FOLDER.glob("*.jinja")} == {name.rstrip("/") for name in FOUND}


@there
@pytest.mark.parametrize("name", [name for name, (user, _) in FOUND.items() if user is None])
def test_what_follows_a_turn_is_the_rest_of_the_whole_conversation(name: str):
    """Against renders by transformers: the turns of `system_multi`, one after the other."""
    golden = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))
    conversation, whole = golden["conversations"]["system_multi"], golden["renders"].get(name, {}).get("system_multi+gen")
    messages = conversation["messages"]
    if whole is None or not isinstance(whole, str):
        pytest.skip("transformers did not render it")
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert places
    assert messages[-1]["role"] == "user"
    last = places[-1]
    special = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
    before = render(template(name), messages[:last], special, add_generation_prompt=True, now=CLOCK)
    after = render(template(name), messages, special, add_generation_prompt=True, now=CLOCK)
    if name in MOVING:
        with pytest.raises(HistoryRewritten, match="Answer briefly"):
            turn_end(before, after, ["<EOS>"])
        return
    end, rest = turn_end(before, after, NAMES.findall(after[len(before) :]))
    assert whole == after, "transformers' render"
    turn = after[len(before) : len(after) - len(rest)]
    assert turn.strip().startswith(messages[last]["content"].strip())
    assert turn.endswith(end)
    assert messages[-1]["content"].strip() in rest


def test_a_turn_ends_at_its_own_end():
    before = render_chat("own", ASKED)
    after = render_chat("own", [*ASKED, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])
    assert turn_end(before, after, ["<eos>", "</s>"]) == ("<eos>", "\n<bos>user\nb<eos>\n<bos>assistant\n")
    with pytest.raises(HistoryRewritten, match="none of its end tokens"):
        turn_end(before, after, ["</s>"])
    with pytest.raises(HistoryRewritten, match=r"a' becomes .*assistant.nb<eos>"):
        turn_end(before + "a", after.replace("\na<eos>", "\nb<eos>"), ["<eos>"])
