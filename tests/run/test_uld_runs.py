"""Runs of distillation across tokenizers: a student of bytes learns from stories260K, resumes bit for bit, and mistakes come first."""

import json
from pathlib import Path

import pytest
from campaign_kill import SMALL
from helpers import Heard, numbers, shared

import argosy
from argosy.core.errors import UserError
from argosy.core.storage import Store
from argosy.jobs.quickstart.proof import digest
from argosy.observe.metrics import read


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and answers; only answers count."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = [{"prompt": f"There was a girl {i}.", "completion": " She had a red ball. Her mom was happy."} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fit(data: Path, run: Path, *more: str, steps: int) -> str:
    words = [word for word in SMALL if not word.startswith(("data.", "eval.", "objective", "steps"))]
    words += [f"data.source={data}", "data.sequence=64", "data.batch=8", "data.held_out=0.2", f"data.cache={run.parent / 'cache'}"]
    words += ["model.context=64", "model.vocab=258", "model.family=llama", "model.layers=1", "objective=uld"]
    words += ["optimizer=adamw", "optimizer.learning_rate=1e-2", "schedule=constant", "checkpoint.every=3", "log.every=1", f"dir={run}"]
    words += ["eval.every=99", "eval.batches=1", "data.epochs=99"] + ([] if "mesh.data=-1" in more else ["mesh.data=1"])
    heard = Heard()
    words += [f"objective.teacher={shared('models/stories260k')}"]
    argosy.fit("distill", *words, *more, view=heard, steps=steps)
    return heard.words


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    fit(data, run, steps=6)
    return run


@pytest.mark.slow
def test_a_student_of_other_tokens_comes_near_its_teacher(whole: Path):
    """Every answer is aligned with its end; two bytes or more are a token of the teacher."""
    assert set(numbers(whole, "aligned").values()) == {1.0}
    uld, loss, cross_entropy = (numbers(whole, name) for name in ("uld", "loss", "cross_entropy"))
    assert uld[6] < uld[1]
    assert loss[6] < loss[1]
    share = (loss[1] - cross_entropy[1]) / 1.5 / uld[1]
    assert 0.2 < share < 0.9, "groups of a target"
    evaluated = [line for line in read(Store(whole)) if "eval_uld" in line][-1]
    assert evaluated["eval_aligned"] == 1
    assert evaluated["eval_perplexity"] > 1


@pytest.mark.slow
def test_a_resume_is_bit_for_bit(whole: Path, data: Path, tmp_path: Path):
    fit(data, tmp_path / "run", steps=3)
    fit(data, tmp_path / "run", steps=6)
    for name in ("loss", "uld"):
        assert numbers(tmp_path / "run", name) == numbers(whole, name)
    assert digest(tmp_path / "run", 6) == digest(whole, 6)


@pytest.mark.slow
def test_parts_and_devices_give_the_same_run(data: Path, tmp_path: Path):
    for run, words in {"one": [], "parts": ["accumulate=2"], "apart": ["mesh.data=-1", "mesh.fsdp=4", "objective.chunk=7"]}.items():
        fit(data, tmp_path / run, "data.batch=16", *words, steps=2)
    for name in ("loss", "uld", "grad_norm"):
        for run in ("parts", "apart"):
            assert numbers(tmp_path / run, name)[2] == pytest.approx(numbers(tmp_path / "one", name)[2], rel=1e-4), (run, name)


@pytest.mark.slow
def test_the_same_tokenizer_works_and_is_told(data: Path, tmp_path: Path):
    output = fit(data, tmp_path / "run", f"data.tokenizer={shared('models/stories260k')}", "model.vocab=512", steps=1)
    assert "objective=distill compares token by token" in output
    assert numbers(tmp_path / "run", "aligned")[1] == 1


@pytest.mark.slow
def test_rows_that_are_longer_for_the_teacher_are_told(data: Path, tmp_path: Path):
    output = fit(data, tmp_path / "run", "objective.teacher_sequence=16", steps=1)
    assert "are more than 16" in output
    assert numbers(tmp_path / "run", "aligned")[1] < 1


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        (["objective.teacher_sequence=1024"], "longer than the teacher's context of 512", "teacher_sequence=512"),
        (["objective.weight=0"], "weight", ""),
        (["objective.divergence=jsd"], "divergence", ""),
        (["objective=distill"], "another tokenizer than the data", "objective=uld learns across tokenizers"),
        (["objective=gkd", "rollout.tokens=8"], "another tokenizer than the data", "objective=uld"),
    ],
)
def test_mistakes_are_found_before_a_file_is_written(data: Path, tmp_path: Path, words: list[str], problem: str, hint: str):
    with pytest.raises(UserError) as caught:
        fit(data, tmp_path / "run", *words, steps=1)
    assert problem in str(caught.value)
    assert hint in str(caught.value)
    assert not (tmp_path / "run").exists()
