"""Runs the engine requests of one API request and builds the response, whole or streamed, in the `ResponseFormat` of the API."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from argosy.infer.engine.request import Request
from argosy.infer.prompt_logprobs import PromptScores
from argosy.serve.engine.admission import timed_out
from argosy.serve.engine.replicas import RequestParts
from argosy.serve.openai.beams import BeamRequest
from argosy.serve.openai.fields import GenerationFields
from argosy.serve.openai.structured import StructureRequest
from argosy.serve.response.choice import ChoicePiece, CompletionChoice
from argosy.serve.response.parsing import CompletionFormat, CompletionParts, CompletionReader
from argosy.serve.response.streams import EventStreams
from argosy.serve.service import UNNAMED, Service
from argosy.serve.sse import EventStream, while_connected
from argosy.web.errors import ApiError, Json, service_unavailable

Documents = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of a response so far.

    prompt: number of prompt tokens. Each prompt counts once, whatever `n` is.
    completion: number of generated tokens. As in vLLM, those that ended a completion count.
    cached: number of prompt tokens found in the prefix cache.
    thinking: number of generated tokens up to the end of the reasoning.
    """

    prompt: int
    completion: int
    cached: int
    thinking: int


class ResponseFormat(Protocol):
    """The response format of one API.

    prefix: the prefix of the response id.
    named: whether stream events are named by the `type` of their JSON object.
    scores: the log-probabilities of each prompt, if requested. Set before any method is called.
    """

    prefix: str
    named: bool
    scores: Sequence[PromptScores]

    def whole(self, job: "GenerationJob") -> dict[str, Any]:
        """Returns the whole response."""
        ...

    def opening(self, job: "GenerationJob") -> Documents:
        """Returns the JSON objects that open a stream, before the first token."""
        ...

    def step(self, job: "GenerationJob", place: int, piece: ChoicePiece, parts: CompletionParts) -> Documents:
        """Returns the JSON objects that a stream sends for one new event of a completion.

        Args:
            place: index of the completion.
            piece: the text and the token that the event added.
            parts: the same, split into reasoning, text and calls.
        """
        ...

    def closing(self, job: "GenerationJob") -> Documents:
        """Returns the JSON objects that end a stream."""
        ...

    def failure(self, job: "GenerationJob", error: ApiError) -> dict[str, Any]:
        """Returns the last JSON object of a stream that has failed."""
        ...


@dataclass
class GenerationJob:
    """One validated API request.

    service: the service of the model.
    fields: the fields of the request's body.
    prompts: the token ids of each prompt, which is completed `n` times.
    requests: the engine requests, `n` for each prompt in order; empty if prompts are only scored.
    shape: the format of the response.
    wanted: the structure that completions must match; None: any text.
    reading: how completions are split into reasoning, text and calls.
    searches: the beam search for the completions of each prompt, in place of `requests`; empty: none.
    created: when the request arrived, in seconds since 1970.
    """

    service: Service
    fields: GenerationFields
    prompts: Sequence[list[int]]
    requests: Sequence[Request]
    shape: ResponseFormat
    wanted: StructureRequest | None = None
    reading: CompletionFormat = field(default_factory=CompletionFormat)
    searches: Sequence[BeamRequest] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.model = self.fields.model or self.service.name
        self.id = f"{self.shape.prefix}{self.fields.request_id or uuid.uuid4().hex}"
        if self.searches and self.wanted is not None:
            problem = f"`{self.wanted.param}` is not supported with `use_beam_search`"
            raise ApiError(problem, param=self.wanted.param, code="unsupported_parameter")
        n = self.fields.n
        options: Any = {"begun": self.wanted is not None, "marks": self.reading.marks}
        self.choices = [self.service.choice(self.fields, ids, **options) for ids in self.prompts for _ in range(n)]
        self.readers = [CompletionReader(self.reading) for _ in self.choices]
        if not self.requests:
            for choice in self.choices:
                choice.finish = "length"
        self.scored = self.prompts if self.fields.scoring else ()
        self._answers: EventStreams | RequestParts | None = None

    async def compile(self, threads: Executor) -> None:
        """Compiles the grammar of the completions.

        Raises:
            ApiError: the grammar is unsupported, compiling takes too long, or too many grammars are being compiled.
        """
        assert self.wanted is not None
        compiled = asyncio.get_running_loop().run_in_executor(threads, self.service.grammar, self.wanted)
        try:
            # Waiting for a thread has the same time limit as compiling.
            grammar = await asyncio.wait_for(compiled, 2 * self.service.limits.compile_seconds)
        except TimeoutError:
            raise service_unavailable("too many grammars are being compiled, try again later", "grammar_queue_full") from None
        self.requests = [replace(request, grammar=grammar) for request in self.requests]

    async def compile_prompts(self, threads: Executor) -> None:
        """Compiles the programs that score the prompts, while other requests keep running.

        Raises:
            ApiError: compiling takes too long.
        """
        prompts, limit = self.service.front.prompts, self.service.limits.seconds
        if sizes := prompts.missing(self.scored):
            compiled = asyncio.get_running_loop().run_in_executor(threads, prompts.compile, sizes)
            try:
                await asyncio.wait_for(compiled, limit)
            except TimeoutError:
                raise timed_out(limit) from None

    async def respond(self, http: HttpRequest) -> Response:
        """Runs the request, and returns the HTTP response. If the client disconnects, its engine requests are aborted. Once an update
        has named the weights, the header `x-weight-version` has the version that the request began with."""
        version = self.service.weight_version
        if not self.fields.stream:
            response: Response = Json(await while_connected(http.receive, self.answered()))
        else:
            documents = self.streamed()
            # Errors before the first JSON object get their own HTTP status.
            first = await while_connected(http.receive, anext(documents))
            failure = partial(self.shape.failure, self)
            response = EventStream(first, documents, self.service.limits.seconds, self.shape.named, failure)
        if version != UNNAMED:
            response.headers["x-weight-version"] = version
        return response

    @property
    def _names(self) -> tuple[str, ...]:
        """The ids by which /abort_requests may name the request."""
        return (self.id, *([self.fields.request_id] if self.fields.request_id else []))

    def _opened(self) -> AbstractAsyncContextManager[EventStreams | RequestParts]:
        """Opens its engine requests."""
        service = self.service
        return service.front.open(self.requests, self.scored, self._names, service.adapter_of(self.fields.model))

    async def answered(self) -> dict[str, Any]:
        """Runs the request to its end. Returns the response as one JSON object."""
        if self.searches:
            await self._search()
            return self.shape.whole(self)
        async with self._opened() as answers:
            self._answers = answers
            async for place, event in answers:
                self._take(answers, place, event)
            if self.scored:
                self.shape.scores = await answers.scored()
        return self.shape.whole(self)

    async def _search(self) -> None:
        """Runs the beam searches concurrently, and fills the choices with their completions."""
        async with AsyncExitStack() as stack:
            opened = []
            for i, search in enumerate(self.searches):
                arguments = search.requests(), self.scored[i : i + 1], self._names, self.service.adapter_of(self.fields.model)
                going = self.service.front.open(*arguments, goes_on=True)
                answers = await stack.enter_async_context(going)
                assert isinstance(answers, EventStreams)
                opened.append(answers)
            try:
                async with asyncio.TaskGroup() as group:
                    for search, answers in zip(self.searches, opened, strict=True):
                        group.create_task(search.run(answers))
            except* ApiError as errors:
                error = errors.exceptions[0]
                assert isinstance(error, ApiError)
                raise error from None
            if self.scored:
                self.shape.scores = [(await answers.scored())[0] for answers in opened]
        answer_events = [events for search in self.searches for events in search.events()]
        for choice, reader, events in zip(self.choices, self.readers, answer_events, strict=True):
            for event in events:
                top = self.fields.top or 0
                reader.push(choice.take(event._replace(top=event.top[:top])))

    async def streamed(self) -> AsyncGenerator[dict[str, Any]]:
        """Runs the request, and yields the JSON objects of the stream."""
        async with self._opened() as answers:
            self._answers = answers
            if self.scored:
                self.shape.scores = await answers.scored()
            for document in self.shape.opening(self):
                yield document
            async for place, event in answers:
                piece, parts = self._take(answers, place, event)
                for document in self.shape.step(self, place, piece, parts):
                    yield document
        for document in self.shape.closing(self):
            yield document

    def _take(self, answers: EventStreams | RequestParts, place: int, event: Any) -> tuple[ChoicePiece, CompletionParts]:
        piece = self.choices[place].take(event)
        if piece.finish is not None and event.finish_reason is None:
            answers.end(place, piece.finish)
        return piece, self.readers[place].push(piece)

    def counts(self) -> TokenCounts:
        reused = (search.cached for search in self.searches)
        if self._answers is not None:
            reused = map(self._answers.reused, range(0, len(self.requests), self.fields.n))
        return TokenCounts(
            prompt=sum(map(len, self.prompts)),
            completion=sum(len(choice.tokens) for choice in self.choices),
            cached=sum(reused),
            thinking=sum(reader.thinking for reader in self.readers),
        )


class Choices:
    """The base of the formats of completions and chats, whose JSON objects have a list of choices.

    prefix: the prefix of the response id.
    kind, part: the field `object` of a whole response and of a stream chunk.
    """

    prefix: str
    kind: str
    part: str
    named = False

    def __init__(self, fields: GenerationFields):
        self.options, self.asks = fields.stream_options, fields.top is not None or fields.return_token_ids
        self.scores: Sequence[PromptScores] = ()

    def opened(self, place: int) -> dict[str, Any] | None:
        """The choice that opens the stream of a completion, before its first token; None: nothing is sent."""
        raise NotImplementedError

    def chunk(self, place: int, choice: CompletionChoice, piece: ChoicePiece, parts: CompletionParts) -> dict[str, Any]:
        """The choice of a stream chunk, for one new event of a completion."""
        raise NotImplementedError

    def choice(self, place: int, choice: CompletionChoice, reader: CompletionReader) -> dict[str, Any]:
        """The choice of a whole completion."""
        raise NotImplementedError

    def about_prompt(self) -> dict[str, Any]:
        """Further fields of a whole response, about the prompt."""
        return {}

    def whole(self, job: GenerationJob) -> dict[str, Any]:
        choices = [self.choice(place, *both) for place, both in enumerate(zip(job.choices, job.readers, strict=True))]
        return _document(job, self.kind, choices) | self.about_prompt() | {"usage": _usage(job)}

    def opening(self, job: GenerationJob) -> Documents:
        opened = (self.opened(place) for place in range(len(job.choices)))
        return [_document(job, self.part, [choice]) for choice in opened if choice]

    def step(self, job: GenerationJob, place: int, piece: ChoicePiece, parts: CompletionParts) -> Documents:
        if not (parts.text or parts.thought or piece.finish or self.asks):
            return []
        document = _document(job, self.part, [self.chunk(place, job.choices[place], piece, parts)])
        if self.options and self.options.continuous_usage_stats:
            document["usage"] = _usage(job)
        return [document]

    def closing(self, job: GenerationJob) -> Documents:
        if not (self.options and self.options.include_usage):
            return []
        return [_document(job, self.part, []) | {"usage": _usage(job)}]

    def failure(self, job: GenerationJob, error: ApiError) -> dict[str, Any]:
        return error.body()


def _document(job: GenerationJob, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model, "choices": choices}


def _usage(job: GenerationJob) -> dict[str, Any]:
    counts = job.counts()
    usage: dict[str, Any] = {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }
    if job.reading.start is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": counts.thinking}
    return usage
