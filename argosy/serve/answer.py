"""From requests of the engine to one response: whole, or as a stream. The shapes of the API are given."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from argosy.infer.engine import Request
from argosy.infer.prompts import PromptScores
from argosy.serve.admission import timed_out
from argosy.serve.choice import Choice, Piece
from argosy.serve.errors import Json, unavailable
from argosy.serve.fields import Generation
from argosy.serve.front import Answers
from argosy.serve.service import Service
from argosy.serve.sse import EventStream, while_connected
from argosy.serve.structured import Wanted


class Shape(Protocol):
    """What differs between completions and chats.

    prefix, whole, part: the beginning of the id, and the name of a document: a whole one, and one of a stream. scores: of each prompt,
    if asked; set before `opening` or `choice` is called.
    """

    prefix: str
    whole: str
    part: str
    scores: Sequence[PromptScores]

    def opening(self, place: int) -> dict[str, Any] | None:
        """The choice that opens the stream of an answer, before its first token."""
        ...

    def chunk(self, place: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The choice of a stream for what a token added."""
        ...

    def choice(self, place: int, choice: Choice) -> dict[str, Any]:
        """The choice of a whole answer."""
        ...

    def about_prompt(self) -> dict[str, Any]:
        """Further fields of a whole document."""
        ...


@dataclass
class Job:
    """One request to the API. prompts: their ids, each answered `n` times; requests: the engine's, in that order, none if the answers
    are the prompts alone. wanted: what the answers must match."""

    service: Service
    fields: Generation
    prompts: Sequence[list[int]]
    requests: Sequence[Request]
    shape: Shape
    wanted: Wanted | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.shape.prefix}-{self.fields.request_id or uuid.uuid4().hex}"
        n = self.fields.n
        begun = self.wanted is not None
        self.choices = [self.service.choice(self.fields, ids, begun=begun) for ids in self.prompts for _ in range(n)]
        if not self.requests:
            for choice in self.choices:
                choice.finish = "length"
        self.scored = self.prompts if self.fields.scoring else ()

    async def compile(self, threads: Executor) -> None:
        """Compiles the grammar of the answers.

        Raises:
            ApiError: it is not supported, takes too long, or others are being compiled.
        """
        assert self.wanted is not None
        compiled = asyncio.get_running_loop().run_in_executor(threads, self.service.grammar, self.wanted)
        try:
            # One waits for a thread as long as it may take there.
            grammar = await asyncio.wait_for(compiled, 2 * self.service.limits.compile_seconds)
        except TimeoutError:
            raise unavailable("too many grammars are being compiled, try again later", "grammar_queue_full") from None
        self.requests = [replace(request, grammar=grammar) for request in self.requests]

    async def compile_prompts(self, threads: Executor) -> None:
        """Compiles what the log-probabilities of the prompts need; running answers go on meanwhile.

        Raises:
            ApiError: it takes too long.
        """
        prompts, limit = self.service.front.prompts, self.service.limits.seconds
        if sizes := prompts.missing(self.scored):
            compiled = asyncio.get_running_loop().run_in_executor(threads, prompts.compile, sizes)
            try:
                await asyncio.wait_for(compiled, limit)
            except TimeoutError:
                raise timed_out(limit) from None

    async def respond(self, http: HttpRequest) -> Response:
        """The response. It ends with its client, and the engine forgets what is left of it."""
        if not self.fields.stream:
            return Json(await while_connected(http.receive, self.answered()))
        documents = self.streamed()
        # Errors until here have a status of their own.
        first = await while_connected(http.receive, anext(documents))
        return EventStream(first, documents, self.service.limits.seconds)

    async def answered(self) -> dict[str, Any]:
        """The whole answer."""
        async with self.service.front.open(self.requests, self.scored) as answers:
            async for place, event in answers:
                self._take(answers, place, event)
            if self.scored:
                self.shape.scores = await answers.scored()
        choices = [self.shape.choice(place, choice) for place, choice in enumerate(self.choices)]
        more = self.shape.about_prompt() | {"usage": self.usage(answers)}
        return self._document(self.shape.whole, choices) | more

    async def streamed(self) -> AsyncGenerator[dict[str, Any]]:
        """The documents of the stream."""
        options, part = self.fields.stream_options, self.shape.part
        async with self.service.front.open(self.requests, self.scored) as answers:
            if self.scored:
                self.shape.scores = await answers.scored()
            for place in range(len(self.choices)):
                if opening := self.shape.opening(place):
                    yield self._document(part, [opening])
            async for place, event in answers:
                piece = self._take(answers, place, event)
                if not (piece.text or piece.finish or self.fields.top is not None or self.fields.return_token_ids):
                    continue
                document = self._document(part, [self.shape.chunk(place, self.choices[place], piece)])
                if options and options.continuous_usage_stats:
                    document["usage"] = self.usage(answers)
                yield document
        if options and options.include_usage:
            yield self._document(part, []) | {"usage": self.usage(answers)}

    def _take(self, answers: Answers, place: int, event: Any) -> Piece:
        piece = self.choices[place].take(event)
        if piece.finish is not None and event.reason is None:
            answers.end(place, piece.finish)
        return piece

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.name, "choices": choices}

    def usage(self, answers: Answers) -> dict[str, Any]:
        """Token counts so far. A prompt counts once, whatever n is; tokens that ended an answer count, as in vLLM."""
        prompt = sum(map(len, self.prompts))
        made = sum(len(choice.tokens) for choice in self.choices)
        cached = sum(answers.reused(place) for place in range(0, len(self.requests), self.fields.n))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
