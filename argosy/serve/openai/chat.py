"""/v1/chat/completions: completions of conversations, rendered with the model's chat template."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from argosy.core.errors import BadInput
from argosy.infer.engine.request import Request
from argosy.infer.tools.calls import CallNotation, call_ids
from argosy.infer.tools.channels import framed_grammar, uses_channels
from argosy.infer.tools.notations import KNOWN, find_notation
from argosy.serve.openai.beams import BeamRequest, beam_searches, check_beams
from argosy.serve.openai.fields import ChatFields
from argosy.serve.openai.structured import StructureRequest, check_size, grammar_error, structure_request
from argosy.serve.response.choice import ChoicePiece, CompletionChoice, ScoredToken, TokenNames
from argosy.serve.response.parsing import CompletionFormat, CompletionParts, CompletionReader
from argosy.serve.response.reasoning import after_thoughts, thinks, thought_start, with_reasoning
from argosy.serve.response.writer import Choices, GenerationJob, ResponseFormat
from argosy.serve.service import Service
from argosy.serve.settings import ServerLimits
from argosy.web.errors import ApiError

NAME = re.compile("[A-Za-z0-9_-]{1,64}")
# Fields of a message that templates read.
OF_A_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning", "reasoning_content"}


@dataclass(frozen=True)
class ChatRequest:
    """A validated chat request.

    fields: the fields of its body.
    prompt: token ids of the rendered conversation.
    requests: its engine requests, one for each completion.
    wanted: the structure that completions must match; None: any text.
    reading: how completions are split into reasoning, text and tool calls.
    searches: the beam search in place of `requests`; empty: none.
    """

    fields: ChatFields
    prompt: list[int]
    requests: Sequence[Request]
    wanted: StructureRequest | None
    reading: CompletionFormat
    searches: Sequence[BeamRequest] = ()

    def job(self, service: Service, shape: ResponseFormat) -> GenerationJob:
        return GenerationJob(service, self.fields, [self.prompt], self.requests, shape, self.wanted, self.reading, self.searches)


def prepare_chat(service: Service, body: Any) -> GenerationJob:
    """Validates a body of /v1/chat/completions and turns it into a job.

    Raises:
        ApiError: a field is invalid or unsupported.
    """
    chat_request = read_chat(service, ChatFields.of(body))
    calls = chat_request.reading.notation is not None
    return chat_request.job(service, ChatWriter(service, chat_request.fields, chat_request.prompt, calls))


def read_chat(service: Service, fields: ChatFields) -> ChatRequest:
    """Validates a chat request and renders its prompt, whichever API it came through.

    Raises:
        ApiError: a field is invalid or unsupported.
    """
    service.check(fields)
    check_beams(fields)
    structured, tools = structure_request(fields, service.limits), offered_tools(fields)
    messages = template_messages(fields.messages)
    prompt = service.chat_prompt(messages, tools, fields)
    most = min((m for m in (fields.max_tokens, fields.max_completion_tokens) if m is not None), default=None)
    requests, searches = service.requests(fields, [prompt], most), beam_searches(service, fields, [prompt], most)
    template = service.template(tools, fields.chat_template)
    reading = completion_format(service, fields, messages, prompt, template, tools or ())
    if tools:
        structured = call_structure(fields, tools, reading.notation, structured, service.limits)
    if structured is not None and reading.start is not None:
        # A grammar of calls in channels includes the reasoning before them.
        if not reading.channels:
            structured = replace(structured, structure=after_thoughts(structured.structure, reading.start))
        elif reading.start != "after" and structured.structure.kind != "tools":
            structured = replace(structured, structure=framed_grammar(structured.structure))
    return ChatRequest(fields, prompt, requests, structured, reading, searches)


def completion_format(
    service: Service, fields: ChatFields, messages: Sequence[dict[str, Any]], prompt: Sequence[int], template: str,
    tools: Sequence[dict[str, Any]],
) -> CompletionFormat:
    """Determines how the completions of a request are parsed.

    Args:
        messages: the conversation.
        prompt: its token ids.
        template: the chat template that rendered it.
        tools: the offered tools.
    """
    notation = find_notation(template, service.lm.tokenizer, tools) if tools else None
    start, shows, before = None, fields.include_reasoning, call_ids(messages)
    continued = messages[-1]["content"] if fields.continue_final_message else None
    if uses_channels(template):
        # Without the marks, everything is text. So is a completion that continues a final message.
        notation = notation if service.marks and continued is None else None
        start = None if not service.marks else "open" if continued is None else "after"
        return CompletionFormat(notation, start, shows, service.marks, channels=bool(service.marks), before=before)
    if thinks(service.reasoning, template):
        start = thought_start(service.reasoning, service.lm.tokenizer, prompt, continued)
    return CompletionFormat(notation, start, shows, {} if notation is None else notation.marks, before=before)


def render_prompt(service: Service, fields: ChatFields) -> list[int]:
    """Renders the conversation of a request, and returns its token ids.

    Raises:
        ApiError: the template refuses the messages, or a tool is invalid.
    """
    return service.chat_prompt(template_messages(fields.messages), offered_tools(fields), fields)


def offered_tools(fields: ChatFields) -> list[dict[str, Any]] | None:
    """The tools to render into the prompt; None: none.

    Raises:
        ApiError: a tool is not a function, or `tool_choice` requires one that is not in the list.
    """
    for i, tool in enumerate(fields.tools or []):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ApiError("a tool must be a function with a name", param=f"tools.{i}")
    names = [tool["function"]["name"] for tool in fields.tools or []]
    if demands_call(fields) and not names:
        raise ApiError("`tool_choice` requires a call, and there are no `tools`", param="tool_choice")
    name = required_function(fields)
    if name is not None and name not in names:
        raise ApiError(f"`tool_choice` names `{name[:64]}`, which is not in `tools`", param="tool_choice")
    return None if fields.tool_choice == "none" else fields.tools or None


def demands_call(fields: ChatFields) -> bool:
    """Whether the completion must call a tool."""
    return fields.tool_choice not in (None, "none", "auto")


def required_function(fields: ChatFields) -> str | None:
    """The name of the function that the completion must call; None: no particular one.

    Raises:
        ApiError: `tool_choice` has another form.
    """
    if fields.tool_choice in (None, "none", "auto", "required"):
        return None
    choice = fields.tool_choice
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or set(function) != {"name"} or not isinstance(function["name"], str):
        problem = '`tool_choice` must be none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise ApiError(problem, param="tool_choice", code="unsupported_parameter")
    return function["name"]


def call_structure(
    fields: ChatFields, tools: Sequence[dict[str, Any]], notation: CallNotation | None, answer: StructureRequest | None, limits:
    ServerLimits
) -> StructureRequest | None:
    """The grammar that enforces `tool_choice`, the argument schemas of strict tools, and at most one call without
    `parallel_tool_calls`; None if nothing needs enforcing.

    Args:
        tools: the offered tools.
        notation: the template's notation of calls; None: it is unknown.
        answer: the structure that a completion without calls must match; None: any text.

    Raises:
        ApiError: the template's call notation is unknown, or a tool's parameters are not a schema.
    """
    must, many = demands_call(fields), fields.parallel_tool_calls
    strict = any(tool["function"].get("strict") is True for tool in tools)
    binds = must or strict or not many
    if not binds and (answer is None or notation is None):
        return answer
    param = "tool_choice" if must else "tools" if strict else "parallel_tool_calls"
    if notation is None:
        problem = f"`{param}` needs a chat template with calls in the notation of {KNOWN}"
        raise ApiError(problem, param=param, code="unsupported_parameter")
    if answer is not None and not must and (answer.structure.kind == "grammar" or notation.like_json):
        problem = f"`{answer.param}` with tools that may be called is not supported for this model, send `tool_choice: none`"
        raise ApiError(problem, param=answer.param, code="unsupported_parameter")
    check_size(tools, "tools", limits)
    callable_ = [tool for tool in tools if required_function(fields) in (None, tool["function"]["name"])]
    for i, tool in enumerate(callable_):
        if not NAME.fullmatch(tool["function"]["name"]):
            raise ApiError("a function name has 1 to 64 letters, digits, `_` and `-`", param=f"tools.{i}")
    # With optional calls, only strict tools constrain their arguments.
    bound = [tool if must or tool["function"].get("strict") is True else _free(tool) for tool in callable_]
    many = many and required_function(fields) is None
    try:
        text = None if answer is None else answer.structure
        return StructureRequest(notation.grammar(bound, must=must, many=many, answer=text), "tools")
    except BadInput as error:
        raise grammar_error(error, "tools") from None


def _free(tool: dict[str, Any]) -> dict[str, Any]:
    return tool | {"function": tool["function"] | {"parameters": {"type": "object"}}}


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts messages to the form that templates read: text parts are joined, and arguments of tool calls become objects.

    Raises:
        ApiError: a message has no role, or an unknown field or part. Images and other media are refused, and their URLs are never
            opened.
    """
    return [_plain(message, f"messages.{i}") for i, message in enumerate(messages)]


def _plain(message: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ApiError(f"`{where}.role` is missing", param=f"{where}.role")
    message = {name: value for name, value in message.items() if value is not None}
    if unknown := sorted(set(message) - OF_A_MESSAGE):
        raise ApiError(f"unknown field `{unknown[0][:64]}` of a message", param=f"{where}.{unknown[0][:64]}")
    turn = with_reasoning(message) | {"content": _text(message.get("content"), f"{where}.content")}
    if "tool_calls" in message:
        turn["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return turn


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(f"`{where}` must be a text or a list of parts", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            problem = f"a part of type `{str(kind)[:32]}`" if kind not in (None, "text") else "a part without text"
            raise ApiError(f"{problem} is not supported: this model reads text", param=f"{where}.{i}")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(calls: Any, where: str) -> list[Any]:
    """Converts tool calls, whose arguments clients send as the text of a JSON object, to calls with arguments as objects."""
    if not isinstance(calls, list):
        raise ApiError(f"`{where}` must be a list", param=where)
    parsed_calls = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ApiError(f"`{where}.{i}` is not a function call", param=f"{where}.{i}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise ApiError("the arguments of a call are not JSON", param=f"{where}.{i}") from None
        parsed_calls.append(call | {"function": function | {"arguments": arguments}})
    return parsed_calls


class ChatWriter(Choices):
    """Writes responses of /v1/chat/completions.

    Args:
        prompt: token ids of the prompt.
        calls: whether completions may contain tool calls.
    """

    prefix, kind, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, fields: ChatFields, prompt: list[int], calls: bool):
        super().__init__(fields)
        self.fields, self.prompt, self.calls = fields, prompt, calls
        self.names = TokenNames(service.lm.tokenizer, fields.return_tokens_as_token_ids)

    def opened(self, place: int) -> dict[str, Any] | None:
        return {"index": place, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def chunk(self, place: int, choice: CompletionChoice, piece: ChoicePiece, parts: CompletionParts) -> dict[str, Any]:
        says = parts.text or not (parts.thought or piece.finish or self.calls)
        delta: dict[str, Any] = _thought(parts.thought) | ({"content": parts.text} if says else {})
        if parts.calls:
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(parts.calls)]
        finish = _finish(piece.finish, parts.calls)
        document = {"index": place, "delta": delta, "logprobs": self._scores(piece.tokens), "finish_reason": finish}
        if finish is not None:
            document["stop_reason"] = choice.stop_reason
        if self.fields.return_token_ids:
            document["token_ids"] = [scored.token for scored in piece.tokens]
        return document

    def choice(self, place: int, choice: CompletionChoice, reader: CompletionReader) -> dict[str, Any]:
        text = reader.text or None if reader.calls or reader.thinking else reader.text
        message = {"role": "assistant", "content": text, "refusal": None} | _thought(reader.thought)
        document = {
            "index": place,
            "message": message | {"tool_calls": reader.calls} if reader.calls else message,
            "logprobs": self._scores(choice.tokens),
            "finish_reason": _finish(choice.finish, reader.calls),
            "stop_reason": choice.stop_reason,
        }
        if self.fields.return_token_ids:
            document |= {"token_ids": [scored.token for scored in choice.tokens], "prompt_token_ids": self.prompt}
        return document

    def about_prompt(self) -> dict[str, Any]:
        if self.fields.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": self.names.prompt_logprobs(self.prompt, self.scores[0], self.fields.prompt_logprobs)}

    def _scores(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        if not self.fields.logprobs:
            return None
        content = []
        for scored in tokens:
            top = [self._token_logprob(token, logprob) for token, logprob in scored.likeliest]
            content.append(self._token_logprob(scored.token, scored.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.names(token), "logprob": logprob, "bytes": list(self.names.bytes(token))}


def _finish(reason: str | None, calls: Sequence[Any]) -> str | None:
    return "tool_calls" if reason == "stop" and calls else reason


def _thought(text: str) -> dict[str, Any]:
    """The reasoning under both names that clients read: `reasoning` (vLLM) and `reasoning_content` (DeepSeek, llama.cpp, older
    vLLM)."""
    return {"reasoning": text, "reasoning_content": text} if text else {}
