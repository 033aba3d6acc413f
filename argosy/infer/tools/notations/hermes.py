"""The notation of tool calls of Hermes and Qwen.

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

Any number of calls follows text. The marks are ordinary tokens in Qwen's vocabularies, and special tokens in others.
"""

import json
from collections.abc import Sequence

from argosy.infer.tools.calls import CallScanner, MarkedNotation, ToolCall, call_names

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesNotation(MarkedNotation):
    title, names, openings = "Hermes", {OPEN: "\ufdd0", CLOSE: "\ufdd1"}, (OPEN,)

    @classmethod
    def taught_by(cls, template: str) -> bool:
        # GLM's calls have the same mark, and other contents.
        return OPEN in template and "<arg_key>" not in template

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        calls, content, scan = [], "", CallScanner(text)
        opening, closing = self.mark(OPEN), self.mark(CLOSE)
        while scan.takes(opening):
            scan.blanks()
            calls.append(self.call(scan))
            scan.blanks()
            if not (scan.takes(closing) or scan.at_end()):
                raise ValueError("a call that does not end")
            content += scan.until(opening)
        return content.strip(), calls

    def call(self, scan: CallScanner) -> ToolCall:
        """Consumes and returns the call at this position.

        Raises:
            ValueError: there is no call.
        """
        return call_names(scan.json()[0])

    def opened(self, place: int, name: str) -> str:
        """A call of the function `name`, as it is written in a grammar. Its arguments are the rule `arguments_{place}`."""
        opening = f'{{"name": "{name}", "arguments": '
        return f'{json.dumps(opening)} arguments_{place} "}}"'

    def rest(self, names: Sequence[str], many: bool) -> list[str]:
        closed = f'"\\n" {self.token(CLOSE)}'
        more = f'("\\n" {self.token(OPEN)} "\\n" call {closed})*' if many else ""
        rules = [f"call_{i}: {self.opened(i, name)}" for i, name in enumerate(names)]
        return [*rules, "call: " + " | ".join(f"call_{i}" for i in range(len(names))), f'rest: "\\n" call {closed} {more}']
