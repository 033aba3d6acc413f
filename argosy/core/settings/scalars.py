"""Parses plain YAML scalars, and writes values so that reading gives the same value.

Numbers are decimal, as people write them (`1e5`, `4_096`, `25k`). YAML 1.1 reads `010` as 8, `1:30` as 90, `1e5` as text and
`2026-11-21` as a date. Here they are 10, text, 100000 and text. This module does not know the types of settings.
"""

import re
from collections.abc import Iterable, Mapping
from decimal import Context, Decimal
from typing import Any

import yaml

_NULLS = {"", "~", "null", "none"}
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)
_SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SUFFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_DECIMAL = Context(prec=60, traps=[])
_HUMAN = re.compile(rf"({_FLOAT.pattern})({'|'.join(_SUFFIXES)})?")


def parse_number(text: str) -> int | float | None:
    """Parses a number as people write it, such as `4_096`, `1e5`, `3e-4`, `25k`, `1.5B` or `64Ki`; None for other texts."""
    text = text.strip()
    match = _HUMAN.fullmatch(text)
    if match is None or _INT.fullmatch(text):
        return _integer(text) if match else None
    suffix = match.groups()[-1]
    exact = _DECIMAL.multiply(Decimal(match[1].replace("_", "")), _SUFFIXES.get(suffix, 1))
    # The exponent is limited, because 1e999999 has a million digits.
    if exact.is_finite() and exact.adjusted() < 30 and exact == exact.to_integral_value():
        return int(exact)
    return float(exact)


def scalar(text: str) -> Any:
    """Parses a plain scalar of unknown type: None, a bool, a number, or text."""
    if text.lower() in _NULLS:
        return None
    if text.lower() in _SWITCHES:
        return _SWITCHES[text.lower()]
    if _INT.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _integer(text: str) -> int | float:
    digits = text.replace("_", "")
    # Python refuses to parse longer integers.
    return int(digits) if len(digits) <= 4300 else float(digits)


def yaml_line(value: Any) -> str:
    """Writes a plain value as one line of YAML, which this module and other YAML readers read as the same value.

    Raises:
        TypeError: the value is no plain value.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{yaml_line(str(k))}: {yaml_line(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_line, value)) + "]"
    if isinstance(value, str) and value.splitlines() not in ([], [value]):
        # PyYAML's default style loses line breaks such as U+0085.
        return _flow(value, default_style='"')
    text = _flow(value, allow_unicode=True)
    if isinstance(value, str) and text == value and scalar(text) != value:
        # `1e5` is text to YAML 1.1, and a number to YAML 1.2 and to this module.
        return f'"{text}"'
    return text


def _flow(value: Any, **style: Any) -> str:
    try:
        return yaml.safe_dump([value], default_flow_style=True, width=float("inf"), **style).strip()[1:-1]
    except yaml.YAMLError:
        raise TypeError(f"{type(value).__name__} is no plain value") from None


def yaml_document(value: Any) -> str:
    """Writes a plain value as a YAML document in block style, with keys in their order. Readers of YAML 1.1 and 1.2 read the same
    value."""
    return yaml.dump(value, Dumper=_Blocks, sort_keys=False, width=10**6, allow_unicode=True)


def yaml_documents(values: Iterable[Any]) -> str:
    """Writes plain values as several YAML documents in one text."""
    return "---\n".join(map(yaml_document, values))


class _Blocks(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Text that some reader may take for a number, a bool or a date is quoted: `1e5` is a number for Kubernetes.
    is_plain = re.fullmatch(r"[A-Za-z/][\w./:@-]*(?<!:)", text) and len(text) > 1
    style = "|" if "\n" in text else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Blocks.add_representer(str, _text)
