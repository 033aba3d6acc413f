"""The notation of tool calls of gpt-oss: a message of a channel, which ends the completion. `infer.tools.channels` parses reasoning,
text and calls."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from argosy.infer.tools import channels
from argosy.infer.tools.calls import CallDelta, CallNotation, Message, ToolCall, parameters_schema
from argosy.infer.tools.grammar import Structure

ANYTHING = Structure("grammar", "start: /(?s:.*)/")


class GptOssNotation(CallNotation):
    title, names, needs_marks = "gpt-oss", channels.MARKS, True

    @classmethod
    def taught_by(cls, template: str) -> bool:
        return channels.uses_channels(template)

    def read(self, text: str) -> CallDelta:
        reader = channels.ChannelParser(calls=True)
        parts = [reader.push(text), reader.end()]
        thought, content = ("".join(each) for each in zip(*parts))
        return CallDelta(content, [ToolCall(*call) for call in reader.calls], thought)

    @classmethod
    def messages(cls, messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
        return channels.with_thinking(messages)

    @classmethod
    def described(cls, tools: Sequence[Message] | None) -> list[dict[str, Any]] | None:
        return channels.with_descriptions(tools)

    def grammar(self, tools: Sequence[Message], *, must: bool, many: bool, answer: Structure | None = None) -> Structure:
        functions = [tool["function"] for tool in tools]
        schemas = [(function["name"], parameters_schema(function)) for function in functions]
        return replace(channels.framed_grammar(answer or ANYTHING, schemas, must=must), kind="tools")
