"""Tools: schemas against those of transformers' documentation, calls that go wrong, and the tools that come with Argosy."""

import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import pytest
from helpers import can_confine
from hypothesis import given, settings
from hypothesis import strategies as st
from infer.marked import NAMES, VOCAB, template, tokenizer_with_marks
from laws.families import noisy_model
from rl.talking import CASE, CHAT, EOS, ids, language_model, prompts

from argosy.core.errors import BadInput, SettingsError, UserError
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.models.parts.stack import Unroll
from argosy.rl.environments.calculator import calculate
from argosy.rl.environments.settings import CalculatorEnvironment, PythonEnvironment, open_table
from argosy.rl.environments.settings import ToolsEnvironment as Settings
from argosy.rl.environments.tools import Tools, schema_of
from argosy.rl.rollouts.episodes.trajectories import EpisodeLimits, EpisodeRunner

WRONG = "wrong_arguments"
USER = [{"role": "user", "content": "2 + 2?"}]


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: the first,
            and best.
        b: the second
    """
    return a + b


def weather(place: str, unit: Literal["C", "F"], days: list[int] | None = None, rest: dict[str, float] | None = None) -> dict:
    return {"place": place, "unit": unit}


def test_a_signature_becomes_a_schema():
    """The form of transformers' `get_json_schema` (docs/source/en/chat_extras.md)."""
    assert schema_of(add, {}) == {"type": "function", "function": {
        "name": "add", "description": "Adds two numbers.", "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "the first, and best."},
                "b": {"type": "integer", "description": "the second"},
            },
            "required": ["a"],
        }}}  # fmt: skip
    parameters = schema_of(weather, {"place": "x"})["function"]["parameters"]
    assert parameters["required"] == ["unit"]
    assert parameters["properties"] == {
        "unit": {"enum": ["C", "F"]},
        "days": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
        "rest": {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]},
    }


def loops() -> str:
    """Never ends."""
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def breaks(reason: str = "this way") -> str:
    """Raises."""
    raise ValueError(reason)


@pytest.fixture
def tools() -> Tools:
    tool_set = Tools.__new__(Tools)
    tool_set.seconds, tool_set.fixed = 0.2, {}
    tool_set.functions = {function.__name__: function for function in (add, weather, loops, breaks)}
    tool_set.tools = [schema_of(function, {}) for function in tool_set.functions.values()]
    return tool_set


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    return {"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("name", "arguments", "observation", "kind"),
    [
        ("add", {"a": 2, "b": 3}, "5", None),
        ("weather", {"place": "Köln", "unit": "C", "days": [1]}, '{"place": "Köln", "unit": "C"}', None),
        ("sub", {"a": 2}, "error: there is no tool `sub`; there are add, weather, loops, breaks", "unknown"),
        ("add", {"b": 3}, "error: add needs `a`", WRONG),
        ("add", {"a": 1, "c": 3}, "error: add has no argument `c`; it has a, b", WRONG),
        ("add", {"a": "1"}, 'error: `a` of add is "1", and should be {"type": "integer"}', WRONG),
        ("add", {"a": True}, 'error: `a` of add is true, and should be {"type": "integer"}', WRONG),
        ("add", [1, 2], "error: the arguments of add are no JSON object", WRONG),
        ("weather", {"place": "a", "unit": "K"}, 'error: `unit` of weather is "K", and should be {"enum": ["C", "F"]}', WRONG),
        ("breaks", {}, "error: ValueError: this way", "raised"),
        ("loops", {}, "error: loops takes more than 0.2 seconds", "timed_out"),
    ],
)
def test_what_goes_wrong_is_said_to_the_model_and_counted(tools: Tools, name: str, arguments: Any, observation: str, kind: str | None):
    begin = time.monotonic()
    turn = tools.step({"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]})
    assert time.monotonic() - begin < 10, "a call has 0.2 seconds"
    assert turn.observation == [{"role": "tool", "name": name, "tool_call_id": "call0", "content": observation}]
    counts = {"tools/calls": 1, "tools/failed": float(kind is not None)} | ({f"tools/{kind}": 1} if kind else {})
    assert (turn.counts, turn.done, turn.reward) == (counts, False, None)


def test_several_calls_and_none(tools: Tools):
    turn = tools.step({"content": "", "tool_calls": [call("add", {"a": 1}), call("breaks", {}, 1), call("add", {"a": 2}, 2)]})
    assert [message["content"] for message in turn.observation] == ["1", "error: ValueError: this way", "2"]
    assert turn.counts == {"tools/calls": 3, "tools/failed": 1, "tools/raised": 1}
    assert tools.step({"content": "4"}).done
    malformed = tools.step({"content": "<tool_call>{", "malformed": True})
    assert malformed.counts == {"tools/calls": 1, "tools/failed": 1, "tools/malformed": 1}
    assert not malformed.done


def test_a_tool_that_raises_is_told_to_who_trains_with_its_line(lm: LM, tmp_path: Path):
    """Once, however often and in how many processes; what comes with Argosy answers the model that way on purpose."""
    path = tmp_path / "own.py"
    path.write_text("import json\ndef parse(text: str) -> str:\n    return json.loads(text)\n")
    setup = open_table(Settings(functions=[f"{path}:parse"]), prompts(lm, [USER]), None)
    messages: list[str] = []
    setup.environments.say = messages.append
    for environment in [setup.environments.open() for _ in range(2)]:
        for message in ({"seed": 1, "reset": {}}, *[{"step": {"tool_calls": [call("parse", {"text": "{"})]}}] * 2):
            environment.ask(message)
            while environment.reply is None:
                setup.environments.look([environment], 1.0)
        assert environment.reply["counts"]["tools/raised"] == 1
    setup.close()
    assert len(messages) == 1
    assert messages[0].startswith(f"the tool `parse` raised JSONDecodeError in {path}:3: return json.loads(text)\nhint: ")
    calculator = Tools([{"of": "calculate", "module": calculate.__module__, "function": "calculate"}])
    calculator.called("calculate", {"expression": "a"})
    assert calculator.complaint is None


# ---- in a conversation


@pytest.fixture(scope="module")
def lm() -> LM:
    return language_model()


FUNCTIONS = """
count = 0
def add(a: int, b: int) -> int:
    "Adds."
    global count
    count += 1
    return a + b + 100 * (count - 1)
def long() -> str:
    "Says much."
    return "x" * 10**7
def untyped(a): return a
"""


def play(lm: LM, settings: Any, texts: list[str], rows: int = 1, most: int = 150) -> list[Any]:
    """The tokens are the model's by hand: those of `texts`, turn by turn."""
    from rl.talking import Scripted

    data = prompts(lm, [USER] * rows)
    setup = open_table(settings, data, None)
    try:
        longest = len(data(0, 1)[0].tokens) + most
        playing = EpisodeRunner(lm, data(0, rows), EpisodeLimits(Sampling(), most, longest), (1,), setup, lambda: False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LM, "engine", lambda *_: Scripted(dict.fromkeys(range(rows), texts)))
            return playing.run()
    finally:
        setup.close()


def hermes(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call><eos>'


def test_a_conversation_with_tools_token_by_token(lm: LM, tmp_path: Path):
    """What a tool keeps in its module is the answer's own, so both answers count from zero."""
    (tmp_path / "own.py").write_text(FUNCTIONS)
    first = hermes("add", a=2, b=2)
    answers = play(lm, Settings(functions=[f"{tmp_path}/own.py:add"]), [first, first, "104<eos>"], rows=2, most=400)
    for answer in answers:
        expected = f"{first}\n<bos>tool\n4<eos>\n<bos>assistant\n{first}\n<bos>tool\n104<eos>\n<bos>assistant\n104<eos>"
        assert answer.tokens == ids(expected)
        assert [len(ids(first)), len(ids(first)), 4] == [len(part) for part in runs(answer.live)]
        assert [message["role"] for message in answer.said] == ["assistant", "tool", "assistant", "tool", "assistant"]
        assert answer.said[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 2}}
        assert answer.said[0]["tool_calls"][0]["id"] == answer.said[1]["tool_call_id"] == "call00000"
        assert (answer.played.reward, answer.played.counts) == (None, {"tools/calls": 2, "tools/failed": 0})
    assert [*answers[0].prompt.tokens] == ids("<bos>user\n2 + 2?<eos>\n<bos>assistant\n")


def runs(live: list[bool]) -> list[list[bool]]:
    """The stretches of the policy."""
    text = "".join("x" if is_live else " " for is_live in live)
    return [[True] * len(part) for part in text.split()]


def test_malformed_calls_and_huge_results(lm: LM, tmp_path: Path):
    (tmp_path / "own.py").write_text(FUNCTIONS)
    texts = ['<tool_call>{"name": "lo<eos>', hermes("long"), hermes("nothing"), "so<eos>"]
    (answer,) = play(lm, Settings(functions=[f"{tmp_path}/own.py:long"], observation=80), texts, most=900)
    replies = [message["content"] for message in answer.said if message["role"] == "tool"]
    assert replies[0].startswith("error: this is no call that can be read")
    assert replies[1].endswith("\n[cut: 9,999,948 characters]")
    assert len(replies[1]) == 80
    assert replies[2] == "error: there is no tool `nothing`; there are long"
    counts = {"tools/calls": 3, "tools/failed": 2, "tools/malformed": 1, "tools/unknown": 1}
    assert (answer.played.counts, answer.played.cut, answer.ended) == (counts, 2, True)


KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
# By the name of the template: a call as the model says it, its id in the first turn and the second, the reply, and the end of a turn.
NOTATIONS: dict[str, tuple[str, list[str], str, str]] = {
    "nemo": (
        '[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]', ["call00000", "call00100"],
        '[TOOL_RESULTS]{{"content": {result}, "call_id": "{id}"}}[/TOOL_RESULTS]', "<eos>",
    ),
    "v11": ("[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{arguments}", ["a1b2c3d4e", "call00100"], "{result}<eos>", "<eos>"),
    "v13": ("[TOOL_CALLS]{name}[ARGS]{arguments}", ["call00000", "call00100"], "{result}<eos>", "<eos>"),
    "qwen3.5": (
        "<tool_call>\n<function={name}>\n{arguments}\n</function>\n</tool_call>", ["call00000", "call00100"],
        "\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n", "<|im_end|>",
    ),
    "kimi": (
        KIMI, ["functions.add:0", "functions.add:1"],
        "<|im_system|>add<|im_middle|>## Return of {id}\n{result}<|im_end|><|im_assistant|>assistant<|im_middle|>", "<|im_end|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTATIONS)
def test_a_conversation_in_each_notation(name: str, tmp_path: Path):
    """With the marks as special tokens, which end in no text; the replies are what the published templates write."""
    call, ids_, reply, end = NOTATIONS[name]
    (tmp_path / "own.py").write_text(FUNCTIONS)
    tokenizer = tokenizer_with_marks(tmp_path, [*NAMES, "<|im_end|>"], template(name), end)
    config = CASE.model_copy(update={"vocab": VOCAB})
    lm = LM(config, noisy_model(config, Unroll()), tokenizer)
    two = '{"a": 2, "b": 2}' if name != "qwen3.5" else "".join(f"<parameter={digit}>\n2\n</parameter>\n" for digit in "ab").strip()
    right = call.format(name="add", arguments=two) + end
    turns = [right, right, f"Hm.{call.format(name='add', arguments='{')}{end}", f"104{end}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl.talking.ids", lambda text: tokenizer.encode(text, special=True))
        (answer,) = play(lm, Settings(functions=[f"{tmp_path}/own.py:add"]), turns, most=900)
    replies = [reply.format(result=result, id=call_id) for result, call_id in zip(("4", "104"), ids_)]
    expected = tokenizer.encode(f"{turns[0]}{replies[0]}{turns[1]}{replies[1]}{turns[2]}", special=True)
    assert answer.tokens[: len(expected)] == expected
    assert answer.tokens[-4:] == tokenizer.encode(turns[3], special=True)
    assert answer.said[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 2}}
    assert [message["tool_calls"][0]["id"] for message in answer.said if "tool_calls" in message] == ids_
    results = [(message["tool_call_id"], message["content"]) for message in answer.said if message["role"] == "tool"][:2]
    assert results == [*zip(ids_, ("4", "104"))]
    assert answer.said[4] == {"role": "assistant", "content": turns[2].removesuffix(end)}
    assert answer.said[5]["content"].startswith("error: this is no call that can be read")
    assert answer.played.counts == {"tools/calls": 3, "tools/failed": 1, "tools/malformed": 1}


@pytest.mark.parametrize("spelled", ["<eos>", "<e\\u003ceos>os>"])
def test_end_tokens_that_a_model_spells_in_a_call_do_not_end_its_turn(lm: LM, tmp_path: Path, spelled: str):
    (tmp_path / "own.py").write_text("def echo(a: str) -> str: return 'well'")
    call = '<tool_call>{"name": "echo", "arguments": {"a": "x%sy"}}</tool_call>'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl.talking.ids", lambda text: [*(call % spelled).encode(), EOS] if text == "call" else ids(text))
        (answer,) = play(lm, Settings(functions=[f"{tmp_path}/own.py:echo"]), ["call", "so<eos>"], most=300)
    assert answer.tokens == [*(call % spelled).encode(), EOS, *ids("\n<bos>tool\nwell<eos>\n<bos>assistant\nso<eos>")]
    assert "<eos>" in answer.said[0]["tool_calls"][0]["function"]["arguments"]["a"], "the tool reads what the model said"


def test_a_call_that_the_template_refuses_costs_its_answer_alone(tmp_path: Path):
    """Templates such as Qwen 3.5's walk over the arguments of a call, which a model may write as a list."""
    walks = CHAT.replace("{{ c.function | tojson }}", "{% for name, value in c.function.arguments | items %}{{ name }}{% endfor %}")
    lm = language_model(walks.replace("<tool_call>", "<tool_call>{{ c.function.name }}"))
    (tmp_path / "own.py").write_text("def echo(a: str) -> str: return 'well'")
    listed = '<tool_call>{"name": "echo", "arguments": [1]}</tool_call><eos>'
    played_answer = play(lm, Settings(functions=[f"{tmp_path}/own.py:echo"]), [listed, "so<eos>"], most=300)[0].played
    assert (played_answer.why, played_answer.failure[0], played_answer.reward) == ("failed", "not rendered", None)
    assert "refuses these messages" in played_answer.failure[1]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("none", "no plain function"), ("untyped", "has no type"), ("count", "no plain function")],
)
def test_functions_that_cannot_be_tools(lm: LM, tmp_path: Path, name: str, problem: str):
    (tmp_path / "own.py").write_text(FUNCTIONS)
    with pytest.raises(UserError, match=problem):
        open_table(Settings(functions=[f"{tmp_path}/own.py:{name}"]), prompts(lm, [USER]), None)


def test_tools_need_messages_and_a_notation(lm: LM):
    with pytest.raises(BadInput, match="reads messages, and the prompt is a text"):
        open_table(CalculatorEnvironment(), prompts(lm, ["2+2"]), None)
    data = prompts(lm, [USER])
    data.templates = {"default": data.templates["default"].replace("<tool_call>", "[call]")}
    with pytest.raises(BadInput, match="notation of this chat template cannot be read"):
        open_table(CalculatorEnvironment(), data, None)
    with pytest.raises((SettingsError, ValueError), match="below timeout"):
        CalculatorEnvironment(call_timeout=20)


# ---- the calculator


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("2 + 2", "4"), ("2 * (3 + 4) ** 2", "98"), ("1 / 3", "1/3, which is 0.333333333333"), ("0.1 + 0.2", "0.3"), ("-7 / 2", "-3.5"),
        ("2 ** 3 ** 2", "512"), ("-2 ** 2", "-4"), ("2 ** -2", "0.25"), ("1,234 × 2 =", "2468"), ("7 − 9", "-2"), ("1/8", "0.125"),
        ("(-1) ** 1000000000001", "-1"), ("(-1) ** 1000000000000", "1"), ("1 ** -9", "1"),
        ("0 ** 0", "1"), ("0 ** 99999999999", "0"), ("-0.5", "-0.5"), ("2^10", "1024"), (".5*4", "2"),
    ],
)  # fmt: skip
def test_the_calculator_is_exact(expression: str, expected: str):
    assert calculate(expression) == expected


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1 / 0", "division by zero"), ("0 ** -1", "division by zero"), ("2 ** 0.5", "not whole"), ("9 ** 9 ** 9", "1000 digits"),
        ("(" * 200 + "1", "inside each other"), ("-" * 200 + "1", "inside each other"), ("__import__('os')", "is no number"),
        ("", "empty"), ("2 +", "missing at the end"), ("(2", "not closed"), ("2 2", "where a sign"), ("1" * 1001, "characters"),
        ("a + 1", "`a . 1` is no number"),
    ],
)  # fmt: skip
def test_what_the_calculator_refuses(expression: str, problem: str):
    with pytest.raises((ValueError, ZeroDivisionError), match=problem):
        calculate(expression)


numbers_ = st.integers(0, 99).map(str)
signs = st.sampled_from(["+", "-", "*", "/"])
expressions = st.recursive(numbers_, lambda inner: st.tuples(inner, signs, inner).map(lambda parts: f"({' '.join(parts)})"))


@settings(max_examples=200, deadline=None)
@given(expressions)
def test_the_calculator_agrees_with_fractions(expression: str):
    """Python's own parser, over exact fractions."""
    import re

    try:
        expected = eval(re.sub(r"(\d+)", r"Fraction(\1)", expression), {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            calculate(expression)
        return
    text = calculate(expression).partition(",")[0]
    assert Fraction(text) == expected


def test_what_a_resume_may_change_is_no_part_of_what_it_compares(lm: LM):
    settings = CalculatorEnvironment(), CalculatorEnvironment(call_timeout=4), CalculatorEnvironment(turns=3)
    first, two, other = (open_table(settings_of_tools, prompts(lm, [USER]), None) for settings_of_tools in settings)
    assert first.identity == two.identity != other.identity
    for setup in (first, two, other):
        setup.close()


def test_the_calculator_in_a_conversation(lm: LM):
    calls = [hermes("calculate", expression=expression) for expression in ("17 * 23", "a")]
    (answer,) = play(lm, CalculatorEnvironment(), [*calls, "391<eos>"], most=900)
    replies = [message["content"] for message in answer.said if message["role"] == "tool"]
    assert replies == ["391", "error: ValueError: `a` is no number and no sign"]
    assert answer.ended


# ---- Python


@pytest.mark.skipif(not can_confine(), reason="needs Linux with Landlock")
def test_python_runs_in_the_sandbox(lm: LM):
    programs = ["print(sum(range(10)))", "1 / 0", "while True: pass", "open('/etc/passwd')", "x = 1"]
    texts = [*(hermes("python", code=program) for program in programs), "45<eos>"]
    (answer,) = play(lm, PythonEnvironment(seconds=1.0, turns=9), texts, most=4000)
    replies = [message["content"] for message in answer.said if message["role"] == "tool"]
    assert replies[0] == "45"
    assert replies[1].endswith("ZeroDivisionError: division by zero")
    assert replies[2] == "error: it takes more than 1 seconds"
    assert "Permission" in replies[3]
    assert replies[4] == "it printed nothing"
    assert answer.played.counts == {"tools/calls": 5, "tools/failed": 0}, "a program that fails is no call that failed"


def test_python_is_refused_where_the_sandbox_is(lm: LM, monkeypatch):
    monkeypatch.setattr("argosy.rl.sandbox.available", lambda: ["no Landlock"])
    with pytest.raises(Exception, match="cannot run code here: no Landlock"):
        open_table(PythonEnvironment(), prompts(lm, [USER]), None)
