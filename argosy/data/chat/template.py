"""Renders conversations by the chat template that comes with a model, exactly as Hugging Face transformers does.

A template is a program written by somebody else, so each is rendered in a process with limits (`child.py`): 2 seconds of
CPU, 512 MB, a bound on its text. No template is trusted more than another, because its cost depends on the messages and
cannot be seen in its source. The process stays for the next conversation: it costs 0.2 s once, then less than 1 ms beside
the rendering itself. Many conversations travel in one request, to a process for each core (`children`). This file knows no
tokenizer: special tokens come as texts.
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
# A render of the first so many messages, and whether it ends with the tokens that open an answer.
Part = tuple[int, bool]
# As in transformers, with a space at its end.
MARK = "CONTINUE_FINAL_MESSAGE_TAG "

# Limit for a render on a busy machine; the real bound of a template is its 2 s of CPU.
WALL_S = 60.0
# Limit for starting the interpreter and Jinja on a busy machine.
START_S = 60.0
# The longest published template has 20,000.
TEMPLATE_CHARACTERS = 1 << 20
# Any template may produce this much text; a longer input allows four times its own length.
LEAST_CHARACTERS = 1 << 20
# Conversations that are rendered at a time, each in a process of its own.
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
    """A conversation as the text that a model was trained on.

    Args:
        template: Jinja.
        messages: `role` and `content`, and what else the template knows.
        special: the texts of special tokens by their role, as in `Tokenizer.special`.
        tools: JSON schemas of functions.
        add_generation_prompt: end with the tokens that open an answer.
        continue_final_message: end with the content of the last message, so that an answer continues it. Where the template drops
            spaces at its end, they are dropped here too.
        now: the clock of `strftime_now`; the machine's where not given.
        extra: further variables, such as `documents` or `enable_thinking`.

    Raises:
        BadInput: the template refuses these messages, is not Jinja, or costs too much; or its variables are not JSON; or the last
            message cannot be continued.
    """
    if continue_final_message:
        if add_generation_prompt:
            raise BadInput("continue_final_message and add_generation_prompt exclude each other", hint="set one of them")
        messages = mark_last_message(template, messages)
    variables = {"tools": tools, "add_generation_prompt": add_generation_prompt} | extra
    text = render_conversation(template, messages, special, variables, now)["text"]
    return text_before_mark(text, messages[-1]["content"].removesuffix(MARK)) if continue_final_message else text


def mark_last_message(template: str, messages: Sequence[Message]) -> list[Message]:
    """The messages with a mark after the content of the last one."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or "content" not in template:
        raise BadInput("continue_final_message: the last message has no content to continue")
    return [*messages[:-1], {**messages[-1], "content": content + MARK}]


def text_before_mark(text: str, content: str) -> str:
    """A rendered conversation up to the mark after its last message."""
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
    """One of a tokenizer's chat templates: the named one; else `tool_use` where tools are given; else the default.

    Raises:
        BadInput: there is none, or none of that name.
    """
    if not templates:
        raise BadInput("this tokenizer has no chat template", hint=NO_TEMPLATE)
    key = name or ("tool_use" if tools and "tool_use" in templates else "default")
    if key not in templates:
        raise BadInput(f"no chat template `{key}`", hint=nearest(key, templates))
    return templates[key]


@dataclass(frozen=True)
class RenderJob:
    """One conversation to render, whole and in parts, by a template with its variables."""

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
    """The text of one conversation, and its spans in `{% generation %}`."""
    rest = {name: value for name, value in variables.items() if name != "add_generation_prompt"}
    part = len(messages), bool(variables.get("add_generation_prompt"))
    with free_child() as child:
        return checked_answer(all_rendered([RenderJob(template, messages, [part], rest)], special, now, child)[0][0])


def checked_answer(answer: dict[str, Any] | BadInput) -> dict[str, Any]:
    """The result of a render, unless it failed.

    Raises:
        BadInput: it failed.
    """
    if isinstance(answer, BadInput):
        raise answer
    if "error" in answer:
        raise refusal(answer["error"], answer["message"])
    return answer


def all_rendered(
    jobs: Sequence[RenderJob], special: Mapping[str, str], now: datetime | None, child: "Child"
) -> list[list[dict[str, Any] | BadInput]]:
    """The results of all parts of some jobs, which one process renders in one request; pass each to `checked_answer`.

    A job that is refused, or that kills its process, does not affect the others: those are rendered again without it.
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
    """A job as the request that is sent to the rendering process.

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
    """The error for a failure inside a template. Control characters of its message are replaced: it is printed to a terminal."""
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
    """The rendering process. It is started by the first request, and again after it died or this process was forked."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Held by who has taken it from among those that are free.
        self.turn = Lock()
        self._process: ChildProcess | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request.

        Raises:
            BadInput: it took too long, or killed the process.
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
        """Drops the process in a forked process, where it belongs to the parent."""
        process, self._process, self._lock, self.turn = self._process, None, Lock(), Lock()
        if process is not None:
            process.forget()

    def close(self) -> None:
        with self._lock:
            self._end()


def start() -> ChildProcess:
    """A new process that is ready, without environment variables, and with no open files but its socket.

    Raises:
        ArgosyError: it cannot be started.
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
    """A rendering process for each core that this process may use; none is started before its first request, and `close_all` ends
    them until the next."""
    cores = core_count()
    with GROWING:
        CHILDREN.extend(Child() for _ in range(cores - len(CHILDREN)))
    return CHILDREN[:cores]


@contextmanager
def free_child() -> Iterator[Child]:
    """An idle rendering process for one conversation. While one is busy another is started, up to `RENDERING`, so that a template which
    takes two seconds delays nobody else.
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
    """Drops all processes in a forked process, where they belong to the parent."""
    global GROWING
    GROWING = Lock()
    for child in CHILDREN:
        child.forget()


# The process of single conversations, which is the first of all.
CHILD = Child()
CHILDREN = [CHILD]
GROWING = Lock()
atexit.register(close_all)
os.register_at_fork(after_in_child=forget_all)
