"""Finds the tokens of a conversation that an assistant wrote, which fine-tuning trains on.

Few templates mark the assistant's words (`{% generation %}`). For the others, renders are compared. The messages before a turn are
rendered with the generation prompt, and the turn begins where this text ends. The messages up to and including the turn are rendered
too, and the turn ends where that text ends. This is exact if both texts are prefixes of the whole text. Some templates rewrite earlier
turns: they drop thoughts, or end the last turn with another token. For these, a second comparison replaces the words of the turn. If
neither finds the turn, the result is an error, and never a guess.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.sequences import common_length
from argosy.data.chat.omissions import with_known_roles
from argosy.data.chat.template import (
    CHILD,
    Child,
    Message,
    Part,
    RenderJob,
    all_rendered,
    checked_answer,
    children,
    choose_template,
)
from argosy.data.tokenizers import Span, Tokenizer

TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# A private-use character. No real word begins or ends with it.
PROBE = "\ue000"
# Number of conversations in one request to a rendering process. The round trip is then cheap compared with the rendering.
TOGETHER = 32
# The ids of a conversation, and for each id whether it counts in the loss, or its weight.
Ids = tuple[list[int], list[float]]


@dataclass(frozen=True)
class MaskedConversation:
    """The messages to encode, and the further inputs of the chat template.

    messages: the messages.
    tools: the JSON schemas of functions.
    variables: further variables of the template.
    learned: for each message, whether its words count in the loss, or their weight; None: all messages of the assistant count.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    learned: Sequence[float] | None = None


@dataclass(frozen=True)
class Way:
    """The settings with which conversations are encoded.

    templates: the chat templates by name.
    name: the name of the template to use, as in `choose_template`.
    now: the time that templates write; None: the current time.
    masked: whether only the assistant's tokens count in the loss; if not, every token does.
    """

    templates: Mapping[str, str]
    name: str | None = None
    now: datetime | None = None
    masked: bool = True


def encode_with_mask(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime | None = None,
    **extra: Any,
) -> Ids:
    """Encodes a conversation. Returns the ids, and for each id whether it belongs to the words of an assistant or ends its turn.

    The ids are those of the whole text, except at the beginning of an answer. The text is cut there, as in inference, if one token
    would span the end of the prompt and the beginning of the answer, or if the answer changes the tokens of the prompt before it.

    Args:
        template: the name of one of the tokenizer's templates, as in `choose_template`.
        tools, now, extra: as in `render`.

    Raises:
        BadInput: as in `render_with_mask`, or no token belongs to an assistant, so that nothing would be trained.
    """
    way = Way(tokenizer.chat_templates, template, now)
    (ids_and_mask,) = encode_chunk(tokenizer, [MaskedConversation(messages, tools, extra)], way, CHILD)
    if isinstance(ids_and_mask, BadInput):
        raise ids_and_mask
    if not any(ids_and_mask[1]):
        raise BadInput(
            "no token of this conversation is an assistant's", hint="give at least one message of an assistant"
        )
    return ids_and_mask


def encode_all(tokenizer: Tokenizer, conversations: Sequence[MaskedConversation], way: Way) -> Iterator[Ids | BadInput]:
    """Encodes many conversations on all cores, as `encode_with_mask` does. Yields for each, in order, its ids and mask, or the error.
    A mask may be all False."""
    processes = children()
    chunks = [conversations[at : at + TOGETHER] for at in range(0, len(conversations), TOGETHER)]
    with ThreadPoolExecutor(min(len(processes), len(chunks)) or 1) as threads:
        work = threads.map(
            lambda number: encode_chunk(tokenizer, chunks[number], way, processes[number % len(processes)]),
            range(len(chunks)),
        )
        for chunk in work:
            yield from chunk


def encode_chunk(
    tokenizer: Tokenizer, conversations: Sequence[MaskedConversation], way: Way, child: Child
) -> list[Ids | BadInput]:
    """Encodes conversations that one process renders in one request. The results are as in `encode_all`."""
    now = way.now or datetime.now()  # one clock for all renders
    ends = [tokenizer.decode([token], skip_special=False) for token in tokenizer.hidden]
    jobs = []
    templates = [choose_template(way.templates, name=way.name, tools=bool(conversation.tools)) for conversation in conversations]
    conversations = [in_known_roles(conversation, template) for conversation, template in zip(conversations, templates)]
    for conversation, template in zip(conversations, templates):
        whole = [(len(conversation.messages), False)]
        parts = _parts_of(template, conversation.messages) if way.masked else whole
        jobs.append(RenderJob(template, conversation.messages, parts, {"tools": conversation.tools} | dict(conversation.variables)))
    results: list[Ids | BadInput] = []
    for conversation, job, answers in zip(conversations, jobs, all_rendered(jobs, tokenizer.special, now, child)):
        try:
            renders = Renders(job, tokenizer.special, now, way.name or "default", dict(zip(job.parts, answers)), child)
            turns = renders.turns(ends) if way.masked else {}
            renders.check_calls(turns)
            spans = learned_turns(turns, conversation)
            weights = None if conversation.learned is None else [conversation.learned[place] for place in spans]
            results.append(encode_spans(tokenizer, renders.whole, list(spans.values()), way.masked, weights=weights))
        except BadInput as error:
            results.append(error)
    return results


def in_known_roles(conversation: MaskedConversation, template: str) -> MaskedConversation:
    """Converts the roles of a conversation to those that the template knows (`with_known_roles`)."""
    messages, learned = with_known_roles(conversation.messages, template), conversation.learned
    # Only system messages at the beginning become fewer.
    learned = None if learned is None else learned[len(conversation.messages) - len(messages) :]
    return replace(conversation, messages=messages, learned=learned)


def _parts_of(template: str, messages: Sequence[Message]) -> list[Part]:
    """The parts of a conversation to render in order to find the assistant's words: the whole conversation, and for each turn the
    messages before it with the generation prompt, and the messages up to its end."""
    whole = len(messages), False
    if TAG.search(template):
        return [whole]
    places = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    # Many templates fail without messages, or leave out the system prompt that they write before the first one.
    prompts = ((place, True) for place in places if place)
    return list(dict.fromkeys([whole, *prompts, *((place + 1, False) for place in places)]))


def learned_turns(turns: Mapping[int, Span], conversation: MaskedConversation) -> dict[int, Span]:
    """The spans of the turns that count in the loss, by the index of their message.

    Raises:
        BadInput: only some turns count, and the `{% generation %}` marks do not show which turn belongs to which message.
    """
    learned = conversation.learned
    if learned is None:
        return dict(turns)
    if any(place < 0 for place in turns):
        raise BadInput(
            "the template's {% generation %} marks are not one for each message of the assistant, and not all of those are learned",
            hint="learn all of them, or use a template without these marks",
        )
    return {place: span for place, span in turns.items() if learned[place]}


def encode_spans(
    tokenizer: Tokenizer,
    text: str,
    spans: Sequence[Span],
    masked: bool = True,
    special: bool = True,
    weights: Sequence[float] | None = None,
) -> Ids:
    """Encodes a text. Returns the ids, and for each id whether it lies in one of the spans of characters. With `weights`, one per span,
    ids in a span have its weight.

    The text before a span is encoded as a prompt is in inference: without the text after it.

    Args:
        masked: whether only ids in spans count; if not, all do.
        special: whether names of special tokens become those tokens.
    """
    ids, places = tokenizer.encode_with_offsets(text, special=special)
    if not masked:
        return ids, [True] * len(ids)
    cuts = unaligned_ends(ids, places, spans, tokenizer.hidden)
    cuts += [start for start, _ in spans if start not in cuts and not begins_as_prompt(tokenizer, text, ids, places, start, special)]
    if cuts:
        ids, places = encode_cut(tokenizer, text, sorted(cuts), special)
    begins, mask = [begin for begin, _ in places], list[float]([False] * len(ids))
    for (start, stop), weight in zip(spans, weights or [True] * len(spans)):
        first, last = bisect_left(begins, start), bisect_left(begins, stop)
        mask[first:last] = [weight] * (last - first)
    return ids, mask


def begins_as_prompt(
    tokenizer: Tokenizer, text: str, ids: Sequence[int], places: Sequence[Span], start: int, special: bool
) -> bool:
    """Whether the ids before the character `start` are those that encoding only the text before it would give. Only the text after the
    last special token is compared, because tokens before a special token do not affect those after it.
    """
    count = bisect_left(places, start, key=lambda place: place[0])
    first = next((place for place in range(count - 1, 0, -1) if ids[place] in tokenizer.hidden), 0)
    return not count or tokenizer.encode(text[places[first][0] : start], special=special) == list(ids[first:count])


def unaligned_ends(ids: Sequence[int], places: Sequence[Span], spans: Sequence[Span], hidden: Collection[int]) -> list[int]:
    """The beginnings and ends of spans that lie inside a token of text. Special tokens are exempt, because they may include neighboring
    blanks."""
    inside = []
    for edge in sorted({edge for span in spans for edge in span}):
        token = bisect_left(places, edge, key=lambda place: place[0]) - 1
        if token >= 0 and places[token][1] > edge and ids[token] not in hidden:
            inside.append(edge)
    return inside


def encode_cut(
    tokenizer: Tokenizer, text: str, cuts: Sequence[int], special: bool = True
) -> tuple[list[int], list[Span]]:
    """Cuts a text at character indices, and encodes the parts separately. Returns the ids, and the span of characters of each id."""
    ids: list[int] = []
    places: list[Span] = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)]):
        rest = start > 0 and tokenizer.puts_space
        part, spans = tokenizer.encode_with_offsets(text[start:stop], special=special, **({"rest": True} if rest else {}))
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
    """Renders a conversation. Returns the text, and the spans of characters that an assistant wrote: half-open, one per non-empty turn.

    Args:
        ends: the texts of special tokens. A turn ends after its last special token. Blanks after that belong to the template.
        name: the name of the template, for errors.
        template, messages, special, tools, now, extra: as in `render`.

    Raises:
        BadInput: as in `render`, or the assistant's words cannot be located.
    """
    now = now or datetime.now()
    job = RenderJob(template, messages, _parts_of(template, messages), {"tools": tools} | extra)
    (answers,) = all_rendered([job], special, now, CHILD)
    renders = Renders(job, special, now, name, dict(zip(job.parts, answers)), CHILD)
    return renders.whole, list(renders.turns(ends).values())


class Renders:
    """The text of one conversation, and of the beginnings of it that show where turns begin and end.

    whole: the text of the whole conversation.
    known: the results of the parts that were rendered already.
    name: the name of the template, for errors.
    """

    def __init__(
        self,
        job: RenderJob,
        special: Mapping[str, str],
        now: datetime,
        name: str,
        known: Mapping[Part, dict[str, Any] | BadInput],
        child: Child,
    ):
        self.job, self.messages, self.special, self.now = job, list(job.messages), special, now
        self.name, self.known, self.child = name, known, child
        self.whole = self.of(len(self.messages))

    def of(self, count: int, prompt: bool = False) -> str:
        """The rendered text of the first `count` messages. `prompt`: whether a generation prompt follows them."""
        answer = self.known.get((count, prompt))
        return self.render_once(self.messages, count, prompt) if answer is None else checked_answer(answer)["text"]

    def attempt(self, count: int, prompt: bool = False) -> str | None:
        """The same as `of`, or None if the template refuses these messages, for instance because there is no question."""
        try:
            return self.of(count, prompt)
        except BadInput:
            return None

    def render_once(self, messages: Sequence[Message], count: int, prompt: bool = False) -> str:
        job = RenderJob(self.job.template, messages, [(count, prompt)], self.job.variables)
        return checked_answer(all_rendered([job], self.special, self.now, self.child)[0][0])["text"]

    def turns(self, ends: Collection[str]) -> dict[int, Span]:
        """The span of each non-empty message of the assistant, by the index of the message. If the number of `{% generation %}` marks
        is not that of these messages, the keys are -1, -2, ...
        """
        places = [place for place, message in enumerate(self.messages) if message.get("role") == "assistant"]
        if TAG.search(self.job.template):
            spans = [(start, stop) for start, stop in checked_answer(self.known[len(self.messages), False])["spans"]]
            if len(spans) != len(places):
                places = [-1 - number for number in range(len(spans))]
        else:
            spans = [self.turn(place, ends) for place in places]
        spans = [(start, without_blanks(self.whole, start, stop, ends)) for start, stop in spans]
        return {place: span for place, span in zip(places, spans) if span[0] < span[1]}

    def check_calls(self, turns: Mapping[int, Span]) -> None:
        """Checks that the template writes tool calls. Otherwise a turn of calls would be learned as an empty answer.

        Args:
            turns: the spans that were found, by the index of their message.

        Raises:
            BadInput: the name of a called function is not in the turn that calls it, or, if the turn is not known, not in the text.
        """
        for place, message in enumerate(self.messages):
            start, stop = turns.get(place, (0, len(self.whole)))
            functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
            if any(str(function.get("name", "")) not in self.whole[start:stop] for function in functions):
                raise BadInput(
                    f"the chat template `{self.name}` does not write the tool calls of message {place}, of the assistant",
                    hint="use a template that knows tools (data.template=FILE.jinja), or leave such records out of the file",
                )

    def turn(self, place: int, ends: Collection[str]) -> Span:
        """The span of the message with index `place` in the whole text."""
        prompt, through = self.attempt(place, prompt=True) if place else None, self.attempt(place + 1)
        if prompt is None:
            start = self.header_stop(place)
        else:
            start = len(prompt) if self.whole.startswith(prompt) else self.common_start(place, prompt)
        if through is None:
            stop = self.common_stop(place, ends)
        elif self.whole.startswith(through):
            stop = len(through)
        else:
            stop = self.same_stop(start, through, ends) or self.common_stop(place, ends)
        if start > stop:
            raise self.unclear(place)
        return start, stop

    def with_other_words(self, place: int) -> str:
        """Renders the conversation with the words of one message replaced by PROBE. What stays the same is the text around them."""
        content = self.messages[place].get("content")
        if not isinstance(content, str) or not content.strip():
            raise self.unclear(place)
        other = {**self.messages[place], "content": PROBE}
        try:
            return self.render_once([*self.messages[:place], other, *self.messages[place + 1 :]], len(self.messages))
        except BadInput:
            raise self.unclear(place) from None

    def common_start(self, place: int, prompt: str) -> int:
        """The position where the turn begins, found by comparing the prompt with a render in which the words are replaced. The prompt
        may contain text that the template drops from earlier turns.
        """
        other, before = self.with_other_words(place), self.of(place)
        start = common_length(prompt, other)
        # There is no generation prompt: an answer begins with its first word.
        if prompt == before:
            return common_length(self.whole, other)
        if start < len(before) or not self.whole.startswith(other[:start]):
            raise self.unclear(place)
        return start

    def header_stop(self, place: int) -> int:
        """The position where a turn begins if the text before it cannot be rendered alone: an assistant begins the conversation, or the
        template refuses the messages before the turn.

        The turn begins after its header, the text that opens the reply to a question. The last occurrence of the header before the
        words is used, as far as it matches, because some templates open a thought there that they drop from earlier turns.
        """
        words = common_length(self.whole, self.with_other_words(place))
        question, header = self.generation_prompt(place)
        if not header:
            return words
        at, common = longest_shared(header, self.whole[:words])
        # In many templates a question begins with the same token as an answer, so that a match of this token alone is no header.
        if common <= longest_shared(header, question)[1]:
            raise self.unclear(place)
        return at + common

    def generation_prompt(self, place: int) -> tuple[str, str]:
        """The text of a question, and the text that the template adds after it to open a reply."""
        question = [{"role": "user", "content": PROBE}]
        try:
            prefix, opened = self.render_once(question, 1), self.render_once(question, 1, prompt=True)
        except BadInput:
            raise self.unclear(place) from None
        if not opened.startswith(prefix):
            raise self.unclear(place)
        return prefix, opened[len(prefix) :]

    def same_stop(self, start: int, through: str, ends: Collection[str]) -> int | None:
        """The end of the turn, found by the special token that ends it when it is the last turn: the position after the first such
        token in the whole text. None if the turn's text differs between the two renders.

        Args:
            start: the beginning of the turn.
            through: the text of the conversation up to the turn.
        """
        last = through.rstrip()
        mark = max((end for end in ends if end and last.endswith(end)), key=len, default="")
        stop = self.whole.find(mark, start) + len(mark)
        return stop if mark and start < stop and last.endswith(self.whole[start:stop]) else None

    def common_stop(self, place: int, ends: Collection[str]) -> int:
        """The position after the special token that follows the words. For templates that end the last turn with another token."""
        other = self.with_other_words(place)
        stop = len(self.whole) - common_length(self.whole[::-1], other[::-1])
        ending = max((end for end in ends if end and self.whole.startswith(end, stop)), key=len, default=None)
        if ending is None:
            raise self.unclear(place)
        return stop + len(ending)

    def unclear(self, place: int) -> BadInput:
        return BadInput(
            f"the chat template `{self.name}` does not show where message {place}, of the assistant, begins and ends",
            where="its render up to that message is not a prefix of the whole",
            hint="put {% generation %} and {% endgeneration %} around the assistant's words in the template",
        )


def longest_shared(part: str, text: str) -> tuple[int, int]:
    """Finds the longest beginning of `part` that occurs in a text. Returns the position of its last occurrence, and its length in
    characters.
    """
    begins = (at for at in range(len(text) - 1, -1, -1) if text[at] == part[0])
    at = max(begins, key=lambda at: common_length(part, text[at:]), default=len(text))
    return at, common_length(part, text[at:])


def without_blanks(text: str, start: int, stop: int, ends: Collection[str]) -> int:
    """The end of a span, without trailing blanks if a special token stands before them."""
    words = text[start:stop].rstrip()
    return start + len(words) if any(end and words.endswith(end) for end in ends) else stop
