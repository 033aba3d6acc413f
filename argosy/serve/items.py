"""The input of /v1/responses as messages of a chat."""

import json
from typing import Any

from argosy.serve.errors import ApiError

# The fields of each type of item. `id`, `status`, `phase`, `annotations` and `logprobs` come back from responses and mean nothing here.
FIELDS = {
    "message": {"type", "id", "status", "phase", "role", "content"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments"},
    "function_call_output": {"type", "id", "status", "call_id", "output"},
    "reasoning": {"type", "id", "status", "summary", "content", "encrypted_content"},
}
# Chat templates know the first three.
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def messages_of(given: Any) -> list[dict[str, Any]]:
    """The messages of `input`: a text, or a list of items. What an assistant thinks, says and calls in a row is one message.

    Raises:
        ApiError: an item, a part or a field of another kind.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError("`input` is a text or a list of items", param="input")
    found: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        _add(found, item, f"input.{i}")
    return found


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages behind instructions. They and the system messages that open the conversation are one, because many chat templates
    take no second one."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [*([instructions] if instructions else []), *(message["content"] for message in messages[:count])]
    return [*([{"role": "system", "content": "\n\n".join(texts)}] if texts else []), *messages[count:]]


def _add(found: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise ApiError(f"`{where}` is not an object", param=where)
    item = {name: value for name, value in item.items() if value is not None}
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ApiError(f"items of type `{str(kind)[:64]}` are not supported", param=where, code="unsupported_parameter")
    _known(item, FIELDS[kind], where)
    if kind == "message":
        role = _text(item, "role", where)
        if role not in ROLES:
            raise ApiError(f"`{where}.role` is one of {', '.join(ROLES)}", param=f"{where}.role")
        content = text_of(item.get("content"), f"{where}.content")
        if role == "assistant":
            _turn(found, "content", "tool_calls")["content"] = content
        else:
            found.append({"role": ROLES[role], "content": content})
    elif kind == "function_call":
        function = {"name": _text(item, "name", where), "arguments": _arguments(_text(item, "arguments", where), where)}
        call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
        _turn(found).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = text_of(item.get("output"), f"{where}.output")
        found.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})
    else:
        if "encrypted_content" in item:
            what = f"`{where}.encrypted_content` is another server's, and cannot be read here"
            raise ApiError(what, param=f"{where}.encrypted_content", code="unsupported_parameter")
        thought = text_of(item.get("content", []), f"{where}.content")
        turn = _turn(found, "content", "tool_calls")
        turn["reasoning"] = "\n".join([*([turn["reasoning"]] if "reasoning" in turn else []), thought])


def _turn(found: list[dict[str, Any]], *before: str) -> dict[str, Any]:
    """The message that an assistant's item belongs to: the last one, unless it has a part already which comes after this one."""
    if not found or found[-1]["role"] != "assistant" or any(name in found[-1] for name in before):
        found.append({"role": "assistant"})
    return found[-1]


def _known(item: dict[str, Any], names: set[str], where: str) -> None:
    if unknown := sorted(set(item) - names):
        name = f"{where}.{unknown[0][:64]}"
        raise ApiError(f"unknown field `{name}`", param=name, code="unknown_parameter")


def _text(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise ApiError(f"`{where}.{name}` is a text, and must be given", param=f"{where}.{name}")
    return item[name]


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(f"`{where}.arguments` is not a JSON object", param=f"{where}.arguments")
    return found


def text_of(content: Any, where: str) -> str:
    """The text of a content: a text, or a list of parts of text, which are joined by line breaks as in chats.

    Raises:
        ApiError: other parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"`{where}` is a text or a list of parts", param=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "reasoning_text"):
            what = f"a part of type `{str(kind)[:32]}` is not supported: this model reads text"
            raise ApiError(what, param=f"{where}.{i}", code="unsupported_parameter")
        part = {name: value for name, value in part.items() if value is not None}
        _known(part, {"type", "text", "annotations", "logprobs"}, f"{where}.{i}")
        texts.append(_text(part, "text", f"{where}.{i}"))
    return "\n".join(texts)
