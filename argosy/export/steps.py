"""Steps of a bundle outside its programs: text to ids, vectors to length 1, scores to probabilities and classes, ids to text.

They are named in the manifest with everything that they need, and run by numpy and the tokenizer in the bundle.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.settings import Settings
from argosy.data.framing import TextFrame, framed
from argosy.data.tokenizers import Tokenizer


class TokenizeStep(Settings):
    """Converts texts to rows of ids of the same length, and a mask of the tokens."""

    step: Literal["tokenize"] = "tokenize"
    input: str = "text"
    """The input to tokenize, a list of texts."""
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
    """Whether texts are converted to lower case."""
    cut: bool = False
    """Whether the end of a text that is too long is cut. Otherwise such a text is an error."""
    tokens: str = "tokens"
    """The program's input that receives the ids."""
    mask: str = "mask"
    """The program's input that receives 1 for each token and 0 for padding."""

    @property
    def texts(self) -> list[str]:
        """Names of its inputs."""
        return [self.input]

    @property
    def results(self) -> list[str]:
        """Names of the program's inputs that it produces."""
        return [self.tokens, self.mask]


class TokenizePairsStep(TokenizeStep):
    """Converts texts, or pairs of texts, to rows of ids. In a pair that is too long, the end of the longer text is cut."""

    step: Literal["tokenize_pairs"] = "tokenize_pairs"  # type: ignore[assignment]
    pair: str = "text_pair"
    """The input with the second text of each pair. It is optional."""
    between: list[int] = Field(default_factory=list)
    """Ids between the two texts of a pair."""
    types: str = ""
    """The program's input that receives 1 for each token of the second text. Empty: the program does not distinguish the texts."""

    @property
    def texts(self) -> list[str]:
        return [self.input, self.pair]

    @property
    def results(self) -> list[str]:
        return [*super().results, *([self.types] if self.types else [])]


class NormalizeStep(Settings):
    """Scales vectors to length 1."""

    step: Literal["normalize"] = "normalize"
    output: str = "embedding"
    """The output that is scaled."""


class ProbabilitiesStep(Settings):
    """Converts scores to probabilities."""

    step: Literal["softmax", "sigmoid"]
    """softmax: each text has exactly one class; sigmoid: classes are independent."""
    scores: str = "scores"
    """The output with the scores."""
    output: str = "probabilities"
    """The name of the output with the probabilities."""
    names: list[str] = Field(default_factory=list)
    """The names of the classes; empty: they have none."""


class LabelsStep(Settings):
    """Finds the name of the class with the largest score."""

    step: Literal["labels"] = "labels"
    scores: str = "scores"
    """The output with the scores."""
    names: list[str]
    """The names of the classes."""
    output: str = "label"
    """The name of the output with the class names."""


class DetokenizeStep(Settings):
    """Converts rows of ids to texts."""

    step: Literal["detokenize"] = "detokenize"
    folder: str = "tokenizer"
    """The folder of the tokenizer's files."""
    tokens: str = "tokens"
    """The output with the ids."""
    lengths: str = "lengths"
    """The output with the number of ids of each row."""
    output: str = "text"
    """The name of the output with the texts."""


def tokenized(
    step: TokenizeStep, tokenizer: Tokenizer, texts: Any, longest: int | None, pairs: Any = None
) -> dict[str, np.ndarray]:
    """The inputs of the program for these texts.

    Args:
        longest: limit of a row in ids; None: no limit.
        pairs: the second text of each pair; None: single texts.

    Raises:
        BadInput: a value is no text, or a text has no token or is too long.
    """
    texts = _texts(step.input, texts)
    ids = _ids(step, tokenizer, texts)
    if isinstance(step, TokenizePairsStep):
        others = None if pairs is None else _ids(step, tokenizer, _texts(step.pair, pairs, len(texts)))
        frame = TextFrame(tuple(step.first), tuple(step.between), tuple(step.last))
        most = longest if step.cut else None
        both = [framed(frame, row, None if others is None else others[i], most) for i, row in enumerate(ids)]
        rows, seconds = [row for row, _ in both], [second for _, second in both]
    else:
        spare = len(step.first) + len(step.last)
        if step.cut and longest is not None:
            ids = [row[: max(longest - spare, 0)] for row in ids]
        rows, seconds = [[*step.first, *row, *step.last] for row in ids], None
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise BadInput(f"`{step.input}`: {text[:40]!r} has no tokens")
        if longest is not None and len(row) > longest:
            raise BadInput(f"`{step.input}`: {text[:40]!r} has {len(row)} tokens, and this signature takes {longest}")
    found = padded_rows(step, rows)
    if isinstance(step, TokenizePairsStep) and step.types:
        kinds = np.zeros_like(found[step.tokens])
        for i, (row, second) in enumerate(zip(rows, seconds or (), strict=True)):
            kinds[i, second or len(row) : len(row)] = 1
        found[step.types] = kinds
    return found


def _texts(name: str, texts: Any, count: int | None = None) -> list[str]:
    """A list of texts; of `count`, where there must be so many."""
    texts = texts.tolist() if isinstance(texts, np.ndarray) else [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadInput(f"`{name}` takes a list of texts", hint=f'"{name}": ["a text", "another"]')
    if count is not None and len(texts) != count:
        raise BadInput(f"`{name}` has {plural(len(texts), 'text')}, and there are {count} to pair them with")
    return list(texts)


def _ids(step: TokenizeStep, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    found = [step.prompt + (text.strip() if step.strip else text) for text in texts]
    return tokenizer.encode_many([text.lower() if step.lower else text for text in found])


def padded_rows(step: TokenizeStep, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Rows of ids padded to the longest, and their mask."""
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    mask = np.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, 1
    return {step.tokens: tokens, step.mask: mask}


def at_unit_length(vectors: np.ndarray) -> np.ndarray:
    """Vectors scaled to length 1, with the same rounding as `infer.embed`."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def step_result(step: Any, outputs: Mapping[str, Any], tokenizer: Callable[[str], Tokenizer]) -> Any:
    """The output of a step after the program.

    Args:
        tokenizer: returns the tokenizer in a folder of the bundle.
    """
    if isinstance(step, NormalizeStep):
        return at_unit_length(outputs[step.output])
    if isinstance(step, ProbabilitiesStep):
        return probabilities(outputs[step.scores], step.step)
    if isinstance(step, LabelsStep):
        return [step.names[i] for i in np.argmax(outputs[step.scores], -1).tolist()]
    return detokenized(step, tokenizer(step.folder), outputs)


def probabilities(scores: np.ndarray, activation: str) -> np.ndarray:
    """Scores converted to probabilities by `softmax` or `sigmoid`."""
    if activation == "softmax":
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    # Both forms are exact where the other overflows.
    small = np.exp(-np.abs(scores))
    return np.where(scores >= 0, 1 / (1 + small), small / (1 + small)).astype(scores.dtype)


def detokenized(step: DetokenizeStep, tokenizer: Tokenizer, outputs: Mapping[str, Any]) -> list[str]:
    """The text of each row. It continues another text, so it keeps its leading space."""
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
