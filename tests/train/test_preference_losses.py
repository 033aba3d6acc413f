"""Objectives over preferences and labels: by hand, against TRL's own losses, and the same however a batch is split or packed."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, noisy_model

from argosy.adapt.quant import apply_schemes, by_layer
from argosy.adapt.rules import preset_rules, schemes_of
from argosy.adapt.training import train_quantization_aware
from argosy.core.errors import SettingsError
from argosy.core.settings import read_settings, words_layer
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import merge
from argosy.train.objectives.preferences.cpo import CPO, cpo
from argosy.train.objectives.preferences.dpo import DPO, LOSSES, dpo
from argosy.train.objectives.preferences.dpo import LOSSES as DPO_LOSSES
from argosy.train.objectives.preferences.kto import KTO, kto
from argosy.train.objectives.preferences.orpo import ORPO, log_odds, orpo
from argosy.train.objectives.preferences.process_reward import ProcessReward, step_loss
from argosy.train.objectives.preferences.reward import RewardModel, bradley_terry
from argosy.train.objectives.preferences.sequences import SequenceLogps, last, sequences
from argosy.train.objectives.preferences.simpo import SimPO, simpo
from argosy.train.optimizers.sgd import SGD
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, meanings_of, split_trained
from argosy.train.step import make_step

TRL = json.loads((Path(__file__).parents[1] / "goldens" / "preferences.json").read_text(encoding="utf-8"))
# One pair: chosen of 4 tokens, rejected of 2; the reference finds chosen likelier by 1 and rejected by 2.
LOGPS, LENGTHS, REFERENCE = [-6.0, -5.0], [4.0, 2.0], [-5.0, -3.0]


def column(values):
    return jnp.asarray(values, jnp.float32)[:, None]


def one_pair():
    return SequenceLogps(column(LOGPS), column(LENGTHS)), column(REFERENCE), column([1, 1])


def s(x):
    return 1 / (1 + math.exp(-x))


# r(w) = -1, r(l) = -2: the model moved from the reference on both, more on the rejected one.
BY_HAND = {
    "sigmoid": -math.log(s(0.5 * 1)),
    "sigmoid_norm": -math.log(s(0.5 * (-1 / 4 + 2 / 2))),
    "conservative": -0.9 * math.log(s(0.5)) - 0.1 * math.log(s(-0.5)),
    "robust": (-0.9 * math.log(s(0.5)) + 0.1 * math.log(s(-0.5))) / 0.8,
    "ipo": (-1 / 4 + 2 / 2 - 1 / (2 * 0.5)) ** 2,
    "hinge": 1 - 0.5 * 1,
    "apo_zero": 1 - s(-0.5) + s(-1.0),
    "apo_down": s(-0.5) + 1 - s(0.5),
    "sft": 6 / 4,
}


def smoothing(name, rate=0.1):
    return {"label_smoothing": rate} if name in ("conservative", "robust") else {}


@pytest.mark.parametrize("name", DPO_LOSSES)
def test_dpo_losses_by_hand(name):
    objective = DPO(beta=0.5, losses={name: 1.0}, **smoothing(name))
    assert float(dpo(objective, *one_pair()).loss.value()) == pytest.approx(BY_HAND[name], rel=1e-6)
    assert set(BY_HAND) == set(LOSSES) == set(DPO_LOSSES)


def test_a_mixture_is_the_weighted_sum_and_reports_its_parts():
    result = dpo(DPO(beta=0.5, losses={"sigmoid": 0.8, "sft": 0.2}), *one_pair())
    assert float(result.loss.value()) == pytest.approx(0.8 * BY_HAND["sigmoid"] + 0.2 * BY_HAND["sft"], rel=1e-6)
    assert float(result.metrics["loss/sft"].value()) == pytest.approx(BY_HAND["sft"])


def test_metrics_show_rewards_and_log_probabilities():
    metrics = {name: float(mean.value()) for name, mean in dpo(DPO(beta=0.5), *one_pair()).metrics.items()}
    assert metrics == {
        "rewards/chosen": -0.5, "rewards/rejected": -1.0, "rewards/accuracy": 1.0, "rewards/margin": 0.5,
        "logps/chosen": -6.0, "logps/rejected": -5.0,
    }  # fmt: skip


def test_a_near_tie_is_one_half():
    """Two answers whose log-ratios differ by rounding alone, as before the first update, are neither right nor wrong."""
    live = column([1, 1, 1, 1, 1, 1])
    logps = SequenceLogps(column([-301.2001, -80.3, -200.0, -90.0, -200.1, -90.0]), column([9] * 6))
    reference = column([-301.2002, -80.3, -200.0, -90.1, -200.0, -90.0])
    result = dpo(DPO(beta=0.5), logps, reference, live)
    assert float(result.metrics["rewards/accuracy"].value()) == pytest.approx((0.5 + 0 + 0) / 3)
    labeled = kto(KTO(beta=0.5), logps, reference, jnp.float32(0.0), column([1, 1, 1, 1, 0, 0]), live)
    assert float(labeled.metrics["rewards/accuracy"].value()) == pytest.approx((0.5 + 0.5 + 0.5 + 1 + 1 + 0.5) / 6)
    scored = bradley_terry(RewardModel(center=0.1), column([2.0, 2.0, 1.0, 0.9]), column([0] * 4), column([1] * 4))
    assert float(scored.metrics["rewards/accuracy"].value()) == 0.75
    zeros = step_loss(jnp.zeros((1, 2)), jnp.asarray([[1.0, 0.0]]), jnp.ones((1, 2)))
    assert float(zeros.metrics["accuracy"].value()) == 0.5


def test_losses_without_a_reference_by_hand():
    logps, _, live = one_pair()
    chosen_mean, rejected = -6 / 4, -5 / 2
    assert float(simpo(SimPO(beta=2.0, gamma=0.5), logps, live).loss.value()) == pytest.approx(
        -math.log(s(2 * chosen_mean - 2 * rejected - 0.5)), rel=1e-6
    )
    assert float(cpo(CPO(beta=0.5, sft=2.0), logps, live).loss.value()) == pytest.approx(
        -math.log(s(0.5 * (-6 + 5))) + 2 * 6 / 4, rel=1e-6
    )
    odds = [math.exp(p) / (1 - math.exp(p)) for p in (chosen_mean, rejected)]
    expected = 6 / 4 - 0.3 * math.log(s(math.log(odds[0] / odds[1])))
    assert float(orpo(ORPO(beta=0.3), logps, live).loss.value()) == pytest.approx(expected, rel=1e-6)


def test_log_odds_keep_their_digits_and_gradient_at_both_ends():
    for logp in (-1e-5, -0.01, -0.69, -0.7, -5.0, -60.0):
        value, slope = jax.value_and_grad(lambda x: log_odds(x)[0, 0])(column([logp]))
        assert float(value) == pytest.approx(logp - math.log(-math.expm1(logp)), rel=2e-5)
        assert float(slope[0, 0]) == pytest.approx(-1 / math.expm1(logp), rel=2e-3)
    certain = jax.value_and_grad(lambda x: log_odds(x)[0, 0])(column([0.0]))
    assert all(np.isfinite(leaf).all() for leaf in certain)


def test_kto_by_hand():
    """Good answers gain above the divergence z, bad ones below it; a negative estimate counts as 0."""
    logps, live = SequenceLogps(column([-3.0, -4.0]), column([2, 2])), column([1, 1])
    objective = KTO(beta=0.5, desirable_weight=1.5, undesirable_weight=0.7)
    reference, good = column([-5.0, -3.0]), column([1, 0])
    for divergence, z in ((0.4, 0.4), (-0.3, 0.0)):
        result = kto(objective, logps, reference, jnp.float32(divergence), good, live)
        expected = (1.5 * (1 - s(0.5 * (2 - z))) + 0.7 * (1 - s(0.5 * (z + 1)))) / 2
        assert float(result.loss.value()) == pytest.approx(expected, rel=1e-6)
        assert float(result.metrics["kl"].value()) == pytest.approx(z)
        assert float(result.metrics["rewards/chosen"].value()) == 1.0
        assert float(result.metrics["rewards/rejected"].value()) == -0.5


def test_bradley_terry_by_hand():
    result = bradley_terry(RewardModel(center=0.1), column([2.0, 0.5]), column([0.4, 0.4]), column([1, 1]))
    assert float(result.loss.value()) == pytest.approx(-math.log(s(2 - 0.5 - 0.4)) + 0.1 * 2.5**2, rel=1e-6)
    assert float(result.metrics["rewards/accuracy"].value()) == 1.0


def test_process_rewards_by_hand():
    scores, right = jnp.asarray([[0.0, 2.0, -1.0]]), jnp.asarray([[0.0, 1.0, 0.0]])
    result = step_loss(scores, right, jnp.asarray([[0.0, 1.0, 1.0]]))
    assert float(result.loss.value()) == pytest.approx((-math.log(s(2)) - math.log(1 - s(-1))) / 2, rel=1e-6)
    assert float(result.metrics["accuracy"].value()) == 1.0


def test_a_step_whose_score_is_rounding_is_half_right():
    """A score of 1e-7 has the sign that the order of a float32 sum gave it, which differs from machine to machine."""
    ends = jnp.ones((1, 4))
    for score in (0.0, 1e-7, -1e-7, 1e-6, -1e-6):
        scores = jnp.asarray([[score, score, 1.0, -1.0]], jnp.float32)
        for right in (1.0, 0.0):
            result = step_loss(scores, jnp.asarray([[right, right, 1.0, 1.0]]), ends)
            assert float(result.metrics["accuracy"].value()) == (0.5 + 0.5 + 1 + 0) / 4
    result = step_loss(jnp.full((1, 4), 1e-3), jnp.asarray([[1.0, 1.0, 1.0, 0.0]]), ends)
    assert float(result.metrics["accuracy"].value()) == 3 / 4


# ---------------------------------------------------------------- TRL's own functions


def interleave(values):
    """TRL's order, all chosen and then all rejected, to ours."""
    half = len(values) // 2
    return column([value for pair in zip(values[:half], values[half:]) for value in pair])


def of_trl():
    of = TRL["dpo"]
    logps = SequenceLogps(interleave(of["logps"]), interleave(of["lengths"]))
    return logps, interleave(of["reference"]), jnp.ones_like(logps.logps)


@pytest.mark.parametrize("name", list(TRL["dpo"]["losses"]))
def test_dpo_losses_equal_those_of_trl(name):
    objective = DPO(beta=TRL["beta"], losses={name: 1.0}, **smoothing(name, TRL["dpo"]["label_smoothing"]))
    assert float(dpo(objective, *of_trl()).loss.value()) == pytest.approx(TRL["dpo"]["losses"][name], rel=1e-6)


def test_a_mixture_and_its_metrics_equal_those_of_trl():
    result = dpo(DPO(beta=TRL["beta"], losses={"sigmoid": 0.8, "ipo": 0.3}), *of_trl())
    assert float(result.loss.value()) == pytest.approx(TRL["dpo"]["mixture"], rel=1e-6)
    theirs = {"rewards/accuracies": "rewards/accuracy", "rewards/margins": "rewards/margin"}
    for name, value in TRL["dpo"]["metrics"].items():
        assert float(result.metrics[theirs.get(name, name)].value()) == pytest.approx(value, rel=1e-5)


def test_the_losses_without_a_reference_equal_those_of_trl():
    logps, _, live = of_trl()
    of, beta = TRL["without_reference"], TRL["beta"]
    assert float(cpo(CPO(beta=beta, sft=0.0), logps, live).loss.value()) == pytest.approx(of["cpo"], rel=1e-6)
    assert float(simpo(SimPO(beta=beta, gamma=of["gamma"]), logps, live).loss.value()) == pytest.approx(of["simpo"], rel=1e-6)
    metrics = orpo(ORPO(beta=beta), logps, live).metrics
    assert float(metrics["log_odds_ratio"].value()) == pytest.approx(of["log_odds_ratio"], rel=2e-6)
    assert float(metrics["loss/odds_ratio"].value()) == pytest.approx(of["odds_ratio"], rel=2e-6)


def test_kto_equals_that_of_trl():
    of = TRL["kto"]
    other = np.mean(np.subtract(of["other_logps"], of["other_reference"]))
    objective = KTO(beta=TRL["beta"], desirable_weight=of["weights"][0], undesirable_weight=of["weights"][1])
    logps, labels = SequenceLogps(column(of["logps"]), column(of["logps"])), column(of["desirable"])
    result = kto(objective, logps, column(of["reference"]), jnp.float32(other), labels, jnp.ones_like(labels))
    assert float(result.loss.value()) == pytest.approx(of["loss"], rel=1e-6)
    assert float(result.metrics["kl"].value()) == pytest.approx(of["kl"], rel=1e-6)


def test_reward_equals_that_of_trl():
    of = TRL["reward"]
    margin = interleave(of["margin"] * 2)
    result = bradley_terry(RewardModel(center=of["center"]), interleave(of["scores"]), margin, jnp.ones_like(margin))
    assert float(result.loss.value()) == pytest.approx(of["loss"], rel=1e-6)


# ---------------------------------------------------------------- on a model

KEY = jax.random.key(0)
CASE = CASES["llama-plain"]


def batch_of(rows=8, tokens=12, *more):
    """Rows of one sequence each, of uneven lengths."""
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 113, (rows, tokens)).astype(np.int32)
    sizes = rng.integers(5, tokens + 1, rows)
    place = np.arange(tokens)
    columns = {
        "tokens": ids,
        "targets": np.roll(ids, -1, 1),
        "segments": (place < sizes[:, None]).astype(np.int32),
        "mask": ((place >= 2) & (place < sizes[:, None] - 1)).astype(np.float32),
        "live": np.ones((rows, 1), np.float32),
    }
    per_sequence = {"reference": -7.0 * sizes[:, None], "desirable": np.arange(rows)[:, None] // 2 % 2, "margin": sizes[:, None] / 9}
    columns |= {name: per_sequence[name].astype(np.float32) for name in more if name in per_sequence}
    return {name: jnp.asarray(array) for name, array in columns.items()}


def reads(objective):
    return [name for name, field in objective.reads().items() if field.per == "row"]


OBJECTIVES = {
    "dpo": DPO(losses={"sigmoid": 0.7, "ipo": 0.2, "sft": 0.3}), "simpo": SimPO(), "cpo": CPO(), "orpo": ORPO(),
    "kto": KTO(desirable_weight=1.3),
}  # fmt: skip


# The one with a divergence of the whole batch; the others share their sums.
SOME = [name if name == "kto" else pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES]


def update_once(objective, batch, accumulate):
    graph, params, rest = split_trained(noisy_model(CASE, Unroll()))
    rate = Constant(warmup=0).build(10)
    optimizer = SGD(learning_rate=1.0).build(rate, meanings_of(noisy_model(CASE, Unroll())))
    state = TrainState.start(params, rest, optimizer.init(params), 0)
    after, metrics = jax.jit(make_step(graph, objective, optimizer, rate, accumulate=accumulate))(state, batch)
    return {a: np.asarray(after.params[a] - params[a]) for a in params}, metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_accumulation_and_order_change_no_loss_and_no_gradient(name):
    """KTO's divergence is that of the whole batch: a part's own would give another loss."""
    objective = OBJECTIVES[name]
    batch = batch_of(8, 12, *reads(objective))
    changes, metrics = update_once(objective, batch, 1)
    assert name != "kto" or float(metrics["kl"]) > 1
    groups = np.asarray([6, 7, 2, 3, 0, 1, 4, 5])
    again, told_again = update_once(objective, {name: a[groups] for name, a in batch.items()}, 2)
    for metric in metrics:
        assert float(told_again[metric]) == pytest.approx(float(metrics[metric]), rel=2e-5, abs=1e-6), metric
    for address, change in changes.items():
        assert relative(again[address], change) < 2e-4, address


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_an_empty_group_changes_nothing(name):
    """Evaluation fills its last batch up with blank rows."""
    objective, model = OBJECTIVES[name], noisy_model(CASE, Unroll())
    batch = batch_of(4, 12, *reads(objective))
    blank = {name: jnp.concatenate([a, jnp.zeros_like(a[:2])]) for name, a in batch.items()}
    alone, filled = (objective({"model": model}, rows, KEY) for rows in (batch, blank))
    assert relative(filled.loss.value(), alone.loss.value()) < 1e-5
    assert float(filled.loss.weight) == float(alone.loss.weight)
    for metric, mean in alone.metrics.items():
        assert float(filled.metrics[metric].value()) == pytest.approx(float(mean.value()), rel=1e-4, abs=1e-6), metric


def test_a_near_tie_in_bfloat16_is_one_half():
    """Before the first update a reference that another program computed differs by rounding, which is larger in bfloat16."""
    batch, models = batch_of(8, 12), [noisy_model(CASE, run) for run in (Unroll(), Scan())]
    for model in models:
        model.dtype = jnp.dtype("bfloat16")
    logps, reference = (sequences(DPO(), model, batch)[0].logps for model in models)
    assert np.abs(logps - reference).max() > 1e-3
    metrics = DPO()({"model": models[0]}, batch | {"reference": reference}, KEY).metrics
    assert float(metrics["rewards/accuracy"].value()) == 0.5
    # What is no rounding is none in bfloat16 either.
    metrics_apart = DPO()({"model": models[0]}, batch | {"reference": logps.at[::2].add(-1.0)}, KEY).metrics
    assert float(metrics_apart["rewards/accuracy"].value()) == 1.0


@pytest.mark.slow
def test_log_probabilities_of_packed_sequences_are_those_of_each_alone():
    model, batch = noisy_model(CASE, Unroll()), batch_of(4, 12)
    alone, _ = sequences(DPO(), model, batch)
    sizes = np.asarray(batch["segments"]).sum(1)
    packed = {name: np.zeros((2, 24), np.asarray(batch[name]).dtype) for name in ("tokens", "targets", "segments", "mask")}
    for row in range(4):
        at, slot = (0, 1) if row < 2 else (int(sizes[row - 2]), 2)
        here = row % 2, slice(at, at + int(sizes[row]))
        for name in ("tokens", "targets", "mask"):
            packed[name][here] = np.asarray(batch[name])[row, : sizes[row]]
        packed["segments"][here] = slot
    together, _ = sequences(DPO(), model, {name: jnp.asarray(a) for name, a in packed.items()} | {"live": jnp.ones((2, 2))})
    for name in ("logps", "lengths"):
        expected = np.asarray(getattr(alone, name))[:, 0].reshape(2, 2).T
        assert relative(getattr(together, name), expected) < 1e-5, name


@pytest.mark.parametrize("head", ["logits", "blocks", "chunks"])
def test_every_way_over_the_vocabulary_gives_the_same_log_probabilities(head):
    model, batch = noisy_model(CASE, Unroll()), batch_of(4, 12)

    @jax.jit
    def each(model, batch):
        logits = model.unembed(model.hidden(batch["tokens"], CASE.attend(batch["segments"]))[0])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
        return jnp.sum(picked * batch["mask"], 1)

    logps, _ = jax.jit(lambda model, batch: sequences(DPO(head=head, chunk=5), model, batch))(model, batch)
    assert relative(logps.logps[:, 0], each(model, batch)) < 1e-5
    assert logps.lengths[:, 0].tolist() == np.asarray(batch["mask"]).sum(1).tolist()


def test_the_score_of_a_sequence_is_that_of_its_last_token():
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    values = jnp.arange(12.0).reshape(2, 6)
    assert last(values, segments, 2).tolist() == [[1, 4], [11, 0]]


def test_the_online_reference_is_the_frozen_model():
    """The first weights against themselves: rewards of 0, the loss log 2, and no gradient into the reference."""
    model, batch = noisy_model(CASE, Unroll()), batch_of(4)
    result = DPO(reference="online")({"model": model, "reference": model}, batch, KEY)
    assert float(result.loss.value()) == pytest.approx(math.log(2), rel=1e-6)
    assert set(DPO(reference="online").reads()) == set(DPO().reads()) - {"reference"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["losses.sigmiod=1"], "a loss is one of"),
        (["losses.ipo=0"], "above 0"),
        (["label_smoothing=0.1"], "only conservative and robust read it"),
        (["losses.robust=1"], "without it they are the loss sigmoid"),
    ],
)
def test_losses_that_would_be_ignored_are_mistakes(words, problem):
    with pytest.raises(SettingsError, match=problem):
        read_settings(DPO, words_layer(words))


def test_weights_of_losses_are_given_by_name():
    assert read_settings(DPO, words_layer(["losses.ipo=1", "losses.sft=0.2"])).value.losses == {"ipo": 1.0, "sft": 0.2}


def test_objectives_say_what_they_train_on():
    assert {objective.needs.formats for objective in (DPO, SimPO, CPO, ORPO, RewardModel)} == {("preference",)}
    assert (KTO.needs.formats, ProcessReward.needs.formats) == (("kto",), ("stepwise",))


@pytest.mark.parametrize("name", ["orpo", *(pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES if name != "orpo")])
def test_objectives_train_models_that_round(name):
    """Quantization-aware training is part of the model, so an objective does not know of it: finite gradients reach every weight, and
    the loss is that of the model that `argosy quantize` writes."""
    objective, model, rounded = OBJECTIVES[name], noisy_model(CASE, Unroll()), noisy_model(CASE, Unroll())
    schemes = schemes_of(model, preset_rules("w4a8"))
    names = train_quantization_aware(model, schemes)
    apply_schemes(rounded, by_layer(rounded, schemes))
    batch = batch_of(4, 12, *reads(objective))
    graph, params, rest = split_trained(model)

    def total(params):
        return objective({"model": merge(graph, params, rest)}, batch, KEY).loss.total

    loss, grads = jax.value_and_grad(total)(params)
    expected = objective({"model": rounded}, batch, KEY).loss.total
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert all(np.isfinite(g).all() for g in grads.values())
    assert all(np.abs(grads[f"{name}.w"]).max() > 0 for name in names)
