"""/v1/messages: Anthropic's API, translated to chat requests and back."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from argosy.serve.anthropic.blocks import chat_messages, content_text
from argosy.serve.anthropic.output import MessageWriter
from argosy.serve.openai.chat import read_chat, render_prompt
from argosy.serve.openai.fields import ChatFields, SamplingFields
from argosy.serve.response.reasoning import thinking_variables
from argosy.serve.response.writer import GenerationJob
from argosy.serve.service import Service
from argosy.web.errors import ApiError, renaming

# Fields of chat requests, with their names in this API, for errors.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(BaseModel):
    """Whether the model thinks. `enabled` is refused, because its budget of tokens cannot be enforced."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["adaptive", "disabled"]
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountedMessages(SamplingFields):
    """The fields of /v1/messages that determine the prompt. They are all fields of /v1/messages/count_tokens."""

    # `cache_control` has no effect on the answer.
    ignored: ClassVar = {"metadata", "cache_control"}
    neutral: ClassVar = {
        "container": (), "context_management": (), "diagnostics": (), "inference_geo": (), "mcp_servers": ([],),
        "service_tier": ("auto", "standard_only"), "speed": ("standard",),
    }  # fmt: skip

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: Any = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking = Thinking(type="disabled")
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] = Field({})

    @model_validator(mode="before")
    @classmethod
    def _without_budget(cls, body: dict[str, Any]) -> dict[str, Any]:
        thinking = body.get("thinking")
        if isinstance(thinking, dict) and (thinking.get("type") == "enabled" or "budget_tokens" in thinking):
            problem = '`thinking.budget_tokens` is not supported, write "thinking": {"type": "adaptive"}'
            raise ApiError(problem, param="thinking.budget_tokens", code="unsupported_parameter")
        return body


class Messages(CountedMessages):
    """A body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] = Field([])


def prepare_messages(service: Service, body: Any) -> GenerationJob:
    """Validates a body of /v1/messages and turns it into a job.

    Raises:
        ApiError: a field is invalid or unsupported.
    """
    fields = Messages.of(body)
    more = {"max_completion_tokens": fields.max_tokens, "stop": fields.stop_sequences}
    with renaming(NAMES):
        chat_request = read_chat(service, ChatFields.of(_chat(service, fields) | more))
    return chat_request.job(service, MessageWriter(service))


def count_tokens(service: Service, body: Any) -> dict[str, Any]:
    """Responds to /v1/messages/count_tokens with the number of prompt tokens.

    Raises:
        ApiError: as for /v1/messages.
    """
    fields = CountedMessages.of(body)
    service.check_model(fields.model)
    with renaming(NAMES):
        return {"input_tokens": len(render_prompt(service, ChatFields.of(_chat(service, fields))))}


def _chat(service: Service, fields: CountedMessages) -> dict[str, Any]:
    """Converts a request to the body of a chat request. Without `thinking`, thinking is switched off if the chat template can do that;
    if not, the reasoning is left out of the response."""
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(fields.tools)]
    choice, many = _choice(fields.tool_choice)
    system = content_text(fields.system, "system") if fields.system is not None else ""
    messages = [*([{"role": "system", "content": system}] if system else []), *chat_messages(fields.messages)]
    # As in Anthropic's API, if the last message is the assistant's, the completion continues it.
    continues = messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise ApiError("the last message calls a tool: its result is missing", param=f"messages.{len(fields.messages) - 1}")
    kwargs = fields.chat_template_kwargs
    if fields.thinking.type == "disabled":
        kwargs = _switched_off(service, tools) | kwargs
    return {
        **fields.sampled(),
        "messages": messages,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "tools": tools or None,
        "tool_choice": choice,
        "parallel_tool_calls": many,
        "response_format": _format(fields.output_config.format),
        "reasoning_effort": fields.output_config.effort,
        "include_reasoning": fields.thinking.type == "adaptive" and fields.thinking.display != "omitted",
        "chat_template_kwargs": kwargs,
    }


def _switched_off(service: Service, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Template variables that switch thinking off; none if the template has no switch."""
    try:
        return thinking_variables("none", service.template(tools, None))
    except ApiError:
        return {}


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Converts a tool to that of a chat request.

    Raises:
        ApiError: the tool would run on the server, or has unsupported fields.
    """
    if tool.get("type") not in (None, "custom"):
        problem = f"`{where}` is of type `{str(tool['type'])[:64]}`: only tools with an `input_schema` are supported"
        raise ApiError(problem, param=where, code="unsupported_parameter")
    # Caching and early streaming of arguments do not change the answer.
    plain = {"type", "cache_control", "eager_input_streaming"}
    tool = {name: value for name, value in tool.items() if value is not None and name not in plain}
    if unknown := sorted(set(tool) - {"name", "description", "input_schema", "strict"}):
        name = f"{where}.{unknown[0][:64]}"
        raise ApiError(f"`{name}` is not supported", param=name, code="unsupported_parameter")
    if not isinstance(tool.get("input_schema"), dict):
        raise ApiError(f"`{where}.input_schema` is missing", param=f"{where}.input_schema")
    schema = {"parameters": tool.pop("input_schema")}
    return {"type": "function", "function": tool | schema}


def _choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """Converts a `tool_choice` to that of a chat request. Also returns whether several calls are allowed.

    Raises:
        ApiError: it has another form.
    """
    if choice is None:
        return None, True
    kind, single_call = choice.get("type"), choice.get("disable_parallel_tool_use") or False
    names = {"type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else [])}
    if kind not in (*CHOICES, "tool") or set(choice) - names or not isinstance(single_call, bool):
        problem = '`tool_choice` must be {"type": ...} with auto, any, none or tool; tool has a `name`'
        raise ApiError(problem, param="tool_choice", code="unsupported_parameter")
    if kind != "tool":
        return CHOICES[kind], not single_call
    return {"type": "function", "function": {"name": choice.get("name")}}, not single_call


def _format(output_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Converts an `output_config.format` to the `response_format` of a chat request.

    Raises:
        ApiError: it is not a JSON schema.
    """
    if output_format is None:
        return None
    if output_format.get("type") != "json_schema" or set(output_format) != {"type", "schema"}:
        problem = '`output_config.format` must be {"type": "json_schema", "schema": ...}'
        raise ApiError(problem, param="output_config.format", code="unsupported_parameter")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": output_format["schema"]}}
