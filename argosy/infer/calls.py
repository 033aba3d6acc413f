"""Calls of tools in the text of an answer, in the notations that most templates teach.

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number, after text (Hermes, Qwen)
    llama3    {"name": "f", "parameters": {...}}, separated by semicolons, and nothing else (Llama 3)
    channels  one message of the channel `commentary`, after thoughts (gpt-oss): `infer.channels` reads it

Text that could be a call is held back until the answer ends. What does not parse is text.

A grammar makes the model call a tool, or makes the arguments of its calls match the tools' schemas.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from argosy.infer import channels
from argosy.infer.grammar import Structure, json_rule

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ANYTHING = Structure("grammar", "start: /(?s:.*)/")
_CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)


def notation_of(template: str) -> str | None:
    """The notation that a chat template teaches; None: another one, and calls stay text."""
    if channels.written_in(template):
        return "channels"
    if OPEN in template:
        return "hermes"
    return "llama3" if '"parameters"' in template and "ipython" in template else None


class Calls:
    """The calls of one answer, whose text comes in pieces."""

    def __init__(self, notation: str):
        self.notation = notation
        self._held = ""
        self._holds = False

    def push(self, text: str) -> str:
        """The text that is certainly part of no call."""
        self._held += text
        if not self._holds:
            self._holds, free = self._split()
            text, self._held = self._held[:free], self._held[free:]
            return text
        return ""

    def _split(self) -> tuple[bool, int]:
        """Whether a call has begun, and the characters before it, or before what may become its beginning."""
        held = self._held
        if self.notation == "llama3":
            begins = held.lstrip()[:1]
            # Once other text has come, an answer is no call: nothing is held from then on.
            self.notation = self.notation if begins in ("", "{") else "none"
            return begins == "{", 0 if begins in ("", "{") else len(held)
        if self.notation == "none":
            return False, len(held)
        if (at := held.find(OPEN)) >= 0:
            return True, at
        return False, len(held) - max((n for n in range(1, len(OPEN)) if held.endswith(OPEN[:n])), default=0)

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left: text, and calls as the API writes them."""
        held, self._held = self._held, ""
        try:
            found = _hermes(held) if self.notation == "hermes" else _llama3(held)
        except (ValueError, RecursionError):
            return held, []
        if not self._holds or not found:
            return held, []
        text = _CALL.sub("", held).strip() if self.notation == "hermes" else ""
        return text, [written(one) for one in found]


# ---------------------------------------------------------------- grammars


def grammar_of(
    notation: str, tools: Sequence[Mapping[str, Any]], *, must: bool, many: bool, answer: Structure | None = None
) -> Structure:
    """The answers that call these tools, with arguments that match their schemas.

    Args:
        must: an answer is a call and nothing else; otherwise text, then calls if any.
        many: calls may follow each other. In the notations of Llama 3 and of gpt-oss there is one.
        answer: what an answer matches that is no call, in the place of text.

    Raises:
        BadInput: the parameters of a tool are no schema.
    """
    functions = [tool["function"] for tool in tools]
    if notation == "channels":
        schemas = [(function["name"], _parameters(function)) for function in functions]
        return replace(channels.framed(answer or ANYTHING, schemas, must=must), kind="tools")
    rules = [json_rule(f"arguments_{i}", _parameters(function)) for i, function in enumerate(functions)]
    for i, function in enumerate(functions):
        field = "arguments" if notation == "hermes" else "parameters"
        opening = json.dumps(f'{{"name": "{function["name"]}", "{field}": ')
        rules.append(f'call_{i}: {opening} arguments_{i} "}}"')
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    rules += _hermes_rules(many) if notation == "hermes" else _LLAMA3_RULES
    if must:
        rules.append("start: calls")
    elif answer is not None:
        rules += ["start: answer | calls", f"answer: {answer.lark.removeprefix('start: ')}"]
    else:
        rules.append("start: TEXT | after_text")
    return Structure("tools", "\n".join(rules))


def _hermes_rules(many: bool) -> list[str]:
    closed = json.dumps(f"\n{CLOSE}")
    more = '("\\n" one)*' if many else ""
    return [
        f"one: {json.dumps(f'{OPEN}{chr(10)}')} call {closed}",
        f"calls: one {more}",
        f"TEXT: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/",
        f"opened[lazy]: /(?s:.*){OPEN}/",
        f'after_text: opened "\\n" call {closed} {more}',
    ]


# Text that begins as a call does is one.
_LLAMA3_RULES = ["calls: call", "after_text: calls", r"TEXT: /\s*([^{\s](?s:.*))?/"]


def _parameters(function: Mapping[str, Any]) -> Any:
    """The schema of a function's arguments. One without `parameters` has none, as OpenAI documents it."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return nothing if function.get("parameters") is None else function["parameters"]


# ---------------------------------------------------------------- reading


def _check(call: Any) -> Mapping[str, Any]:
    """The call, if it is one.

    Raises:
        ValueError: no object with a name.
    """
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("no call")
    return call


def _hermes(text: str) -> list[Mapping[str, Any]]:
    return [_check(json.loads(inside)) for inside in _CALL.findall(text)]


def _llama3(text: str) -> list[Mapping[str, Any]]:
    found, decoder = [], json.JSONDecoder()
    while text := text.lstrip("; \n"):
        one, end = decoder.raw_decode(text)
        found.append(_check(one))
        text = text[end:]
    return found


def written(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as the API writes it, with an id of its own."""
    arguments = call.get("arguments", call.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call["name"], "arguments": text},
    }
