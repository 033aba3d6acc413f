"""Reward functions in processes of their own: what they are given, what may go wrong in them, and that nothing outlives the run."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from argosy.core.errors import ArgosyError, BadInput, SettingsError
from argosy.rl.rewards.functions import open_rewards
from argosy.rl.rewards.settings import RewardSettings

COMPLETIONS = ["one", "three", "seventeen"]
PROMPTS = ["a", "b", "c"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module into the working directory, and names it."""
    monkeypatch.chdir(tmp_path)

    def write_file(code: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(code))
        return name

    return write_file


def score(*ofs: str, workers=1, columns=None, completions=COMPLETIONS, messages=None, **settings):
    messages = [] if messages is None else messages
    with open_rewards([RewardSettings(of=of, **settings) for of in ofs], workers, say=messages.append) as rewards:
        return rewards([PROMPTS[i % 3] for i in range(len(completions))], completions, columns or {})


def refusal_of(*ofs: str, columns=(), **settings) -> str:
    with pytest.raises((BadInput, SettingsError)) as caught:
        open_rewards([RewardSettings(of=of, **settings) for of in ofs], 1, columns=columns)
    return str(caught.value)


# ---- what a function is given and gives


def test_arguments_go_by_name_and_nothing_else_is_sent(write):
    write("""
        def length(completions): return [len(c) for c in completions]
        def columns(prompts, answer, completions, **others): return [len(others), sorted(others) == ["more"], answer[2]]
        def same(completions, prompts, more=None): return [p == "b" and m == 2 for p, m in zip(prompts, more)]
        def default(completions, absent=7): return [absent] * 3
    """)
    ofs = [f"mine.py:{name}" for name in ("length", "columns", "same", "default")]
    scored = score(*ofs, columns={"answer": [4, 5, 6], "more": [1, 2, 3]})
    assert scored.names == ("length", "columns", "same", "default")
    assert scored.values.dtype == np.float32
    assert scored.values.tolist() == [[3, 1, 0, 7], [5, 1, 1, 7], [9, 6, 0, 7]]
    assert not scored.counts


def test_what_a_run_knows_of_completions_goes_to_parameters_of_that_name_alone(write):
    write("""
        def cut(completions, finish_reasons): return [r == "length" for r in finish_reasons]
        def opened(completions, thinking_prompts=None): return [bool(t) for t in thinking_prompts or [0] * len(completions)]
        def rest(completions, **others): return [len(others)] * len(completions)
    """)
    ofs = [f"mine.py:{name}" for name in ("cut", "opened", "rest")]
    columns = {"answer": ["4"] * 3, "finish_reasons": ["stop", "length", "stop"], "thinking_prompts": [True, False, False]}
    assert score(*ofs, columns=columns).values.tolist() == [[0, 1, 2], [1, 0, 2], [0, 0, 2]]
    # The parameter `prompts` is among the others.
    with open_rewards([RewardSettings(of=of) for of in ofs], 1, columns=["answer"]) as rewards:
        assert rewards.names == ("cut", "opened", "rest")
        with pytest.raises(BadInput, match="needs `finish_reasons`"):
            rewards(PROMPTS, COMPLETIONS, {"answer": ["4"] * 3})
    assert "a column `finish_reasons` would hide" in refusal_of("mine.py:rest", columns=["finish_reasons"])


def test_a_failure_drops_the_completion_and_none_does_not(write):
    write("""
        def none(completions): return [None, 1, float("nan")]
        def three(completions):
            if completions == ["three"]: raise ValueError("no")
            return [2]
        three.per_completion = True
    """)
    scored = score("mine.py:none", "mine.py:three")
    assert scored.failed.tolist() == [False, True, True]
    assert scored.counts == {"none": {"not finite": 1}, "three": {"raised": 1}}


def test_messages_pass_through(write):
    write("def f(prompts, completions): return [len(p) + len(c[0]['content']) for p, c in zip(prompts, completions)]")
    with open_rewards([RewardSettings(of="mine.py:f")], 1) as rewards:
        messages = [{"role": "user", "content": "hi"}]
        assert rewards([messages], [[{"role": "assistant", "content": "four"}]], {}).values.tolist() == [[5]]


def test_numbers_of_many_kinds(write):
    write("""
        import numpy as np
        def array(completions): return np.asarray([0.5, 1, 2], np.float16)
        def items(completions): return (x for x in [True, np.float32(0.25), None])
    """)
    scored = score("mine.py:array", "mine.py:items")
    np.testing.assert_array_equal(scored.values, np.asarray([[0.5, 1], [1, 0.25], [2, math.nan]], np.float32))
    assert not scored.counts  # None is no failure
    assert not scored.none_at_all


def test_none_for_all_is_no_reward_at_all(write):
    write("def f(completions): return [None] * 3")
    scored = score("mine.py:f")
    assert scored.none_at_all
    with pytest.raises(ArgosyError, match="none of 3 completions has a reward"):
        scored.check()


def test_a_module_by_name_and_an_object_that_is_called(write):
    write(
        """
        class Scale:
            def __init__(self, by): self.by = by
            def __call__(self, completions, **columns): return [self.by * len(c) for c in completions]
        twice = Scale(2)
    """,
        "scales.py",
    )
    write("import scales\nfrom scales import twice\nthrice = scales.Scale(3)")
    scored = score("scales:twice", "mine.py:thrice", "mine.py:twice")
    assert scored.values[0].tolist() == [6, 9, 6]
    assert scored.names == ("scales.twice", "thrice", "mine.twice")


def test_async_functions_run_in_one_event_loop(write):
    write("""
        import asyncio
        loops = set()
        async def one(text):
            await asyncio.sleep(0.05)
            return len(text)
        async def f(completions, **columns):
            loops.add(id(asyncio.get_running_loop()))
            return await asyncio.gather(*map(one, completions))
        def seen(completions): return [len(loops)] * len(completions)
    """)
    with open_rewards([RewardSettings(of="mine.py:f"), RewardSettings(of="mine.py:seen")], 1) as rewards:
        for _ in range(2):
            scored = rewards(PROMPTS, COMPLETIONS, {})
        assert scored.values.tolist() == [[3, 1], [5, 1], [9, 1]]


def test_modules_are_loaded_once_and_the_file_is_read_once(write):
    write("calls = []\ndef f(completions):\n    calls.append(1)\n    return [len(calls)] * len(completions)")
    with open_rewards([RewardSettings(of="mine.py:f")], 1) as rewards:
        assert rewards(PROMPTS, COMPLETIONS, {}).values[0, 0] == 1
        write("def f(completions): return [99] * len(completions)")
        assert rewards(PROMPTS, COMPLETIONS, {}).values[0, 0] == 2


def test_what_a_function_prints_does_not_disturb(write, capfd):
    write("import os\ndef f(completions):\n    print('told')\n    os.write(1, b'raw')\n    return [1, 2, 3]")
    assert score("mine.py:f").values.tolist() == [[1], [2], [3]]
    out, err = capfd.readouterr()
    assert out == ""
    assert "told" in err
    assert "raw" in err


def test_no_completions(write):
    write("def f(completions): raise ValueError")
    assert score("mine.py:f", completions=[]).values.shape == (0, 1)


# ---- what is refused before work starts


@pytest.mark.parametrize(
    ("code", "of", "expected"),
    [
        ("", "other.py:f", "no file `other.py` for the reward `other.py:f`"),
        ("def g(completions): pass", "mine.py:f", "no function `f` for the reward `mine.py:f`"),
        ("def reward_one(completions): pass", "mine.py:reward", "did you mean `reward_one`?"),
        ("x = (1,\n    2\ny = 3", "mine.py:f", "SyntaxError: '(' was never closed\n  in {cwd}/mine.py:1: x = (1,"),
        ("import os\nimport no_such_thing", "mine.py:f", "ModuleNotFoundError: No module named 'no_such_thing'\n  in {cwd}/mine.py:2"),
        ("raise SystemExit(3)", "mine.py:f", "SystemExit: 3"),
        ("class f: pass", "mine.py:f", "`mine.py:f` is a class, not a function"),
        ("f = 3", "mine.py:f", "`mine.py:f` is a int, not a function"),
        ("def f(completions, /): pass", "mine.py:f", "its parameter `completions` cannot be given by name"),
        ("def f(prompts): pass", "mine.py:f", "has no parameter `completions`"),
        ("def f(completions, answer, level): pass", "mine.py:f", "needs `answer`\n\nhint: the columns are level, more"),
        ("def f(completions): pass", "mine.py", "names a file and no function"),
        ("", "no.such.module:f", "ModuleNotFoundError: No module named 'no'"),
        ("", "exakt", "no reward `exakt`\n\nhint: did you mean `exact`?"),
        ("", "some/folder", "no reward `some/folder`"),
        ("import os; os._exit(3)", "mine.py:f", "ended while it loaded `mine.py:f`: exit code 3"),
    ],
)
def test_what_cannot_be_used_is_refused_before_work_starts(write, tmp_path, code, of, expected):
    write(code)
    with pytest.raises(ArgosyError) as caught:
        open_rewards([RewardSettings(of=of)], 1, columns=["level", "more"])
    assert expected.format(cwd=tmp_path) in str(caught.value)


def test_all_mistakes_at_once(write):
    write("def f(completions, answer): pass\ndef g(prompts): pass")
    problems = refusal_of("mine.py:f", "mine.py:g", columns=[])
    assert "needs `answer`" in problems
    assert "no other columns than the prompt" in problems
    assert "`mine.py:g` has no parameter `completions`" in problems


def test_lists_that_do_not_fit_are_refused(write):
    write("def f(completions, answer): return [1] * len(completions)")
    with open_rewards([RewardSettings(of="mine.py:f")], 1) as rewards:
        for prompts, columns, expected in [
            (["a"], {"answer": [1, 2]}, "`prompts` has 1 item for 2 completions"),
            (["a", "b"], {"answer": [1]}, "`answer` has 1 item for 2 completions"),
            (["a", "b"], {"answer": "ab"}, "`answer` has a text"),
            (["a", "b"], {"answer": [1, 2], "completions": [1, 2]}, "a column `completions` would hide"),
            (["a", "b"], {"level": [1, 2]}, "needs `answer`\n\nhint: the columns are level"),
            (["a", "b"], {"answer": [1, lambda: 1]}, "cannot be sent to another process"),
        ]:
            with pytest.raises(BadInput) as caught:
                rewards(prompts, ["c", "d"], columns)
            assert expected in str(caught.value)
        assert rewards(["a"], ["c"], {"answer": [1]}).values.tolist() == [[1]]


def test_the_same_twice_no_reward_and_no_process(write):
    write("def f(completions): pass")
    assert "given twice" in refusal_of("mine.py:f", "mine.py:f")
    with pytest.raises(BadInput, match="no reward"):
        open_rewards([], 1)
    with pytest.raises(BadInput, match="0 processes"):
        open_rewards([RewardSettings(of="mine.py:f")], 0)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("[1, 2]", "returned 2 rewards for 3 completions"),
        ("3", "returned int 3, not a list of numbers"),
        ("None", "returned NoneType None, not a list"),
        ("'abc'", "returned str 'abc', not a list"),
        ("[1, 'x', 2]", "returned str 'x' where a number or None belongs"),
        ("[1, [2], 3]", "returned list [2] where"),
    ],
)
def test_a_result_of_the_wrong_kind_is_an_error_that_names_the_function(write, result, expected):
    write(f"def f(completions): return {result}")
    with pytest.raises(BadInput) as caught:
        score("mine.py:f")
    assert f"the reward `mine.py:f` {expected}" in str(caught.value)


# ---- what goes wrong in a call


def test_an_exception_costs_one_function_its_rewards_and_is_said_once(write):
    write("def f(completions): return 1 / 0\ndef g(completions): return [1, 2, 3]")
    messages = []
    with open_rewards([RewardSettings(of="mine.py:f"), RewardSettings(of="mine.py:g")], 1, say=messages.append) as rewards:
        for _ in range(2):
            scored = rewards(PROMPTS, COMPLETIONS, {})
            assert np.isnan(scored.values[:, 0]).all()
            assert scored.values[:, 1].tolist() == [1, 2, 3]
            assert scored.counts == {"f": {"raised": 3}}
            assert not scored.none_at_all
        scored.check()
    assert len(messages) == 1
    message = scored.messages["f"]["raised"]
    assert message in messages[0] + "\n"
    assert "mine.py\", line 1, in f" in message
    assert message.endswith("ZeroDivisionError: division by zero\n")
    assert "rewards/child.py" not in message
    assert message.startswith("ZeroDivisionError: division by zero, in ")
    assert "mine.py:1: def f(completions): return 1 / 0\n" in message
    assert messages[0].endswith("hint: a function returns None for a completion that it has no reward for")


def test_numpy_is_seeded_where_a_function_imports_it(write):
    write("def f(completions):\n    import numpy\n    return numpy.random.rand(len(completions)).tolist()")
    first, again = score("mine.py:f").values, score("mine.py:f").values
    assert np.isfinite(first).all()
    assert np.array_equal(first, again), "in another process"


def test_an_exception_in_a_library_is_blamed_on_the_line_that_called_it(write):
    write("import json\ndef f(completions):\n    return [json.loads('{') for _ in completions]")
    first = score("mine.py:f").messages["f"]["raised"].splitlines()[0]
    assert first.startswith("json.decoder.JSONDecodeError: ")
    assert first.endswith("mine.py:3: return [json.loads('{') for _ in completions]")


def test_all_missing_says_why(write):
    write("def f(completions): raise KeyError('answer')")
    scored = score("mine.py:f")
    with pytest.raises(ArgosyError) as caught:
        scored.check()
    assert "the first failure: KeyError: 'answer'" in str(caught.value)


def test_numbers_that_are_not_finite_are_missing_and_counted(write):
    write("def f(completions): return [float('nan'), float('inf'), 10 ** 400, 1e39, 5]")
    scored = score("mine.py:f", completions=["x"] * 5)
    assert np.isnan(scored.values[:4]).all()
    assert scored.values[4] == 5
    assert scored.counts == {"f": {"not finite": 4}}
    assert scored.messages["f"]["not finite"] == "it returned nan for completion 0"


FAILING = """
    import os, re, signal, time
    def f(completions, **columns):
        for c in completions:
            if c == "sleeps": time.sleep(60)
            if c == "keeps the interpreter": re.match(r"(a+)+$", "a" * 64 + "b")
            if c == "raises": raise ValueError(c)
            if c == "leaves": os._exit(3)
            if c == "crashes": os.kill(os.getpid(), signal.SIGSEGV)
            if c == "exits": raise SystemExit(4)
        return [len(c) for c in completions]
    def each(completions, **columns): return f(completions)
    each.per_completion = True
"""


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        ("sleeps", "timed out", "takes more than 0.3 s"),
        ("keeps the interpreter", "timed out", "takes more than 0.3 s"),
        ("raises", "raised", "ValueError: raises"),
        ("leaves", "died", "exit code 3"),
        ("crashes", "died", "SIGSEGV"),
        ("exits", "raised", "SystemExit: 4"),
    ],
)
def test_a_failure_costs_its_call_and_no_other(write, bad, kind, message):
    write(FAILING)
    messages = []
    both = [RewardSettings(of=f"mine.py:{name}", timeout=0.3) for name in ("f", "each")]
    with open_rewards(both, 1, say=messages.append) as rewards:
        scored = rewards(PROMPTS, ["ok", bad, "fine"], {})
        np.testing.assert_array_equal(scored.values[:, 1], [2, math.nan, 4])
        assert np.isnan(scored.values[:, 0]).all()
        assert scored.counts == {"f": {kind: 3}, "each": {kind: 1}}
        assert message in scored.messages["each"][kind]
        assert len(messages) == 2
        # The process that took its place works.
        assert rewards(PROMPTS, ["ok", "good", "fine"], {}).values.tolist() == [[2, 2], [4, 4], [4, 4]]


def test_a_process_that_died_between_two_batches_is_replaced(write):
    write("import os\ndef f(completions): return [os.getpid()] * len(completions)")
    with open_rewards([RewardSettings(of="mine.py:f")], 1) as rewards:
        first = int(rewards(PROMPTS, COMPLETIONS, {}).values[0, 0])
        os.kill(first, signal.SIGKILL)
        time.sleep(0.1)
        again = rewards(PROMPTS, COMPLETIONS, {})
        assert not again.counts
        assert int(again.values[0, 0]) != first


def test_the_time_limit_ends_what_the_function_started_too(write, tmp_path):
    write("""
        import subprocess, sys, time
        def f(completions):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open("child", "w").write(str(child.pid))
            time.sleep(60)
    """)
    assert score("mine.py:f", timeout=1.0).counts == {"f": {"timed out": 3}}
    assert has_ended(int((tmp_path / "child").read_text()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what has left the group is found on Linux alone")
@pytest.mark.parametrize(("then", "kind"), [("time.sleep(60)", "timed out"), ("os._exit(3)", "died"), ("os.killpg(0, 9)", "died")])
def test_what_a_function_started_in_a_session_of_its_own_ends_with_its_process(write, tmp_path, then, kind):
    write(f"""
        import os, subprocess, sys, time
        def f(completions):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
            open("child", "w").write(str(child.pid))
            {then}
    """)
    with open_rewards([RewardSettings(of="mine.py:f", timeout=1.0)], 1, say=lambda _: None) as rewards:
        assert rewards(PROMPTS, COMPLETIONS, {}).counts == {"f": {kind: 3}}
        assert has_ended(int((tmp_path / "child").read_text()), 1.0), "while the run goes on"


# ---- many processes


def test_the_result_depends_neither_on_the_process_nor_on_their_number(write):
    write("""
        import random
        import numpy as np
        def f(completions):
            return [random.random() + np.random.random() + len(list({"a", "b", c})[0]) for c in completions]
        f.per_completion = True
        def whole(completions): return [random.random() for c in completions]
    """)
    completions = [f"{i}" * (i % 5 + 1) for i in range(40)]
    scores = [score("mine.py:f", "mine.py:whole", completions=completions, workers=workers).values for workers in (1, 3, 3)]
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_array_equal(scores[1], scores[2])
    assert len(np.unique(scores[0])) == 80


def test_completions_are_shared_among_processes_only_where_a_function_allows_it(write):
    write("""
        import os, time
        def whole(completions): return [os.getpid()] * len(completions)
        def each(completions):
            assert len(completions) == 1
            time.sleep(0.02)
            return [os.getpid()]
        each.per_completion = True
    """)
    values = score("mine.py:whole", "mine.py:each", completions=["x"] * 20, workers=2).values
    assert len(set(values[:, 0])) == 1
    assert len(set(values[:, 1])) == 2


# ---- nothing outlives the run


def has_ended(pid: int, within: float = 5.0) -> bool:
    """Whether a process ends in time. One that is dead and not yet waited for has ended."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


PARENT = """
import sys
from argosy.rl.rewards.functions import open_rewards
from argosy.rl.rewards.settings import RewardSettings
rewards = open_rewards([RewardSettings(of="mine.py:f", timeout=100)], 2)
print("ready", *[one.process.pid for one in rewards._pool._processes], flush=True)
if sys.argv[1] == "busy":
    rewards(["p"] * 2, ["c"] * 2, {})
sys.stdin.read()
"""


def parent(mode: str) -> tuple[subprocess.Popen, list[int]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, [int(word) for word in process.stdout.readline().split()[1:]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_processes_end_with_their_parent(write, mode, number):
    """Also inside a call that holds the interpreter's lock, with a child of its own in another session."""
    write("""
        import os, re, subprocess, sys
        def f(completions):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
            with open(f"new-{os.getpid()}", "w") as file: file.write(str(child.pid))
            os.replace(f"new-{os.getpid()}", f"pids-{os.getpid()}")
            re.match(r"(a+)+$", "a" * 64 + "b")
        f.per_completion = True
    """)
    process, pids = parent(mode)
    assert len(pids) == 2
    if mode == "busy":
        until = time.monotonic() + 20
        while len(files := list(Path.cwd().glob("pids-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        pids += [int(path.read_text()) for path in files]
        assert len(pids) == 4
    assert not any(has_ended(pid, 0.1) for pid in pids)
    process.send_signal(number)
    process.wait(20)
    process.stdin.close()
    process.stdout.close()
    assert all(has_ended(pid) for pid in pids)


def test_closing_ends_the_processes(write):
    write("import os\ndef f(completions): return [os.getpid()] * len(completions)")
    with open_rewards([RewardSettings(of="mine.py:f")], 1) as rewards:
        pid = int(rewards(PROMPTS, COMPLETIONS, {}).values[0, 0])
    assert has_ended(pid)


def test_neither_a_process_nor_opening_imports_jax(write):
    write("import sys\ndef f(completions): return [len({'jax', 'numpy', 'argosy'} & set(sys.modules))] * len(completions)")
    assert score("mine.py:f").values.tolist() == [[0]] * 3
    code = "import sys; from argosy.rl.rewards import functions, settings; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_more_than_1023_open_files(write):
    """`select.select` refuses descriptors above 1,023. In a process of its own, whose limit is raised."""
    write("def f(completions): return [len(c) for c in completions]")
    code = """
        import os, resource
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        from argosy.data.chat.template import render
        from argosy.rl.rewards.functions import open_rewards
        from argosy.rl.rewards.settings import RewardSettings
        with open_rewards([RewardSettings(of="mine.py:f")], 2) as rewards:
            print(rewards(["p"], ["four"], {}).values.tolist())
        print(render("{{ messages[0].content }}", [{"role": "user", "content": "hi"}], {}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (done.stdout.splitlines(), done.stderr) == (["[[4.0]]", "hi"], "")
