"""Distillation of relations within layers: the loss by NumPy, of models of other widths, heads and families, and what is refused."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws.families import CASES, noisy_model

from argosy.core.errors import BadInput, SettingsError
from argosy.core.settings import read_settings, words_layer
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.watch import KEYS, QUERIES, VALUES, WatchedAttend
from argosy.models.parts.weight import merge
from argosy.run.frozen.related import check_relations, layer_shapes
from argosy.train.objectives.distillation.distill import Distill
from argosy.train.state import split_trained

KEY = jax.random.key(0)
# 4 heads of 14 over 2 of keys here, 3 heads of 14 there.
STUDENT, TEACHER = CASES["llama-plain"], CASES["gpt2-untied"]
ALL = {"qq": 1.0, "kk": 0.5, "vv": 2.0, "qk": 0.25}


def objective_of(**settings):
    return Distill(teacher="none", **settings)


def batch_of(rows=2, tokens=12):
    """Rows of two sequences and padding; a part of the targets counts."""
    rng, place = np.random.default_rng(5), np.arange(tokens)
    segments = np.where(place < 6, 1, np.where(place < 10, 2, 0))[None].repeat(rows, 0)
    columns = {
        "tokens": rng.integers(0, 113, (rows, tokens)).astype(np.int32),
        "targets": rng.integers(0, 113, (rows, tokens)).astype(np.int32),
        "segments": segments.astype(np.int32),
        "mask": ((rng.random((rows, tokens)) < 0.7) & (segments > 0)).astype(np.float32),
    }
    return {name: jnp.asarray(array) for name, array in columns.items()}


def layer_watches(config, batch):
    model = noisy_model(config, Unroll())
    aux = model.hidden(batch["tokens"], WatchedAttend(Packed(batch["segments"]), heads=True))[2]
    return [{name: np.asarray(a, np.float64) for name, a in layer.items()} for layer in model.layers.layer_aux(aux)[0]]


def relation(x, y, heads, row, t, first):
    """The relation of one token, by relation head: the features of all heads one after the other, cut anew."""
    x, y = (a[row].reshape(a.shape[1], heads, -1) for a in (x, y))
    scores = np.stack([x[t, a] @ y[first : t + 1, a].T / x.shape[-1] ** 0.5 for a in range(heads)])
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    return probs / probs.sum(-1, keepdims=True)


def by_hand(name, pairs, heads, batch):
    ours, theirs = layer_watches(STUDENT, batch), layer_watches(TEACHER, batch)
    # The student's two key heads serve two query heads each.
    shared = {QUERIES: 1, KEYS: 2, VALUES: 2}
    left_kind, other = {"qq": (QUERIES, QUERIES), "kk": (KEYS, KEYS), "vv": (VALUES, VALUES), "qk": (QUERIES, KEYS)}[name]
    segments, each = np.asarray(batch["segments"]), []
    for row, t in np.argwhere(np.asarray(batch["mask"]) > 0):
        first = int(np.argmax(segments[row] == segments[row, t]))
        for i, j in pairs:
            keys = ours[i][other].repeat(shared[other], 2) if name == "qk" else ours[i][other]
            s = relation(ours[i][left_kind], keys, heads, row, t, first)
            p = relation(theirs[j][left_kind], theirs[j][other], heads, row, t, first)
            each.append((p * np.log(p / s)).sum(-1).mean())
    return np.mean(each)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [{}, {0: 2, 2: 1}], ids=["last", "pairs"])
def test_relations_of_models_of_other_widths_and_heads_by_hand(layers):
    """14 heads cut through those of both models; sequences of a row see themselves alone; the mean is over targets that count."""
    batch, models = batch_of(), {"model": noisy_model(STUDENT, Unroll()), "teacher": noisy_model(TEACHER, Scan())}
    result = objective_of(relations=ALL, relation_heads=14, layers=layers)(models, batch, KEY)
    without, total = objective_of()(models, batch, KEY), 0.0
    for name, weight in ALL.items():
        expected = by_hand(name, list(layers.items()) or [(STUDENT.layers - 1, TEACHER.layers - 1)], 14, batch)
        assert expected > 1e-3
        assert float(result.metrics[f"relations/{name}"].value()) == pytest.approx(expected, rel=1e-4), name
        total += weight * expected
    assert float(result.loss.value() - without.loss.value()) == pytest.approx(total, rel=1e-3)
    assert {name for name in result.metrics if not name.startswith("relations/")} == without.metrics.keys()


def test_a_model_is_its_own_best_student():
    model = noisy_model(STUDENT, Unroll())
    result = objective_of(relations=ALL, cross_entropy=0.0)({"model": model, "teacher": model}, batch_of(), KEY)
    assert float(result.loss.value()) == pytest.approx(0, abs=1e-6)


def test_what_is_not_of_the_sequence_does_not_matter():
    """Padding, and the other sequence of the row."""
    batch, models = batch_of(), {"model": noisy_model(STUDENT, Scan()), "teacher": noisy_model(TEACHER, Unroll())}
    batch["mask"] = jnp.where(batch["segments"] == 2, batch["mask"], 0.0)
    objective = objective_of(relations=ALL, relation_heads=2)
    other = batch | {"tokens": jnp.where(batch["segments"] == 2, batch["tokens"], 7)}
    ours, again = (float(objective(models, of, KEY).loss.value()) for of in (batch, other))
    assert again == pytest.approx(ours, rel=1e-6)


@pytest.mark.parametrize("run", [Unroll(), Scan("full")], ids=["unroll", "scan"])
def test_gradients_are_finite_and_only_weights_before_the_compared_layers_attention_learn(run):
    graph, params, rest = split_trained(noisy_model(STUDENT, run))
    batch, teacher = batch_of(), noisy_model(TEACHER, Scan())
    objective = objective_of(relations={"qq": 1.0, "vv": 1.0}, relation_heads=2, layers={1: 0})

    def loss(params):
        result = objective({"model": merge(graph, params, rest), "teacher": teacher}, batch, KEY)
        return sum(result.metrics[f"relations/{name}"].total for name in objective.relations)

    slopes = {a: np.asarray(g) for a, g in jax.grad(loss)(params).items()}
    assert all(np.isfinite(g).all() for g in slopes.values())
    if isinstance(run, Unroll):
        learns = {a for a, g in slopes.items() if np.abs(g).max() > 0}
        assert {"layers.0.mlp.down.w", "layers.1.attn.q.w", "layers.1.attn.v.w"} <= learns
        assert not [a for a in learns if a.startswith(("layers.2.", "layers.1.attn.k.", "layers.1.attn.o.", "layers.1.mlp"))]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["relations.qv=1"], "qv"),
        (["relations.qq=0"], "a number above 0"),
        (["relations.qq=-1"], "a number above 0"),
        (["relation_heads=4"], "without relations"),
        (["relations.qq=1", "relation_heads=0"], "relation_heads"),
        (["relations.qq=1", "logits=cached"], "keeps no layers"),
    ],
)
def test_settings_that_would_be_ignored_are_mistakes(words, problem):
    with pytest.raises(SettingsError, match=problem):
        read_settings(Distill, words_layer(["teacher=x", *words]))


def run_of(model, **settings):
    return SimpleNamespace(model=model, objective=objective_of(**settings))


def test_features_that_cannot_be_cut_are_refused_with_what_can():
    with pytest.raises(BadInput, match="cannot be cut from the 42 features of qq in layer 2 of the teacher") as caught:
        check_relations(run_of(STUDENT, relations={"qq": 1.0}), TEACHER, "here")
    # 56 features here, 42 there.
    assert caught.value.hint == "objective.relation_heads=2; any divisor of 14 will do"
    check_relations(run_of(STUDENT, relations={"qq": 1.0}, relation_heads=14), TEACHER, "here")


def test_layers_without_attention_are_refused():
    mixed = CASES["qwen3_next-plain"]
    with pytest.raises(BadInput, match="layer 0 of the teacher has no attention"):
        check_relations(run_of(STUDENT, relations={"qq": 1.0}, layers={1: 0}), mixed, "here")
    check_relations(run_of(STUDENT, relations={"qq": 1.0}), mixed, "here")


@pytest.mark.parametrize("name", ["deepseek-3", "gemma-3", "llama4-interleaved"])
def test_layers_of_every_kind_have_relations(name):
    """Latent attention tells keys and values of each head."""
    shapes = layer_shapes(CASES[name])
    assert len(shapes) == CASES[name].layers
    assert all(watched[QUERIES].shape[:2] == (1, 1) and {QUERIES, KEYS, VALUES} == watched.keys() for watched in shapes)
