"""The notation of tool calls of Mistral's models (https://github.com/mistralai/mistral-common, tokens/tokenizers/instruct.py).

    [TOOL_CALLS][{"name": "f", "arguments": {...}, "id": "x1y2z3x1y"}, ...]     tokenizers up to v7; the id may be missing
    [TOOL_CALLS]f[CALL_ID]x1y2z3x1y[ARGS]{...}[TOOL_CALLS]g...                  v11
    [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g...                                    from v13 on

Calls follow text. All three forms are read, whichever the template writes; a grammar forces the template's form. Templates refuse ids
that do not have nine characters. So ids made in another notation are replaced by nine digits of their hash, in calls and in results.
"""

import hashlib
import json
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any, ClassVar

from argosy.infer.tools.calls import CallScanner, MarkedNotation, Message, ToolCall, call_names

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
LETTERS = string.ascii_letters + string.digits
_ID = re.compile("[a-zA-Z0-9]{9}")
_NAME = re.compile(r"[\w.-]+")


class MistralNotation(MarkedNotation):
    title, openings = "Mistral", (OPEN,)
    names: ClassVar = {OPEN: "\ufdd0", CALL_ID: "\ufdd1", ARGS: "\ufdd2"}

    @classmethod
    def taught_by(cls, template: str) -> bool:
        return OPEN in template

    # ---------------------------------------------------------------- reading

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        calls: list[ToolCall] = []
        content, scan, opening = "", CallScanner(text), self.mark(OPEN)
        while scan.takes(opening):
            scan.blanks()
            if text[scan.at : scan.at + 1] in ("[", "{"):
                parsed = scan.json()[0]
                calls += [call_names(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
            else:
                calls.append(self._named_call(scan))
            content += scan.until(opening)
        return content.strip(), calls

    def _named_call(self, scan: CallScanner) -> ToolCall:
        name, call_id = scan.match(_NAME)[0], None
        scan.blanks()
        if scan.takes(self.mark(CALL_ID)):
            scan.blanks()
            call_id = scan.match(_NAME)[0]
            scan.blanks()
        scan.takes(self.mark(ARGS))
        scan.blanks()
        return ToolCall(name, scan.json()[1], call_id)

    # ---------------------------------------------------------------- ids

    def admits(self, value: str) -> bool:
        return _ID.fullmatch(value) is not None

    def fresh(self) -> str:
        return "".join(secrets.choice(LETTERS) for _ in range(9))

    @classmethod
    def messages(cls, messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
        turns = []
        for message in messages:
            fitted = dict(message)
            if isinstance(message.get("tool_call_id"), str):
                fitted["tool_call_id"] = mistral_call_id(message["tool_call_id"])
            if calls := message.get("tool_calls"):
                fitted["tool_calls"] = [
                    dict(call) | ({"id": mistral_call_id(call["id"])} if isinstance(call.get("id"), str) else {}) for call in calls
                ]
            turns.append(fitted)
        return turns

    # ---------------------------------------------------------------- grammars

    def rest(self, names: Sequence[str], many: bool) -> list[str]:
        rules = [f"call_{i}: {self._call(i, name)}" for i, name in enumerate(names)]
        rules += ["call: " + " | ".join(f"call_{i}" for i in range(len(names))), "ID: /[a-zA-Z0-9]{9}/"]
        if ARGS in self.template:
            return [*rules, f"rest: call{f' ({self.token(OPEN)} call)*' if many else ''}"]
        return [*rules, f'rest: / ?\\[/ call{" (/, ?/ call)*" if many else ""} "]"']

    def _call(self, place: int, name: str) -> str:
        if ARGS in self.template:
            id_rule = f" ({self.token(CALL_ID)} ID)?" if CALL_ID in self.template else ""
            return f"{json.dumps(name)}{id_rule} {self.token(ARGS)} arguments_{place}"
        opening = f'{{"name": "{name}", "arguments": '
        id_rule = f'({json.dumps(", " + json.dumps("id") + ": " + chr(34))} ID {json.dumps(chr(34))})?'
        return f'{json.dumps(opening)} arguments_{place} {id_rule} "}}"'


def mistral_call_id(id: str) -> str:
    """Converts an id to one that templates accept: the id itself, or nine digits of its hash."""
    return id if _ID.fullmatch(id) else hashlib.sha256(id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
