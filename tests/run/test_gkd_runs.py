"""Runs of on-policy distillation: the student comes near its teacher at its own answers, and a resume is bit for bit."""

import json
from pathlib import Path

import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import Heard, numbers, shared

import argosy
from argosy.checkpoint.run_directory import RunDirectory
from argosy.checkpoint.settings import CheckpointSettings
from argosy.core.errors import UserError
from argosy.core.storage import Store
from argosy.jobs.quickstart.proof import digest
from argosy.observe.metrics import read
from argosy.run.view import Quiet

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = [{"prompt": f"{i} {i % 7}:", "completion": f" {i % 10}" * (1 + i % 3)} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fit(recipe: str, data: Path, run: Path, *more: str, steps: int) -> str:
    words = [word for word in SMALL if not word.startswith(("data.", "eval.", "objective", "steps"))]
    words += [f"data.source={data}", "data.sequence=24", "data.batch=8", "data.held_out=0.2", f"data.cache={run.parent / 'cache'}"]
    words += ["model.context=64", "model.vocab=258", "model.family=llama", "model.layers=1", "mesh.data=1", "mesh.fsdp=1"]
    words += ["optimizer=adamw", "optimizer.learning_rate=1e-2", "schedule=constant", "checkpoint.every=3", "log.every=1", f"dir={run}"]
    words += ["eval.every=99", "eval.batches=1"]
    words += ["rollout.tokens=8", "rollout.rows=4"] if recipe == "gkd" else ["data.packing=fit", "data.epochs=99"]
    heard = Heard()
    argosy.fit(recipe, *words, *more, view=heard, steps=steps)
    return heard.words


@pytest.fixture(scope="module")
def teacher(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another family and of more layers, which has learned the answers. Its vocabulary is padded."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    fit("sft", data, run, "model.family=qwen", "model.layers=2", "model.vocab=264", steps=40)
    return run


@pytest.mark.slow
def test_a_student_comes_near_its_teacher_at_its_own_answers(data: Path, teacher: Path, tmp_path: Path):
    run = tmp_path / "run"
    settings = [f"objective.teacher={teacher}", "objective.student_fraction=1", "objective.divergence=forward", "eval.every=12"]
    fit("gkd", data, run, *settings, steps=24)
    kl = numbers(run, "kl")
    assert np.mean([kl[s] for s in (23, 24)]) < 0.6 * kl[1]
    assert numbers(run, "loss") == pytest.approx(kl)
    assert set(numbers(run, "own").values()) == {1.0}
    evals = [line for line in read(Store(run)) if "eval_loss" in line]
    for name in ("eval_loss", "eval_kl", "eval_given_kl"):
        assert evals[-1][name] < evals[0][name], name
    assert evals[0]["eval_loss"] == pytest.approx(evals[0]["eval_kl"])
    assert "eval_perplexity" not in evals[0]
    losses = RunDirectory(str(run), CheckpointSettings(), print).checkpoints.eval_losses()
    assert losses[24] == pytest.approx(numbers(run, "eval_loss")[24]), "by which the best are kept"
    records = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert records[0]["rewards"] == {}
    assert "rollout 24" in (run / "report.html").read_text()


@pytest.fixture(scope="module")
def base(data: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base") / "run"
    fit("gkd", data, run, f"objective.teacher={teacher}", "objective.student_fraction=1", steps=1)
    return run


HOW = {
    "mixed": ["objective.student_fraction=0.5", "rollout.epochs=2", "seed=2"],
    "teacher": ["objective.student_fraction=0.5", "objective.others=teacher", "rollout.minibatches=2", "seed=2"],
    "adapters": ["objective.student_fraction=1", "rollout.epochs=2", "adapter=lora", "adapter.rank=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name == "mixed" else pytest.param(name, marks=pytest.mark.slow) for name in HOW])
def test_a_resume_in_the_middle_of_a_rollout_is_bit_for_bit(name: str, data: Path, teacher: Path, base: Path, tmp_path: Path):
    """Step 3 lies between the updates of a rollout, whose answers were sampled by weights that are gone."""
    settings = [*HOW[name], f"objective.teacher={teacher}", f"init.weights={base}"]
    fit("gkd", data, tmp_path / "whole", *settings, steps=6)
    fit("gkd", data, tmp_path / "halves", *settings, steps=3)
    assert "resuming from step 3" in fit("gkd", data, tmp_path / "halves", *settings, steps=6)
    for metric in ("loss", "kl", "grad_norm", "tokens", "rollout", "own"):
        assert numbers(tmp_path / "whole", metric) == numbers(tmp_path / "halves", metric), metric
    assert digest(tmp_path / "whole", 6) == digest(tmp_path / "halves", 6)
    if name != "adapters":
        assert set(numbers(tmp_path / "whole", "own").values()) == {0.0, 1.0}


@pytest.mark.slow
def test_batches_of_the_data_are_those_of_offline_distillation(data: Path, teacher: Path, base: Path, tmp_path: Path):
    """All records are in the first batch of both; the student's own answers are in none."""
    path = tmp_path / "even.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} {i}:", "completion": f" {i}."}) + "\n" for i in range(8)))
    same = [f"objective.teacher={teacher}", f"init.weights={base}", "objective.divergence=reverse", "data.held_out=0"]
    same += ["data.sequence=10"]
    fit("gkd", path, tmp_path / "gkd", *same, "objective.student_fraction=0", "rollout.tokens=5", steps=1)
    fit("distill", path, tmp_path / "offline", *same, "objective.cross_entropy=0", "data.epochs=1", steps=1)
    for metric in ("loss", "kl", "cross_entropy", "agreement", "targets"):
        assert numbers(tmp_path / "gkd", metric)[1] == pytest.approx(numbers(tmp_path / "offline", metric)[1], rel=1e-5), metric
    assert numbers(tmp_path / "gkd", "targets")[1] == 8 * 4


@pytest.mark.slow
def test_eight_devices_learn_as_one(data: Path, teacher: Path, base: Path, tmp_path: Path):
    """Also where four of them sample."""
    settings = [f"init.weights={base}", "rollout.rows=8", f"objective.teacher={teacher}", "objective.student_fraction=0.5", "seed=2"]
    eight = ["mesh.data=-1", "mesh.fsdp=4", "objective.head=chunks"]
    apart = ["mesh.data=-1", "mesh.fsdp=2", "rollout.devices=4"]
    for name, mesh in {"one": [], "eight": eight, "apart": apart}.items():
        fit("gkd", data, tmp_path / name, *settings, *mesh, steps=3)
    for metric in ("loss", "grad_norm", "kl", "targets"):
        single = numbers(tmp_path / "one", metric)
        for name in ("eight", "apart"):
            assert numbers(tmp_path / name, metric) == pytest.approx(single, rel=1e-3, abs=1e-5), (name, metric)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["reward=x.py:f"], "this one learns from its teacher"),
        (["accumulate=2"], "rollouts and accumulate do not combine"),
        (["environment=x.py:Game"], "environment is for objectives that learn from rewards"),
        (["objective.student_fraction=1.5"], "should be at most 1"),
        (["objective.lmbda=1"], "objective.student_fraction"),
        (["objective.student_fraction=1", "objective.others=teacher"], "every batch has the student's own"),
        (["objective.cross_entropy=0.5"], "cross_entropy"),
        (["objective.divergence=forward", "objective.beta=0.3"], "only jsd reads it"),
        (["data.packing=fit"], "rows of given answers"),
        (["data.learn=all"], "rows of given answers"),
        (["rollout.workers=2"], "rollout.workers is for"),
        (["data.format=text", "data.columns.text=prompt"], "this data has `text` records"),
        (["objective=distill"], "rollout is for objectives"),
        (["model.vocab=300", "objective.divergence=reverse"], "infinite for the others"),
    ],
)
def test_mistakes_are_found_before_a_file_is_written(words: list[str], problem: str, data: Path, teacher: Path, tmp_path: Path):
    with pytest.raises(UserError, match=problem):
        fit("gkd", data, tmp_path / "run", f"objective.teacher={teacher}", *words, steps=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_prompts_alone_are_for_own_answers_alone(data: Path, teacher: Path, tmp_path: Path):
    (tmp_path / "bare.jsonl").write_text("".join(f'{{"prompt": "{i} 3:"}}\n' for i in range(10)))
    settings = [f"objective.teacher={teacher}", f"data.source={tmp_path / 'bare.jsonl'}"]
    with pytest.raises(UserError, match=r"data\.format=prompt reads prompts alone"):
        fit("gkd", data, tmp_path / "run", *settings, steps=1)
    with pytest.raises(UserError, match="this data has prompts alone"):
        fit("gkd", data, tmp_path / "run", *settings, "data.format=prompt", steps=1)
    fit("gkd", data, tmp_path / "run", *settings, "data.format=prompt", "objective.student_fraction=1", steps=1)
    assert numbers(tmp_path / "run", "targets")[1] > 0


@pytest.mark.slow
def test_stories260k_comes_near_a_tuned_copy_of_itself(tmp_path: Path):
    """Its own answers bring it nearer to the teacher than it was, at what it writes and at what is given."""
    model, text = shared("models/stories260k"), shared("text/tinyshakespeare.txt")
    words = [f"data.source={text}", "data.documents=paragraphs", "data.sequence=128", "data.packing=fit", "data.batch=16"]
    words += ["mesh.data=1", "optimizer.learning_rate=1e-3", f"data.cache={tmp_path / 'cache'}", "eval.batches=0", f"model={model}"]
    words += ["mesh.fsdp=1"]
    argosy.fit("sft", *words, f"dir={tmp_path / 'teacher'}", view=Quiet(), steps=60)
    lines = [line for line in text.read_text().splitlines() if line.strip()][:1200]
    data = tmp_path / "lines.jsonl"
    rows = [{"prompt": f"{a}\n{b}\n", "completion": f"{c}\n{d}"} for a, b, c, d in zip(*[iter(lines)] * 4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model={model}", f"objective.teacher={tmp_path / 'teacher'}", f"data.source={data}", "data.sequence=192"]
    settings += ["data.held_out=0.1", "data.batch=16", "rollout.tokens=32", "eval.batches=2", "optimizer.learning_rate=5e-4"]
    settings += ["mesh.data=1", "mesh.fsdp=1", "objective.student_fraction=1", "schedule.warmup=0"]
    first = [*settings, "optimizer.learning_rate=1e-12", f"dir={tmp_path / 'untouched'}"]
    argosy.fit("gkd", *first, view=Quiet(), steps=1)
    argosy.fit("gkd", *settings, "eval.every=99", f"dir={tmp_path / 'run'}", view=Quiet(), steps=30)
    for name in ("eval_kl", "eval_given_kl", "eval_loss"):
        (before,), (after,) = (numbers(tmp_path / run, name).values() for run in ("untouched", "run"))
        assert after < 0.8 * before, name
