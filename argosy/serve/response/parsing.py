"""Splits the text of a completion into reasoning, text and tool calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from argosy.infer.tools.calls import CallNotation, CallParser, TextNotation, ToolCall
from argosy.infer.tools.channels import ChannelParser
from argosy.serve.response.choice import ChoicePiece, ScoredToken
from argosy.serve.response.reasoning import Start, ThoughtSplitter


@dataclass(frozen=True)
class CompletionFormat:
    """How the completions of a request are parsed.

    notation: the notation of tool calls; None: no tools were offered.
    start: whether a completion starts inside its reasoning, after it, or may open it; None: reasoning is not split off.
    shows: whether the response includes the reasoning.
    marks: special tokens that are parsed, each with the character that it is decoded to.
    channels: whether special tokens divide a completion into channels, instead of `<think>`.
    before: the ids of the calls earlier in the conversation.
    """

    notation: CallNotation | None = None
    start: Start | None = None
    shows: bool = True
    marks: Mapping[int, str] = field(default_factory=dict)
    channels: bool = False
    before: Sequence[str] = ()


@dataclass(frozen=True)
class CompletionParts:
    """The parts that one piece of text adds to a completion.

    thought: the new reasoning.
    text: the new text.
    calls: all tool calls, in the last piece only.
    tokens: the new tokens after the reasoning, including those of tool calls and the end token.
    """

    thought: str = ""
    text: str = ""
    calls: Sequence[dict[str, Any]] = ()
    tokens: Sequence[ScoredToken] = ()


@dataclass
class CompletionReader:
    """Parses one completion piece by piece.

    thought, text, calls, tokens: the parts of the completion so far, as in `CompletionParts`.
    """

    reading: CompletionFormat
    thought: str = ""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        reading = self.reading
        self._thoughts: ThoughtSplitter | ChannelParser | None = None if reading.start is None else ThoughtSplitter(reading.start)
        self._calls: CallParser | None = None
        if reading.channels:
            self._thoughts = ChannelParser(calls=reading.notation is not None, continued=reading.start == "after")
        elif isinstance(reading.notation, TextNotation):
            self._calls = CallParser(reading.notation)
        self._pending: list[ScoredToken] = []
        self._passed = 0

    @property
    def thinking(self) -> int:
        """The number of tokens up to and including the closing mark of the reasoning; 0: there is no reasoning."""
        return self._passed if self._thoughts is not None and self._thoughts.any else 0

    def push(self, piece: ChoicePiece) -> CompletionParts:
        """Adds the next piece, and returns its parts."""
        parts = self._read(piece)
        self.thought += parts.thought
        self.text += parts.text
        self.calls += parts.calls
        self.tokens += parts.tokens
        return parts

    def _read(self, piece: ChoicePiece) -> CompletionParts:
        ends, thought, text, tokens = piece.finish is not None, "", piece.text, piece.tokens
        if self._thoughts is not None:
            before = self._thoughts.over
            thought, text = self._thoughts.push(text)
            if ends:
                last = self._thoughts.end()
                thought, text = thought + last[0], text + last[1]
            if not before:
                tokens = self._scored(tokens, ends)
        called: Sequence[ToolCall] = ()
        if ends and isinstance(self._thoughts, ChannelParser):
            called = [ToolCall(*call) for call in self._thoughts.calls]
        if self._calls is not None:
            text = self._calls.push(text)
            if ends:
                rest, called = self._calls.end()
                text += rest
        calls = self.reading.notation.written(called, self.reading.before) if called and self.reading.notation is not None else []
        return CompletionParts(thought if self.reading.shows else "", text, calls, tokens)

    def _scored(self, tokens: Sequence[ScoredToken], ends: bool) -> list[ScoredToken]:
        """The tokens after the reasoning. They are held back until it is certain whether the completion has reasoning."""
        assert self._thoughts is not None
        self._passed += len(tokens)
        self._pending += tokens
        if not (ends or self._thoughts.over or self._thoughts.any):
            return []
        pending, self._pending = self._pending, []
        return [] if self._thoughts.any else pending
