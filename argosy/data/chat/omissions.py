"""Detects content that a chat template leaves out, and refuses such a prompt with an error that names the content.

Templates silently ignore content that they do not know: tools, documents, messages of a role, tool calls. The model would then reply to
another conversation. So if content may be missing, the conversation is rendered once more with a mark after each text. A mark that is
not in the result shows the missing content. Missing thoughts of earlier turns are no error, because reasoning models drop them by
design.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from argosy.core.errors import BadInput

Message = Mapping[str, Any]

# Letters and digits, so that no template trims or escapes them.
PREFIX, SUFFIX = "Kq7", "Zw"


class Omitted(BadInput):
    """A chat template leaves out part of a conversation.

    param: the part of the request that is left out: messages, tools or documents.
    """

    param: str = "messages"


def with_known_roles(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Copies messages, with roles that the template knows. If it does not know `developer`, that role becomes `system`, and leading
    system messages are merged into one, because many templates refuse a second. The `refusal` of a message without content becomes its
    content.
    """
    copies = [_with_refusal(message) for message in messages]
    if "developer" in template or not any(message.get("role") == "developer" for message in copies):
        return copies
    for message in copies:
        if message.get("role") == "developer":
            message["role"] = "system"
    count = next((i for i, message in enumerate(copies) if message.get("role") != "system"), len(copies))
    texts = [message.get("content") for message in copies[:count]]
    if count < 2 or not all(isinstance(text, str) for text in texts):
        return copies
    return [copies[0] | {"content": "\n\n".join(map(str, texts))}, *copies[count:]]


def check_complete(
    render: Callable[..., str],
    text: str,
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Checks that a prompt contains all content of its messages, tools and documents.

    Args:
        render: renders other messages in the same way. It takes the keywords `messages`, `tools` and `documents`.
        text: the rendered prompt.
        template: the source text of the template.

    Raises:
        Omitted: the template leaves out a message, a call, a tool or the documents.
    """
    if not (tools or documents or any(_may_be_missing(message, i, text, template) for i, message in enumerate(messages))):
        return
    marks = Marks(text)
    marked = [_marked(message, marks) for message in messages]
    with_tools = None if tools is None else [_marked_tool(tool, marks) for tool in tools]
    with_documents = None if documents is None else [
        {name: marks(value, "the documents", "documents", i) for name, value in document.items()}
        for i, document in enumerate(documents)
    ]  # fmt: skip
    try:
        rendered = render(messages=marked, tools=with_tools, documents=with_documents)
    except BadInput:
        # The template refuses the marked texts, but has accepted the conversation without marks.
        return
    marks.check(rendered)


class Marks:
    """Makes marks that do not occur in a text, and remembers what each mark stands for.

    Args:
        text: the text without marks.
    """

    def __init__(self, text: str):
        prefix = PREFIX
        while prefix in text:
            prefix += "q"
        self.prefix = prefix
        # (mark, phrase for the marked content, part of the request, group). If one mark of a group is found, the group is complete.
        self.known: list[tuple[str, str, str, Any]] = []

    def __call__(self, value: Any, noun: str, part: str, group: Any = None) -> Any:
        """Returns a text with a new mark after it. Other values and empty texts are returned unchanged.

        Args:
            noun: a phrase for the content, for errors.
            part: the part of the request that the content belongs to: messages, tools or documents.
            group: marks with the same group stand for one content; None: the mark is its own group.
        """
        if not isinstance(value, str) or not value.strip():
            return value
        mark = f"{self.prefix}{len(self.known)}{SUFFIX}"
        self.known.append((mark, noun, part, mark if group is None else group))
        return value + mark

    def check(self, text: str) -> None:
        """Checks that a rendered text holds the marks.

        Raises:
            Omitted: a mark is missing.
        """
        present = {group for mark, _, _, group in self.known if mark in text}
        for _, noun, part, group in self.known:
            if group not in present:
                error = Omitted(f"the chat template of this model leaves out {noun}", hint="leave it out, or give another template")
                error.param = part
                raise error


def _with_refusal(message: Message) -> dict[str, Any]:
    refusal = message.get("refusal")
    if not refusal or message.get("content"):
        return dict(message)
    return {name: value for name, value in message.items() if name != "refusal"} | {"content": refusal}


def extra_fields(message: Message) -> list[str]:
    """The names of non-empty fields of a message that few templates write. The name of a tool is not among them, because the call that
    the tool replies to holds it too.
    """
    names = ("refusal",) if message.get("role") == "tool" else ("name", "refusal")
    return [name for name in names if isinstance(message.get(name), str) and message[name].strip()]


# Letters and digits, so that no template trims or escapes them.
FIELD_MARK = "Kq7Zw"


def writes_field(render: Callable[[list[dict[str, Any]]], str], field: str) -> bool:
    """Whether a template writes this field of messages. True if the template refuses the test conversation, so that its own error is
    reported later, with the record.

    Args:
        render: renders a conversation with the template.
    """
    messages = [{"role": role, "content": text, field: FIELD_MARK} for role, text in (("user", "a"), ("assistant", "b"))]
    try:
        return FIELD_MARK in render(messages)
    except BadInput:
        return True


def _may_be_missing(message: Message, place: int, text: str, template: str) -> bool:
    """Whether content of a message may be missing from the prompt `text`, as far as this can be seen without rendering again."""
    content, role = message.get("content"), message.get("role")
    if message.get("tool_calls") or extra_fields(message):
        return True
    if not isinstance(content, str) or not content.strip():
        return False
    usual = role in ("user", "assistant") or (role == "system" and place == 0)
    return not usual or str(role) not in template or content.strip() not in text


def _marked(message: Message, marks: Marks) -> dict[str, Any]:
    role = str(message.get("role"))[:32]
    marked = {**message, "content": marks(message.get("content"), f"a message of role `{role}`", "messages")}
    for name in extra_fields(message):
        marked[name] = marks(message[name], f"the `{name}` of a message of role `{role}`", "messages")
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [_marked_function(call, marks, "the call of", "messages") for call in calls]
    return marked


def _marked_tool(tool: Mapping[str, Any], marks: Marks) -> dict[str, Any]:
    return _marked_function(tool, marks, "the tool", "tools")


def _marked_function(entry: Mapping[str, Any], marks: Marks, noun: str, part: str) -> dict[str, Any]:
    function = entry.get("function")
    if not isinstance(function, Mapping):
        return dict(entry)
    name = function.get("name")
    return {**entry, "function": {**function, "name": marks(name, f"{noun} `{str(name)[:64]}`", part)}}
