"""Chat templates that mean harm end with a clear error or a rendering, within time and memory. They reach nothing outside of their
process, not even where Jinja's sandbox has a hole."""

import re
import resource
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from hostile_templates import CHAINS, COSTS, OBJECTS, PROOF, STATEMENTS, hostile, known_template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from argosy.core.errors import BadInput
from argosy.core.process import channel
from argosy.data.chat import template as chat
from argosy.data.chat.mask import render_with_mask
from argosy.data.chat.template import render

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# A render has 2 s of CPU; a busy machine takes longer, but nobody waits for the 60 s of the clock.
LONGEST_S = 30
SPACE_MB = 512
# In what a template may show, these would be somebody else's.
LEAKS = (PROOF, "root:x:", "<module", "environ(", "<class 'object'>", "'__loader__':", "'__builtins__':")


def outcome(template: str, mask: bool = False) -> str:
    """`read`, or the first words of the error; anything else fails."""
    begun = time.monotonic()
    try:
        text = render_with_mask(template, MESSAGES, SPECIAL, ends=["</s>"])[0] if mask else render(template, MESSAGES, SPECIAL)
    except BadInput as error:
        message = str(error)
        assert "runs for more than" not in message
        assert len(message) < 700
        assert all(c.isprintable() or c == "\n" for c in message), "it would steer the terminal"
        assert not any(leak in message for leak in LEAKS)
        assert "may not do this" not in message, "only the last wall held"
        end = error.what.partition(":")[0]
    else:
        assert len(text) <= chat.LEAST_CHARACTERS + 4 * 10_000
        assert not any(leak in text for leak in LEAKS)
        end = "read"
    assert time.monotonic() - begun < LONGEST_S
    process = chat.CHILD._process
    if process is not None and (status := Path(f"/proc/{process.pid}/status")).exists():
        peak = re.search(r"VmPeak:\s+(\d+) kB", status.read_text())
        assert peak is None or int(peak[1]) < (SPACE_MB + 16) * 1024
    return end


def campaign(templates: list[str]) -> Counter[str]:
    render("warm", [], {})
    before, outcomes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, Counter[str]()
    for number, template in enumerate(templates):
        try:
            outcomes[outcome(template, mask=number % 3 == 2)] += 1
        except Exception as error:
            raise AssertionError(f"template {number}: {template[:300]!r}") from error
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 96 * 1024, "KiB, of this process"
    assert render("{{ messages[0].content }}", MESSAGES, SPECIAL) == "hi", "and the next one is served"
    return outcomes


def test_escapes_and_mixtures_of_them():
    outcomes = campaign([hostile(1, number, costly=False) for number in range(200)])
    assert sum(outcomes.values()) == 200
    assert outcomes["read"] > 20, "not everything is refused at the door"
    assert outcomes["the chat template refuses these messages"] > 50


@pytest.mark.slow
def test_three_hundred_mutations():
    outcomes = campaign([hostile(2, number) for number in range(300)])
    assert sum(outcomes.values()) == 300
    for problem in ("refuses these messages", "is not Jinja", "costs too much"):
        assert outcomes[f"the chat template {problem}"] >= 10, outcomes
    assert outcomes["read"] >= 10, outcomes


@pytest.mark.slow
def test_every_known_escape_and_cost():
    outcomes = campaign([known_template(escape) for escape in (*CHAINS, *STATEMENTS, *COSTS)])
    assert outcomes["the chat template costs too much"] >= 25, outcomes
    campaign([f"{{{{ {expression} }}}}" for expression in OBJECTS])


# ---- where the sandbox has a hole


def open_sandbox(folder: Path, monkeypatch: pytest.MonkeyPatch, *without: str) -> chat.Child:
    """A rendering process whose sandbox lets everything through. without: the walls behind it that are taken away too."""
    text = Path(chat.__file__).with_name("child.py").read_text()
    changes = {
        "    def is_safe_attribute(self, obj, attr, value):\n": "    def is_safe_callable(self, obj):\n        return True\n\n"
        "    def is_safe_attribute(self, obj, attr, value):\n        return True\n",
        "        super().__init__(trim_blocks": "        self.sandboxed = False\n        super().__init__(trim_blocks",
    }
    if "hook" in without:
        changes["    sys.addaudithook(forbid)\n"] = ""
    if "limits" in without:
        changes[', "NOFILE": 0, "NPROC": 0'] = ""
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    here, room = folder / "data" / "chat", folder / "core" / "process"
    here.mkdir(parents=True)
    room.mkdir(parents=True)
    shutil.copy(channel.__file__, room)
    (here / "child.py").write_text(text)
    child = chat.Child()
    monkeypatch.setattr(chat, "__file__", str(here / "template.py"))
    monkeypatch.setattr(chat, "CHILD", child)
    # It alone renders, and not one that an earlier test has started.
    monkeypatch.setattr(chat, "CHILDREN", [child])
    monkeypatch.setattr(chat, "RENDERING", 1)
    return child


def ends(templates: list[str]) -> list[str]:
    outcomes = []
    for template in templates:
        try:
            outcomes.append(render(template, MESSAGES, SPECIAL))
        except BadInput as error:
            outcomes.append(str(error))
    return outcomes


BEHIND = "lipsum.__globals__.__builtins__"
REACHING = [
    f"{BEHIND}.open('/etc/passwd').read()", f"{BEHIND}.__import__('socket')", "lipsum.__globals__.os.open('/etc/passwd', 0)",
    "lipsum.__globals__.os.fork()", "lipsum.__globals__.os.execv('/bin/echo', ['echo', '{run}'])",
    "lipsum.__globals__.os.listdir('/')", "lipsum.__globals__.os.kill(1, 0)", "lipsum.__globals__.os.system('{run}')",
    "lipsum.__globals__.os.posix_spawn('/bin/sh', ['sh'], {})",
]  # fmt: skip


def test_escapes_work_where_nothing_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So the tests below are about escapes that are real."""
    child = open_sandbox(tmp_path, monkeypatch, "hook", "limits")
    try:
        texts = ends([known_template(escape) for escape in CHAINS])
        assert sum(PROOF in text for text in texts) >= 5
        assert sum("<module 'os'" in text for text in texts) >= 2
    finally:
        child.close()


@pytest.mark.parametrize("without", [(), ("hook",), ("limits",)], ids=["both", "kernel", "interpreter"])
def test_what_gets_through_the_sandbox_reaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]):
    """By each of the two walls behind it alone, and by both."""
    child = open_sandbox(tmp_path, monkeypatch, *without)
    try:
        texts = ends([known_template(escape) for escape in CHAINS])
        assert sum("<module 'os'" in text for text in texts) >= 2, "the sandbox is open"
        assert not any(PROOF in text for text in texts)
        reaching = REACHING if "hook" not in without else REACHING[:3]
        texts = ends([known_template(text) for text in reaching])
        assert not any(leak in text for text in texts for leak in (PROOF, "root:x:", "<module"))
        if "hook" not in without:
            assert all("a chat template may not do this" in text for text in texts), texts
    finally:
        child.close()


# ---- what honest templates need


@pytest.mark.parametrize("value", ["'a.b c'", "[1, 2]", "{'a': 1}", "1.5"])
def test_what_jinja_brings_works_behind_the_walls(value: str):
    """No filter or test needs a file that was not read before."""
    jinja = ImmutableSandboxedEnvironment()
    templates = [f"{{{{ {value}|{name} }}}}" for name in jinja.filters] + [f"{{{{ {value} is {name} }}}}" for name in jinja.tests]
    outcomes = ends(templates)
    assert not [text for text in outcomes if "may not do this" in text or "Errno" in text]
    assert sum("error" not in text for text in outcomes) > len(outcomes) / 3


def test_the_clock_has_the_zone_of_the_machine():
    before = time.strftime("%Y-%m-%d %H %Z")
    assert render("{{ strftime_now('%Y-%m-%d %H') }}", [], {}) + time.strftime(" %Z") in (before, time.strftime("%Y-%m-%d %H %Z"))


def test_a_refusal_cannot_steer_the_terminal():
    with pytest.raises(BadInput) as caught:
        render("{{ raise_exception('\\x1b[2J\\x07\\u202egone') }}", [], {})
    hidden = "\N{REPLACEMENT CHARACTER}"
    assert caught.value.what == f"the chat template refuses these messages: {hidden}[2J{hidden}{hidden}gone"
