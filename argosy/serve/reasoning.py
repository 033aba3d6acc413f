"""Reasoning models write thoughts between `<think>` and `</think>` before the answer (Qwen 3, DeepSeek R1, SmolLM 3).

Some chat templates open `<think>` at the end of the prompt, so that the answer has the closing mark alone; others write an empty
pair there to switch thinking off. The rendered prompt therefore says where an answer starts: inside its thoughts, after them, or
at a point where the model decides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from argosy.core.errors import BadInput
from argosy.infer.grammar import Structure
from argosy.serve.errors import ApiError
from argosy.serve.settings import Parser

OPEN, CLOSE = "<think>", "</think>"
# Tokens at the end of a prompt that may hold a mark: `</think>` and line breaks, a byte a token at worst.
TAIL = 16

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Where an answer starts: inside its thoughts, after them, or inside them only if it writes `<think>` itself.
Start = Literal["inside", "after", "open"]


def parser_of(parser: Parser, tokenizer: Any) -> Parser:
    """The parser for a model.

    Raises:
        BadInput: its tokenizer has `</think>` as a special token, which is no text of an answer.
    """
    if parser == "none" or tokenizer is None:
        return "none"
    if not tokenizer.hidden.isdisjoint(tokenizer.encode(CLOSE, special=True)):
        if parser == "auto":
            return "none"
        what = (
            f"reasoning_parser={parser} needs `{CLOSE}` as text, and this model's tokenizer has it as a special token"
        )
        raise BadInput(what, hint="leave it out, or set reasoning_parser=none")
    return parser


def thinks(parser: Parser, template: str) -> bool:
    """Whether thoughts are split off the answers of a chat template."""
    return parser != "none" and (parser != "auto" or CLOSE in template)


def start_of(parser: Parser, tokenizer: Any, prompt: Sequence[int], continued: str | None) -> Start:
    """Where the answer to a prompt starts.

    Args:
        continued: the content of the last message, if the answer continues it.
    """
    if continued is not None:
        return "inside" if continued.rfind(OPEN) > continued.rfind(CLOSE) else "after"
    # Only the end of the prompt counts: a user may write the marks too.
    tail = tokenizer.decode(list(prompt[-TAIL:])).rstrip()
    if tail.endswith(CLOSE):
        return "after"
    return "inside" if tail.endswith(OPEN) or parser == "deepseek_r1" else "open"


def variables_of(effort: Effort | None, template: str) -> dict[str, Any]:
    """The variables of a chat template that set how much the model thinks. Where the template only has a switch, every effort but
    none turns it on.

    Raises:
        ApiError: the template has neither a switch nor efforts, or no way to switch thinking off.
    """
    if effort is None:
        return {}
    found: dict[str, Any] = {}
    if "enable_thinking" in template:
        found["enable_thinking"] = effort != "none"
    if "reasoning_effort" in template and effort != "none":
        found["reasoning_effort"] = effort
    if not found and (effort != "none" or CLOSE in template or "reasoning_effort" in template):
        what = f"`reasoning_effort` is not supported: this model's chat template cannot set it to {effort}"
        raise ApiError(what, param="reasoning_effort", code="unsupported_parameter")
    return found


class Thoughts:
    """Splits the thoughts off an answer whose text comes in pieces. Line breaks around either part are dropped, as templates drop
    them when they render the message again.

    over: the thoughts have ended, or there are none. any: the answer has started with thoughts.
    """

    def __init__(self, start: Start):
        self.start, self.any = start, start == "inside"
        self.over = start == "after"
        self._held = ""
        # The opening mark may still come. A model may repeat the one in its prompt.
        self._begins = not self.over
        # Line breaks between the closing mark and the answer may still come.
        self._trims = False

    def push(self, text: str) -> tuple[str, str]:
        """The thought and the answer that are certain with this text."""
        self._held += text
        if self._begins and not self._begun():
            return "", ""
        if self.over:
            return "", self._answer()
        if (at := self._held.find(CLOSE)) >= 0:
            thought, self._held = self._held[:at].rstrip("\n"), self._held[at + len(CLOSE) :]
            self.over = self._trims = True
            return thought, self._answer()
        free = len(self._held) - max((n for n in range(1, len(CLOSE)) if self._held.endswith(CLOSE[:n])), default=0)
        free = len(self._held[:free].rstrip("\n"))
        thought, self._held = self._held[:free], self._held[free:]
        return thought, ""

    def _begun(self) -> bool:
        """Drops the opening mark. Returns whether it is known by now if there is one."""
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self.any, self._held = True, text[len(OPEN) :]
        elif OPEN.startswith(text):
            return False
        self.over = not self.any
        if self.any:
            self._held = self._held.lstrip("\n")
        # Line breaks may follow in the next piece.
        self._begins = self.any and not self._held
        return not self._begins

    def _answer(self) -> str:
        text, self._held = self._held, ""
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        return text

    def end(self) -> tuple[str, str]:
        """What is left once there is no more text."""
        held, self._held = self._held, ""
        if self.any and not self.over:
            return held.rstrip("\n"), ""
        return "", held


def after_thoughts(structure: Structure, start: Start) -> Structure:
    """What an answer must match so that it matches the structure after its thoughts, which are free."""
    if start == "after":
        return structure
    thoughts = f"thoughts BLANK? answer\nthoughts: {'' if start == 'inside' else 'OPENING '}thought"
    rules = [
        f"start: {thoughts}" if start == "inside" else f"start: answer | {thoughts}",
        f'OPENING: "{OPEN}"',
        f"thought[lazy]: /(?s:.*){CLOSE.replace('/', chr(92) + '/')}/",
        r"BLANK: /\n{1,4}/",
        # A grammar of its own: the names of its rules cannot clash with these.
        f"answer: %lark {{\n{structure.lark}\n}}",
    ]
    return Structure(structure.kind, "\n".join(rules))


def with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its thoughts under both names that chat templates read."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    return dict(message) | ({"reasoning_content": thought, "reasoning": thought} if thought else {})
