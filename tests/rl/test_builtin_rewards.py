"""Built-in rewards, by hand and through the processes that run them."""


import numpy as np
import pytest
from helpers import can_confine

from argosy.core.errors import BadInput, Unsupported
from argosy.rl.rewards import sources as reward_sources
from argosy.rl.rewards.builtin import code, exact, format, maths, maths_strict
from argosy.rl.rewards.functions import open_rewards
from argosy.rl.rewards.settings import RewardSettings

linux = pytest.mark.skipif(not can_confine(), reason="needs Linux with Landlock")


def test_exact():
    assert exact([" 4\n", "4.0", "x", "y"], ["4", 4, None, ""]) == [1, 0, None, None]
    messages = [{"role": "assistant", "content": "no"}, {"role": "assistant", "content": "4"}]
    assert exact([messages, []], ["4", "4"]) == [1, 0]


def test_maths():
    assert maths([r"\boxed{1/2}", r"\boxed{1/2}", "none", "3"], ["0.5", r"so \boxed{\frac{1}{3}}", "1", None]) == [1, 0, 0, None]


def test_thoughts_are_not_graded():
    assert exact(["<think>4</think> 4", "<think>4", "4</think>5", "4"], ["4"] * 4, [False, False, True, True]) == [1, 0, 0, 0]
    texts = [r"<think>\boxed{5}</think> #### 6"] * 2
    assert maths(texts, ["6", "5"]) == [1, 0]
    assert maths([r"\boxed{5}"] * 2, ["5"] * 2, thinking_prompts=[True, False]) == [0, 1]


def test_a_completion_that_was_cut_has_no_last_number():
    texts = ["= 4 * (2^2 + 1) = 4 *", "so 4", "so 4", r"\boxed{4} and"]
    assert maths(texts, ["4"] * 4, ["length", "length", "stop", "length"]) == [0, 0, 1, 1]


def test_maths_strictly():
    assert maths_strict(["it is 4", "#### 4", r"\boxed{4}", "#### 4"], ["4"] * 4, ["stop"] * 3 + ["length"]) == [0, 1, 1, 0]


@linux
def test_code_in_a_thought_is_not_run():
    assert code([f"<think>{BLOCK}</think>", f"<think>no</think>{BLOCK}"], ["assert double(1) == 2"] * 2) == [0, 1]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a\nb</think><answer>4</answer>", 1),
        ("<think>a</think>\n\n<answer>\n4\n</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("so: <think>a</think><answer>4</answer>", 0),
        ("<think>a</think><answer>4</answer> more", 0),
        ("<think>a</think>4", 0),
        ("<think>a<think>b</think><answer>4</answer>", 0),
        ("<think>a</think><answer>3</answer><answer>4</answer>", 0),
        ("<answer>4</answer><think>a</think>", 0),
    ],
)
def test_the_format_of_r1(text, right):
    assert format([text]) == [right]


def test_a_format_of_ones_own():
    assert format(["a1\nb", "a1\nb", "x"], [r"a\d.b", r"a\d", None]) == [1, 0, 0]


BLOCK = "Here:\n```python\ndef double(x):\n    return x * 2\n```\nDone."
READS = "```py\nn = int(input())\nprint(n * 2, ' ')\n```"


@linux
def test_code_and_its_share_of_tests():
    asserts = ["assert double(2) == 4", "assert double(0) == 1", "assert double('a') == 'aa'", "assert undefined"]
    pairs = [{"input": "2\n", "output": "4"}, {"input": "3", "output": "6  \n\n"}, {"input": "x", "output": "0"}]
    assert code([BLOCK, READS], [asserts, pairs]) == [0.5, 2 / 3]
    assert code([BLOCK, BLOCK, "no block"], ["assert double(1) == 2", None, ["assert True"]]) == [1, None, 0]
    assert code(["```\nx = 1\n```\nno:\n```python\nx = 2\n```"], [["assert x == 2"]]) == [1]


@linux
@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "1 / 0",
        "x = (",
        "print('ok')",
        "import os\nos.kill(os.getppid(), 9)\ndef double(x): return 0",
    ],
)
def test_code_that_ends_early_passes_nothing(program):
    assert code([f"```python\n{program}\n```"], [["assert double(1) == 2"]]) == [0]


@pytest.mark.slow
@linux
def test_code_that_does_not_end_costs_its_tests_and_not_the_reward():
    loop = "```python\ndef double(x):\n    while x: pass\n    return x\n```"
    messages = []
    with open_rewards([RewardSettings(of="code", timeout=4)], 1, columns=["tests"], say=messages.append) as rewards:
        scored = rewards(["p"] * 2, [loop, BLOCK], {"tests": [["assert double(0) == 0", "assert double(1) == 2", "assert 1"]] * 2})
    assert scored.values[:, 0].tolist() == pytest.approx([1 / 3, 1])
    assert not messages


@linux
def test_through_processes_beside_a_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(completions, **columns): return [len(c) for c in completions]")
    names = ["maths", "exact", "format", "mine.py:f"]
    with open_rewards([RewardSettings(of=of, weight=i) for i, of in enumerate(names)], 2, columns=["answer"]) as rewards:
        scored = rewards(["p"] * 3, [r"\boxed{0.5}", "1/2", "<think></think><answer>1/2</answer>"], {"answer": ["1/2"] * 3})
    np.testing.assert_array_equal(scored.values, [[1, 0, 0, 11], [1, 1, 0, 3], [1, 0, 1, 35]])
    assert (rewards.names, rewards.weights) == (("maths", "exact", "format", "f"), (0, 1, 2, 3))
    assert not scored.counts


def test_a_column_that_is_missing():
    with pytest.raises(BadInput, match="the reward `maths` needs `answer`"):
        open_rewards([RewardSettings(of="maths")], 1, columns=["solution"])


def test_a_library_or_a_sandbox_that_is_missing(monkeypatch):
    monkeypatch.setattr(reward_sources, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="needs the library"):
        open_rewards([RewardSettings(of="math_verify")], 1)
    monkeypatch.setattr(reward_sources, "available", lambda: ["no Landlock"])
    with pytest.raises(Unsupported, match="cannot run code here: no Landlock"):
        open_rewards([RewardSettings(of="code")], 1)


def test_math_verify():
    pytest.importorskip("math_verify")
    with open_rewards([RewardSettings(of="math_verify")], 1, columns=["answer"]) as rewards:
        texts = [r"\boxed{\frac{1}{2}}", r"\boxed{0.4}", "the answer is 2", r"\boxed{2}"]
        scored = rewards(["p"] * 4, texts, {"answer": ["0.5", "0.5", r"so $\boxed{2}$", None]})
    np.testing.assert_array_equal(scored.values[:, 0], [1, 0, 1, np.nan])
