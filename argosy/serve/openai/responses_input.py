"""Translates the input items of /v1/responses into chat messages."""

import json
from typing import Any

from argosy.web.errors import ApiError

# Fields by item type. `id`, `status` and `phase` appear when output items are sent back, and have no effect.
FIELDS = {
    "message": {"type", "id", "status", "phase", "role", "content"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments"},
    "function_call_output": {"type", "id", "status", "call_id", "output"},
    "reasoning": {"type", "id", "status", "summary", "content", "encrypted_content"},
}
# Most chat templates have no developer role.
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def input_messages(items: Any) -> list[dict[str, Any]]:
    """Converts an `input`, which is a text or a list of items, to chat messages. Consecutive reasoning, text and calls of the assistant
    become one message.

    Raises:
        ApiError: an item or part is unsupported, or has an unknown field.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise ApiError("`input` must be a text or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        _add(messages, item, f"input.{i}")
    return messages


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts instructions in front of messages. Instructions and leading system messages are joined into one, because many chat templates
    refuse a second system message."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [*([instructions] if instructions else []), *(message["content"] for message in messages[:count])]
    return [*([{"role": "system", "content": "\n\n".join(texts)}] if texts else []), *messages[count:]]


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise ApiError(f"`{where}` is not an object", param=where)
    item = {name: value for name, value in item.items() if value is not None}
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ApiError(f"items of type `{str(kind)[:64]}` are not supported", param=where, code="unsupported_parameter")
    _check_names(item, FIELDS[kind], where)
    if kind == "message":
        role = _text(item, "role", where)
        if role not in ROLES:
            raise ApiError(f"`{where}.role` must be one of {', '.join(ROLES)}", param=f"{where}.role")
        content = message_text(item.get("content"), f"{where}.content")
        if role == "assistant":
            _turn(messages, "content", "tool_calls")["content"] = content
        else:
            messages.append({"role": ROLES[role], "content": content})
    elif kind == "function_call":
        function = {"name": _text(item, "name", where), "arguments": _arguments(_text(item, "arguments", where), where)}
        call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = message_text(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})
    else:
        if "encrypted_content" in item:
            problem = f"`{where}.encrypted_content` cannot be decrypted here"
            raise ApiError(problem, param=f"{where}.encrypted_content", code="unsupported_parameter")
        thought = message_text(item.get("content", []), f"{where}.content")
        turn = _turn(messages, "content", "tool_calls")
        turn["reasoning"] = "\n".join([*([turn["reasoning"]] if "reasoning" in turn else []), thought])


def _turn(messages: list[dict[str, Any]], *before: str) -> dict[str, Any]:
    """The assistant message to add an item to. It is the last message, or a new one that is appended, if the last is not the
    assistant's or already has one of the fields `before`."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in before):
        messages.append({"role": "assistant"})
    return messages[-1]


def _check_names(item: dict[str, Any], names: set[str], where: str) -> None:
    if unknown := sorted(set(item) - names):
        name = f"{where}.{unknown[0][:64]}"
        raise ApiError(f"unknown field `{name}`", param=name, code="unknown_parameter")


def _text(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise ApiError(f"`{where}.{name}` must be a text", param=f"{where}.{name}")
    return item[name]


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(f"`{where}.arguments` is not a JSON object", param=f"{where}.arguments")
    return arguments


def message_text(content: Any, where: str) -> str:
    """The text of a message's content, which is a text or a list of text parts. Parts are joined by line breaks, as in chats.

    Raises:
        ApiError: a part is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"`{where}` must be a text or a list of parts", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "reasoning_text"):
            problem = f"a part of type `{str(kind)[:32]}` is not supported: this model reads text"
            raise ApiError(problem, param=f"{where}.{i}", code="unsupported_parameter")
        part = {name: value for name, value in part.items() if value is not None}
        _check_names(part, {"type", "text", "annotations", "logprobs"}, f"{where}.{i}")
        texts.append(_text(part, "text", f"{where}.{i}"))
    return "\n".join(texts)
