"""Renders conversations by the chat template that comes with a model, exactly as Hugging Face transformers does.

A template is a program written by somebody else, so each is rendered in a process with limits (`child.py`): 2 s of CPU time, 512 MiB of
memory, and a bound on the length of its text. No template is trusted more than another, because its cost depends on the messages and
cannot be seen in its source. The process is reused: it takes 0.2 s to start, and adds less than 1 ms to the rendering. Many
conversations travel in one request, to one process per core (`children`). This file knows no tokenizer: special tokens are texts here.
"""

import atexit
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, nearest
from argosy.core.process.child import ChildProcess
from argosy.core.process.cores import core_count
from argosy.data.chat.published import PUBLISHED

Message = Mapping[str, Any]
# What to render: the number of messages from the first on, and whether the generation prompt follows them.
Part = tuple[int, bool]
# The mark of transformers, with a space at its end.
MARK = "CONTINUE_FINAL_MESSAGE_TAG "

# Limit for a render on a busy machine; the real bound of a template is its 2 s of CPU.
WALL_S = 60.0
# Limit for starting the interpreter and Jinja on a busy machine.
START_S = 60.0
# The longest published template has 20,000.
TEMPLATE_CHARACTERS = 1 << 20
# Any template may produce this much text; a longer input allows four times its own length.
LEAST_CHARACTERS = 1 << 20
# Number of conversations that are rendered at the same time, each in its own process.
RENDERING = 4


def render(
    template: str,
    messages: Sequence[Message],
    special: Mapping[str, str],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    now: datetime | None = None,
    **extra: Any,
) -> str:
    """Renders a conversation as the text that a model was trained on.

    Args:
        template: the source text of a Jinja template.
        messages: mappings with `role`, `content`, and further fields that the template knows.
        special: the texts of special tokens by role, as in `Tokenizer.special`.
        tools: the JSON schemas of functions.
        add_generation_prompt: whether the text ends with the tokens that open an answer.
        continue_final_message: whether the text ends with the content of the last message, so that an answer continues it. Spaces at
            the end of the content are dropped if the template drops them.
        now: the time that `strftime_now` writes; None: the current time.
        extra: further variables of the template, such as `documents` or `enable_thinking`.

    Raises:
        BadInput: the template refuses these messages, is not Jinja, or costs too much; its variables are not JSON; or the last message
            cannot be continued.
    """
    if continue_final_message:
        if add_generation_prompt:
            raise BadInput("continue_final_message and add_generation_prompt exclude each other", hint="set one of them")
        messages = mark_last_message(template, messages)
    variables = {"tools": tools, "add_generation_prompt": add_generation_prompt} | extra
    text = render_conversation(template, messages, special, variables, now)["text"]
    return text_before_mark(text, messages[-1]["content"].removesuffix(MARK)) if continue_final_message else text


def mark_last_message(template: str, messages: Sequence[Message]) -> list[Message]:
    """The messages, with MARK after the content of the last one.

    Raises:
        BadInput: the last message has no text as its content, or the template writes no content.
    """
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or "content" not in template:
        raise BadInput("continue_final_message: the last message has no content to continue")
    return [*messages[:-1], {**messages[-1], "content": content + MARK}]


def text_before_mark(text: str, content: str) -> str:
    """A rendered conversation up to MARK. `content` is the content of the last message, without the mark.

    Raises:
        BadInput: the template drops part of the last message.
    """
    if content.strip() not in text or MARK.strip() not in text:
        raise BadInput("continue_final_message: the chat template drops part of the last message", hint="send another message")
    at = text.rindex(MARK.strip())
    # A template that has dropped the mark's own space would have dropped the spaces in front of the mark too.
    return text[:at] if text[at:].startswith(MARK) else text[:at].rstrip()


NO_TEMPLATE = (
    f"set one by name ({', '.join(PUBLISHED)}) or as FILE.jinja: chat_template=NAME of `argosy serve`, data.template=NAME in training; "
    "or send plain text: /v1/completions of a server, generate without --chat"
)


def choose_template(templates: Mapping[str, str], *, name: str | None = None, tools: bool = False) -> str:
    """Chooses one of a tokenizer's chat templates: the one called `name`; if that is None, `tool_use` for conversations with tools, if
    there is such a template, else `default`.

    Raises:
        BadInput: there are no templates, or no template of that name.
    """
    if not templates:
        raise BadInput("this tokenizer has no chat template", hint=NO_TEMPLATE)
    key = name or ("tool_use" if tools and "tool_use" in templates else "default")
    if key not in templates:
        raise BadInput(f"no chat template `{key}`", hint=nearest(key, templates))
    return templates[key]


@dataclass(frozen=True)
class RenderJob:
    """One conversation to render.

    template: the source text of the template.
    messages: all messages of the conversation.
    parts: the renders to make, each (number of messages, whether the generation prompt follows).
    variables: further variables of the template.
    """

    template: str
    messages: Sequence[Message]
    parts: Sequence[Part]
    variables: Mapping[str, Any] = field(default_factory=dict)


def render_conversation(
    template: str,
    messages: Sequence[Message],
    special: Mapping[str, str],
    variables: Mapping[str, Any],
    now: datetime | None,
) -> dict[str, Any]:
    """Renders one conversation in an idle process. Returns its `text`, and the `spans` inside `{% generation %}` blocks."""
    rest = {name: value for name, value in variables.items() if name != "add_generation_prompt"}
    part = len(messages), bool(variables.get("add_generation_prompt"))
    with free_child() as child:
        return checked_answer(all_rendered([RenderJob(template, messages, [part], rest)], special, now, child)[0][0])


def checked_answer(answer: dict[str, Any] | BadInput) -> dict[str, Any]:
    """Returns the result of a render, or raises its error.

    Raises:
        BadInput: the render failed.
    """
    if isinstance(answer, BadInput):
        raise answer
    if "error" in answer:
        raise refusal(answer["error"], answer["message"])
    return answer


def all_rendered(
    jobs: Sequence[RenderJob], special: Mapping[str, str], now: datetime | None, child: "Child"
) -> list[list[dict[str, Any] | BadInput]]:
    """Renders all parts of some jobs in one request to one process. Returns for each job a list with one result per part, each of which
    should be passed to `checked_answer`.

    If a job kills the process, every job is rendered again in a request of its own, so that the others are not affected.
    """
    numbers = {template: number for number, template in enumerate(dict.fromkeys(job.template for job in jobs))}
    requests: list[dict[str, Any] | BadInput] = []
    for job in jobs:
        try:
            requests.append(request_of(job, numbers[job.template], special))
        except BadInput as error:
            requests.append(error)
    request = {"templates": list(numbers), "now": now and now.isoformat()}
    good = [entry for entry in requests if not isinstance(entry, BadInput)]
    try:
        answers = iter(child.ask(request | {"jobs": good})["jobs"] if good else ())
    except BadInput as error:
        if len(jobs) > 1:
            return [all_rendered([job], special, now, child)[0] for job in jobs]
        return [[error] * len(jobs[0].parts)]
    return [
        [entry] * len(job.parts) if isinstance(entry, BadInput) else next(answers) for job, entry in zip(jobs, requests)
    ]


def request_of(job: RenderJob, number: int, special: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object for a job in a request to the rendering process (`child.py`). `number` is the index of the template there.

    Raises:
        BadInput: the template is too long, or its variables are not JSON.
    """
    if len(job.template) > TEMPLATE_CHARACTERS:
        raise BadInput(f"a chat template of {len(job.template):,} characters", hint=f"at most {TEMPLATE_CHARACTERS:,}")
    variables = {"messages": list(job.messages), "documents": None} | dict(special) | dict(job.variables)
    try:
        variables_json = json.dumps(variables)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"the conversation is not JSON: {str(error)[:200]}") from None
    most = LEAST_CHARACTERS + 4 * len(variables_json)
    return {"template": number, "variables": variables, "most_characters": most, "parts": list(job.parts)}


def refusal(kind: str, message: str) -> BadInput:
    """The error for a failure inside a template. Control characters in the message are replaced, because it is printed to a terminal.

    Args:
        kind: the name of the exception in the rendering process.
    """
    message = "".join(c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in message)
    if kind == "TemplateSyntaxError":
        return BadInput(f"the chat template is not Jinja: {message}")
    if kind in ("MemoryError", "RecursionError", "TooLong"):
        return costly(message or "it wants too much memory")
    reason = message if kind == "TemplateError" else f"{message} ({kind})"
    return BadInput(f"the chat template refuses these messages: {' '.join(reason.split())}")


def costly(reason: str) -> BadInput:
    return BadInput("the chat template costs too much", where=reason, hint="use another template: this one may mean harm")


class Child:
    """A rendering process. It is started by the first request, and started again after it died or after this process was forked."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Held by the caller of `free_child` that uses this process.
        self.turn = Lock()
        self._process: ChildProcess | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends one request, and returns the reply.

        Raises:
            BadInput: the request took too long, or killed the process.
        """
        with self._lock:
            process = self._running_process()
            try:
                process.send(json.dumps(request).encode(), WALL_S)
                return json.loads(process.receive(WALL_S))
            except TimeoutError:
                reason = f"it runs for more than {WALL_S} s"
            except (EOFError, OSError):
                reason = "its process ended: too much time or memory"
            self._end()
        raise costly(reason)

    def _running_process(self) -> ChildProcess:
        if self._process is None or self._process.is_over:
            self._end()
            self._process = start()
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def forget(self) -> None:
        """Drops the rendering process without ending it. A forked process calls this, because the rendering process belongs to its
        parent."""
        process, self._process, self._lock, self.turn = self._process, None, Lock(), Lock()
        if process is not None:
            process.forget()

    def close(self) -> None:
        with self._lock:
            self._end()


def start() -> ChildProcess:
    """Starts a rendering process, and waits until it is ready. It has no environment variables, and no open files but its socket.

    Raises:
        ArgosyError: the process cannot be started.
    """
    folders = {
        str(Path(spec.origin).parents[1])
        for name in ("jinja2", "markupsafe")
        if (spec := find_spec(name)) and spec.origin
    }
    words = ["-I", "-X", "utf8", str(Path(__file__).with_name("child.py")), *sorted(folders)]
    process = ChildProcess(words, "chat templates", {}, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.receive(START_S)
    except (TimeoutError, EOFError) as error:
        process.end()
        raise ArgosyError(f"the process that renders chat templates does not start: {error}") from None
    return process


def children() -> list[Child]:
    """One rendering process for each core that this process may use. Each is started by its first request. `close_all` ends them, and
    the next request starts them again."""
    cores = core_count()
    with GROWING:
        CHILDREN.extend(Child() for _ in range(cores - len(CHILDREN)))
    return CHILDREN[:cores]


@contextmanager
def free_child() -> Iterator[Child]:
    """Yields an idle rendering process for one conversation. If all are busy, another is started, up to RENDERING, so that a template
    that takes two seconds delays no other conversation. Beyond that number, the first process is shared.
    """
    with GROWING:
        CHILDREN.extend(Child() for _ in range(RENDERING - len(CHILDREN)))
    for child in CHILDREN[:RENDERING]:
        if child.turn.acquire(blocking=False):
            try:
                yield child
            finally:
                child.turn.release()
            return
    yield CHILD


def close_all() -> None:
    for child in CHILDREN:
        child.close()


def forget_all() -> None:
    """Drops all rendering processes in a forked process, since they belong to the parent."""
    global GROWING
    GROWING = Lock()
    for child in CHILDREN:
        child.forget()


# The first of the rendering processes, which also renders single conversations.
CHILD = Child()
CHILDREN = [CHILD]
GROWING = Lock()
atexit.register(close_all)
os.register_at_fork(after_in_child=forget_all)
