"""The process that renders chat templates. This file is run by path with `python -I`, and never imported.

Templates come with models, from anybody. Jinja's sandbox limits access to Python, but not cost: nested loops run for minutes,
`'a' * 10**10` asks for 10 GB, and no exception can interrupt either. So the process has limits on time and memory, and ends when it
exceeds them. It needs only the standard library and Jinja. It ends when its parent ends.

Jinja's sandbox had holes before (CVE-2016-10745, CVE-2019-10906, CVE-2024-56326, CVE-2025-27516). Code that escapes through the next
hole finds no environment variables, and can open no file, start no process and import nothing. The interpreter refuses this with an
audit hook that cannot be removed (`forbid`), and the kernel refuses it with resource limits (`_limit`).

Messages in both directions are JSON objects, sent through `core.process.channel`. Many jobs travel in one request, because a round trip
costs as much as a short conversation.

    request    templates: list of texts; now: ISO 8601 or null; jobs: list of
                   {template: index, variables, most_characters, parts: list of [number of messages, add_generation_prompt]}
    reply      jobs: for each job a list with one entry per part, {text, spans} or {error, message}
"""

import contextlib
import json
import os
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache

# Imported by path, because importing the package would take longer than starting this process.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "core", "process"))
import channel  # pyright: ignore[reportMissingImports]

sys.path.pop(0)
# The folders in which the parent found Jinja.
sys.path += sys.argv[1:-1]

import jinja2
import jinja2.ext
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The list methods with which Kimi K2's template keeps the ids of calls in a queue. Jinja's immutable sandbox forbids changing any list.
# Here a template may change the lists that it has created itself.
QUEUES = ("append", "pop")
MEMORY_BYTES = 512 << 20
# The longest published template takes 5 ms.
CPU_S = 2.0
# The character limit of the renders before the first request.
LEAST = 1 << 20
# How often an idle process checks that its parent lives.
LOOK_S = 5.0


# Beginnings of the names of audit events, which the interpreter raises before it accesses anything outside of itself (docs.python.org,
# Audit events table).
FORBIDDEN = (
    "open", "import", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "mmap.", "fcntl.", "pty.", "glob.", "tempfile.", "pickle.",
    "marshal.load", "syslog.", "sys.add", "sys.set", "sys.unraisablehook", "cpython.run",
)  # fmt: skip


class TooLong(Exception):
    """Raised if a rendered text is longer than the parent accepts."""


class Generation(jinja2.ext.Extension):
    """The block `{% generation %}` ... `{% endgeneration %}` around an assistant's words. It writes its content unchanged, and records
    the span of the content in the text (huggingface/transformers, chat_template_utils.py)."""

    environment: "TemplateEnvironment"
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_remember"), [], [], body).set_lineno(line)

    def _remember(self, caller):
        words = caller()
        start = sum(map(len, self.environment.parts))
        self.environment.spans.append((start, start + len(words)))
        return words


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandboxed Jinja environment that is configured as Hugging Face does for chat templates."""

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        self.parts, self.spans, self.now, self.variables, self.given = [], [], None, {}, None
        self.filters["tojson"] = tojson
        self.globals |= {"raise_exception": _refuse, "strftime_now": self.strftime_now}
        self.compiled = lru_cache(maxsize=16)(self.from_string)

    def is_safe_attribute(self, obj, attr, value):
        if type(obj) is not list or attr not in QUEUES:
            return super().is_safe_attribute(obj, attr, value)
        if self.given is None:
            self.given = set(ids_of_lists(self.variables))
        return id(obj) not in self.given

    def strftime_now(self, format):
        return (self.now or datetime.now()).strftime(format)

    def rendered(self, template, variables, most_characters):
        """Renders a template. Returns the text, and the spans inside `{% generation %}` blocks."""
        self.parts, self.spans = [], []
        remaining = most_characters
        self.variables, self.given = variables, None
        for part in self.compiled(template).generate(**variables):
            remaining -= len(part)
            if remaining < 0:
                raise TooLong(f"the text is longer than {most_characters} characters")
            self.parts.append(part)
        return {"text": "".join(self.parts), "spans": self.spans}


def ids_of_lists(value):
    """Yields the Python ids of all lists inside a JSON value."""
    if isinstance(value, list):
        yield id(value)
    for inside in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from ids_of_lists(inside)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message):
    raise jinja2.TemplateError(message)


def answers(environment, request):
    """Renders all parts of all jobs of a request, and returns the reply."""
    environment.now = None if request["now"] is None else datetime.fromisoformat(request["now"])
    results = []
    for job in request["jobs"]:
        template, messages = request["templates"][job["template"]], job["variables"]["messages"]
        results.append([
            _answer(environment, template, job["most_characters"],
                   job["variables"] | {"messages": messages[:count], "add_generation_prompt": prompt})
            for count, prompt in job["parts"]
        ])  # fmt: skip
    return {"jobs": results}


def _answer(environment, template, most_characters, variables):
    """Renders one part. The process is killed if this takes more than CPU_S."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
    try:
        return environment.rendered(template, variables, most_characters)
    except BaseException as error:  # the process continues after any failure
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return {"error": type(error).__name__, "message": str(error)[:400] + line}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit():
    """Limits memory, and forbids opening and writing files and starting processes."""
    limits = {"AS": MEMORY_BYTES, "FSIZE": 0, "CORE": 0, "NOFILE": 0, "NPROC": 0}
    for name, most in limits.items():
        with contextlib.suppress(OSError, ValueError, AttributeError):  # some systems know no such limit
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def forbid(event, _):
    """An audit hook that raises an exception for forbidden events, which prevents the operation."""
    if event.startswith(FORBIDDEN):
        raise PermissionError(f"a chat template may not do this: {event}")


def warm(environment):
    """Loads the modules and data that Jinja and the C library would read at first use: filters, the time zone, error messages."""
    used = "{{ lipsum(n=1) }}{{ [1]|pprint }}{{ 'a b'|wordwrap(1) }}{{ ('a.com'|urlize)|striptags }}{{ strftime_now('%c %Z') }}"
    for template in (used, "{{ nothing.more }}", "{% if %}"):
        with contextlib.suppress(jinja2.TemplateError):
            environment.rendered(template, {}, LEAST)
    environment.compiled.cache_clear()


def _receive(parent, pid):
    """Returns the next message of the parent. Ends this process if the parent has ended, even if another child of the parent holds the
    pipe open."""
    while True:
        try:
            return json.loads(parent.receive(LOOK_S))
        except TimeoutError:
            if os.getppid() != pid:
                raise SystemExit from None
        except EOFError:
            raise SystemExit from None


def main(descriptor):
    # The socket becomes descriptor 0, because `select`, which a process without files still can call, takes only small numbers.
    os.dup2(descriptor, 0)
    os.close(descriptor)
    parent, pid, environment = channel.Channel(0), os.getppid(), TemplateEnvironment()
    warm(environment)
    _limit()
    sys.addaudithook(forbid)
    parent.send(json.dumps({"ready": True}).encode())
    while True:
        parent.send(json.dumps(answers(environment, _receive(parent, pid))).encode())


if __name__ == "__main__":
    main(int(sys.argv[-1]))
