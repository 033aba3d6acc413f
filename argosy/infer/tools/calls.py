"""Calls of tools in the text of a completion: what every notation shares. `infer.tools.notations` has one file a notation.

Text that could be a call is held back until the completion ends. Text that does not parse as a call stays text. A call of a tool that
nobody offered is a call: who runs tools says what there is.

Notations mark calls by special tokens, which decode to nothing. So the text of a completion is made with a character for each mark that
Unicode will never assign, and a mark that is spelled in ordinary tokens is text. Where the tokenizer has no such token, the mark's
own name in the text is the mark.

A grammar makes the model call a tool, or makes the arguments of its calls match the tools' schemas.
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
    """arguments: JSON as text.
    id: as the model wrote it, if the notation has ids.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class CallDelta:
    """A whole completion.

    tried: it has something that begins as a call does.
    """

    text: str
    calls: Sequence[ToolCall] = ()
    thought: str = ""
    tried: bool = False


class CallNotation(ABC):
    """How a chat template writes calls, for one tokenizer.

    title: its name in messages to users.
    names: special tokens, each with the character that represents it.
    needs_marks: whether the tokenizer must have all of them.
    like_json: whether a call begins like any other JSON object.
    marks: characters of the tokenizer's special tokens, by id.

    Args:
        tokenizer: None: special tokens are written by their names.
        tools: the offered tools. Notations that write values without types read them by the tools' schemas.
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
        """A whole completion, as its text with marks."""

    def mark(self, name: str) -> str:
        """The text by which a special token appears in a completion."""
        return self.names[name] if name in self.ids else name

    def spelled(self, text: str) -> str:
        """A text with the names of its marks."""
        for name in self.ids:
            text = text.replace(self.names[name], name)
        return text

    # ---------------------------------------------------------------- ids

    def numbered(self, name: str, number: int) -> str | None:
        """The id that the template itself gives to a call. None: it reads that of the message.

        Args:
            number: of calls before it in the conversation.
        """
        return None

    def admits(self, value: str) -> bool:
        """Whether what the model wrote as an id is one."""
        return False

    def fresh(self) -> str:
        """A new id."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def written(
        self, calls: Sequence[ToolCall], before: Sequence[str], make: Callable[[int], str] | None = None
    ) -> list[dict[str, Any]]:
        """Calls as the API writes them, each with an id of its own.

        Args:
            before: the ids of the calls earlier in the conversation.
            make: an id for the call in this place, where neither the template nor the model gives one; None: random ones.
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
        """Messages as a template of this notation can read them, whoever wrote their calls."""
        return [dict(message) for message in messages]

    @classmethod
    def described(cls, tools: Sequence[Message] | None) -> list[dict[str, Any]] | None:
        """Tools as the template can read them."""
        return None if tools is None else [dict(tool) for tool in tools]

    # ---------------------------------------------------------------- grammars

    @abstractmethod
    def grammar(self, tools: Sequence[Message], *, must: bool, many: bool, answer: Structure | None = None) -> Structure:
        """The completions that call these tools, with arguments that match their schemas.

        Args:
            must: a completion is a call and nothing else; otherwise text, then calls if any.
            many: calls may follow each other, where the notation allows it.
            answer: what a completion matches that is no call, in the place of text.

        Raises:
            BadInput: the parameters of a tool are no schema, or one that cannot be forced.
        """

    def token(self, name: str) -> str:
        """A mark in a grammar: its token, or its name as text."""
        return f"<[{self.ids[name]}]>" if name in self.ids else json.dumps(name)


class TextNotation(CallNotation):
    """A notation of calls that stand in the text of a completion, or behind it."""

    @abstractmethod
    def split(self, text: str, first: bool) -> tuple[bool, int]:
        """Whether a call has begun, and the number of characters before it, or before what may become its beginning.

        Args:
            first: nothing came before this text.
        """

    @abstractmethod
    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """The calls of a text that begins with one, and the text beside them.

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
        """Rules of a Lark grammar: `calls`, of the tools with these names; `TEXT`, which has none; and `after_text`, text followed by
        calls. `arguments_0` and so on are the arguments of each.

        Args:
            many: calls may follow each other.
        """

    def arguments(self, place: int, function: Message) -> list[str]:
        """The rule `arguments_0` (or of another place), and those that it needs.

        Raises:
            BadInput: the parameters of the function are no schema, or one that cannot be forced.
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

    openings: the marks that begin calls, first the one that models are taught.
    """

    openings: ClassVar[Sequence[str]]

    def split(self, text: str, first: bool) -> tuple[bool, int]:
        openings = [self.mark(name) for name in self.openings]
        if places := [at for opening in openings if (at := text.find(opening)) >= 0]:
            return True, min(places)
        return False, len(text) - max(possible_prefix(opening, text) for opening in openings)

    @abstractmethod
    def rest(self, names: Sequence[str], many: bool) -> list[str]:
        """The rule `rest`, of what follows the mark that opens the first call, and those that it needs."""

    def rules(self, names: Sequence[str], many: bool) -> list[str]:
        opening = self.token(self.openings[0])
        rules = [*self.rest(names, many), f"calls: {opening} rest"]
        if self.openings[0] in self.ids:
            # No text has a special token.
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
    """The calls of one completion, whose text comes in pieces.

    begun: something begins as a call does.
    """

    notation: TextNotation
    begun: bool = False
    _held: str = field(default="", init=False)
    _first: bool = field(default=True, init=False)

    def push(self, text: str) -> str:
        """The text that is certainly part of no call."""
        self._held += text
        if self.begun:
            return ""
        self.begun, free = self.notation.split(self._held, self._first)
        text, self._held = self._held[:free], self._held[free:]
        self._first = self._first and not text
        return self.notation.spelled(text)

    def end(self) -> tuple[str, list[ToolCall]]:
        """The rest: text and calls."""
        rest, self._held = self._held, ""
        text, calls = rest, []
        if self.begun:
            with contextlib.suppress(ValueError, RecursionError):
                text, calls = self.notation.parse(rest)
        return self.notation.spelled(text if calls else rest), calls


# ---------------------------------------------------------------- what notations share


def special_token(tokenizer: Any, name: str) -> int | None:
    """The special token with this name; None: there is none, or it decodes to its name."""
    if tokenizer is None:
        return None
    ids = tokenizer.encode(name, special=True)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.hidden else None


def possible_prefix(mark: str, text: str) -> int:
    """The length of the beginning of a mark that a text ends with."""
    return max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


def call_ids(messages: Sequence[Message]) -> list[str]:
    """The ids of all calls of a conversation; an empty one for a call without."""
    return [str(call.get("id") or "") for message in messages for call in message.get("tool_calls") or []]


def parameters_schema(function: Mapping[str, Any]) -> Any:
    """The schema of a function's arguments. One without `parameters` has none, as OpenAI documents it."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return nothing if function.get("parameters") is None else function["parameters"]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def loads(text: str) -> Any:
    """Parses a JSON document, without the constants that Python adds to JSON.

    Raises:
        ValueError: it is not JSON.
    """
    return json.loads(text, parse_constant=_refuse)


def dumps(value: Any) -> str:
    """Arguments of a call as JSON.

    Raises:
        ValueError: a number is too large for a float, such as 1e999.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


_DECODER = json.JSONDecoder(parse_constant=_refuse)


_BLANKS = re.compile(r"\s*")


class CallScanner:
    """Walks over a text with calls.

    at: where it is.
    """

    def __init__(self, text: str):
        self.text, self.at = text, 0

    def blanks(self) -> None:
        self.match(_BLANKS)

    def at_end(self) -> bool:
        return self.at >= len(self.text)

    def takes(self, text: str) -> bool:
        """Whether this text comes next; then it is passed."""
        comes = self.text.startswith(text, self.at)
        self.at += len(text) if comes else 0
        return comes

    def match(self, pattern: "re.Pattern[str]") -> "re.Match[str]":
        """The match at this position, which is consumed.

        Raises:
            ValueError: the pattern does not match.
        """
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError("no call")
        self.at = match.end()
        return match

    def until(self, *marks: str) -> str:
        """The text before the next of these marks, or all that is left."""
        ends = [at for mark in marks if (at := self.text.find(mark, self.at)) >= 0]
        start, self.at = self.at, min(ends, default=len(self.text))
        return self.text[start : self.at]

    def json(self) -> tuple[Any, str]:
        """The JSON document at this position, and its text.

        Raises:
            ValueError: there is no JSON document.
        """
        start = self.at
        value, self.at = _DECODER.raw_decode(self.text, start)
        return value, self.text[start : self.at]


# Keys of a call that is an object. An object with other keys is no call: they would be lost.
OF_A_CALL = {"name", "arguments", "parameters", "id", "type"}


def call_names(call: Any, *, marked: bool = True) -> ToolCall:
    """A call from an object with its name and arguments.

    Args:
        marked: whether a special token marks it as a call; then a call without arguments may leave them out.

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
