"""Splits off reasoning, which models write between `<think>` and `</think>` before the answer (Qwen 3, DeepSeek R1, SmolLM 3).

Some chat templates write `<think>` at the end of the prompt, so the completion contains only the closing mark. Others switch thinking
off by writing an empty pair there. So the end of the rendered prompt decides whether a completion starts inside its reasoning or after
it. If the prompt ends with neither mark, the model decides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from argosy.core.errors import BadInput
from argosy.infer.tools.grammar import Structure
from argosy.serve.settings import REASONING, Parser
from argosy.web.errors import ApiError

OPEN, CLOSE = "<think>", "</think>"
# Number of tokens at the end of a prompt that are searched for a mark. `</think>` and line breaks fit, even as single bytes.
TAIL = 16

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Where a completion starts: inside its reasoning, or after it. open: the completion may begin with `<think>` itself.
Start = Literal["inside", "after", "open"]


def parser_of(parser: Parser, tokenizer: Any) -> Parser:
    """The parser to use with a tokenizer. `auto` becomes `none` if the marks cannot be found in decoded text.

    Raises:
        BadInput: a parser is named, but the tokenizer has `</think>` as a special token, which decodes to nothing.
    """
    if tokenizer is None:
        return "none"
    parsing = REASONING[parser]
    if parsing.tags and not tokenizer.hidden.isdisjoint(tokenizer.encode(CLOSE, special=True)):
        if not parsing.needed:
            return "none"
        problem = f"reasoning_parser={parser} needs `{CLOSE}` as text, and it is a special token of this model's tokenizer"
        raise BadInput(problem, hint="leave it out, or set reasoning_parser=none")
    return parser


def thinks(parser: Parser, template: str) -> bool:
    """Whether to split off reasoning between `<think>` and `</think>`, for a model with this chat template."""
    tags = REASONING[parser].tags
    return CLOSE in template if tags == "template" else tags


def thought_start(parser: Parser, tokenizer: Any, prompt: Sequence[int], continued: str | None) -> Start:
    """Whether the completion of a prompt starts inside its reasoning, after it, or may open it itself.

    Args:
        prompt: the token ids of the prompt.
        continued: the content of the last message, if the completion continues that message; None: it does not.
    """
    if continued is not None:
        return "inside" if continued.rfind(OPEN) > continued.rfind(CLOSE) else "after"
    # Only the end of the prompt counts, because user messages may contain the marks too.
    tail = tokenizer.decode(list(prompt[-TAIL:])).rstrip()
    if tail.endswith(CLOSE):
        return "after"
    return "inside" if tail.endswith(OPEN) or REASONING[parser].inside else "open"


def thinking_variables(effort: Effort | None, template: str) -> dict[str, Any]:
    """The template variables that set how much the model reasons: `enable_thinking`, which is true for every effort except `none`, and
    `reasoning_effort`. Only variables that the template reads are returned.

    Raises:
        ApiError: the template reads neither variable, or cannot switch reasoning off.
    """
    if effort is None:
        return {}
    variables: dict[str, Any] = {}
    if "enable_thinking" in template:
        variables["enable_thinking"] = effort != "none"
    if "reasoning_effort" in template and effort != "none":
        variables["reasoning_effort"] = effort
    if not variables and (effort != "none" or CLOSE in template or "reasoning_effort" in template):
        problem = f"`reasoning_effort` is not supported: this model's chat template cannot set it to {effort}"
        raise ApiError(problem, param="reasoning_effort", code="unsupported_parameter")
    return variables


class ThoughtSplitter:
    """Splits reasoning off a completion while its text arrives in pieces. Line breaks around the reasoning are dropped, as chat
    templates drop them when they render the message again.

    over: whether the reasoning has ended, or there is none.
    any: whether the completion has reasoning.
    """

    def __init__(self, start: Start):
        self.start, self.any = start, start == "inside"
        self.over = start == "after"
        self._held = ""
        # Whether the opening mark may still come. Some models repeat the one in their prompt.
        self._begins = not self.over
        # Whether line breaks between the closing mark and the answer may still come.
        self._trims = False

    def push(self, text: str) -> tuple[str, str]:
        """Adds a piece of text. Returns the reasoning and the answer that no later text can change."""
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
        """Drops the opening mark, if any. Returns false while it may still come."""
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
        """Ends the completion. Returns the rest of its reasoning and of its answer."""
        rest, self._held = self._held, ""
        if self.any and not self.over:
            return rest.rstrip("\n"), ""
        return "", rest


def after_thoughts(structure: Structure, start: Start) -> Structure:
    """The grammar of any reasoning followed by the structure. Reasoning is optional if `start` is `open`."""
    if start == "after":
        return structure
    thoughts = f"thoughts BLANK? answer\nthoughts: {'' if start == 'inside' else 'OPENING '}thought"
    rules = [
        f"start: {thoughts}" if start == "inside" else f"start: answer | {thoughts}",
        f'OPENING: "{OPEN}"',
        f"thought[lazy]: /(?s:.*){CLOSE.replace('/', chr(92) + '/')}/",
        r"BLANK: /\n{1,4}/",
        # Nested, so that its rule names cannot clash with these.
        f"answer: %lark {{\n{structure.lark}\n}}",
    ]
    return Structure(structure.kind, "\n".join(rules))


def with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a message, with its reasoning under both names, because chat templates read one or the other."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    return dict(message) | ({"reasoning_content": thought, "reasoning": thought} if thought else {})
