"""Decodes single tokens to bytes, as the decoder of a tokenizer.json says.

The library decodes a whole list of tokens. Here each token is decoded separately, which streaming needs. The text is the same as the
library's, with one difference: if a vocabulary has tokens for single bytes, the library also loses valid characters beside an invalid
byte.
"""

import codecs
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from argosy.core.errors import Unsupported
from argosy.data.tokenizers.byte import byte_names

# (text of a token, whether it is the first token) -> the text for the next step, or the final bytes
TokenDecoder = Callable[[str, bool], str | bytes]
Spec = dict[str, Any]

BYTES = {name: byte for byte, name in byte_names().items()}
# The name of an error handler that writes one U+FFFD for each invalid byte, and not one for each sequence of them.
EACH_BYTE = "argosy.each_byte"
codecs.register_error(EACH_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end))  # pyright: ignore


class Decoding(NamedTuple):
    """The decoding of tokens to bytes.

    steps: the functions that are applied to each token, in order.
    strips, trims: the number of spaces that are removed from the beginning and from the end of the whole text.
    invalid: the codecs error handler for bytes that are not UTF-8.
    """

    steps: list[TokenDecoder]
    strips: int = 0
    trims: int = 0
    invalid: str = "replace"

    def piece(self, token: str, first: bool) -> bytes:
        """The bytes that a token stands for. `first`: whether it is the first token of the text."""
        value: str | bytes = token
        for step in self.steps:
            if isinstance(value, bytes):
                break
            value = step(value, first)
        return value if isinstance(value, bytes) else value.encode()


def decoding(spec: Spec | None, path: Path) -> Decoding:
    """Converts the decoder of a tokenizer.json to functions for single tokens.

    Raises:
        Unsupported: the decoder, or one of its steps, is not known.
    """
    if spec is None:
        return Decoding([lambda token, first: token if first else f" {token}"])
    specs = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in specs]
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    ends = [whole_strip(step, path) for step in specs[fused:]]
    strips, trims = sum(start for start, _ in ends), sum(stop for _, stop in ends)
    steps = [_step_of(step, path) for step in specs[:fused]]
    return Decoding(steps, strips, trims, EACH_BYTE if "ByteFallback" in kinds else "replace")


def _step_of(spec: Spec, path: Path) -> TokenDecoder:
    if spec["type"] not in STEPS:
        raise Unsupported(f"the decoder `{spec['type']}` is not known", where=f"in {path}")
    return STEPS[spec["type"]](spec)


def whole_strip(spec: Spec, path: Path) -> tuple[int, int]:
    """The numbers of spaces that a step after `Fuse` removes from the beginning and from the end of the text."""
    if spec["type"] == "Fuse":
        return 0, 0
    if spec["type"] != "Strip" or spec["content"] != " ":
        raise Unsupported(f"the decoder `{spec['type']}` after `Fuse` is not known", where=f"in {path}")
    return spec["start"], spec["stop"]


def _byte_level(spec: Spec) -> TokenDecoder:
    """Decodes characters that stand for bytes (openai/gpt-2). A token with any other character stands for itself."""

    def step(token: str, first: bool) -> str | bytes:
        return bytes(BYTES[c] for c in token) if all(c in BYTES for c in token) else token

    return step


def byte_fallback(spec: Spec) -> TokenDecoder:
    """Decodes tokens like `<0x0A>` to the byte that they name."""

    def step(token: str, first: bool) -> str | bytes:
        return bytes([int(token[3:5], 16)]) if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) else token

    return step


def metaspace(spec: Spec) -> TokenDecoder:
    """Decodes the mark that stands for a space. In the first token, marks are dropped if encoding adds a space before the text."""
    mark, drops = spec["replacement"], spec.get("prepend_scheme", "always") != "never"
    return lambda token, first: token.replace(mark, "" if first and drops else " ")


def word_piece(spec: Spec) -> TokenDecoder:
    """Puts a space before each token, except before the first and before tokens that continue a word."""
    prefix, cleans = spec["prefix"], spec.get("cleanup", True)

    def step(token: str, first: bool) -> str | bytes:
        joined = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
        text = token if first else joined
        return clean_up_spaces(text) if cleans else text

    return step


def clean_up_spaces(text: str) -> str:
    """Removes spaces before punctuation and English endings, as the library's `cleanup` does."""
    for end in (".", "?", "!", ","):
        text = text.replace(f" {end}", end)
    text = text.replace(" ' ", "'").replace(" n't", "n't").replace(" 'm", "'m").replace(" do not", " don't")
    return text.replace(" 's", "'s").replace(" 've", "'ve").replace(" 're", "'re")


def replacing(spec: Spec) -> TokenDecoder:
    pattern, content = spec["pattern"], spec["content"]
    if "String" in pattern:
        return lambda token, first: token.replace(pattern["String"], content)
    raise Unsupported("a decoder that replaces by a regular expression is not known")


def stripping(spec: Spec) -> TokenDecoder:
    """Removes up to `start` and `stop` times a character from the beginning and the end of a token."""
    mark, start, stop = re.escape(spec["content"]), spec["start"], spec["stop"]
    ends = re.compile(f"^{mark}{{0,{start}}}|{mark}{{0,{stop}}}$")
    return lambda token, first: ends.sub("", token)


STEPS = {
    "ByteLevel": _byte_level,
    "ByteFallback": byte_fallback,
    "Metaspace": metaspace,
    "WordPiece": word_piece,
    "Replace": replacing,
    "Strip": stripping,
}
