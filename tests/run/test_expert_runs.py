"""Runs whose experts are split over devices."""

from pathlib import Path

import pytest
from helpers import numbers
from jobs.test_train import WORDS

import argosy
from argosy.core.errors import BadInput
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.run.start.preflight import check_experts

SMALL = [word for word in WORDS if not word.startswith("model.")]
EXPERTS = ["model.family=mixtral", "model.vocab=258", "model.width=32", "model.layers=2", "model.heads=2", "model.ffn=32"]
EXPERTS += ["model.context=64", "model.moe.count=8", "model.moe.active=2", "model.moe.ffn=32", "model.moe.balance=0.01"]


def fit(run: Path, *words: str):
    return argosy.fit("tiny", *SMALL, *EXPERTS, f"dir={run}", *words)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_a_run_resumes_with_its_experts_split_otherwise(tmp_path: Path, before: int, after: int):
    fit(tmp_path / "one", "steps=4", "mesh.expert=1")
    assert fit(tmp_path / "other", "steps=2", f"mesh.expert={before}").step == 2
    assert fit(tmp_path / "other", "steps=4", f"mesh.expert={after}").step == 4
    losses, other = (numbers(tmp_path / name, "loss") for name in ("one", "other"))
    assert len(other) == 4
    assert [other[step] for step in sorted(losses)] == pytest.approx([losses[step] for step in sorted(losses)], rel=1e-5)


@pytest.mark.parametrize("words", [["mesh.expert=3"], ["mesh.expert=-1", "mesh.fsdp=1", "model.moe.count=4", "data.batch=16"]])
def test_experts_that_do_not_divide_are_refused(tmp_path: Path, words: list[str]):
    with pytest.raises(BadInput, match=r"mesh.expert = [38] does not divide the [48] experts") as caught:
        fit(tmp_path / "run", "steps=1", "data.batch=24", *words)
    assert "mesh.expert may be 2, 4" in (caught.value.hint or "")
    assert not [*tmp_path.iterdir()]


def test_a_model_without_experts_is_refused():
    model = compose(Run, "tiny", SMALL).value.model
    check_experts(model, 1)
    with pytest.raises(BadInput, match=r"mesh.expert = 2: the model has no experts"):
        check_experts(model, 2)


def test_rows_divide_over_the_axis_of_experts(tmp_path: Path):
    with pytest.raises(BadInput, match=r"data.batch = 6 does not divide over mesh.expert = 4"):
        fit(tmp_path / "run", "steps=1", "data.batch=6", "mesh.expert=4")
