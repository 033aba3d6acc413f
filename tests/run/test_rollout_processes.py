"""Rollouts in other processes: the answers are those of one process, whatever ends on the way, and nothing is left behind."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import numbers
from launch.test_workers import is_alive
from run.test_reinforce_runs import fit, prompts_and_rewards, words_for

from argosy.core.errors import ArgosyError, UserError
from argosy.core.storage import Store
from argosy.infer.load import random_lm
from argosy.infer.sampling.sample import Sampling
from argosy.jobs.quickstart.proof import digest
from argosy.launch.workers import Workers
from argosy.models.llama import LlamaConfig
from argosy.models.parts.weight import split
from argosy.observe.metrics import read
from argosy.rl.rollouts.completions import SamplingRequest, sample_completions
from argosy.rl.rollouts.settings import Rollout
from argosy.run.rl import rollout_workers
from argosy.run.rl.rollout_engine import RolloutEngine, checksums
from argosy.run.rl.rollout_worker import RolloutWorker, split_completions

pytestmark = pytest.mark.usefixtures("one_device")

METRICS = ("loss", "reward", "grad_norm", "tokens", "rollout", "sampler/difference_max")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompts_and_rewards(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base") / "run"
    fit("grpo", data, run, steps=1)
    return run


def same(run: Path, other: Path, steps: int) -> None:
    for metric in METRICS:
        assert numbers(run, metric) == numbers(other, metric), metric
    assert digest(run, steps) == digest(other, steps)


def near(run: Path, other: Path) -> None:
    """With two processes each computes fewer answers at a time, so log-probabilities may differ by rounding."""
    for metric in METRICS:
        exact = metric in ("reward", "tokens", "rollout")
        want = numbers(run, metric)
        assert numbers(other, metric) == (want if exact else pytest.approx(want, rel=1e-4, abs=1e-6)), metric


def trouble(monkeypatch: pytest.MonkeyPatch, do: Callable[[int, int], None]) -> list[int]:
    """Calls do(count, pid) when a process has the weights and is about to be asked; returns the pids of these calls."""
    give, pids = rollout_workers.RolloutWorkers.give, []

    def then(self: Any, name: str, weights: Any, metadata: Any) -> None:
        give(self, name, weights, metadata)
        (pid,) = self.workers[name].pids
        pids.append(pid)
        do(len(pids), pid)

    monkeypatch.setattr(rollout_workers.RolloutWorkers, "give", then)
    return pids


# ---------------------------------------------------------------- without a process


@pytest.mark.slow
def test_shares_are_answered_as_all_together():
    """Two workers with a part each, and one engine with all; what they take is what was sent."""
    config = LlamaConfig(width=32, layers=2, ffn=64, heads=2, kv_heads=1, vocab=64, context=64)
    lm = random_lm(config, 3)
    graph, weights = split(lm.module)
    shapes = {a: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for a, leaf in weights.items()}
    rollout = Rollout(tokens=8, slots=4)
    engine = pickle.dumps(RolloutEngine(config, graph, shapes, lm.module.dtype, None, rollout))
    prompts, request = [[1, 2, 3], [1, 2, 3], [5], [9, 8, 7, 6], [1, 2, 3]], SamplingRequest(8, Sampling(temperature=1.0), (7, 0, 1))
    expected = sample_completions(lm, prompts, request)
    assert len({tuple(completion.tokens) for completion in expected}) == 5
    completions = []
    for rows in ([0, 1, 2], [3, 4]):
        worker = RolloutWorker(engine, {})
        names = sorted(weights)
        np.testing.assert_array_equal(worker.take(weights), checksums([weights[name] for name in names]))
        group: Any = type("Group", (), {"started": worker, "run": lambda self, do, *arguments: Value(do(*arguments))})()
        completions += split_completions(rollout_workers.sampling_task(prompts, rows, request)(group))
    assert [completion.tokens for completion in completions] == [completion.tokens for completion in expected]
    for completion, other in zip(completions, expected, strict=True):
        np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-5)
    changed = {names[0]: weights[names[0]] + 1}
    sums = worker.take(changed)
    assert (sums != np.asarray(checksums([weights[name] for name in names]))).tolist() == [True] + [False] * (len(names) - 1)


class Value:
    def __init__(self, value: Any):
        self.found = value

    def value(self) -> Any:
        return self.found


def test_only_what_moved_is_sent_again():
    """A weight counts as moved where its array is another one."""
    frozen, first, second = (jax.numpy.full((2,), float(i)) for i in range(3))

    class State:
        rest = {"frozen.w": frozen, "critic.head.w": frozen}  # noqa: RUF012

        def __init__(self, trained: jax.Array):
            self.params = {"trained.w": trained}

    for ahead in (0, 1):
        rollout = Rollout(processes=1, ahead=ahead)
        workers: Any = object.__new__(rollout_workers.RolloutWorkers)
        workers.how, workers._latest = rollout, {}
        first_copy, two = workers.weights(State(first)), workers.weights(State(second))
        assert list(first_copy.versions) == ["frozen.w", "trained.w"]
        assert [first_copy.versions[a].number for a in first_copy.versions] == [0, 0]
        assert [two.versions[a].number for a in two.versions] == [0, 1]
        assert (first_copy.sums == two.sums).tolist() == [True, False]
        # What is sampled ahead outlives the update, which is given the arrays.
        assert (first_copy.versions["trained.w"].sent is first) == (not ahead)
        first.delete() if ahead else None
        np.testing.assert_array_equal(first_copy.versions["trained.w"].sent, np.ones(2))
        first = jax.numpy.ones(2)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["rollout.devices=1"], "leave one out"),
        (["environment=tools", "environment.functions=tools.py:add"], "rollout.processes and an environment do not combine"),
        (["rollout.processes=null", "rollout.stuck=3"], "is for processes that sample"),
        (["rollout.processes=0"], "greater than 0"),
    ],
)
def test_mistakes_are_found_before_a_process_starts(words: list[str], problem: str, data: Path, tmp_path: Path):
    with pytest.raises(UserError, match=problem):
        fit("grpo", data, tmp_path / "run", "rollout.processes=1", *words, steps=1)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- runs


def test_a_process_answers_as_this_one(data: Path, base: Path, tmp_path: Path):
    fit("grpo", data, tmp_path / "apart", "rollout.processes=1", steps=1)
    same(base, tmp_path / "apart", 1)


@pytest.mark.slow
def test_a_process_that_is_killed_changes_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its prompts are sampled again, and it is counted."""
    fit("grpo", data, tmp_path / "one", steps=2)
    pids = trouble(monkeypatch, lambda count, pid: os.kill(pid, signal.SIGKILL) if count == 2 else None)
    output = fit("grpo", data, tmp_path / "apart", "rollout.processes=1", "eval.batches=0", steps=2)
    same(tmp_path / "one", tmp_path / "apart", 2)
    assert numbers(tmp_path / "apart", "rollout_lost") == {1: 0, 2: 1}
    assert "ended by SIGKILL" in output
    assert "`rollout-0` is started again, and its prompts are sampled again" in output
    assert len(pids) == 3
    assert not any(is_alive(pid) for pid in pids)


HOW = {
    "plain": ["eval.every=2"],
    "epochs": ["rollout.epochs=2", "rollout.minibatches=2", "objective.kl=0.1"],
    "greedy": ["objective=remax", "rollout.completions=1"],
    "int8": ["rollout.weights=int8"],
    "adapters": ["adapter=lora", "adapter.rank=2"],
    "quantized": ["adapter=qlora", "adapter.rank=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOW)
def test_two_processes_learn_as_one(name: str, data: Path, base: Path, tmp_path: Path):
    settings = [*HOW[name], f"init.weights={base}"]
    fit("grpo", data, tmp_path / "one", *settings, steps=4)
    fit("grpo", data, tmp_path / "apart", *settings, "rollout.processes=2", steps=4)
    near(tmp_path / "one", tmp_path / "apart")
    assert numbers(tmp_path / "one", "eval_reward") == numbers(tmp_path / "apart", "eval_reward")
    header = next(line["header"] for line in read(Store(tmp_path / "apart")) if "header" in line)
    assert header["samplers"].startswith("2 processes, each with a copy of the weights (")
    assert set(numbers(tmp_path / "apart", "rollout_lost").values()) == {0}


@pytest.mark.slow
def test_a_critic_stays_with_the_trainer(data: Path, base: Path, tmp_path: Path):
    settings = ["rollout.completions=1", f"init.weights={base}"]
    fit("ppo", data, tmp_path / "one", *settings, steps=2)
    fit("ppo", data, tmp_path / "apart", *settings, "rollout.processes=1", steps=2)
    same(tmp_path / "one", tmp_path / "apart", 2)


@pytest.mark.slow
def test_adapters_travel_without_their_base(data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    send, names_sent = Workers.send, []

    def noted(self: Workers, value: Any, to: str, sharding: Any = None) -> Any:
        names_sent.append(set(value))
        return send(self, value, to, sharding)

    monkeypatch.setattr(Workers, "send", noted)
    settings = ["adapter=lora", "adapter.rank=2", f"init.weights={base}", "rollout.processes=1", "eval.batches=0"]
    fit("grpo", data, tmp_path / "run", *settings, steps=3)
    assert len(names_sent) == 3
    assert "embed.w" in names_sent[0]
    assert names_sent[1] == names_sent[2] < names_sent[0]
    assert all(name.endswith((".a", ".b")) for name in names_sent[1])


@pytest.mark.slow
def test_a_process_that_ends_while_others_are_ahead(data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It samples again with the weights from before, which the trainer has left: the answers are those of devices of their own."""
    settings = ["rollout.ahead=2", "rollout.epochs=2", f"init.weights={base}"]
    fit("grpo", data, tmp_path / "one", *settings, "rollout.devices=1", steps=6)
    trouble(monkeypatch, lambda count, pid: os.kill(pid, signal.SIGKILL) if count in (3, 6) else None)
    fit("grpo", data, tmp_path / "apart", *settings, "rollout.processes=2", steps=6)
    near(tmp_path / "one", tmp_path / "apart")
    assert numbers(tmp_path / "apart", "rollout_age") == numbers(tmp_path / "one", "rollout_age")
    assert numbers(tmp_path / "apart", "rollout_age")[5] == 2
    assert sum(numbers(tmp_path / "apart", "rollout_lost").values()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_resume_with_another_number_of_processes(ahead: int, data: Path, base: Path, tmp_path: Path):
    settings = [f"rollout.ahead={ahead}", "rollout.epochs=2", f"init.weights={base}"]
    fit("grpo", data, tmp_path / "whole", *settings, "rollout.processes=1", steps=6)
    fit("grpo", data, tmp_path / "halves", *settings, "rollout.processes=1", steps=3)
    assert "resuming from step 3" in fit("grpo", data, tmp_path / "halves", *settings, "rollout.processes=2", steps=6)
    near(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.slow
def test_one_that_ends_again_and_again_ends_the_run(data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was learned is saved, and a resume ends as if nothing had happened."""
    settings = [f"init.weights={base}", "eval.batches=0", "checkpoint.every=99"]
    fit("grpo", data, tmp_path / "one", *settings, steps=4)
    with monkeypatch.context() as patch:
        pids = trouble(patch, lambda count, pid: os.kill(pid, signal.SIGKILL) if count > 2 else None)
        with pytest.raises(ArgosyError, match="ended by SIGKILL") as caught:
            fit("grpo", data, tmp_path / "apart", *settings, "rollout.processes=1", steps=4)
    assert "3 times in a row without an answer" in str(caught.value)
    assert "what was learned is saved" in str(caught.value)
    assert len(pids) == 5
    assert not any(is_alive(pid) for pid in pids)
    assert (tmp_path / "apart" / "checkpoints" / "2").is_dir()
    assert "resuming from step 2" in fit("grpo", data, tmp_path / "apart", *settings, "rollout.processes=1", steps=4)
    same(tmp_path / "one", tmp_path / "apart", 4)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_one_that_ends_in_the_last_evaluation_fails_nothing(times: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The weights are those of a run that was left alone. Where its process ends again and again, the evaluation alone is missing."""
    fit("grpo", data, tmp_path / "one", steps=1)
    pids = trouble(monkeypatch, lambda count, pid: os.kill(pid, signal.SIGKILL) if 2 < count <= 2 + times else None)
    output = fit("grpo", data, tmp_path / "apart", "rollout.processes=1", steps=1)
    same(tmp_path / "one", tmp_path / "apart", 1)
    if times == 1:
        assert numbers(tmp_path / "apart", "eval_reward") == numbers(tmp_path / "one", "eval_reward")
        assert "evaluation is missing" not in output
    else:
        assert list(numbers(tmp_path / "apart", "eval_reward")) == [0]
        assert "step 1 is saved, but its evaluation is missing: process 0 of the group `rollout-0` ended by SIGKILL" in output
    assert len(pids) == (4 if times == 1 else 5)
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_stuck_process_is_started_again(data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = [f"init.weights={base}", "eval.batches=0"]
    fit("grpo", data, tmp_path / "one", *settings, steps=2)
    trouble(monkeypatch, lambda count, pid: os.kill(pid, signal.SIGSTOP) if count == 2 else None)
    output = fit("grpo", data, tmp_path / "apart", *settings, "rollout.processes=1", "rollout.stuck=20", steps=2)
    same(tmp_path / "one", tmp_path / "apart", 2)
    assert "did not answer within 20 s" in output
    assert numbers(tmp_path / "apart", "rollout_lost")[2] == 1


@pytest.mark.slow
def test_a_weight_that_arrives_changed_ends_the_run(data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    send = Workers.send

    def faulty(self: Workers, value: Any, to: str, sharding: Any = None) -> Any:
        name = sorted(value)[0]
        wrong = np.array(value[name])
        wrong.view(np.uint8).reshape(-1)[5] ^= 1
        return send(self, value | {name: wrong}, to, sharding)

    monkeypatch.setattr(Workers, "send", faulty)
    with pytest.raises(ArgosyError, match=r"1 weight arrived changed in the process `rollout-0`, such as embed\.w"):
        fit("grpo", data, tmp_path / "run", f"init.weights={base}", "rollout.processes=1", "eval.batches=0", steps=1)


# ---------------------------------------------------------------- how it ends


def children(pid: int) -> list[int]:
    out = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(word) for word in out.split()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "settings"),
    [(signal.SIGINT, []), (signal.SIGTERM, ["rollout.ahead=1"]), (signal.SIGKILL, []), (signal.SIGKILL, ["rollout.ahead=1"])],
)
def test_nothing_is_left_behind_and_a_resume_is_bit_for_bit(number: signal.Signals, settings: list[str], data: Path, tmp_path: Path):
    words = [*words_for(data, tmp_path / "run", *settings), "rollout.processes=2", "steps=24", "eval.batches=0", "checkpoint.every=5"]
    command = [sys.executable, "-m", "argosy", "train", "grpo", *words]
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    environment = os.environ | {"ARGOSY_HUGE_PAGES": "0", "XLA_FLAGS": flags, "XDG_CACHE_HOME": str(data / "cache")}
    with (tmp_path / "said.txt").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 200
            while max(numbers(tmp_path / "run", "loss") or [0]) < 8:
                assert process.poll() is None, (tmp_path / "said.txt").read_text()
                assert time.monotonic() < until, (tmp_path / "said.txt").read_text()
                time.sleep(0.05)
            workers = children(process.pid)
            process.send_signal(number)
            code = process.wait(60)
        finally:
            process.kill()
        assert code in (-signal.SIGKILL, 128 + number)
        time.sleep(0.5)
        assert len(workers) >= 2
        assert not [pid for pid in workers if is_alive(pid)]
        if number != signal.SIGKILL:
            last = max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit())
            assert last == max(numbers(tmp_path / "run", "loss"))
        assert subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode == 0
        whole = [word.replace(str(tmp_path / "run"), str(tmp_path / "whole")) for word in command]
        assert subprocess.run(whole, env=environment, stdout=log, stderr=log, check=False).returncode == 0
    same(tmp_path / "whole", tmp_path / "run", 24)
