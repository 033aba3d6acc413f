"""Translates between the content blocks of /v1/messages and chat messages."""

import json
from collections.abc import Sequence
from typing import Any

from argosy.web.errors import ApiError

# The fields of each type of block. Caching, citations and signatures have no effect on the completion. `is_error` is ignored, because
# chat templates cannot render it; the result itself says what failed.
FIELDS = {
    "text": {"text", "cache_control", "citations"},
    "thinking": {"thinking", "signature"},
    "tool_use": {"id", "name", "input", "cache_control", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error", "cache_control"},
}
OF_ROLE = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}


def chat_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts messages to chat messages. Each tool result becomes a separate message, before the text of the same message.

    Raises:
        ApiError: a role or block is unsupported, or a field is unknown.
    """
    turns: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where, role = f"messages.{i}", message.get("role")
        if not isinstance(role, str) or role not in OF_ROLE:
            raise ApiError(f"`{where}.role` must be one of {', '.join(OF_ROLE)}", param=f"{where}.role")
        if unknown := sorted(set(message) - {"role", "content"}):
            name = f"{where}.{unknown[0][:64]}"
            raise ApiError(f"unknown field `{name}`", param=name, code="unknown_parameter")
        blocks = _blocks(message.get("content"), f"{where}.content", OF_ROLE[role])
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        turns += [
            _result(block, f"{where}.content.{j}") for j, block in enumerate(blocks) if block["type"] == "tool_result"
        ]
        if role != "assistant":
            turns += [{"role": role, "content": "\n".join(texts)}] if texts else []
            continue
        turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if thoughts := [block["thinking"] for block in blocks if block["type"] == "thinking"]:
            turn["reasoning"] = "\n".join(thoughts)
        if calls := [_call(block) for block in blocks if block["type"] == "tool_use"]:
            turn["tool_calls"] = calls
        turns.append(turn)
    return turns


def content_text(content: Any, where: str) -> str:
    """The text of a message's content. Text blocks are joined by line breaks.

    Raises:
        ApiError: the content has other blocks.
    """
    return "\n".join(block["text"] for block in _blocks(content, where, ("text",)))


def _blocks(content: Any, where: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The validated blocks of a message's content. A plain text is one block.

    Args:
        kinds: the types of blocks that are allowed.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ApiError(f"`{where}` must be a text or a list of blocks", param=where)
    return [_block(block, f"{where}.{i}", kinds) for i, block in enumerate(content)]


def _block(block: Any, where: str, kinds: Sequence[str]) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        problem = f"`{where}`: a block of type `{str(kind)[:32]}` is not supported here, only {', '.join(kinds)}"
        raise ApiError(problem, param=where, code="unsupported_parameter")
    block = {name: value for name, value in block.items() if value is not None}
    if unknown := sorted(set(block) - FIELDS[kind] - {"type"}):
        name = f"{where}.{unknown[0][:64]}"
        raise ApiError(f"unknown field `{name}`", param=name, code="unknown_parameter")
    types = {"text": {"text": str}, "thinking": {"thinking": str}, "tool_result": {"tool_use_id": str}}
    for name, of in types.get(kind, {"id": str, "name": str, "input": dict}).items():
        if not isinstance(block.get(name), of):
            problem = f"`{where}.{name}` must be {'a text' if of is str else 'an object'}"
            raise ApiError(problem, param=f"{where}.{name}")
    return block


def _call(block: dict[str, Any]) -> dict[str, Any]:
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": block["input"]}}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = content_text(block.get("content", ""), f"{where}.content")
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def tool_use_block(call: dict[str, Any]) -> dict[str, Any]:
    """Converts a tool call of a chat completion to a `tool_use` block. Arguments that are not an object, which unconstrained models may
    write, become `{"input": ...}`."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return {
        "type": "tool_use",
        "id": call["id"].replace("call_", "toolu_", 1),
        "name": function["name"],
        "input": arguments if isinstance(arguments, dict) else {"input": arguments},
    }
