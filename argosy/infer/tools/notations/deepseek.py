"""The notation of tool calls of DeepSeek's models (arXiv 2412.19437 and 2501.12948), in a section after text.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f        V3, R1: the arguments in a block of code, and a
    ```json                                                              line break between calls
    {...}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>        V3.1

Both forms are read, whichever the template writes; a grammar forces the template's form.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from argosy.infer.tools.calls import CallScanner, Message, ToolCall
from argosy.infer.tools.notations.sectioned import SectionedNotation

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
BLOCK = "```json"
# This occurs in templates that expect the arguments of a call as a text, as in OpenAI's API. Others expect an object.
JOINED = "['arguments'] +"
_NAME, _BLOCK = re.compile(r"[\w.-]+"), re.compile(rf"([\w.-]+)\s*{BLOCK}\s*")


class DeepSeekNotation(SectionedNotation):
    title, section, single, openings = "DeepSeek", (OPEN, CLOSE), (BEGIN, END), (OPEN, BEGIN)
    between = '("\\n")? '
    names: ClassVar = {OPEN: "\ufdd0", CLOSE: "\ufdd1", BEGIN: "\ufdd2", SEPARATOR: "\ufdd3", END: "\ufdd4"}

    @classmethod
    def taught_by(cls, template: str) -> bool:
        return BEGIN in template and SEPARATOR in template

    def call(self, scan: CallScanner) -> ToolCall:
        name = scan.match(_NAME)[0]
        scan.blanks()
        if not scan.takes(self.mark(SEPARATOR)):
            raise ValueError("a call without arguments")
        scan.blanks()
        if _BLOCK.match(scan.text, scan.at) is None:
            return ToolCall(name, scan.json()[1])
        # The text before the separator was the type.
        tool_call = ToolCall(scan.match(_BLOCK)[1], scan.json()[1])
        scan.blanks()
        if not scan.takes("```"):
            raise ValueError("a block that does not end")
        return tool_call

    @classmethod
    def messages(cls, messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
        turns = []
        for message in messages:
            turn = dict(message)
            if calls := message.get("tool_calls"):
                # An empty text behind its calls would be a completion of its own.
                turn["content"] = message.get("content") or None
                turn["tool_calls"] = [_as_text(call) for call in calls] if JOINED in template else calls
            turns.append(turn)
        return turns

    def opened(self, place: int, name: str) -> str:
        if BLOCK not in self.template:
            return f"{json.dumps(name)} {self.token(SEPARATOR)} arguments_{place}"
        before, after = json.dumps(f"{name}\n{BLOCK}\n"), json.dumps("\n```")
        return f'"function" {self.token(SEPARATOR)} {before} arguments_{place} {after}'


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a call, with its arguments as the text of a JSON object."""
    function = call["function"]
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
