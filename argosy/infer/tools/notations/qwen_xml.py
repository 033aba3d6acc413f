"""The notation of tool calls of Qwen 3.5 and Qwen 3 Coder.

    <tool_call>
    <function=f>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

Any number of calls follows text. A text is written as it is, and any other value as JSON. `True`, `False` and `None`, which the
template writes, are read too. Only the tool's schema distinguishes the text `5` from the number. If the schema admits only texts, or
names no type, the value is a text. A grammar forces arguments to be in the order of the schema, and to be named in it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from argosy.core.errors import BadInput
from argosy.infer.tools.calls import CallScanner, ToolCall, dumps, loads, parameters_schema
from argosy.infer.tools.grammar import json_rule
from argosy.infer.tools.notations.hermes import OPEN, HermesNotation
from argosy.infer.tools.notations.schemas import KINDS, resolve_schema, schema_types, sub_schema

_FUNCTION, _PARAMETER = re.compile(r"<function=([^>\n]+)>"), re.compile(r"<parameter=([^>\n]+)>\n?")
# A value may contain the closing tag where nothing of a call follows it.
_VALUE = re.compile(r"(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)
_PYTHON = {"True": True, "False": False, "None": None}
# Keywords that a schema of arguments may have, and those that a schema of a text may have so that a grammar can force it.
OF_ARGUMENTS = {"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "definitions", "$schema"}
OF_TEXTS = {"type", "description", "title", "default", "examples", "enum", "const", "anyOf", "oneOf", "$ref"}


class QwenXmlNotation(HermesNotation):
    title = "Qwen 3.5"

    @classmethod
    def taught_by(cls, template: str) -> bool:
        return OPEN in template and "<function=" in template

    # ---------------------------------------------------------------- reading

    def call(self, scan: CallScanner) -> ToolCall:
        name = scan.match(_FUNCTION)[1]
        schema = self._schema(name)
        arguments: dict[str, Any] = {}
        scan.blanks()
        while not scan.takes("</function>"):
            key = scan.match(_PARAMETER)[1]
            inside = resolve_schema(schema.get("properties"), schema).get(key)
            arguments[key] = argument_value(scan.match(_VALUE)[1], schema_types(inside, schema))
        return ToolCall(name, dumps(arguments))

    def _schema(self, name: str) -> Mapping[str, Any]:
        schema = next((tool["function"].get("parameters") for tool in self.tools if tool["function"]["name"] == name), None)
        return schema if isinstance(schema, Mapping) else {}

    # ---------------------------------------------------------------- grammars

    def arguments(self, place: int, function: Mapping[str, Any]) -> list[str]:
        schema = parameters_schema(function)
        json_rule("checked", schema)
        if unknown := sorted(set(schema) - OF_ARGUMENTS):
            raise BadInput(f"`{unknown[0]}` of the arguments of `{function['name']}` cannot be forced in the notation of {self.title}")
        properties, required = sub_schema(schema, "properties", dict[str, Any]()), sub_schema(schema, "required", list[Any]())
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            return [f'arguments_{place}: ("<parameter=" NAME ">\\n" value)*']
        rules, row = [], []
        for i, (key, inside) in enumerate(properties.items()):
            name = f"argument_{place}_{i}"
            rules.append(f"{name}: {json.dumps(f'<parameter={key}>{chr(10)}')} {self._value(name, key, inside, schema, rules)}")
            row.append(name if key in required else f"{name}?")
        return [*rules, f"arguments_{place}: {' '.join(row) or json.dumps('')}"]

    def _value(self, name: str, key: str, schema: Any, root: Mapping[str, Any], rules: list[str]) -> str:
        """The grammar of the text after the opening tag of an argument. Adds the rules that it refers to."""
        closing = json.dumps("\n</parameter>\n")
        schema = resolve_schema(schema, root)
        kinds = schema_types(schema, root)
        if values := [schema["const"]] if "const" in schema else sub_schema(schema, "enum", list[Any]()):
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            return f"({' | '.join(map(json.dumps, texts))}) {closing}"
        if "string" not in kinds:
            rules.append(json_rule(f"{name}_value", {**schema, **{k: root[k] for k in ("$defs", "definitions") if k in root}}))
            return f"{name}_value {closing}"
        if wrong := sorted(set(schema) - OF_TEXTS):
            raise BadInput(f"`{wrong[0]}` of the text `{key}` cannot be forced in the notation of {self.title}")
        return "value"

    def rest(self, names: Sequence[str], many: bool) -> list[str]:
        rules = super().rest(names, many)
        return [*rules, "NAME: /[^>\\n]{1,64}/", r"value[lazy]: /(?s:.*)\n<\/parameter>\n/"]

    def opened(self, place: int, name: str) -> str:
        return f'{json.dumps(f"<function={name}>{chr(10)}")} arguments_{place} "</function>"'


def argument_value(text: str, kinds: set[str]) -> Any:
    """Parses a text as a value of one of these types. Returns the text itself if it is no such value."""
    try:
        value = _PYTHON[text] if text in _PYTHON else loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        # Texts are written as they are, so these quotes belong to it.
        return text
    kind = KINDS[type(value)]
    admitted = kind in kinds or (kind == "integer" and "number" in kinds)
    return value if admitted or "string" not in kinds else text
