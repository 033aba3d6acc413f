"""The notation of tool calls of Kimi K2 (arXiv 2507.20534).

    <|tool_calls_section_begin|>
        <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>    any number
    <|tool_calls_section_end|>

Calls follow text, and have none of the line breaks above. The number counts all calls of a conversation, and Moonshot's guide requires
such ids in all messages. The first template numbers calls itself, ignoring the ids in messages, and gives results the ids of calls in
order. Later templates write the ids in messages. So here all calls are numbered, including those of other models, and results are put
in the order of their calls.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from argosy.infer.tools.calls import CallScanner, Message, ToolCall
from argosy.infer.tools.notations.sectioned import SectionedNotation

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEADER = re.compile(r"(?:functions\.)?([\w.-]+)(?::\d+)?")


class KimiNotation(SectionedNotation):
    title, section, single, openings = "Kimi K2", (OPEN, CLOSE), (BEGIN, END), (OPEN, BEGIN)
    names: ClassVar = {OPEN: "\ufdd0", CLOSE: "\ufdd1", BEGIN: "\ufdd2", ARGUMENTS: "\ufdd3", END: "\ufdd4"}

    @classmethod
    def taught_by(cls, template: str) -> bool:
        return BEGIN in template and ARGUMENTS in template

    # ---------------------------------------------------------------- reading

    def call(self, scan: CallScanner) -> ToolCall:
        name = scan.match(_HEADER)[1]
        scan.blanks()
        if not scan.takes(self.mark(ARGUMENTS)):
            raise ValueError("a call without arguments")
        scan.blanks()
        return ToolCall(name, scan.json()[1])

    # ---------------------------------------------------------------- ids

    def numbered(self, name: str, number: int) -> str | None:
        return f"functions.{name}:{number}"

    @classmethod
    def messages(cls, messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        # The calls whose results may follow: the id in the messages -> the new id, in the order of the calls.
        names: dict[str, str] = {}
        number = 0
        for message in messages:
            turn = dict(message)
            if message.get("role") == "tool":
                results.append(turn)
                continue
            turns += _sorted(results, names)
            results = []
            if calls := message.get("tool_calls"):
                ids = [f"functions.{call['function'].get('name')}:{number + i}" for i, call in enumerate(calls)]
                turn["tool_calls"] = [dict(call) | {"id": call_id} for call, call_id in zip(calls, ids)]
                names = {str(call.get("id")): call_id for call, call_id in zip(calls, ids)}
                number += len(calls)
            turns.append(turn)
        return turns + _sorted(results, names)

    # ---------------------------------------------------------------- grammars

    def opened(self, place: int, name: str) -> str:
        return f"{json.dumps(f'functions.{name}:')} NUMBER {self.token(ARGUMENTS)} arguments_{place}"

    def rest(self, names: Sequence[str], many: bool) -> list[str]:
        return [*super().rest(names, many), "NUMBER: /[0-9]{1,4}/"]


def _sorted(results: Sequence[dict[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Sorts results in the order of their calls, and gives them the calls' new ids. Results without a call come last, unchanged."""
    places = {call_id: i for i, call_id in enumerate(names)}
    ordered = sorted(results, key=lambda result: places.get(str(result.get("tool_call_id")), len(places)))
    return [
        result | ({"tool_call_id": names[result_id]} if (result_id := str(result.get("tool_call_id"))) in names else {})
        for result in ordered
    ]
