"""Rankers and towers against their equations in numpy; their tables over devices; runs and bundles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Heard, relative

import argosy
from argosy.core.errors import BadInput, Unsupported, UserError
from argosy.core.keymap import KeyMap
from argosy.core.storage import Store
from argosy.data.sources.clicks import Clicks
from argosy.export.bundle import Bundle
from argosy.models.parts.weight import abstract, logical, merge, parameter_count, split, variables
from argosy.models.ranker import RankerConfig
from argosy.models.two_tower import TwoTowerConfig
from argosy.observe.flops import contraction_flops
from argosy.observe.metrics import read
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.rules import DEFAULT, shardings
from argosy.parallel.scope import scope
from argosy.train.objectives.clicks.rank import Rank, auc
from argosy.train.objectives.clicks.retrieve import Retrieve
from argosy.weights.build import random_model

CASES = {f"{kind.__name__}-{name}": config for kind in (RankerConfig, TwoTowerConfig) for name, config in kind.examples().items()}
each = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


def inputs_of(config, rows=5):
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, size, rows) for size in config.id_spaces], 1).astype(np.int32)
    return jnp.asarray(rng.normal(size=(rows, config.numbers)), jnp.float32), jnp.asarray(ids)


def weights_of(model):
    return {name: np.asarray(value, np.float64) for name, value in split(model)[1].items()}


def dense(weights, path, x):
    """The layers at a path: products, biases, and a ReLU between."""
    count = sum(name.startswith(f"{path}.") and name.endswith(".w") for name in weights)
    for i in range(count):
        x = x @ weights[f"{path}.{i}.w"] + weights[f"{path}.{i}.b"]
        x = np.maximum(x, 0) if i + 1 < count else x
    return x


def by_hand(config, w, numbers, ids):
    """The equations of the modules' docstrings, row by row."""
    scores = []
    for x, categories in zip(np.asarray(numbers, np.float64), np.asarray(ids), strict=True):
        if isinstance(config, RankerConfig):
            starts = np.concatenate([[0], np.cumsum(config.tables)])
            vectors = [dense(w, "bottom", x), *(w["embed.w"][starts[f] + i] for f, i in enumerate(categories))]
            pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
            scores.append(dense(w, "top", np.concatenate([vectors[0], pairs]))[0])
        else:
            user = dense(w, "user", np.concatenate([w["embed.w"][categories[0]], x]))
            item = dense(w, "item", w["embed.w"][config.users + categories[1]])
            scores.append(user @ item / np.linalg.norm(user) / np.linalg.norm(item) / config.temperature)
    return np.asarray(scores)


@each
def test_scores_are_those_of_the_equations(config):
    model = random_model(config, 3).module
    numbers, ids = inputs_of(config)
    assert relative(np.asarray(model(numbers, ids)), by_hand(config, weights_of(model), numbers, ids)) < 1e-5


@each
def test_counts_and_names_are_those_of_what_is_built(config):
    model = config.build()
    assert parameter_count(abstract(model)) == config.parameters()
    assert set(KeyMap(*config.hub_rows()).paths) == set(variables(model))
    numbers, ids = inputs_of(config, 1)
    model = random_model(config, 0).module
    trace = jax.make_jaxpr(lambda numbers: model(numbers, ids))(numbers)
    counted = contraction_flops(trace.jaxpr)
    # The cosine of two vectors is a sum of products, not a contraction.
    assert counted == config.flops(1) - (config.mixing_flops(1) if isinstance(config, TwoTowerConfig) else 0)
    with pytest.raises(Unsupported, match="no architecture"):
        config.to_hub()


EVEN = [
    RankerConfig(numbers=3, tables=(16, 8), width=8),
    TwoTowerConfig(numbers=3, users=16, items=8, width=8, output=8),
]


@pytest.mark.parametrize("config", EVEN)
def test_tables_are_split_by_rows_over_a_mesh_and_score_the_same(config):
    model = random_model(config, 0).module
    numbers, ids = inputs_of(config, 8)
    expected = np.asarray(model(numbers, ids))
    mesh = MeshSettings(data=2, tensor=4).build()
    graph, weights = split(model)
    places = shardings(logical(model), {address: value.shape for address, value in weights.items()}, DEFAULT, mesh)
    placed = {address: jax.device_put(value, places[address]) for address, value in weights.items()}
    table = placed["embed.w"]
    assert table.sharding.shard_shape(table.shape) == (table.shape[0] // 4, table.shape[1])
    with scope(mesh):
        scores = jax.jit(lambda w, n, i: merge(graph, w)(n, i))(placed, numbers, ids)
    assert relative(np.asarray(scores), expected) < 1e-5


def test_auc_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    scores, label = rng.integers(0, 5, 40).astype(np.float32), rng.integers(0, 2, 40).astype(np.float32)
    pairs = [(a > b) + 0.5 * (a == b) for a, y in zip(scores, label) for b, z in zip(scores, label) if y > z]
    assert float(auc(jnp.asarray(scores), jnp.asarray(label)).value()) == pytest.approx(np.mean(pairs))


def test_retrieval_counts_an_item_once_and_no_users_own_item_as_a_negative():
    config = TwoTowerConfig(numbers=4, users=6, items=5, width=6, output=4)
    model = random_model(config, 0).module
    rows = Clicks().rows(sequence=1, vocab=config.id_spaces, seed=0)
    batch = {name: jnp.asarray(value) for name, value in rows.gather(np.arange(12)).items()}
    batch["label"] = jnp.asarray([1.0, 0] * 6)
    loss = Retrieve()({"model": model}, batch, None)
    users = np.asarray(model.users(batch["numbers"], batch["categories"][:, 0]), np.float64)
    every = np.asarray(model.items(jnp.arange(5)), np.float64)
    there = sorted(set(batch["categories"][:, 1].tolist()))
    each_loss, ranks = [], []
    for row in range(0, 12, 2):
        scores = {i: users[row] @ every[i] / config.temperature for i in there}
        own_item = int(batch["categories"][row, 1])
        each_loss.append(np.log(sum(np.exp(s) for s in scores.values())) - scores[own_item])
        ranks.append(sum(int((batch["categories"][:, 1] == i).sum()) for i in there if scores[i] > scores[own_item]))
    assert float(loss.loss.value()) == pytest.approx(np.mean(each_loss), rel=1e-4)
    assert float(loss.metrics["recall@1"].value()) == pytest.approx(np.mean([rank < 1 for rank in ranks]))
    assert float(loss.metrics["recall@10"].value()) == pytest.approx(np.mean([rank < 10 for rank in ranks]))


def test_clicks_follow_from_their_number_and_come_as_often_as_they_say():
    rows = Clicks().rows(sequence=1, vocab=(50, 30), seed=3)
    some = rows.gather(np.arange(20_000))
    again = rows.gather(np.array([19_999, 7]))
    for name, value in again.items():
        np.testing.assert_array_equal(value, some[name][[19_999, 7]], err_msg=name)
    assert abs(some["label"].mean() - some["probability"].mean()) < 4 * np.sqrt(0.25 / 20_000)
    high = some["probability"] > 0.8
    assert abs(some["label"][high].mean() - some["probability"][high].mean()) < 4 * np.sqrt(0.16 / high.sum())
    assert some["categories"].min() == 0
    assert some["categories"].max(0).tolist() == [49, 29]
    assert np.abs(some["numbers"].mean(0)).max() < 0.04
    assert np.abs(some["numbers"].std(0) - 1).max() < 0.04
    # Held out rows are others; so are those of another seed.
    for other in ({"seed": 3, "held_out": True}, {"seed": 4}):
        there = Clicks().rows(sequence=1, vocab=(50, 30), **other).gather(np.arange(9))
        assert not np.array_equal(there["numbers"], some["numbers"][:9])
    with pytest.raises(BadInput, match="clicks are of users on items"):
        Clicks().rows(sequence=1, vocab=258, seed=0)


SMALL = ["model.tables=[40,20]", "data.batch=512", "eval.batches=4", "eval.every=1000", "checkpoint.every=40", "mesh.data=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranker") / "run"
    argosy.fit("ranker", *SMALL, f"dir={folder}", view=Heard(), steps=160)
    return folder


def test_a_ranker_nears_the_best_there_is_and_resumes_bit_for_bit(run, tmp_path):
    last = [line for line in read(Store(run)) if "eval_loss" in line][-1]
    assert 0.9 < last["eval_best_auc"] < 0.96
    assert last["eval_auc"] > 0.85
    assert last["eval_best_loss"] < last["eval_loss"] < 2 * last["eval_best_loss"]
    for steps in (80, 160):
        argosy.fit("ranker", *SMALL, f"dir={tmp_path / 'run'}", "schedule=constant", "schedule.warmup=10", view=Heard(), steps=steps)
    argosy.fit("ranker", *SMALL, f"dir={tmp_path / 'whole'}", "schedule=constant", "schedule.warmup=10", view=Heard(), steps=160)
    resumed, two = (argosy.load(tmp_path / name) for name in ("run", "whole"))
    for (name, a), b in zip(split(resumed.module)[1].items(), split(two.module)[1].values(), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


def test_a_ranker_is_a_bundle_with_named_inputs(run, tmp_path):
    lm = argosy.load(run)
    with pytest.raises(BadInput, match="ranks and predicts no tokens"):
        lm.logits([[1]])
    with pytest.raises(BadInput, match="reads numbers and categories"):
        lm.export(tmp_path / "no", signature="embed")
    with pytest.raises(BadInput, match="has no tower of users"):
        lm.export(tmp_path / "no", signature="user")
    lm.export(tmp_path / "ranker" / "1", platforms=["cpu"])
    bundle = Bundle.open(tmp_path / "ranker" / "1")
    numbers, ids = inputs_of(lm.config)
    outputs = bundle.run({"numbers": np.asarray(numbers), "categories": np.asarray(ids)})
    expected = np.asarray(lm.module(numbers, ids))
    np.testing.assert_array_equal(outputs["scores"], expected)
    np.testing.assert_allclose(outputs["probabilities"], 1 / (1 + np.exp(-expected)), rtol=1e-6)
    ids = np.asarray(ids).copy()
    ids[0, 1] = lm.config.id_spaces[1]
    with pytest.raises(BadInput, match=f"input `categories` has {ids[0, 1]}"):
        bundle.run({"numbers": np.asarray(numbers), "categories": ids})


def test_towers_are_bundles_of_their_own(tmp_path):
    config = TwoTowerConfig.examples()["small"]
    from argosy.export.model import export_model
    from argosy.infer.lm import LM

    lm = LM(**vars(random_model(config, 0)))
    export_model(lm, tmp_path / "b", signature=["user", "item", "rank"], platforms=["cpu"])
    bundle, (numbers, ids) = Bundle.open(tmp_path / "b"), map(np.asarray, inputs_of(config))
    users = bundle.run({"numbers": numbers, "users": ids[:, 0]})["embedding"]
    items = bundle.run({"items": ids[:, 1]}, "item")["embedding"]
    scores = bundle.run({"numbers": numbers, "categories": ids}, "rank")["scores"]
    with pytest.raises(BadInput, match=f"input `items` has -1, and this signature takes 0 to {config.items - 1}"):
        bundle.run({"items": [-1]}, "item")
    np.testing.assert_allclose((users * items).sum(1) / config.temperature, scores, rtol=1e-4, atol=1e-5)


def test_models_and_objectives_that_do_not_go_together_are_refused(tmp_path):
    with pytest.raises(UserError, match="reads numbers and categories, and the objective trains models that read tokens"):
        argosy.fit("ranker", "objective=next_token", f"dir={tmp_path / 'a'}", steps=1)
    with pytest.raises(UserError, match="reads tokens, and the objective trains models that read numbers"):
        argosy.fit("tiny", "objective=rank", f"dir={tmp_path / 'a'}", steps=1)


def test_objectives_read_what_clicks_hold():
    fields = Clicks().rows(sequence=1, vocab=(3, 2), seed=0).fields
    assert set(Rank().reads()) | set(Retrieve().reads()) == set(fields)
