"""Runs that learn from rewards: they get better, a resume is bit for bit wherever it is, and mistakes are found before work starts."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import Heard, numbers

import argosy
from argosy.checkpoint.step.layout import STATE
from argosy.checkpoint.step.load import load_item
from argosy.core.errors import ArgosyError, UserError
from argosy.core.storage import Store
from argosy.jobs.quickstart.proof import digest
from argosy.observe.metrics import read
from argosy.run.rl import rollout_engine

pytestmark = pytest.mark.usefixtures("one_device")

FUNCTIONS = """
def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

def right(completions, answer):
    return [float(text.startswith(one)) for text, one in zip(completions, answer)]

def same(completions):
    return [1.0 for _ in completions]

def broken(completions):
    raise RuntimeError("no such thing")

def odd(prompts, completions):
    return [float("inf") if "1" in p else None if "2" in p else 0.5 * len(c) for p, c in zip(prompts, completions)]
"""


def prompts_and_rewards(folder: Path) -> Path:
    rows = [{"prompt": f"{i}+{i % 3}=", "answer": str(i + i % 3)} for i in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompts_and_rewards(tmp_path_factory.mktemp("prompts"))


def words_for(data: Path, run: Path, *more: str) -> list[str]:
    words = [word for word in SMALL if not word.startswith(("data.", "eval.", "objective", "steps"))]
    words += [f"data.source={data / 'prompts.jsonl'}", "data.sequence=24", "data.batch=16", "data.held_out=0.2"]
    words += ["model.context=64", "model.vocab=258", "model.family=llama", "model.layers=1", "mesh.data=1", "mesh.fsdp=1"]
    words += ["rollout.completions=4", "rollout.tokens=6", "rollout.rows=4", "rollout.workers=1", "eval.every=99", "eval.batches=1"]
    words += ["optimizer=adamw", "optimizer.learning_rate=1e-2", "schedule=constant", "checkpoint.every=3", f"dir={run}"]
    words += [] if any(word.startswith("reward=") for word in more) else [f"reward={data / 'functions.py'}:digits"]
    return [*words, *more]


def fit(recipe: str, data: Path, run: Path, *more: str, steps: int) -> str:
    heard = Heard()
    argosy.fit(recipe, *words_for(data, run, *more), view=heard, steps=steps)
    return heard.words


def test_a_policy_learns_what_is_rewarded(data: Path, tmp_path: Path):
    """Random weights answer with any byte; digits are a tenth of what is readable and 4 % of all bytes."""
    run = tmp_path / "run"
    output = fit("grpo", data, run, "data.batch=64", "objective.scale=batch", "optimizer.learning_rate=3e-2", steps=15)
    assert re.search(r"the first prompt; its completions come at ⟦\.\.\.⟧\n(\d\+\d=)⟦\.\.\.⟧\nanswer: '\d+'\n", output)
    reward = numbers(run, "reward")
    assert np.mean([reward[step] for step in (1, 2)]) < 0.15
    assert np.mean([reward[step] for step in (14, 15)]) > 0.5
    evaluated = [line for line in read(Store(run)) if "eval_reward" in line]
    assert evaluated[0]["step"] == 0
    assert evaluated[0]["eval_reward"] < 0.3
    assert evaluated[-1]["eval_reward"] > 0.5
    assert "eval_loss" not in evaluated[-1]
    for name in ("sampler/difference_max", "sampler/difference_mean"):
        assert max(numbers(run, name).values()) < 1e-4
    assert set(numbers(run, "ratio/max").values()) == {1.0}
    records = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert records[0]["prompt"].endswith("=")
    assert records[0]["rewards"].keys() == {"digits"}
    page = (run / "report.html").read_text()
    assert "mean reward" in page
    assert f"{evaluated[0]['eval_reward']:.3f} before; greedy answers" in page
    assert "rollout 15" in page
    assert "nats per token" not in page
    tokens = numbers(run, "tokens")
    assert all(tokens[step] < tokens[step + 1] for step in range(1, 15)), "what was computed, summed over steps"


HOW = {
    "grpo": ["rollout.epochs=2", "rollout.minibatches=2", "objective.kl=0.1"],
    "ppo": ["rollout.epochs=2", "rollout.completions=1", "objective.critic.rate=2"],
    "grpo-adapters": ["rollout.epochs=2", "objective.kl=0.1", "adapter=lora", "adapter.rank=2"],
}


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base") / "run"
    fit("grpo", data, run, steps=1)
    return run


@pytest.mark.parametrize("name", [name if name == "ppo" else pytest.param(name, marks=pytest.mark.slow) for name in HOW])
def test_a_resume_in_the_middle_of_a_rollout_is_bit_for_bit(name: str, data: Path, base: Path, tmp_path: Path):
    """Step 3 lies between the updates of a rollout, whose answers were sampled by weights that are gone."""
    recipe, settings = name.partition("-")[0], [*HOW[name], f"init.weights={base}"]
    fit(recipe, data, tmp_path / "whole", *settings, steps=6)
    fit(recipe, data, tmp_path / "halves", *settings, steps=3)
    assert (tmp_path / "halves" / "checkpoints" / "3" / "data").is_dir()
    assert "resuming from step 3" in fit(recipe, data, tmp_path / "halves", *settings, steps=6)
    for metric in ("loss", "reward", "grad_norm", "kl", "tokens", "rollout"):
        assert numbers(tmp_path / "whole", metric) == numbers(tmp_path / "halves", metric), metric
    assert digest(tmp_path / "whole", 6) == digest(tmp_path / "halves", 6)
    assert numbers(tmp_path / "whole", "kl")[1] == pytest.approx(0, abs=1e-6), "the reference is the first weights"
    assert numbers(tmp_path / "whole", "kl")[6] > 1e-4
    (spent,) = [line["seconds"] for line in read(Store(tmp_path / "whole")) if "seconds" in line]
    generating, rollouts = numbers(tmp_path / "whole", "generate_s"), numbers(tmp_path / "whole", "rollout")
    sampled = sum({rollouts[step]: generating[step] for step in generating}.values())
    assert spent["rollouts"] >= sampled > 0, "sampling is no reading of data"
    assert "<td >rollouts" in re.sub("<span[^>]*></span>", "", (tmp_path / "whole" / "report.html").read_text())


@pytest.mark.slow
def test_the_critic_is_no_part_of_the_model_that_is_loaded(data: Path, base: Path, tmp_path: Path):
    run = tmp_path / "run"
    fit("ppo", data, run, "rollout.completions=1", f"init.weights={base}", "rollout.epochs=2", steps=2)
    assert numbers(run, "value/error")[2] != numbers(run, "value/error")[1]
    lm = argosy.load(str(run))
    assert not hasattr(lm.module, "critic")
    lm.save(tmp_path / "hub")
    assert argosy.load(str(tmp_path / "hub")).generate(["1+1="], 4, ignore_eos=True)[0].tokens


@pytest.mark.slow
def test_a_run_from_the_state_of_another_goes_on_with_its_critic(data: Path, base: Path, tmp_path: Path):
    settings = ["rollout.completions=1", "objective.kl=0"]
    fit("ppo", data, tmp_path / "first", *settings, f"init.weights={base}", steps=4)
    fit("ppo", data, tmp_path / "next", *settings, f"init.state={tmp_path / 'first'}", "optimizer.learning_rate=1e-12", steps=5)
    before, after = (load_item(tmp_path / run / "checkpoints" / step, STATE) for run, step in (("first", "4"), ("next", "5")))
    critic = [name for name in before if name.startswith("critic.")]
    assert critic
    for name in critic:
        np.testing.assert_allclose(after[name], before[name], atol=1e-6)


@pytest.mark.slow
def test_eight_devices_learn_as_one(data: Path, base: Path, tmp_path: Path):
    settings = [f"init.weights={base}", "rollout.rows=8", "objective.kl=0.1"]
    for name, mesh in {"one": [], "eight": ["mesh.data=-1", "mesh.fsdp=4"]}.items():
        fit("grpo", data, tmp_path / name, *settings, *mesh, steps=2)
    for metric in ("reward", "loss", "grad_norm", "kl", "targets"):
        single, eight = numbers(tmp_path / "one", metric), numbers(tmp_path / "eight", metric)
        assert eight == pytest.approx(single, rel=1e-3, abs=1e-5), metric


@pytest.mark.slow
def test_devices_that_only_sample_change_nothing_but_rounding(data: Path, base: Path, tmp_path: Path):
    """The weights are copied to two devices, which share the heads, and arrive whole."""
    fit("grpo", data, tmp_path / "one", f"init.weights={base}", steps=3)
    output = fit("grpo", data, tmp_path / "apart", f"init.weights={base}", "rollout.devices=2", steps=3)
    for metric in ("reward", "loss", "grad_norm", "targets"):
        single, apart = numbers(tmp_path / "one", metric), numbers(tmp_path / "apart", metric)
        assert apart == pytest.approx(single, rel=1e-3, abs=1e-5), metric
    header = next(line["header"] for line in read(Store(tmp_path / "apart")) if "header" in line)
    assert "sampled on 2 devices of their own" in header["rollout"]
    assert header["devices"] == 1
    assert output is not None
    with pytest.raises(UserError, match="none is left to train"):
        fit("grpo", data, tmp_path / "none", f"init.weights={base}", "rollout.devices=8", steps=1)


@pytest.mark.slow
def test_a_weight_that_arrives_changed_ends_the_run(data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put = jax.device_put

    def faulty(a, place=None, **options):
        copied = put(a, place, **options)
        on = getattr(place, "device_set", set())
        return copied.at[0].multiply(1.001) if on == {jax.devices()[-1]} and copied.ndim == 2 else copied

    monkeypatch.setattr(rollout_engine.jax, "device_put", faulty)
    with pytest.raises(ArgosyError, match="weights arrived changed"):
        fit("grpo", data, tmp_path / "run", f"init.weights={base}", "rollout.devices=1", steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resume_with_rollouts_ahead_is_bit_for_bit(depth: int, data: Path, base: Path, tmp_path: Path):
    """Those that were sampled ahead of the checkpoint are in it."""
    settings = ["rollout.devices=1", f"rollout.ahead={depth}", "rollout.epochs=2", f"init.weights={base}"]
    fit("grpo", data, tmp_path / "whole", *settings, steps=6)
    fit("grpo", data, tmp_path / "halves", *settings, steps=3)
    assert "resuming from step 3" in fit("grpo", data, tmp_path / "halves", *settings, steps=6)
    for metric in ("loss", "reward", "grad_norm", "tokens", "rollout", "rollout_age"):
        assert numbers(tmp_path / "whole", metric) == numbers(tmp_path / "halves", metric), metric
    assert digest(tmp_path / "whole", 6) == digest(tmp_path / "halves", 6)
    assert numbers(tmp_path / "whole", "rollout_age")[5] == depth
    assert numbers(tmp_path / "whole", "sampler/difference_max")[5] > 1e-3, "they are of older weights"


@pytest.mark.slow
def test_weights_of_the_engine_in_int8_are_another_policy(data: Path, base: Path, tmp_path: Path):
    """Rounded anew for each rollout; the difference is logged and weighed."""
    run = tmp_path / "run"
    fit("grpo", data, run, "rollout.weights=int8", f"init.weights={base}", steps=3)
    differences = numbers(run, "sampler/difference_max")
    assert all(1e-5 < differences[step] < 0.5 for step in (1, 2, 3)), differences
    assert all(0.9 < share < 1 for share in numbers(run, "sampler/effective").values())
    with pytest.raises(UserError, match=r"rollout\.weights=int8 and an adapter do not combine"):
        fit("grpo", data, tmp_path / "none", "rollout.weights=int8", f"init.weights={base}", "adapter=lora", steps=1)


def test_equal_rewards_teach_nothing_and_are_counted(data: Path, base: Path, tmp_path: Path):
    run = tmp_path / "run"
    fit("grpo", data, run, f"reward={data / 'functions.py'}:same", f"init.weights={base}", "rollout.resample=2", steps=1)
    assert numbers(run, "groups/useless")[1] == 1
    assert numbers(run, "rollout_rounds")[1] == 3
    assert numbers(run, "grad_norm")[1] == 0


def test_prompts_that_are_too_long_are_counted_before_the_first_step(data: Path, base: Path, tmp_path: Path):
    """Those of both kinds: 19 bytes and more leave no room for an answer of 6 in a row of 24."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}" * (1 + 30 * (i == 3)), "answer": "1"}) + "\n" for i in range(8)))
    output = fit("grpo", data, tmp_path / "run", f"init.weights={base}", f"data.source={file}", "data.held_out=0", steps=1)
    line = "1 of 8 prompts has more than 18 tokens (data.sequence - rollout.tokens) and so no room for an answer: it is passed over"
    assert line in output.splitlines()


@pytest.mark.slow
def test_missing_rewards_are_left_out_and_told(data: Path, base: Path, tmp_path: Path):
    run = tmp_path / "run"
    where = f"{data / 'functions.py'}:odd"
    output = fit("grpo", data, run, f"reward={where}", f"init.weights={base}", "data.batch=40", "data.held_out=0", steps=1)
    assert "not finite" in output
    # Of ten prompts, those with a 1 are infinite and those with a 2 are None: 1+1, 4+1, 7+1, and 2+2, 5+2, 8+2 of the rest.
    assert numbers(run, "rewards/missing")[1] == pytest.approx(0.6)
    assert numbers(run, "rewards/odd/not_finite")[1] == 12
    assert numbers(run, "answers/left_out")[1] == pytest.approx(0.6)
    with pytest.raises(ArgosyError, match="no answer of rollout 1 has a reward"):
        fit("grpo", data, tmp_path / "no", f"reward={data / 'functions.py'}:broken", f"init.weights={base}", steps=1)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["reward=[]"], "reward is missing"),
        (["accumulate=2"], "rollouts and accumulate do not combine"),
        (["data.batch=18"], "groups of 4"),
        (["rollout.completions=1", "data.batch=16"], "compares the answers to one prompt"),
        (["data.sequence=6"], "no room for a prompt"),
        (["objective=rloo", "rollout.epochs=2"], "one update a rollout"),
        (["objective.kl=0.1", "objective.kl_estimator=k1"], "penalizes nothing"),
        (["objective=next_token"], "reward is for objectives that learn from rewards"),
        (["data.packing=fit"], "answers that are in the data"),
        (["data.epochs=0.2"], "fewer than the 4 of a rollout"),
        (["rollout.overlong=9"], "overlong = 9 is above tokens"),
        (["rollout.ahead=1"], "needs devices that sample"),
        (["adapter=lora", "adapter.dropout=0.1", "init.weights=."], "rollouts and adapter.dropout do not combine"),
    ],
)
def test_mistakes_are_found_before_a_file_is_written(words: list[str], problem: str, data: Path, tmp_path: Path):
    with pytest.raises(UserError, match=problem):
        fit("grpo", data, tmp_path / "run", *words, steps=1)
    assert not (tmp_path / "run").exists()


def test_another_mistake_does_not_make_prompts_unreadable(data: Path, tmp_path: Path):
    with pytest.raises(UserError) as caught:
        fit("grpo", data, tmp_path / "run", "objective.kl_estimator=k2", steps=1)
    assert "does not apply" in str(caught.value)
    assert "known format" not in str(caught.value)


def test_a_column_that_a_reward_needs_must_be_there(data: Path, tmp_path: Path):
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1="}\n')
    words = [f"reward={data / 'functions.py'}:right", f"data.source={tmp_path / 'bare.jsonl'}"]
    with pytest.raises(UserError, match="answer"):
        fit("grpo", data, tmp_path / "run", *words, steps=1)
