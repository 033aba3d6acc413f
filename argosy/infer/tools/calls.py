"""Tool calls in the text of a completion: the code that all notations share. `infer.tools.notations` has one file for each notation.

Text that could be a call is held back until the completion ends. Text that does not parse as a call remains text. A call of a tool that
was not offered is returned as a call, and the client that runs the tools rejects it.

Notations mark calls by special tokens, which decode to nothing. So here each mark is decoded to a character that Unicode will never
assign, and a mark spelled in ordinary tokens remains text. If the tokenizer has no special token of this name, the name in the text is
the mark.

A grammar can force the model to call a tool, or force the arguments of its calls to match the tools' schemas.
"""

import contextlib
import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from argosy.infer.tools.grammar import Structure, json_rule

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the model wrote.

    name: the name of the tool.
    arguments: the arguments, as the text of a JSON object.
    id: the id that the model wrote; None: it wrote none.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class CallDelta:
    """A whole completion, parsed.

    text: the text besides the calls and the reasoning.
    calls: the tool calls.
    thought: the reasoning.
    tried: whether something in it begins like a call, even if it does not parse as one.
    """

    text: str
    calls: Sequence[ToolCall] = ()
    thought: str = ""
    tried: bool = False


class CallNotation(ABC):
    """The notation in which a chat template writes tool calls, for one tokenizer.

    title: the notation's name in messages to users.
    names: the names of its special tokens, each with the character that it is decoded to.
    needs_marks: whether the tokenizer must have all these special tokens.
    like_json: whether a call begins like any other JSON object.
    ids: the ids of those special tokens that the tokenizer has, by name.
    marks: the characters that these are decoded to, by token id.

    Args:
        template: the chat template.
        tokenizer: the tokenizer; None: special tokens appear as their names.
        tools: the offered tools. Notations that write values without types parse them by the tools' schemas.
    """

    title: ClassVar[str]
    names: ClassVar[Mapping[str, str]] = {}
    needs_marks: ClassVar[bool] = False
    like_json: ClassVar[bool] = False

    def __init__(self, template: str, tokenizer: Any = None, tools: Sequence[Message] = ()):
        self.template, self.tools = template, tools
        self.ids = {name: token for name in self.names if (token := special_token(tokenizer, name)) is not None}
        self.marks = {token: self.names[name] for name, token in self.ids.items()}

    @classmethod
    @abstractmethod
    def taught_by(cls, template: str) -> bool:
        """Whether a chat template writes calls this way."""

    # ---------------------------------------------------------------- reading

    @abstractmethod
    def read(self, text: str) -> CallDelta:
        """Parses a whole completion, given as text with characters for marks."""

    def mark(self, name: str) -> str:
        """The text that a special token appears as in a completion."""
        return self.names[name] if name in self.ids else name

    def spelled(self, text: str) -> str:
        """Replaces the characters for marks in a text by the marks' names."""
        for name in self.ids:
            text = text.replace(self.names[name], name)
        return text

    # ---------------------------------------------------------------- ids

    def numbered(self, name: str, number: int) -> str | None:
        """The id that the template itself gives to a call; None: it takes the id in the message.

        Args:
            name: the name of the called tool.
            number: number of calls before this one in the conversation.
        """
        return None

    def admits(self, value: str) -> bool:
        """Whether an id that the model wrote is valid in this notation."""
        return False

    def fresh(self) -> str:
        """A new random id."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def written(
        self, calls: Sequence[ToolCall], before: Sequence[str], make: Callable[[int], str] | None = None
    ) -> list[dict[str, Any]]:
        """Converts calls to the format of OpenAI's API, each with a unique id.

        Args:
            before: the ids of the calls earlier in the conversation.
            make: returns the id for the call with this index, if neither the template nor the model gives one; None: ids are random.
        """
        entries: list[dict[str, Any]] = []
        ids = set(before)
        for i, call in enumerate(calls):
            call_id = call.id if call.id is not None and call.id not in ids and self.admits(call.id) else None
            name = self.numbered(call.name, len(before) + i) or call_id or (self.fresh() if make is None else make(i))
            ids.add(name)
            entries.append({"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
        return entries

    # ---------------------------------------------------------------- writing

    @classmethod
    def messages(cls, messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
        """Copies messages, converted so that the template can render their calls."""
        return [dict(message) for message in messages]

    @classmethod
    def described(cls, tools: Sequence[Message] | None) -> list[dict[str, Any]] | None:
        """Copies tools, converted so that the template can render them."""
        return None if tools is None else [dict(tool) for tool in tools]

    # ---------------------------------------------------------------- grammars

    @abstractmethod
    def grammar(self, tools: Sequence[Message], *, must: bool, many: bool, answer: Structure | None = None) -> Structure:
        """The grammar of completions that may call these tools, with arguments that match the tools' schemas.

        Args:
            must: whether a completion must consist of calls; if not, it is text, then calls if any.
            many: whether several calls may follow each other, if the notation allows it.
            answer: the structure of a completion without calls; None: any text.

        Raises:
            BadInput: the parameters of a tool are no JSON schema, or one that cannot be forced.
        """

    def token(self, name: str) -> str:
        """A mark as it is written in a grammar: its special token, or its name as a text literal."""
        return f"<[{self.ids[name]}]>" if name in self.ids else json.dumps(name)


class TextNotation(CallNotation):
    """A notation whose calls are part of the text of a completion, or follow it."""

    @abstractmethod
    def split(self, text: str, first: bool) -> tuple[bool, int]:
        """Searches for the beginning of a call. Returns whether a call has begun, and the number of characters before it, or before
        characters that may become its beginning.

        Args:
            first: whether the completion begins with this text.
        """

    @abstractmethod
    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Parses a text that begins with a call. Returns the text besides the calls, and the calls.

        Raises:
            ValueError: it is no call after all.
        """

    def read(self, text: str) -> CallDelta:
        calls = CallParser(self)
        text = calls.push(text)
        rest, tool_calls = calls.end()
        return CallDelta(text + rest, tool_calls, tried=calls.begun)

    @abstractmethod
    def rules(self, names: Sequence[str], many: bool) -> list[str]:
        """Rules of a Lark grammar: `calls` matches calls of the tools with these names, `TEXT` matches text without calls, and
        `after_text` matches text followed by calls. They refer to `arguments_0` and so on for the arguments of each tool.

        Args:
            many: whether several calls may follow each other.
        """

    def arguments(self, place: int, function: Message) -> list[str]:
        """The rule `arguments_{place}` for the arguments of a function, and the rules that it refers to.

        Raises:
            BadInput: the parameters of the function are no JSON schema, or one that cannot be forced.
        """
        return [json_rule(f"arguments_{place}", parameters_schema(function))]

    def grammar(self, tools: Sequence[Message], *, must: bool, many: bool, answer: Structure | None = None) -> Structure:
        functions = [tool["function"] for tool in tools]
        rules = [rule for i, function in enumerate(functions) for rule in self.arguments(i, function)]
        rules += self.rules([function["name"] for function in functions], many)
        if must:
            rules.append("start: calls")
        elif answer is not None:
            rules += ["start: answer | calls", f"answer: {answer.lark.removeprefix('start: ')}"]
        else:
            rules.append("start: TEXT | after_text")
        return Structure("tools", "\n".join(rules))


class MarkedNotation(TextNotation):
    """A notation whose calls follow a mark.

    openings: the marks that begin calls. The first is the one that models are trained to write.
    """

    openings: ClassVar[Sequence[str]]

    def split(self, text: str, first: bool) -> tuple[bool, int]:
        openings = [self.mark(name) for name in self.openings]
        if places := [at for opening in openings if (at := text.find(opening)) >= 0]:
            return True, min(places)
        return False, len(text) - max(possible_prefix(opening, text) for opening in openings)

    @abstractmethod
    def rest(self, names: Sequence[str], many: bool) -> list[str]:
        """The rule `rest`, for the text after the opening mark of the first call, and the rules that it refers to."""

    def rules(self, names: Sequence[str], many: bool) -> list[str]:
        opening = self.token(self.openings[0])
        rules = [*self.rest(names, many), f"calls: {opening} rest"]
        if self.openings[0] in self.ids:
            # Text cannot contain a special token.
            return [*rules, "TEXT: /(?s:.*)/", "after_text: TEXT calls"]
        patterns = [re.escape(name).replace("/", r"\/") for name in self.openings]
        return [
            *rules,
            f"TEXT: /(?s:.*)/ & ~/(?s:.*)({'|'.join(patterns)})(?s:.*)/",
            f"opened[lazy]: /(?s:.*){patterns[0]}/",
            "after_text: opened rest",
        ]


@dataclass
class CallParser:
    """Finds the calls of one completion while its text arrives in pieces.

    begun: whether a call may have begun.
    """

    notation: TextNotation
    begun: bool = False
    _held: str = field(default="", init=False)
    _first: bool = field(default=True, init=False)

    def push(self, text: str) -> str:
        """Adds a piece of text. Returns the text that is certainly not part of a call."""
        self._held += text
        if self.begun:
            return ""
        self.begun, free = self.notation.split(self._held, self._first)
        text, self._held = self._held[:free], self._held[free:]
        self._first = self._first and not text
        return self.notation.spelled(text)

    def end(self) -> tuple[str, list[ToolCall]]:
        """Ends the completion. Returns the rest of its text, and its calls."""
        rest, self._held = self._held, ""
        text, calls = rest, []
        if self.begun:
            with contextlib.suppress(ValueError, RecursionError):
                text, calls = self.notation.parse(rest)
        return self.notation.spelled(text if calls else rest), calls


# ---------------------------------------------------------------- what notations share


def special_token(tokenizer: Any, name: str) -> int | None:
    """The id of the special token with this name; None: there is no such token, or it decodes to its name."""
    if tokenizer is None:
        return None
    ids = tokenizer.encode(name, special=True)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.hidden else None


def possible_prefix(mark: str, text: str) -> int:
    """The length of the longest beginning of a mark that a text ends with."""
    return max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


def call_ids(messages: Sequence[Message]) -> list[str]:
    """The ids of all calls in a conversation; an empty text for a call without an id."""
    return [str(call.get("id") or "") for message in messages for call in message.get("tool_calls") or []]


def parameters_schema(function: Mapping[str, Any]) -> Any:
    """The JSON schema of a function's arguments. A function without `parameters` takes no arguments, as OpenAI documents it."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return nothing if function.get("parameters") is None else function["parameters"]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def loads(text: str) -> Any:
    """Parses JSON, without the constants NaN and Infinity that Python adds.

    Raises:
        ValueError: the text is not JSON.
    """
    return json.loads(text, parse_constant=_refuse)


def dumps(value: Any) -> str:
    """Writes the arguments of a call as JSON.

    Raises:
        ValueError: a number is too large for a float, such as 1e999.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


_DECODER = json.JSONDecoder(parse_constant=_refuse)


_BLANKS = re.compile(r"\s*")


class CallScanner:
    """Scans a text with calls from left to right.

    text: the text.
    at: index of the next character.
    """

    def __init__(self, text: str):
        self.text, self.at = text, 0

    def blanks(self) -> None:
        self.match(_BLANKS)

    def at_end(self) -> bool:
        return self.at >= len(self.text)

    def takes(self, text: str) -> bool:
        """Whether `text` comes next. If so, it is consumed."""
        comes = self.text.startswith(text, self.at)
        self.at += len(text) if comes else 0
        return comes

    def match(self, pattern: "re.Pattern[str]") -> "re.Match[str]":
        """Matches a pattern at this position, and consumes and returns the match.

        Raises:
            ValueError: the pattern does not match.
        """
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError("no call")
        self.at = match.end()
        return match

    def until(self, *marks: str) -> str:
        """Consumes and returns the text before the next of these marks, or all the rest if none follows."""
        ends = [at for mark in marks if (at := self.text.find(mark, self.at)) >= 0]
        start, self.at = self.at, min(ends, default=len(self.text))
        return self.text[start : self.at]

    def json(self) -> tuple[Any, str]:
        """Consumes the JSON value at this position. Returns the value and its text.

        Raises:
            ValueError: there is no JSON value.
        """
        start = self.at
        value, self.at = _DECODER.raw_decode(self.text, start)
        return value, self.text[start : self.at]


# Keys that a call written as a JSON object may have. An object with other keys is no call, because they would be lost.
OF_A_CALL = {"name", "arguments", "parameters", "id", "type"}


def call_names(call: Any, *, marked: bool = True) -> ToolCall:
    """Reads a call from a JSON object with its name and arguments.

    Args:
        marked: whether a special token marks the object as a call. If so, a call without arguments may omit the key.

    Raises:
        ValueError: the object is no call.
    """
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or set(call) - OF_A_CALL:
        raise ValueError("no call")
    candidates = [call[name] for name in ("arguments", "parameters") if name in call]
    if len(candidates) > 1 or not (candidates or marked):
        raise ValueError("no call")
    arguments = candidates[0] if candidates else {}
    text = arguments if isinstance(arguments, str) else dumps(arguments)
    return ToolCall(call["name"], text, call["id"] if isinstance(call.get("id"), str) else None)
