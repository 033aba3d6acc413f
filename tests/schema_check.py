"""The part of JSON Schema (2020-12) that our schemas use, for tests: a keyword that is not known here is an error."""

import re
from collections.abc import Iterator
from typing import Any

TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
}
BOUNDS = {
    "minimum": lambda v, b: v >= b,
    "maximum": lambda v, b: v <= b,
    "exclusiveMinimum": lambda v, b: v > b,
    "exclusiveMaximum": lambda v, b: v < b,
    "multipleOf": lambda v, b: v % b == 0,
}
WORDS = {"$schema", "$defs", "title", "description", "default", "examples", "format"}


def check(schema: Any, value: Any, root: Any = None, at: str = "") -> Iterator[str]:
    """What is wrong with a value, by its dotted key; nothing where it is valid."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        yield from [] if schema else [f"{at}: nothing may stand here"]
        return
    number, obj = TYPES["number"](value), isinstance(value, dict)
    for word, rule in schema.items():
        if word == "$ref":
            yield from check(_resolve(root, rule), value, root, at)
        elif word == "type":
            if not any(TYPES[t](value) for t in ([rule] if isinstance(rule, str) else rule)):
                yield f"{at}: {value!r} is no {rule}"
        elif word in ("enum", "const"):
            if not any(value == o and type(value) is type(o) for o in (rule if word == "enum" else [rule])):
                yield f"{at}: {value!r} is not {rule}"
        elif word in ("anyOf", "oneOf"):
            good = sum(not list(check(s, value, root, at)) for s in rule)
            if not good or (word == "oneOf" and good > 1):
                yield f"{at}: {value!r} fits {good} of {word}"
        elif word == "allOf":
            for s in rule:
                yield from check(s, value, root, at)
        elif word == "properties":
            for key in rule.keys() & value.keys() if obj else ():
                yield from check(rule[key], value[key], root, f"{at}.{key}")
        elif word == "additionalProperties":
            for key in value.keys() - schema.get("properties", {}).keys() if obj else ():
                yield from check(rule, value[key], root, f"{at}.{key}")
        elif word == "propertyNames":
            for key in value if obj else ():
                yield from check(rule, key, root, f"{at}.{key}")
        elif word == "required":
            yield from (f"{at}: lacks {key}" for key in rule if obj and key not in value)
        elif word == "pattern":
            if isinstance(value, str) and not re.search(rule, value):
                yield f"{at}: {value!r} does not match {rule}"
        elif word in BOUNDS:
            if number and not BOUNDS[word](value, rule):
                yield f"{at}: {value} against {word} {rule}"
        elif word == "items":
            for i, item in enumerate(value if isinstance(value, list) else ()):
                yield from check(rule, item, root, f"{at}.{i}")
        elif word == "prefixItems":
            for i, (s, item) in enumerate(zip(rule, value) if isinstance(value, list) else ()):
                yield from check(s, item, root, f"{at}.{i}")
        elif word in ("minItems", "maxItems"):
            if isinstance(value, list) and (len(value) < rule if word == "minItems" else len(value) > rule):
                yield f"{at}: {len(value)} items against {word} {rule}"
        elif word not in WORDS:
            raise NotImplementedError(word)


def _resolve(root: Any, reference: str) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        root = root[part]
    return root
