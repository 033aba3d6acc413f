"""/v1/responses: OpenAI's newer API, translated to chat requests and back."""

import asyncio
import sys
import traceback
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from argosy.serve.openai.chat import ChatRequest, read_chat
from argosy.serve.openai.fields import ChatFields, SamplingFields, Stops
from argosy.serve.openai.response_store import ResponseStore, StoredResponse
from argosy.serve.openai.responses_input import input_messages, with_instructions
from argosy.serve.openai.responses_output import ResponseWriter
from argosy.serve.response.reasoning import Effort
from argosy.serve.response.writer import GenerationJob
from argosy.serve.service import Service
from argosy.web.errors import ApiError, Json, renaming
from argosy.web.fields import IGNORED

# Fields of chat requests, with their names in this API, for errors.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: dict[str, Any] | None = None
    # The default of OpenAI, and the only one supported.
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(BaseModel):
    """Options for reasoning.

    effort: how much the model reasons.
    summary: accepted with the value `auto` only, and no summary is made. The response has the reasoning itself.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class Responses(SamplingFields):
    """A body of /v1/responses."""

    ignored: ClassVar = {*IGNORED, "prompt_cache_retention"}
    neutral: ClassVar = {
        "access_programs": (), "background_options": (), "context_management": ([],), "conversation": (), "image": (),
        "max_tool_calls": (), "moderation": (), "prompt": (), "prompt_cache_options": (), "service_tier": ("auto", "default"),
        "stream_options": ({}, {"include_obfuscation": False}), "truncation": ("disabled",),
    }  # fmt: skip

    # `responses_input.input_messages` checks its forms.
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stop: Stops = Field([])
    text: TextOptions = TextOptions()
    tools: list[dict[str, Any]] = Field([])
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    include_reasoning: bool = True
    # Encrypted content has no effect: reasoning items carry their text, which can be sent back.
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field([])
    top_logprobs: int | None = Field(None, ge=0)
    chat_template_kwargs: dict[str, Any] = Field({})
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool = False
    metadata: dict[str, str] = Field({})

    @model_validator(mode="after")
    def _go_together(self) -> "Responses":
        if self.top_logprobs and not self.logprobs:
            problem = '`top_logprobs` need `include: ["message.output_text.logprobs"]`'
            raise ApiError(problem, param="top_logprobs")
        if self.background and (self.stream or self.store is False):
            wrong = "stream" if self.stream else "store"
            raise ApiError(
                f"a response in the `background` cannot have `{wrong}: {str(self.stream).lower()}`", param=wrong
            )
        return self

    @property
    def logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include


def prepare_responses(service: Service, body: Any) -> GenerationJob:
    """Validates a body of /v1/responses and turns it into a job.

    Raises:
        ApiError: a field is invalid or unsupported.
    """
    fields = Responses.of(body)
    store = response_store(service, fields)
    messages = [*_before(service.store, fields.previous_response_id), *input_messages(fields.input)]
    body = {
        **fields.sampled(),
        "messages": with_instructions(fields.instructions, messages),
        "max_completion_tokens": fields.max_output_tokens,
        "stop": fields.stop,
        "response_format": _format(fields.text.format),
        "tools": [_tool(tool, f"tools.{i}") for i, tool in enumerate(fields.tools)] or None,
        "tool_choice": _choice(fields.tool_choice),
        "parallel_tool_calls": fields.parallel_tool_calls,
        "reasoning_effort": fields.reasoning.effort,
        "include_reasoning": fields.include_reasoning,
        "logprobs": fields.logprobs,
        "top_logprobs": fields.top_logprobs if fields.logprobs else None,
        "chat_template_kwargs": fields.chat_template_kwargs,
    }
    with renaming(NAMES):
        chat_request = read_chat(service, ChatFields.of(body))
    return Work.of(service, chat_request, ResponseWriter(service, fields.model_dump(), messages, store), fields.background)


def response_store(service: Service, fields: Responses) -> ResponseStore | None:
    """The store in which to keep the response; None: it is not kept.

    Raises:
        ApiError: a field needs the store, and this server has none.
    """
    if service.store is None:
        asks = {
            "store": fields.store,
            "background": fields.background,
            "previous_response_id": fields.previous_response_id,
        }
        for name, value in asks.items():
            if value:
                raise no_store(name)
        return None
    return None if fields.store is False else service.store


def no_store(name: str | None = None) -> ApiError:
    problem = f"`{name}` is not supported: " if name else ""
    problem += "this server keeps no responses (its setting `stored_responses` says how many)"
    return ApiError(problem, status=400 if name else 404, param=name, code="unsupported_parameter" if name else None)


def _before(store: ResponseStore | None, name: str | None) -> list[dict[str, Any]]:
    """The messages of the conversation up to and including an earlier response."""
    if name is None or store is None:
        return []
    try:
        stored = store.get(name)
    except ApiError as error:
        raise ApiError(error.message, param="previous_response_id", code="previous_response_not_found") from None
    if stored.document["status"] not in ("completed", "incomplete"):
        problem = f"the response `{name[:64]}` is {stored.document['status']}"
        raise ApiError(problem, param="previous_response_id", code="previous_response_not_found")
    return list(stored.messages)


def _format(text_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Converts a `text.format` to the `response_format` of a chat, which has the schema one level deeper."""
    if text_format is None or text_format.get("type") != "json_schema":
        return None if text_format is None else dict(text_format)
    return {"type": "json_schema", "json_schema": {k: v for k, v in text_format.items() if k != "type" and v is not None}}


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Converts a tool to that of a chat request.

    Raises:
        ApiError: it is a hosted tool, which would run on the server, or has unknown fields.
    """
    if tool.get("type") != "function":
        problem = f"`{where}` is of type `{str(tool.get('type'))[:64]}`: only functions, which the client runs, are supported"
        raise ApiError(problem, param=where, code="unsupported_parameter")
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    if unknown := sorted(set(function) - {"name", "description", "parameters", "strict"}):
        name = f"{where}.{unknown[0][:64]}"
        raise ApiError(f"unknown field `{name}`", param=name, code="unknown_parameter")
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    """Converts a `tool_choice` to that of a chat request.

    Raises:
        ApiError: it has another form.
    """
    if choice in (None, "none", "auto", "required"):
        return choice
    if not isinstance(choice, dict) or choice.get("type") != "function" or set(choice) != {"type", "name"}:
        problem = '`tool_choice` must be none, auto, required or {"type": "function", "name": ...}'
        raise ApiError(problem, param="tool_choice", code="unsupported_parameter")
    return {"type": "function", "function": {"name": choice["name"]}}


class Work(GenerationJob):
    """Generates a response: as a whole, streamed, or in the background."""

    reply: ResponseWriter
    background = False

    @classmethod
    def of(cls, service: Service, response: ChatRequest, reply: ResponseWriter, background: bool) -> "Work":
        work = cls(service, response.fields, [response.prompt], response.requests, reply, response.wanted, response.reading)
        work.background, work.reply = background, reply
        return work

    async def respond(self, http: HttpRequest) -> Response:
        if not self.background:
            return await super().respond(http)
        assert self.reply.store is not None
        document = self.reply.document(self, "in_progress")
        task = asyncio.create_task(self._in_background(self.reply.store))
        try:
            self.reply.store.put(StoredResponse(document, task=task))
        except ApiError:
            task.cancel()
            raise
        return Json(document)

    async def _in_background(self, store: ResponseStore) -> None:
        try:
            # `ResponseWriter.whole` stores the response.
            await self.answered()
        except ApiError as error:
            store.put(StoredResponse(self.reply.failed(self, error)))
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            store.put(StoredResponse(self.reply.failed(self, ApiError("internal error", status=500))))


async def cancelled_response(store: ResponseStore, name: str) -> dict[str, Any]:
    """Cancels a background response, and returns it. A finished one is returned unchanged.

    Raises:
        ApiError: there is no such response, or it was not requested with `background: true`.
    """
    stored = store.get(name)
    if not stored.document["background"]:
        problem = "only responses requested with `background: true` can be cancelled; others end with their connection"
        raise ApiError(problem, code="not_in_background")
    if stored.task is not None:
        await _ended(stored.task)
        # The response may have finished before the cancellation.
        stored = store.get(name)
        if stored.task is not None:
            stored = StoredResponse(stored.document | {"status": "cancelled"})
            store.put(stored)
    return stored.document


async def deleted_response(store: ResponseStore, name: str) -> dict[str, Any]:
    """Removes a response, and cancels it if it is still running.

    Raises:
        ApiError: there is no such response.
    """
    stored = store.delete(name)
    if stored.task is not None:
        await _ended(stored.task)
    return {"id": name, "object": "response", "deleted": True}


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
