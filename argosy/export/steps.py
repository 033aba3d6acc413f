"""Steps of a bundle outside its programs: text to ids, vectors to length 1, ids to text.

They are named in the manifest with everything that they need, and run by numpy and the tokenizer in the bundle.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.settings import Settings
from argosy.data.tokenizers import Tokenizer


class TokenizeStep(Settings):
    """Texts to rows of ids, with the same length, and a mask of those that are tokens."""

    step: Literal["tokenize"] = "tokenize"
    input: str = "text"
    """The input that it reads, a list of texts."""
    folder: str = "tokenizer"
    """The folder of the tokenizer's files."""
    first: list[int] = Field(default_factory=list)
    """Ids before each text."""
    last: list[int] = Field(default_factory=list)
    """Ids after each text."""
    prompt: str = ""
    """Text before each text."""
    strip: bool = False
    """Whether blanks around a text are removed."""
    lower: bool = False
    """Whether letters become small."""
    cut: bool = False
    """Whether a text that is too long loses its end. Otherwise it is an error."""
    tokens: str = "tokens"
    """The input of the program that gets the ids."""
    mask: str = "mask"
    """The input of the program that gets 1 for each token and 0 after the last."""


class NormalizeStep(Settings):
    """Vectors at length 1."""

    step: Literal["normalize"] = "normalize"
    output: str = "embedding"
    """The output that is scaled."""


class DetokenizeStep(Settings):
    """Rows of ids to texts."""

    step: Literal["detokenize"] = "detokenize"
    folder: str = "tokenizer"
    """The folder of the tokenizer's files."""
    tokens: str = "tokens"
    """The output with the ids."""
    lengths: str = "lengths"
    """The output with the number of ids of each row."""
    output: str = "text"
    """The output that it adds."""


def tokenized(step: TokenizeStep, tokenizer: Tokenizer, texts: Any, longest: int | None) -> dict[str, np.ndarray]:
    """The inputs of the program for these texts.

    Args:
        longest: the most ids of a row.

    Raises:
        BadInput: these are no texts, one has no token, or one is too long.
    """
    texts = texts.tolist() if isinstance(texts, np.ndarray) else [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadInput(f"`{step.input}` takes a list of texts", hint=f'"{step.input}": ["a text", "another"]')
    found = [step.prompt + (text.strip() if step.strip else text) for text in texts]
    rows = tokenizer.encode_many([text.lower() if step.lower else text for text in found])
    frame = len(step.first) + len(step.last)
    if step.cut and longest is not None:
        rows = [row[: max(longest - frame, 0)] for row in rows]
    rows = [[*step.first, *row, *step.last] for row in rows]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise BadInput(f"`{step.input}`: {text[:40]!r} has no tokens")
        if longest is not None and len(row) > longest:
            raise BadInput(f"`{step.input}`: {text[:40]!r} has {len(row)} tokens, and this signature takes {longest}")
    return padded_rows(step, rows)


def padded_rows(step: TokenizeStep, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Rows of ids at the length of the longest, and their mask."""
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    mask = np.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, 1
    return {step.tokens: tokens, step.mask: mask}


def at_unit_length(vectors: np.ndarray) -> np.ndarray:
    """Vectors at length 1, with the numbers of `infer.embed`."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def detokenized(step: DetokenizeStep, tokenizer: Tokenizer, outputs: dict[str, Any]) -> list[str]:
    """The text of each row, which continues another and so keeps its leading space."""
    texts = []
    for row, length in zip(outputs[step.tokens], outputs[step.lengths], strict=True):
        stream = tokenizer.stream()
        stream.begun()
        texts.append("".join([stream.push(token) for token in row[:length].tolist()]) + stream.end())
    return texts


def bundled_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder of a bundle."""
    from argosy.data.tokenizers.load import load_tokenizer

    return load_tokenizer(folder)
