"""The notation of tool calls of Gemma 4.

    <|tool_call>call:f{city:<|"|>Rome<|"|>,days:[1,2],more:{on:true}}<tool_call|>

Any number of calls follows text. Texts are between marks, without escapes. Keys are not quoted, and are sorted if a grammar or the
template writes them. `None`, which the template writes, is read too.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.infer.tools.calls import CallScanner, MarkedNotation, ToolCall, dumps, loads, parameters_schema
from argosy.infer.tools.grammar import json_rule
from argosy.infer.tools.notations.schemas import resolve_schema, schema_types, sub_schema

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_NAME, _KEY, _PLAIN = re.compile(r"call:([\w.-]+)"), re.compile(r"[^:,{}\[\]]+"), re.compile(r"[^,{}\[\]]+")
PLAIN = {"integer", "number", "boolean", "null"}
# Keywords that a schema may have: those without effect (`NOTES`), and others by type (`SAYS`).
NOTES = {"type", "description", "title", "default", "examples", "$defs", "definitions", "$schema"}
NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
SAYS = {
    "object": {"properties", "required", "additionalProperties"}, "array": {"items"}, "string": set[str](), "integer": NUMBERS,
    "number": NUMBERS, "boolean": set[str](), "null": set[str](),
}  # fmt: skip
# Grammar rules for any JSON value, except the rule `text`.
ANY = [
    'any: text | plain | "[" (any ("," any)*)? "]" | "{" (KEY ":" any ("," KEY ":" any)*)? "}"',
    json_rule("plain", {"type": sorted(PLAIN)}),
    r"KEY: /[^:,{}\[\]\s]{1,64}/",
]


class GemmaNotation(MarkedNotation):
    title, openings = "Gemma 4", (OPEN,)
    names: ClassVar = {OPEN: "\ufdd0", CLOSE: "\ufdd1", QUOTE: "\ufdd2"}

    @classmethod
    def taught_by(cls, template: str) -> bool:
        return OPEN in template and QUOTE in template

    # ---------------------------------------------------------------- reading

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        calls: list[ToolCall] = []
        content, scan, opening = "", CallScanner(text), self.mark(OPEN)
        while scan.takes(opening):
            scan.blanks()
            name, arguments = scan.match(_NAME)[1], self._value(scan)
            if not isinstance(arguments, dict):
                raise ValueError("a call without arguments")
            calls.append(ToolCall(name, dumps(arguments)))
            if not (scan.takes(self.mark(CLOSE)) or scan.at_end()):
                raise ValueError("a call that does not end")
            content += scan.until(opening)
        return content.strip(), calls

    def _value(self, scan: CallScanner) -> Any:
        """Consumes the value at this position, with white space around it, and returns it.

        Raises:
            ValueError: there is no value.
        """
        scan.blanks()
        if scan.takes(self.mark(QUOTE)):
            value: Any = self._text(scan)
        elif scan.takes("{"):
            value = dict(self._pair(scan) for _ in _items(scan, "}"))
        elif scan.takes("["):
            value = [self._value(scan) for _ in _items(scan, "]")]
        else:
            plain = scan.match(_PLAIN)[0].strip()
            value = None if plain == "None" else loads(plain)
        scan.blanks()
        return value

    def _text(self, scan: CallScanner) -> str:
        text = scan.until(self.mark(QUOTE))
        if not scan.takes(self.mark(QUOTE)):
            raise ValueError("a text that does not end")
        return text

    def _pair(self, scan: CallScanner) -> tuple[str, Any]:
        scan.blanks()
        key = self._text(scan) if scan.takes(self.mark(QUOTE)) else scan.match(_KEY)[0].strip()
        scan.blanks()
        if not scan.takes(":"):
            raise ValueError("a key without a value")
        return key, self._value(scan)

    # ---------------------------------------------------------------- grammars

    def arguments(self, place: int, function: Mapping[str, Any]) -> list[str]:
        schema = parameters_schema(function)
        json_rule("checked", schema)
        refusal = f"of `{function['name']}` cannot be forced in the notation of {self.title}"
        return _Rules(schema, f"arguments_{place}", self.token(QUOTE), refusal).written()

    def rest(self, names: Sequence[str], many: bool) -> list[str]:
        quote, calls = self.token(QUOTE), [f"call_{i}: {json.dumps(f'call:{name}')} arguments_{i}" for i, name in enumerate(names)]
        text = [f"text: {quote} WORDS {quote}", "WORDS: /(?s:.*)/"]
        if QUOTE not in self.ids:
            text = [f"text: {quote} words", f"words[lazy]: /(?s:.*){re.escape(QUOTE)}/"]
        close = self.token(CLOSE)
        more = f" ({self.token(OPEN)} call {close})*" if many else ""
        return [*calls, "call: " + " | ".join(f"call_{i}" for i in range(len(names))), f"rest: call {close}{more}", *ANY, *text]


def _items(scan: CallScanner, end: str) -> Iterator[None]:
    """Yields once for each item of a list or an object, and consumes commas and the end."""
    scan.blanks()
    if scan.takes(end):
        return
    while True:
        yield
        scan.blanks()
        if scan.takes(end):
            return
        if not scan.takes(","):
            raise ValueError("an item that does not end")


class _Rules:
    """Writes the grammar rules for the values of a JSON schema.

    Args:
        root: the schema.
        name: the name of the first rule, and the prefix of the names of the others.
        quote: the mark around texts, as it is written in a grammar.
        refusal: the end of error messages about schemas that cannot be forced.
    """

    def __init__(self, root: Mapping[str, Any], name: str, quote: str, refusal: str):
        self.root, self.name, self.quote, self.refusal = root, name, quote, refusal
        self.rules: list[str] = []
        self.objects = 0
        # The names of rules by the `id` of their schema, so that a schema that refers to itself is written once.
        self.known: dict[int, str] = {}

    def written(self) -> list[str]:
        """All rules."""
        first = self._object(resolve_schema(self.root, self.root))
        return [f"{self.name}: {first}", *self.rules]

    def _rule(self, schema: Any) -> str:
        """Writes the rule for a schema, unless it is written already. Returns the rule's name."""
        schema = resolve_schema(schema, self.root)
        if id(schema) not in self.known:
            name = self.known[id(schema)] = f"{self.name}_{len(self.known)}"
            self.rules.append(f"{name}: {self._body(schema, name)}")
        return self.known[id(schema)]

    def _body(self, schema: Mapping[str, Any], name: str) -> str:
        for word in ("anyOf", "oneOf"):
            if ways := sub_schema(schema, word, list[Any]()):
                self._check(schema, {word})
                return " | ".join(map(self._rule, ways))
        if values := [schema["const"]] if "const" in schema else sub_schema(schema, "enum", list[Any]()):
            self._check(schema, {"const", "enum"})
            return " | ".join(map(self._value, values))
        kinds = schema_types(schema, self.root) if "type" in schema else set[str]()
        if wrong := sorted(kinds - set(SAYS)):
            raise BadInput(f"the type `{wrong[0]}` in the parameters {self.refusal}")
        self._check(schema, set[str]().union(*(SAYS[kind] for kind in kinds)))
        ways = ["text"] if "string" in kinds else []
        if plain := sorted(kinds & PLAIN):
            self.rules.append(json_rule(f"{name}_plain", {"type": plain} | {word: schema[word] for word in NUMBERS if word in schema}))
            ways.append(f"{name}_plain")
        ways += [self._object(schema)] if "object" in kinds else []
        ways += [self._array(schema)] if "array" in kinds else []
        return " | ".join(ways) or "any"

    def _value(self, value: Any) -> str:
        if isinstance(value, dict | list):
            raise BadInput(f"an object or a list in `enum` in the parameters {self.refusal}")
        return f"{self.quote} {json.dumps(value)} {self.quote}" if isinstance(value, str) else json.dumps(json.dumps(value))

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._rule(schema["items"]) if "items" in schema else "any"
        return f'"[" ({item} ("," {item})*)? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        self._check(schema, SAYS["object"])
        properties, required = sub_schema(schema, "properties", dict[str, Any]()), sub_schema(schema, "required", list[Any]())
        if "properties" not in schema and schema.get("additionalProperties") is not False:
            return '"{" (KEY ":" any ("," KEY ":" any)*)? "}"'
        # Keys are sorted as by Jinja's `dictsort`.
        keys = sorted(properties, key=str.lower)
        name, self.objects = f"{self.name}_object_{self.objects}", self.objects + 1
        needed, ways = [key in required for key in keys], list[str]()
        for i, key in enumerate(keys):
            rest = f"{name}_after_{i}" if i + 1 < len(keys) else '""'
            self.rules.append(f"{name}_pair_{i}: {json.dumps(f'{key}:')} {self._rule(properties[key])}")
            # Whatever comes first has no comma before it.
            if not any(needed[:i]):
                ways.append(f"{name}_pair_{i} {rest}")
            if i:
                self.rules.append(f'{name}_after_{i - 1}: "," {name}_pair_{i} {rest}' + ("" if needed[i] else f" | {rest}"))
        return f'"{{" ({" | ".join(ways)}){"" if any(needed) else "?"} "}}"' if ways else '"{}"'

    def _check(self, schema: Mapping[str, Any], also: set[str]) -> None:
        if wrong := sorted(set(schema) - NOTES - also):
            raise BadInput(f"`{wrong[0]}` in the parameters {self.refusal}")
