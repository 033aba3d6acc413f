"""Dropout of adapters: what it computes, that keys differ by layer and not by layout, and that without it nothing is traced."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from laws.families import CASES

from argosy.adapt.lora import LoRA, dropping
from argosy.adapt.settings import Dora, Lora
from argosy.core.errors import Unsupported
from argosy.models.parts.einsum import Einsum, Route
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, merge, put, split
from argosy.train import step as steps
from argosy.train.objectives.next_token import NextToken
from argosy.train.optimizers.adam import AdamW
from argosy.train.state import TrainState, meanings_of, split_trained

CONFIG = CASES["llama-plain"]
P = 0.25


def mirror(width: int, kind: type[LoRA] = LoRA) -> Any:
    """A contraction whose weight is 0 and whose adapter returns its input."""
    layer = nnx.Module()
    layer.up = kind(Einsum("BTD,DF->BTF", {"D": width, "F": width}), width, float(width), dropout=P)
    eye = jnp.eye(width)
    put(layer, {"up.of.w": jnp.zeros_like(eye), "up.a": eye, "up.b": eye})
    return layer


def test_the_adapter_sees_its_input_with_a_share_dropped_and_the_rest_larger():
    """A mirror shows the mask: each number is dropped by itself, and the mean stays what it is."""
    layer, x = mirror(64), jnp.arange(1.0, 1 + 16 * 64).reshape(2, 8, 64)
    np.testing.assert_array_equal(layer.up(x), x)
    dropping(layer, jax.random.key(0))
    seen = np.asarray(layer.up(x) / x)
    assert set(np.unique(seen.round(5))) == {0.0, np.float32(round(1 / (1 - P), 5))}
    assert np.mean(seen == 0) == pytest.approx(P, abs=4 * (P * (1 - P) / seen.size) ** 0.5)
    assert len({tuple(row) for row in (seen == 0).reshape(16, -1).tolist()}) == 16
    ours = np.asarray(layer.up(x))
    np.testing.assert_array_equal(layer.up(x), ours)
    dropping(layer, jax.random.key(1))
    assert (np.asarray(layer.up(x)) != ours).any()


def test_the_weight_below_sees_its_whole_input():
    layer, x = mirror(8), jnp.ones((1, 4, 8))
    put(layer, {"up.b": jnp.zeros((8, 8)), "up.of.w": jnp.eye(8)})
    dropping(layer, jax.random.key(0))
    np.testing.assert_array_equal(layer.up(x), x)


def test_rows_of_experts_are_dropped_too():
    layer = nnx.Module()
    layer.up = LoRA(Einsum("XD,EDM->XM", {"E": 2, "D": 8, "M": 8}), 8, 8.0, dropout=P)
    eyes = jnp.stack([jnp.eye(8)] * 2)
    put(layer, {"up.of.w": jnp.zeros_like(eyes), "up.a": eyes, "up.b": eyes})
    dropping(layer, jax.random.key(0))
    y = layer.up(jnp.ones((6, 8)), Route(jnp.array([2, 4]), jnp.array([0, 0, 1, 1, 1, 1])))
    assert set(np.unique(np.asarray(y).round(5))) == {0.0, np.float32(round(1 / (1 - P), 5))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "remat"),
    [
        (Lora(rank=2, dropout=P), "none"),
        pytest.param(Lora(rank=2, dropout=P), "full", marks=pytest.mark.slow),
        pytest.param(Dora(rank=2, dropout=P), "none", marks=pytest.mark.slow),
    ],
    ids=["lora", "recomputed", "dora"],
)
def test_layers_drop_differently_and_layouts_alike(settings: Any, remat: Any):
    """The loss of a step and its gradients, of a model whose adapters do something."""
    results, keys = {}, {}
    for run in (Unroll(remat), Scan(remat)):
        graph, params, rest = weights(settings, run)
        model = merge(graph, params, rest)
        dropping(model, jax.random.key(5))
        names = layer_addresses(model)
        for path, module in nnx.iter_modules(model):
            if isinstance(module, LoRA):
                layer_keys = jax.random.key_data(module.key[...]).reshape(-1, 2)
                for name, key in zip(names(".".join([*map(str, path), "a"])), layer_keys, strict=True):
                    keys.setdefault(run.stacked, {})[name] = tuple(key.tolist())
        results[run.stacked] = step_once(graph, params, rest)
    assert keys[False] == keys[True]
    assert len(set(keys[True].values())) == len(keys[True]) > 2 * CONFIG.layers
    assert results[False][1] == pytest.approx(results[True][1], rel=1e-5)
    assert results[False][1] != pytest.approx(step_once(*weights(settings.model_copy(update={"dropout": 0.0}), Unroll()))[1], rel=1e-3)


def weights(settings: Any, run: Any) -> tuple[Any, Any, Any]:
    """The graph of a model with adapters, what is trained and the rest."""
    model = CONFIG.build(run)
    settings.put_on(model)
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    graph, params, rest = split_trained(model)
    # B is drawn per layer too, so that both layouts have the same numbers.
    return graph, {a: w + 0.1 if a.endswith(".b") else w for a, w in params.items()}, rest


def make(graph: Any, params: Any, rest: Any, **options: Any) -> tuple[Any, TrainState]:
    model = merge(graph, params, rest)
    optimizer = AdamW(learning_rate=1e-2).build(lambda _: 1.0, meanings_of(model))
    step = steps.make_step(graph, NextToken(), optimizer, lambda _: jnp.asarray(1.0), **options)
    return step, TrainState.start(params, rest, optimizer.init(params), 0)


def batch() -> dict[str, Any]:
    tokens = jax.random.randint(jax.random.key(3), (4, 8), 0, CONFIG.vocab)
    ones = jnp.ones((4, 8), jnp.int32)
    return {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1), "segments": ones, "mask": ones.astype(jnp.float32)}


def step_once(graph: Any, params: Any, rest: Any, **options: Any) -> tuple[TrainState, float]:
    step, state = make(graph, params, rest, **options)
    state, metrics = jax.jit(step)(state, batch())
    return state, float(metrics["loss"] + metrics["grad_norm"])


@pytest.mark.slow
def test_every_step_and_every_part_drops_anew():
    """With a learning rate of nothing, the loss of the same batch differs between steps, and between its two equal parts."""
    graph, params, rest = weights(Lora(rank=2, dropout=P), Unroll())
    model = merge(graph, params, rest)
    optimizer = AdamW(learning_rate=1e-30).build(lambda _: 1.0, meanings_of(model))
    run = jax.jit(steps.make_step(graph, NextToken(), optimizer, lambda _: jnp.asarray(1.0)))
    state = TrainState.start(params, rest, optimizer.init(params), 0)
    losses = []
    for _ in range(3):
        state, metrics = run(state, batch())
        losses.append(float(metrics["loss"]))
    assert len(set(losses)) == 3
    evaluate = steps.make_evaluation(graph, NextToken())
    assert float(evaluate(state, batch())["loss"].value()) == float(evaluate(state, batch())["loss"].value())
    single = {name: a[:1] for name, a in batch().items()}
    twice = {name: jnp.concatenate([a, a]) for name, a in single.items()}
    parts = make(graph, params, rest, accumulate=2)
    alone = make(graph, params, rest)
    of_parts, of_one = (jax.jit(step)(state, rows)[1]["loss"] for (step, state), rows in ((parts, twice), (alone, single)))
    assert abs(float(of_parts - of_one)) > 1e-4


@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=["unroll", "scan"])
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_without_dropout_the_program_is_the_one_that_knows_none(monkeypatch: pytest.MonkeyPatch, run: Any, accumulate: int):
    def traced(dropout: float) -> str:
        step, state = make(*weights(Lora(rank=2, dropout=dropout), run), accumulate=accumulate)
        return jax.jit(step).lower(state, batch()).as_text()

    with_none = traced(0.0)
    assert traced(P) != with_none
    monkeypatch.setattr(steps, "dropping", lambda model, key: None)
    assert traced(0.0) == with_none == traced(P)


def test_it_is_refused_where_other_equations_contract_the_weight():
    config = next(config for name, config in CASES.items() if name.startswith("deepseek"))
    with pytest.raises(Unsupported, match="other equations contract"):
        Lora(rank=2, dropout=P).put_on(config.build())
    Lora(rank=2, dropout=P, where=r"layers\..*\.(mlp\.)(gate|up|down)").put_on(config.build())


def test_a_lookup_drops_nothing():
    model = CONFIG.build()
    model.embed = LoRA(model.embed, 2, 2.0, dropout=P)
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    put(model, {"embed.b": jnp.ones_like(split(model)[1]["embed.b"])})
    before = model.embed.take(jnp.arange(4))
    dropping(model, jax.random.key(0))
    np.testing.assert_array_equal(model.embed.take(jnp.arange(4)), before)
