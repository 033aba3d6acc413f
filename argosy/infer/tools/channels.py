"""Channels of gpt-oss, in OpenAI's Harmony format (https://github.com/openai/harmony, docs/format.md).

A completion is a sequence of messages. Each has a header, which names its channel, then its text, then a special token that ends it.

    <|channel|>analysis<|message|>...<|end|>                                             reasoning
    <|start|>assistant<|channel|>final<|message|>...<|return|>                           the final answer
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>    a tool call

The prompt ends with `<|start|>assistant`. The marks are special tokens, which decode to nothing. So here each mark is decoded to a
character that Unicode will never assign, and `<|end|>` spelled in ordinary tokens remains text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from argosy.infer.tools.calls import special_token
from argosy.infer.tools.grammar import Structure, json_rule

START, END, MESSAGE, CHANNEL, CONSTRAIN = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
# <|return|> and <|call|> end the whole completion. They are parsed only if it continues nevertheless (`ignore_eos`).
MARKS = {
    "<|start|>": START,
    "<|end|>": END,
    "<|message|>": MESSAGE,
    "<|channel|>": CHANNEL,
    "<|constrain|>": CONSTRAIN,
    "<|return|>": END,
    "<|call|>": END,
}
# The most characters of a header. Longer text without a mark is no header.
LONGEST_HEADER = 256
_PARTS = re.compile(f"([{''.join(dict.fromkeys(MARKS.values()))}])")
_RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]+)")
_CHANNEL = re.compile(rf"{CHANNEL}\s*(\w+)")


def channel_marks(tokenizer: Any) -> dict[int, str]:
    """The ids of the format's special tokens, each with the character that it is decoded to. Empty if the tokenizer lacks one."""
    marks = {special_token(tokenizer, name): mark for name, mark in MARKS.items()}
    return {} if None in marks else {token: mark for token, mark in marks.items() if token is not None}


def uses_channels(template: str) -> bool:
    """Whether a chat template writes messages in this format."""
    return "<|channel|>" in template and "<|message|>" in template


def with_thinking(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies messages, with their reasoning also under `thinking`, the name that the template of gpt-oss reads."""
    return [dict(m) | ({"thinking": m["reasoning_content"]} if m.get("reasoning_content") else {}) for m in messages]


def with_descriptions(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Copies tools, adding an empty description where there is none. OpenAI's API does not require one, but gpt-oss's template does."""
    if tools is None:
        return None
    return [dict(tool) | {"function": {"description": "", **tool["function"]}} for tool in tools]


class ChannelParser:
    """Splits a completion into reasoning, text and tool calls while its text, with characters for marks, arrives in pieces.

    over: whether a message other than reasoning has begun.
    any: whether the completion has reasoning.
    calls: the calls so far, as (name, arguments as text).

    Args:
        calls: whether tools were offered. If not, the arguments of a call are returned as text.
        continued: whether the completion continues a final message instead of beginning with a header.
    """

    def __init__(self, *, calls: bool = False, continued: bool = False):
        self.over, self.any = continued, False
        self.calls: list[tuple[str, str]] = []
        self._offered = calls
        # The current message: the header while it is being read, else None; then the kind; for a call, its name and arguments so far.
        self._header: str | None = None if continued else ""
        self._kind, self._name, self._arguments = "text", "", ""
        # Whether a message of each kind was written before. A second message of a kind begins on a new line.
        self._wrote = {"thought": False, "text": False}
        self._fresh = False

    def push(self, text: str) -> tuple[str, str]:
        """Adds a piece of text. Returns the reasoning and the text in it."""
        pieces = {"thought": "", "text": ""}
        for part in _PARTS.split(text):
            if not part:
                continue
            if part in (START, END):
                self._close(pieces)
            elif self._header is None and part in (MESSAGE, CHANNEL, CONSTRAIN):
                # A header begins without `<|start|>`.
                self._close(pieces)
                self._header = part
            elif self._header is None:
                self._write(part, pieces)
            elif part == MESSAGE:
                self._open()
            else:
                header = self._header = self._header + part
                if len(header) > LONGEST_HEADER:
                    self._header, self._kind, self.over = None, "text", True
                    self._write(_PARTS.sub("", header), pieces)
        return pieces["thought"], pieces["text"]

    def end(self) -> tuple[str, str]:
        """Ends the completion. Returns the rest of its reasoning and of its text."""
        pieces = {"thought": "", "text": ""}
        self._close(pieces)
        return pieces["thought"], pieces["text"]

    def _open(self) -> None:
        header, self._header = self._header or "", None
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and self._offered:
            self._kind, self._name, self._arguments = "call", recipient[1], ""
        else:
            self._kind = "thought" if channel and channel[1] == "analysis" else "text"
        self.any |= self._kind == "thought"
        self.over |= self._kind != "thought"
        self._fresh = True

    def _write(self, text: str, pieces: dict[str, str]) -> None:
        if self._kind == "call":
            self._arguments += text
            return
        if self._fresh and self._wrote[self._kind]:
            text = "\n" + text
        self._fresh, self._wrote[self._kind] = False, True
        pieces[self._kind] += text

    def _close(self, pieces: dict[str, str]) -> None:
        """Ends the current message. An unfinished header without any mark was no header, so it is written as text."""
        if self._header is not None:
            text, self._header = self._header, ""
            if not _PARTS.search(text) and text.strip() not in ("", "assistant"):
                self._kind, self.over = "text", True
                self._write(text, pieces)
            return
        if self._kind == "call":
            try:
                json.loads(self._arguments)
                self.calls.append((self._name, self._arguments))
            except (ValueError, RecursionError):
                self._kind = "text"
                self._write(self._arguments, pieces)
        self._header = ""


def framed_grammar(answer: Structure, tools: Sequence[tuple[str, Any]] = (), *, must: bool = False) -> Structure:
    """The grammar of reasoning followed by a final message or by one tool call.

    Args:
        answer: the grammar of the final message.
        tools: (name, schema of the arguments) of each tool that may be called.
        must: whether only a call may follow.

    Raises:
        BadInput: a schema of arguments is no JSON schema.
    """
    ends = [] if must else ["final"]
    rules = [
        'analysis: <|channel|> "analysis" <|message|> TEXT <|end|> <|start|> "assistant"',
        'final: <|channel|> "final" <|message|> answer',
        f"answer: %lark {{\n{answer.lark}\n}}",
        "TEXT: /(?s:.*)/",
    ]
    for i, (name, schema) in enumerate(tools):
        ends.append(f"call_{i}")
        header = f'<|channel|> {json.dumps(f"commentary to=functions.{name} ")} <|constrain|> "json" <|message|>'
        rules += [f"call_{i}: {header} arguments_{i}", json_rule(f"arguments_{i}", schema)]
    return Structure(answer.kind, "\n".join([f"start: analysis* ({' | '.join(ends)})", *rules]), special=True)
