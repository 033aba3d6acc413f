"""Runs whose answers have several turns: they learn, resume bit for bit, leave no process, and their mistakes are found before work."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import numbers
from rl.talking import CHAT

import argosy
from argosy.core.errors import ArgosyError, UserError
from argosy.core.storage import Store
from argosy.jobs.quickstart.proof import digest
from argosy.jobs.train import Quiet
from argosy.observe.metrics import read

pytestmark = pytest.mark.usefixtures("one_device")

CODE = """
import random, time
from argosy.rl.environment import Turn

class Sums:
    "Three numbers to add, one a turn. A tenth of the reward for any digit."
    def __init__(self, turns: int = 3): self.left = turns
    def reset(self, prompt, seed):
        self.random = random.Random(seed)
        return self.asked()
    def asked(self):
        self.number = self.random.randint(0, 4)
        return f"{self.number}+1="
    def step(self, said):
        time.sleep(random.SystemRandom().random() / 100)
        self.left -= 1
        reward = 1.0 if said == str(self.number + 1) else 0.1 * said.isdigit()
        return Turn("," + self.asked(), reward, self.left == 0, counts={"sums/asked": 1})

class Sides:
    "`<` asks for an ASCII character, `>` for another byte."
    def reset(self, prompt, seed):
        self.left, self.random = 4, random.Random(seed)
        return self.asked()
    def asked(self):
        self.side = self.random.choice("<>")
        return self.side
    def step(self, said):
        self.left -= 1
        return Turn(self.asked_after(said), 0.25 * self.right, self.left == 0)
    def asked_after(self, said):
        self.right = (said == "\ufffd") == (self.side == ">")
        return self.asked()

class Broken(Sums):
    def step(self, said): raise RuntimeError("no such thing")

class Half(Sums):
    def reset(self, prompt, seed):
        if "1" in prompt: raise KeyError(prompt)
        return super().reset(prompt, seed)

class Needs(Sums):
    def reset(self, prompt, answer): pass

class Hangs(Sums):
    def step(self, said): time.sleep(600)

class Unmade(Sums):
    def __init__(self): int("no, in fact")

class NoStep:
    def reset(self): pass
"""
FUNCTIONS = """
def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

def turns(completions):
    return [float(len(one)) for one in completions]
"""


class Heard(Quiet):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.words = ""

    def say(self, text: str) -> None:
        self.words += text + "\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}:"}) + "\n" for i in range(10)))
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 1"}], "answer": str(i + 1)} for i in range(10)]
    (folder / "messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text(CODE)
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "chat.jinja").write_text(CHAT)
    return folder


def words_for(data: Path, run: Path, *more: str) -> list[str]:
    words = [word for word in SMALL if not word.startswith(("data.", "eval.", "objective", "steps"))]
    words += [f"data.source={data / 'prompts.jsonl'}", "data.sequence=48", "data.batch=16", "data.held_out=0"]
    words += ["model.context=64", "model.vocab=258", "model.family=llama", "model.layers=1", "mesh.data=1", "mesh.fsdp=1"]
    words += ["rollout.completions=4", "rollout.tokens=24", "rollout.rows=4", "rollout.workers=1", "eval.every=99", "eval.batches=1"]
    words += ["optimizer=adamw", "optimizer.learning_rate=1e-2", "schedule=constant", "checkpoint.every=3", f"dir={run}"]
    words += [] if any(word.startswith("environment=") for word in more) else [f"environment={data / 'own.py'}:Sums"]
    words += [] if any(word.startswith("environment=none") for word in more) else ["environment.wait=2"]
    return [*words, *more]


def fit(recipe: str, data: Path, run: Path, *more: str, steps: int) -> str:
    heard = Heard()
    argosy.fit(recipe, *words_for(data, run, *more), view=heard, steps=steps)
    return heard.words


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base") / "run"
    fit("grpo", data, run, "environment.tokens=1", steps=1)
    return run


TURNS = "environment.tokens=1"


def test_a_run_with_an_environment(data: Path, base: Path, tmp_path: Path):
    """A reward function beside the environment's reward; the engine's log-probabilities are the trainer's; all turns are kept."""
    run = tmp_path / "run"
    more = [f"reward={data / 'functions.py'}:digits", "environment.weight=2", "data.held_out=0.3", f"init.weights={base}", TURNS]
    fit("grpo", data, run, *more, steps=2)
    lines = read(Store(run))
    for name in ("sampler/difference_max", "sampler/difference_mean"):
        assert max(numbers(run, name).values()) < 1e-4
    assert numbers(run, "sampler/missing")[1] == 0, "the environment's tokens are not missing, they are no tokens of the policy"
    assert numbers(run, "turns")[1] == 3
    assert numbers(run, "answers/tokens")[1] == 3, "the policy's own"
    assert numbers(run, "observations/tokens")[1] == 10
    assert numbers(run, "sums/asked")[1] == 48
    assert numbers(run, "targets")[1] <= 48
    environment, digits, reward = (numbers(run, name)[1] for name in ("rewards/environment", "rewards/digits", "reward"))
    assert reward == pytest.approx(2 * environment + digits, rel=1e-4)
    evaluated = next(line for line in lines if "eval_reward" in line)
    assert evaluated["eval_turns"] == 3
    records = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert [turn["role"] for turn in records[0]["turns"]] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert records[0]["completion"] == "".join(turn["content"] for turn in records[0]["turns"])
    assert sum(turn.get("reward", 0) for turn in records[0]["turns"]) == pytest.approx(records[0]["rewards"]["environment"])
    questions = {records[i]["turns"][0]["content"] for i in range(4)}
    assert len(questions) == 1, "answers to one prompt begin alike"
    page = (run / "report.html").read_text()
    assert "rollout 2" in page
    assert "user: " in page, "who said what"


@pytest.mark.slow
def test_messages_and_a_tool(data: Path, base: Path, tmp_path: Path):
    """Functions get the whole list of messages."""
    run = tmp_path / "run"
    more = [f"data.source={data / 'messages.jsonl'}", f"data.template={data / 'chat.jinja'}", "environment=calculator"]
    more += ["data.sequence=96", f"reward={data / 'functions.py'}:turns", "model.context=128", "rollout.ignore_eos=true"]
    output = fit("grpo", data, run, *more, steps=1)
    assert numbers(run, "rewards/turns")[1] == 1
    assert numbers(run, "tools/calls").get(1, 0) == 0
    assert "environment" not in json.loads((run / "answers.jsonl").read_text().splitlines()[0])["rewards"], output


HOW = {
    "grpo": ["rollout.epochs=2", "rollout.minibatches=2", "objective.kl=0.1"],
    "ppo": ["rollout.epochs=2", "rollout.completions=1", "objective.critic.rate=2", "objective.credit.by=to_go"],
    "grpo-ahead": ["rollout.epochs=2", "rollout.devices=1", "rollout.ahead=2"],
    "grpo-turns": ["rollout.minibatches=2", "rollout.devices=1", "rollout.ahead=2", "objective.credit.by=to_go"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOW)
def test_a_resume_in_the_middle_of_a_rollout_is_bit_for_bit(name: str, data: Path, base: Path, tmp_path: Path):
    """Environments sleep for random times; step 3 lies between the updates of a rollout, and rollouts follow it."""
    recipe, settings = name.partition("-")[0], [*HOW[name], f"init.weights={base}", TURNS]
    fit(recipe, data, tmp_path / "whole", *settings, steps=6)
    fit(recipe, data, tmp_path / "halves", *settings, steps=3)
    assert "resuming from step 3" in fit(recipe, data, tmp_path / "halves", *settings, steps=6)
    for metric in ("loss", "reward", "grad_norm", "kl", "tokens", "rollout", "turns"):
        assert numbers(tmp_path / "whole", metric) == numbers(tmp_path / "halves", metric), metric
    assert digest(tmp_path / "whole", 6) == digest(tmp_path / "halves", 6)
    lines = [line for line in read(Store(tmp_path / "whole")) if "loss" in line]
    for line in lines:
        assert all(np.isfinite(value) for value in line.values() if isinstance(value, float)), line


@pytest.mark.slow
def test_environments_that_fail(data: Path, base: Path, tmp_path: Path):
    run = tmp_path / "run"
    half = [f"environment={data / 'own.py'}:Half", f"init.weights={base}", "data.batch=40", TURNS]
    output = fit("grpo", data, run, *half, f"reward={data / 'functions.py'}:digits", steps=1)
    assert output.count("environment raised, its answers have no reward") == 1
    assert "KeyError: '1:'" in output
    assert numbers(run, "rewards/missing")[1] == pytest.approx(0.1), "functions give none to them either"
    assert numbers(run, "environment/raised")[1] == 4
    with pytest.raises(ArgosyError, match=r"no answer of rollout 1 has a reward .environment."):
        fit("grpo", data, tmp_path / "no", f"environment={data / 'own.py'}:Broken", f"init.weights={base}", TURNS, steps=1)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["environment={own}:Nope"], "no class `Nope` for the environment"),
        (["environment={own}:NoStep"], "no method `step`"),
        (["environment={own}:Unmade"], r"cannot be made: ValueError: .*no, in fact'\n  in .*own.py:\d+: def __init__.self.: int"),
        (["environment={own}:Sums", "environment.args.x=1"], "unexpected keyword argument 'x'"),
        (["environment={own}:Needs"], "needs `answer`"),
        (["environment=none.py:Own"], "no file `none.py`"),
        (["environment=gues"], "unknown environment `gues`"),
        (["environment=guess", "environment.high=1"], "not above low"),
        (["environment=guess", "environment.of=a"], "unknown setting `environment.of`"),
        (["environment=calculator"], "reward is missing"),
        (["environment=calculator", "reward=exact"], "needs `answer`|reads messages"),
        (["environment=guess", "objective=next_token"], "is for objectives that learn from rewards"),
        (["environment=tools", "reward={fun}:digits"], "functions"),
        (["environment=none"], "reward is missing|needs `reward` or `environment`"),
        (["environment={own}:Sums", "environment.turns=0"], "turns"),
        (["environment=none", "reward={fun}:digits", "objective.credit.by=to_go"], "credits turns, and an answer has one"),
        (["environment={own}:Sums", "environment.turns=1", "objective.credit.by=to_go"], "turns=1 lets an answer have one"),
        (["environment={own}:Sums", "objective.credit.by=to_go", "objective.advantages=batch"], "batch needs one reward an answer"),
        (["environment=gymnasium", "environment.make={own}:NoStep"], "has no method `step`"),
    ],
)
def test_mistakes_are_found_before_a_file_is_written(words: list[str], problem: str, data: Path, tmp_path: Path):
    arguments = [word.format(own=data / "own.py", fun=data / "functions.py") for word in words]
    with pytest.raises(UserError, match=problem):
        fit("grpo", data, tmp_path / "run", *arguments, steps=1)
    assert not (tmp_path / "run").exists()


def test_a_template_that_rewrites_turns_is_refused(data: Path, tmp_path: Path):
    """One that shows the thoughts of the last turn alone."""
    last = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    (tmp_path / "last.jinja").write_text(CHAT.replace("{{ m.content }}", last))
    more = [f"data.source={data / 'messages.jsonl'}", f"data.template={tmp_path / 'last.jinja'}", f"environment={data / 'own.py'}:Sums"]
    with pytest.raises(UserError, match="drops the thoughts of earlier turns"):
        fit("grpo", data, tmp_path / "run", *more, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("credit", [[], ["objective.credit.by=mixed"]], ids=["answer", "mixed"])
def test_eight_devices_learn_as_one(credit: list[str], data: Path, base: Path, tmp_path: Path):
    settings = [f"init.weights={base}", "rollout.rows=8", "objective.kl=0.1", TURNS, *credit]
    for name, mesh in {"one": [], "eight": ["mesh.data=-1", "mesh.fsdp=4"]}.items():
        fit("grpo", data, tmp_path / name, *settings, *mesh, steps=2)
    for metric in ("reward", "loss", "grad_norm", "kl", "targets", "turns"):
        single, eight = numbers(tmp_path / "one", metric), numbers(tmp_path / "eight", metric)
        assert eight == pytest.approx(single, rel=1e-3, abs=1e-5), metric


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(data: Path, tmp_path: Path):
    """While every environment hangs."""
    from rl.test_process_guard import alive, eventually

    words = words_for(data, tmp_path / "run", f"environment={data / 'own.py'}:Hangs", "environment.timeout=500", TURNS)
    process = subprocess.Popen(
        [sys.executable, "-m", "argosy", "train", "grpo", *words, "steps=2"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}, start_new_session=True,
    )  # fmt: skip
    groups: set[int] = set()

    def hanging() -> bool:
        groups.update(groups_below(process.pid))
        return any(len(alive(group)) > 16 for group in groups)

    until = time.monotonic() + 200
    while not hanging() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.2)
    assert hanging(), "one process for each answer"
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert eventually(lambda: not any(alive(group) for group in groups))


def groups_below(parent: int) -> set[int]:
    """The groups of the children of a process, apart from its own."""
    groups = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            _, above, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(above) == parent and int(group) != parent:
            groups.add(int(group))
    return groups


@pytest.mark.slow
def test_a_policy_learns_to_listen(data: Path, tmp_path: Path):
    """Four turns, in each of which the environment asks for an ASCII character or for another byte. Whoever does not listen is right
    in half of the turns, whatever it says."""
    run = tmp_path / "run"
    more = [f"environment={data / 'own.py'}:Sides", TURNS, "data.batch=64", "rollout.completions=16", "rollout.rows=16"]
    fit("grpo", data, run, *more, "model.width=32", "model.ffn=64", steps=30)
    reward = numbers(run, "reward")
    first, last = np.mean([reward[step] for step in range(1, 4)]), np.mean([reward[step] for step in range(26, 31)])
    print(f"mean reward of steps 1 to 3: {first:.3f}, of steps 26 to 30: {last:.3f}")
    assert first < 0.65
    assert last > 0.95
