r"""Rewrites the escapes of GBNF, llama.cpp's notation of grammars (https://github.com/ggml-org/llama.cpp, grammars/README.md), so that
llguidance's translator to Lark can read them.

A literal `"..."` or a class `[...]` may have \xXX, \uXXXX and \UXXXXXXXX for a character by its code point, and \t, \r, \n, \\, \", \[
and \]. The translator copies escapes to Lark unchanged. There, literals have JSON's escapes and classes those of Rust's regular
expressions, which lack some of GBNF's. So code points are replaced by their characters.
"""

import re

from argosy.core.errors import BadInput

# A comment, a literal, or a class. Other parts of a grammar have no escapes.
_PART = re.compile(r'#[^\n]*|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
NAMED = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}


def unescape(text: str) -> str:
    """Rewrites the escapes of a GBNF grammar into those that llguidance reads.

    Raises:
        BadInput: an escape is unknown, or its code point is no character.
    """
    return _PART.sub(lambda part: _of_part(part[0]), text)


def _of_part(part: str) -> str:
    if part[0] == "#":
        return part
    if part[0] == '"':
        return _ESCAPE.sub(lambda match: _in_literal(_character(match)), part)
    part = _ESCAPE.sub(lambda match: _in_class(_character(match)), part)
    # In Rust's classes, `&&` and `~~` are set operations.
    return part.replace("&", _in_class("&")).replace("~", _in_class("~"))


def _character(match: "re.Match[str]") -> str:
    digits = match[1] or match[2] or match[3]
    if digits is None:
        if match[4] not in NAMED:
            raise BadInput(f"`grammar`: unknown escape \\{match[4]}", hint=r"GBNF has \x, \u, \U, \t, \r, \n, \\, \", \[ and \]")
        return NAMED[match[4]]
    number = int(digits, 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise BadInput(f"`grammar`: {match[0]} is no character", hint="Unicode ends at \\U0010FFFF, and has no halves of pairs")
    return chr(number)


def _in_literal(character: str) -> str:
    """A character as it is written in a literal, so that both the translator and JSON read it."""
    if character in '"\\':
        return "\\" + character
    if character in "\t\r\n":
        return {"\t": "\\t", "\r": "\\r", "\n": "\\n"}[character]
    return f"\\x{ord(character):02x}" if ord(character) < 0x20 or ord(character) == 0x7F else character


def _in_class(character: str) -> str:
    """A character as it is written in a class: escaped, if it could have a special meaning there."""
    return f"\\x{ord(character):02x}" if ord(character) < 0x80 and not character.isalnum() else character
