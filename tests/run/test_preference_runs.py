"""Runs on preferences: the reference is the first weights however it is kept, a resume is bit for bit, a reward model scores again."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import Heard

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput, UserError
from argosy.core.storage import Store
from argosy.jobs.convert import convert
from argosy.jobs.quickstart.proof import digest
from argosy.observe.metrics import by_step, read
from argosy.rl.rewards.models import ModelReward
from argosy.rl.rewards.settings import RewardSettings
from argosy.run.frozen import reference

# A model of a few thousand weights; 8 updates of 8 pairs, resumed after the fourth.
STEPS, EVERY = 8, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pairs whose chosen answers are digits, and the same as labeled examples."""
    folder = tmp_path_factory.mktemp("data")
    pairs = [{"prompt": f"{i} {i % 7}:", "chosen": f" {i % 10}" * (1 + i % 3), "rejected": " no" * (1 + i % 2)} for i in range(24)]
    labeled = [{"prompt": p["prompt"], "completion": p[n], "label": n == "chosen"} for p in pairs for n in ("chosen", "rejected")]
    steps = [{"prompt": p["prompt"], "completions": [p["chosen"], p["rejected"]], "labels": [True, False]} for p in pairs]
    paths = {}
    for name, rows in {"pairs": pairs, "labeled": labeled, "steps": steps}.items():
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def words_for(data: Path, run: Path, *more: str) -> list[str]:
    words = [word for word in SMALL if not word.startswith(("data.", "eval.", "objective", "steps"))]
    words += [f"data.source={data}", "data.sequence=32", "data.batch=16", "data.epochs=99", "data.held_out=0.2"]
    words += [f"data.cache={run.parent / 'cache'}"]
    words += ["model.context=64", "model.vocab=258", "eval.every=4", "eval.batches=1", f"checkpoint.every={EVERY}", "log.every=1"]
    words += [] if "mesh.data=-1" in more else ["mesh.data=1"]
    return [*words, "model.family=llama", "optimizer=adamw", "optimizer.learning_rate=1e-2", "schedule=constant", f"dir={run}", *more]


def fit(recipe: str, data: Path, run: Path, *more: str, steps: int = STEPS) -> str:
    heard = Heard()
    argosy.fit(recipe, *words_for(data, run, *more), view=heard, steps=steps)
    return heard.words


def losses(run: Path, name: str = "loss") -> dict[int, float]:
    return by_step(read(Store(run)), name)


@pytest.fixture(scope="module")
def whole(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of DPO with a cached reference, never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    fit("dpo", data["pairs"], run, "model.layers=1")
    return run


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_reference_itself_and_preferences_are_learned(whole: Path):
    assert losses(whole)[1] == pytest.approx(np.log(2), rel=1e-6)
    assert losses(whole, "rewards/margin")[1] == pytest.approx(0, abs=1e-5)
    accuracy = losses(whole, "rewards/accuracy")
    assert accuracy[STEPS] == 1
    evaluated = {line["step"]: line for line in read(Store(whole)) if "eval_loss" in line}
    assert evaluated[STEPS]["eval_rewards/accuracy"] > 0.5
    assert evaluated[STEPS]["eval_loss"] < evaluated[EVERY]["eval_loss"] < np.log(2)
    assert evaluated[0]["eval_loss"] == pytest.approx(np.log(2), rel=1e-6), "before the first step"
    assert "eval_perplexity" not in evaluated[STEPS]


def test_a_run_by_a_recipe_and_two_words_shows_its_first_pair(data: dict[str, Path], whole: Path, tmp_path: Path):
    """The recipe's sequence of 1,024 tokens becomes the context of a model that has less."""
    heard = Heard()
    words = [f"model={whole}", f"data.source={data['pairs']}", f"data.cache={tmp_path / 'cache'}", f"dir={tmp_path / 'run'}"]
    argosy.fit("dpo", *words, "data.batch=16", view=heard, steps=1)
    assert "⟦0 0:⟧ 0" in heard.words
    assert "⟦0 0:⟧ no" in heard.words
    assert "  sequence: 64" in (tmp_path / "run" / "settings.yml").read_text()
    with pytest.raises(UserError, match="longer than the model's context"):
        argosy.fit("dpo", *words, "data.sequence=65", "dir=other", view=heard, steps=1)


@pytest.mark.slow
def test_an_online_reference_on_eight_devices_gives_the_same_run(whole: Path, data: dict[str, Path], tmp_path: Path):
    """Each device has one pair, and its share of the model and of the reference."""
    settings = ["model.layers=1", "objective.reference=online", "mesh.data=-1", "mesh.fsdp=4"]
    fit("dpo", data["pairs"], tmp_path / "run", *settings, steps=2)
    for step in (1, 2):
        assert losses(tmp_path / "run")[step] == pytest.approx(losses(whole)[step], rel=1e-5)
    assert not (tmp_path / "run" / "reference").exists()


@pytest.mark.slow
def test_adapters_learn_preferences_over_their_frozen_base(data: dict[str, Path], whole: Path, tmp_path: Path):
    """The reference is the base, whose output adapters leave as it is at first; also after a resume without the cached table."""
    run = tmp_path / "run"
    settings = ["model.layers=1", f"init.weights={whole}", "adapter=lora", "adapter.rank=2"]
    fit("dpo", data["pairs"], run, *settings, steps=EVERY)
    shutil.rmtree(run / "reference")
    shutil.rmtree(run.parent / "cache" / "reference")
    assert "reference: log-probabilities" in fit("dpo", data["pairs"], run, *settings)
    assert losses(run)[1] == pytest.approx(np.log(2), rel=1e-6)
    assert losses(run)[STEPS] < losses(run)[EVERY] < losses(run)[1]
    assert (run / "adapter" / "adapter_config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_an_online_reference_beside_adapters_is_their_base(data: dict[str, Path], whole: Path, tmp_path: Path, kind: str):
    """The same losses as from the cached one, and a resume to the bit; the base takes memory once."""
    settings = ["model.layers=1", f"init.weights={whole}", f"adapter={kind}", "adapter.rank=2"]
    fit("dpo", data["pairs"], tmp_path / "cached", *settings)
    fit("dpo", data["pairs"], tmp_path / "whole", *settings, "objective.reference=online")
    fit("dpo", data["pairs"], tmp_path / "run", *settings, "objective.reference=online", steps=EVERY)
    fit("dpo", data["pairs"], tmp_path / "run", *settings, "objective.reference=online")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert digest(tmp_path / "run", STEPS) == digest(tmp_path / "whole", STEPS)
    for step, loss in losses(tmp_path / "cached").items():
        assert losses(tmp_path / "run")[step] == pytest.approx(loss, rel=1e-5)
    headers = [next(line["header"] for line in read(Store(tmp_path / name)) if "header" in line) for name in ("cached", "whole")]
    assert 1 < headers[1]["memory"]["parameters"] / headers[0]["memory"]["parameters"] < 1.2


@pytest.mark.parametrize("kind", ["cached", pytest.param("online", marks=pytest.mark.slow)])
def test_a_resume_is_bit_for_bit_and_keeps_the_first_weights_as_its_reference(
    whole: Path, data: dict[str, Path], tmp_path: Path, kind: str
):
    """The cache of log-probabilities is removed between the two halves: the run has its own copy."""
    settings = ["model.layers=1", f"objective.reference={kind}"]
    other = whole
    if kind == "online":
        other = tmp_path / "whole"
        fit("dpo", data["pairs"], other, *settings)
    run = tmp_path / "run"
    fit("dpo", data["pairs"], run, *settings, steps=EVERY)
    shutil.rmtree(run.parent / "cache" / "reference", ignore_errors=True)
    output = fit("dpo", data["pairs"], run, *settings)
    assert "reference: log-probabilities" not in output
    headers = [next(line["header"] for line in read(Store(folder)) if "header" in line) for folder in (run, whole)]
    counted = [header["memory"]["parameters"] for header in headers]
    assert counted[0] == counted[1] * (2 if kind == "online" else 1)
    assert losses(run) == losses(other)
    assert digest(run, STEPS) == digest(other, STEPS)


@pytest.mark.slow
def test_a_reference_is_computed_once_for_runs_with_the_same_weights_and_data(whole: Path, data: dict[str, Path], tmp_path: Path):
    """Another beta, packing or batch finds it; another seed, which is other weights, does not."""
    shutil.copytree(whole.parent / "cache", tmp_path / "cache")
    assert "reference: log" not in fit("dpo", data["pairs"], tmp_path / "a", "model.layers=1", "objective.beta=0.3", steps=1)
    assert "reference: log" in fit("dpo", data["pairs"], tmp_path / "b", "model.layers=1", "seed=7", steps=1)


@pytest.mark.slow
def test_only_what_a_run_visits_is_computed_and_longer_runs_add_the_rest(data: dict[str, Path], tmp_path: Path):
    run, settings = tmp_path / "run", ["model.layers=1", "eval.batches=0"]
    assert "log-probabilities of 16 rows" in fit("dpo", data["pairs"], run, *settings, steps=1)
    table = np.load(run / "reference" / "train.npy")
    assert np.isfinite(table).sum() == 16
    # The weights that it began with are drawn again, although the run has others by now.
    assert "log-probabilities of 16 rows" in fit("dpo", data["pairs"], run, *settings, steps=2)
    again = np.load(run / "reference" / "train.npy")
    assert np.isfinite(again).sum() == 32
    assert (again[np.isfinite(table)] == table[np.isfinite(table)]).all()


def test_a_torn_or_missing_table_is_made_again_and_changed_weights_are_refused(whole: Path, data: dict[str, Path], tmp_path: Path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / "reference" / "train.npy").write_bytes((run / "reference" / "train.npy").read_bytes()[:100])
    settings = ["model.layers=1", f"dir={run}"]
    output = fit("dpo", data["pairs"], run, *settings, steps=STEPS + 1)
    assert "reference: log-probabilities" in output
    table = np.load(run / "reference" / "train.npy")
    there = np.isfinite(table)
    assert there.any()
    np.testing.assert_array_equal(table[there], np.load(whole / "reference" / "train.npy")[there])
    (run / "reference.json").write_text('{"weights": "of other weights"}\n')
    shutil.rmtree(run / "reference")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(BadInput, match="have changed"):
        fit("dpo", data["pairs"], run, *settings, steps=STEPS + 2)


@pytest.mark.slow
def test_packed_pairs_train_from_the_same_reference(whole: Path, data: dict[str, Path], tmp_path: Path):
    """Of several pairs in a row, each has its own log-probability: the first loss is log 2, and nothing is computed again."""
    shutil.copytree(whole.parent / "cache", tmp_path / "cache")
    output = fit("dpo", data["pairs"], tmp_path / "run", "model.layers=1", "data.packing=fit", steps=2)
    assert "reference: log" not in output
    assert losses(tmp_path / "run")[1] == pytest.approx(np.log(2), rel=1e-6)
    assert losses(tmp_path / "run", "targets")[1] > 8


@pytest.mark.slow
def test_the_learning_rate_ends_with_the_epochs_of_a_small_file(data: dict[str, Path], tmp_path: Path):
    """Scheduled over the 10,000 steps of the recipe, two epochs of some 20 pairs would end in its warm-up."""
    fit("dpo", data["pairs"], tmp_path / "run", "model.layers=1", "schedule=linear", "data.epochs=2", "eval.batches=0", steps=10_000)
    rates = losses(tmp_path / "run", "lr")
    assert 4 <= max(rates) <= 6
    # The last step changes something too: a decay over n steps ends at 1 / n of the peak.
    assert rates[max(rates)] == pytest.approx(1e-2 / max(rates))
    assert max(rates.values()) == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("recipe", "kind", "metric"),
    [("kto", "labeled", "kl"), pytest.param("orpo", "pairs", "log_odds_ratio", marks=pytest.mark.slow)],
)
def test_recipes_run_and_report(data: dict[str, Path], tmp_path: Path, recipe: str, kind: str, metric: str):
    fit(recipe, data[kind], tmp_path / "run", "model.layers=1")
    assert losses(tmp_path / "run")[STEPS] < losses(tmp_path / "run")[1]
    assert np.isfinite(list(losses(tmp_path / "run", metric).values())).all()
    if recipe == "kto":
        assert losses(tmp_path / "run")[1] == pytest.approx(0.5, rel=1e-5)
        assert losses(tmp_path / "run", "kl")[1] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_a_reward_model_keeps_its_backbone_and_scores_from_every_form(data: dict[str, Path], whole: Path, tmp_path: Path):
    """From a language model's weights; as a run, and as a Hub folder of ForSequenceClassification."""
    run = tmp_path / "run"
    output = fit("reward", data["pairs"], run, "model.layers=1", f"init.weights={whole}", "optimizer.learning_rate=3e-3")
    assert "a head of scores takes the place" in output
    assert losses(run, "rewards/accuracy")[STEPS] == 1
    lm = argosy.load(run)
    texts = ["3 3: 3", "3 3: no"]
    scores = lm.rewards(texts)
    assert scores[0] > scores[1]
    lm.save(tmp_path / "hub", format="hub")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    again = argosy.load(tmp_path / "hub")
    np.testing.assert_allclose(again.rewards(texts), scores, rtol=1e-6)
    np.testing.assert_allclose(again.rewards(texts[1:]), scores[1:], rtol=1e-5)
    with pytest.raises(BadInput, match="predicts no tokens"):
        again.generate(["3 3:"])
    with pytest.raises(BadInput, match="no head of scores"):
        argosy.load(whole).rewards(texts)


@pytest.mark.slow
def test_a_reward_model_is_an_adapter_and_a_head(data: dict[str, Path], whole: Path, tmp_path: Path):
    """PEFT's SEQ_CLS: the body has adapters, the head is trained in full. A resume is bit for bit, and every form scores the same."""
    convert(str(whole), tmp_path / "base", "hub", None)
    run, base = tmp_path / "run", tmp_path / "base"
    settings = ["model.layers=1", f"init.weights={base}", "adapter=lora", "adapter.rank=2"]
    assert "drawn from the random seed" in fit("reward", data["pairs"], run, *settings, steps=EVERY)
    fit("reward", data["pairs"], run, *settings)
    fit("reward", data["pairs"], tmp_path / "whole", *settings)
    assert digest(run, STEPS) == digest(tmp_path / "whole", STEPS)
    assert losses(run, "rewards/accuracy")[STEPS] == 1
    texts = ["3 3: 3", "3 3: no", "4"]
    expected = argosy.load(run).rewards(texts)
    assert expected[0] > expected[1]
    adapter_config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (adapter_config["task_type"], adapter_config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    convert(str(run), tmp_path / "merged", "hub", None)
    convert(str(base), tmp_path / "merged too", "hub", None, adapter=str(run / "adapter"))
    forms = [argosy.load(base, adapter=run / "adapter"), *(argosy.load(tmp_path / name) for name in ("merged", "merged too"))]
    for lm in forms:
        np.testing.assert_allclose(lm.rewards(texts), expected, rtol=1e-4, atol=1e-6)
    model = ModelReward.opened(run, RewardSettings(of=str(run)), None)
    np.testing.assert_allclose(model(["3 3:", "3 3:"], [" 3", " no"])[0], expected[:2], rtol=1e-5)
    first = open_model(run).adapted
    assert set(first.whole) == {"head.w"}
    assert np.abs(first.adapters["layers.0.attn.q"].b).max() > 0


def test_process_rewards_train_on_steps(data: dict[str, Path], tmp_path: Path):
    fit("reward", data["steps"], tmp_path / "run", "model.layers=1", "objective=process_reward", "optimizer.learning_rate=3e-3")
    assert losses(tmp_path / "run")[STEPS] < losses(tmp_path / "run")[1]


@pytest.mark.parametrize(
    ("recipe", "kind", "words", "problem", "hint"),
    [
        ("dpo", "labeled", [], "trains on `preference` records, and this data is `kto`", "`chosen` and `rejected`"),
        ("kto", "pairs", [], "trains on `kto` records", "`prompt` and `completion` and `label`"),
        ("tiny", "pairs", [], "trains on single texts, and this data is `preference`", "data.columns.completion=chosen"),
        ("kto", "labeled", ["data.batch=2", "mesh.data=1"], "holds 1 example", "at least 4"),
        ("reward", "pairs", ["objective=next_token", "model.scores=1"], "a reward model predicts no tokens", ""),
        ("dpo", "pairs", ["data.batch=7"], "groups of 2 rows", "multiple of 16"),
    ],
)
def test_data_that_an_objective_cannot_read_is_refused_before_work(
    data: dict[str, Path], tmp_path: Path, recipe: str, kind: str, words: list[str], problem: str, hint: str
):
    with pytest.raises(UserError) as caught:
        fit(recipe, data[kind], tmp_path / "run", "model.layers=1", *words)
    assert problem in str(caught.value)
    assert hint in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_reference_that_is_not_finite_is_an_error(data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "_compiled", lambda *_: lambda leaves, batch: np.full(batch["live"].shape, np.nan))
    with pytest.raises(Exception, match="log-probability that is not finite"):
        fit("dpo", data["pairs"], tmp_path / "run", "model.layers=1", steps=1)
