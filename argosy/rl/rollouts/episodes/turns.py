"""Converts model turns from tokens to the environment's input, and replies of the environment to tokens.

    prompt            a text                              messages
    a turn ends by    an end token, or the text `stop`    an end token
    the reply is      encoded and appended                rendered by the model's chat template

Tokens that the model sampled are never encoded again. If the prompt is messages, the conversation is rendered before a turn and after
the reply to it:
    before    <|im_start|>user .. <|im_end|> <|im_start|>assistant
    after     <|im_start|>user .. <|im_end|> <|im_start|>assistant .. <|im_end|> <|im_start|>tool .. <|im_end|> <|im_start|>assistant
The second text begins with the first one. Then follows the turn, up to the token that ends it. The rest is the reply. A template that
changes earlier text, for example by dropping the thoughts of earlier turns, is refused, because the model would be trained on text that
it never reads.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from argosy.core.errors import ArgosyError, BadInput
from argosy.core.sequences import common_length
from argosy.data.rows.prompts import Prompt, Prompts
from argosy.infer.tools.calls import call_ids
from argosy.infer.tools.channels import uses_channels
from argosy.infer.tools.notations import find_notation

OPEN, CLOSE = "<think>", "</think>"
# What is rendered to try a template. Letters alone, which no template changes.
PROBE, THOUGHT = "Probefortheanswer", "Probeforthethought"
CHANGES = "give a template that keeps every message as it was: data.template=FILE.jinja"


class HistoryRewritten(ArgosyError):
    """A chat template refused a conversation, changed the text before a turn, or rendered a turn whose end cannot be found."""


@dataclass(frozen=True)
class ObservationTokens:
    """A reply of the environment as the model reads it.

    tokens: the token ids of the reply.
    said: the messages of the reply.
    cut: whether the reply was cut to the largest length of an observation.
    """

    tokens: list[int]
    said: list[dict[str, Any]]
    cut: bool


@dataclass
class EpisodeConversation:
    """The conversation of one episode, which grows with each turn.

    prompt: the prompt.
    messages: the messages. If the prompt is a list of messages, these come first.
    text: the rendered conversation; empty if the prompt is a text.
    turn: the number of turns so far.
    """

    prompt: Prompt
    messages: list[dict[str, Any]]
    text: str = ""
    turn: int = 0


@dataclass(frozen=True)
class TurnCodec:
    """Converts turns to tokens and tokens to turns.

    prompts: the prompts, with their tokenizer and chat template.
    most: the largest length of an observation in tokens.
    role: the role of the message that is made of an observation that is a text.
    stop: a text that ends a turn, for prompts that are texts.
    """

    prompts: Prompts
    most: int
    role: str = "user"
    stop: str | None = None

    @property
    def tokenizer(self) -> Any:
        return self.prompts.tokenizer

    # ---------------------------------------------------------------- the beginning

    def begun(self, prompt: Prompt, observation: Any, room: int) -> tuple[EpisodeConversation, ObservationTokens]:
        """Begins a conversation. Returns it before the first turn, and the first observation as the model reads it. The prompt of the
        conversation ends with that observation, if there is one.

        Args:
            room: the largest length of the prompt with the observation, in tokens.

        Raises:
            BadInput: the observation does not fit the kind of prompt.
            HistoryRewritten: the prompt exceeds `room`, or the template refuses it.
        """
        messages, cut = self.observation(prompt, observation)
        if isinstance(prompt.content, str):
            ids = [token for message in messages for token in self.rest(message["content"], special=False)]
            talk = EpisodeConversation(replace(prompt, tokens=[*prompt.tokens, *ids]), messages)
        else:
            talk = EpisodeConversation(prompt, [*map(dict, prompt.content), *messages])
            talk.text = self.rendered(talk)
            if messages:
                talk.prompt = replace(prompt, tokens=self.tokenizer.encode(talk.text, special=True))
        if len(talk.prompt.tokens) > room:
            problem = f"the first observation makes a prompt of {len(talk.prompt.tokens)} tokens, above {room}"
            raise HistoryRewritten(f"{prompt.where}: {problem}")
        return talk, ObservationTokens([], messages, cut)

    # ---------------------------------------------------------------- turns of the model

    def stopped(self, text: str) -> bool:
        """Whether the text of a turn contains the text that ends a turn."""
        return self.stop is not None and self.stop in text

    def said(self, talk: EpisodeConversation, tokens: Sequence[int], text: str, ends: Collection[int]) -> Any:
        """Converts a model turn to the environment's input, which is a text or a message. The turn is added to the conversation, which
        is changed in place.

        Args:
            tokens: the token ids of the turn.
            text: the text of these tokens; used for prompts that are texts.
            ends: the tokens that may end a turn.
        """
        if isinstance(talk.prompt.content, str):
            talk.messages.append({"role": "assistant", "content": text})
            return text
        turn_tokens = tokens[:-1] if tokens and tokens[-1] in ends else tokens
        message = self.message(talk, turn_tokens)
        talk.messages.append({name: item for name, item in message.items() if name != "malformed"})
        return message

    def message(self, talk: EpisodeConversation, tokens: Sequence[int]) -> dict[str, Any]:
        tools = talk.prompt.tools
        notation = find_notation(self.prompts.template_for(tools), self.tokenizer, tools) if tools else None
        if notation is None:
            return {"role": "assistant", "content": self.tokenizer.decode(tokens)}
        stream = self.tokenizer.stream(marks=notation.marks)
        delta = notation.read("".join([stream.push(token) for token in tokens]) + stream.end())
        message: dict[str, Any] = {"role": "assistant"} | ({"thinking": delta.thought} if delta.thought else {})
        message["content"] = delta.text
        if delta.calls:
            calls = notation.written(delta.calls, call_ids(talk.messages), lambda place: _call_id(talk.turn, place))
            message["tool_calls"] = [call_as_object(call) for call in calls]
        elif delta.tried:
            message["malformed"] = True
        return message

    # ---------------------------------------------------------------- turns of the environment

    def follow(self, talk: EpisodeConversation, observation: Any, last: int | None, ends: Mapping[int, str]) -> ObservationTokens:
        """Returns the tokens between the end of a model turn and the start of the next one. The observation is added to the
        conversation, which is changed in place.

        Args:
            last: the token that ended the turn; None if a text ended the turn.
            ends: the tokens that may end a turn, with their texts.

        Raises:
            BadInput: the observation does not fit the kind of prompt.
            HistoryRewritten: the template refuses the conversation, or changed earlier text.
        """
        messages, cut = self.observation(talk.prompt, observation)
        talk.messages += messages
        talk.turn += 1
        if isinstance(talk.prompt.content, str):
            ids = [token for message in messages for token in self.rest(message["content"], special=False)]
            return ObservationTokens(ids, messages, cut)
        before, talk.text = talk.text, self.rendered(talk, ends.values())
        end, rest = turn_end(before, talk.text, ends.values())
        # A turn that the model ended by another token than the template's is followed by the template's too.
        ending = "" if last is not None and ends.get(last) == end else end
        return ObservationTokens(self.rest(ending + rest, special=True), messages, cut)

    def rendered(self, talk: EpisodeConversation, ends: Collection[str] = ()) -> str:
        """Renders the conversation as text, ready for a completion. Names of end tokens that the model spelled out as text are removed,
        because they would end its turn.

        Args:
            ends: the names of the end tokens.

        Raises:
            HistoryRewritten: the template refuses the conversation. A model turn can cause that, for instance by a call whose arguments
                are a list.
        """
        prompt_length = len(talk.prompt.content)
        turns = [
            without_names(message, ends) if message["role"] == "assistant" else message
            for message in talk.messages[prompt_length:]
        ]
        try:
            return self.prompts.text_of([*talk.messages[:prompt_length], *turns], talk.prompt.tools, talk.prompt.variables)
        except BadInput as error:
            raise HistoryRewritten(error.what) from None

    def observation(self, prompt: Prompt, value: Any) -> tuple[list[dict[str, Any]], bool]:
        """Converts an observation to messages. Each message is cut to its share of the largest length. Also returns whether any was
        cut.

        Raises:
            BadInput: messages for a prompt that is a text.
        """
        if value is None or value == []:
            return [], False
        if isinstance(value, Mapping):
            value = [{"role": self.role, "content": value["text"], "characters": value["characters"]}]
        elif isinstance(value, str):
            value = [{"role": self.role, "content": value}]
        elif isinstance(prompt.content, str):
            raise BadInput("an observation that is messages, for a prompt that is a text", where=prompt.where, hint="return a text")
        out, any_ = [], False
        for entry in value:
            message = {name: item for name, item in entry.items() if name != "characters"}
            if not isinstance(prompt.content, str):
                message["content"] = self.harmless(message["content"])
            message["content"], cut = self.fitted(message["content"], max(1, self.most // len(value)), entry.get("characters"))
            out.append(message)
            any_ |= cut
        return out, any_

    def harmless(self, text: str) -> str:
        """Breaks up the names of special tokens in a text, so that a text which a tool has read cannot end a turn and begin another."""
        names = self.tokenizer.special_names
        return text if names is None else names.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    def fitted(self, text: str, most: int, characters: int | None = None) -> tuple[str, bool]:
        """Cuts a text to a number of tokens. A text that is cut ends with a note of how much is missing. Also returns whether it was
        cut.

        Args:
            most: the largest length in tokens.
            characters: the length of the whole text in characters, if `text` is only its beginning.
        """
        ids = self.rest(text, special=False)
        if len(ids) <= most and characters is None:
            return text, False
        whole, count = characters or len(text), min(most, len(ids))
        while True:
            head = self.tokenizer.decode(ids[:count]) if count else ""
            out = f"{head}\n[cut: {whole - len(head):,} characters]"
            over = len(self.rest(out, special=False)) - most
            if over <= 0 or not count:
                return out, True
            count = max(0, count - over)

    def rest(self, text: str, special: bool) -> list[int]:
        """Encodes a text that continues another text.

        Args:
            special: whether names of special tokens in the text become special tokens.
        """
        return self.tokenizer.encode_with_offsets(text, special=special, rest=True)[0]

    # ---------------------------------------------------------------- before work starts

    def check(self, prompt: Prompt) -> None:
        """Checks the chat template on a conversation of several turns. Does nothing if the prompt is a text.

        Raises:
            BadInput: the template changes earlier turns, or writes no special token after a turn.
        """
        if isinstance(prompt.content, str):
            return
        if self.stop is not None:
            raise BadInput("environment.stop is for prompts that are texts; a turn of messages ends by its token", hint="leave it out")
        tools, variables = prompt.tools, prompt.variables
        try:
            check_turn_template(
                lambda messages: self.prompts.text_of(messages, tools, variables), prompt.content, self.role, tools,
                self.prompts.template_for(tools), self.tokenizer.special_names,
            )  # fmt: skip
        except (HistoryRewritten, BadInput) as error:
            problem = f"the chat template does not fit turns of an environment: {error.what}"
            raise BadInput(problem, where=error.where, hint=CHANGES) from None


def _call_id(turn: int, place: int) -> str:
    """Makes an id for a tool call. It has nine letters and digits, as Mistral's templates require, and is the same in every run."""
    return f"call{turn:03d}{place:02d}"[-9:]


def call_as_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a tool call to the form that templates read, with the arguments as an object instead of a text."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def without_names(item: Any, names: Collection[str]) -> Any:
    """Removes these names from all texts of a message, or of a part of a message."""
    if isinstance(item, str):
        # What is left may be a name in its turn.
        while present := [name for name in names if name and name in item]:
            item = item.replace(present[0], "")
        return item
    if isinstance(item, Mapping):
        return {without_names(key, names): without_names(value, names) for key, value in item.items()}
    return [without_names(part, names) for part in item] if isinstance(item, list) else item


def turn_end(before: str, after: str, ends: Collection[str]) -> tuple[str, str]:
    """Finds the end of a turn. Returns the text that ends the turn, and the text after that.

    Args:
        before: the conversation before the turn, ready for a completion.
        after: the conversation after the reply, ready for a completion.

    Raises:
        HistoryRewritten: `after` does not begin with `before`, or the turn has no end.
    """
    if not after.startswith(before):
        at = common_length(before, after)
        raise HistoryRewritten(f"it changes what came before a turn: {_excerpt(before, at)} becomes {_excerpt(after, at)}")
    candidates = [(at, end) for end in ends if end and (at := after.find(end, len(before))) >= 0]
    if not candidates:
        raise HistoryRewritten(f"it ends a turn of the model by none of its end tokens ({', '.join(sorted(ends))})")
    at, end = min(candidates)
    return end, after[at + len(end) :]


def _excerpt(text: str, at: int) -> str:
    part = text[max(0, at - 20) : at + 40]
    return repr(part) if part else "nothing"


def check_turn_template(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    prompt: Sequence[Mapping[str, Any]],
    role: str,
    tools: Sequence[Mapping[str, Any]] | None,
    template: str,
    names: re.Pattern[str] | None,
) -> None:
    """Checks a chat template on a conversation of three model turns. The replies are tool results if there are tools.

    The model turns contain thoughts if the template has marks for them. A thought is in a channel as in gpt-oss, between marks, or
    before the closing mark if the prompt has the opening mark.

    Args:
        render: renders a conversation, ready for a completion.
        prompt: the messages of the prompt.
        role: the role of replies that are texts.
        tools: the JSON schemas of the tools; None if there are none.
        template: the source of the template.
        names: finds the names of special tokens.

    Raises:
        HistoryRewritten, BadInput: the template cannot continue conversations, changes earlier turns, or drops their thoughts.
    """
    before, messages = render(prompt), list(prompt)
    ways = ["none"]
    if uses_channels(template):
        ways.append("channel")
    elif CLOSE in template and not before.rstrip().endswith(CLOSE):
        ways.append("open" if before.rstrip().endswith(OPEN) else "closed")
    for thought in ways:
        begun, messages = before, list(prompt)
        for turn in range(3):
            messages += trial_exchange(role, tools, turn, thought)
            after = render(messages)
            if not after.startswith(begun):
                turn_end(begun, after, ())
            tail = after[len(begun) :]
            word = tools[0]["function"]["name"] if tools else PROBE
            if word not in tail:
                raise HistoryRewritten("it does not write what the model said")
            if thought != "none" and THOUGHT not in tail:
                raise HistoryRewritten("it drops the thoughts of earlier turns")
            if names is None or names.search(tail, tail.index(word)) is None:
                raise HistoryRewritten("it writes no special token behind a turn of the model")
            begun = after


def trial_exchange(role: str, tools: Sequence[Mapping[str, Any]] | None, turn: int, thought: str) -> list[dict[str, Any]]:
    """Makes the messages of a model turn and of the reply to it, to check a template with.

    Args:
        role: the role of a reply that is a text.
        turn: the index of the turn.
        thought: how the turn marks its thought: `none`, `channel`, `closed` (between marks) or `open` (before the closing mark).
    """
    mind = {"closed": f"{OPEN}\n{THOUGHT}\n{CLOSE}\n\n", "open": f"{THOUGHT}\n{CLOSE}\n\n"}.get(thought, "")
    more = {"thinking": THOUGHT} if thought == "channel" else {}
    if not tools:
        return [{"role": "assistant", "content": mind + PROBE, **more}, {"role": role, "content": "ObservationTokens"}]
    name = tools[0]["function"]["name"]
    call = {"id": f"call{turn:03d}00", "type": "function", "function": {"name": name, "arguments": {}}}
    return [
        {"role": "assistant", "content": mind, "tool_calls": [call], **more},
        {"role": "tool", "name": name, "content": "ObservationTokens", "tool_call_id": call["id"]},
    ]
