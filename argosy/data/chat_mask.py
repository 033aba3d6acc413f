"""Finds the tokens of a conversation that an assistant wrote: the ones that fine-tuning trains on.

Few templates mark the assistant's words (`{% generation %}`). For the others, renders are compared. A turn begins where the
render of the messages before it, with the generation prompt, ends; it ends where the render that stops with it ends. That is
exact if these renders are prefixes of the full one. Some templates rewrite earlier turns (drop their thoughts, or end the
last one with another token); for these a second comparison replaces the words of the turn. If neither finds the
turn, the result is an error, never a guess.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from argosy.core.errors import BadInput
from argosy.data.chat import Message, choose_template, render, rendered
from argosy.data.tokenizers import Span, Tokenizer

TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# A private-use character, with which no real word begins or ends.
PROBE = "\ue000"


def encode_with_mask(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime | None = None,
    **extra: Any,
) -> tuple[list[int], list[bool]]:
    """A conversation as ids, and for each id whether an assistant wrote it: its words and the token that ends its turn.

    The ids are those of the whole text, except where one token would span the end of a prompt and the beginning of an answer.
    The text is cut there, as it is at inference.

    Args:
        template: the name of one of the tokenizer's; see `choose_template`.
        tools, now, extra: as in `render`.

    Raises:
        BadInput: as `render_with_mask`; and where no token is an assistant's, since nothing would be trained.
    """
    source = choose_template(tokenizer.chat_templates, name=template, tools=bool(tools))
    ends = [tokenizer.decode([token], skip_special=False) for token in tokenizer.hidden]
    text, spans = render_with_mask(
        source, messages, tokenizer.special, ends=ends, name=template or "default", tools=tools, now=now, **extra
    )
    ids, places = tokenizer.encode_with_offsets(text, special=True)
    if cuts := straddled(ids, places, spans, tokenizer.hidden):
        ids, places = encode_cut(tokenizer, text, cuts)
    mask = [any(start <= begin < stop for start, stop in spans) for begin, _ in places]
    if not any(mask):
        raise BadInput(
            "no token of this conversation is an assistant's", hint="give at least one message of an assistant"
        )
    return ids, mask


def straddled(ids: Sequence[int], places: Sequence[Span], spans: Sequence[Span], hidden: Collection[int]) -> list[int]:
    """The edges of spans that lie inside a token of text. Special tokens are exempt: they may include blanks beside them."""
    edges = {edge for span in spans for edge in span}
    inside = {
        edge for edge in edges for token, (begin, end) in zip(ids, places) if begin < edge < end and token not in hidden
    }
    return sorted(inside)


def encode_cut(tokenizer: Tokenizer, text: str, cuts: Sequence[int]) -> tuple[list[int], list[Span]]:
    """Ids and spans of a text whose parts are encoded separately."""
    ids: list[int] = []
    places: list[Span] = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)]):
        part, spans = tokenizer.encode_with_offsets(text[start:stop], special=True)
        ids += part
        places += [(start + begin, start + end) for begin, end in spans]
    return ids, places


def render_with_mask(
    template: str,
    messages: Sequence[Message],
    special: Mapping[str, str],
    *,
    ends: Collection[str] = (),
    name: str = "default",
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime | None = None,
    **extra: Any,
) -> tuple[str, list[Span]]:
    """`render`, and which characters an assistant wrote: half-open spans, one per turn, none of them empty.

    Args:
        ends: the texts of special tokens. A turn ends with the last of them; blanks after it are the template's.
        name: the template's, for errors.

    Raises:
        BadInput: as `render`; and where the assistant's words cannot be located.
    """
    now = now or datetime.now()  # one clock for all renders
    variables = {"tools": tools, "add_generation_prompt": False} | extra
    if TAG.search(template):
        answer = rendered(template, messages, special, variables, now)
        text, spans = answer["text"], [(start, stop) for start, stop in answer["spans"]]
    else:
        renders = Renders(template, messages, special, {"tools": tools, "now": now} | extra, name)
        text = renders.whole
        spans = [renders.turn(place, ends) for place, m in enumerate(messages) if m.get("role") == "assistant"]
    spans = [(start, without_blanks(text, start, stop, ends)) for start, stop in spans]
    return text, [span for span in spans if span[0] < span[1]]


class Renders:
    """One conversation, rendered completely and in parts."""

    def __init__(
        self,
        template: str,
        messages: Sequence[Message],
        special: Mapping[str, str],
        how: Mapping[str, Any],
        name: str,
    ):
        self.template, self.messages, self.special, self.how, self.name = template, list(messages), special, how, name
        self.whole = self.of(self.messages)

    def of(self, messages: Sequence[Message], prompt: bool = False) -> str:
        return render(self.template, messages, self.special, add_generation_prompt=prompt, **self.how)

    def turn(self, place: int, ends: Collection[str]) -> Span:
        """The span of the message at a place in the whole text."""
        prompt = self.of(self.messages[:place], prompt=True)
        through = self.of(self.messages[: place + 1])
        start = len(prompt) if self.whole.startswith(prompt) else self.common_start(place, prompt)
        if self.whole.startswith(through):
            stop = len(through)
        else:
            stop = self.same_stop(start, through, ends) or self.common_stop(place, ends)
        if start > stop:
            raise self.unclear(place)
        return start, stop

    def with_other_words(self, place: int) -> str:
        """The whole text with a message's words replaced, which shows what surrounds them."""
        said = self.messages[place].get("content")
        if not isinstance(said, str) or not said.strip():
            raise self.unclear(place)
        other = {**self.messages[place], "content": PROBE}
        try:
            return self.of([*self.messages[:place], other, *self.messages[place + 1 :]])
        except BadInput:
            raise self.unclear(place) from None

    def common_start(self, place: int, prompt: str) -> int:
        """Where the prompt and the turn separate, independent of the words: a prompt may contain text that earlier turns do not
        keep."""
        other, before = self.with_other_words(place), self.of(self.messages[:place])
        start = shared(prompt, other)
        # There is no generation prompt: an answer begins with its first word.
        if prompt == before:
            return shared(self.whole, other)
        if start < len(before) or not self.whole.startswith(other[:start]):
            raise self.unclear(place)
        return start

    def same_stop(self, start: int, through: str, ends: Collection[str]) -> int | None:
        """After the first special token that also ends the turn when it is the last one, if the turn is then the same."""
        last = through.rstrip()
        mark = max((end for end in ends if end and last.endswith(end)), key=len, default="")
        stop = self.whole.find(mark, start) + len(mark)
        return stop if mark and start < stop and last.endswith(self.whole[start:stop]) else None

    def common_stop(self, place: int, ends: Collection[str]) -> int:
        """After the special token that follows the words, where the last turn ends with another one."""
        other = self.with_other_words(place)
        stop = len(self.whole) - shared(self.whole[::-1], other[::-1])
        found = max((end for end in ends if end and self.whole.startswith(end, stop)), key=len, default=None)
        if found is None:
            raise self.unclear(place)
        return stop + len(found)

    def unclear(self, place: int) -> BadInput:
        return BadInput(
            f"the chat template `{self.name}` does not show where message {place}, of the assistant, begins and ends",
            where="its render up to that message is not a prefix of the whole",
            hint="put {% generation %} and {% endgeneration %} around the assistant's words in the template",
        )


def shared(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    return next((place for place, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def without_blanks(text: str, start: int, stop: int, ends: Collection[str]) -> int:
    """A span's end, back at the special token that only blanks follow."""
    words = text[start:stop].rstrip()
    return start + len(words) if any(end and words.endswith(end) for end in ends) else stop
