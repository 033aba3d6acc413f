"""Runs of on-policy distillation across tokenizers: a student of bytes learns from stories260K at its own answers, and resumes bit for
bit."""

import json
import shutil
from pathlib import Path

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

pytestmark = pytest.mark.usefixtures("one_device")
CHATS = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and answers; only answers count."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = [{"prompt": f"There was a girl {i}.", "completion": " She had a red ball."} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fit(recipe: str, data: Path, run: Path, *more: str, steps: int) -> str:
    words = [word for word in SMALL if not word.startswith(("data.", "eval.", "objective", "steps"))]
    words += [f"data.source={data}", "data.sequence=64", "data.batch=8", "data.held_out=0.2", f"data.cache={run.parent / 'cache'}"]
    words += ["model.context=64", "model.vocab=258", "model.family=llama", "model.layers=1", "mesh.data=1", "mesh.fsdp=1"]
    words += ["optimizer=adamw", "optimizer.learning_rate=1e-2", "schedule=constant", "checkpoint.every=3", "log.every=1", f"dir={run}"]
    words += ["eval.every=99", "eval.batches=1", "data.tokenizer=byte"]
    words += [f"objective.teacher={shared('models/stories260k')}"] if recipe != "sft" else []
    gold_words = ["rollout.tokens=24", "rollout.rows=4", "objective.hybrid=false"]
    words += gold_words if recipe == "gold" else ["data.packing=fit", "data.epochs=99"]
    heard = Heard()
    argosy.fit(recipe, *words, *more, view=heard, steps=steps)
    return heard.words


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that writes text."""
    run = tmp_path_factory.mktemp("base") / "run"
    fit("sft", data, run, steps=30)
    return run


@pytest.mark.slow
def test_a_student_learns_from_its_own_answers_and_from_given_ones(data: Path, base: Path, tmp_path: Path):
    run = tmp_path / "run"
    settings = ["objective.student_fraction=0.5", "objective.hybrid=true", "optimizer.learning_rate=3e-3", "eval.every=12"]
    settings += [f"init.weights={base}"]
    output = fit("gold", data, run, *settings, "seed=2", steps=24)
    assert "of the teacher's 512 tokens are the student's too" in output
    uld, loss, aligned, own_answers = (numbers(run, name) for name in ("uld", "loss", "aligned", "own"))
    assert set(own_answers.values()) == {0.0, 1.0}
    assert all(loss[s] <= 1.001 * uld[s] for s in loss), "the sum over groups, for each target"
    assert all((aligned[s] == 1) if own_answers[s] == 0 else (0 < aligned[s] <= 1) for s in own_answers)
    for name in ("unreadable", "rewritten", "special", "unaligned", "crowded"):
        assert all(0 <= share <= 1 for share in numbers(run, f"answers/{name}").values())
    evals = [line for line in read(Store(run)) if "eval_loss" in line]
    assert evals[-1]["eval_given_uld"] < evals[0]["eval_given_uld"]
    assert evals[-1]["eval_given_aligned"] == 1
    losses = RunDirectory(str(run), CheckpointSettings(), print).checkpoints.eval_losses()
    worst = evals[-1]["eval_uld"] + 2 * (1 - evals[-1]["eval_aligned"])
    assert losses[24] == pytest.approx(worst), "what is not compared counts as far away"
    records = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert records[0]["rewards"] == {}
    assert f"rollout {records[-1]['rollout']}" in (run / "report.html").read_text()


HOW = {
    "mixed": ["objective.student_fraction=0.5", "rollout.epochs=2", "seed=2", "objective.cross_entropy=0.5"],
    "adapters": ["objective.student_fraction=1", "rollout.epochs=2", "adapter=lora", "adapter.rank=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOW)
def test_a_resume_in_the_middle_of_a_rollout_is_bit_for_bit(name: str, data: Path, base: Path, tmp_path: Path):
    """Step 3 lies between the updates of a rollout, whose answers were sampled by weights that are gone."""
    settings = [*HOW[name], f"init.weights={base}"]
    fit("gold", data, tmp_path / "whole", *settings, steps=6)
    fit("gold", data, tmp_path / "halves", *settings, steps=3)
    assert "resuming from step 3" in fit("gold", data, tmp_path / "halves", *settings, steps=6)
    for metric in ("loss", "uld", "aligned", "grad_norm", "tokens", "rollout", "own"):
        assert numbers(tmp_path / "whole", metric) == numbers(tmp_path / "halves", metric), metric
    assert digest(tmp_path / "whole", 6) == digest(tmp_path / "halves", 6)
    assert set(numbers(tmp_path / "whole", "own").values()) == ({0.0, 1.0} if name == "mixed" else {1.0})
    assert all(norm > 0 for norm in numbers(tmp_path / "whole", "grad_norm").values())


@pytest.mark.slow
def test_batches_of_the_data_are_those_of_offline_distillation(data: Path, base: Path, tmp_path: Path):
    """All records are in the first batch of both; labels count in both."""
    path = tmp_path / "even.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"A girl {i}:", "completion": f" She was {i}."}) + "\n" for i in range(8)))
    same = [f"init.weights={base}", "data.held_out=0", "objective.cross_entropy=0.5", "objective.weight=1.5", "data.sequence=32"]
    fit("gold", path, tmp_path / "gold", *same, "objective.student_fraction=0", "rollout.tokens=12", steps=1)
    fit("distill", path, tmp_path / "offline", *same, "objective=uld", "data.epochs=1", steps=1)
    for metric in ("loss", "uld", "cross_entropy", "aligned", "targets"):
        assert numbers(tmp_path / "gold", metric)[1] == pytest.approx(numbers(tmp_path / "offline", metric)[1], rel=1e-5), metric
    assert numbers(tmp_path / "gold", "targets")[1] == 8 * 12
    assert numbers(tmp_path / "gold", "loss")[1] > numbers(tmp_path / "gold", "uld")[1] * 0.1


@pytest.mark.slow
def test_eight_devices_learn_as_one(data: Path, base: Path, tmp_path: Path):
    settings = [f"init.weights={base}", "rollout.rows=8", "objective.student_fraction=0.5", "seed=2"]
    eight = ["mesh.data=-1", "mesh.fsdp=4", "objective.chunk=7"]
    for name, mesh in {"one": [], "eight": eight}.items():
        fit("gold", data, tmp_path / name, *settings, *mesh, steps=3)
    for metric in ("loss", "grad_norm", "uld", "aligned", "targets"):
        single = numbers(tmp_path / "one", metric)
        assert numbers(tmp_path / "eight", metric) == pytest.approx(single, rel=1e-3, abs=1e-5), metric


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Conversations, and the student's template."""
    folder = tmp_path_factory.mktemp("chats")
    rows = [[{"role": "user", "content": f"Who is {i}?"}, {"role": "assistant", "content": "She was a girl."}] for i in range(40)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    ours = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    (folder / "ours.jinja").write_text(ours)
    return folder / "chats.jsonl", folder / "ours.jinja"


@pytest.mark.slow
def test_a_teacher_is_asked_by_its_own_template(chats: tuple[Path, Path], tmp_path: Path):
    data, ours = chats
    teacher = tmp_path / "teacher"
    shutil.copytree(shared("models/stories260k"), teacher)
    settings = [f"data.template={ours}", f"objective.teacher={teacher}", "objective.student_fraction=0"]
    with pytest.raises(UserError, match="comes without a chat template") as caught:
        fit("gold", data, tmp_path / "run", *settings, steps=1)
    assert "objective.template=student" in str(caught.value)
    assert not (tmp_path / "run").exists()
    fit("gold", data, tmp_path / "ours", *settings, "objective.template=student", steps=1)
    (teacher / "chat_template.jinja").write_text(CHATS)
    fit("gold", data, tmp_path / "theirs", *settings, steps=1)
    both = [numbers(tmp_path / name, "uld")[1] for name in ("ours", "theirs")]
    assert both[0] != both[1], "the teacher reads something else"
    assert numbers(tmp_path / "theirs", "aligned")[1] == 1


@pytest.mark.slow
def test_the_same_tokenizer_works_and_is_told(data: Path, tmp_path: Path):
    same = [f"data.tokenizer={shared('models/stories260k')}", "model.vocab=512", "objective.student_fraction=0"]
    assert "objective=gkd compares token by token" in fit("gold", data, tmp_path / "run", *same, steps=1)
    assert numbers(tmp_path / "run", "aligned")[1] == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["objective.others=teacher"], "not built across tokenizers"),
        (["objective.student_fraction=1", "objective.cross_entropy=1"], "no answer is the data's"),
        (["objective.template=student"], "objective.template is for conversations"),
        (["objective.teacher_sequence=1024"], "longer than the teacher's context of 512"),
        (["objective.lmbda=1"], "objective.student_fraction"),
        (["objective.logits=cached"], "logits"),
        (["objective.divergence=jsd"], "divergence"),
        (["reward=x.py:f"], "this one learns from its teacher"),
        (["data.packing=fit"], "rows of given answers"),
        (["rollout.workers=2"], "rollout.workers is for"),
        (["objective=uld"], "rollout is for objectives"),
        (["data.format=prompt"], "this data has prompts alone"),
    ],
)
def test_mistakes_are_found_before_a_file_is_written(words: list[str], problem: str, data: Path, tmp_path: Path):
    if words == ["data.format=prompt"]:
        (tmp_path / "bare.jsonl").write_text("".join(f'{{"prompt": "{i} 3:"}}\n' for i in range(10)))
        words = [*words, f"data.source={tmp_path / 'bare.jsonl'}"]
    with pytest.raises(UserError, match=problem):
        fit("gold", data, tmp_path / "run", *words, steps=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_answers_of_another_process_are_the_same(data: Path, tmp_path: Path):
    fit("gold", data, tmp_path / "one", "objective.student_fraction=1", steps=3)
    fit("gold", data, tmp_path / "apart", "objective.student_fraction=1", "rollout.processes=1", steps=3)
    assert digest(tmp_path / "one", 3) == digest(tmp_path / "apart", 3)
    assert numbers(tmp_path / "one", "loss") == numbers(tmp_path / "apart", "loss")
