"""A conversation with a server of OpenAI's API: keeps the messages, and streams replies.

A question and its reply are added together, or neither is. If a reply is stopped, the part that was read is kept. If it fails, or is
stopped before its first word, its question is removed too.
"""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.client.client import ClientTransport, ConnectionFailed, RequestRefused, ask, documents
from argosy.client.settings import ChatSampling
from argosy.core.counts import plural
from argosy.core.errors import BadInput

# The most tokens of a reply if plain text is continued, because a model without a chat template rarely ends it.
PLAIN_TOKENS = 64


@dataclass
class ChatReply:
    """One reply.

    text: the text so far.
    finish: the finish reason; None: the reply has not ended.
    tokens, prompt_tokens: the server's counts of tokens; None: the reply was stopped before they arrived.
    cached: the server's count of prompt tokens found in its prefix cache.
    first: seconds from the request to the first text.
    seconds: seconds from the request to the end.
    stopped: whether the user stopped it.
    """

    text: str = ""
    finish: str | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    cached: int = 0
    first: float = 0.0
    seconds: float = 0.0
    stopped: bool = False

    def __str__(self) -> str:
        if self.tokens is None or self.prompt_tokens is None:
            return f"stopped after {self.seconds:.1f} s" + ("" if self.text else ", before its first word: not kept")
        after = self.seconds - self.first
        speed = f", {(self.tokens - 1) / after:.1f} tokens/s" if self.tokens > 1 and after > 0 else ""
        cached = f", {self.cached:,} cached" if self.cached else ""
        cut = ", cut at max_tokens or the context" if self.finish == "length" else ""
        return f"{plural(self.tokens, 'token')}{speed}, first after {self.first:.2f} s, {self.prompt_tokens:,} of prompt{cached}{cut}"


@dataclass
class TokenTotals:
    """The sums of counts and times of all replies since the session began."""

    answers: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: ChatReply) -> None:
        self.answers += 1
        self.prompt_tokens += answer.prompt_tokens or 0
        self.cached += answer.cached
        self.tokens += answer.tokens or 0
        self.seconds += answer.seconds

    def __str__(self) -> str:
        return (
            f"{plural(self.answers, 'answer')}, {plural(self.tokens, 'token')} in {self.seconds:.1f} s; "
            f"{self.prompt_tokens:,} prompt tokens, {self.cached:,} of them cached"
        )


class ChatSession:
    """A conversation with a model on a server.

    Args:
        server: the connection to the server.
        model: the model's name on the server.
        sampling: the sampling settings.
        system: the system message; None: none.
        plain: whether the conversation is continued as one plain text, without a chat template.
    """

    def __init__(self, server: ClientTransport, model: str, sampling: ChatSampling, *, system: str | None = None, plain: bool = False):
        self.server, self.model, self.sampling, self.plain = server, model, sampling, plain
        # Called with pieces of reasoning, which is not kept in the messages.
        self.aside: Callable[[str], Any] = lambda text: None
        self.messages: list[dict[str, str]] = []
        self.totals = TokenTotals()
        self.system = system

    # ---------------------------------------------------------------- the messages

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None and self.plain:
            raise BadInput("plain text has no system message")
        del self.messages[: self.system is not None]
        self.messages[:0] = [] if text is None else [{"role": "system", "content": text}]

    def reset(self) -> None:
        """Removes all messages but the system message."""
        del self.messages[self.system is not None :]

    def undo(self) -> str:
        """Removes the last question with its reply. Returns the question.

        Raises:
            BadInput: there is no question.
        """
        places = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            raise BadInput("nothing was asked yet")
        question = self.messages[places[-1]]["content"]
        del self.messages[places[-1] :]
        return question

    def save(self, path: Path) -> None:
        """Writes the messages and the sampling settings as JSON.

        Raises:
            BadInput: the file cannot be written, or exists and is no conversation.
        """
        if path.exists():
            _messages_of(path)
        sampling = {name: value for name, value in self.sampling.model_dump().items() if name in ChatSampling.model_fields}
        try:
            path.write_text(json.dumps({"messages": self.messages, "settings": sampling}, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInput(f"cannot write {path}: {(error.strerror or '').lower()}") from None

    def load(self, path: Path) -> None:
        """Replaces the messages by those of a file: a saved conversation, or any list of messages. Sampling settings are not changed.

        Raises:
            BadInput: the file has no messages.
        """
        messages = _messages_of(path)
        if self.plain and any(message["role"] == "system" for message in messages):
            raise BadInput("plain text has no system message", where=str(path))
        self.messages = messages

    # ---------------------------------------------------------------- answers

    async def ask(self, text: str, write: Callable[[str], Any], stop: Callable[[], Any] = lambda: False) -> ChatReply:
        """Sends a question, streams the reply, and keeps both. The reply is cut soon after `stop()` returns true.

        Args:
            text: the question.
            write: called with each piece of the reply.

        Raises:
            ConnectionFailed, RequestRefused: there is no whole reply. The messages are not changed then.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        answer = ChatReply()
        try:
            await self._stoppable(answer, write, stop)
        except BaseException:
            self.messages = before
            raise
        if answer.stopped and not answer.text:
            self.messages = before
        else:
            self.messages.append({"role": "assistant", "content": answer.text})
        self.totals.add(answer)
        return answer

    async def _stoppable(self, answer: ChatReply, write: Callable[[str], Any], stop: Callable[[], Any]) -> None:
        work = asyncio.create_task(self._streamed(answer, write))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=0.05)
                if stop() and not work.done():
                    answer.stopped = True
                    break
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    async def _streamed(self, answer: ChatReply, write: Callable[[str], Any]) -> None:
        path, body = self.request()
        start, usage = time.perf_counter(), None
        try:
            async with self.server.send("POST", path, body) as reply, aclosing(documents(reply)) as stream:
                async for document in stream:
                    usage = document.get("usage") or usage
                    text, reasoning, finish = _piece(document)
                    answer.finish = finish or answer.finish
                    if text or reasoning:
                        answer.first = answer.first or time.perf_counter() - start
                        answer.text += text
                        self.aside(reasoning) if reasoning else write(text)
        finally:
            answer.seconds = time.perf_counter() - start
        if isinstance(usage, dict):
            answer.tokens, answer.prompt_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
            answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def request(self) -> tuple[str, dict[str, Any]]:
        """The route and the body of the request for the next reply."""
        sampling = {name: getattr(self.sampling, name) for name in ChatSampling.model_fields}
        body: dict[str, Any] = {"model": self.model} | {name: value for name, value in sampling.items() if value is not None}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if not self.plain:
            return "/v1/chat/completions", body | {"messages": self.messages}
        text = ""
        for message in self.messages:
            text += ("\n" if text and message["role"] == "user" else "") + message["content"]
        return "/v1/completions", {"max_tokens": PLAIN_TOKENS} | body | {"prompt": text}


async def first_model(server: ClientTransport) -> str:
    """The name of the first model that a server lists.

    Raises:
        ConnectionFailed, RequestRefused: the server cannot be reached, or lists no model.
    """
    listing = await ask(server, "GET", "/v1/models")
    with suppress(LookupError, TypeError):
        return str(listing["data"][0]["id"])
    raise ConnectionFailed("the server lists no models at /v1/models", hint="is it a server of OpenAI's API? `model=NAME` names one")


def too_long(error: RequestRefused) -> bool:
    """Whether the server refused a request because the conversation no longer fits into the model's context."""
    return error.code == "context_length_exceeded" or "context length" in error.what


def _piece(document: dict[str, Any]) -> tuple[str, str, str | None]:
    """The text, the reasoning and the finish reason in an event of the stream."""
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    delta = choice.get("delta") or {}
    text, reasoning = delta.get("content") or choice.get("text"), delta.get("reasoning_content") or delta.get("reasoning")
    return text or "", "" if text else reasoning or "", choice.get("finish_reason")


def _messages_of(path: Path) -> list[dict[str, str]]:
    try:
        conversation = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {(error.strerror or '').lower()}") from None
    except ValueError:
        raise BadInput(f"{path} holds no conversation") from None
    conversation = conversation.get("messages") if isinstance(conversation, dict) else conversation
    roles = ("system", "user", "assistant")
    if not isinstance(conversation, list) or not all(
        isinstance(m, dict) and m.get("role") in roles and isinstance(m.get("content"), str) for m in conversation
    ):
        raise BadInput(f"{path} holds no conversation", hint="`/save` writes one: {\"messages\": [...]}")
    messages = [{"role": m["role"], "content": m["content"]} for m in conversation]
    if any(m["role"] == "system" for m in messages[1:]):
        raise BadInput(f"{path}: a system message that is not the first")
    return messages
