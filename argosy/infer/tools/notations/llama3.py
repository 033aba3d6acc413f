"""The notation of tool calls of Llama 3.

    {"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}

Calls have no marks. So a completion that begins with other text has no calls, and an object without `parameters` or `arguments` is no
call. A grammar allows one call.
"""

import json
import re
from collections.abc import Sequence

from argosy.infer.tools.calls import CallScanner, TextNotation, ToolCall, call_names

_BETWEEN = re.compile("[; \n]*")


class Llama3Notation(TextNotation):
    title, like_json = "Llama 3", True

    @classmethod
    def taught_by(cls, template: str) -> bool:
        return '"parameters"' in template and "ipython" in template

    def split(self, text: str, first: bool) -> tuple[bool, int]:
        begins = text.lstrip()[:1]
        return (True, 0) if first and begins == "{" else (False, 0 if first and not begins else len(text))

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        calls, scan = [], CallScanner(text)
        while True:
            scan.match(_BETWEEN)
            if scan.at_end():
                return "", calls
            calls.append(call_names(scan.json()[0], marked=False))

    def rules(self, names: Sequence[str], many: bool) -> list[str]:
        rules = []
        for i, name in enumerate(names):
            opening = f'{{"name": "{name}", "parameters": '
            rules.append(f'call_{i}: {json.dumps(opening)} arguments_{i} "}}"')
        calls = "calls: " + " | ".join(f"call_{i}" for i in range(len(names)))
        # Text may not begin like a call, because it would be parsed as one.
        return [*rules, calls, "after_text: calls", r"TEXT: /\s*([^{\s](?s:.*))?/"]
