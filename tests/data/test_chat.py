"""Chat templates against what HF transformers renders, and against templates that mean harm."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest
from helpers import default, shared

import argosy
from argosy.core.errors import BadInput
from argosy.core.process.child import ChildProcess
from argosy.data.chat import template as chat
from argosy.data.chat.template import choose_template, render

NAMES = [
    "SmolLM2-135M-Instruct", "HuggingFaceTB-SmolLM3-3B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3.5-4B",
    "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "google-gemma-2-2b-it",
    "google-gemma-4-31B-it", "mistralai-Mistral-Nemo-Instruct-2407", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "openai-gpt-oss-120b",
    "Kimi-K2-Instruct",
]  # fmt: skip
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", autouse=True)
def end_child():
    """The process is gone when these tests are, so that nothing of theirs is left to others."""
    yield
    chat.CHILD.close()


def refusal_of(template: str, messages=HI) -> str:
    with pytest.raises(BadInput) as caught:
        render(template, messages, SPECIAL)
    assert len(str(caught.value).splitlines()) <= 5
    return str(caught.value)


# ---- against the reference


@pytest.mark.parametrize("name", NAMES)
def test_templates_render_as_in_transformers(name):
    golden = json.loads(shared("chat_templates/golden.json").read_text())
    template = shared(f"chat_templates/{name}.jinja").read_text()
    assert len(golden["renders"][name]) == 8
    for case, expected in golden["renders"][name].items():
        conversation = golden["conversations"][case.removesuffix("+gen")]
        options = {
            "tools": conversation.get("tools"), "add_generation_prompt": case.endswith("+gen"),
            "now": datetime(2025, 1, 2, 3, 4, 5),
        }  # fmt: skip
        if isinstance(expected, str):
            assert render(template, conversation["messages"], SPECIAL, **options) == expected, case
            continue
        if "'append'" in expected["error"]:
            assert case.removesuffix("+gen") == "tool_result", "transformers cannot continue what Kimi K2 calls"
            continue
        with pytest.raises(BadInput) as caught:
            render(template, conversation["messages"], SPECIAL, **options)
        assert expected["error"].partition(": ")[2] in str(caught.value), case


def test_a_template_may_change_lists_of_its_own():
    """As Kimi K2's does; transformers refuses it. Its calls are numbered over the conversation, and results are given their ids."""
    template = shared("chat_templates/Kimi-K2-Instruct.jinja").read_text()
    call = {"function": {"name": "time", "arguments": {"in": "Paris"}}}
    turn = [{"role": "assistant", "content": "", "tool_calls": [call, call]}, *[{"role": "tool", "content": "noon"}] * 2]
    text = render(template, [{"role": "user", "content": "What time is it?"}, *turn, *turn], {})
    ids = re.findall(r"<\|tool_call_begin\|>(.+?)<\|tool_call_argument_begin\|>\{\"in\": \"Paris\"\}<\|tool_call_end\|>", text)
    assert ids == re.findall("## Return of (.+)\nnoon", text) == [f"functions.time:{i}" for i in range(4)]


@pytest.mark.parametrize("name", NAMES)
def test_options_render_as_in_transformers(name):
    """A last message that is continued, thinking switched off, documents."""
    golden = json.loads((Path(__file__).parents[1] / "goldens" / "chat_options.json").read_text("utf-8"))
    template = shared(f"chat_templates/{name}.jinja").read_text()
    assert len(golden["renders"][name]) == 5
    for case, expected in golden["renders"][name].items():
        case_fields = golden["cases"][case]
        text = render(template, case_fields["messages"], SPECIAL, **case_fields["how"], now=datetime(2025, 1, 2, 3, 4, 5))
        assert text == expected, case


@pytest.mark.parametrize(("template", "messages", "options", "word"), [
    ("{{ messages[0].content }}", HI, {"add_generation_prompt": True}, "exclude each other"),
    ("{{ messages[0].content }}", [{"role": "assistant", "content": None}], {}, "no content"),
    ("{{ messages[0].role }}", HI, {}, "no content"),
    ("{{ messages[0].content[:1] }}", HI, {}, "drops part"),
    ("{{ messages[0].content[1:] }}", HI, {}, "drops part"),
])  # fmt: skip
def test_a_message_that_cannot_be_continued_is_refused(template, messages, options, word):
    with pytest.raises(BadInput, match=word):
        render(template, messages, SPECIAL, continue_final_message=True, **options)


def test_every_golden_template_is_tested():
    assert set(json.loads(shared("chat_templates/golden.json").read_text())["renders"]) == set(NAMES)


@pytest.mark.parametrize(("template", "text"), [
    ("{{ messages | tojson }}", '[{"role": "user", "content": "é<"}]'),
    ("{{ messages[0].content | tojson(ensure_ascii=true) }}", r'"\u00e9<"'),
    ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "é<"\n}'),
    ("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
    ("  {% if true %}\nx\n  {% endif %}\ny\n", "x\ny"),
    ("{{ tools is none }}{{ documents is none }}{{ other is defined }}", "TrueTrueFalse"),
    ("{{ strftime_now('%Y') }}", "2025"),
    ("{{ bos_token }}{{ add_generation_prompt }}{{ thinking }}", "<BOS>Falseno"),
])  # fmt: skip
def test_what_templates_may_rely_on(template, text):
    messages = [{"role": "user", "content": "é<"}]
    variables = {"thinking": "no"} if "thinking" in template else {}
    assert render(template, messages, SPECIAL, now=datetime(2025, 1, 2), **variables) == text


@pytest.mark.parametrize(("wanted_kind", "expected"), [
    ({}, "one"), ({"tools": True}, "two"), ({"name": "rag"}, "three"), ({"name": "rag", "tools": True}, "three"),
])  # fmt: skip
def test_one_of_many_templates_is_chosen(wanted_kind, expected):
    """As transformers chooses: the named one, `tool_use` where tools are given, else the default."""
    assert choose_template({"default": "one", "tool_use": "two", "rag": "three"}, **wanted_kind) == expected
    assert choose_template({"default": "one"}, tools=True) == "one"


def test_a_template_that_is_not_there_is_named():
    with pytest.raises(BadInput, match="rga") as caught:
        choose_template({"default": "one", "rag": "three"}, name="rga")
    assert "rag" in str(caught.value.hint)
    with pytest.raises(BadInput, match="no chat template"):
        choose_template({})


def test_documents_and_tools_reach_the_template():
    template = "{{ documents[0].text }} {{ tools[0].name }} {{ controls.safety }}"
    variables = {"documents": [{"text": "d"}], "tools": [{"name": "t"}], "controls": {"safety": "s"}}
    assert render(template, HI, SPECIAL, **variables) == "d t s"


# ---- harm


COSTLY = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a' * 10**8 }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ [0] * 10**10 }}",
    "{% for a in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% if x %}" * 5000,
    "{{ " + "(" * 200_000,
    "{% set x = namespace(s='ab') %}{% for i in range(60) %}{% set x.s = x.s + x.s %}{% endfor %}{{ x.s }}",
]  # fmt: skip


@pytest.mark.parametrize("template", default(*COSTLY[4:7], of=COSTLY), ids=lambda template: template[:40])
def test_costly_templates_end_soon(template):
    """By the limits of the process itself, on CPU time and memory: nobody waits for the clock on the wall."""
    render("warm", [], {})
    message = refusal_of(template)
    assert "costs too much" in message
    assert "runs for more than" not in message
    assert render("{{ messages[0].content }}", HI, SPECIAL) == "hi"  # and the next one is served


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ messages.append(1) }}",
    "{{ messages.pop() }}",
    "{{ (messages | attr('append'))(1) }}",
    "{{ [messages][0].append(1) }}",
    "{% set made = [] %}{{ made.insert(0, 1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ (messages | attr('__class__')).__base__ }}",
    "{{ range(10**9) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
])  # fmt: skip
def test_escapes_are_refused(template):
    assert "refuses these messages" in refusal_of(template)


def test_one_conversation_leaves_nothing_for_the_next():
    assert render("{% set bos_token = 'mine' %}{{ bos_token }}", HI, SPECIAL) == "mine"
    assert render("{{ bos_token }}", HI, SPECIAL) == "<BOS>"


# ---- wrong input


@pytest.mark.parametrize(("template", "problem"), [
    ("{% if %}", "not Jinja"), ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
    ("{{ raise_exception('only\nuser') }}", "only user"), ("{{ 'a' + 1 }}", "TypeError"),
    ("x" * (1 << 20) + "x", "characters"),
])  # fmt: skip
def test_mistakes_of_a_template_are_reported(template, problem):
    assert problem in refusal_of(template)


def test_a_conversation_that_is_not_json_is_reported():
    assert "not JSON" in refusal_of("x", [{"role": "user", "content": {1, 2}}])


def test_long_conversations_are_no_cost():
    messages = [{"role": "user", "content": "word " * 200_000}] * 3
    assert len(render("{% for m in messages %}{{ m.content }}{% endfor %}", messages, SPECIAL)) == 3_000_000


# ---- the process


def test_a_process_serves_many_renders():
    """A start takes 0.2 s, a warm render less than a millisecond."""
    render("warm", HI, SPECIAL)
    process = chat.CHILD._process
    for _ in range(20):
        render("{{ messages[0].content }}", HI, SPECIAL)
    assert chat.CHILD._process is process


def test_an_honest_template_has_a_minute_on_a_busy_machine(monkeypatch):
    """What a render may cost is bounded by its own CPU time; the machine may be busy with something else."""
    limits = []
    receive = ChildProcess.receive
    monkeypatch.setattr(ChildProcess, "receive", lambda process, limit: limits.append(limit) or receive(process, limit))
    render("warm", HI, SPECIAL)
    assert min(limits) >= 60


def test_threads_get_their_own_answers():
    wrong = []

    def work(number: int) -> None:
        for _ in range(50):
            if render("{{ messages[0].content }}", [{"content": str(number)}], {}) != str(number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


PARENT = """
import os, sys
from argosy.data.chat import template as chat
chat.render("x", [], {})
print(chat.CHILD._process.pid, flush=True)
if sys.argv[1] == "fork":
    if os.fork() == 0:
        assert chat.render("{{ 1 + 1 }}", [], {}) == "2"
        print(chat.CHILD._process.pid, flush=True)
        chat.CHILD.close()
        os._exit(0)
    os.wait()
    assert chat.render("{{ 1 + 2 }}", [], {}) == "3"
    print(chat.CHILD._process.pid, flush=True)
else:
    os._exit(9)
"""


def parent(word: str) -> list[int]:
    environment = {**os.environ, "PYTHONPATH": str(Path(argosy.__file__).parents[1])}
    words = [sys.executable, "-W", "error", "-c", PARENT, word]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == (0 if word == "fork" else 9)
    assert not done.stderr
    return [int(line) for line in done.stdout.split()]


def is_alive(pid: int) -> bool:
    """Whether it runs: a process that nobody has waited for counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_it_ends_with_its_parent():
    (pid,) = parent("die")
    until = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_a_forked_process_has_its_own():
    first, forked, again = parent("fork")
    assert forked != first == again
