"""Features that do not combine: one table, reported at once."""

from types import SimpleNamespace
from typing import Any

import pytest

from argosy.core.errors import SettingsError
from argosy.run.settings.combinations import CONFLICTS, FEATURES, Conflict, Feature, Situation, violations
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.run.start.preflight import checked_settings


def test_every_row_names_features_and_says_what_to_do():
    assert len({(conflict.feature, conflict.other) for conflict in CONFLICTS}) == len(CONFLICTS) > 30
    assert {key for conflict in CONFLICTS for key in (conflict.feature, conflict.other)} == set(FEATURES)
    assert all(conflict.reason and conflict.hint for conflict in CONFLICTS)


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: f"{row.feature}-{row.other}")
def test_each_row_is_violated_by_its_two_features_alone(row: Conflict, monkeypatch: pytest.MonkeyPatch):
    for absent in (None, row.feature, row.other):
        used = {row.feature, row.other} - {absent}
        fake = {key: Feature(key, lambda _, key=key, used=used: key in used) for key in FEATURES}
        monkeypatch.setattr("argosy.run.settings.combinations.FEATURES", fake)
        problems = [error.what for error in violations(Situation(SimpleNamespace()))]
        assert problems == ([] if absent else [f"{row.feature} and {row.other} do not combine: {row.reason}"])


WORDS: dict[str, list[str]] = {
    "stage": ["mesh.stage=2"],
    "context": ["mesh.context=2"],
    "expert": ["mesh.expert=2"],
    "samples": ["sample.every=5"],
    "ema": ["ema.decay=0.99"],
    "averaging_optimizer": ["optimizer=schedule_free", "schedule=constant"],
    "reference": ["objective=dpo"],
    "teacher": ["objective=distill", "objective.teacher=x"],
    "cached_teacher": ["objective=distill", "objective.teacher=x", "objective.logits=cached"],
    "other_objective": ["objective=dpo"],
    "adapter": ["adapter=lora", "init.weights=x"],
    "dropout": ["adapter=lora", "adapter.dropout=0.1", "init.weights=x"],
    "quantized_training": ["quant.train=int8"],
    "delayed_scaling": ["quant.train=fp8", "quant.scaling=delayed"],
    "accumulate": ["accumulate=2"],
    "gather_once": ["execution.gather=once", "accumulate=2"],
    "offload": ["execution.offload=optimizer"],
    "offload_weights": ["execution.offload=weights"],
    "diloco": ["diloco.every=4"],
    "replay": ["guard.replay=2"],
    "rollback": ["guard.spike=rollback"],
    "online_data": ["data.online=true"],
    "init_state": ["init.state=x"],
    "rollouts": ["objective=grpo", "reward=exact"],
    "rollout_processes": ["objective=grpo", "reward=exact", "rollout.processes=2"],
    "rollout_int8": ["objective=grpo", "reward=exact", "rollout.weights=int8"],
    "environment": ["objective=grpo", "reward=exact", "environment=guess"],
    "batch_balance": ["model=mixtral-8x7b", "model.moe.balance_over=batch"],
}


@pytest.mark.parametrize("key", FEATURES)
def test_settings_use_the_feature_that_they_ask_for(key: str):
    plain = Situation(compose(Run, "tiny").value)
    assert not FEATURES[key].used(plain)
    if key == "processes":
        assert FEATURES[key].used(Situation(plain.run, processes=2))
        return
    if key == "stage_on_cpu":
        staged = compose(Run, "tiny", WORDS["stage"]).value
        assert [FEATURES[key].used(Situation(staged, 1, platform)) for platform in ("cpu", "tpu", None)] == [True, False, False]
        return
    recipe = "two-tower" if key == "whole_batch" else "tiny"
    assert FEATURES[key].used(Situation(compose(Run, recipe, WORDS.get(key, [])).value))


def test_all_violated_rows_are_reported_before_anything_is_built(tmp_path: Any):
    words = ["diloco.every=4", "mesh.stage=2", "sample.every=5", "execution.offload=optimizer", f"dir={tmp_path / 'run'}"]
    with pytest.raises(SettingsError) as caught:
        checked_settings("tiny", words)
    problems = [error.what.partition(" do not")[0] for error in caught.value.problems]
    assert problems == [
        "mesh.stage and sample.every",
        "execution.offload and mesh.stage",
        "execution.offload and diloco.every",
        "diloco.every and mesh.stage",
    ]
    assert not (tmp_path / "run").exists()


def test_what_follows_from_an_objective_says_so():
    reading = compose(Run, "tiny", ["objective=reward"])
    assert reading.value.model.scores == 1
    assert reading.origin["model.scores"] == "the objective"
    assert compose(Run, "tiny", ["objective=grpo", "reward=exact"]).value.rollout is not None
