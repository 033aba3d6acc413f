"""Distillation on a small model: against TRL's loss and its gradient, the same however logits are held and batches are split."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, in_float64, noisy_model

from argosy.core.errors import SettingsError
from argosy.core.settings import read_settings, words_layer
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import abstract, merge, put, split
from argosy.ops.divergence import resize_vocab, top
from argosy.run.frozen.role import Role
from argosy.train.objectives.distillation.distill import Distill
from argosy.train.objectives.distillation.distributions import of_logits
from argosy.train.objectives.distillation.gkd import GKD
from argosy.train.objectives.distillation.layers import HIDDEN
from argosy.train.objectives.distillation.projection import attach
from argosy.train.optimizers.sgd import SGD
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, meanings_of, split_trained
from argosy.train.step import make_step

TRL = json.loads((Path(__file__).parents[1] / "goldens" / "distill.json").read_text(encoding="utf-8"))
STUDENT, TEACHER = CASES["llama-plain"], CASES["gemma-2"]
KEY = jax.random.key(0)


def objective_of(**settings):
    return Distill(teacher="none", **settings)


def of_trl(beta):
    """TRL's beta of 0 and 1 are the divergences at the ends."""
    ends = {0.0: {"divergence": "forward"}, 1.0: {"divergence": "reverse"}}
    return ends.get(beta, {"divergence": "jsd", "beta": beta})


@pytest.mark.parametrize("case", TRL["jsd"], ids=lambda case: f"{case['beta']}-{case['temperature']}")
def test_divergences_and_their_gradients_equal_those_of_trl(case):
    """TRL means over targets, which its mask leaves, and does not multiply by the square of the temperature."""
    with jax.enable_x64(True):
        settings = objective_of(temperature=case["temperature"], **of_trl(case["beta"]))
        teacher, targets, mask = jnp.asarray(TRL["teacher"]), jnp.asarray(TRL["labels"], jnp.int32), jnp.asarray(TRL["mask"], float)

        def loss(student):
            terms = of_logits(settings, student, teacher, targets)
            return jnp.sum(terms["divergence"] * mask) / jnp.sum(mask)

        value, slope = jax.value_and_grad(loss)(jnp.asarray(TRL["student"]))
        assert float(value) == pytest.approx(case["loss"], rel=1e-9)
        np.testing.assert_allclose(slope, case["gradient"], rtol=1e-9, atol=1e-12)


class Given:
    """A model whose hidden states are given logits."""

    def __init__(self, logits):
        self.logits, self.config = logits, CASES["llama-plain"]

    def hidden(self, tokens, attend):
        return self.logits, None, {}

    def unembed(self, x):
        return x


@pytest.mark.parametrize("case", [case for case in TRL["jsd"] if case["temperature"] == 1], ids=lambda case: f"{case['beta']}")
@pytest.mark.parametrize("head", ["logits", "chunks"])
def test_the_loss_of_on_policy_distillation_equals_that_of_trl(case, head):
    """Over answers, which the mask leaves; TRL's divisor is their number of tokens too."""
    with jax.enable_x64(True):
        objective = GKD(teacher="none", head=head, chunk=3, **of_trl(case["beta"]))
        labels = jnp.asarray(TRL["labels"], jnp.int32)
        batch = {"tokens": labels, "targets": labels, "segments": jnp.ones_like(labels), "mask": jnp.asarray(TRL["mask"], float)}

        def loss(student):
            models = {"model": Given(student), "teacher": Given(jnp.asarray(TRL["teacher"]))}
            return objective(models, batch, KEY).loss.value()

        value, slope = jax.value_and_grad(loss)(jnp.asarray(TRL["student"]))
        assert float(value) == pytest.approx(case["loss"], rel=1e-9)
        np.testing.assert_allclose(slope, case["gradient"], rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- on a model


def batch_of(rows=8, tokens=12, vocab=113):
    rng = np.random.default_rng(5)
    ids = rng.integers(0, vocab, (rows, tokens)).astype(np.int32)
    sizes = rng.integers(5, tokens + 1, rows)
    place = np.arange(tokens)
    columns = {
        "tokens": ids,
        "targets": np.roll(ids, -1, 1),
        "segments": (place < sizes[:, None]).astype(np.int32),
        "mask": ((place >= 2) & (place < sizes[:, None] - 1)).astype(np.float32),
    }
    return {name: jnp.asarray(array) for name, array in columns.items()}


def models():
    return {"model": noisy_model(STUDENT, Unroll()), "teacher": noisy_model(TEACHER, Scan())}


def cached_tokens(batch, k, temperature=1.0):
    """What is cached of a teacher."""
    teacher = models()["teacher"]
    logits = teacher.unembed(teacher.hidden(batch["tokens"], TEACHER.attend(batch["segments"]))[0])
    candidates = top(resize_vocab(logits, STUDENT.vocab), k, temperature)
    return dict(zip(("teacher_ids", "teacher_logps", "teacher_rest"), candidates))


def by_hand(objective, batch):
    """The loss in float64 from the logits of both models, target by target."""
    both = models()
    s, t = (
        np.asarray(m.unembed(m.hidden(batch["tokens"], c.attend(batch["segments"]))[0]), np.float64)
        for m, c in ((both["model"], STUDENT), (both["teacher"], TEACHER))
    )

    def soft(z, temperature):
        p = np.exp(z / temperature - (z / temperature).max())
        return p / p.sum()

    total, count, kl = 0.0, 0, 0.0
    for row, place in np.argwhere(np.asarray(batch["mask"]) > 0):
        p, q = soft(t[row, place], objective.temperature), soft(s[row, place], objective.temperature)
        nll = -np.log(soft(s[row, place], 1.0)[int(batch["targets"][row, place])])
        divergence = (p * np.log(p / q)).sum()
        total += (1 - objective.cross_entropy) * objective.temperature**2 * divergence + objective.cross_entropy * nll
        count, kl = count + 1, kl + divergence
    return total / count, kl / count


@pytest.mark.slow
@pytest.mark.parametrize("head", ["logits", "chunks"])
def test_the_loss_and_its_metrics_are_those_of_the_formula_where_the_mask_is_1(head):
    """The teacher is of another family, size and layout. What the mask leaves out may be anything."""
    objective, batch = objective_of(temperature=2.0, cross_entropy=0.3, head=head, chunk=7), batch_of()
    result = objective(models(), batch, KEY)
    loss, kl = by_hand(objective, batch)
    assert float(result.loss.value()) == pytest.approx(loss, rel=1e-5)
    assert float(result.metrics["kl"].value()) == pytest.approx(kl, rel=1e-5)
    assert float(result.loss.weight) == float(jnp.sum(batch["mask"]))
    other = batch | {"targets": jnp.where(batch["mask"] > 0, batch["targets"], 7)}
    assert float(objective(models(), other, KEY).loss.value()) == float(result.loss.value())


def test_a_model_is_its_own_best_student():
    model = noisy_model(STUDENT, Unroll())
    result = objective_of(cross_entropy=0.0)({"model": model, "teacher": model}, batch_of(), KEY)
    assert float(result.loss.value()) == pytest.approx(0, abs=1e-6)
    assert float(result.metrics["agreement"].value()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["jsd", "forward", "reverse"])
def test_chunks_give_the_gradient_of_whole_logits_in_float64(divergence):
    with jax.enable_x64(True):
        graph, params, rest = split_trained(in_float64(STUDENT, Unroll()))
        teacher, batch = in_float64(TEACHER, Unroll()), batch_of(4)

        def slope(**settings):
            def loss(params):
                model = merge(graph, params, rest)
                model.dtype = jnp.float64
                objective = objective_of(divergence=divergence, temperature=1.5, **settings)
                return objective({"model": model, "teacher": teacher}, batch, KEY).loss.total

            return jax.grad(loss)(params)

        whole, parts = slope(head="logits"), slope(head="chunks", chunk=5)
        for address, grad in whole.items():
            assert grad.dtype == jnp.float64
            assert relative(parts[address], grad) < 1e-10, address


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cosine", "mse"])
def test_hidden_states_by_hand(kind):
    """Added with its weight, over the targets that count; the teacher as wide as the student."""
    student, teacher, batch = noisy_model(STUDENT, Unroll()), noisy_model(CASES["llama-tied-biased"], Unroll()), batch_of(4)
    ours, theirs = (np.asarray(m.hidden(batch["tokens"], STUDENT.attend(batch["segments"]))[0], np.float64) for m in (student, teacher))
    each = []
    for row, place in np.argwhere(np.asarray(batch["mask"]) > 0):
        a, b = ours[row, place], theirs[row, place]
        each.append(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b) if kind == "cosine" else ((a - b) ** 2).mean())
    models = {"model": student, "teacher": teacher}
    result, without = objective_of(hidden=kind, hidden_weight=3.0)(models, batch, KEY), objective_of()(models, batch, KEY)
    assert float(result.metrics["hidden"].value()) == pytest.approx(np.mean(each), rel=1e-5)
    assert float(result.loss.value() - without.loss.value()) == pytest.approx(3 * np.mean(each), rel=1e-4)
    slope = jax.grad(lambda x: jnp.sum(HIDDEN[kind](x, jnp.zeros_like(x))))(jnp.zeros((1, 1, 4)))
    assert np.isfinite(slope).all()


def outputs_by_hand(model, case, batch):
    """Of unrolled layers, called one after the other."""
    attend = model.layers.with_angles(case.attend(batch["segments"]))
    x, out = model.embedded(batch["tokens"], attend), []
    for i, layer in enumerate(model.layers.plan):
        x, _, _ = getattr(model.layers, str(i))(x, layer.each, None, attend)
        out.append(np.asarray(x, np.float64))
    return out


@pytest.mark.parametrize("kind", ["cosine", "mse"])
@pytest.mark.parametrize("run", [Unroll, Scan])
def test_outputs_of_pairs_of_layers_by_hand(kind, run):
    """The mean of two pairs, of a student and a teacher with as many features; scanned layers are as unrolled ones."""
    other, batch = CASES["llama-tied-biased"], batch_of(4)
    ours = outputs_by_hand(noisy_model(STUDENT, Unroll()), STUDENT, batch)
    theirs = outputs_by_hand(noisy_model(other, Unroll()), other, batch)
    pairs = {0: len(theirs) - 1, len(ours) - 1: 0}
    assert len(pairs) == 2
    each = []
    for row, place in np.argwhere(np.asarray(batch["mask"]) > 0):
        for i, j in pairs.items():
            a, b = ours[i][row, place], theirs[j][row, place]
            each.append(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b) if kind == "cosine" else ((a - b) ** 2).mean())
    models = {"model": noisy_model(STUDENT, run()), "teacher": noisy_model(other, run())}
    result = objective_of(hidden=kind, layers=pairs)(models, batch, KEY)
    assert float(result.metrics["hidden"].value()) == pytest.approx(np.mean(each), rel=1e-4)
    without = objective_of()(models, batch, KEY)
    assert float(result.loss.value() - without.loss.value()) == pytest.approx(np.mean(each), rel=1e-3)
    assert result.metrics.keys() - {"hidden"} == without.metrics.keys()


@pytest.mark.parametrize("layers", [{}, {0: 1}], ids=["last", "pair"])
def test_hidden_states_of_another_width_by_hand(layers):
    """44 features here and 42 there, through a projection that learns; a teacher as wide gets none."""
    other, batch = CASES["gpt2-untied"], batch_of(4)
    student, teacher = noisy_model(STUDENT, Unroll()), noisy_model(other, Unroll())
    objective = objective_of(hidden="mse", layers=layers)
    attach(student, objective, {"teacher": Role(split(teacher)[0], abstract(teacher))})
    projection = np.random.default_rng(2).normal(0, 0.2, (44, 42))
    put(student, {"projection.w": jnp.asarray(projection, jnp.float32)})
    if layers:
        ours, theirs = (outputs_by_hand(m, c, batch)[i] for m, c, i in ((student, STUDENT, 0), (teacher, other, 1)))
    else:
        ours, theirs = (np.asarray(m.hidden(batch["tokens"], STUDENT.attend(batch["segments"]))[0]) for m in (student, teacher))
    expected = (((ours @ projection - theirs) ** 2).mean(-1))[np.asarray(batch["mask"]) > 0].mean()
    graph, params, rest = split_trained(student)

    def loss(params):
        return objective({"model": merge(graph, params, rest), "teacher": teacher}, batch, KEY).metrics["hidden"].value()

    value, slopes = jax.value_and_grad(loss)(params)
    assert float(value) == pytest.approx(expected, rel=1e-4)
    assert float(jnp.max(jnp.abs(slopes["projection.w"]))) > 0
    equal = noisy_model(STUDENT, Unroll())
    attach(equal, objective, {"teacher": Role(split(equal)[0], abstract(equal))})
    assert not hasattr(equal, "projection")


def test_only_layers_up_to_the_compared_one_learn_from_it():
    graph, params, rest = split_trained(noisy_model(STUDENT, Unroll()))
    batch, teacher = batch_of(4), noisy_model(CASES["llama-tied-biased"], Scan())

    def loss(params):
        models = {"model": merge(graph, params, rest), "teacher": teacher}
        return objective_of(hidden="mse", layers={0: 0})(models, batch, KEY).metrics["hidden"].total

    slope = {a: float(jnp.max(jnp.abs(g))) for a, g in jax.grad(loss)(params).items()}
    assert max(v for a, v in slope.items() if a.startswith("layers.0.")) > 0
    assert max(v for a, v in slope.items() if a.startswith("layers.1.")) == 0


@pytest.mark.slow
def test_the_teacher_has_no_gradient():
    batch, student = batch_of(4), models()["model"]
    graph, leaves = split(models()["teacher"])

    def loss(leaves):
        return objective_of(head="logits")({"model": student, "teacher": merge(graph, leaves)}, batch, KEY).loss.total

    assert all(float(jnp.max(jnp.abs(g))) == 0 for g in jax.grad(loss)(leaves).values())


@pytest.mark.slow
def test_all_cached_tokens_are_the_whole_distribution_and_fewer_are_less():
    batch = batch_of()
    whole = objective_of(temperature=2.0)(models(), batch, KEY)
    divergences = {}
    for k in (2, 16, STUDENT.vocab - 1):
        objective = objective_of(temperature=2.0, logits="cached", top=k)
        assert set(objective.reads()) - set(batch) == set(cached_tokens(batch, k))
        for head in ("logits", "chunks"):
            variant = objective.model_copy(update={"head": head, "chunk": 7})
            result = variant({"model": models()["model"]}, batch | cached_tokens(batch, k, 2.0), KEY)
            divergences.setdefault(k, []).append(float(result.metrics["kl"].value()))
            for name in ("agreement", "cross_entropy"):
                assert float(result.metrics[name].value()) == pytest.approx(float(whole.metrics[name].value()), rel=1e-6), name
    for each in divergences.values():
        assert each[0] == pytest.approx(each[1], rel=1e-5)
    kl = float(whole.metrics["kl"].value())
    assert divergences[2][0] < divergences[16][0] < kl
    assert divergences[STUDENT.vocab - 1][0] == pytest.approx(kl, rel=1e-5)


def update_once(objective, batch, accumulate):
    networks = models()
    graph, params, rest = split_trained(networks["model"])
    rate = Constant(warmup=0).build(10)
    optimizer = SGD(learning_rate=1.0).build(rate, meanings_of(networks["model"]))
    state = TrainState.start(params, rest, optimizer.init(params), 0)
    theirs, leaves = split(networks["teacher"])
    step = make_step(graph, objective, optimizer, rate, accumulate=accumulate, roles={"teacher": theirs})
    after, metrics = jax.jit(step)(state, batch, {"teacher": leaves})
    return {a: np.asarray(after.params[a] - params[a]) for a in params}, metrics


@pytest.mark.slow
def test_accumulation_changes_no_loss_and_no_gradient():
    objective, batch = objective_of(), batch_of()
    (changes, metrics), (again, told_again) = update_once(objective, batch, 1), update_once(objective, batch, 4)
    assert float(told_again["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    for address, change in changes.items():
        assert relative(again[address], change) < 1e-4, address


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["divergence=reverse", "beta=0.3"], "only jsd reads it"),
        (["top=8"], "logits=cached reads it"),
        (["divergence=jsd", "beta=0"], "beta"),
        (["cross_entropy=1"], "cross_entropy"),
        (["temperature=0"], "temperature"),
        (["hidden_weight=2"], "hidden=cosine or mse reads it"),
        (["hidden=cosine", "logits=cached"], "keeps no hidden states"),
        (["layers.0=1"], "hidden=cosine or mse says how"),
    ],
)
def test_settings_that_would_be_ignored_are_mistakes(words, problem):
    with pytest.raises(SettingsError, match=problem):
        read_settings(Distill, words_layer(["teacher=x", *words]))
